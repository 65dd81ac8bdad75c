"""Robust fits: least absolute relative deviations, so that a few disturbed timings do not move the result."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np

_NORMAL_STD_OVER_MEAN_ABSOLUTE = math.sqrt(math.pi / 2)


@dataclass(frozen=True)
class LineFit:
    """t = intercept_s + slope · size, and how far the timings scatter about it."""

    intercept_s: float
    slope: float
    residual_spread: float  # standard deviation of log(measured / predicted)

    def time_s(self, size: float) -> float:
        """Seconds at ``size``."""
        return self.intercept_s + self.slope * size


def fit_line(sizes: Sequence[float], times_s: Sequence[float], *, lowest_slope: float = 0.0) -> LineFit:
    """The line with intercept ≥ 0 and slope ≥ ``lowest_slope`` that minimises Σ |t_i - predicted_i| / t_i.

    This is a linear program, and one of its optima passes through two of the points, or through one of them where a
    bound on intercept or slope holds: all such lines are tried, which is exact for the few points of a sweep.
    """
    if len(sizes) != len(times_s) or not sizes or min(times_s) <= 0 or min(sizes) < 0:
        raise ValueError(f"a fit needs as many times above 0 as sizes, got {len(sizes)} sizes and times {times_s}")
    size, time_s = np.asarray(sizes, dtype=float), np.asarray(times_s, dtype=float)
    lines = [(max(0.0, t - lowest_slope * s), lowest_slope) for s, t in zip(sizes, times_s, strict=True)]
    lines += [(0.0, t / s) for s, t in zip(sizes, times_s, strict=True) if s > 0]
    for (s1, t1), (s2, t2) in combinations(zip(sizes, times_s, strict=True), 2):
        if s1 != s2:
            slope = (t2 - t1) / (s2 - s1)
            lines.append((t1 - slope * s1, slope))
    allowed = [(a, b) for a, b in lines if a >= 0 and b >= lowest_slope]
    costs = [float(np.abs((a + b * size - time_s) / time_s).sum()) for a, b in allowed]
    intercept_s, slope = allowed[int(np.argmin(costs))]
    predicted = intercept_s + slope * size
    return LineFit(intercept_s, slope, spread(time_s.tolist(), predicted.tolist()))


def spread(measured: Sequence[float], predicted: Sequence[float]) -> float:
    """Standard deviation of log(measured / predicted), from the mean absolute value, which outliers move less."""
    logs = [abs(math.log(m / p)) for m, p in zip(measured, predicted, strict=True) if m > 0 and p > 0]
    return _NORMAL_STD_OVER_MEAN_ABSOLUTE * float(np.mean(logs)) if logs else 0.0
