"""The memory of one pipeline rank in every phase, from what its units cost and hold."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from costmodels.memory import MemoryLedger, Phase, RankMemory, StateBytes
from hardware_profiles.schema import SoftwareProfile
from planner.layout.layout import Layout
from planner.pricing.cost_table import CostKey, CostTable
from planner.pricing.unit_costs import UnitCosts, held_elements

# FSDP2 prefetches the next unit while one computes: two units' parameters or gradients are whole at once.
UNITS_IN_TRANSIT = 2
# Of the allocator's reserve, what is left where every micro-batch allocates and frees the same tensors in one order:
# no pipeline keeps several in flight, and no collective splits or gathers activations. Peak reserved memory of
# torchtitan's two eager FSDP runs (shared/data/published_runs.csv) leaves 0.02 and 0.11 of such tensors, against the
# 0.25 of the layouts with tensor or pipeline parallelism that the profiles' reserve is of.
PLAIN_RESERVE = 0.25


def reserve_fraction(table: CostTable, layout: Layout) -> float:
    """Share of the tensors that come and go which the allocator loses to gaps between them."""
    mesh = layout.mesh
    mixes_lifetimes = mesh.pp * mesh.tp * mesh.cp * mesh.ep > 1
    return table.software.allocator_reserve_fraction.value * (1.0 if mixes_lifetimes else PLAIN_RESERVE)


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
    """Memory of the ranks of one coarse point."""

    def __init__(self, table: CostTable, layout: Layout) -> None:
        self._table, self._layout = table, layout
        self._costs = table.costs[CostKey.of(layout)]
        self._states = table.states[layout.mesh.tp, layout.sequence_parallel]

    @cached_property
    def num_communicators(self) -> float:
        """Process groups of more than one rank."""
        mesh = self._layout.mesh
        sharding = mesh.dp_shard * mesh.cp
        of_experts = (mesh.ep, sharding // mesh.ep) if mesh.ep > 1 else ()
        axes = sum(d > 1 for d in (mesh.pp, mesh.dp_replicate, sharding, mesh.cp, mesh.tp, *of_experts))
        return axes + self._table.recipe.memory.extra_communicators.value * (axes > 0)

    @cached_property
    def software(self) -> SoftwareProfile:
        """The software, its allocator's reserve as this point makes it."""
        software = self._table.software
        share = software.allocator_reserve_fraction
        made = share.model_copy(update={"value": reserve_fraction(self._table, self._layout)})
        return software.model_copy(update={"allocator_reserve_fraction": made})

    @property
    def holds_gradients(self) -> bool:
        """Whether gradients exist while all activations do: in buffers, or left by an earlier micro-batch."""
        return self._table.recipe.memory.keeps_gradients or self._layout.num_microbatches > 1

    def unit_states(self, unit: int, *, tied_copy: bool) -> StateBytes:
        """States of one unit."""
        return self._table.state_bytes(self._layout, *self._elements(unit, tied_copy=tied_copy))

    def rank(self, stages: Sequence[Sequence[int]], activation_bytes: float) -> RankMemory:
        """The rank that holds ``stages``, each a row of units, and at its peak ``activation_bytes`` of them."""
        trainable, frozen, experts = self.elements(stages)
        states = self._table.state_bytes(self._layout, trainable, frozen, experts)
        lasting = states.gradients if self._table.recipe.memory.keeps_gradients else 0.0
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
        kept = sum(self._unit_costs(unit).kept_bytes for stage in first for unit in stage)
        reduced = self.most_transient([unit for stage in stages for unit in stage]).reduced
        end = ledger(states.gradients, kept, self.transient(first).working, reduced)
        return max(start, end, key=lambda moment: moment.total_bytes)

    @staticmethod
    def _ledger(states: StateBytes, gradients: float, **rows: float) -> MemoryLedger:
        first = (("parameters", states.parameters), ("gradients", gradients), ("optimizer", states.optimizer))
        return MemoryLedger((*first, *rows.items()))

    def transient(self, stages: Sequence[Sequence[int]]) -> Transient:
        """What the units of a rank need besides states and kept activations."""
        units = [unit for stage in stages for unit in stage]
        costs = [self._unit_costs(unit) for unit in units]
        working, reduced = max((self._at_work(stage) for stage in stages), key=sum, default=(0.0, 0.0))
        table, zero_3 = self._table, self._layout.zero_stage == 3
        return Transient(
            working=working,
            loss=max((c.loss_bytes for c in costs), default=0.0),
            gathered=UNITS_IN_TRANSIT * self._largest(units) * table.item_bytes * zero_3,
            reduced=reduced,
            buffers=max((c.buffer_bytes for c in costs), default=0.0),
            waiting=min(sum(c.collective_bytes for c in costs), max((c.queued_bytes for c in costs), default=0.0)),
            stranded=max((c.stranded_bytes for c in costs), default=0.0),
        )

    def _at_work(self, stage: Sequence[int]) -> tuple[float, float]:
        """Working set and reduction buffers at the worst moment of the stage's backward pass, which goes from its end.

        Units behind the one at work have freed what they kept, and their gradients are being reduced.
        """
        mesh, state = self._layout.mesh, self._table.recipe.state
        per_element = 0.0 if state.reduces_in_place or mesh.dp * mesh.cp == 1 else state.reduction_bytes.value
        worst, freed = (0.0, 0.0), 0.0
        for place in reversed(range(len(stage))):
            cost = self._unit_costs(stage[place])
            reduced = UNITS_IN_TRANSIT * per_element * self._largest(stage[place + 1 :])
            worst = max(worst, (cost.working_bytes - freed, reduced), key=sum)
            freed += cost.kept_bytes
        return max(0.0, worst[0]), worst[1]

    def _largest(self, units: Sequence[int]) -> float:
        """Elements of the largest of ``units`` when it is gathered."""
        ep, states = self._layout.mesh.ep, (self._states[self._table.units.kinds[unit]] for unit in units)
        return max((held_elements(each.total, each.experts, ep) for each in states), default=0.0)

    def most_transient(self, units: Sequence[int]) -> Transient:
        """No less than ``transient`` of any stages made of some of ``units``."""
        alone = self.transient([[unit] for unit in units])
        mesh, state = self._layout.mesh, self._table.recipe.state
        apart = mesh.dp * mesh.cp > 1 and not state.reduces_in_place
        reduced = UNITS_IN_TRANSIT * state.reduction_bytes.value * self._largest(units) * apart
        return replace(alone, reduced=reduced)

    def _with_reserve(self, ledger: MemoryLedger, transient: Transient | None = None) -> MemoryLedger:
        return ledger.with_reserve(
            self.software,
            self.num_communicators,
            waiting=transient.waiting if transient else 0.0,
            stranded=transient.stranded if transient else 0.0,
        )

    def _unit_costs(self, unit: int) -> UnitCosts:
        return self._costs[self._table.units.kinds[unit]]

    def _elements(self, unit: int, *, tied_copy: bool) -> tuple[float, float, float]:
        """Trainable and frozen ones, and of the trainable those of experts."""
        states = self._states[self._table.units.kinds[unit]]
        return states.trainable + (states.tied if tied_copy else 0.0), states.frozen, states.experts

    def _gathered_update(self, trainable: float, experts: float) -> float:
        """Copies through which ZeRO 1 gathers updated parameters."""
        facts, layout = self._table.recipe.memory, self._layout
        if layout.zero_stage != 1 or layout.mesh.dp == 1:
            return 0.0
        gathered, sent = facts.gathered_update_bytes.value, facts.gathered_update_shard_bytes.value
        held = held_elements(trainable, experts, layout.mesh.ep)
        return held * gathered + trainable * sent / layout.mesh.dp_shard
