"""The paths through a pipeline's actions whose mean bounds its step best, out of all those of a large family.

Each path stays on one rank r but for its two ends. At its start it hops from rank to rank with micro-batches of
the first round, as often as it likes, at its end with micro-batches of the last round. Let R(x) be what the rank of
action x has run when x ends. A path that comes to x with a hop from y has y and x, and all before y, but not what x's
rank ran before x. Its gain over staying on one rank, G, is what it has when x ends, less R(x):

    after a hop from y to x    G(x) = G(y) + R(y) + x - R(x)        while it stays on a rank G does not change

A path on rank r thus has all of r's actions and the gains of its hops; what holds of starts holds of ends with the
order of everything turned round. The hops of a start end, and those of an end begin, on opposite sides of the middle of
r's list, so that each start of r makes a path with each end of r.

Long schedules have a warm-up, a pattern that repeats once a round, and a cool-down. The first round's
micro-batches have left within the first three rounds, before the cool-down, and what was run before them is the same
however many rounds follow: so are the gains. Paths are made in a schedule of ``ROUNDS`` rounds, and in one of m
micro-batches they have m of each action of rank r's stages, and the same gains.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from costmodels.path_mean import TOLERANCE, Array, Paths, best_mean
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

# Rounds of micro-batches of the schedule in which paths are made: hops of the first, some between, hops of the last.
ROUNDS = 4
# Paths of long schedules are chosen for as many rounds; other numbers take the best mean of the same paths.
TYPICAL_ROUNDS = 8
# Steps of micro-batches between which paths may hop, at each end: more make little difference and cost time.
MOST_NODES = 256
MOST_PASSES = 200
_COLUMNS: dict[Kind, tuple[int, ...]] = {FORWARD: (0,), INPUT_GRADIENT: (1,), WEIGHT_GRADIENT: (2,), BACKWARD: (1, 2)}


def hop_paths(schedule: ScheduleName, m: int, first: Paths) -> Paths:
    """Paths for m micro-batches or more rounds of them, ``first`` among them.

    They are made one after another where the prices of a mean want them, until no path of the family betters the mean.
    """
    rules, rank_of = schedule.rules, first.rank_of
    p = 1 + max(rank_of)
    v = len(rank_of) // p
    own = np.array([[float(rank == other) for other in rank_of] for rank in range(p)])
    lists = rules.actions(p, v, m)
    typical = m if m // p < ROUNDS else m + (TYPICAL_ROUNDS - ROUNDS) * rules.microbatches_a_round(p, m)
    a_round = min(m, rules.microbatches_a_round(p, m))
    wanted = max(1, min(a_round, MOST_NODES // (2 * p * v)))
    microbatches = sorted({(a_round - 1) * k // max(1, wanted - 1) for k in range(wanted)})
    starts = _Hops.of(lists, rank_of, microbatches, turned=False)
    ends = _Hops.of(tuple(_turned(actions, m) for actions in lists), rank_of, microbatches, turned=True)
    found, basis = first, first.basis
    for _ in range(MOST_PASSES):
        mean = best_mean(found.columns(typical), typical, basis)
        basis = mean.basis
        prices = found.prices(mean)
        start, end = starts.longest(prices), ends.longest(prices)
        longest = typical * (own @ prices.sum(axis=1)) + start.gain + end.gain
        better = np.flatnonzero(longest > 1 + TOLERANCE)
        if not better.size:
            break
        pairs = [(starts.counted(start, rank), ends.counted(end, rank)) for rank in better.tolist()]
        found = replace(
            found,
            own=np.concatenate([found.own, own[better]]),
            gains=np.concatenate([found.gains, [a + b for (a, _), (b, _) in pairs]]),
            sends=np.concatenate([found.sends, [float(a + b) for (_, a), (_, b) in pairs]]),
        )
    return replace(found, basis=basis)


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
