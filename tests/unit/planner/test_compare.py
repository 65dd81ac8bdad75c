"""``planner.api.compare``: every framework has a plan within its rules, or a reason; and the user's own beside them."""

from dataclasses import replace
from functools import cache

import pytest

from costmodels.vocabulary.choices import Optimizer, Precision, Recompute
from planner.api import find_plan
from planner.api.compare import FRAMEWORKS, Comparison, Config, Row, compare
from planner.errors import InputError
from planner.formats.registry import all_targets
from planner.formats.settings import Job, layout_of
from planner.formats.target import refused
from planner.layout.deadline import Deadline
from planner.layout.layout import Pins
from planner.model_file import family_config_of
from planner.render_compare import _way_out
from planner.request import Request

# As INTERFACE.md lists them.
NAMED = (
    "planner", "megatron-core", "megatron-lm", "nemo", "deepspeed", "zero-infinity", "torchtitan", "fsdp", "ddp",
    "horovod", "fairscale", "nanotron", "maxtext", "nnscaler", "accelerate", "llm-foundry",
)  # fmt: skip
TINY = Request("llama-tiny", 4, hardware="dgx-a100-80gb", seq_len=64, global_batch_size=32)
DEEPSPEED = """{"train_batch_size": 32, "train_micro_batch_size_per_gpu": 2, "bf16": {"enabled": true},
"zero_optimization": {"stage": 2}, "optimizer": {"type": "AdamW"}}"""


@cache
def tiny() -> Comparison:
    """All frameworks, and pins of a user."""
    return compare(TINY, Pins(tp=2, pp=2))


def test_every_framework_has_a_plan_or_a_reason() -> None:
    assert sorted(FRAMEWORKS) == sorted(NAMED)
    assert sorted(row.framework for row in tiny().rows) == sorted(NAMED)
    for row in tiny().rows:
        assert (row.plan is None) == bool(row.reason), row.framework
        assert row.source
        assert row.plan is None or row.plan.framework == row.framework
    times = [row.step_time_s for row in tiny().rows]
    assert times == sorted(times)


def test_a_target_can_write_the_plan_of_its_framework() -> None:
    """The exporters judge: they refuse what their format cannot say."""
    plans = {row.framework: row.plan for row in tiny().rows}
    asked = [target for target in all_targets() if target.abilities is not None]
    assert len(asked) == 7
    for target in asked:
        framework = "megatron-core" if target.name == "megatron" else target.name
        plan = plans[framework]
        assert plan is not None
        shape = family_config_of("llama-tiny")
        job = Job(plan, layout_of(plan), shape, "llama-tiny", "plan.json", 4)
        assert refused(target, job) == [], framework


@pytest.mark.parametrize(
    ("framework", "ways"),
    [
        ("ddp", [Pins(zero=0)]),
        ("horovod", [Pins(zero=0)]),
        ("fsdp", [Pins(zero=0), Pins(zero=2), Pins(zero=3)]),
        ("llm-foundry", [Pins(zero=0), Pins(zero=2), Pins(zero=3)]),
    ],
)
def test_the_plan_is_the_best_of_what_pins_say(framework: str, ways: list[Pins]) -> None:
    """What these run can be said by pins of ``planner search``: data parallelism with some ZeRO stages."""
    found = next(row for row in tiny().rows if row.framework == framework)
    steps: list[float] = []
    for pins in ways:
        for mode in (Recompute.NONE, Recompute.FULL):
            chosen = Pins(tp=1, pp=1, cp=1, ep=1, zero=pins.zero, recompute=mode)
            asked = replace(TINY, pins=chosen, framework=framework, may_idle=False)
            prediction = find_plan(asked).plan.prediction
            assert prediction is not None
            steps.append(prediction.step_time_s)
    assert found.step_time_s == pytest.approx(min(steps), rel=0.011)  # plans within 1 % are alike, the simplest wins


def test_what_the_fastest_plan_has_and_a_framework_lacks_is_said() -> None:
    """Only megatron and its kin, torchtitan, maxtext, nanotron and ours have pipelines or tensor parallelism."""
    found = compare(
        Request("llama-tiny", 4, hardware="dgx-a100-80gb", seq_len=64, global_batch_size=1)
    )  # one sequence: no data parallelism
    lacks = {row.framework: " ".join(row.lacks) for row in found.rows}
    fastest = found.rows[0].plan
    assert fastest is not None
    assert fastest.mesh.dp_replicate * fastest.mesh.dp_shard == 1
    for framework in ("ddp", "horovod", "fsdp", "llm-foundry"):
        row = next(row for row in found.rows if row.framework == framework)
        assert row.plan is None
        assert f"{framework} can run none of" in row.reason
        assert "it has no" in lacks[framework]


