"""Time of one pipeline step, by running the very action list that the executor runs, action by action.

    start(action) = max(end of the rank's previous action, arrival of the input)
    arrival       = max(end of the producer, arrival of what its rank sent before) + its send_s,
                    or the producer's end where both stages live on one rank
    F(s, i) needs F(s-1, i);  B(s, i) needs B(s+1, i), and in the last stage F(s, i)
    I(s, i) needs and is needed as B is;  W(s, i) needs I(s, i) alone, which its rank has run before

A rank's link carries one result after another: a step takes no less than all that its busiest rank sends.
Where sends block, a rank begins its next action only when what it sends has arrived. On demand nothing arrives while
the receiver works:

    start(action) = max(end of the rank's previous action, end of the producer) + send_s of the producer

A discrete-event simulation of a static list schedule; each action is visited once. Closed forms it meets with equal
stages and free sends (Narayanan et al. 2021): (m + p - 1)·(f + b) for GPipe and 1F1B, and a bubble shorter by the
number of virtual stages for Interleaved1F1B. Where F, I and W are equally long the schedules that split backward passes
leave a third of the bubble (InterleavedZeroBubble) or none (ZB-2P, ZBVZeroBubble; Qi et al. 2024).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple

import numpy as np

from costmodels.vocabulary.action import (
    KINDS,
    Action,
    ActionColumns,
    ActionLists,
    Positions,
    Transfer,
)

ActionSeconds = tuple[tuple[float, ...], ...]  # laid out as the schedule is


class TimedAction(NamedTuple):
    """An action and when it runs."""

    action: Action
    start_s: float
    end_s: float


@dataclass(frozen=True)
class Timeline:
    """When every action of a schedule runs; ``start_s`` and ``end_s`` are laid out as ``schedule`` is."""

    schedule: ActionLists
    start_s: tuple[tuple[float, ...], ...]
    end_s: tuple[tuple[float, ...], ...]

    @cached_property
    def ranks(self) -> tuple[tuple[TimedAction, ...], ...]:
        """Every rank's actions with their times, in order."""
        return tuple(
            tuple(map(TimedAction, actions, starts, ends))
            for actions, starts, ends in zip(self.schedule, self.start_s, self.end_s, strict=True)
        )

    @cached_property
    def makespan_s(self) -> float:
        """From the start of the step to the end of the last action of any rank."""
        return max((ends[-1] for ends in self.end_s if ends), default=0.0)

    @cached_property
    def longest_rank_s(self) -> float:
        """From the first to the last action of one rank: a step where ranks begin the next without waiting."""
        spans = (ends[-1] - starts[0] for starts, ends in zip(self.start_s, self.end_s, strict=True) if ends)
        return max(spans, default=0.0)

    @cached_property
    def busy_s(self) -> tuple[float, ...]:
        """Seconds each rank computes."""
        return tuple(
            sum(end - start for start, end in zip(starts, ends, strict=True))
            for starts, ends in zip(self.start_s, self.end_s, strict=True)
        )


@dataclass(frozen=True)
class _Problem:
    """The schedule in numbers: forward of stage s and micro-batch i has key s·m + i.

    The gradient of the stage's input follows all those, whether B or I makes it, and then the weight gradients.
    """

    keys: tuple[tuple[int, ...], ...]  # of every rank's actions
    seconds: tuple[tuple[float, ...], ...]  # of every rank's actions
    producers: list[int]  # for each key the key of its input; -1: none
    rank_of_stage: tuple[int, ...]
    num_microbatches: int

    @property
    def num_keys(self) -> int:
        return 3 * len(self.rank_of_stage) * self.num_microbatches


def simulate(
    schedule: ActionLists,
    forward_s: Sequence[float],
    backward_s: Sequence[float],
    send_s: float | Sequence[float],
    split_s: tuple[Sequence[float], Sequence[float]] | None = None,
    *,
    transfer: Transfer = Transfer.AHEAD,
) -> Timeline:
    """Runs ``schedule`` with the given seconds of each stage and of one send between ranks.

    ``forward_s`` and ``backward_s`` are indexed by stage, and so are the two of ``split_s``: input and weight
    gradient where the schedule runs them apart. ``send_s[k]`` is from stage k to the next and back, one number all of
    them; ``transfer`` says when it begins and who waits for it. ValueError if the lists do not fit together or if the
    order of actions can never complete (deadlock; the message names the actions that wait).
    """
    sends = [send_s] * (len(forward_s) - 1) if isinstance(send_s, float | int) else send_s
    return simulate_actions(
        schedule, seconds_of_actions(schedule, forward_s, backward_s, split_s), sends, transfer=transfer
    )


