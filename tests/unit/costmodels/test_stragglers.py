"""The slowest of many devices: against the exact expectation, and values worked out by hand."""

from math import exp, pi, sqrt

import numpy as np
import pytest

from costmodels.stragglers import expected_largest, straggler_slowdown


def test_of_one_it_is_the_middle_and_of_two_what_integration_gives() -> None:
    assert expected_largest(1) == 0.0
    assert expected_largest(2) == pytest.approx(1 / sqrt(pi), rel=0.05)  # exact: 1 / sqrt(pi)


def test_it_is_the_mean_of_the_largest_that_are_drawn() -> None:
    draws = np.random.default_rng(0).standard_normal((2000, 512))
    assert expected_largest(512) == pytest.approx(draws.max(axis=1).mean(), rel=0.01)


def test_there_is_no_largest_of_none() -> None:
    with pytest.raises(ValueError, match="no largest of 0"):
        expected_largest(0)


def test_slowdown_by_hand() -> None:
    # Phi^-1(511.625 / 512.25) = 3.0307 and Phi^-1(16383.625 / 16384.25) = 3.9558
    assert straggler_slowdown(16384, 512, 0.0261) == pytest.approx(exp(0.0261 * (3.9558 - 3.0307)), rel=1e-5)
    assert straggler_slowdown(512, 512, 0.0261) == 1.0
    assert straggler_slowdown(8, 512, 0.0261) == 1.0
    assert straggler_slowdown(131072, 512, 0.0) == 1.0


def test_more_devices_are_never_faster() -> None:
    found = [straggler_slowdown(2**k, 64, 0.05) for k in range(18)]
    assert found == sorted(found)
    assert found[-1] > found[6] == 1.0
