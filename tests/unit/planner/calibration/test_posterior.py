"""The posterior against closed forms: conjugate normal models, and a fixed point of Student's t."""

import numpy as np
import pytest

from planner.calibration.posterior import Noise, jacobian, posterior

RANDOM = np.random.default_rng(7)


def test_one_measurement_of_one_quantity_is_the_weighted_mean() -> None:
    """Prior N(0, s), y = x + N(0, n): mean y s^2 / (s^2 + n^2), variance s^2 n^2 / (s^2 + n^2)."""
    found = posterior(lambda x: x, [0.3], np.diag([0.04]), Noise(np.array([0.1])))
    assert found.mean[0] == pytest.approx(0.3 * 0.04 / 0.05)
    assert found.spread[0] == pytest.approx(np.sqrt(0.04 * 0.01 / 0.05))


def test_a_linear_model_has_the_normal_equations_solution() -> None:
    slopes, root = RANDOM.normal(size=(7, 3)), RANDOM.normal(size=(3, 3))
    y, noise = RANDOM.normal(size=7), RANDOM.uniform(0.05, 0.3, size=7)
    prior = root @ root.T + np.diag([0.1, 0.5, 2.0])  # quantities that go together
    found = posterior(lambda x: slopes @ x, y.tolist(), prior, Noise(noise))
    # By the other form of the same posterior, which inverts the covariance of measurements: S J' (J S J' + N)^-1.
    gain = prior @ slopes.T @ np.linalg.inv(slopes @ prior @ slopes.T + np.diag(noise**2))
    assert found.mean == pytest.approx(gain @ y)
    assert found.covariance == pytest.approx((np.eye(3) - gain @ slopes) @ prior)


def test_what_no_measurement_tells_keeps_its_prior() -> None:
    found = posterior(lambda x: x[:1] * 2, [0.5], np.diag([0.09, 0.49]), Noise(np.array([0.1])))
    assert found.mean[1] == 0.0
    assert found.spread[1] == pytest.approx(0.7)


def test_a_curved_model_is_stationary_where_it_ends() -> None:
    """At the most probable value the gradient of the cost vanishes; the derivative here is the analytic one."""

    def curved(x: np.ndarray) -> np.ndarray:
        return np.log(np.exp(x[0]) + 3 * np.exp(x[1])) * np.ones(1)

    y, prior, noise = 1.9, np.array([0.4, 0.2]), 0.1
    found = posterior(curved, [y], np.diag(prior**2), Noise(np.array([noise])))
    a, b = np.exp(found.mean[0]), 3 * np.exp(found.mean[1])
    slopes = np.array([a, b]) / (a + b)
    gradient = slopes * (y - np.log(a + b)) / noise**2 - found.mean / prior**2
    assert np.abs(gradient * prior).max() < 0.2


def test_an_outlier_counts_for_little_under_heavy_tails() -> None:
    """Ten runs say 0.1 and one says 3: normal noise follows it, Student's t hardly; its fixed point is solved apart."""
    y, spread = [0.1] * 10 + [3.0], np.full(11, 0.05)

    def everywhere(x: np.ndarray) -> np.ndarray:
        return np.full(11, x[0])

    normal = posterior(everywhere, y, np.eye(1), Noise(spread)).mean[0]
    heavy = posterior(everywhere, y, np.eye(1), Noise(spread, 4.0)).mean[0]
    x = 0.1
    for _ in range(200):
        weights = 5 / (4 + ((np.array(y) - x) / spread) ** 2) / spread**2
        x = float(weights @ np.array(y) / (weights.sum() + 1.0))
    assert normal > 0.3
    assert heavy == pytest.approx(x, abs=1e-3)
    assert heavy == pytest.approx(0.1, abs=0.01)


def test_spreads_of_nothing_are_refused() -> None:
    with pytest.raises(ValueError, match="above 0"):
        posterior(lambda x: x, [1.0], np.zeros((1, 1)), Noise(np.array([0.1])))


def test_derivatives_are_those_of_a_product() -> None:
    """Differences are exact where each quantity by itself enters linearly."""
    x = np.array([2.0, 5.0])
    found = jacobian(lambda x: np.array([x[0] + 3 * x[1], x[0] * x[1]]), x, np.array([17.0, 10.0]))
    assert found == pytest.approx(np.array([[1.0, 3.0], [5.0, 2.0]]))
