"""Of equal units in a row three are looked at: no other is at work when most is held."""

import random
from itertools import groupby

import pytest

from planner.evaluation.fsdp_moments import Sharding, UnitAtWork, fullest_last_moment, fullest_moment


def test_equal_units_in_a_row_are_counted_as_one_by_one() -> None:
    rng = random.Random(0)
    for _ in range(500):
        kinds = [
            UnitAtWork(9 * rng.random(), rng.choice((0.0, 20 * rng.random())), 3 * rng.random(), 5 * rng.random())
            for _ in range(3)
        ]
        places = [place for _ in range(rng.randint(1, 4)) for place in [rng.randrange(3)] * rng.randint(1, 7)]
        rows = [(kinds[place], len(list(row))) for place, row in groupby(places)]
        one_by_one = [(kinds[place], 1) for place in places]
        sharding = Sharding(rng.random() < 0.5, rng.random() < 0.5, rng.choice((1, 2, 8)), 2.0, rng.choice((2.0, 4.0)))
        for fullest in (fullest_moment, fullest_last_moment):
            assert fullest(rows, sharding).total == pytest.approx(fullest(one_by_one, sharding).total, rel=1e-12)
