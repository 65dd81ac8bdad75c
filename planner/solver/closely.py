"""Closer bounds of one layout after the other, each worked out together with those that are alike and come next."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from planner.layout.columns import Columns, Positions
from planner.layout.layout import Layout
from planner.solver.closer_bounds import Among, CloserBounds
from planner.table.cost_table import CostTable


class Closely:
    """Of the layouts of a list, named by their places in it."""

    def __init__(self, table: CostTable, listed: Columns[Layout]) -> None:
        self._closer, self._listed = CloserBounds(table), listed
        self._waiting: dict[int, tuple[float, float]] = {}  # bounds of loads and of paths that nobody asked for yet
        self.num_asked = 0
        self._next, self._places = np.zeros(0, dtype=np.intp), dict[int, int]()
        self._among: Among | None = None  # of those that are next, once one of them is asked for

    def look_ahead(self, indices: Positions) -> None:
        """``bound_s`` is likely to be asked of these layouts next."""
        self._next, self._places = indices, {index: place for place, index in enumerate(indices.tolist())}
        self._among = None

    def bound_s(self, index: int, enough_s: float, is_wanted: Callable[[int], bool], most: int) -> float:
        """Seconds that no cut of the layout undercuts; where its loads take ``enough_s`` or more, of these alone.

        ``is_wanted``: whether the bound of another layout may be asked for as well; ``most``: so many at most.
        """
        if self._listed[index].mesh.pp == 1:  # without a pipeline no more is known
            return 0.0
        self.num_asked += 1
        if index not in self._waiting:
            self._look(index, enough_s, is_wanted, most)
        loads_s, path_s = self._waiting.pop(index)
        return loads_s if loads_s >= enough_s else max(loads_s, path_s)

    def _look(self, index: int, enough_s: float, is_wanted: Callable[[int], bool], most: int) -> None:
        place, named = self._places.get(index), self._next
        if place is None:  # its turn comes late: alone, so that those that are next stay known
            place, named = 0, np.array([index])
            among = self._closer.among(self._listed.take(named))
        else:
            among = self._among = self._among or self._closer.among(self._listed.take(named))
        alike = [(other, int(named[other])) for other in among.like(place).tolist() if other != place]
        others = [other for other, its in alike if its not in self._waiting and is_wanted(its)]
        together = np.array([place, *others[: max(0, most - 1)]])
        closer = among.of(together, enough_s)
        bounds_s = zip(closer.loads_s.tolist(), closer.path_s.tolist(), strict=True)
        self._waiting.update(zip(named[together].tolist(), bounds_s, strict=True))
