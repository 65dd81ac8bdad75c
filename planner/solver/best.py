"""What a search has found so far, and what can still be better."""

from __future__ import annotations

from planner.evaluation.evaluator import Evaluated
from planner.layout.layout import Layout
from planner.solver.cutting import TOLERANCE

# A layout replaces the best only if it is faster by more than this share.
LEAST_GAIN = 1e-6


class Best:
    """The layouts that were priced and fit; of interest are those that take less than ``cutoff_s``."""

    def __init__(self, cutoff_s: float | None = None) -> None:
        self._cutoff_s = cutoff_s
        self.best: Evaluated | None = None
        self.found: dict[Layout, Evaluated] = {}

    def keep(self, priced: Evaluated | None) -> None:
        """Takes ``priced`` in; it becomes the best only where it is faster by more than the tolerance."""
        if priced is None:
            return
        known = self.found.get(priced.layout)
        if known is None or priced.step_time_s < known.step_time_s:
            self.found[priced.layout] = priced
        if self.time_s is None or priced.step_time_s < self.time_s * (1 - LEAST_GAIN):
            self.best = priced

    @property
    def time_s(self) -> float | None:
        """Step time of the best layout, and before there is one the cutoff."""
        return self._cutoff_s if self.best is None else self.best.step_time_s

    def beats(self, bound_s: float) -> bool:
        """Whether no layout with this bound can be better by more than the tolerance."""
        return self.time_s is not None and bound_s >= self.time_s * (1 - TOLERANCE)

    def like(self, layout: Layout) -> Evaluated | None:
        """The fastest with as many stages on the same unlike devices: what is even there is not even in time."""
        if not layout.groups:
            return None
        alike = (
            each
            for each in self.found.values()
            if each.layout.groups == layout.groups and len(each.starts) == layout.mesh.pp * layout.virtual_stages
        )
        return min(alike, key=lambda each: each.step_time_s, default=None)

    def ranking(self) -> tuple[Evaluated, ...]:
        """Fastest first."""
        return tuple(sorted(self.found.values(), key=lambda priced: priced.step_time_s))
