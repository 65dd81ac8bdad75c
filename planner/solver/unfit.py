"""Layouts in which nothing fits, known from a layout that needs no more and that was tried: they are not cut."""

from __future__ import annotations

from typing import TypeAlias

import numpy as np

from costmodels.vocabulary.mesh import Group
from planner.layout.columns import Columns, Positions
from planner.layout.layout import Layout
from planner.solver.cutting import Cut

_Key: TypeAlias = tuple[object, ...]


class Unfit:
    """What visits found of layouts that differ only in over how many ranks they divide their states.

    The same cuts are tried of each. Under every one the layout over fewer ranks holds as much of everything or more,
    and has as many process groups or more: where nothing fits over many ranks, nothing does over fewer.
    """

    def __init__(self, listed: Columns[Layout]) -> None:
        self._listed = listed
        # Over how many ranks nothing fitted, and whether every cut was tried.
        self._most_shards: dict[tuple[_Key, bool], int] = {}
        self._smallest: dict[_Key, int] = {}

    def key(self, index: int) -> _Key:
        """Equal for layouts of which one may tell of the other.

        Over unlike devices each stands alone: which cuts are tried depends on what was found before.
        """
        layout, mesh = self._listed[index], self._listed[index].mesh
        if layout.groups:
            return (index,)
        divides_experts = mesh.group(Group.EXPERT_SHARD).num_ranks > 1  # it has a process group for that
        return mesh.pp, mesh.tp, mesh.cp, mesh.ep, mesh.etp, divides_experts, *layout[1:]

    def learn(self, index: int, cut: Cut, bound_s: float) -> None:
        """``cut`` was found of a layout of ``listed`` whose bound was ``bound_s``."""
        closes = bool(np.isinf(cut.bound_s))
        if cut.nothing_fits and (closes or cut.bound_s == bound_s):
            key = self.key(index), closes
            self._most_shards[key] = max(self._shards(index), self._most_shards.get(key, 0))

    def known(self, index: int, bound_s: float) -> Cut | None:
        """What would be found of a layout with this bound; None where that is not known."""
        key = self.key(index)
        for closes in (True, False):
            if self._shards(index) <= self._most_shards.get((key, closes), 0):
                return Cut(None, np.inf if closes else bound_s, nothing_fits=True)
        return None

    def smallest_like(self, index: int, order: Positions) -> int:
        """The layout that divides its states over most ranks, of those in ``order`` which differ in nothing else."""
        if not self._smallest:
            for each in order.tolist():
                known = self._smallest.setdefault(self.key(each), each)
                if self._shards(each) > self._shards(known):
                    self._smallest[self.key(each)] = each
        return self._smallest.get(self.key(index), index)

    def _shards(self, index: int) -> int:
        return self._listed[index].mesh.num_shards
