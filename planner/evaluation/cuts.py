"""How a pipeline is cut into stages without a solver."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from planner.table.facts import UnitRow


def even_starts(is_block: tuple[bool, ...], num_stages: int) -> tuple[int, ...]:
    """First units of stages that hold equal numbers of blocks; what is left over goes to the stages before the last.

    The rule of pipelines of several stages a rank: they must be alike, or every round waits for the longest.
    """
    blocks = [u for u, block in enumerate(is_block) if block]
    if num_stages > len(blocks):  # some hold what stands before or behind the blocks, alone
        return tuple(stage * len(is_block) // num_stages for stage in range(num_stages))
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


def weighted_starts(weights: Sequence[float], num_stages: int, head_weight: float) -> tuple[int, ...]:
    """First units of stages filled in order until each reaches its share of ``weights``; the last may stay empty.

    As nanotron fills them (nanotron/models/base.py, build_model): the unit that passes a stage's share is its last. The
    first unit, the embedding, has no weight; the last, the head, counts by ``head_weight`` of its own.
    """
    weights = [0.0, *weights[1:-1], head_weight * weights[-1]]
    total, passed, starts = sum(weights), 0.0, [0]
    for unit, weight in enumerate(weights):
        passed += weight
        if passed > total * len(starts) / num_stages and len(starts) < num_stages:
            starts.append(unit + 1)
    return (*starts, *[len(weights)] * (num_stages - len(starts)))


def shared_starts(work_s: Sequence[float], shares: Sequence[float]) -> tuple[int, ...] | None:
    """First units of stages that each take about their share of the work; None where there are fewer units than stages.

    ``shares``: any positive numbers, one a stage.
    """
    num_units, num_stages = len(work_s), len(shares)
    if num_stages > num_units:
        return None
    ends = np.cumsum(shares) / np.sum(shares) * np.sum(work_s)
    middles = np.cumsum(work_s) - np.array(work_s) / 2
    starts, stages = np.concatenate([[0], np.searchsorted(middles, ends[:-1])]), np.arange(num_stages)
    starts = np.maximum.accumulate(starts - stages) + stages  # each stage finds a unit, and so do all behind it
    return tuple(np.minimum(starts, num_units - num_stages + stages).tolist())


class StageSizes(NamedTuple):
    """How many blocks a stage may hold under schedules that a rank may hold several stages of."""

    least: int  # of all but the first and the last stage, which may hold none
    most: int


def stage_sizes(units: UnitRow, num_stages: int, *, are_alike: bool = True) -> StageSizes:
    """From half of an even share, but one at least, to twice of it and one.

    Stages of unlike sizes make every round of micro-batches wait for the longest; ranks may be even all the same, where
    the head has as much work as several blocks. The first and the last stage also hold the embedding and the head, so
    they may hold fewer blocks, or none. ``are_alike``: as ``Layout.has_alike_stages``; a rank's only stage may hold any
    number, or units alone that are no blocks, if there are some between the ends, and so may those of devices faster
    than others. So may all stages where one block has more work than another: stages of as many blocks are unlike then.
    """
    num_blocks = sum(units.is_block)
    if not (are_alike and units.has_alike_blocks):
        return StageSizes(int(all(units.is_block[1:-1])), num_blocks)
    return StageSizes(max(1, num_blocks // num_stages // 2), 2 * -(-num_blocks // num_stages) + 1)


def is_allowed(starts: Sequence[int], units: UnitRow, *, are_alike: bool = True) -> bool:
    """Whether every stage holds a unit, and as many blocks as ``stage_sizes`` says."""
    return bool(are_allowed(np.array([starts]), units, are_alike=are_alike)[0])


def are_allowed(cuts: NDArray[np.integer], units: UnitRow, *, are_alike: bool = True) -> NDArray[np.bool]:
    """The same of many cuts, [cuts, stages]."""
    num_units, (num_cuts, num_stages) = len(units.is_block), cuts.shape
    borders = np.concatenate([cuts, np.full((num_cuts, 1), num_units)], axis=1)
    found = np.all(np.diff(borders, axis=1) > 0, axis=1)
    blocks_before = np.concatenate(([0], np.cumsum(units.is_block)))
    held = np.diff(blocks_before[np.clip(borders, 0, num_units)], axis=1)
    sizes = stage_sizes(units, num_stages, are_alike=are_alike)
    is_even = np.all(held <= sizes.most, axis=1) & np.all(held[:, 1:-1] >= sizes.least, axis=1)
    return np.logical_and(found, is_even)


def balanced_starts(work_s: Sequence[float], num_stages: int) -> tuple[int, ...] | None:
    """First units of stages whose longest takes least time; None where there are fewer units than stages.

    Fills the stages in order up to a limit, for the smallest limit that so many stages reach.
    """
    if num_stages > len(work_s):
        return None

    def filled(limit_s: float) -> tuple[list[int], float, float]:
        """Starts under a limit, and from which one on and below which one they are the same."""
        starts, held_s, longest_s, next_s = [0], 0.0, 0.0, np.inf
        for unit, seconds in enumerate(work_s):
            # Every stage left must still find a unit.
            must_open = len(work_s) - unit == num_stages - len(starts)
            if unit and (must_open or held_s + seconds > limit_s):
                next_s = next_s if must_open else min(next_s, held_s + seconds)
                starts.append(unit)
                held_s = 0.0
            held_s += seconds
            longest_s = max(longest_s, held_s)
        return starts, longest_s, next_s

    low, high = max(work_s), sum(work_s)
    longest_s, next_s = high, low
    for _ in range(40):
        middle = (low + high) / 2
        if next_s <= middle < longest_s:  # elsewhere it is known
            starts, fullest_s, larger_s = filled(middle)
            if len(starts) <= num_stages:
                longest_s = fullest_s
            else:
                next_s = larger_s
        low, high = (low, middle) if middle >= longest_s else (middle, high)
    return tuple(filled(high)[0])
