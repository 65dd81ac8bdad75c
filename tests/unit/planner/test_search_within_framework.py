"""``--framework NAME``: one meaning wherever it is taken. What is found can be exported to it, and pins are obeyed or
refused with the reason and the way out.
"""

from dataclasses import replace
from functools import cache

import pytest

import planner
from costmodels.vocabulary.choices import Offload, Precision, Recompute
from costmodels.vocabulary.schedules import ScheduleName
from planner.api import Answer, find_plan
from planner.api.alternatives import Verdict
from planner.api.compare import compare
from planner.api.explain import Wishes, explain
from planner.api.fit import find_fit
from planner.errors import InputError, NoLayoutError
from planner.formats.registry import target_called
from planner.formats.settings import Job, layout_of
from planner.formats.target import written
from planner.layout.layout import NO_PINS, Pins
from planner.model_file import family_config_of
from planner.models.catalog import find_preset
from planner.request import Request

TINY = Request("llama-tiny", 8, hardware="dgx-a100-80gb", seq_len=64, global_batch_size=32)
TARGETS = {
    "megatron-core": "megatron", "megatron-lm": "megatron", "nemo": "nemo", "deepspeed": "deepspeed",
    "torchtitan": "torchtitan", "accelerate": "accelerate", "nanotron": "nanotron", "maxtext": "maxtext",
}  # fmt: skip


@cache
def found(framework: str, model: str = "llama-tiny", pins: Pins = NO_PINS) -> Answer:
    return find_plan(replace(TINY, model=model, framework=framework, pins=pins))


def exported(framework: str, answer: Answer) -> str:
    """The framework's own config; NotExpressibleError where it has none for the plan."""
    plan = answer.plan
    preset = find_preset(plan.model.source)
    job = Job(
        plan, layout_of(plan), family_config_of(plan.model.source), None if preset is None else preset.name,
        "plan.json", 8,
    )  # fmt: skip
    return written(target_called(TARGETS[framework]), job).text


@pytest.mark.parametrize("framework", TARGETS)
@pytest.mark.parametrize("pins", [Pins(), Pins(pp=2), Pins(tp=2), Pins(recompute=Recompute.FULL)], ids=Pins.describe)
def test_what_is_found_can_be_exported_or_is_refused_as_its_exporter_would(framework: str, pins: Pins) -> None:
    can = target_called(TARGETS[framework]).abilities
    assert can is not None
    beyond = (pins.pp is not None and "pp" not in can.axes) or (pins.tp is not None and "tp" not in can.axes)
    if beyond:
        with pytest.raises(NoLayoutError, match="it has no pp"):
            found(framework, pins=pins)
        return
    answer = found(framework, pins=pins)
    assert exported(framework, answer)
    assert answer.plan.framework == framework
    assert any(f"searched within what {framework} can run" in note for note in answer.notes)


def test_every_runner_up_keeps_the_rules_too() -> None:
    """Of a framework without pipelines none has them, plain FSDP and the one with room included."""
    search = found("deepspeed").plan.search
    assert search is not None
    shown = [*search.runners_up, *(each for each in (search.baseline, search.roomier) if each is not None)]
    assert shown
    assert {(each.mesh.pp, each.offload) for each in shown} == {(1, Offload.NONE)}
    assert all(each.recompute in (Recompute.NONE, Recompute.FULL) for each in shown)
    replicas = found("ddp").plan.search
    assert replicas is not None
    assert replicas.baseline is None  # plain FSDP is nothing that it runs
    assert {each.mesh.dp_shard for each in replicas.runners_up} <= {1}


@pytest.mark.parametrize(
    ("framework", "pins", "reason", "way_out"),
    [
        ("megatron-core", Pins(pp=2, schedule=ScheduleName.GPIPE), "schedule GPipe is not one of its own", "1F1B"),
        ("megatron-core", Pins(pp=2, zero=2), "not run under a pipeline", "--zero 1 or --pp 1"),
        ("deepspeed", Pins(tp=2, sequence_parallel=True), "always without", "--no-sequence-parallel"),
        ("ddp", Pins(tp=2), "it has no tp", "--tp 1"),
        ("ddp", Pins(zero=3), "ZeRO stage 3 is not one of its own (none)", "without --zero"),
        ("accelerate", Pins(recompute=Recompute.SELECTIVE), "recomputation selective is not one", "--recompute none"),
        ("nanotron", Pins(zero=2), "ZeRO stage 2 is not one", "--zero 0"),
        ("zero-infinity", Pins(offload=Offload.NONE), "offload of optimiser states none", "--offload cpu"),
        ("megatron-core", Pins(offload_activations=True, pp=1, tp=1), "activations in host memory", "without"),
    ],
)  # fmt: skip
def test_a_pin_that_it_cannot_run_is_refused_with_the_way_out(
    framework: str, pins: Pins, reason: str, way_out: str
) -> None:
    with pytest.raises(InputError) as refused:
        found(framework, pins=pins)
    assert refused.value.exit_code == 2
    assert f"{framework} can run none of" in refused.value.message
    assert reason in refused.value.message
    assert way_out in refused.value.hint


def test_a_precision_that_it_has_not_is_refused() -> None:
    with pytest.raises(NoLayoutError, match="precision fp8 is not one of its own"):
        find_plan(replace(TINY, framework="deepspeed", hardware="dgx-h100-80gb", precision=Precision.FP8))


