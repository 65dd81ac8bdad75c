"""Kinds of layouts: those of one are estimated alike, and alike in error."""

from __future__ import annotations

from planner.layout.columns import Columns, Positions
from planner.layout.layout import Layout


def kind_of(layout: Layout) -> tuple[object, ...]:
    """Layouts of one kind differ only in how replicas and stages are dealt, and in what is split and recomputed."""
    mesh = layout.mesh
    return mesh.pp, mesh.tp, mesh.cp, mesh.ep, layout.micro_batch_size, layout.schedule


def unlike(listed: Columns[Layout], order: Positions, number: int) -> list[int]:
    """The first of each kind of layouts in ``order``, ``number`` at most."""
    found: dict[tuple[object, ...], int] = {}
    for index in order.tolist():
        found.setdefault(kind_of(listed[index]), index)
        if len(found) == number:
            break
    return list(found.values())
