"""Lower bounds of a pipeline's step that hold for every cut of the model into stages.

A step takes no less than any path through its actions: along a rank's order, and from an action to the one that needs
its result (``pipeline``). So it takes no less than a weighted mean of paths either, and that is linear in the stages'
seconds. With f_s, i_s and w_s those of stage s on one micro-batch forward, for the gradient of its input and for that
of its weights, and c the seconds of one send,

    T >= sum_s (a_s f_s + b_s i_s + c_s w_s) + n c

where a_s counts how often the mean path runs a forward of stage s, and so on. Whichever stage a unit of the model lies
in, it adds at least the least over s of its own a_s f + b_s i + c_s w (``PathBound.least``).

**The paths.** Each has one rank r on which it stays but for its two ends.

    start   the first micro-batch comes through the stages before one of rank r's, or stays on rank 0 until some chunk;
            it may go on from rank r through the stages behind it and back
    end     the last micro-batch's gradient goes back from one of rank r's stages to stage 0, or stays on rank 0 from
            some chunk on; before, it may go through the stages behind and back

What the path misses of rank r's own actions is counted from its list. In between it runs all of them: a schedule is a
warm-up, a pattern that repeats, and a cool-down; starts lie in the first and ends in the last, so for each further
micro-batch every path has just one more of each action of rank r's stages. Paths of a long schedule are thus counted in
a short one with equally long rounds. That a path is one does not depend on it: a start ends, and an end begins, with an
action of rank r, and the first comes before the second.

**The weights** are those of a linear program, the best for f = i = w. Its dual is the cut over which the bound is
sharp. They need not be exact: coefficients are sums of whole counts with the weights that were found, whatever those
are. Example, 1F1B of two ranks and four micro-batches: the path that stays on rank 0 and goes forward to rank 1 and
back at both ends, and the one that stays on rank 1, give 5/2 for each stage.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import combinations
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from costmodels.vocabulary.action import BACKWARD, FORWARD, INPUT_GRADIENT, WEIGHT_GRADIENT, Action, Kind
from costmodels.vocabulary.schedules import ScheduleName

Array = NDArray[np.float64]

# Rounds of micro-batches of the short schedule in which paths are counted: one of warm-up, one of cool-down, one more.
ROUNDS = 3
# The program is solved so closely: what is left is a looser bound, never a wrong one.
TOLERANCE = 2e-4
MOST_STEPS = 2000
_ROUNDING = 1e-12
_COLUMNS: dict[Kind, tuple[int, ...]] = {FORWARD: (0,), INPUT_GRADIENT: (1,), WEIGHT_GRADIENT: (2,), BACKWARD: (1, 2)}


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
        """What a unit with these seconds on one micro-batch adds to the step at least; arrays of any equal shape."""
        times = np.stack([forward_s, input_s, weight_s])
        return np.tensordot(self.rows, times, axes=1).min(axis=0)


class _End(NamedTuple):
    """One end of a path on some rank: what it has more, or less, than all actions of the rank."""

    counts: Array  # [stages, 3]
    sends: int
    place: int  # in the rank's list: of the first action of it that follows a start, or of the last before an end


class _Choice(NamedTuple):
    """A path: the rank it stays on, and which of the rank's starts and ends it has."""

    rank: int
    start: int
    end: int


@lru_cache(maxsize=4096)
def coefficients(schedule: ScheduleName, p: int, v: int, m: int) -> PathBound:
    """The bound of ``schedule`` on p ranks of v stages each with m micro-batches; ValueError if it cannot run."""
    family = _family(schedule, p, v, m)
    weights = _best_weights(family, m)
    counts, sends = np.zeros((p * v, 3)), 0.0
    for choice, weight in weights.items():
        counts += weight * family.path(choice, m)
        sends += weight * family.sends(choice)
    total = sum(weights.values()) * (1 + _ROUNDING)
    return PathBound(_undominated(counts / total), sends / total)


