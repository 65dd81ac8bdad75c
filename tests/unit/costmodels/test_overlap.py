"""Communication that compute hides in part: bounds, monotony, and closed forms."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from costmodels.overlap import Overlap, exposed_s, message_beside_s

# Hides behind 0.75 of the compute, which then runs 1.2 times as long.
OVERLAP = Overlap(fraction=0.75, slowdown=0.2)

times = st.floats(min_value=0, max_value=1e4)


def test_communication_with_nothing_beside_it_is_exposed() -> None:
    assert exposed_s(2.0, 0.0, OVERLAP) == 2.0


def test_hidden_communication_still_slows_the_compute() -> None:
    assert exposed_s(1.0, 100.0, OVERLAP) == pytest.approx(0.2)


def test_what_exceeds_the_overlappable_share_is_exposed() -> None:
    assert exposed_s(10.0, 4.0, OVERLAP) == pytest.approx(10 - 3 + 0.2 * 3)


@given(communication=times, compute=times, more=times)
def test_bounds_and_monotony(communication: float, compute: float, more: float) -> None:
    exposed = exposed_s(communication, compute, OVERLAP)
    assert -1e-9 <= exposed <= communication
    assert exposed_s(communication, compute + more, OVERLAP) <= exposed + 1e-9
    assert exposed_s(communication + more, compute, OVERLAP) >= exposed - 1e-9


def test_a_message_beside_a_pass_slows_it_at_either_end_by_half_of_what_an_all_reduce_does() -> None:
    assert message_beside_s(0.010, 0.030, 0.2) == pytest.approx(0.001)
    both_ways = exposed_s(0.010, 0.030, Overlap(fraction=1.0, slowdown=0.2))  # each rank sends and receives
    assert 2 * message_beside_s(0.010, 0.030, 0.2) == pytest.approx(both_ways)


def test_a_message_that_takes_longer_than_a_pass_is_beside_one_pass_at_most() -> None:
    assert message_beside_s([1.0, 0.5], 0.030, 0.2) == pytest.approx([0.003, 0.003])


def test_arrays_are_priced_element_by_element() -> None:
    communication, compute = np.array([2.0, 1.0, 10.0]), np.array([0.0, 100.0, 4.0])
    exposed = exposed_s(communication, compute, OVERLAP)
    assert exposed == pytest.approx(
        [exposed_s(float(a), float(b), OVERLAP) for a, b in zip(communication, compute, strict=True)]
    )
    grid = exposed_s(communication[:, None], compute[None, :], OVERLAP)
    assert grid.shape == (3, 3)
