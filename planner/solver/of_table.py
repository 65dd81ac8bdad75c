"""What bounds ask of the rows of one cost table, worked out once for all layouts."""

from __future__ import annotations

from functools import cached_property

import numpy as np

from planner.evaluation.block_modes import held_bytes
from planner.evaluation.unit_times import Hiding
from planner.layout.columns import Array
from planner.table.cost_table import CostTable


class OfTable:
    """Of one table, on its first devices."""

    def __init__(self, table: CostTable) -> None:
        self.table = table
        self._held: dict[tuple[int, ...], Array] = {}

    @cached_property
    def hiding(self) -> Hiding:
        """Compute that hides what happens once a step."""
        return Hiding(self.table, 0)

    def held(self, modes: tuple[int, ...]) -> Array:
        """The least that units hold in any of these modes, [rows of work, kinds, Holding]."""
        if modes not in self._held:
            every = np.arange(len(self.table.work_keys))
            each = [held_bytes(self.table, every, np.full_like(every, mode)) for mode in modes]
            self._held[modes] = np.min(each, axis=0)
        return self._held[modes]