def rank_coefficients(schedule: ScheduleName, p: int, v: int, m: int) -> tuple[Array, Array]:
    """For each rank the path that stays on it as long as there is one: T >= sum of counts times seconds, and sends.

    The first micro-batch comes through the first stages of the ranks before, and the last gradient goes back through
    them where backward passes are whole. Returns the counts, [ranks, stages, 3] (forward, input gradient, weight
    gradient), and the sends, [ranks].
    """
    family = _family(schedule, p, v, m)
    plain = [_Choice(rank, 0, 0) for rank in range(p)]
    counts = np.array([family.path(choice, m) for choice in plain])
    return counts, np.array([family.sends(choice) for choice in plain], dtype=np.float64)


@dataclass(frozen=True)
class _Family:
    """Starts and ends of the paths of each rank; any two of one rank make a path. The first of each are plain."""

    own: Array  # [ranks, stages], 1 where the rank has the stage
    starts: tuple[tuple[_End, ...], ...]
    ends: tuple[tuple[_End, ...], ...]

    def path(self, choice: _Choice, m: int) -> Array:
        """How often the path runs each stage: [stages, 3]."""
        start, end = self.starts[choice.rank][choice.start], self.ends[choice.rank][choice.end]
        return m * self.own[choice.rank][:, None] + start.counts + end.counts

    def sends(self, choice: _Choice) -> int:
        """Sends between ranks on the path."""
        return self.starts[choice.rank][choice.start].sends + self.ends[choice.rank][choice.end].sends

    def longest(self, stages_s: Array, m: int) -> _Choice:
        """The longest path where each kind of action of a stage takes ``stages_s`` seconds, [stages]."""
        best = []
        for table, first in (self._stacked_starts, self._stacked_ends):
            values = table @ stages_s
            best.append((np.maximum.reduceat(values, first), values, first))
        rank = int(np.argmax(3 * m * (self.own @ stages_s) + best[0][0] + best[1][0]))
        start, end = (
            int(np.argmax(values[first[rank] : (*first, len(values))[rank + 1]])) for _, values, first in best
        )
        return _Choice(rank, start, end)

    @cached_property
    def _stacked_starts(self) -> tuple[Array, NDArray[np.intp]]:
        return _stacked(self.starts)

    @cached_property
    def _stacked_ends(self) -> tuple[Array, NDArray[np.intp]]:
        return _stacked(self.ends)


def _stacked(ends: Sequence[Sequence[_End]]) -> tuple[Array, NDArray[np.intp]]:
    """All counts, the kinds in one, [ends of all ranks, stages], and where each rank's begin."""
    counts = np.array([each.counts.sum(axis=1) for rank in ends for each in rank])
    return counts, np.cumsum([0, *map(len, ends[:-1])])


def _best_weights(family: _Family, m: int) -> dict[_Choice, float]:
    """Weights of paths whose mean has its least coefficient nearly as large as can be, f = i = w.

    Minimises the sum of weights y >= 0 with sum_P y_P a_P(s) >= 1 for all stages s, by the revised simplex method:
    paths are made where they are wanted. It begins with paths of one stage each, m times, which is less than the plain
    path of that stage's rank. Its prices are a cut over the stages; no path of the family is longer than 1 + TOLERANCE
    on the last of them, so no weights give more than that much more.
    """
    num_stages = family.own.shape[1]
    basis: list[_Choice | None] = [_Choice(int(rank), 0, 0) for rank in family.own.argmax(axis=0)]
    inverse = np.eye(num_stages) / (3 * m)
    costs = np.ones(num_stages)
    for _ in range(MOST_STEPS):
        prices = costs @ inverse
        choice, column = _entering(family, prices, m)
        if column is None:
            break
        step = inverse @ column
        level = inverse.sum(axis=1)
        ratio = np.where(step > 1e-9, level / np.where(step > 1e-9, step, 1.0), np.inf)
        leaving = int(np.argmin(ratio))
        pivot = inverse[leaving] / step[leaving]
        inverse -= np.outer(step, pivot)
        inverse[leaving] = pivot
        basis[leaving], costs[leaving] = choice, 0.0 if choice is None else 1.0
    weights: dict[_Choice, float] = {}
    for choice, level in zip(basis, inverse.sum(axis=1).tolist(), strict=True):
        if choice is not None and level > 0:
            weights[choice] = weights.get(choice, 0.0) + level
    return weights


