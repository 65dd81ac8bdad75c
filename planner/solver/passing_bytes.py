"""What a pipeline rank needs at least besides states and kept activations: software, and a unit at work."""

from __future__ import annotations

from functools import cached_property
from itertools import product
from typing import NamedTuple

from costmodels.ledger import MemoryLedger
from costmodels.vocabulary.mesh import Mesh
from planner.evaluation.rank_memory import RankMemoryModel
from planner.evaluation.unit_times import LayoutRows
from planner.layout.layout import Layout
from planner.solver.bounds import AlikeLayouts


class KnownBytes(NamedTuple):
    """What was worked out of layouts with the prices of one table."""

    passing: dict[tuple[object, ...], float]
    outside: dict[tuple[Mesh, bool], float]


class PassingBytes:
    """What ranks of one layout need besides states and kept activations."""

    def __init__(self, known: KnownBytes, of: AlikeLayouts, layout: Layout, place: int) -> None:
        """``known``: of layouts with the same prices; ``place``: of ``layout`` among those of ``of``."""
        self._known, self._of, self._layout, self._place = known, of, layout, place

    @cached_property
    def _memory_model(self) -> RankMemoryModel:
        table = self._of.table
        return RankMemoryModel(
            table, self._layout, LayoutRows.of_one(table, self._layout), [0] * len(table.units.kinds)
        )

    @property
    def outside_bytes(self) -> float:
        """The context and communicators."""
        key = self._layout.mesh, bool(self._of.rows.mixes_lifetimes[self._place])
        if key not in self._known.outside:
            model = self._memory_model
            ledger = MemoryLedger().with_reserve(model.software, model.num_communicators)
            self._known.outside[key] = ledger.total_bytes
        return self._known.outside[key]

    @property
    def _kinds_between(self) -> list[int]:
        """Kinds of the units that are no blocks, besides the first and the last of the model."""
        units = self._of.table.units
        pairs = list(zip(units.kinds, units.is_block, strict=True))[1:-1]
        return [kind for kind, is_block in pairs if not is_block]

    def while_at_work(self, ends: tuple[int, ...]) -> tuple[float, float]:
        """What a rank needs at least while a unit is at work, and one that holds two blocks in a stage.

        ``ends``: kinds of the ends of the model that it holds. A stage needs no less than its last units alone,
        whatever each recomputes. Where ranks hold several stages each has one that ends with a block, or with a unit
        that stands between blocks and the model's end; of a rank's only stage the last unit may be of any kind.
        """
        units, between = self._of.table.units, self._kinds_between
        kind = next(kind for kind, is_block in zip(units.kinds, units.is_block, strict=True) if is_block)
        any_kind = [kind, *between] if self._of.virtual_stages > 1 else list(range(len(units.counts)))
        few = min(self._least_of_stage((each,)) for each in any_kind)
        if units.kinds[-1] in ends:
            few = max(few, self._least_of_stage((units.kinds[-1],)))
        return few, few if between else max(few, self._least_of_stage((kind, kind)))

    def _least_of_stage(self, kinds: tuple[int, ...]) -> float:
        """What passes at least while a stage of these units is at work."""
        key, known = (*self._key, kinds), self._known.passing
        if key not in known:
            modes = product(self._of.modes, repeat=len(kinds))
            reserve = float(self._of.reserve[self._place])
            stages = ([*zip(each, kinds, strict=True)] for each in modes)
            known[key] = min(self._memory_model.passing_bytes(stage, reserve) for stage in stages)
        return known[key]

    @cached_property
    def _key(self) -> tuple[object, ...]:
        """All that ``RankMemoryModel.passing_bytes`` depends on."""
        layout, rows, at = self._layout, self._of.rows, self._place
        mesh, places = layout.mesh, (int(each[at]) for each in (rows.work, rows.split, rows.zero_stage))
        sharing = mesh.num_shards, mesh.expert_parts, mesh.dp * mesh.cp == 1, layout.num_microbatches == 1
        return *places, *sharing, float(self._of.reserve[at]), *self._of.modes
