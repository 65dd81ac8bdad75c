"""Best-first search over the layouts, which stops when it can prove that nothing better is left.

Layouts are visited in the order of their lower bounds. A visited layout is cut into stages by the solver, and its step
time is found by simulating its schedule. When the next bound is no better than the best step time, no layout that is
left can be faster: the best is optimal within the cost model, each layout cut where ``pipeline_bound_s`` is least.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields

import numpy as np

from planner.evaluation.evaluator import Evaluated, Evaluator
from planner.layout.columns import Array, Columns, Positions
from planner.layout.complexity import complexity
from planner.layout.deadline import Deadline, OutOfTimeError
from planner.layout.layout import Layout
from planner.solver.base import StageSolver, UnprovedError
from planner.solver.bounds import Bounds, bounds
from planner.table.cost_table import CostTable

# Layouts that are cut evenly and priced first, so that the search starts with a good step time to beat.
NUM_PROBES = 40
# Of typical layouts only so many that fit are priced.
ENOUGH_PROBES = 8
# A layout replaces the best only if it is faster by more than this share.
TOLERANCE = 1e-6
# Of layouts with equal bounds the simpler comes first, among so many at the head: more than are ever visited.
HEAD = 10_000
# The outcome names the layouts whose bound is above the best step time by no more than this share.
NEAR = 0.01
# Layouts are bounded so many at a time.
SLICE = 250_000

Progress = Callable[[int, float, float | None], None]


@dataclass(frozen=True)
class Outcome:
    """What a search found. ``best`` is None where nothing fits or nothing was found in time."""

    best: Evaluated | None
    ranking: tuple[Evaluated, ...]  # the visited layouts that fit, fastest first
    bound_s: float  # no layout is faster
    is_exhausted: bool  # every layout that could be better was visited: ``best`` is proved
    interrupted: bool
    num_candidates: int
    num_visited: int
    near: tuple[tuple[Layout, float], ...]  # layouts whose bound is at most NEAR above the best price, and that bound
    closest: Layout | None  # where nothing fits: the layout that lacks least memory


class _Best:
    """The layouts that were priced and fit."""

    def __init__(self) -> None:
        self.best: Evaluated | None = None
        self.found: dict[Layout, Evaluated] = {}

    def keep(self, priced: Evaluated | None) -> None:
        """Takes ``priced`` in; it becomes the best only where it is faster by more than the tolerance."""
        if priced is None:
            return
        known = self.found.get(priced.layout)
        if known is None or priced.step_time_s < known.step_time_s:
            self.found[priced.layout] = priced
        if self.best is None or priced.step_time_s < self.best.step_time_s * (1 - TOLERANCE):
            self.best = priced

    @property
    def time_s(self) -> float | None:
        """Step time of the best layout."""
        return None if self.best is None else self.best.step_time_s

    def beats(self, bound_s: float) -> bool:
        """Whether no layout with this bound can be better."""
        return self.best is not None and bound_s >= self.best.step_time_s * (1 - TOLERANCE)

    def ranking(self) -> tuple[Evaluated, ...]:
        """Fastest first."""
        return tuple(sorted(self.found.values(), key=lambda priced: priced.step_time_s))


def search(
    table: CostTable,
    layouts: Sequence[Layout],
    solver: StageSolver,
    *,
    deadline: Deadline | None = None,
    progress: Progress | None = None,
    stop_at_first: bool = False,
) -> Outcome:
    """The fastest layout that fits; stops early at the deadline or Ctrl-C with what it has.

    ``stop_at_first``: any layout that fits will do. OutOfTimeError where there was no time for the bounds.
    """
    deadline = deadline or Deadline.never()
    listed = Columns.of(Layout, layouts)
    lower = _bounds_in_time(table, listed, deadline)
    order = _in_order(table, listed, lower)
    best = _Best()
    bound_s = float(lower.step_time_s[order[0]]) if len(order) else float("inf")
    unproved_s, exhausted, interrupted, visited = float("inf"), True, False, 0

    try:
        for index in order[:NUM_PROBES]:
            if not deadline.is_over():
                best.keep(probe(table, listed[index]))
        for index in order:
            bound_s = float(lower.step_time_s[index])
            if best.beats(bound_s):
                break
            if deadline.is_over() or (stop_at_first and best.best is not None):
                exhausted = False
                break
            visited += 1
            try:
                best.keep(visit(table, listed[index], solver, best.time_s))
            except UnprovedError:  # this layout may still be better
                unproved_s = min(unproved_s, bound_s)
            if progress is not None:
                progress(visited, bound_s, best.time_s)
    except (KeyboardInterrupt, OutOfTimeError) as error:
        exhausted, interrupted = False, isinstance(error, KeyboardInterrupt)
    exhausted = exhausted and (unproved_s == float("inf") or best.beats(unproved_s))
    bound_s = min(bound_s, unproved_s)
    reach_s = 0.0 if best.time_s is None else best.time_s * (1 + NEAR)
    near = order[lower.step_time_s[order] <= reach_s]
    return Outcome(
        best=best.best,
        near=tuple((listed[i], float(lower.step_time_s[i])) for i in near),
        ranking=best.ranking(),
        bound_s=best.time_s if exhausted and best.time_s is not None else bound_s,
        is_exhausted=exhausted,
        interrupted=interrupted,
        num_candidates=len(listed),
        num_visited=visited,
        closest=None if best.best or not len(listed) else listed[int(np.argmin(_scarcity(table, lower)))],
    )


def _bounds_in_time(table: CostTable, listed: Columns[Layout], deadline: Deadline) -> Bounds:
    """Bounds of every layout, in slices between which the deadline is looked at; OutOfTimeError where it is over."""
    parts: list[Bounds] = []
    for start in range(0, max(1, len(listed)), SLICE):
        if parts:
            deadline.check()
        parts.append(bounds(table, listed[start : start + SLICE]))
    return Bounds(*(np.concatenate([getattr(part, each.name) for part in parts]) for each in fields(Bounds)))


def _in_order(table: CostTable, listed: Sequence[Layout], lower: Bounds) -> Positions:
    """Positions of the layouts that may fit, by their bounds; at equal bounds the simpler first."""
    fits = np.flatnonzero(_scarcity(table, lower) <= 1)
    by_time = fits[np.argsort(lower.step_time_s[fits], kind="stable")]
    head = sorted(by_time[:HEAD].tolist(), key=lambda i: (lower.step_time_s[i], complexity(listed[i])))
    return np.concatenate([np.array(head, dtype=np.intp), by_time[HEAD:]])


def _scarcity(table: CostTable, lower: Bounds) -> Array:
    """The largest share that each layout must take of a device's memory or of a node's own; above 1 it cannot fit."""
    return np.maximum(lower.memory_bytes / table.cluster.devices[0].memory_bytes, lower.host_share)


def probes(table: CostTable, layouts: Sequence[Layout], deadline: Deadline) -> Outcome:
    """The first layouts by their bounds that fit where they are cut evenly. Nothing is proved."""
    listed = Columns.of(Layout, layouts)
    lower, best = bounds(table, listed), _Best()
    order, visited = _in_order(table, listed, lower)[:NUM_PROBES], 0
    for index in order:
        if len(best.found) >= ENOUGH_PROBES or (best.found and deadline.is_over()):
            break
        visited += 1
        best.keep(probe(table, listed[index]))
    return Outcome(best.best, best.ranking(), 0.0, False, False, len(listed), visited, (), None)


def visit(table: CostTable, layout: Layout, solver: StageSolver, cutoff_s: float | None) -> Evaluated | None:
    """The layout cut into stages and priced; None where it does not fit or cannot beat ``cutoff_s``."""
    evaluator = Evaluator(table, layout)
    if layout.mesh.pp == 1 or not layout.schedule.rules.has_one_stage:
        return _evaluate_if_fits(evaluator, evaluator.even_starts())
    solution = solver.solve_stages(evaluator.stage_problem(), cutoff_s)
    return None if solution is None else _evaluate_if_fits(evaluator, solution.starts)


def probe(table: CostTable, layout: Layout) -> Evaluated | None:
    """The layout cut evenly and priced, where that fits: a quick first incumbent."""
    evaluator = Evaluator(table, layout)
    return _evaluate_if_fits(evaluator, evaluator.even_starts())


def _evaluate_if_fits(evaluator: Evaluator, starts: tuple[int, ...]) -> Evaluated | None:
    needs = zip(evaluator.ledgers(starts), evaluator.capacity_bytes, strict=True)
    if any(ledger.total_bytes > capacity for ledger, capacity in needs):
        return None
    host = evaluator.host(starts)
    return evaluator.evaluate(starts) if host is None or host.share <= 1 else None
