"""Cuts of one layout: moved towards faster ones where that may pay."""

import pytest

from planner.layout.layout import Pins
from planner.solver.cutting import WORTH_IMPROVING, Pricer, improved
from tests.planning import problem_of


def test_a_cut_is_improved_only_where_it_is_not_far_behind_what_is_known() -> None:
    problem = problem_of("llama3-8b", 16, batch=64, seq_len=2048, pins=Pins(pp=4, tp=1, cp=1))
    num_improved = 0
    for layout in problem.space.layouts:
        first = (pricer := Pricer(problem.table, layout)).fastest(pricer.first_cuts())
        freely = improved(Pricer(problem.table, layout), None)
        if first is None or freely is None or freely.step_time_s >= first.step_time_s * 0.99:
            continue
        num_improved += 1
        far_s, near_s = first.step_time_s / (1 + WORTH_IMPROVING) * 0.999, first.step_time_s / (1 + WORTH_IMPROVING / 2)
        behind, beside = (improved(Pricer(problem.table, layout), cutoff_s) for cutoff_s in (far_s, near_s))
        assert behind is not None
        assert beside is not None
        assert behind.step_time_s == pytest.approx(first.step_time_s, rel=1e-12)
        assert freely.step_time_s <= beside.step_time_s < first.step_time_s
        if num_improved == 5:
            return
    pytest.fail(f"moves help {num_improved} layouts alone")
