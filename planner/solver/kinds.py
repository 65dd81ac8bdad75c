"""Kinds of layouts: those of one are estimated alike, and alike in error. And what tells layouts apart for a reader."""

from __future__ import annotations

from typing import NamedTuple

from planner.layout.columns import Columns, Positions
from planner.layout.layout import Layout

# Layouts of one kind are taken to be so much nearer their estimates than those that were visited.
LENIENCE = 0.02
# So many kinds of one schedule say what the others are like.
ENOUGH_KINDS = 3


class Matter(NamedTuple):
    """What tells layouts apart that are shown: micro-batch, recomputation and the like do not."""

    mesh: object
    zero_stage: int
    schedule: object


def matter_of(layout: Layout) -> Matter:
    """That of one layout."""
    return Matter(layout.mesh, layout.zero_stage, layout.schedule)


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


class Excess:
    """What layouts take over what they were estimated to take, as visits to others of their kind found.

    Those of one kind also have as many stages a rank, and over unlike devices these in the same order.
    """

    def __init__(self, listed: Columns[Layout]) -> None:
        self._listed = listed
        self._least: dict[tuple[object, ...], float] = {}
        self._visited: dict[tuple[object, ...], set[tuple[object, ...]]] = {}  # kinds of each schedule

    def learn(self, index: int, ratio: float) -> None:
        """A layout of ``listed`` takes ``ratio`` times its estimate."""
        kind = self._kind_of(index)
        self._least[kind] = min(ratio, self._least.get(kind, ratio))
        self._visited.setdefault(self._schedule_of(index), set()).add(kind)

    def factor(self, index: int) -> float:
        """A layout likely takes so many times its estimate: the least that was found of its kind, and 1 or more."""
        return max(1.0, self._least.get(self._kind_of(index), 1.0) - LENIENCE)

    def factor_by_schedule(self, index: int) -> float:
        """The same, where a kind that was not visited is like the best that were of its schedule, if these are enough.

        Nearer the truth where all kinds of a schedule err alike, and farther where one of them is an exception. Over
        unlike devices each errs by itself.
        """
        kinds = self._visited.get(self._schedule_of(index), set())
        if self._listed[index].groups or self._kind_of(index) in kinds or len(kinds) < ENOUGH_KINDS:
            return self.factor(index)
        return max(1.0, min(self._least[kind] for kind in kinds) - LENIENCE)

    def _schedule_of(self, index: int) -> tuple[object, ...]:
        layout = self._listed[index]
        return layout.schedule, layout.mesh.pp > 1

    def _kind_of(self, index: int) -> tuple[object, ...]:
        layout = self._listed[index]
        return *kind_of(layout), layout.virtual_stages, layout.groups
