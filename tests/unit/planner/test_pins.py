"""A pin is obeyed or refused, never rewritten: random pins against the plans that come back."""

from dataclasses import fields
from random import Random

import pytest

from costmodels.vocabulary.choices import ContextMethod, Offload, Recompute
from costmodels.vocabulary.schedules import ScheduleName
from planner.api import find_plan
from planner.errors import InputError, PlannerError
from planner.layout.layout import Pins
from planner.plan.schema import Plan
from planner.request import Request

DEGREES = (1, 1, 2, 2, 3, 4, 8)
VALUES: dict[str, tuple[object, ...]] = {
    "tp": DEGREES,
    "pp": DEGREES,
    "dp": DEGREES,
    "cp": DEGREES,
    "zero": (0, 1, 2, 3),
    "micro_batch": (1, 2, 3, 4),
    "schedule": tuple(ScheduleName),
    "virtual_stages": (1, 2, 3),
    "recompute": tuple(Recompute),
    "sequence_parallel": (False, True),
    "dp_replicate": (1, 2),
    "ep": (1, 2, 4),
    "etp": (1, 1, 2, 4),
    "offload": (Offload.NONE, Offload.NONE, Offload.CPU),
    "cp_method": tuple(ContextMethod),
    "offload_activations": (False, True),
}


def random_pins(random: Random) -> Pins:
    """From one to four choices, more often possible than not."""
    names = random.sample(list(VALUES), random.randint(1, 4))
    return Pins(**{name: random.choice(VALUES[name]) for name in names})  # type: ignore[arg-type]


def in_plan(plan: Plan, pins: Pins) -> dict[str, object]:
    """What a plan says of every choice that can be pinned. Activations that may leave need not."""
    mesh, pipeline = plan.mesh, plan.pipeline
    modes = {rule.mode for rule in plan.recompute if rule.modules}
    return {
        "tp": mesh.tp,
        "pp": mesh.pp,
        "dp": mesh.dp_replicate * mesh.dp_shard,
        "cp": mesh.cp,
        "zero": plan.zero_stage,
        "micro_batch": pipeline.micro_batch_size,
        "schedule": pipeline.schedule,
        "virtual_stages": pipeline.virtual_stages,
        "recompute": modes.pop() if modes else Recompute.NONE,
        "sequence_parallel": plan.placements.sequence_parallel,
        "dp_replicate": mesh.dp_replicate,
        "ep": mesh.ep,
        "etp": mesh.shape().expert_tp,
        "offload": plan.offload,
        "cp_method": plan.cp_method,
        "offload_activations": bool(plan.offloaded_activations or pins.offload_activations),
    }


def request(model: str, num_devices: int, pins: Pins) -> Request:
    return Request(model, num_devices, hardware="dgx-h100-80gb", seq_len=64, global_batch_size=24, pins=pins)


def test_every_pin_is_looked_at() -> None:
    assert {field.name for field in fields(Pins)} == VALUES.keys()


@pytest.mark.parametrize(("model", "num_devices"), [("llama-tiny", 1), ("llama-tiny", 8), ("moe-tiny", 12)])
def test_a_pin_is_obeyed_or_refused(model: str, num_devices: int) -> None:
    random, num_obeyed, refusals = Random(f"{model} {num_devices}"), 0, list[PlannerError]()
    for _ in range(9):
        pins = random_pins(random)
        try:
            found = in_plan(find_plan(request(model, num_devices, pins)).plan, pins)
        except PlannerError as error:
            refusals.append(error)
            continue
        num_obeyed += 1
        for field in fields(Pins):
            pinned = getattr(pins, field.name)
            assert pinned is None or found[field.name] == pinned, (pins.describe(), field.name, found)
    assert num_obeyed > 0
    assert all(error.exit_code in (2, 3) and error.message and error.hint for error in refusals), refusals


def test_states_are_divided_over_ranks_of_context() -> None:
    plan = find_plan(request("llama-tiny", 8, Pins(cp=8, zero=3))).plan
    assert (plan.mesh.cp, plan.mesh.dp_shard, plan.zero_stage) == (8, 1, 3)


def test_a_stage_of_zero_without_ranks_to_shard_over_is_refused() -> None:
    with pytest.raises(InputError, match="zero=3 divides states over the ranks of dp_shard") as caught:
        find_plan(request("llama-tiny", 8, Pins(tp=4, pp=2, zero=3)))
    assert caught.value.exit_code == 2


def test_states_that_are_divided_over_context_take_less_memory() -> None:
    """With one rank of data, ZeRO 3 over 8 ranks of context leaves each an eighth."""
    pins = [Pins(cp=8, dp=1, zero=zero, micro_batch=1, recompute=Recompute.NONE) for zero in (0, 3)]
    held: list[dict[str, float]] = []
    for each in pins:
        prediction = find_plan(request("llama-tiny", 8, each)).plan.prediction
        assert prediction is not None
        held.append({term.value: number for term, number in prediction.memory_breakdown_bytes[0].items()})
    assert held[1]["optimizer"] == pytest.approx(held[0]["optimizer"] / 8, rel=1e-3)
    assert held[1]["gradients"] == pytest.approx(held[0]["gradients"] / 8, rel=1e-3)
