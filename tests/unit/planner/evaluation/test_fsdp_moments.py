"""What FSDP2 holds in a backward pass besides activations, in closed form; equal units in a row are counted once."""

import random
from dataclasses import replace
from itertools import groupby

import numpy as np
import pytest

from planner.evaluation.fsdp_moments import Sharding, UnitAtWork, fullest_last_moment, fullest_moment, most_bytes

ZERO_2 = Sharding(gathers_units=False, reduces_each=True, compute_bytes=2.0, buffer_bytes=4.0)
ZERO_3 = Sharding(gathers_units=True, reduces_each=True, compute_bytes=2.0, buffer_bytes=4.0)
ZERO_1 = Sharding(gathers_units=False, reduces_each=False, compute_bytes=2.0, buffer_bytes=4.0)
UNIT = UnitAtWork(working=10.0, loss=0.0, kept=1000.0, elements=100.0)


def test_equal_units_in_a_row_are_counted_as_one_by_one() -> None:
    rng = random.Random(0)
    for _ in range(500):
        kinds = [
            UnitAtWork(
                working=9 * rng.random(),
                loss=rng.choice((0.0, 20 * rng.random())),
                kept=3 * rng.random(),
                elements=5 * rng.random(),
                with_gradients=12 * rng.random(),
                shards=3 * rng.random(),
            )
            for _ in range(3)
        ]
        places = [place for _ in range(rng.randint(1, 4)) for place in [rng.randrange(3)] * rng.randint(1, 7)]
        rows = [(kinds[place], len(list(row))) for place, row in groupby(places)]
        one_by_one = [(kinds[place], 1) for place in places]
        sharding = Sharding(
            gathers_units=rng.random() < 0.5,
            reduces_each=rng.random() < 0.5,
            compute_bytes=2.0,
            buffer_bytes=rng.choice((2.0, 4.0)),
            shared_elements=rng.choice((0.0, 5 * rng.random())),
            leaves_shards=rng.random() < 0.5,
        )
        for fullest in (fullest_moment, fullest_last_moment):
            assert fullest(rows, sharding).total == pytest.approx(fullest(one_by_one, sharding).total, rel=1e-12)


def test_gradients_of_the_pass_before_wait_beside_the_first_unit_at_work() -> None:
    assert fullest_moment([(UNIT, 1)], ZERO_2).total == UNIT.working
    assert fullest_moment([(UNIT, 1)], ZERO_2, before=70.0).total == 4.0 * 70 + UNIT.working


def test_a_unit_of_many_parameters_ends_with_its_gradients_beside_two_copies_and_the_buffer() -> None:
    small = UnitAtWork(working=1.0, loss=0.0, kept=5.0, elements=1000.0)
    # The middle one of three: parameters of it and the one before, its gradients, and those behind it, less what it and
    # the one behind it kept.
    assert fullest_moment([(small, 3)], ZERO_3).total == (2 + 2 + 2 + 4) * 1000 - 2 * small.kept


def test_nothing_waits_where_gradients_are_reduced_once_a_step() -> None:
    assert fullest_moment([(UNIT, 1)], ZERO_1, before=70.0) == fullest_moment([(UNIT, 1)], ZERO_1)


def test_the_loss_is_at_work_beside_what_waits() -> None:
    head = UnitAtWork(working=500.0, loss=500.0, kept=1000.0, elements=100.0)
    assert fullest_moment([(UNIT, 1), (head, 1)], ZERO_2, before=70.0).total == 500 + 4.0 * 70


def test_gradients_of_parameters_lie_beside_what_operators_before_still_need() -> None:
    late = UNIT._replace(with_gradients=900.0)
    assert fullest_moment([(late, 1)], ZERO_2).total == late.with_gradients
    assert fullest_last_moment([(late, 1)], ZERO_1).total == late.with_gradients
    in_place = replace(ZERO_1, compute_bytes=4.0)  # autograd adds to the gradients that are there
    assert fullest_moment([(late, 1)], in_place).total == UNIT.working


def test_shared_parameters_and_their_gradients_stay_from_the_last_unit_to_the_end_of_the_pass() -> None:
    small, head = UNIT._replace(kept=1.0, elements=1000.0), UNIT._replace(kept=1.0, elements=1.0)
    stage = [(small, 3), (head, 1)]
    usual, shared = fullest_moment(stage, ZERO_3).total, replace(ZERO_3, shared_elements=70.0)
    assert fullest_moment(stage, shared).total == usual + (2 + 2) * 70  # gathered, and the gradient
    assert fullest_moment(stage, replace(ZERO_2, shared_elements=70.0)).total == (
        fullest_moment(stage, ZERO_2).total + 2 * 70
    )
    much = replace(ZERO_3, shared_elements=1e6)  # at the end two gradients are added up, while one unit's is reduced
    assert fullest_moment(stage, much).total == (2 + 3 * 2) * 1e6 + 4 * 1000 - 3 * small.kept - head.kept


def test_shards_grow_where_they_are_new() -> None:
    small = UNIT._replace(kept=5.0, elements=1000.0, shards=250.0)
    new = replace(ZERO_3, leaves_shards=True)
    # Of five, the last but one, beside the next one's parameters: behind it three have left their shards.
    fullest = fullest_moment([(small, 5)], new)
    assert fullest.gradients == 4 * 250 * 3
    assert fullest.total == fullest_moment([(small, 5)], ZERO_3).total - 2 * small.kept + 3 * 4 * 250


def test_many_stages_at_once_take_what_each_takes_alone() -> None:
    rng = random.Random(3)
    for _ in range(50):
        zero, num_units = rng.choice((ZERO_1, ZERO_2, ZERO_3)), rng.randint(1, 3)
        stages = [
            [
                UnitAtWork(9 * rng.random(), 9 * rng.random() * (rng.random() < 0.5), rng.random(), 5 * rng.random())
                for _ in range(num_units)
            ]
            for _ in range(8)
        ]
        before = [4 * rng.random() for _ in stages]
        together = [(UnitAtWork(*np.array([stage[k] for stage in stages]).T), 1) for k in range(num_units)]
        each = [
            fullest_moment([(unit, 1) for unit in stage], zero, more).total
            for stage, more in zip(stages, before, strict=True)
        ]
        assert most_bytes(together, zero, np.array(before)).tolist() == each
