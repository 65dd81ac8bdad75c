"""A run is planned again for other devices: what was asked for is kept as far as it can be."""

from __future__ import annotations

from dataclasses import replace

import pytest

from costmodels.vocabulary.choices import Precision
from costmodels.vocabulary.schedules import ScheduleName
from planner.api import find_plan, replan, same_run
from planner.errors import PlanError
from planner.layout.layout import Pins
from planner.plan.schema import Plan
from planner.request import Request

PINS = Pins(pp=2, dp=2, schedule=ScheduleName.ONE_F_ONE_B)


def step_s(plan: Plan) -> float:
    assert plan.prediction is not None
    return plan.prediction.step_time_s


@pytest.fixture(scope="module")
def plan() -> Plan:
    request = Request("gpt-tiny", 4, "cpu-gloo", global_batch_size=16, precision=Precision.FP32, pins=PINS)
    return find_plan(request).plan


def test_pins_are_written_down_and_kept_where_they_can_be(plan: Plan) -> None:
    assert plan.search is not None
    assert Pins.of(plan.search.pins) == PINS
    answer = replan(plan, 2)
    new = answer.plan
    assert new.training == plan.training
    assert (new.num_devices, new.mesh.pp, new.pipeline.schedule) == (2, 2, ScheduleName.ONE_F_ONE_B)
    assert answer.notes[-1] == "no layout on 2 GPUs has dp=2: chosen anew"


def test_what_no_layout_can_have_is_given_up(plan: Plan) -> None:
    answer = replan(plan, 3)
    assert answer.plan.num_devices + answer.plan.idle_devices == 3
    assert answer.plan.training.global_batch_size == 16
    assert "dp=2, schedule=1F1B, pp=2" in answer.notes[-1]
    over_all = find_plan(replace(same_run(plan, 3, None, {}), may_idle=False)).plan
    assert over_all.num_devices == 3
    assert step_s(answer.plan) <= step_s(over_all)


def test_devices_stay_idle_where_that_is_faster_or_none_has_all() -> None:
    """After losing one of 8: 7 cannot share 16 sequences, and there was no plan."""
    pins = Pins(tp=1, pp=1, cp=1)
    request = Request("gpt-tiny", 8, "dgx-a100-80gb", global_batch_size=16, pins=pins, num_tokens=10**6)
    plan = find_plan(request).plan
    seven = replan(plan, 7)
    assert seven.plan.num_devices + seven.plan.idle_devices == 7
    assert 16 % seven.plan.num_devices == 0
    assert seven.notes[-1].endswith("of 7 GPUs are used: no layout over all 7 fits the model, the batch and the pins")
    assert seven.plan.search is not None
    assert Pins.of(seven.plan.search.pins) == pins
    assert seven.plan.run is not None
    assert seven.plan.run.num_tokens == 10**6


def test_the_memory_risk_is_kept(plan: Plan) -> None:
    assert plan.search is not None
    risky = plan.model_copy(update={"search": plan.search.model_copy(update={"memory_risk": 0.4})})
    again = replan(risky, 2).plan
    assert again.search is not None
    assert again.search.memory_risk == 0.4


def test_the_experts_own_degree_is_given_up_with_the_others() -> None:
    pins = Pins(tp=2, etp=2, pp=1, cp=1)
    plan = find_plan(Request("moe-tiny", 4, "dgx-a100-80gb", global_batch_size=9, seq_len=32, pins=pins)).plan
    answer = replan(plan, 3)
    assert (answer.plan.num_devices, answer.plan.mesh.tp) == (3, 1)
    assert "etp=2, tp=2" in answer.notes[-1]


def test_same_devices_the_same_plan(plan: Plan) -> None:
    answer = replan(plan, 4)
    assert answer.plan.pipeline == plan.pipeline
    assert answer.plan.mesh == plan.mesh
    assert not any("chosen anew" in note for note in answer.notes)


def test_pins_that_no_search_writes_are_refused(plan: Plan) -> None:
    assert plan.search is not None
    for pins in ({"colour": "red"}, {"schedule": "2F2B"}):
        changed = plan.model_copy(update={"search": plan.search.model_copy(update={"pins": pins})})
        with pytest.raises(PlanError, match=r"search\.pins"):
            replan(changed, 4)
