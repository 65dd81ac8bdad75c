"""How a pipeline is cut without a solver, what it runs, and how many micro-batches it holds at once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import lru_cache

from costmodels.action import BACKWARD, FORWARD, INPUT_GRADIENT, WEIGHT_GRADIENT, Schedule
from costmodels.schedule import build_schedule
from planner.parallelism import ScheduleName

# Simulated rounds of a long pipeline before its steady state is looked for.
STEADY_ROUNDS = 4
# nanotron's head counts slightly less than its parameters: counted whole, the last of an 8.86B model's 16 stages would
# hold two blocks beside it and take a quarter longer than all measured runs; and where head and blocks are exactly four
# to one, measured stages end at their share, not one block later.
HEAD_WEIGHT = 0.96

# What an action adds to the micro-batches in flight, and to those that wait for their weight gradients.
_HELD = {FORWARD: 1, BACKWARD: -1, INPUT_GRADIENT: 0, WEIGHT_GRADIENT: -1}
_WAITING = {FORWARD: 0, BACKWARD: 0, INPUT_GRADIENT: 1, WEIGHT_GRADIENT: -1}


def in_flight(schedule: ScheduleName, num_ranks: int, num_microbatches: int) -> tuple[int, ...]:
    """Micro-batches in flight at once on each rank with one stage a rank."""
    if schedule is ScheduleName.GPIPE and num_ranks > 1:  # without a pipeline each micro-batch is finished at once
        return (num_microbatches,) * num_ranks
    return tuple(min(num_microbatches, num_ranks - rank) for rank in range(num_ranks))


@lru_cache(maxsize=1024)
def in_flight_by_stage(
    schedule: ScheduleName, num_ranks: int, virtual_stages: int, num_microbatches: int
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Micro-batches in flight at each stage at the moment its rank holds most of them.

    And how many of those wait for the second half of a split backward pass.
    """
    counts, waits = ([0] * (num_ranks * virtual_stages) for _ in range(2))
    for actions in schedule_of(schedule, num_ranks, virtual_stages, num_microbatches):
        held: Counter[int] = Counter()
        waiting: Counter[int] = Counter()
        most = now = 0
        for kind, stage, _ in actions:
            now += _HELD[kind]
            held[stage] += _HELD[kind]
            waiting[stage] += _WAITING[kind]
            if now > most:
                most = now
                for each in held:
                    counts[each], waits[each] = held[each], waiting[each]
    return tuple(counts), tuple(waits)


def even_starts(is_block: tuple[bool, ...], num_stages: int) -> tuple[int, ...]:
    """First units of stages that hold equal numbers of blocks; what is left over goes to the stages before the last.

    The rule of pipelines of several stages a rank: they must be alike, or every round waits for the longest.
    """
    blocks = [u for u, block in enumerate(is_block) if block]
    each, left_over = divmod(len(blocks), num_stages)
    sizes = [each + (num_stages - 1 - left_over <= k < num_stages - 1) for k in range(num_stages)]
    starts = [0]
    for size in sizes[:-1]:
        starts.append(starts[-1] + size)
    return (0, *(blocks[k] for k in starts[1:]))


def spread_starts(is_block: tuple[bool, ...], num_stages: int) -> tuple[int, ...]:
    """As ``even_starts``, with the embedding and the head each counted as a block of its own."""
    blocks = [u for u, block in enumerate(is_block) if block]
    each = (len(blocks) + 2) // num_stages
    return (0, *(min(blocks[0] - 1 + each * k, len(is_block) - 1) for k in range(1, num_stages)))


def weighted_starts(weights: Sequence[float], num_stages: int) -> tuple[int, ...]:
    """First units of stages filled in order until each reaches its share of ``weights``; the last may stay empty.

    As nanotron fills them (nanotron/models/base.py, build_model): the unit that passes a stage's share is its last. The
    first unit, the embedding, has no weight.
    """
    weights = [0.0, *weights[1:-1], HEAD_WEIGHT * weights[-1]]
    total, passed, starts = sum(weights), 0.0, [0]
    for unit, weight in enumerate(weights):
        passed += weight
        if passed > total * len(starts) / num_stages and len(starts) < num_stages:
            starts.append(unit + 1)
    return (*starts, *[len(weights)] * (num_stages - len(starts)))


@lru_cache(maxsize=256)
def schedule_of(schedule: ScheduleName, num_ranks: int, virtual_stages: int, num_microbatches: int) -> Schedule:
    """The actions of every rank."""
    return build_schedule(schedule.value, num_ranks, virtual_stages, num_microbatches)


def steady_schedule(schedule: ScheduleName, num_ranks: int, virtual_stages: int, num_microbatches: int) -> Schedule:
    """The schedule, shortened to enough rounds to reach every rank's peak."""
    rounds = num_microbatches // num_ranks
    shortened = num_microbatches - max(0, rounds - STEADY_ROUNDS) * num_ranks
    return schedule_of(schedule, num_ranks, virtual_stages, shortened)
