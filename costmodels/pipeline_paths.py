"""Lower bounds of a pipeline's step that hold for every cut of the model into stages.

A step takes no less than any path through its actions: along a rank's order, and from an action to the one that needs
its result (``pipeline``). So it takes no less than a weighted mean of paths, and that is linear in the stages' seconds.
With f_s, i_s and w_s those of stage s on one micro-batch forward, for the gradient of its input and for that of its
weights, and c the seconds of one send,

    T >= sum_s (a_s f_s + b_s i_s + c_s w_s) + n c

where a_s counts how often the mean path runs stage s forward, and so on. Whichever stage a unit of the model lies in,
it adds at least the least over s of its own a_s f + b_s i + c_s w (``PathBound.least``).

**Paths.** Each stays on one rank r but for its two ends. At its start it hops from rank to rank with micro-batches of
the first round, as often as it likes, at its end with micro-batches of the last round. Let R(x) be what the rank of
action x has run when x ends. A path that comes to x with a hop from y has y and x, and all before y, but not what x's
rank ran before x. Its gain over staying on one rank, G, is what it has when x ends, less R(x):

    after a hop from y to x    G(x) = G(y) + R(y) + x - R(x)        while it stays on a rank G does not change

A path on rank r thus has all of r's actions and the gains of its hops; what holds of starts holds of ends with the
order of everything turned round. The hops of a start end, and those of an end begin, on opposite sides of the middle of
r's list, so that each start of r makes a path with each end of r.

**Long schedules.** They have a warm-up, a pattern that repeats once a round, and a cool-down. The first round's
micro-batches have left within the first three rounds, before the cool-down, and what was run before them is the same
however many rounds follow: so are the gains. Paths are made in a schedule of ``ROUNDS`` rounds, and in one of m
micro-batches they have m of each action of rank r's stages, and the same gains.

**Weights** are those of a linear program, best for f = i = w; its dual is a cut for which the bound is sharp. They need
not be exact: coefficients are sums of whole counts with the weights found, whatever those are. Example, 1F1B of two
ranks and four micro-batches: a path that stays on rank 0 and hops to rank 1 and back at both ends has each stage's
actions 3 and 2 times, one that stays on rank 1 once and 4 times. With weights 3/4 and 1/4 each stage counts 5/2 times.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from costmodels.vocabulary.action import (
    BACKWARD,
    FORWARD,
    INPUT_GRADIENT,
    WEIGHT_GRADIENT,
    Action,
    ActionLists,
    Kind,
)
from costmodels.vocabulary.schedules import ScheduleName

Array = NDArray[np.float64]

# Rounds of micro-batches of the schedule in which paths are made: hops of the first, one between, hops of the last.
ROUNDS = 4
# Paths of long schedules are chosen for as many rounds; other numbers take the best mean of the same paths.
TYPICAL_ROUNDS = 8
# Steps of micro-batches between which paths may hop, at each end: more make little difference and cost time.
MOST_NODES = 256
# How closely the program is solved: what is left is a looser bound, never a wrong one.
TOLERANCE = 2e-4
MOST_STEPS = 4000
_ROUNDING = 1e-12
_COLUMNS: dict[Kind, tuple[int, ...]] = {FORWARD: (0,), INPUT_GRADIENT: (1,), WEIGHT_GRADIENT: (2,), BACKWARD: (1, 2)}


# Proportions of the seconds of units: forward, gradient of the input, gradient of the weights. WHOLE is any at all.
Units = tuple[tuple[float, float, float], ...]
WHOLE: Units = ((1.0, 0.0, 0.0), (0.0, 1.0, 1.0))
SPLIT: Units = ((1.2, 1.0, 1.0), (1.0, 1.2, 1.0), (1.0, 1.0, 1.2))


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


@lru_cache(maxsize=4096)
def coefficients(schedule: ScheduleName, p: int, v: int, m: int, units: Units | None = None) -> PathBound:
    """The bound of ``schedule`` on p ranks of v stages each with m micro-batches; ValueError if it cannot run.

    T is the whole step, or the longest rank's where the schedule overlaps steps. It holds for all units, and is largest
    where they take seconds in the proportions of ``units`` or between (None: ``WHOLE`` or ``SPLIT``).
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
    units = units or (SPLIT if rules.splits_backward else WHOLE)
    paths = _paths(schedule, p, v, rules.shortened(p, m, ROUNDS), units)
    weights = np.maximum(_best_mean(paths.columns(m), m, paths.basis).weights(paths), 0.0)
    weights /= weights.sum() * (1 + _ROUNDING)
    stages = m * (weights @ paths.own)[:, None] + np.tensordot(weights, paths.gains, axes=1)
    return PathBound(_undominated(stages * (1 - _ROUNDING)), float(weights @ paths.sends))


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
        sends = np.arange(p) * (1.0 if rules.splits_backward else 2.0)
    return counts, sends


