"""What is inferred of layouts in which nothing fits, held against the ledger and against a visit to each of them."""

from collections import defaultdict
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from costmodels.vocabulary.choices import Recompute
from planner.evaluation.evaluator import Evaluator
from planner.layout.columns import Columns
from planner.layout.layout import Layout, Pins
from planner.problem import Problem
from planner.solver import walk
from planner.solver.cutting import Cut
from planner.solver.search import Outcome, search
from planner.solver.unfit import Unfit
from planner.table.cost_table import CostTable
from tests.planning import problem_of

QUESTIONS = [
    ("llama-tiny", 16, Pins(recompute=Recompute.NONE)),
    ("llama-tiny", 16, Pins(pp=2, recompute=Recompute.FULL, micro_batch=1)),
    ("moe-tiny", 16, Pins(recompute=Recompute.NONE, micro_batch=1)),
]


@pytest.mark.parametrize(("model", "num_devices", "pins"), QUESTIONS)
def test_over_fewer_ranks_every_rank_needs_as_much_or_more(model: str, num_devices: int, pins: Pins) -> None:
    problem = problem_of(model, num_devices, batch=32, seq_len=64, pins=pins)
    listed = Columns.of(Layout, problem.space.layouts)
    unfit, alike = Unfit(listed), defaultdict[object, list[Layout]](list)
    for index in range(len(listed)):
        alike[unfit.key(index)].append(listed[index])
    several = [sorted(group, key=lambda each: each.mesh.num_shards) for group in alike.values() if len(group) > 1]
    assert len(several) > 50
    for group in several[:: len(several) // 40]:
        needed = [_bytes_of_ranks(problem.table, layout) for layout in group]
        for over_fewer, over_more in pairwise(needed):
            assert all(few >= more for few, more in zip(over_fewer, over_more, strict=True))


def _bytes_of_ranks(table: CostTable, layout: Layout) -> list[float]:
    evaluator = Evaluator(table, layout)
    return [ledger.total_bytes for ledger in evaluator.evaluate(evaluator.even_starts()).ledgers]


@pytest.mark.parametrize("gib", [80, 100])
def test_a_search_finds_and_proves_what_it_does_with_every_visit(gib: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of blocks of 8 billion parameters: none fit 80 GiB, and few 100."""
    pins = Pins(pp=16, tp=1, cp=1, zero=3)
    problem = problem_of("megatron-1008b", 2048, batch=2048, seq_len=2048, pins=pins)
    short = _with_memory(problem.table, gib * 2.0**30)
    found, cuts = _searched(short, problem, monkeypatch)
    monkeypatch.setattr(Unfit, "known", lambda *_: None)
    visited, all_cuts = _searched(short, problem, monkeypatch)
    assert (found.best is not None) == (gib == 100)
    assert (found.best and found.best.layout, found.closest) == (visited.best and visited.best.layout, visited.closest)
    assert (found.bound_s, found.num_visited) == (visited.bound_s, visited.num_visited)
    assert cuts < 0.8 * all_cuts


def _searched(table: CostTable, problem: Problem, monkeypatch: pytest.MonkeyPatch) -> tuple[Outcome, int]:
    """What a search finds, and how many layouts it cut for that."""
    best_cut, number = walk.best_cut, 0

    def counted(*arguments: Any) -> Cut:
        nonlocal number
        number += 1
        return best_cut(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(walk, "best_cut", counted)
        return search(table, problem.space.layouts, problem.solver), number


def _with_memory(table: CostTable, memory_bytes: float) -> CostTable:
    devices = tuple(replace(each, memory_bytes=memory_bytes) for each in table.cluster.devices)
    return replace(table, cluster=replace(table.cluster, devices=devices))