def test_pins_of_a_user_are_priced_as_search_prices_them() -> None:
    mine = tiny().mine
    assert mine is not None
    asked = replace(TINY, pins=Pins(tp=2, pp=2), may_idle=False)
    assert find_plan(asked).plan.prediction == (mine.plan and mine.plan.prediction)
    assert mine.plan is not None
    assert (mine.plan.mesh.tp, mine.plan.mesh.pp) == (2, 2)


def test_a_config_of_a_user_sets_the_training_of_all() -> None:
    found = compare(Request("llama-tiny", 4, hardware="dgx-a100-80gb", seq_len=64), Config("ds.json", DEEPSPEED))
    assert found.mine is not None
    assert found.mine.plan is not None
    assert (found.mine.plan.zero_stage, found.mine.plan.pipeline.num_microbatches) == (2, 4)
    assert found.question.training.global_batch_size == 32
    assert {row.plan.training.global_batch_size for row in found.rows if row.plan is not None} == {32}
    deepspeed = next(row for row in found.rows if row.framework == "deepspeed")
    assert deepspeed.step_time_s <= found.mine.step_time_s
    assert any("read as deepspeed" in note for note in found.notes)


def test_what_a_config_leaves_to_its_script_can_be_given() -> None:
    """The note named --micro-batch, which compare did not have."""
    text = '{"gradient_accumulation_steps": "auto", "train_batch_size": 32, "zero_optimization": {"stage": 2}}'
    text = text.replace("32,", '32, "train_micro_batch_size_per_gpu": "auto",')
    request = Request("llama-tiny", 4, hardware="dgx-a100-80gb", seq_len=64)
    mine = compare(request, Config("ds.json", text, micro_batch_size=4, recompute=Recompute.FULL)).mine
    assert mine is not None
    assert mine.plan is not None
    assert (mine.plan.pipeline.micro_batch_size, mine.plan.pipeline.num_microbatches) == (4, 2)
    assert {rule.mode for rule in mine.plan.recompute} == {Recompute.FULL}


def test_a_precision_beside_a_config_counts_for_all() -> None:
    """It was read over: all were priced in the config's own."""
    own = Config("ds.json", DEEPSPEED, precision=Precision.FP32, optimizer=Optimizer.SGD)
    found = compare(Request("llama-tiny", 4, hardware="dgx-a100-80gb", seq_len=64), own)
    plans = [row.plan for row in (*found.rows, found.mine) if row is not None and row.plan is not None]
    assert len(plans) > 1
    trainings = {(plan.training.precision, plan.training.optimizer) for plan in plans}
    assert trainings == {(Precision.FP32, Optimizer.SGD)}


def test_a_compiled_config_of_a_user_is_priced_compiled() -> None:
    text = (
        '[model]\nflavor = "8B"\n[training]\nlocal_batch_size = 1\nseq_len = 64\n'
        '[activation_checkpoint]\nmode = "none"\n[compile]\nenable = true\n'
    )
    found = compare(Request("llama-tiny", 4, hardware="dgx-a100-80gb", seq_len=64), Config("job.toml", text))
    assert found.mine is not None
    assert found.mine.plan is not None
    assert found.mine.plan.framework == "torchtitan+compile"
    assert "torchtitan+compile" in found.mine.source


@pytest.mark.parametrize(("reason", "end"), [("a part of this model", ". "), ("It has none.", " ")])
def test_a_way_out_is_a_sentence_of_its_own(reason: str, end: str) -> None:
    """They ran into each other: "a part of this model Way out: ..."."""
    row = Row("torchtitan", None, "torchtitan", "", reason=reason, way_out="use another")
    assert reason + _way_out(row) == f"{reason}{end}Way out: use another"


def test_no_time_is_a_reason_of_its_own() -> None:
    found = compare(TINY, None, Deadline.within(0.0, began_s=0.0))
    assert all(row.is_late and row.plan is None for row in found.rows if row.plan is None)
    assert any(row.is_late for row in found.rows)


def test_a_config_that_is_none_is_refused() -> None:
    with pytest.raises(InputError, match="recognised"):
        compare(TINY, Config("notes.txt", "hello"))


def test_over_unlike_nodes_a_framework_that_must_offload_says_why_it_has_no_plan() -> None:
    mixed = replace(TINY, hardware="dgx-a100-80gb:2,dgx-h100-80gb:2")
    rows = {row.framework: row for row in compare(mixed).rows}
    assert "offloading has no price" in rows["zero-infinity"].reason
    assert rows["planner"].plan is not None
