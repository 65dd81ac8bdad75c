"""The Python API from a request to a plan: what is assumed and said, the baseline, and the way out of no fit."""

from dataclasses import replace

import pytest

from costmodels.vocabulary.choices import Precision
from planner.api import find_plan
from planner.errors import InfeasibleError, InputError
from planner.layout.layout import Pins
from planner.plan.schema import Plan
from planner.request import Request, default_batch

A100 = "dgx-a100-80gb"


def plan_of(request: Request) -> Plan:
    return find_plan(request).plan


def test_what_is_assumed_is_said() -> None:
    answer = find_plan(Request("llama-tiny", 6))
    assert answer.plan.hardware == "dgx-h100-80gb"
    training = answer.plan.training
    # Near to 0.5 Mi tokens, and for each GPU a small number times a power of two.
    assert training.global_batch_size == 6 * 11 * 128
    assert abs(training.global_batch_size * 64 - 2**19) <= 2**19 / 16
    assert [note.partition(":")[0] for note in answer.notes] == [
        "no --hardware given",
        "no --global-batch given",
    ]
    assert not answer.interrupted


def test_nothing_is_said_where_nothing_is_assumed() -> None:
    answer = find_plan(Request("llama-tiny", 4, hardware=A100, global_batch_size=8, seq_len=32, may_idle=False))
    assert answer.notes == ()
    assert (answer.plan.training.seq_len, answer.plan.training.global_batch_size) == (32, 8)


def test_the_plain_baseline_is_beside_the_plan_and_never_faster() -> None:
    plan = plan_of(Request("llama3-8b", 16, hardware=A100, seq_len=2048, global_batch_size=64))
    assert plan.search is not None
    assert plan.prediction is not None
    baseline = plan.search.baseline
    assert baseline is not None
    assert baseline.label == "plain FSDP"
    assert (baseline.mesh.dp_shard, baseline.zero_stage, baseline.fits) == (16, 3, True)
    assert plan.prediction.step_time_s <= baseline.step_time_s * (1 + 1e-6)


def test_the_baseline_is_there_whatever_is_pinned() -> None:
    plan = plan_of(Request("llama3-8b", 8, hardware=A100, seq_len=2048, global_batch_size=8, pins=Pins(tp=8)))
    assert plan.mesh.tp == 8
    assert plan.search is not None
    assert plan.search.baseline is not None
    assert plan.search.baseline.mesh.dp_shard == 8


@pytest.mark.parametrize(("num_devices", "batch"), [(1, 8), (8, 4)])
def test_there_is_no_baseline_where_it_cannot_be(num_devices: int, batch: int) -> None:
    plan = plan_of(Request("llama-tiny", num_devices, hardware=A100, global_batch_size=batch))
    assert plan.search is not None
    assert plan.search.baseline is None


def test_a_baseline_that_does_not_fit_is_shown_as_such() -> None:
    # Logits of 65,536 tokens are too large for one GPU; split over the vocabulary or the sequence they are not.
    plan = plan_of(Request("llama3-8b", 8, hardware=A100, seq_len=65536, global_batch_size=8))
    assert plan.search is not None
    assert plan.search.baseline is not None
    assert not plan.search.baseline.fits
    assert plan.prediction is not None
    assert max(plan.prediction.peak_memory_bytes) <= plan.prediction.memory_capacity_bytes


def test_runners_up_are_other_layouts_in_order() -> None:
    plan = plan_of(Request("llama3-8b", 16, hardware=A100, seq_len=2048, global_batch_size=64, num_runners_up=4))
    assert plan.search is not None
    assert plan.prediction is not None
    rows = plan.search.runners_up
    assert [row.label for row in rows] == ["#2", "#3", "#4", "#5"]
    times = [row.step_time_s for row in rows]
    assert times == sorted(times)
    assert plan.prediction.step_time_s <= times[0] * (1 + 1e-6)
    layouts = [row.model_copy(update={"label": "", "step_time_s": 0.0, "peak_memory_bytes": 0}) for row in rows]
    assert len(set(map(repr, layouts))) == len(layouts)


def test_the_prediction_follows_its_definitions() -> None:
    plan = plan_of(Request("llama3-8b", 16, hardware=A100, seq_len=2048, global_batch_size=64))
    prediction = plan.prediction
    assert prediction is not None
    tokens = 64 * 2048
    assert prediction.tokens_per_s_per_gpu == pytest.approx(tokens / prediction.step_time_s / 16)
    # Forward and backward of every weight: 6 FLOPs a parameter and token, but for the embedding; and attention.
    per_token = 6 * (plan.model.num_params - 128256 * 4096) + 12 * 32 * 2048 * 4096
    assert prediction.model_flops_per_gpu_per_s == pytest.approx(
        per_token * tokens / prediction.step_time_s / 16, rel=0.01
    )
    assert prediction.mfu == pytest.approx(prediction.model_flops_per_gpu_per_s / 312e12)
    assert sum(prediction.breakdown_s.values()) == pytest.approx(prediction.step_time_s)
    for rows, peak in zip(prediction.memory_breakdown_bytes, prediction.peak_memory_bytes, strict=True):
        assert sum(rows.values()) == pytest.approx(peak, abs=len(rows))


