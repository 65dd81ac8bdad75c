"""A search in two: what is bounded well first, so that what is not cannot crowd it out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

from costmodels.vocabulary.mesh import Mesh
from costmodels.vocabulary.schedules import ScheduleName
from planner.evaluation.evaluator import Evaluated
from planner.layout.columns import Columns
from planner.layout.layout import Layout
from planner.solver.cutting import TOLERANCE
from planner.solver.glance import rough_bound_s
from planner.solver.search import Outcome
from planner.solver.smallest import at_its_smallest
from planner.table.cost_table import CostTable

Search = Callable[[Columns[Layout], Evaluated | None], Outcome]


class _Key(NamedTuple):
    groups: tuple[str, ...]
    schedule: ScheduleName


class _MeshKey(NamedTuple):
    mesh: Mesh


def _comes_last(key: _Key) -> bool:
    return bool(key.groups) and not key.schedule.rules.has_one_stage


def in_turn(table: CostTable, layouts: Columns[Layout], search: Search, known: Evaluated | None) -> Outcome:
    """The fastest of ``layouts``; pipelines of several stages a rank over unlike devices come after all others.

    What these are estimated to take is farther below what they do than it is of others, whose visits they would take.
    ``search``: of some layouts, with the best that is known.
    """
    last = layouts.where(_Key, _comes_last)
    if not last:
        return search(layouts, known)
    first = search(layouts.where(_Key, lambda key: not _comes_last(key)), known)
    if first.interrupted:
        bound_s = min(first.bound_s, float(rough_bound_s(table, last).min()))
        return replace(first, bound_s=bound_s, is_exhausted=False, num_candidates=len(layouts))
    second = search(last, first.best)
    best, bound_s = second.best, min(first.bound_s, second.bound_s)
    both = {each.layout: each for each in (*first.ranking, *second.ranking)}
    is_exhausted = first.is_exhausted and second.is_exhausted
    if best is not None:
        is_exhausted = bound_s >= best.step_time_s * (1 - TOLERANCE)
    lacking = [each.closest for each in (first, second) if each.closest is not None]
    return replace(
        second,
        ranking=tuple(sorted(both.values(), key=lambda each: each.step_time_s)),
        bound_s=bound_s,
        is_exhausted=is_exhausted,
        num_candidates=len(layouts),
        num_visited=first.num_visited + second.num_visited,
        near=(*first.near, *second.near),
        closest=min(lacking, key=lambda each: at_its_smallest(table, each).memory_share, default=None),
    )


def over_its_mesh(table: CostTable, layouts: Columns[Layout], found: Outcome, search: Search) -> Outcome:
    """``found``, or what is faster of the layouts over the mesh of its best, looked at as if that mesh were pinned.

    A search of all visits a few dozen layouts, and may leave the mesh of its best before the best one over it.
    """
    best = found.best
    if best is None or best.layout.mesh.pp == 1 or found.is_exhausted or found.interrupted:
        return found
    closer = in_turn(table, layouts.where(_MeshKey, lambda key: key.mesh == best.layout.mesh), search, best)
    if closer.best is None or closer.best.step_time_s >= best.step_time_s:
        return found
    both = {each.layout: each for each in (*found.ranking, *closer.ranking)}
    return replace(
        found,
        best=closer.best,
        ranking=tuple(sorted(both.values(), key=lambda each: each.step_time_s)),
        bound_s=min(found.bound_s, closer.best.step_time_s),
        interrupted=closer.interrupted,
        num_visited=found.num_visited + closer.num_visited,
    )
