"""Means over the stages in which units can lie are no more than those of any cut."""

import random

import numpy as np
import pytest

from costmodels.vocabulary.schedules import ScheduleName
from planner.evaluation.cuts import even_starts, is_allowed
from planner.solver.flying import Counted, flying_by_stage, means_by_kind
from planner.table.facts import UnitRow


@pytest.mark.parametrize("is_lowest", [False, True])
@pytest.mark.parametrize(("num_ranks", "virtual_stages", "m"), [(2, 2, 2), (2, 3, 5), (4, 2, 4), (4, 3, 8)])
def test_no_cut_has_less_than_the_means(num_ranks: int, virtual_stages: int, m: int, is_lowest: bool) -> None:
    rng, schedule, num_stages = random.Random(1), ScheduleName.INTERLEAVED_1F1B, num_ranks * virtual_stages
    counted = Counted(schedule, num_ranks, virtual_stages, m, is_lowest)
    flying, _ = flying_by_stage(counted)
    tried = 0
    for num_blocks in (num_stages, 2 * num_stages - 1, 2 * num_stages + 3):
        is_block = (False, *[True] * num_blocks, False, False)
        units = UnitRow((0, *[1] * num_blocks, 2, 3), ("in", "block", "norm", "out"), is_block)
        found = means_by_kind(units, counted)
        starts = even_starts(is_block, num_stages)
        for _ in range(400):
            moved = sorted({0, *(max(1, start + rng.choice((-1, 0, 0, 1))) for start in starts[1:])})
            if len(moved) < num_stages or not is_allowed(moved, units):
                continue
            starts = tuple(moved)
            tried += 1
            stages = np.searchsorted(starts, np.arange(num_blocks + 3), side="right") - 1
            for kind in range(4):
                own = stages[np.array(units.kinds) == kind]
                assert found[0, kind] <= flying[own].mean() + 1e-12
                assert found[3, kind] <= (own >= num_stages - num_ranks).mean() + 1e-12
        assert found[3, 3] == 1.0
        assert found[3, 0] == 0.0
    assert tried >= 100