def test_a_request_that_cannot_be_is_refused() -> None:
    for request in (
        Request("llama-tiny", 0),
        Request("llama-tiny", 8, global_batch_size=0),
        Request("llama-tiny", 8, hardware="dgx-2-v100-32gb"),
        Request("llama-tiny", 8, hardware="a100", precision=Precision.FP8),
    ):
        with pytest.raises(InputError):
            find_plan(request)


def hint_of(request: Request) -> str:
    with pytest.raises(InfeasibleError) as caught:
        find_plan(request)
    return caught.value.hint


def small(pins: Pins) -> Request:
    """Llama 3 8B, which 8 GPUs can train where its states are split."""
    return Request("llama3-8b", 8, hardware=A100, seq_len=2048, global_batch_size=8, pins=pins)


def test_one_pin_too_many_is_named() -> None:
    assert hint_of(small(Pins(zero=0, tp=1, pp=1, cp=1))) == "drop --tp: without that pin a plan fits"
    assert plan_of(small(Pins(zero=0, pp=1, cp=1))).mesh.tp > 1


def test_several_pins_too_many_are_said_to_be() -> None:
    # Eight whole replicas, said three times over: free of any one of these pins, the other two still say it.
    pins = Pins(zero=0, dp=8, dp_replicate=8)
    assert hint_of(small(pins)) == "drop the pins dp=8, zero=0, dp_replicate=8: without all of them a plan fits"
    assert plan_of(small(Pins())).prediction is not None


def test_more_gpus_are_named_for_the_batch_that_was_asked_for() -> None:
    """Twelve times the batch was asked for, though the same two sequences fit."""
    request = Request("llama3-70b", 2, hardware=A100, seq_len=2048, global_batch_size=2)
    options = hint_of(request).partition(":")[0].split()
    assert options[:2] == ["use", "--gpus"]
    assert options[3:] == []
    assert plan_of(replace(request, num_devices=int(options[2]))).prediction is not None


@pytest.mark.parametrize(
    ("num_params", "seq_len", "num_devices", "batch"),
    [
        (124e6, 1024, 8, 512),  # 0.5 Mi tokens
        (2.7e9, 2048, 64, 512),  # 1 Mi
        (8.03e9, 8192, 64, 256),  # 2 Mi
        (70e9, 8192, 512, 512),  # 4 Mi
        (405e9, 8192, 16384, 2048),  # 16 Mi: what Meta trained it with on as many
        (70e9, 8192, 1024, 512),  # fewer than GPUs, four for each node
        (70e9, 8192, 131072, 16384),  # one for each node, more than the 512 of 4 Mi
        (70e9, 8192, 500, 500),  # the nearest multiple of 500, not the next
        (70e9, 8192, 1009, 1009),  # no whole nodes: one for each GPU
        (63_600, 448, 8, 144 * 8),  # not 146, which is 2 * 73
        (63_600, 448, 1, 1152),  # not 1171, a prime
        (8e9, 10**7, 8, 1),  # a sequence longer than the batch, which the node shares
    ],
)
def test_a_default_batch_is_what_models_of_that_size_are_trained_with(
    num_params: float, seq_len: int, num_devices: int, batch: int
) -> None:
    found, said = default_batch(int(num_params), seq_len, num_devices, 8)
    assert found == batch
    assert said.startswith(
        f"no --global-batch given: {batch} sequences of {seq_len} tokens ({batch * seq_len:,} tokens)"
    )


def test_a_batch_that_is_larger_for_the_gpus_sake_is_said_to_be() -> None:
    _, said = default_batch(70_000_000_000, 8192, 131072, 8)
    assert said.endswith(
        "for each of 16384 nodes to have one; models of 70 B parameters are trained with about 4,194,304"
    )
    _, said = default_batch(70_000_000_000, 8192, 512, 8)
    assert "to have one" not in said


def test_a_batch_that_the_gpus_do_not_divide_is_said_to_leave_out_plain_fsdp() -> None:
    answer = find_plan(Request("llama-tiny", 4, hardware=A100, global_batch_size=6, seq_len=32, may_idle=False))
    (note,) = answer.notes
    assert note.startswith("4 GPUs do not divide 6 sequences")
    assert answer.plan.search is not None
    assert answer.plan.search.baseline is None
