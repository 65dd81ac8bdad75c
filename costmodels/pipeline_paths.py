"""Lower bounds of a pipeline's step that hold for every cut of the model into stages.

A step takes no less than any path through its actions: along a rank's order, and from an action to the one that needs
its result (``pipeline``). So it takes no less than a weighted mean of paths, and that is linear in the stages' seconds.
With f_s, i_s and w_s those of stage s on one micro-batch forward, for the gradient of its input and for that of its
weights, and c the seconds of one send,

    T >= sum_s (a_s f_s + b_s i_s + c_s w_s) + n c

where a_s counts how often the mean path runs stage s forward, and so on. Whichever stage a unit of the model lies in,
it adds at least the least over s of its own a_s f + b_s i + c_s w (``PathBound.least``).

**Few paths**, in closed form. Rank r holds stage r of chunk 0, r + p of chunk 1, ...; q micro-batches make a round.

    fill     the first micro-batch goes through all stages before stage r of chunk c; from there on the path stays on
             rank r, but for the q forwards in each of the chunks before. Ranks run forwards alone so far.
             Or the path stays on rank 0 until the first micro-batch of chunk c goes from there to rank r
    drain    the same from the end, where backward passes are whole: ranks run backwards alone from there on
    detour   from rank r's first forward in its last chunk through the stages behind and back to its first backward; it
             misses the forwards that rank r runs in between, as its order says. Where backward passes are split, and
             with one stage a rank, there also from the last forward to the last backward
    V        the first micro-batch comes to rank r on the way down, or on the way up, where the path misses the
             2 (p - r) - 1 forwards that rank r has run by then

Example, 1F1B of two ranks and four micro-batches: detours at both ends make a path of rank 0 that runs its stage's
actions 3 and the other's 2 times; that of rank 1 runs them once and 4 times. With weights 3/4 and 1/4 each stage counts
5/2 times.

**Many paths**, ``thorough``, are found by search (``pipeline_hops``). For units of the proportions given the bound is
then within one percent of the step of the best cut in fractions of units (tests hold it against one), and takes five
to a hundred times as long to find. It makes the most of the proportions: for others it can be below that of the few.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from costmodels.path_mean import Array, PathBound, Paths
from costmodels.pipeline_hops import ROUNDS, hop_paths
from costmodels.vocabulary.schedules import ScheduleName

# Proportions of the seconds of units: forward, gradient of the input, gradient of the weights.
Units = tuple[tuple[float, float, float], ...]
ALIKE: Units = ((1.0, 1.0, 1.0),)
WHOLE: Units = ((1.0, 0.0, 0.0), (0.0, 1.0, 1.0))  # any at all where backward passes are whole
SPLIT: Units = ((1.2, 1.0, 1.0), (1.0, 1.2, 1.0), (1.0, 1.0, 1.2))
_ROUNDING = 1e-12


@lru_cache(maxsize=4096)
def coefficients(
    schedule: ScheduleName, p: int, v: int, m: int, *, units: Units = ALIKE, thorough: bool = False
) -> PathBound:
    """The bound of ``schedule`` on p ranks of v stages each with m micro-batches; ValueError if it cannot run.

    T is the whole step, or the longest rank's where the schedule overlaps steps. It holds for all units, and is largest
    where they take seconds in the proportions of ``units`` or between. ``thorough`` takes many paths: give it the
    proportions of the model's blocks, or a range (``WHOLE``, ``SPLIT``).
    """
    rules = schedule.rules
    found = rules.violations(p, v, m)
    if found:
        raise ValueError("; ".join(found))
    if rules.overlaps_steps or p == 1:
        return PathBound(np.full((1, 3), m / p * (1 - _ROUNDING)), 0.0)
    if rules.forwards_first:
        # Between its last forward and its first backward a rank waits for a micro-batch to go to the end and back.
        return PathBound(np.full((1, 3), (1 + (m - 1) / p) * (1 - _ROUNDING)), 2.0 * (p - 1))
    if thorough:
        return _many_paths(schedule, p, v, rules.shortened(p, m, ROUNDS), units).bound(m)
    return few_paths(schedule, p, v, m, units).bound(m)


@lru_cache(maxsize=4096)
def unlike_coefficients(
    schedule: ScheduleName, p: int, v: int, m: int, slowness: tuple[float, ...]
) -> tuple[PathBound, ...]:
    """The bound by few paths where each rank takes ``slowness`` times as long for a unit of the model, or about so.

    T >= sum over units of the least, over the ranks, of ``PathBound.least`` with the seconds on each rank, and sends.
    ValueError if the schedule cannot run, or has no such paths: it is GPipe, or overlaps steps.
    """
    rules = schedule.rules
    found = rules.violations(p, v, m)
    if found or not has_paths(schedule, p):
        raise ValueError("; ".join(found) or f"{schedule} on {p} ranks has no few paths")
    return few_paths(schedule, p, v, m, ALIKE).bounds_of_ranks(m, slowness)


def has_paths(schedule: ScheduleName, p: int) -> bool:
    """Whether more is to be had from paths than from the mean rank."""
    return p > 1 and not (schedule.rules.overlaps_steps or schedule.rules.forwards_first)


def rank_coefficients(schedule: ScheduleName, p: int, v: int, m: int) -> tuple[Array, Array]:
    """For each rank a path that stays on it: T >= sum of the counts times the stages' seconds, and sends.

    The first micro-batch comes through the first stages of the ranks before, and where backward passes are whole the
    last gradient goes back through them. Returns the counts, [ranks, stages, 3] (forward, input gradient, weight
    gradient), and the sends, [ranks].
    """
    rules = schedule.rules
    own = np.array([[rules.rank_of(stage, p) == rank for stage in range(p * v)] for rank in range(p)], dtype=np.float64)
    counts, sends = np.repeat(m * own[:, :, None], 3, axis=2), np.zeros(p)
    if not rules.overlaps_steps:
        ways = 1 if rules.splits_backward else 3
        for rank in range(p):
            counts[rank, :rank, :ways] += 1
        sends += [rank * (1 if rules.splits_backward else 2) for rank in range(p)]
    return counts, sends


@lru_cache(maxsize=512)
def _many_paths(schedule: ScheduleName, p: int, v: int, m: int, units: Units) -> Paths:
    """Those of all schedules whose m is shortened to this."""
    return hop_paths(schedule, m, few_paths(schedule, p, v, m, units))


class _Gain:
    """What a path that stays on ``rank`` runs more, or less, than all actions of the rank, and its sends."""

    def __init__(self, rank: int, shape: tuple[int, int, int]) -> None:
        self.rank, (self._p, self._v, self._q) = rank, shape
        self.counts, self.sends = np.zeros((self._p * self._v, 3)), 0

    def fill(self, chunk: int, kinds: slice, *, waits: bool) -> _Gain:
        """Comes to the rank in ``chunk``; ``waits``: stays on rank 0 until then. Or goes so, turned round."""
        first = chunk * self._p
        self.counts[(first if waits else 0) : first + self.rank, kinds] += 1
        self.counts[self.rank : first : self._p, kinds] -= self._q
        if waits:
            self.counts[0 : first : self._p, kinds] += self._q
        self.sends += self.rank if waits else first + self.rank
        return self

    def detour(self, missed: int, kinds: slice, last: slice) -> _Gain:
        """Through the stages behind the rank's last and back; misses so many actions of kinds ``last`` there."""
        stage = (self._v - 1) * self._p + self.rank
        self.counts[stage + 1 :, kinds] += 1
        self.counts[stage, last] -= missed
        self.sends += 2 * (self._p - 1 - self.rank)
        return self

    def up(self, missed: int) -> _Gain:
        """Comes to the rank on the way up a V."""
        self.counts[: 2 * self._p - 1 - self.rank, 0] += 1
        self.counts[self.rank, 0] -= missed
        self.sends += 2 * self._p - 2 - self.rank
        return self


