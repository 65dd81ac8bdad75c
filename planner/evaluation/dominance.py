"""Layouts that need not be looked at, for another that differs in one choice alone is never slower and never larger.

The choice is the way of context parallelism. Row A of the table's work is under every mode of recomputation never worse
than row B where for every kind of unit and device

    each pass of A takes no longer,                             T_A <= T_B
    and leaves no less compute to hide other communication,     C_A >= C_B
    the same without what the host has to spare of it, S, where hooks of sharded parameters may take that,
    each part of a split backward pass takes no longer, where nothing is recomputed (else none is split),
    and A holds no more of anything.

Then no layout with A's row is slower than the same layout with B's: a pass takes T + E(D, C) with the communication D
that both have, E falls with C, what happens once a step is hidden by sums of C, and a schedule with fixed orders never
ends later when an action gets shorter. Hooks that take H of the host make T max(T, T - S + H) and C max(C, C - S + H);
of S no more matters than the most that hooks take. Nor does it need more memory, which adds up holdings or takes the
largest.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import permutations
from typing import NamedTuple

import numpy as np

from costmodels.vocabulary.choices import ContextMethod, Recompute
from costmodels.vocabulary.terms import PLACE, Pass, Time
from planner.evaluation.unit_times import most_hooks_s
from planner.layout.columns import Array, Columns
from planner.layout.layout import Layout
from planner.table.cost_table import CostTable
from planner.table.keys import WorkKey

_MODES = tuple(Recompute)


class _Row(NamedTuple):
    work: WorkKey
    recompute: Recompute | None

    @property
    def but_the_choice(self) -> tuple[object, ...]:
        """Rows for which this is the same differ in the choice alone."""
        return *self.work._replace(cp_method=ContextMethod.ALL_GATHER), self.recompute


def undominated(table: CostTable, layouts: Columns[Layout]) -> Columns[Layout]:
    """``layouts`` without those for which one that differs in ``cp_method`` alone, and stays, is never worse."""
    if not layouts:
        return layouts
    rows, which = layouts.by(_Row)
    measures, stays = _measures(table, rows), np.ones(len(rows), dtype=bool)
    known: dict[tuple[object, ...], int] = {}
    alike = np.array([known.setdefault(row.but_the_choice, len(known)) for row in rows])
    order, sizes = np.argsort(alike, kind="stable"), np.bincount(alike)
    first = np.cumsum(sizes) - sizes
    for size in range(2, sizes.max() + 1):
        places = order[first[sizes == size][:, None] + np.arange(size)]  # rows that are alike, [groups, size]
        for place, other in permutations(range(size), 2):
            own, others = measures[places[:, place]], measures[places[:, other]]
            never_worse = (others <= own).all(axis=1)
            if other > place:  # of rows that are equal in everything the first stays
                never_worse &= (others < own).any(axis=1)
            stays[places[never_worse, place]] = False
    return layouts if bool(stays.all()) else layouts.take(stays[which])


def _measures(table: CostTable, rows: Sequence[_Row]) -> Array:
    """[rows, measures]: whatever of a row makes a layout slower or larger when it grows.

    Where each block has a mode of its own, a row must be better under every one.
    """
    each = [_measures_of(table, [row.work for row in rows], [row.recompute or mode for row in rows]) for mode in _MODES]
    return np.concatenate(each, axis=1)


def _measures_of(table: CostTable, work: Sequence[WorkKey], recompute: Sequence[Recompute]) -> Array:
    """The same under one mode of each row."""
    places, modes = table.work_rows(work), [_MODES.index(mode) for mode in recompute]
    # Not a number: on devices that no layout of the row is laid over.
    time_s = np.nan_to_num(table.time_s[:, places, modes])

    def of(time: Time) -> Array:
        return time_s[..., PLACE[time]]

    def whole(run: Pass) -> Array:
        return time_s[..., [PLACE[time] for time in Time if time.term and time.runs_in is run]].sum(axis=-1)

    free_forward = of(Time.COMPUTE_FORWARD) - of(Time.HIDING_FORWARD)
    free_backward = of(Time.COMPUTE_BACKWARD) + of(Time.RECOMPUTE) - of(Time.HIDING_BACKWARD)
    may_split = np.array([mode is Recompute.NONE for mode in recompute])[:, None]
    later, twice = of(Time.WEIGHT_GRADIENT) * may_split, of(Time.SPLIT_EXTRA) * may_split
    of_spare = (Time.SPARE_FORWARD, Time.SPARE_BACKWARD)
    spare = [np.minimum(of(time), most_s) for time, most_s in zip(of_spare, most_hooks_s(table), strict=True)]
    times = (
        whole(Pass.FORWARD) - spare[0],
        whole(Pass.BACKWARD) - spare[1],
        spare[0] - free_forward,
        spare[1] - free_backward,
        whole(Pass.FORWARD),
        whole(Pass.BACKWARD),
        -free_forward,
        -free_backward,
        later,
        whole(Pass.BACKWARD) - later,
        twice,
    )
    seconds = np.stack(times, axis=-1).swapaxes(0, 1).reshape(len(work), -1)
    return np.concatenate([seconds, table.num_bytes[places, modes].reshape(len(work), -1)], axis=1)