def simulate_actions(
    schedule: ActionLists, seconds: ActionSeconds, send_s: Sequence[float], *, transfer: Transfer = Transfer.AHEAD
) -> Timeline:
    """As ``simulate``, with the seconds of every action by itself: what runs beside another may take less."""
    problem, sends = _number(schedule, seconds, len(send_s) + 1), send_s
    over_borders_s = ways_s(problem.rank_of_stage, sends)
    producers, on_demand, blocking = problem.producers, transfer is Transfer.ON_DEMAND, transfer is Transfer.BLOCKING
    nothing = [0.0] * problem.num_keys
    way_to = _way_to(problem, over_borders_s) if on_demand else nothing
    held_s = nothing if on_demand else _held_s(problem, over_borders_s)
    arrival = [-1.0] * problem.num_keys  # of an action's result at its consumer; -1: not run yet
    waiting = [-1] * problem.num_keys  # rank that cannot go on before it
    starts: list[list[float]] = [[] for _ in schedule]
    ends: list[list[float]] = [[] for _ in schedule]
    ready = list(range(len(schedule)))
    free = [0.0] * len(schedule)  # when each rank can go on
    sent = [0.0] * len(schedule)  # and when its link has carried what it sent
    while ready:
        rank = ready.pop()
        keys, durations_s = problem.keys[rank], problem.seconds[rank]
        rank_starts, rank_ends = starts[rank], ends[rank]
        now = free[rank]
        for position in range(len(rank_ends), len(keys)):
            key = keys[position]
            producer = producers[key]
            start = now
            if producer >= 0:
                arrived = arrival[producer]
                if arrived < 0:
                    waiting[producer] = rank
                    break
                start = max(now, arrived) + way_to[key]
            end = arrived = start + durations_s[position]
            rank_starts.append(start)
            rank_ends.append(end)
            if held_s[key] > 0:
                arrived = sent[rank] = max(end, sent[rank]) + held_s[key]
            arrival[key] = arrived
            now = arrived if blocking else end
            if waiting[key] >= 0:
                ready.append(waiting[key])
                waiting[key] = -1
        free[rank] = now
    _check_complete(schedule, ends)
    return Timeline(schedule, tuple(map(tuple, starts)), tuple(map(tuple, ends)))


class _SameLists:
    """Lists that are looked up by what they are, not by what is in them: they are long, and made once."""

    def __init__(self, lists: ActionLists) -> None:
        self.lists = lists

    def __hash__(self) -> int:
        return id(self.lists)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _SameLists) and other.lists is self.lists


@lru_cache(maxsize=64)
def _columns(same: _SameLists) -> ActionColumns:
    return ActionColumns.of(same.lists)


@dataclass(frozen=True)
class Numbered:
    """What of ``_Problem`` does not depend on times; ``keys``: of the actions of all ranks, as in their columns."""

    keys: Positions
    producers: Positions
    rank_of_stage: tuple[int, ...]
    num_microbatches: int


def seconds_of_actions(
    schedule: ActionLists,
    forward_s: Sequence[float],
    backward_s: Sequence[float],
    split_s: tuple[Sequence[float], Sequence[float]] | None = None,
) -> ActionSeconds:
    """The seconds of every action from those of its stage, as ``simulate`` takes them; ValueError as there."""
    num_stages = len(forward_s)
    if len(backward_s) != num_stages:
        raise ValueError(f"{num_stages} stages have a forward time but {len(backward_s)} a backward time")
    input_s, weight_s = split_s or (backward_s, [0.0] * num_stages)
    all_s = [*forward_s, *backward_s, *input_s, *weight_s]
    places = _places_of_seconds(_columns(_SameLists(schedule)), num_stages)
    return tuple(tuple([all_s[place] for place in of_rank]) for of_rank in places)


_FORWARD, _BACKWARD, _INPUT_GRADIENT, _WEIGHT_GRADIENT = range(len(KINDS))


@lru_cache(maxsize=64)
def place_of_seconds(actions: ActionColumns, num_stages: int) -> Positions:
    """Place of each action's seconds among those of all kinds, each in all stages; of all ranks in turn."""
    unknown = actions.stage[(actions.stage < 0) | (actions.stage >= num_stages)]
    if len(unknown):
        raise ValueError(f"the schedule runs stage {unknown[0]}, but times are given for {num_stages} stages")
    return actions.kind * num_stages + actions.stage


@lru_cache(maxsize=64)
def _places_of_seconds(actions: ActionColumns, num_stages: int) -> tuple[tuple[int, ...], ...]:
    """The same rank by rank."""
    return actions.of_ranks(place_of_seconds(actions, num_stages))


def _number(schedule: ActionLists, seconds: ActionSeconds, num_stages: int) -> _Problem:
    actions = _columns(_SameLists(schedule))
    known = numbered(actions, num_stages)
    keys, producers = _numbers_of_each(actions, num_stages)
    return _Problem(keys, seconds, producers, known.rank_of_stage, known.num_microbatches)