_FORWARD, _INPUT, _BACKWARD, _ALL = slice(0, 1), slice(0, 2), slice(1, 3), slice(0, 3)


def few_paths(schedule: ScheduleName, p: int, v: int, m: int, units: Units) -> Paths:
    """Paths of the kinds above."""
    q = min(m, schedule.rules.microbatches_a_round(p, m))
    has_rounds_alone = v > 1 and not schedule.rules.is_v  # then nothing else of m matters
    return _few_paths(schedule, (p, v, q), q if has_rounds_alone else m, units)


@lru_cache(maxsize=512)
def _few_paths(schedule: ScheduleName, shape: tuple[int, int, int], m: int, units: Units) -> Paths:
    rules, (p, v, q) = schedule.rules, shape
    rank_of = [rules.rank_of(stage, p) for stage in range(p * v)]
    if rules.is_v:
        gains = [_Gain(r, shape).fill(0, _FORWARD, waits=False) for r in range(p)]
        gains += [_Gain(r, shape).up(min(m, 2 * (p - r) - 1)) for r in range(p)]
    elif rules.splits_backward:
        gains = [_Gain(r, shape).fill(c, _FORWARD, waits=w) for c, w in _ways(p, v, q) for r in range(p)]
        gains += [
            _Gain(r, shape).fill(c, _FORWARD, waits=w).detour(min(p - r, q) - 1, _INPUT, _FORWARD)
            for c, w in _ways(p, v, q)
            for r in range(p)
        ]
    else:
        gains = [
            _Gain(r, shape).fill(c, _FORWARD, waits=w).fill(c, _BACKWARD, waits=w)
            for c, w in _ways(p, v, q)
            for r in range(p)
        ]
        if v == 1:
            gains += _one_f_one_b(shape, m)
    proportions = np.array(units) / np.sum(units, axis=1, keepdims=True)
    own = (np.array([gain.rank for gain in gains])[:, None] == np.array(rank_of)).astype(np.float64)
    counts, sends = np.array([gain.counts for gain in gains]), np.array([float(gain.sends) for gain in gains])
    # Where as many paths as there are entries count them all alike, their mean is near the best.
    size = p * v * len(units)
    likely = 2 * size + np.arange(size) if len(units) == 1 and len(gains) >= size else None
    return Paths(tuple(rank_of), proportions, own, counts, sends, likely)


def _ways(p: int, v: int, q: int) -> list[tuple[int, bool]]:
    """Chunks in which paths come to their rank, and whether they wait on rank 0 before; the plain way first.

    Where q > p, it takes longer to wait for a whole round than to go through all ranks.
    """
    ways = [(chunk, False) for chunk in range(v)]
    return ways + [(chunk, True) for chunk in range(1, v)] if q != p else ways


def _one_f_one_b(shape: tuple[int, int, int], m: int) -> list[_Gain]:
    """With a detour at the start, and with one at each end."""
    p = shape[0]
    gains: list[_Gain] = []
    for both in (False, True):
        for r in range(p):
            gain = _Gain(r, shape).fill(0, _ALL, waits=False).detour(min(p - r, m) - 1, _ALL, _FORWARD)
            gain.sends += r  # back as well
            if both and m > p - r:
                gain.detour(p - r - 1, _ALL, _BACKWARD)
            gains.append(gain)
    return gains
