"""The weighted mean of paths through a pipeline that counts each stage as often as can be: a linear program.

What a path counts is in whole numbers, and coefficients are sums of those with the weights that were found. They are
thus bounds whatever the program did; it only makes them large.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

# How closely the program is solved: what is left is a looser bound, never a wrong one.
TOLERANCE = 2e-4
MOST_STEPS = 4000
_ROUNDING = 1e-12
_SPREAD = 2e-5  # of the program's right hand side, far below its tolerance
_GOLDEN = 0.6180339887498949


@dataclass(frozen=True)
class PathBound:
    """T >= sum over units of ``least`` + ``sends`` times the seconds of one send between ranks.

    ``rows``: [rows, 3], how often one stage runs forward, makes gradients of its input and of its weights on the mean
    path; rows that are nowhere below another are left out. Whole backward passes have the last two equal.
    """

    rows: Array
    sends: float

    @property
    def forward(self) -> float:
        """The least factor of the seconds of all stages forward."""
        return float(self.rows[:, 0].min())

    @property
    def input_gradient(self) -> float:
        """The least factor of the seconds of all input gradients."""
        return float(self.rows[:, 1].min())

    @property
    def weight_gradient(self) -> float:
        """The least factor of the seconds of all weight gradients."""
        return float(self.rows[:, 2].min())

    @property
    def backward(self) -> float:
        """The least factor of the seconds of all whole backward passes."""
        return min(self.input_gradient, self.weight_gradient)

    def least(self, forward_s: Array, input_s: Array, weight_s: Array) -> Array:
        """What a unit with these seconds on one micro-batch adds to the step at least; arrays of one shape."""
        times = np.stack([forward_s, input_s, weight_s])
        return np.tensordot(self.rows, times, axes=1).min(axis=0)


@dataclass(frozen=True)
class Paths:
    """Paths of one schedule, each with a rank on which it stays but for its ends."""

    rank_of: tuple[int, ...]  # of each stage; path r is one that runs no less than all actions of rank r
    units: Array  # [units, 3], the proportions for which the best mean is wanted; each sums to 1
    own: Array  # [paths, stages], 1 where the path's rank has the stage
    gains: Array  # [paths, stages, 3], what it runs more, or less, than m times each action of its rank
    sends: Array  # [paths]
    basis: NDArray[np.intp] | None = None  # of a mean that is likely near the best

    def columns(self, m: int) -> Array:
        """What each of ``units`` takes in each stage: [paths, stages and units]."""
        return (m * self.own[..., None] + self.gains @ self.units.T).reshape(len(self.own), -1)

    def prices(self, mean: Mean) -> Array:
        """Of one run of each kind in each stage; [stages, 3]."""
        return mean.prices.reshape(-1, len(self.units)) @ self.units

    def bound(self, m: int) -> PathBound:
        """The best mean's, for m micro-batches; no less than that of all ranks alike."""
        stages, sends = self._mean(m, np.ones(1 + max(self.rank_of)))
        return PathBound(_undominated(stages), sends)

    def bounds_of_ranks(self, m: int, slowness: Sequence[float]) -> tuple[PathBound, ...]:
        """Of the stages of each rank, where ranks are unlike: each takes ``slowness`` times as long for a unit.

        All are of one mean of paths: the best for this slowness, and a bound for any.
        """
        stages, sends = self._mean(m, np.array(slowness))
        rank_of = np.array(self.rank_of)
        return tuple(PathBound(_undominated(stages[rank_of == rank]), sends) for rank in range(len(slowness)))

    def _mean(self, m: int, slowness: Array) -> tuple[Array, float]:
        """How often the best mean runs each stage, [stages, 3], and its sends."""
        takes = np.repeat(slowness[list(self.rank_of)], len(self.units))
        columns = self.columns(m) * takes
        weights = np.maximum(best_mean(columns, m * takes, self.basis).weights(self), 0.0)
        as_slow = np.concatenate([1 / slowness, np.zeros(len(columns) - len(slowness))])  # all ranks busy alike
        each_to_one = (weights / weights.sum(), as_slow / as_slow.sum())
        weights = max(each_to_one, key=lambda each: float((each @ columns).min())) / (1 + _ROUNDING)
        stages = m * (weights @ self.own)[:, None] + np.tensordot(weights, self.gains, axes=1)
        return stages * (1 - _ROUNDING), float(weights @ self.sends)


class Mean(NamedTuple):
    """A basis of the program (``best_mean``), its levels and its prices."""

    basis: NDArray[np.intp]
    levels: Array
    prices: Array

    def weights(self, paths: Paths) -> Array:
        """Of each path; a stage's own column stands for less than its rank's first path."""
        size, found = len(self.basis), np.zeros(len(paths.sends))
        for column, level in zip(self.basis.tolist(), self.levels.tolist(), strict=True):
            if column < size:
                found[paths.rank_of[column // len(paths.units)]] += level
            elif column >= 2 * size:
                found[column - 2 * size] += level
        return found


def best_mean(columns: Array, own: float | Array, basis: NDArray[np.intp] | None) -> Mean:
    """The mean of paths whose least entry is nearly as large as can be; ``columns`` [paths, entries].

    Minimises the sum of levels y >= 0 with sum_P y_P column_P >= 1 in all entries, by the revised simplex method. The
    first columns, from which it begins, have one entry each, ``own``; the next stand for what an entry has too much;
    the paths follow. The last prices are a cut of the units over the stages: none of the paths is longer on it than 1 +
    TOLERANCE, so no mean of them gives more than that much more.
    """
    size = columns.shape[1]
    every = np.vstack([own * np.eye(size), -np.eye(size), columns])
    costs = np.ones(len(every))
    costs[size : 2 * size] = 0.0
    wanted = 1 + _SPREAD * np.modf(np.arange(1, size + 1) * _GOLDEN)[0]  # all unlike, so that no step is in vain
    start, inverse = np.arange(size), np.eye(size) / own
    if basis is not None:
        with contextlib.suppress(np.linalg.LinAlgError):
            warm = np.linalg.inv(every[basis].T)
            if (warm @ wanted).min() >= 0:
                start, inverse = basis.copy(), warm
    paid, levels = costs[start], inverse @ wanted
    for _ in range(MOST_STEPS):
        worth = every @ (paid @ inverse) - costs
        worth[size : 2 * size] *= own  # as the others: in steps
        entering = int(worth.argmax())
        if worth[entering] <= TOLERANCE:
            break
        step = inverse @ every[entering]
        grows = step > 1e-9
        leaving = int(np.where(grows, levels / np.where(grows, step, 1.0), np.inf).argmin())
        pivot, moved = inverse[leaving] / step[leaving], levels[leaving] / step[leaving]
        inverse -= step[:, None] * pivot
        levels = np.maximum(levels - step * moved, 0.0)
        inverse[leaving], levels[leaving] = pivot, moved
        start[leaving], paid[leaving] = entering, costs[entering]
    return Mean(start, levels, paid @ inverse)


def _undominated(rows: Array) -> Array:
    """Without rows that are nowhere below another."""
    rows = np.unique(rows, axis=0)
    num_no_less = np.sum(np.all(rows[:, None, :] >= rows[None, :, :], axis=2), axis=1)
    return rows[num_no_less == 1]  # than itself alone
