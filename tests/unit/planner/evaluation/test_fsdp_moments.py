"""What FSDP2 holds in a pipeline's backward pass besides activations, in closed form."""

from __future__ import annotations

from planner.evaluation.fsdp_moments import Sharding, UnitAtWork, fullest_moment

ZERO_2 = Sharding(gathers_units=False, reduces_each=True, num_shards=4, compute_bytes=2.0, buffer_bytes=4.0)
ZERO_1 = Sharding(gathers_units=False, reduces_each=False, num_shards=4, compute_bytes=2.0, buffer_bytes=4.0)
UNIT = UnitAtWork(working=10.0, loss=0.0, kept=1000.0, elements=100.0)


def test_gradients_of_the_pass_before_wait_beside_the_first_unit_at_work() -> None:
    assert fullest_moment([UNIT], ZERO_2).total == UNIT.working
    assert fullest_moment([UNIT], ZERO_2, before=70.0).total == 4.0 * 70 + UNIT.working


def test_a_unit_of_many_parameters_ends_with_its_gradients_beside_two_copies_and_the_buffer() -> None:
    zero_3 = Sharding(gathers_units=True, reduces_each=True, num_shards=4, compute_bytes=2.0, buffer_bytes=4.0)
    small = UnitAtWork(working=1.0, loss=0.0, kept=5.0, elements=1000.0)
    # The middle one of three: parameters of it and the one before, its gradients, and those behind it, less what it and
    # the one behind it kept.
    assert fullest_moment([small] * 3, zero_3).total == (2 + 2 + 2 + 4) * 1000 - 2 * small.kept


def test_nothing_waits_where_gradients_are_reduced_once_a_step() -> None:
    assert fullest_moment([UNIT], ZERO_1, before=70.0) == fullest_moment([UNIT], ZERO_1)


def test_the_loss_is_at_work_beside_what_waits() -> None:
    head = UnitAtWork(working=500.0, loss=500.0, kept=1000.0, elements=100.0)
    assert fullest_moment([UNIT, head], ZERO_2, before=70.0).total == 500 + 4.0 * 70
