"""Layouts that are dropped are never better than one that stays, and dropping them never changes the best."""

import random
from dataclasses import replace

import pytest

from costmodels.vocabulary.choices import ContextMethod
from planner.evaluation.dominance import undominated
from planner.evaluation.evaluator import Evaluator
from planner.layout.columns import Columns
from planner.layout.layout import Layout, Pins
from planner.pricing.table_builder import build_table
from planner.problem import Problem
from planner.solver.cutting import TOLERANCE
from planner.solver.search import search
from planner.space.search_space import build_space
from tests.planning import problem_of

PROBLEMS = [
    ("llama2-7b", 16, {"batch": 32, "seq_len": 8192, "hardware": "rtx-4090-x8", "pins": Pins(micro_batch=1)}),
]


def whole(problem: Problem) -> Problem:
    """The same problem with every layout of its space."""
    space = build_space(problem.space.training, problem.space.pins, problem.space.limits)
    table = build_table(problem.target, space.training, problem.decisions, space.layouts)
    return replace(problem, space=space, table=table)


@pytest.mark.parametrize(("model", "num_devices", "options"), PROBLEMS, ids=[f"{m}-{n}" for m, n, _ in PROBLEMS])
def test_what_is_dropped_is_never_better(model: str, num_devices: int, options: dict) -> None:
    problem = whole(problem_of(model, num_devices, **options))
    table, layouts = problem.table, problem.space.layouts
    staying = undominated(table, layouts)
    stays = set(staying)
    dropped = [layout for layout in layouts if layout not in stays]
    assert dropped
    for layout in random.Random(0).sample(dropped, min(40, len(dropped))):
        evaluator = Evaluator(table, layout)
        starts = evaluator.even_starts()
        worse = evaluator.evaluate(starts)
        others = [layout._replace(cp_method=method) for method in ContextMethod]
        found = [Evaluator(table, other).evaluate(starts) for other in others if other in stays]
        assert any(
            each.step_time_s <= worse.step_time_s * (1 + 1e-12)
            and each.peak_memory_bytes <= worse.peak_memory_bytes * (1 + 1e-12)
            for each in found
        ), layout
    best, best_left = (search(table, each, problem.solver).best for each in (layouts, staying))
    assert (best is None) == (best_left is None)
    if best is not None and best_left is not None:
        assert best_left.step_time_s <= best.step_time_s * (1 + TOLERANCE)


def test_of_layouts_without_another_way_all_stay() -> None:
    problem = problem_of("llama-tiny", 8, batch=16, seq_len=64, pins=Pins(cp=1))
    assert undominated(problem.table, problem.space.layouts) is problem.space.layouts
    alone = problem_of("llama-tiny", 8, batch=16, seq_len=64, pins=Pins(cp_method=ContextMethod.RING, cp=2))
    assert len(undominated(alone.table, alone.space.layouts)) == len(alone.space.layouts)


def test_of_equal_ways_one_stays() -> None:
    """Two rows with the same prices: the first way is kept."""
    problem = whole(problem_of("llama-tiny", 8, batch=16, seq_len=64, pins=Pins(cp=2)))
    table = problem.table
    gathering = [key._replace(cp_method=ContextMethod.ALL_GATHER) for key in table.work_keys]
    rows = [table.work_keys.index(key) for key in gathering]
    equal = replace(table, time_s=table.time_s[:, rows], num_bytes=table.num_bytes[rows])
    left: Columns[Layout] = undominated(equal, problem.space.layouts)
    assert set(left) == {layout for layout in problem.space.layouts if layout.cp_method is ContextMethod.ALL_GATHER}
