import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.calibration.fitting import fit_line, spread

SIZES = [4096.0 * 2**power for power in range(12)]


@given(st.floats(1e-6, 1e-2), st.floats(1e-11, 1e-6))
def test_a_line_is_recovered_exactly(intercept_s: float, slope: float):
    fit = fit_line(SIZES, [intercept_s + slope * size for size in SIZES])
    assert fit.residual_spread == pytest.approx(0, abs=1e-6)
    assert fit.time_s(SIZES[0]) == pytest.approx(intercept_s + slope * SIZES[0])
    assert fit.time_s(SIZES[-1]) == pytest.approx(intercept_s + slope * SIZES[-1])


@given(st.sets(st.integers(0, 11), max_size=4), st.floats(1.5, 50))
def test_a_few_disturbed_timings_do_not_move_the_line(disturbed: set[int], factor: float):
    times = [1e-3 + 1e-8 * size for size in SIZES]
    fit = fit_line(SIZES, [time * (factor if index in disturbed else 1) for index, time in enumerate(times)])
    assert fit.time_s(1e6) == pytest.approx(1e-3 + 1e-2, rel=0.25)
    assert (fit.residual_spread > 0.01) == bool(disturbed)


@given(st.lists(st.floats(1e-6, 1), min_size=1, max_size=8))
def test_neither_latency_nor_time_a_byte_is_ever_negative(times: list[float]):
    fit = fit_line(SIZES[: len(times)], times, lowest_slope=1e-10)
    assert fit.intercept_s >= 0
    assert fit.slope >= 1e-10


def test_nonsense_is_refused():
    with pytest.raises(ValueError, match="above 0"):
        fit_line([1.0, 2.0], [1.0, 0.0])
    with pytest.raises(ValueError, match="2 sizes"):
        fit_line([1.0, 2.0], [1.0])


def test_spread_is_the_deviation_of_the_logarithm():
    logs = [0.1, -0.1, 0.2, -0.2]
    assert spread([math.exp(x) for x in logs], [1.0] * 4) == pytest.approx(0.15 * math.sqrt(math.pi / 2))
