"""What measurements say of a few uncertain quantities: the most probable values, and how uncertain they remain.

The x have a normal prior, mean 0 and covariance S (of factors x is the logarithm). A measurement y_j lies around a
known function f_j(x) with noise that is normal with deviation n_j, or has the heavier tails of Student's t. The most
probable x is least in

    sum_j rho((y_j - f_j(x)) / n_j)  +  1/2 x' S^-1 x,      rho(z) = z^2 / 2

and is found by Gauss-Newton steps with numeric derivatives, each halved until it helps. For linear f and normal noise
one step is exact: the posterior is normal with covariance (J' N^-1 J + S^-1)^-1. Otherwise that matrix, at the values
found, is Laplace's approximation. Student's t with v degrees of freedom has rho(z) = (v + 1)/2 log(1 + z^2 / v): steps
weigh each measurement by (v + 1) / (v + z^2), so that a run which nothing explains counts for little. It may have
several minima: that one is taken which lies below the most probable x under normal noise, since this explains a
measurement where it can.

Source: A. Gelman et al., Bayesian Data Analysis (3rd edition), chapters 4.1, 14 and 17.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf

import numpy as np
import numpy.typing as npt

Vector = npt.NDArray[np.float64]
Predict = Callable[[Vector], Vector]

STEP = 0.05  # of a numeric derivative: wide, since prices have kinks where one bound takes over
MOST_STEPS = 5
MOST_HALVINGS = 6
ENOUGH = 0.02  # a step that moves nothing by more than so many of its prior's deviations is the last


@dataclass(frozen=True)
class Noise:
    """How measurements lie around what is predicted: deviation of each, and degrees of freedom of Student's t."""

    spread: Vector
    degrees_of_freedom: float = inf

    def cost(self, residuals: Vector) -> float:
        """The sum of rho over ``residuals``."""
        z2 = (residuals / self.spread) ** 2
        v = self.degrees_of_freedom
        return float(np.sum(z2 / 2 if v == inf else (v + 1) / 2 * np.log1p(z2 / v)))

    def precision(self, residuals: Vector) -> Vector:
        """The weight of each measurement at such ``residuals``."""
        z2 = (residuals / self.spread) ** 2
        v = self.degrees_of_freedom
        weights = np.ones_like(z2) if v == inf else (v + 1) / (v + z2)
        return weights / self.spread**2


@dataclass(frozen=True)
class Posterior:
    """The most probable values, their covariance, and what is predicted with them."""

    mean: Vector
    covariance: Vector
    predicted: Vector

    @property
    def spread(self) -> Vector:
        """The standard deviation of each quantity."""
        return np.sqrt(np.diag(self.covariance))


def posterior(predict: Predict, measured: Sequence[float], prior: Vector, noise: Noise) -> Posterior:
    """The most probable x under measurements; ValueError where a deviation is not above 0.

    ``predict`` gives f(x), one value a measurement, in the order of ``measured``. ``prior``: covariance, [n, n].
    """
    y = np.asarray(measured, dtype=float)
    if not (np.linalg.eigvalsh(prior) > 0).all() or not (noise.spread > 0).all():
        raise ValueError("each standard deviation must be above 0")
    certainty, spreads = np.linalg.inv(prior).astype(np.float64), np.sqrt(np.diag(prior))

    def cost(x: Vector, predicted: Vector) -> float:
        return noise.cost(y - predicted) + float(x @ certainty @ x) / 2

    is_normal = noise.degrees_of_freedom == inf
    x = np.zeros(len(prior)) if is_normal else posterior(predict, measured, prior, Noise(noise.spread)).mean
    predicted = predict(x)
    reached = cost(x, predicted)
    slopes = jacobian(predict, x, predicted)
    for _ in range(MOST_STEPS):
        step = _step(slopes, y - predicted, x, certainty, noise)
        for _ in range(MOST_HALVINGS):
            found = predict(x + step)
            if cost(x + step, found) < reached:
                break
            step = step / 2
        else:
            break
        x, predicted = x + step, found
        reached = cost(x, predicted)
        if np.max(np.abs(step / spreads)) < ENOUGH:
            break
        slopes = jacobian(predict, x, predicted)
    precision = noise.precision(y - predicted)
    return Posterior(x, np.linalg.inv(_information(slopes, precision, certainty)).astype(np.float64), predicted)


def jacobian(predict: Predict, x: Vector, at: Vector) -> Vector:
    """Derivatives of every prediction, ``at`` x itself, by every quantity: [measurement, quantity], by differences."""
    columns: list[Vector] = []
    for place in range(len(x)):
        change = np.zeros_like(x)
        change[place] = STEP
        columns.append((predict(x + change) - at) / STEP)
    return np.stack(columns, axis=1)


def _step(slopes: Vector, residuals: Vector, x: Vector, certainty: Vector, noise: Noise) -> Vector:
    precision = noise.precision(residuals)
    gradient = slopes.T @ (precision * residuals) - certainty @ x
    return np.linalg.solve(_information(slopes, precision, certainty), gradient).astype(np.float64)


def _information(slopes: Vector, precision: Vector, certainty: Vector) -> Vector:
    return slopes.T @ (precision[:, None] * slopes) + certainty