def _entering(family: _Family, prices: Array, m: int) -> tuple[_Choice | None, Array | None]:
    """The path, or what a stage has too much (None), that improves the mean; twice None where none does."""
    if prices.min() < -1e-12:
        column = np.zeros(len(prices))
        column[prices.argmin()] = -1.0
        return None, column
    choice = family.longest(prices, m)
    column = family.path(choice, m).sum(axis=1)
    return (choice, column) if prices @ column > 1 + TOLERANCE else (None, None)


def _undominated(rows: Array) -> Array:
    """Without rows that are nowhere below another."""
    rows = np.unique(rows * (1 - _ROUNDING), axis=0)
    no_less = (rows[:, None, :] >= rows[None, :, :]).all(axis=2)
    np.fill_diagonal(no_less, val=False)
    return rows[~no_less.any(axis=1)]


def _family(schedule: ScheduleName, p: int, v: int, m: int) -> _Family:
    rules = schedule.rules
    found = rules.violations(p, v, m)
    if found:
        raise ValueError("; ".join(found))
    return _short_family(schedule, p, v, rules.shortened(p, m, ROUNDS))


@lru_cache(maxsize=512)
def _short_family(schedule: ScheduleName, p: int, v: int, m: int) -> _Family:
    rules = schedule.rules
    lists = rules.actions(p, v, m)
    rank_of = [rules.rank_of(stage, p) for stage in range(p * v)]
    ranks = [_Rank(rank, rank_of, actions, m) for rank, actions in enumerate(lists)]
    own = np.array([[1.0 if other == rank else 0.0 for other in rank_of] for rank in range(p)])
    hub = None if rules.overlaps_steps else ranks[0]
    starts: list[tuple[_End, ...]] = []
    ends: list[tuple[_End, ...]] = []
    for each in ranks:
        first, last = each.starts(hub), each.ends(hub, plain_returns=not rules.splits_backward)
        if rules.forwards_first:
            first.append(each.turn(first[0]))
        # With few micro-batches an end may begin before a start ends; those that go with all others stay.
        first = [start for start in first if start.place <= last[0].place]
        latest = max(start.place for start in first)
        starts.append(tuple(first))
        ends.append(tuple(end for end in last if end.place >= latest))
    return _Family(own, tuple(starts), tuple(ends))


