"""What a pipeline rank needs at least besides states and kept activations: software, and a unit at work."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from itertools import product
from typing import NamedTuple

from costmodels.ledger import MemoryLedger
from costmodels.vocabulary.mesh import ZERO_STAGES, Mesh
from planner.evaluation.rank_memory import RankMemoryModel
from planner.evaluation.unit_times import LayoutRows
from planner.layout.layout import Layout
from planner.solver.bounds import AlikeLayouts


class KnownBytes(NamedTuple):
    """What was worked out of layouts with the prices of one table."""

    passing: dict[tuple[object, ...], tuple[float, float]]
    outside: dict[tuple[Mesh, bool], float]


class PassingBytes:
    """What ranks of layouts need besides states and kept activations."""

    def __init__(self, known: KnownBytes, of: AlikeLayouts) -> None:
        """``known``: of layouts with the same prices."""
        self._known, self._of = known, of

    def of_layout(self, place: int, unlike_ends: Sequence[tuple[int, ...]]) -> list[float]:
        """Of one layout the context and communicators; and for each of the ends that ranks hold what a rank needs.

        That is: at least while a unit is at work, and where it holds two blocks in a stage.
        """
        layout = self._of.layouts[place]
        key = layout.mesh, bool(self._of.rows.mixes_lifetimes[place])
        if key not in self._known.outside:
            model = self._memory_model(layout)
            ledger = MemoryLedger().with_reserve(model.software, model.num_communicators)
            self._known.outside[key] = ledger.total_bytes
        found = [self._known.outside[key]]
        alike = self._key(layout, place)
        for ends in unlike_ends:
            whole = (*alike, ends)
            if whole not in self._known.passing:
                model, reserve = self._memory_model(layout), float(self._of.reserve[place])
                self._known.passing[whole] = self._while_at_work(ends, model, reserve)
            found += self._known.passing[whole]
        return found

    def _memory_model(self, layout: Layout) -> RankMemoryModel:
        table = self._of.table
        return RankMemoryModel(table, layout, LayoutRows.of_one(table, layout), [0] * len(table.units.kinds))

    @cached_property
    def _kinds_between(self) -> list[int]:
        """Kinds of the units that are no blocks, besides the first and the last of the model."""
        units = self._of.table.units
        pairs = list(zip(units.kinds, units.is_block, strict=True))[1:-1]
        return [kind for kind, is_block in pairs if not is_block]

    def _while_at_work(self, ends: tuple[int, ...], model: RankMemoryModel, reserve: float) -> tuple[float, float]:
        """What a rank needs at least while a unit is at work, and one that holds two blocks in a stage.

        ``ends``: kinds of the ends of the model that it holds. A stage needs no less than its last units alone,
        whatever each recomputes. Where ranks hold several stages each has one that ends with a block, or with a unit
        that stands between blocks and the model's end; of a rank's only stage the last unit may be of any kind.
        """

        def least(*kinds: int) -> float:
            modes = product(self._of.modes, repeat=len(kinds))
            return min(model.passing_bytes([*zip(each, kinds, strict=True)], reserve) for each in modes)

        units, between = self._of.table.units, self._kinds_between
        kind = next(kind for kind, is_block in zip(units.kinds, units.is_block, strict=True) if is_block)
        any_kind = [kind, *between] if self._of.virtual_stages > 1 else list(range(len(units.counts)))
        few = min(least(each) for each in any_kind)
        if units.kinds[-1] in ends:
            few = max(few, least(units.kinds[-1]))
        return few, few if between else max(few, least(kind, kind))

    def _key(self, layout: Layout, place: int) -> tuple[object, ...]:
        """All that ``_while_at_work`` depends on."""
        rows, mesh, zero = self._of.rows, layout.mesh, ZERO_STAGES[layout.zero_stage]
        reduces_each = zero.shards_gradients or layout.num_microbatches == 1
        sharding = zero.shards_parameters, reduces_each, mesh.expert_parts, mesh.dp * mesh.cp == 1
        shape = self._of.virtual_stages > 1, bool(rows.mixes_lifetimes[place])
        return int(rows.work[place]), int(rows.split[place]), *sharding, *shape, *self._of.modes
