"""Layouts that are bounded together with others have the bounds that they have alone."""

import random

import numpy as np
import pytest

from planner.layout.columns import Columns
from planner.layout.layout import Layout
from planner.solver.closely import Closely
from planner.solver.closer_bounds import CloserBounds
from tests.planning import problem_of


def test_whatever_was_said_to_come_next_a_layout_has_its_own_bound() -> None:
    problem = problem_of("llama3-8b", 16, batch=32, seq_len=2048, hardware="rtx-4090-x8")
    rng, layouts = random.Random(1), list(problem.space.layouts)
    listed = Columns.of(Layout, rng.sample(layouts, 200))
    closely, order = Closely(problem.table, listed), rng.sample(range(len(listed)), len(listed))
    unwanted, num_pipelines = set(order[::7]), 0
    for turn, index in enumerate(order):
        if turn % 50 == 0:  # half of these come in another turn
            closely.look_ahead(np.array(order[turn + 25 : turn + 75], dtype=np.intp))
        found = closely.bound_s(index, np.inf, lambda other: other not in unwanted, most=8)
        alone = CloserBounds(problem.table).of(Columns.of(Layout, [listed[index]])).most_s[0]
        assert found == pytest.approx(alone, rel=1e-12)
        num_pipelines += listed[index].mesh.pp > 1
    assert closely.num_asked == num_pipelines >= 100
