"""A run is planned again for other devices: what was asked for is kept as far as it can be."""

from __future__ import annotations

import pytest

from costmodels.vocabulary.choices import Precision
from costmodels.vocabulary.schedules import ScheduleName
from planner.api import find_plan, replan
from planner.errors import PlanError
from planner.layout.layout import Pins
from planner.plan.schema import Plan
from planner.request import Request

PINS = Pins(pp=2, dp=2, schedule=ScheduleName.ONE_F_ONE_B)


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
    assert answer.plan.num_devices == 3
    assert answer.plan.training.global_batch_size == 16
    assert "dp=2, schedule=1F1B, pp=2" in answer.notes[-1]


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
