"""Long schedules whose steady part repeats itself: the time of many micro-batches from that of few.

An action's end is the longest path to it (``pipeline``), so two actions that follow alike ones at alike times end at
alike times. Take the schedules of n and of n + q micro-batches, where q are a round of them:

    since    from this micro-batch on, an action of i in the first follows, on its rank, what that of i + q follows in
             the second, moved by q
    reach    no such action follows one of a micro-batch that is more than this before its own
    until    before this micro-batch both schedules run the same actions after the same ones

Let all actions of ``reach`` micro-batches, no earlier than ``since - reach``, end a time d before those of a round
later, what their ranks sent until then have arrived as much before, and these be before ``until``. Then by induction
along the schedule, all that follow in the first end d before those of a round later in the second, to the very last.
So the second takes d longer, and n + k q micro-batches k d longer.

That n and n + q go on alike is looked up in their lists; that longer ones do is how lists are made
(``Schedule.shortened``).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from costmodels.pipeline_many import Array, Levels, Span, ends_of_actions, levels_of, simulate_many, span_of
from costmodels.vocabulary.action import Positions, Transfer
from costmodels.vocabulary.schedules import STEADY_ROUNDS, Schedule

# Rounds of the whole schedule to one that is tried: to look up a schedule takes as long as to simulate it.
MOST_SEEN = 4
# Of the whole time, by which ends may differ from what they would be: of sums of a million numbers no more is left.
_ROUNDING = 1e-12


def simulate_long(
    rules: Schedule,
    shape: tuple[int, int, int],
    seconds: Array,
    send_s: Sequence[float],
    *,
    transfer: Transfer = Transfer.AHEAD,
) -> Span:
    """As ``simulate_many`` of the schedule of ``shape``, (ranks, stages a rank, micro-batches); to a billionth.

    Action by action where the schedule is short, or not seen to repeat itself in the first quarter of it.
    """
    p, v, m = shape
    rounds, seen, a_round = m // p, 2 * STEADY_ROUNDS, rules.microbatches_a_round(p, m)
    while MOST_SEEN * seen <= rounds and not rules.forwards_first:
        few = p, v, rules.shortened(p, m, seen)
        steady = _steady(rules, few, a_round)
        if steady is not None:
            levels = levels_of(rules.columns(*few), p * v)
            span, round_s = _repeated(levels, (steady, a_round), seconds, (send_s, transfer))
            if round_s is not None:
                more_s = (rounds - seen) * round_s
                return Span(span.makespan_s + more_s, span.longest_rank_s + more_s)
        seen *= 2
    return simulate_many(rules.columns(p, v, m), seconds, send_s, transfer=transfer)


class _Steady(NamedTuple):
    """Where a schedule may show that it repeats itself: in ``reach`` micro-batches from ``first`` on."""

    first: int
    reach: int


def _repeated(
    levels: Levels, steady: tuple[_Steady, int], seconds: Array, sends: tuple[Sequence[float], Transfer]
) -> tuple[Span, Array | None]:
    """The times of a schedule, and what each round more takes; None where it does not repeat itself yet."""
    (first, reach), a_round = steady
    end, sent = ends_of_actions(levels, seconds, *sends)
    span = span_of(levels, end, seconds)
    now, later = (levels.number[:, start : start + reach] for start in (first, first + a_round))
    times = [end] if sent is None else [end, sent]
    later_s = np.concatenate([each[later[now > 0]] - each[now[now > 0]] for each in times])
    most_s, least_s = later_s.max(axis=0), later_s.min(axis=0)
    return span, most_s if (most_s - least_s <= _ROUNDING * span.makespan_s).all() else None


@lru_cache(maxsize=64)
def _steady(rules: Schedule, shape: tuple[int, int, int], a_round: int) -> _Steady | None:
    """By the schedule of ``shape`` and that with a round more; None if nowhere."""
    p, v, m = shape
    here, there = (levels_of(rules.columns(p, v, each), p * v) for each in (m, m + a_round))
    followed, followed_there = _followed(here), _followed(there)
    differs = np.flatnonzero((followed != followed_there[:, a_round:]).any(axis=(0, 2)))
    since = int(differs.max(initial=-1)) + 1
    reach = int(max(1, -followed[:, since:, 1].min(initial=0)))
    is_like = (followed == followed_there[:, :m]).all(axis=-1)
    is_same = np.ones(1 + here.number.max(), dtype=np.bool_)
    is_same[here.number[~is_like & (here.number > 0)]] = False
    for start, end, before, producer in zip((0, *here.ends), here.ends, here.before, here.producer, strict=False):
        is_same[start + 1 : end + 1] &= is_same[before] & is_same[producer]
    until = int(np.flatnonzero(~(is_like & is_same[here.number]).all(axis=0)).min(initial=m))
    first = until - a_round - reach
    return _Steady(first, reach) if first >= max(0, since - reach) else None


def _followed(levels: Levels) -> Positions:
    """What its rank runs before each action, [kinds and stages, micro-batches, 2]: its place on the first axis, or -1.

    And how many micro-batches later than the action that is, or 0.
    """
    kinds, microbatches = np.indices(levels.number.shape)
    kind_of, microbatch_of = np.full((2, 1 + levels.number.max()), -1)
    kind_of[levels.number], microbatch_of[levels.number] = kinds, microbatches
    kind_of[0] = -1
    before = np.concatenate([[0], *levels.before])[levels.number]
    later = np.where(kind_of[before] < 0, 0, microbatch_of[before] - microbatches)
    return np.stack([kind_of[before], later], axis=-1)
