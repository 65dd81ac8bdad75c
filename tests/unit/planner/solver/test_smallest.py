"""The layout that needs least is found among those that bounds alone cannot tell apart."""

import random

import numpy as np

from planner.layout.deadline import Deadline
from planner.layout.layout import Pins
from planner.solver.bounds import bounds, bounds_of_memory
from planner.solver.smallest import at_its_smallest, needing_least
from tests.planning import problem_of


def test_experts_that_are_gathered_whole_are_not_the_smallest() -> None:
    """Bounds leave out the parameters that a block gathers: all layouts that were tried had whole experts.

    They needed up to seven times what others do, and were told to be the smallest; those that fitted were found late.
    """
    problem = problem_of("deepseek-v3", 256, batch=256, seq_len=4096, pins=Pins(zero=3, pp=1, cp=32))
    found = needing_least(problem.table, problem.space.layouts, Deadline.never())
    assert found is not None
    drawn = random.Random(0).sample(list(problem.space.layouts), 60)
    least = min(at_its_smallest(problem.table, layout).memory_share for layout in drawn)
    assert found.memory_share < 1.1 * least  # what stands beside a block is as the bounds say, to some percent
    assert found.fits


def test_bounds_of_memory_alone_are_those_that_the_search_has() -> None:
    problem = problem_of("moe-tiny", 8, batch=32, seq_len=64)
    both = bounds(problem.table, problem.space.layouts)
    alone = bounds_of_memory(problem.table, problem.space.layouts, Deadline.never())
    assert np.array_equal(alone.memory_bytes, both.memory_bytes)
    assert np.array_equal(alone.host_share, both.host_share)
    assert not alone.step_time_s.any()
