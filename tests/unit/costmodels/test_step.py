import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from costmodels.step import exposed_s, optimizer_step_s
from tests.unit.costmodels.toy_cluster import BANDWIDTH, make_cluster, make_device

SOFTWARE = make_cluster(8).profile.software  # hides behind 0.75 of the compute, which then runs 1.2 times as long

times = st.floats(min_value=0, max_value=1e4)


def test_communication_with_nothing_beside_it_is_exposed() -> None:
    assert exposed_s(2.0, 0.0, SOFTWARE) == 2.0


def test_hidden_communication_still_slows_the_compute() -> None:
    assert exposed_s(1.0, 100.0, SOFTWARE) == pytest.approx(0.2)


def test_what_exceeds_the_overlappable_share_is_exposed() -> None:
    assert exposed_s(10.0, 4.0, SOFTWARE) == pytest.approx(10 - 3 + 0.2 * 3)


@given(communication=times, compute=times, more=times)
def test_bounds_and_monotony(communication: float, compute: float, more: float) -> None:
    exposed = exposed_s(communication, compute, SOFTWARE)
    assert -1e-9 <= exposed <= communication
    assert exposed_s(communication, compute + more, SOFTWARE) <= exposed + 1e-9
    assert exposed_s(communication + more, compute, SOFTWARE) >= exposed - 1e-9


def test_arrays_are_priced_element_by_element() -> None:
    communication, compute = np.array([2.0, 1.0, 10.0]), np.array([0.0, 100.0, 4.0])
    exposed = exposed_s(communication, compute, SOFTWARE)
    assert exposed == pytest.approx(
        [exposed_s(float(a), float(b), SOFTWARE) for a, b in zip(communication, compute, strict=True)]
    )
    grid = exposed_s(communication[:, None], compute[None, :], SOFTWARE)
    assert grid.shape == (3, 3)


def test_the_optimiser_step_reads_and_writes_its_state_once() -> None:
    device = make_device()
    assert optimizer_step_s(1e9, "adamw", device) == pytest.approx(28e9 / (0.8 * BANDWIDTH))
    assert optimizer_step_s(1e9, "sgd", device) == pytest.approx(12e9 / (0.8 * BANDWIDTH))
    assert optimizer_step_s(0, "adamw", device) == 0
    with pytest.raises(ValueError, match="optimizer must be one of adamw, adam, sgd, got 'lion'"):
        optimizer_step_s(1, "lion", device)