@lru_cache(maxsize=64)
def _numbers_of_each(actions: ActionColumns, num_stages: int) -> tuple[tuple[tuple[int, ...], ...], list[int]]:
    """``Numbered.keys`` rank by rank, and ``Numbered.producers``."""
    known = numbered(actions, num_stages)
    return actions.of_ranks(known.keys), known.producers.tolist()


@lru_cache(maxsize=64)
def numbered(actions: ActionColumns, num_stages: int) -> Numbered:
    """The keys of all actions and of their inputs; ValueError where actions are missing or stand twice."""
    num_microbatches = 1 + int(actions.microbatch.max(initial=-1))
    rank_of_stage = [-1] * num_stages
    for rank, (start, end) in enumerate(actions.spans):
        for stage in np.unique(actions.stage[start:end]).tolist():
            if rank_of_stage[stage] >= 0:
                raise ValueError(f"stage {stage} runs on ranks {rank_of_stage[stage]} and {rank}")
            rank_of_stage[stage] = rank
    if not _is_complete(actions, num_stages, num_microbatches):
        raise ValueError("a schedule runs every micro-batch forward and backward exactly once in every stage")
    per_kind = num_stages * num_microbatches
    offset = np.array([0, per_kind, per_kind, 2 * per_kind])
    keys = offset[actions.kind] + actions.stage * num_microbatches + actions.microbatch
    return Numbered(keys, _producers(num_stages, num_microbatches), tuple(rank_of_stage), num_microbatches)


def _is_complete(actions: ActionColumns, num_stages: int, num_microbatches: int) -> bool:
    """Whether each micro-batch has one F and then one B, or one I and after it one W, in every stage."""
    if (actions.microbatch < 0).any():
        return False
    pairs = actions.stage * num_microbatches + actions.microbatch  # a stage's actions are those of one rank, in order
    shape = len(KINDS), num_stages * num_microbatches
    counts = np.bincount(actions.kind * shape[1] + pairs, minlength=shape[0] * shape[1]).reshape(shape)
    at = np.zeros_like(counts)
    at[actions.kind, pairs] = np.arange(len(pairs))
    splits = counts[_INPUT_GRADIENT] == 1
    is_once = (counts[_FORWARD] == 1) & (counts[_BACKWARD] + counts[_WEIGHT_GRADIENT] == 1)
    is_whole = is_once & (counts[_INPUT_GRADIENT] == counts[_WEIGHT_GRADIENT])
    begun = np.where(splits, at[_INPUT_GRADIENT], at[_BACKWARD])
    in_order = (at[_FORWARD] < begun) & (~splits | (begun < at[_WEIGHT_GRADIENT]))
    return bool((is_whole & in_order).all())


def ways_s(ranks: Sequence[int], send_s: Sequence[float]) -> list[float]:
    """Seconds over every border between stages, of which ``ranks`` hold one each: nothing where both live on one."""
    if len(send_s) != len(ranks) - 1:
        raise ValueError(f"{len(ranks)} stages send over {len(ranks) - 1} borders, not {len(send_s)}")
    return [way_s if a != b else 0.0 for way_s, a, b in zip(send_s, ranks, ranks[1:], strict=False)]


def _held_s(problem: _Problem, ways_s: Sequence[float]) -> list[float]:
    """For each key the seconds in which its result is sent to another rank."""
    per_stage = problem.num_microbatches
    forward = [way_s for way_s in (*ways_s, 0.0) for _ in range(per_stage)]
    backward = [way_s for way_s in (0.0, *ways_s) for _ in range(per_stage)]
    return forward + backward + [0.0] * len(forward)


def _producers(num_stages: int, per_stage: int) -> Positions:
    """For each key the key of its input; -1: none."""
    num_forward = num_stages * per_stage
    forward = np.arange(num_forward) - per_stage
    forward[:per_stage] = -1
    backward = num_forward + np.arange(num_forward) + per_stage
    backward[-per_stage:] = np.arange(num_forward - per_stage, num_forward)
    return np.concatenate([forward, backward, np.full(num_forward, -1)])


def _way_to(problem: _Problem, ways_s: Sequence[float]) -> list[float]:
    """For each key the seconds from where its input was made, where that is another rank."""
    per_stage = problem.num_microbatches
    found = [0.0] * per_stage
    for way_s in (*ways_s, *ways_s):
        found += [way_s] * per_stage
    return found + [0.0] * (problem.num_keys - len(found))


def _check_complete(schedule: ActionLists, ends: Sequence[Sequence[float]]) -> None:
    stuck = [
        f"rank {rank} waits before {actions[len(done)]}"
        for rank, (actions, done) in enumerate(zip(schedule, ends, strict=True))
        if len(done) < len(actions)
    ]
    if stuck:
        raise ValueError("the schedule deadlocks: " + "; ".join(stuck))
