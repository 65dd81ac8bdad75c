"""Kinds of layouts: those of one are estimated alike, and alike in error. And what tells layouts apart for a reader."""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

from planner.layout.columns import Columns, Positions
from planner.layout.layout import Layout

# Layouts of one kind are taken to be so much nearer their estimates than those that were visited.
LENIENCE = 0.02
# So many kinds of one pipeline, or of one schedule, say what the others are like.
ENOUGH_KINDS = 3

_Key: TypeAlias = tuple[object, ...]


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
    found: dict[_Key, int] = {}
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
        self._least: dict[_Key, float] = {}
        self._kinds_like: dict[_Key, set[_Key]] = {}  # that were visited, of each pipeline and each schedule
        self._most_shards: dict[_Key, int] = {}  # over which states were divided, and nothing fitted

    def learn(self, index: int, ratio: float) -> None:
        """A layout of ``listed`` takes ``ratio`` times its estimate."""
        kind = self._kind_of(index)
        self._least[kind] = min(ratio, self._least.get(kind, ratio))
        for like in (_pipeline_of(self._listed[index]), _schedule_of(self._listed[index])):
            self._kinds_like.setdefault(like, set()).add(kind)

    def learn_that_nothing_fits(self, index: int) -> None:
        """However it was cut, a layout of ``listed`` needs more memory than there is."""
        like = self._like_in_memory(index)
        self._most_shards[like] = max(self._listed[index].mesh.num_shards, self._most_shards.get(like, 0))

    def factor(self, index: int) -> float:
        """A layout likely takes so many times its estimate: the least that was found of its kind, and 1 or more.

        Infinite where nothing fitted of one that only divides its states over as many ranks or more.
        """
        if self._listed[index].mesh.num_shards <= self._most_shards.get(self._like_in_memory(index), 0):
            return float("inf")
        return max(1.0, self._least.get(self._kind_of(index), 1.0) - LENIENCE)

    def factor_by_pipeline(self, index: int) -> float:
        """The same, where a kind that was not visited is like the best that were of its pipeline, if these are enough.

        Nearer the truth where all kinds of a pipeline err alike, and farther where one of them is an exception. Over
        unlike devices each errs by itself.
        """
        return self._factor_by(_pipeline_of(self._listed[index]), index)

    def factor_by_schedule(self, index: int) -> float:
        """The same with those of its schedule."""
        return self._factor_by(_schedule_of(self._listed[index]), index)

    def _factor_by(self, like: _Key, index: int) -> float:
        kinds, own = self._kinds_like.get(like, set()), self.factor(index)
        if own == float("inf") or self._listed[index].groups or self._kind_of(index) in kinds:
            return own
        return own if len(kinds) < ENOUGH_KINDS else max(1.0, min(self._least[kind] for kind in kinds) - LENIENCE)

    def _like_in_memory(self, index: int) -> _Key:
        layout = self._listed[index]
        held = layout.zero_stage, layout.recompute, layout.offload, layout.offloads_activations
        return *kind_of(layout), layout.groups, *held

    def _kind_of(self, index: int) -> _Key:
        layout = self._listed[index]
        return *kind_of(layout), layout.virtual_stages, layout.groups


def _schedule_of(layout: Layout) -> _Key:
    return layout.schedule, layout.mesh.pp > 1


def _pipeline_of(layout: Layout) -> _Key:
    return layout.schedule, layout.mesh.pp, layout.virtual_stages