def test_a_search_and_compare_find_the_same() -> None:
    rows = {row.framework: row for row in compare(replace(TINY, num_devices=4)).rows}
    for framework in ("megatron-core", "nanotron", "fairscale"):
        plan = find_plan(replace(TINY, num_devices=4, framework=framework, may_idle=False)).plan
        assert plan.prediction is not None
        assert rows[framework].step_time_s == plan.prediction.step_time_s
        row = rows[framework].plan
        assert row is not None
        assert row.mesh == plan.mesh


def test_stages_are_those_that_the_framework_cuts() -> None:
    """Also where another cut would be faster: llama2-7b in 17 and 15 blocks."""
    asked = Request("llama2-7b", 8, hardware="dgx-a100-80gb", global_batch_size=32, framework="nanotron")
    own = find_plan(replace(asked, pins=Pins(pp=2, tp=2, recompute=Recompute.FULL, micro_batch=1))).plan
    assert layout_of(own).stage_blocks == (17, 15)
    even = layout_of(found("maxtext", pins=Pins(pp=2)).plan).stage_blocks
    assert even == (2, 2)


def test_stages_that_the_framework_does_not_cut_are_refused() -> None:
    """The head weighs more than a block of this model: nanotron leaves the last of four stages without one."""
    with pytest.raises(NoLayoutError, match="it cuts this model by itself, and not into 4 stages"):
        found("nanotron", pins=Pins(pp=4))


def test_of_another_framework_whose_rules_are_not_known_all_is_searched_and_said() -> None:
    pins = Pins(tp=2, pp=2)
    assert any("what internevo can run is not known here" in note for note in found("internevo", pins=pins).notes)
    assert not any("searched within" in note for note in found("planner", pins=pins).notes)


def test_fit_speaks_of_what_the_framework_can_run() -> None:
    """Twelve bytes and more a parameter, whole on each device, do not fit where shards do."""
    asked = Request("gpt3-2.7b", 8, hardware="dgx-2-v100-32gb", precision=Precision.FP16, pins=Pins(tp=1, pp=1, cp=1))
    whole, sharded = find_fit(replace(asked, framework="ddp")), find_fit(replace(asked, framework="fsdp"))
    assert sharded.fits
    assert not whole.fits
    assert whole.least_devices is None
    assert "dp_replicate=8" in whole.layout
    with pytest.raises(NoLayoutError, match="ddp can run none"):
        find_fit(replace(asked, framework="ddp", pins=Pins(tp=2)))


def test_why_not_what_the_framework_cannot_run() -> None:
    plan = found("megatron-core").plan
    asked = Wishes(why_not=Pins(pp=2, zero=3))
    alternative = explain(plan, None, asked).why_not
    assert alternative is not None
    assert alternative.verdict is Verdict.BREAKS_A_RULE
    assert "Megatron-FSDP" in alternative.reason


def test_an_estimate_says_what_the_framework_cannot_run() -> None:
    from planner.api import price_plan

    plan = find_plan(replace(TINY, pins=Pins(pp=2, tp=2, schedule=ScheduleName.GPIPE))).plan
    notes = " ".join(price_plan(plan, framework="deepspeed").notes)
    assert "deepspeed itself cannot run this plan: it has no pp" in notes
    assert "cannot run" not in " ".join(price_plan(plan).notes)
    assert planner.estimate(plan, framework="deepspeed").framework == "deepspeed"


PUBLISHED = {
    "GPT-3 175B, 1,024 A100": ("gpt3-175b", 1024, "dgx-a100-80gb", 1536, 2048,
                               Pins(tp=8, pp=8, dp=16, micro_batch=1, recompute=Recompute.FULL)),
    "MT-NLG 530B, 2,240 A100": ("megatron-529.6b", 2240, "dgx-a100-80gb", 1920, 2048,
                                Pins(tp=8, pp=35, dp=8, micro_batch=1, recompute=Recompute.FULL)),
    "Llama 3 405B, 8,192 H100": ("llama3-405b", 8192, "dgx-h100-80gb", 2048, 8192,
                                 Pins(tp=8, pp=16, dp=64, cp=1, micro_batch=1)),
    "Mixtral 8x22B, 128 H100": ("mixtral-8x22b", 128, "dgx-h100-80gb", 256, 4096,
                                Pins(tp=2, pp=8, ep=4, zero=1, micro_batch=1,
                                     schedule=ScheduleName.INTERLEAVED_1F1B, virtual_stages=7)),
    "Mixtral 8x22B, folded": ("mixtral-8x22b", 128, "dgx-h100-80gb", 256, 4096,
                              Pins(tp=2, pp=8, ep=8, etp=1, zero=1, micro_batch=1,
                                   schedule=ScheduleName.INTERLEAVED_1F1B, virtual_stages=7)),
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_layouts_that_megatron_trained_with_are_priced_as_its_own(name: str) -> None:
    model, gpus, hardware, batch, seq_len, pins = PUBLISHED[name]
    plan = find_plan(
        Request(model, gpus, hardware=hardware, seq_len=seq_len, global_batch_size=batch, pins=pins,
                framework="megatron-core", memory_risk=0.5, may_idle=False)
    ).plan  # fmt: skip
    mesh, prediction = plan.mesh, plan.prediction
    assert prediction is not None
    assert (mesh.tp, mesh.pp) == (pins.tp, pins.pp)
    assert prediction.step_time_low_s is not None
    assert 0.2 < prediction.mfu < 0.7
