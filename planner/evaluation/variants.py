"""What the units of one layout hold: a kind of units in one mode of recomputation is a variant."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property

import numpy as np

from costmodels.vocabulary.terms import PLACE, Element, Holding
from planner.evaluation.block_modes import bytes_on_host, held_bytes
from planner.evaluation.states import held_elements
from planner.evaluation.unit_times import LayoutRows
from planner.layout.layout import Layout
from planner.table.cost_table import CostTable


class VariantsOfUnits:
    """Bytes and elements of the units of one layout."""

    def __init__(self, table: CostTable, layout: Layout, rows: LayoutRows, modes: Sequence[int]) -> None:
        """As of ``RankMemoryModel``."""
        self._table, self._layout, self._rows = table, layout, rows
        of_modes = held_bytes(table, rows.work, rows.mode)  # [modes, kinds, Holding]
        self._num_kinds = of_modes.shape[1]
        self._held: list[list[float]] = of_modes.reshape(-1, of_modes.shape[2]).tolist()  # [variants, Holding]
        self._on_host: list[float] = bytes_on_host(table, rows.work, rows.mode).ravel().tolist()  # [variants]
        pairs = zip(modes, table.units.kinds, strict=True)
        self._variants = [mode * self._num_kinds + kind for mode, kind in pairs]
        self._counts: list[list[float]] = table.elements[rows.split[0]].tolist()  # [kinds, Element]
        self._elements_of_kind: dict[tuple[int, bool], tuple[float, float, float]] = {}

    def on_host(self, unit: int) -> float:
        """Bytes of one micro-batch that one unit keeps in host memory."""
        return self._on_host[self._variants[unit]]

    def held(self, unit: int, holding: Holding) -> float:
        """Bytes of one holding of one micro-batch in one unit."""
        return self._held[self._variants[unit]][PLACE[holding]]

    def held_of(self, units: range, holding: Holding) -> float:
        """The same of several units together."""
        held, place = self._held, PLACE[holding]
        return sum([held[variant][place] for variant in self._variants[units.start : units.stop]])

    def _least_held(self, modes: Sequence[int]) -> list[list[float]]:
        """Of each kind the least of every holding in any of ``modes``; of what it keeps the most. [kinds, Holding]."""
        held = np.array(self._held).reshape(-1, self._num_kinds, len(Holding))[list(modes)]
        least, kept, loss = held.min(axis=0), PLACE[Holding.KEPT], PLACE[Holding.LOSS]
        least[:, kept] = held[..., kept].max(axis=0)
        # Where a loss needs more than the working set, that is not looked at.
        least[:, PLACE[Holding.WORKING]] *= held[..., loss].max(axis=0) == 0
        return least.tolist()

    def _of(self, variant: int, holding: Holding) -> float:
        return self._held[variant][PLACE[holding]]

    def _most(self, variants: Iterable[int], holding: Holding) -> float:
        place = PLACE[holding]
        return max([self._held[variant][place] for variant in variants], default=0.0)

    def _count(self, kind: int, element: Element) -> float:
        return self._counts[kind][PLACE[element]]

    @cached_property
    def _sizes(self) -> list[float]:
        """Elements of a unit of each kind when it is gathered."""
        parts, trainable, frozen, experts = (
            self._layout.mesh.expert_parts,
            *(PLACE[element] for element in (Element.TRAINABLE, Element.FROZEN, Element.EXPERT)),
        )
        return [held_elements(row[trainable] + row[frozen], row[experts], parts) for row in self._counts]

    def _largest(self, kinds: Sequence[int]) -> float:
        """Elements of the largest unit of ``kinds`` when it is gathered."""
        return max((self._sizes[kind] for kind in set(kinds)), default=0.0)

    def _elements(self, kind: int, *, tied_copy: bool) -> tuple[float, float, float]:
        """Of a unit: trainable and frozen ones, and of the trainable those of experts."""
        key = kind, tied_copy
        if key not in self._elements_of_kind:
            trainable = self._count(kind, Element.TRAINABLE) + (self._count(kind, Element.TIED) if tied_copy else 0.0)
            others = self._count(kind, Element.FROZEN), self._count(kind, Element.EXPERT)
            self._elements_of_kind[key] = trainable, *others
        return self._elements_of_kind[key]
