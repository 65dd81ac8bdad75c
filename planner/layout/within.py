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
from planner.layout.layout import Layout, Training


class Choice(NamedTuple):
    """What of a layout the rules of a framework look at together."""

    mesh: Mesh
    zero_stage: int
    sequence_parallel: bool
    offload: Offload
    cp_method: ContextMethod
    offloads_activations: bool


class Against(NamedTuple):
    """Why a framework cannot run something, and what to ask for instead."""

    reason: str
    way_out: str


class _Pipeline(NamedTuple):
    pp: int
    schedule: ScheduleName


class _Modes(NamedTuple):
    recompute: Recompute | None


class _Rounds(NamedTuple):
    pp: int
    num_microbatches: int


class _InRounds(NamedTuple):
    choice: Choice
    num_microbatches: int


@dataclass(frozen=True)
class Within:
    """What a framework can run. All blocks recompute alike, in one of the modes ``recompute``.

    ``against``: everything against a choice; empty where it can run that. ``against_rounds``: the same of so many
    micro-batches in a pipeline of so many ranks. ``cut``: the first unit of each of so many stages, of a framework that
    cuts by itself; None: as it is told.
    """

    framework: str
    against: Callable[[Choice, Training], tuple[Against, ...]]
    against_rounds: Callable[[int, int], tuple[Against, ...]]
    schedules: tuple[ScheduleName, ...]  # of pipelines
    recompute: tuple[Recompute, ...]
    cut: Callable[[int], tuple[int, ...] | None] | None = None

    def of(self, layouts: Columns[Layout], training: Training) -> Columns[Layout]:
        """Those of ``layouts`` that it can run, one for each mode where the blocks' modes are free."""
        found = self._in_rounds(self._scheduled(layouts))
        found = found.where(Choice, lambda choice: not self.against(choice, training))
        is_free = np.asarray(found.each(_Modes, lambda key: key.recompute is None), dtype=bool)
        fixed = found.take(~is_free).where(_Modes, lambda key: key.recompute in self.recompute)
        return Columns.joined([fixed, found.take(is_free).with_each("recompute", self.recompute)])

    def why_none(self, layouts: Columns[Layout], training: Training) -> Against:
        """What is against all of ``layouts``, of which it can run none; or where that differs, against the nearest."""
        found = self._scheduled(layouts) if self.schedules else layouts
        if not found:
            wanted = ", ".join(sorted({key.schedule.value for key in layouts.by(_Pipeline)[0]}))
            return _none_of("schedule", wanted, [each.value for each in self.schedules], "--schedule")
        against = {choice: self.against(choice, training) for choice in found.by(Choice)[0]}
        asked = [
            (*against[choice], *self.against_rounds(choice.mesh.pp, number))
            for choice, number in found.by(_InRounds)[0]
        ]
        if not all(asked):
            modes = {key.recompute for key in found.by(_Modes)[0] if key.recompute is not None}
            return _none_of("recomputation", ", ".join(sorted(modes)), [*self.recompute], "--recompute")
        of_all = [each for each in asked[0] if all(each in reasons for reasons in asked)]
        nearest = of_all or min(asked, key=len)
        reasons = "; ".join(each.reason for each in nearest)
        ways = "; ".join(dict.fromkeys(each.way_out for each in nearest))
        return Against(reasons if of_all else f"against the nearest of them, {reasons}", ways)

    def _in_rounds(self, layouts: Columns[Layout]) -> Columns[Layout]:
        return layouts.where(_Rounds, lambda key: not self.against_rounds(*key))

    def _scheduled(self, layouts: Columns[Layout]) -> Columns[Layout]:
        return layouts.where(_Pipeline, lambda key: key.pp == 1 or key.schedule in self.schedules)


def _none_of(what: str, wanted: str, known: list[str], option: str) -> Against:
    return Against(f"{what} {wanted} is not one of its own ({', '.join(known)})", f"search with {option} {known[0]}")
