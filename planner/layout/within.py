"""The part of the search space that a training framework can run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from costmodels.vocabulary.choices import ContextMethod, Offload, Recompute
from costmodels.vocabulary.mesh import Mesh
from costmodels.vocabulary.schedules import ScheduleName
from planner.layout.columns import Columns
from planner.layout.layout import Layout


class Choice(NamedTuple):
    """What of a layout the rules of a framework look at together."""

    mesh: Mesh
    zero_stage: int
    num_microbatches: int
    sequence_parallel: bool
    offload: Offload
    cp_method: ContextMethod


class _Pipeline(NamedTuple):
    pp: int
    schedule: ScheduleName


class _Modes(NamedTuple):
    recompute: Recompute | None


@dataclass(frozen=True)
class Within:
    """What a framework can run. ``recompute``: what all blocks alike may recompute; None: blocks may differ in it."""

    framework: str
    allows: Callable[[Choice], bool]
    schedules: frozenset[ScheduleName]  # of pipelines
    recompute: tuple[Recompute, ...] | None
    why: Callable[[], str] = str  # what is against all layouts that ``allows`` was asked of

    def of(self, layouts: Columns[Layout]) -> Columns[Layout]:
        """Those of ``layouts`` that it can run; where blocks cannot differ, one layout for each mode of all blocks."""
        found = layouts.where(_Pipeline, lambda key: key.pp == 1 or key.schedule in self.schedules)
        found = found.where(Choice, self.allows)
        if self.recompute is None:
            return found
        is_free = np.asarray(found.each(_Modes, lambda key: key.recompute is None), dtype=bool)
        fixed = found.take(~is_free).where(_Modes, lambda key: key.recompute in (self.recompute or ()))
        return Columns.joined([fixed, found.take(is_free).with_each("recompute", self.recompute)])