class _Rank:
    """One rank's list of actions, and the ends of paths on it.

    A micro-batch's way has 2 S steps for S stages: forward through stage s is step s, backward step 2 S - 1 - s.
    """

    def __init__(self, rank: int, rank_of: list[int], actions: Sequence[Action], m: int) -> None:
        self._rank_of, self._num_stages = rank_of, len(rank_of)
        self.rank, self._m, self._length = rank, m, len(actions)
        self._stages = [stage for stage, other in enumerate(rank_of) if other == rank]
        local = {stage: place for place, stage in enumerate(self._stages)}
        ran = np.zeros((len(actions) + 1, len(local), 3))
        self._splits = any(action.kind == WEIGHT_GRADIENT for action in actions)
        self._places: list[dict[int, int]] = [{}, {}]  # of the first and the last micro-batch: step -> place
        for place, (kind, stage, microbatch) in enumerate(actions):
            ran[place + 1, local[stage], _COLUMNS[kind]] = 1
            if kind != WEIGHT_GRADIENT:
                step = stage if kind == FORWARD else 2 * self._num_stages - 1 - stage
                for which, end in enumerate((0, m - 1)):
                    if microbatch == end:
                        self._places[which][step] = place
        self._ran = np.cumsum(ran, axis=0)  # [place, own stages, 3]: run before each place

    @property
    def steps(self) -> list[int]:
        """Steps of a micro-batch's way that are on this rank."""
        return sorted(self._places[0])

    def _between(self, first: int, end: int) -> Array:
        """What the rank runs from one place until before another; [stages, 3]."""
        found = np.zeros((self._num_stages, 3))
        found[self._stages] = self._ran[end] - self._ran[first]
        return found

    def _way(self, first: int, end: int) -> Array:
        """The steps from one until before another; [stages, 3]."""
        found = np.zeros((2 * self._num_stages, 3))
        found[first : min(end, self._num_stages), 0] = 1
        found[max(first, self._num_stages) : end, 1] = 1
        if not self._splits:
            found[max(first, self._num_stages) : end, 2] = 1
        return found[: self._num_stages] + found[: self._num_stages - 1 : -1]

    def _hops(self, first: int, last: int) -> int:
        """Sends from one step to another."""
        ranks = [*self._rank_of, *reversed(self._rank_of)][first : last + 1]
        return sum(a != b for a, b in zip(ranks, ranks[1:], strict=False))

    def _detours(self, which: int) -> list[tuple[int, int, Array, int]]:
        """Ways of the first or last micro-batch that leave the rank and come back to it, and what they gain.

        (step at which it leaves, step at which it is back, counts, sends). Of ranks with many stages only the one
        from the last stage forward to the same backward.
        """
        places, steps = self._places[which], self.steps
        middle = len(steps) // 2
        pairs = list(combinations(steps, 2)) if len(steps) <= 4 else [(steps[middle - 1], steps[middle])]
        return [
            (a, b, self._way(a + 1, b) - self._between(places[a] + 1, places[b]), self._hops(a, b)) for a, b in pairs
        ]

    def starts(self, hub: _Rank | None) -> list[_End]:
        """The plain one first; ``hub`` is rank 0, or None where paths must begin on this rank."""
        places = self._places[0]
        found: list[_End] = []
        for step in self.steps[: len(self._stages)] if hub else ():
            before = self._between(0, places[step])
            found.append(_End(self._way(0, step) - before, self._hops(0, step), places[step]))
            by = max(other for other in hub.steps if other <= step)
            if hub is not self and by > 0:
                stay = hub._between(0, hub._places[0][by] + 1)
                found.append(_End(stay + self._way(by + 1, step) - before, self._hops(by, step), places[step]))
        if not hub:
            found.append(_End(np.zeros((self._num_stages, 3)), 0, 0))
        detours = self._detours(0)
        return found + [
            _End(start.counts + gain, start.sends + hops, places[back])
            for start in found
            for away, back, gain, hops in detours
            if places[away] >= start.place
        ]

    def ends(self, hub: _Rank | None, *, plain_returns: bool) -> list[_End]:
        """As ``starts``; the plain one goes back to stage 0 if ``plain_returns``, and otherwise stays on the rank."""
        places = self._places[1]
        found = [_End(np.zeros((self._num_stages, 3)), 0, self._length - 1)]
        for step in self.steps[len(self._stages) :] if hub else ():
            after = self._between(places[step] + 1, self._length)
            for to in sorted({min(other for other in hub.steps if other >= step), 2 * self._num_stages - 1}):
                stay = hub._between(hub._places[1][to] + 1, hub._length)
                found.append(_End(self._way(step + 1, to + 1) + stay - after, self._hops(step, to), places[step]))
        if plain_returns and hub:
            found.insert(0, found.pop())
        detours = self._detours(1)
        return found + [
            _End(end.counts + gain, end.sends + hops, places[away])
            for end in found
            for away, back, gain, hops in detours
            if places[back] <= end.place
        ]

    def turn(self, start: _End) -> _End:
        """GPipe's: ``start``, all forwards, the last one on to the last rank, and back with the first backward."""
        first, last = self.steps
        gain, hops = self._way(first + 1, last), self._hops(first, last)
        return _End(start.counts + gain, start.sends + hops, self._places[0][last])