class _Mean(NamedTuple):
    """A basis of the program (``_best_mean``), its levels and its prices."""

    basis: NDArray[np.intp]
    levels: Array
    prices: Array

    def weights(self, paths: _Paths) -> Array:
        """Of each path; a stage's own column stands for less than its rank's first path."""
        size, found = len(self.basis), np.zeros(len(paths.sends))
        for column, level in zip(self.basis.tolist(), self.levels.tolist(), strict=True):
            if column < size:
                found[paths.rank_of[column // len(paths.units)]] += level
            elif column >= 2 * size:
                found[column - 2 * size] += level
        return found


@dataclass(frozen=True)
class _Paths:
    """Paths of one schedule of any number of rounds; the first of each rank has no gains."""

    rank_of: tuple[int, ...]  # of each stage
    units: Array  # [units, 3], the proportions for which the best mean is wanted; each sums to 1
    own: Array  # [paths, stages], 1 where the path's rank has the stage
    gains: Array  # [paths, stages, 3]
    sends: Array  # [paths]
    basis: NDArray[np.intp] | None = None

    def columns(self, m: int) -> Array:
        """What each of ``units`` takes in each stage: [paths, stages and units]."""
        return (m * self.own[..., None] + self.gains @ self.units.T).reshape(len(self.own), -1)

    def prices(self, mean: _Mean) -> Array:
        """Of one run of each kind in each stage; [stages, 3]."""
        return mean.prices.reshape(-1, len(self.units)) @ self.units


def _best_mean(columns: Array, m: int, basis: NDArray[np.intp] | None) -> _Mean:
    """The mean of paths whose least entry is nearly as large as can be; ``columns`` [paths, entries].

    Minimises the sum of levels y >= 0 with sum_P y_P column_P >= 1 in all entries, by the revised simplex method. The
    first columns, from which it begins, have one entry each, m; the next stand for what an entry has too much; the paths
    follow. The last prices are a cut of the units over the stages: none of the paths is longer on it than 1 +
    TOLERANCE, so no mean of them gives more than that much more.
    """
    size = columns.shape[1]
    every = np.vstack([m * np.eye(size), -np.eye(size), columns])
    costs = np.ones(len(every))
    costs[size : 2 * size] = 0.0
    start, inverse = np.arange(size), np.eye(size) / m
    if basis is not None:
        warm = np.linalg.inv(every[basis].T)
        if warm.sum(axis=1).min() >= 0:
            start, inverse = basis.copy(), warm
    paid, levels = costs[start], inverse.sum(axis=1)
    for _ in range(MOST_STEPS):
        worth = every @ (paid @ inverse) - costs
        worth[size : 2 * size] *= m  # as the others: in steps
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
    return _Mean(start, levels, paid @ inverse)


def _undominated(rows: Array) -> Array:
    """Without rows that are nowhere below another."""
    rows = np.unique(rows, axis=0)
    no_less = (rows[:, None, :] >= rows[None, :, :]).all(axis=2)
    np.fill_diagonal(no_less, val=False)
    return rows[~no_less.any(axis=1)]


@lru_cache(maxsize=512)
def _paths(schedule: ScheduleName, p: int, v: int, m: int, units: Units) -> _Paths:
    """The paths of which the best mean consists, made one after another where the prices of a mean want them."""
    rules = schedule.rules
    rank_of = tuple(rules.rank_of(stage, p) for stage in range(p * v))
    own = np.array([[float(rank == other) for other in rank_of] for rank in range(p)])
    lists = rules.actions(p, v, m)
    typical = m if m // p < ROUNDS else m + (TYPICAL_ROUNDS - ROUNDS) * rules.microbatches_a_round(p, m)
    a_round = min(m, rules.microbatches_a_round(p, m))
    wanted = max(1, min(a_round, MOST_NODES // (2 * p * v)))
    microbatches = sorted({(a_round - 1) * k // max(1, wanted - 1) for k in range(wanted)})
    starts = _Hops.of(lists, rank_of, microbatches, turned=False)
    ends = _Hops.of(tuple(_turned(actions, m) for actions in lists), rank_of, microbatches, turned=True)
    proportions = np.array(units) / np.sum(units, axis=1, keepdims=True)
    found = _Paths(rank_of, proportions, own, np.zeros((p, p * v, 3)), np.zeros(p))
    mean = None
    while True:
        mean = _best_mean(found.columns(typical), typical, None if mean is None else mean.basis)
        prices = found.prices(mean)
        start, end = starts.longest(prices), ends.longest(prices)
        longest = typical * (own @ prices.sum(axis=1)) + start.gain + end.gain
        better = np.flatnonzero(longest > 1 + TOLERANCE)
        if not better.size:
            return replace(found, basis=mean.basis)
        pairs = [(starts.counted(start, rank), ends.counted(end, rank)) for rank in better.tolist()]
        found = replace(
            found,
            own=np.concatenate([found.own, own[better]]),
            gains=np.concatenate([found.gains, [a + b for (a, _), (b, _) in pairs]]),
            sends=np.concatenate([found.sends, [float(a + b) for (_, a), (_, b) in pairs]]),
        )


class _Longest(NamedTuple):
    """The longest path to every node at some prices, over staying on one rank."""

    gain: Array  # [ranks], of the longest that arrives on the rank before the middle of its list
    hops: list[bool]  # [nodes], whether it comes to the node with a hop


@dataclass(frozen=True)
class _Hops:
    """Where the ends of paths may hop: nodes are steps of some micro-batches, sorted so that paths go forward.

    A micro-batch's way has 2 S steps for S stages: forward through stage s is step s, backward step 2 S - 1 - s. Turned
    round it is the other way about.
    """

    rank: list[int]
    before: list[int]  # of each node the one before it on its rank; -1: none
    source: list[int]  # the one it gets its input from; -1: none
    gains: Array  # [nodes, stages, 3], of the hop from there
    arrival: list[int]  # of each rank the last node in the first half of its list; -1: none

    @staticmethod
    def of(lists: ActionLists, rank_of: Sequence[int], microbatches: Sequence[int], *, turned: bool) -> _Hops:
        """Hops with these micro-batches; ``turned``: ``lists`` run from the end to the beginning."""
        nodes = _sorted_nodes([_nodes(actions, rank_of, microbatches, turned=turned) for actions in lists])
        places = {(node.step, node.microbatch): index for index, node in enumerate(nodes)}
        source = [places.get((node.step - 1, node.microbatch), -1) for node in nodes]
        ran = np.zeros((len(nodes), len(rank_of), 3))
        gains = np.zeros_like(ran)
        before, arrival, newest = [-1] * len(nodes), [-1] * len(lists), [-1] * len(lists)
        for index, node in enumerate(nodes):
            rank = rank_of[node.stages[0]]
            ran[index, node.stages] = node.ran
            before[index], newest[rank] = newest[rank], index
            if node.is_early:
                arrival[rank] = index
            if source[index] >= 0:
                gains[index] = ran[source[index]] - ran[index]
                gains[index, node.action.stage, _COLUMNS[node.action.kind]] += 1
        return _Hops([rank_of[node.action.stage] for node in nodes], before, source, gains, arrival)

    def longest(self, prices: Array) -> _Longest:
        """At ``prices`` of one run of each kind in each stage, [stages, 3]."""
        found: list[float] = []
        hops: list[bool] = []
        gains = self.gains.reshape(len(self.gains), -1) @ prices.ravel()
        for before, source, gain in zip(self.before, self.source, gains.tolist(), strict=True):
            stay = found[before] if before >= 0 else 0.0
            hop = found[source] + gain if source >= 0 else -np.inf
            hops.append(hop > stay + 1e-12)
            found.append(max(stay, hop))
        return _Longest(np.array([found[node] if node >= 0 else 0.0 for node in self.arrival]), hops)

    def counted(self, longest: _Longest, rank: int) -> tuple[Array, int]:
        """The gains, [stages, 3], and the sends of the longest path that arrives on a rank."""
        node, taken = self.arrival[rank], list[int]()
        while node >= 0:
            if longest.hops[node]:
                taken.append(node)
                node = self.source[node]
            else:
                node = self.before[node]
        sends = sum(self.rank[node] != self.rank[self.source[node]] for node in taken)
        return self.gains[taken].sum(axis=0), sends


class _Node(NamedTuple):
    """A step of a micro-batch."""

    step: int
    microbatch: int
    action: Action
    is_early: bool  # in the first half of its rank's list
    stages: list[int]  # of the rank
    ran: Array  # [those, 3], what the rank has run when it ends


def _nodes(
    actions: Sequence[Action], rank_of: Sequence[int], microbatches: Sequence[int], *, turned: bool
) -> list[_Node]:
    """Those of one rank in its order."""
    num_stages, rank = len(rank_of), rank_of[actions[0].stage]
    stages = [stage for stage, other in enumerate(rank_of) if other == rank]
    kinds: tuple[Kind, ...] = (FORWARD, INPUT_GRADIENT, WEIGHT_GRADIENT, BACKWARD)
    place = {(kind, stage): len(kinds) * i + k for i, stage in enumerate(stages) for k, kind in enumerate(kinds)}
    each = np.zeros((len(actions), len(place)))
    each[np.arange(len(actions)), [place[kind, stage] for kind, stage, _ in actions]] = 1
    ran = each.cumsum(axis=0).reshape(len(actions), len(stages), len(kinds))
    ran = ran[..., :3] + ran[..., 3:] * np.array([0.0, 1.0, 1.0])
    wanted, half = set(microbatches), (len(actions) - 1) // 2
    return [
        _Node(
            stage if (kind == FORWARD) != turned else 2 * num_stages - 1 - stage,
            microbatch,
            actions[index],
            index <= half,
            stages,
            ran[index],
        )
        for index, (kind, stage, microbatch) in enumerate(actions)
        if microbatch in wanted and kind != WEIGHT_GRADIENT
    ]


def _sorted_nodes(ranks: Sequence[Sequence[_Node]]) -> list[_Node]:
    """All nodes, each after the one before it on its rank and after the one it gets its input from."""
    found: list[_Node] = []
    done: set[tuple[int, int]] = set()
    waiting: dict[tuple[int, int], int] = {}
    ready, places = list(range(len(ranks))), [0] * len(ranks)
    while ready:
        rank = ready.pop()
        for node in ranks[rank][places[rank] :]:
            source = (node.step - 1, node.microbatch)
            if node.step > 0 and source not in done:
                waiting[source] = rank
                break
            found.append(node)
            done.add((node.step, node.microbatch))
            places[rank] += 1
            if (node.step, node.microbatch) in waiting:
                ready.append(waiting.pop((node.step, node.microbatch)))
    return found


def _turned(actions: Sequence[Action], m: int) -> tuple[Action, ...]:
    """From the end to the beginning, the last micro-batch first."""
    return tuple(Action(kind, stage, m - 1 - microbatch) for kind, stage, microbatch in reversed(actions))
