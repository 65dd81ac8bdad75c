"""The memory of one pipeline rank in every phase, from what its units hold and the states of its parameters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import overload

import numpy as np
from numpy.typing import NDArray

from costmodels.ledger import MemoryLedger, RankMemory, SoftwareBytes, StateBytes
from costmodels.vocabulary.mesh import ZERO_STAGES, Group
from costmodels.vocabulary.terms import PLACE, Element, Holding, MemoryTerm, Phase
from planner.evaluation.states import held_elements, state_bytes
from planner.evaluation.unit_times import LayoutRows
from planner.layout.columns import Array
from planner.layout.layout import Layout
from planner.table.cost_table import CostTable


@overload
def reserve_fraction(table: CostTable, mixes_lifetimes: bool) -> float: ...


@overload
def reserve_fraction(table: CostTable, mixes_lifetimes: NDArray[np.bool]) -> Array: ...


def reserve_fraction(table: CostTable, mixes_lifetimes: bool | NDArray[np.bool]) -> float | Array:
    """Share of the tensors that come and go which the allocator loses to gaps between them.

    It is smaller where every micro-batch allocates and frees the same tensors in the same order: no pipeline keeps
    several micro-batches in flight, and no collective splits or gathers activations.
    """
    share = np.where(mixes_lifetimes, 1.0, table.framework.plain_reserve)
    found = table.cluster.software.reserve_fraction * share
    return found if found.ndim else float(found)


@dataclass(frozen=True)
class Transient:
    """Bytes of a rank besides states and kept activations."""

    working: float  # of the unit whose backward needs most, less what units behind it have freed by then
    loss: float  # of the loss in forward
    gathered: float  # parameters of units in transit (ZeRO 3)
    reduced: float  # gradients of units in transit
    buffers: float
    waiting: float
    stranded: float

    @property
    def tensors(self) -> float:
        """Those that are allocated while a backward pass runs."""
        return self.working + self.gathered + self.reduced + self.buffers

    @property
    def cached(self) -> float:
        """Those that are freed, yet cannot be reused."""
        return self.waiting + self.stranded


class RankMemoryModel:
    """Memory of the ranks of one layout."""

    def __init__(self, table: CostTable, layout: Layout, rows: LayoutRows) -> None:
        """``rows``: those of ``layout`` alone."""
        self._table, self._layout, self._rows = table, layout, rows
        self._held: list[list[float]] = table.num_bytes[rows.work[0], rows.mode[0]].tolist()  # [kinds, Holding]
        self._counts: list[list[float]] = table.elements[rows.split[0]].tolist()  # [kinds, Element]
        self._state = table.state_bytes[rows.state[0]]

    @cached_property
    def num_communicators(self) -> float:
        """Process groups of more than one rank."""
        mesh = self._layout.mesh
        groups = [Group.PIPELINE, Group.REPLICATE, Group.SHARD, Group.CONTEXT, Group.TENSOR]
        if mesh.ep > 1:
            groups += [Group.EXPERT, Group.EXPERT_SHARD]
        axes = sum(mesh.group(group).num_ranks > 1 for group in groups)
        return axes + self._table.framework.extra_communicators * (axes > 0)

    @cached_property
    def software(self) -> SoftwareBytes:
        """What the software takes, its allocator's reserve as this layout makes it."""
        share = reserve_fraction(self._table, bool(self._rows.mixes_lifetimes[0]))
        return replace(self._table.cluster.software, reserve_fraction=share)

    @property
    def holds_gradients(self) -> bool:
        """Whether gradients exist while all activations do: in buffers, or left by an earlier micro-batch."""
        return self._table.framework.keeps_gradients or self._layout.num_microbatches > 1

    def unit_states(self, unit: int, *, tied_copy: bool) -> StateBytes:
        """States of one unit."""
        return state_bytes(self._state, *self._elements(unit, tied_copy=tied_copy))

    def rank(self, stages: Sequence[Sequence[int]], activation_bytes: float) -> RankMemory:
        """The rank that holds ``stages``, each a row of units, and at its peak ``activation_bytes`` of them."""
        trainable, frozen, experts = self.elements(stages)
        states = state_bytes(self._state, trainable, frozen, experts)
        lasting = states.gradients if self._table.framework.keeps_gradients else 0.0
        transient = self.transient(stages)
        forward = self._ledger(
            states,
            states.gradients if self.holds_gradients else 0.0,
            activations=activation_bytes,
            working_set=transient.loss,
            gathered_parameters=transient.gathered,
            gather_buffers=transient.buffers,
        )
        update = self._ledger(
            states,
            states.gradients,
            gathered_update=self._gathered_update(trainable, experts),
            gather_buffers=transient.buffers,
        )
        backward = self._backward(states, stages, activation_bytes, transient)
        return RankMemory(
            (
                (Phase.INITIALISATION, self._with_reserve(self._ledger(states.before_first_step, lasting))),
                (Phase.FORWARD, self._with_reserve(forward, transient)),
                (Phase.BACKWARD, self._with_reserve(backward, transient)),
                (Phase.OPTIMIZER, self._with_reserve(update)),
                (Phase.CHECKPOINT, self._with_reserve(self._ledger(states, lasting))),
            )
        )

    def elements(self, stages: Sequence[Sequence[int]]) -> tuple[float, float, float]:
        """Trainable and frozen elements of a rank, before ZeRO divides them, and of the trainable those of experts."""
        pp = self._layout.mesh.pp
        # A tied parameter is held twice where owner and user lie in different stages.
        found = [self._elements(unit, tied_copy=pp > 1 and 0 not in stage) for stage in stages for unit in stage]
        return sum(t for t, _, _ in found), sum(f for _, f, _ in found), sum(e for _, _, e in found)

    def _backward(
        self, states: StateBytes, stages: Sequence[Sequence[int]], activation_bytes: float, transient: Transient
    ) -> MemoryLedger:
        """The fullest moment.

        Where the only micro-batch allocates the gradients, that is its beginning, with all activations, or its end,
        with all gradients.
        """

        def ledger(gradients: float, activations: float, working: float, reduced: float) -> MemoryLedger:
            return self._ledger(
                states,
                gradients,
                activations=activations,
                working_set=working,
                gathered_parameters=transient.gathered,
                reduction_buffers=reduced,
                gather_buffers=transient.buffers,
            )

        if self.holds_gradients:
            return ledger(states.gradients, activation_bytes, transient.working, transient.reduced)
        start = ledger(0.0, activation_bytes, transient.working, transient.reduced)
        first = [stage[:1] for stage in stages[:1]]
        kept = sum(self.held(unit, Holding.KEPT) for stage in first for unit in stage)
        reduced = self.most_transient([unit for stage in stages for unit in stage]).reduced
        end = ledger(states.gradients, kept, self.transient(first).working, reduced)
        return max(start, end, key=lambda moment: moment.total_bytes)

    @staticmethod
    def _ledger(states: StateBytes, gradients: float, **rows: float) -> MemoryLedger:
        first = (
            (MemoryTerm.PARAMETERS, states.parameters),
            (MemoryTerm.GRADIENTS, gradients),
            (MemoryTerm.OPTIMIZER, states.optimizer),
        )
        return MemoryLedger((*first, *((MemoryTerm(name), num_bytes) for name, num_bytes in rows.items())))

    def transient(self, stages: Sequence[Sequence[int]]) -> Transient:
        """What the units of a rank need besides states and kept activations."""
        units = [unit for stage in stages for unit in stage]
        working, reduced = max((self._at_work(stage) for stage in stages), key=sum, default=(0.0, 0.0))
        framework = self._table.framework
        in_transit = framework.units_in_transit * self._largest(units) * framework.item_bytes
        return Transient(
            working=working,
            loss=self._most(units, Holding.LOSS),
            gathered=in_transit * ZERO_STAGES[self._layout.zero_stage].shards_parameters,
            reduced=reduced,
            buffers=self._most(units, Holding.BUFFER),
            waiting=min(sum(self.held(unit, Holding.COLLECTIVE) for unit in units), self._most(units, Holding.QUEUED)),
            stranded=self._most(units, Holding.STRANDED),
        )

    def _at_work(self, stage: Sequence[int]) -> tuple[float, float]:
        """Working set and reduction buffers at the worst moment of the stage's backward pass, which goes from its end.

        Units behind the one at work have freed what they kept, and their gradients are being reduced.
        """
        worst, freed = (0.0, 0.0), 0.0
        for place in reversed(range(len(stage))):
            reduced = self._reduced(stage[place + 1 :])
            worst = max(worst, (self.held(stage[place], Holding.WORKING) - freed, reduced), key=sum)
            freed += self.held(stage[place], Holding.KEPT)
        return max(0.0, worst[0]), worst[1]

    def _reduced(self, units: Sequence[int]) -> float:
        """Bytes of the gradients in transit of the largest of ``units``; nothing where they are reduced in place."""
        mesh, framework = self._layout.mesh, self._table.framework
        if framework.reduces_in_place or mesh.dp * mesh.cp == 1:
            return 0.0
        return framework.units_in_transit * framework.reduction_bytes * self._largest(units)

    def held(self, unit: int, holding: Holding) -> float:
        """Bytes of one holding of one micro-batch in one unit."""
        return self._held[self._table.units.kinds[unit]][PLACE[holding]]

    def _most(self, units: Sequence[int], holding: Holding) -> float:
        return max((self.held(unit, holding) for unit in units), default=0.0)

    def _count(self, unit: int, element: Element) -> float:
        return self._counts[self._table.units.kinds[unit]][PLACE[element]]

    def _largest(self, units: Sequence[int]) -> float:
        """Elements of the largest of ``units`` when it is gathered."""
        ep = self._layout.mesh.ep
        totals = ((self._count(u, Element.TRAINABLE) + self._count(u, Element.FROZEN), u) for u in units)
        return max((held_elements(total, self._count(u, Element.EXPERT), ep) for total, u in totals), default=0.0)

    def most_transient(self, units: Sequence[int]) -> Transient:
        """At least ``transient`` of any stages that are made of some of ``units``: the most of each part by itself."""
        alone = self.transient([[unit] for unit in units])
        return replace(alone, reduced=self._reduced(units))

    def _with_reserve(self, ledger: MemoryLedger, transient: Transient | None = None) -> MemoryLedger:
        return ledger.with_reserve(
            self.software,
            self.num_communicators,
            waiting=transient.waiting if transient else 0.0,
            stranded=transient.stranded if transient else 0.0,
        )

    def _elements(self, unit: int, *, tied_copy: bool) -> tuple[float, float, float]:
        """Trainable and frozen ones, and of the trainable those of experts."""
        trainable = self._count(unit, Element.TRAINABLE) + (self._count(unit, Element.TIED) if tied_copy else 0.0)
        return trainable, self._count(unit, Element.FROZEN), self._count(unit, Element.EXPERT)

    def _gathered_update(self, trainable: float, experts: float) -> float:
        """Copies through which ZeRO 1 gathers updated parameters."""
        framework, layout = self._table.framework, self._layout
        if layout.zero_stage != 1 or layout.mesh.num_shards == 1:
            return 0.0
        gathered, sent = framework.gathered_update_bytes, framework.gathered_update_shard_bytes
        held = held_elements(trainable, experts, layout.mesh.ep)
        return held * gathered + trainable * sent / layout.mesh.num_shards
