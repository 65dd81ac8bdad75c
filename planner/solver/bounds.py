"""Lower bounds of many layouts at once: however a layout is cut into stages, it takes and needs no less.

The search passes over layouts whose bound is above the best price, so a bound must hold for every cut. Symbols: p
pipeline ranks, m micro-batches, w_r the seconds that rank r works on one micro-batch (both passes and messages beside
them), W their sum, c the seconds of one send, T the time of the pipeline. The examples have six units of 1 s each (W =
6), two ranks, four micro-batches and free sends. Their best cut is the even one, w = (3, 3), and takes 15 s.

**One stage a rank.** For every rank r of every cut (``problems.pipeline_bound_s``):

    (1) any        T >= sum_(i<r) w_i + m w_r
    (2) GPipe      T >= W + (m - 1) w_r + 2 c (p-1)
    (3) 1F1B, m>p  T >= W + (m - p + r) w_r + sum_(i>r) w_i + 2 c (p-1)

(1): rank r works m times. Before it starts the first micro-batch goes forward through the ranks before it, and after it
ends the last gradient goes back through them. (2): besides, a GPipe rank stands still between its last forward and its
first backward pass, until a micro-batch has gone through all ranks behind it and back. (3): a 1F1B rank waits for the
ranks behind it twice, before its first backward and before its last, and fills p - 1 - r micro-batches of its own into
these waits. Example, rank 1 of the cut (2, 4): (1) says 2 + 4 * 4 = 18 s.

By (1) the ranks before r work T / m each at most, so what is behind r in (3) is W - w_r - r T / m at least:

    (4) 1F1B, m>p  T (1 + r / m) >= 2 W + (m - p + r - 1) w_r + 2 c (p-1)

The cut is not known yet, so the lines are turned into multiples of W that hold for all cuts
(``glance.pipeline_coefficient``). Some w_r is at least W / p, and at least the work of the units of one kind, rounded
up, that some rank must hold.

The other bounds of time stand with their methods in ``time_bounds``: rounds of micro-batches in flight (``_rounds_s``),
unlike devices, where w_r is counted on rank r's own (``_weighted_s``), several stages a rank (``_any_cut_s``,
``_several_s``) and their micro-batches in flight (``round_trips``). ``memory_bounds`` has those of memory, of which the
fullest rank needs no less than a weighted mean, and of what must be recomputed where each block chooses
(``recomputed_s``); ``at_work_bounds`` counts what a unit at work gathers, makes and reduces besides.

Beside the bounds stands an estimate (``estimates``). It says which layouts are worth a look first, and proves nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

from planner.evaluation.unit_times import LayoutRows
from planner.layout.columns import Array, Columns, Positions
from planner.layout.deadline import Deadline
from planner.layout.layout import Layout
from planner.solver.at_work_bounds import memory_at_work_bytes
from planner.solver.estimates import estimate_s
from planner.solver.glance import at_a_glance_s
from planner.solver.memory_bounds import AlikeKey
from planner.solver.of_table import CHUNK, OfTable, UnitPasses
from planner.solver.time_bounds import AlikeLayouts
from planner.table.cost_table import CostTable

SLICE = 1_000_000  # layouts are bounded so many at a time


@dataclass(frozen=True)
class Bounds:
    """Lower bounds of each layout, in the order of the layouts given."""

    step_time_s: Array
    memory_bytes: Array
    host_share: Array  # of a node's own memory; 0 where nothing is offloaded
    estimate_s: Array  # no bound: about what the layout takes, and no less than its bound


def bounds(
    table: CostTable, layouts: Sequence[Layout], enough_s: float = np.inf, deadline: Deadline | None = None
) -> Bounds:
    """Bounds of every layout; OutOfTimeError where the deadline is over before that.

    Where some time is enough, not all of the time is counted of a layout that takes it or more, and its memory is
    infinite; nor is all of the time of one that needs more memory than there is.
    """
    found = Bounds(*(np.full(len(layouts), value) for value in (0.0, np.inf, 0.0, 0.0)))
    listed = Columns.of(Layout, layouts)
    if not layouts:
        return found
    of_all = _OfAll.of(table, listed)
    found.step_time_s[:] = found.estimate_s[:] = at_a_glance_s(table, listed, of_all.passes)
    for part, group in of_all.alike(np.flatnonzero(found.step_time_s < enough_s), deadline):
        _fill(found, part, group, enough_s)
    return found


def bounds_of_memory(table: CostTable, layouts: Sequence[Layout], deadline: Deadline) -> Bounds:
    """Bounds of memory alone, which are quick; those of time are 0. OutOfTimeError as of ``bounds``."""
    found = Bounds(*(np.zeros(len(layouts)) for _ in fields(Bounds)))
    if layouts:
        of_all = _OfAll.of(table, Columns.of(Layout, layouts))
        for part, group in of_all.alike(np.arange(len(layouts)), deadline):
            _fill_memory(found, part, group)
    return found


def in_slices(listed: Columns[Layout], bounded: Callable[[Columns[Layout]], Bounds]) -> Bounds:
    """The bounds of all, made of those of ``SLICE`` at a time."""
    parts = [bounded(listed[start : start + SLICE]) for start in range(0, max(1, len(listed)), SLICE)]
    return Bounds(*(np.concatenate([getattr(part, each.name) for part in parts]) for each in fields(Bounds)))


@dataclass(frozen=True)
class _OfAll:
    """What is read off the table once for all layouts, on each kind of devices."""

    listed: Columns[Layout]
    rows: LayoutRows
    of_table: OfTable
    passes: Sequence[UnitPasses]

    @staticmethod
    def of(table: CostTable, listed: Columns[Layout]) -> _OfAll:
        """Of at least one layout."""
        rows, of_table = LayoutRows.of(table, listed), OfTable(table)
        places = range(len(table.cluster.devices))
        return _OfAll(listed, rows, of_table, [of_table.passes(rows, place) for place in places])

    def alike(self, left: Positions, deadline: Deadline | None) -> Iterator[tuple[Positions, AlikeLayouts]]:
        """Groups of those at the positions ``left`` that are bounded together; OutOfTimeError between them."""
        keys, alike = self.listed.take(left).by(AlikeKey)
        by_key = np.split(left[np.argsort(alike, kind="stable")], np.cumsum(np.bincount(alike))[:-1])
        for key, members in zip(keys, by_key, strict=False):  # without members no key
            for start in range(0, len(members), CHUNK):
                if deadline is not None:
                    deadline.check()
                part = members[start : start + CHUNK]
                each = self.listed.take(part), self.rows.take(part), self.passes[0].take(part)
                yield part, AlikeLayouts(self.of_table, key, *each)


def _fill_memory(found: Bounds, part: Positions, group: AlikeLayouts) -> None:
    found.memory_bytes[part] = memory_at_work_bytes(group)
    found.host_share[part] = group.host_share()


def _fill(found: Bounds, part: Positions, group: AlikeLayouts, enough_s: float) -> None:
    """Closer from step to step, each for the layouts for which it may still matter."""
    if enough_s < np.inf:
        found.step_time_s[part] = found.estimate_s[part] = group.without_recomputing_s()
        part, group = _where(found.step_time_s[part] < enough_s, part, group)
    if not len(part):
        return
    _fill_memory(found, part, group)
    if enough_s < np.inf:
        part, group = _where(found.memory_bytes[part] <= group.table.cluster.devices[0].memory_bytes, part, group)
    if not len(part):
        return
    found.step_time_s[part] = group.step_time_s()
    found.estimate_s[part] = np.maximum(found.step_time_s[part], estimate_s(group))


def _where(stays: NDArray[np.bool], part: Positions, group: AlikeLayouts) -> tuple[Positions, AlikeLayouts]:
    """Layouts, and their group, without those that need not stay; of none the group is what it was."""
    if stays.all() or not stays.any():
        return part[stays], group
    return part[stays], group.take(np.flatnonzero(stays))
