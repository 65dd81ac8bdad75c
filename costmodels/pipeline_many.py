"""Times of one schedule for many sets of stage seconds at once: what a search over cuts asks for.

The order of every rank's actions is given, so an action's end is the longest path to it (``pipeline``). Actions whose
inputs are all known are worked out together: those of one *level*, the number of actions on the longest chain before
them, for all sets at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from costmodels.pipeline import numbered, place_of_seconds, ways_s
from costmodels.vocabulary.action import ActionColumns, Positions, Transfer
from costmodels.vocabulary.schedules import STEADY_ROUNDS, Schedule

Array = NDArray[np.float64]

# Ends that are held at once, so many numbers: a long schedule takes its sets in several parts.
MOST_NUMBERS = 4_000_000


@dataclass(frozen=True)
class Span:
    """Seconds of each set: until the last action has ended, and the longest that one rank takes from its first."""

    makespan_s: Array
    longest_rank_s: Array


@dataclass(frozen=True)
class Levels:
    """The actions of a schedule, level by level; action k of them is number k + 1, and number 0 is the start."""

    number: Positions  # [3 stages, micro-batches]: forwards, (input) gradients and weight gradients; 0: there is none
    ends: tuple[int, ...]  # of each level
    before: tuple[Positions, ...]  # of each level's actions the rank's previous one
    producer: tuple[Positions, ...]  # and the one that makes the input
    border: Positions  # over which the input comes; the last of all: none
    leaves: Positions  # the border over which the result goes
    seconds: Positions  # place of its seconds among those of all kinds, each in all stages
    first: Positions  # of each rank
    last: Positions
    rank_of_stage: tuple[int, ...]


def simulate_many(
    schedule: ActionColumns,
    seconds: Array,
    send_s: Sequence[float],
    *,
    transfer: Transfer = Transfer.AHEAD,
) -> Span:
    """As ``pipeline.simulate`` for every column of ``seconds``, [4 stages, sets].

    The rows are those of ``pipeline.seconds_of_actions``: forward, backward, input gradient and weight gradient, each
    of all stages. ``send_s``: [stages - 1]. ValueError as there.
    """
    num_stages = len(send_s) + 1
    levels = levels_of(schedule, num_stages)
    each = max(1, MOST_NUMBERS // len(levels.seconds))
    sets = [seconds[:, at : at + each] for at in range(0, seconds.shape[1], each)]
    parts = [span_of(levels, ends_of_actions(levels, part, send_s, transfer)[0], part) for part in sets]
    return Span(*map(np.concatenate, zip(*((part.makespan_s, part.longest_rank_s) for part in parts), strict=True)))


def whole_s(run: Callable[[int, Positions], Array], rules: Schedule, p: int, m: int, work_s: Array) -> Array:
    """Seconds of m micro-batches on p ranks for many sets: the steady part of a long schedule is extrapolated.

    ``run``: of a number of micro-batches and some of the sets, their seconds. ``work_s``: the seconds that the busiest
    rank of each set works on one micro-batch, or sends. In the steady state it does so without a pause; with unequal
    stages it takes long to get there.
    """
    found, left = np.zeros(len(work_s)), np.arange(len(work_s))
    steady_s = rules.microbatches_a_round(p, m) * work_s * (1 - 1e-9)
    rounds, seen = m // p, STEADY_ROUNDS
    while len(left) and seen + 1 < rounds:
        near, far = run(rules.shortened(p, m, seen), left), run(rules.shortened(p, m, seen + 1), left)
        is_steady = far - near >= steady_s[left]
        found[left[is_steady]] = (near + (rounds - seen) * (far - near))[is_steady]
        left, seen = left[~is_steady], 2 * seen
    if len(left):
        found[left] = run(m, left)
    return found


def ends_of_actions(
    levels: Levels, seconds: Array, send_s: Sequence[float], transfer: Transfer
) -> tuple[Array, Array | None]:
    """The end of every action by its number, [1 + actions, sets]; the rest as ``simulate_many`` takes it.

    And where results wait for those that their rank sent before, when its link has carried all that it sent so far.
    """
    ways = np.array([*ways_s(levels.rank_of_stage, send_s), 0.0])
    end = np.zeros((len(levels.seconds) + 1, seconds.shape[1]))
    np.take(seconds, levels.seconds, axis=0, out=end[1:], mode="clip")  # until its turn comes, what an action takes
    way_to, held = ways[levels.border][:, None], ways[levels.leaves][:, None]
    if transfer is Transfer.AHEAD and _may_queue(levels, seconds, held[:, 0]):
        return _queued(levels, end, way_to, held)
    free = end  # when the rank can go on after an action
    if transfer is Transfer.BLOCKING:
        free = np.zeros_like(end)
    start = 0
    for stop, producer, before in zip(levels.ends, levels.producer, levels.before, strict=True):
        begins = end.take(producer, axis=0)
        if transfer is Transfer.ON_DEMAND:
            np.maximum(begins, free.take(before, axis=0), out=begins)
            begins += way_to[start:stop]
        else:
            begins += way_to[start:stop]
            np.maximum(begins, free.take(before, axis=0), out=begins)
        ends = end[start + 1 : stop + 1]
        ends += begins
        if transfer is Transfer.BLOCKING:
            np.add(ends, held[start:stop], out=free[start + 1 : stop + 1])
        start = stop
    return end, None


def _may_queue(levels: Levels, seconds: Array, held: Array) -> bool:
    """Whether a send may take longer than an action whose result goes behind it."""
    sending = np.unique(levels.seconds[held > 0])
    return len(sending) > 0 and bool(held.max() > seconds[sending].min())


def _queued(levels: Levels, end: Array, way_to: Array, held: Array) -> tuple[Array, Array]:
    """As ``ends_of_actions`` where results wait; ``end`` holds what each action takes."""
    sent = np.zeros_like(end)
    start = 0
    for stop, producer, before in zip(levels.ends, levels.producer, levels.before, strict=True):
        now = slice(start + 1, stop + 1)
        arrived = np.where(way_to[start:stop] > 0, sent.take(producer, axis=0), end.take(producer, axis=0))
        end[now] += np.maximum(arrived, end.take(before, axis=0))
        link = sent.take(before, axis=0)
        sent[now] = np.where(held[start:stop] > 0, np.maximum(end[now], link) + held[start:stop], link)
        start = stop
    return end, sent


def span_of(levels: Levels, end: Array, seconds: Array) -> Span:
    """The time of all actions; ``end`` as ``ends_of_actions`` finds it."""
    began = end[levels.first] - seconds[levels.seconds[levels.first - 1]]
    return Span(end[levels.last].max(axis=0), (end[levels.last] - began).max(axis=0))


@lru_cache(maxsize=64)
def levels_of(schedule: ActionColumns, num_stages: int) -> Levels:
    """The actions of a schedule level by level; ValueError as ``simulate_many``."""
    known = numbered(schedule, num_stages)
    producers, keys = known.producers, known.keys
    level = _level_of_keys(schedule, keys, producers)
    starts, stops = np.array([span for span in schedule.spans if span[0] < span[1]]).T
    before_keys = np.concatenate(([-1], keys[:-1]))
    before_keys[starts] = -1
    order = np.argsort(level[keys], kind="stable")
    number = np.zeros(3 * num_stages * known.num_microbatches + 1, dtype=np.intp)  # of a key; the last: none
    number[keys[order]] = 1 + np.arange(len(keys))
    stage, kind = keys // known.num_microbatches % num_stages, keys // (known.num_microbatches * num_stages)
    none = num_stages - 1  # no border
    comes = np.select([kind == 0, kind == 1], [stage - 1, stage], none)
    goes = np.select([kind == 0, kind == 1], [stage, stage - 1], none)
    ends = np.cumsum(np.bincount(level[keys]))
    before, producer = number[before_keys][order], number[producers[keys]][order]
    parts = [slice(start, end) for start, end in zip((0, *ends[:-1].tolist()), ends.tolist(), strict=True)]
    return Levels(
        number=number[:-1].reshape(3 * num_stages, known.num_microbatches),
        rank_of_stage=known.rank_of_stage,
        ends=tuple(ends.tolist()),
        before=tuple([before[part] for part in parts]),
        producer=tuple([producer[part] for part in parts]),
        border=np.where(comes < 0, none, comes)[order],
        leaves=np.where(goes < 0, none, goes)[order],
        seconds=place_of_seconds(schedule, num_stages)[order],
        first=number[keys[starts]],
        last=number[keys[stops - 1]],
    )


def _level_of_keys(schedule: ActionColumns, keys_of_actions: Positions, producers: Positions) -> Positions:
    """Actions on the longest chain before each key; ValueError where the lists wait for each other.

    All ranks go on at once, each by one action if its input is there, as if every action took one step. The keys
    of actions and of their inputs are those of ``numbered``.
    """
    num_keys, lengths = len(producers), np.diff(schedule.ends, prepend=0)
    never, always = num_keys, num_keys + 1  # a key behind the last of a rank, and the input of what needs none
    level = np.full(num_keys + 2, -1)
    level[always] = 0
    needed = np.append(np.where(producers < 0, always, producers), never)
    ranks = np.arange(len(lengths))
    following = np.full(lengths.sum() + len(ranks), never)
    following[np.arange(lengths.sum()) + np.repeat(ranks, lengths)] = keys_of_actions
    place, left, step = lengths.cumsum() - lengths + ranks, int(lengths.sum()), 0
    while left:
        keys = following[place]
        is_ready = level[needed[keys]] >= 0
        done = keys[is_ready]
        if not len(done):
            raise ValueError("the schedule deadlocks: simulate it alone for the actions that wait")
        level[done] = step
        place += is_ready
        left -= len(done)
        step += 1
    return level[:num_keys]
