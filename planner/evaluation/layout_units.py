"""The units of one layout, stage by stage and rank by rank: what each takes, and the memory of every pipeline rank.

Each unit has its own mode of recomputation. Everything is computed from the numbers of the cost table alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import replace
from functools import cached_property
from itertools import accumulate, chain
from typing import NamedTuple, Self

import numpy as np

from costmodels.ledger import MemoryLedger, RankMemory
from costmodels.pipeline import Timeline, seconds_of_actions, simulate, simulate_actions
from costmodels.vocabulary.action import ActionLists, Transfer
from costmodels.vocabulary.choices import BlockMode, Offload, Recompute
from costmodels.vocabulary.held_counts import ONLY_FIRST, OfPasses
from costmodels.vocabulary.terms import PLACE, Element, Holding
from planner.evaluation.block_modes import ALL_MODES, MODES, bytes_on_host, held_bytes, places_of_modes
from planner.evaluation.exchanges import StageExchanges, unhidden_s
from planner.evaluation.host import HostMemory, HostStates, fullest_node, host_states
from planner.evaluation.in_flight import Flying, InFlight
from planner.evaluation.rank_memory import RankMemoryModel
from planner.evaluation.states import num_updated, state_bytes
from planner.evaluation.unit_times import LayoutRows, UnitTimes, data_times, unit_times
from planner.layout.columns import Array, key_of
from planner.layout.layout import Layout
from planner.table.cost_table import CostTable
from planner.table.facts import DeviceFacts, HostFacts
from planner.table.keys import StateKey

_TRAINABLE, _FROZEN, _TIED, _EXPERT = range(len(Element))


class StageTimes(NamedTuple):
    """Seconds of each stage on one micro-batch; ``weight_s`` is the part of ``backward_s`` that can wait.

    ``exchanges``: those that may hide beside other micro-batches, with all hidden in the seconds here; () if none may.
    """

    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]
    weight_s: tuple[float, ...]
    exchanges: tuple[StageExchanges, ...] = ()

    @property
    def of_actions(self) -> Array:
        """Forward, backward, input gradient and weight gradient of every stage, [4 stages, 1]."""
        forward, backward, weight = (np.array(each) for each in (self.forward_s, self.backward_s, self.weight_s))
        return np.concatenate([forward, backward, backward - weight, weight])[:, None]

    def run(self, schedule: ActionLists, send_s: float | Sequence[float], transfer: Transfer) -> Timeline:
        """The schedule simulated."""
        input_s = tuple(b - w for b, w in zip(self.backward_s, self.weight_s, strict=True))
        split_s = input_s, self.weight_s
        if not self.exchanges:
            return simulate(schedule, self.forward_s, self.backward_s, send_s, split_s, transfer=transfer)
        sends = [send_s] * (len(self.forward_s) - 1) if isinstance(send_s, float | int) else send_s
        hidden_s = seconds_of_actions(schedule, self.forward_s, self.backward_s, split_s)
        pairs = zip(hidden_s, unhidden_s(schedule, self.exchanges), strict=True)
        seconds = tuple(tuple(a + b for a, b in zip(*rank, strict=True)) for rank in pairs)
        return simulate_actions(schedule, seconds, sends, transfer=transfer)


class _Priced(NamedTuple):
    """What the kinds of units take on the devices of one place: the layout's own rows of the table."""

    facts: DeviceFacts
    times: UnitTimes  # [modes of recomputation, kinds]
    data_s: Array  # [kinds, Data]


class OnDevice(NamedTuple):
    """What every unit takes on the devices of one place, each in its mode of recomputation."""

    facts: DeviceFacts
    times: UnitTimes
    data_s: Array
    unit_times: StageTimes  # of every unit as a stage of its own


class LayoutUnits:
    """A layout of ``table``, with the modes of its units."""

    def __init__(self, table: CostTable, layout: Layout, modes: Sequence[BlockMode] | None = None) -> None:
        """``modes``: of each unit; where none are given, what the layout says, or nothing is recomputed."""
        self.table, self.layout = table, layout
        self._rows = LayoutRows.of_one(table, layout)
        self._kinds = list(table.units.kinds)
        self._places = device_places(table, layout)
        self._in_flight = InFlight(layout)
        self._priced = {
            place: _Priced(
                table.cluster.devices[place],
                unit_times(table, self._rows, place),
                data_times(table, self._rows, place)[0],
            )
            for place in set(self._places)
        }
        self._set_modes(modes or [layout.recompute or Recompute.NONE] * len(self._kinds))

    def _set_modes(self, modes: Sequence[BlockMode]) -> None:
        self._memory_of: dict[tuple[int, ...], tuple[RankMemory, ...]] = {}
        of_blocks = {mode for mode, is_block in zip(modes, self.table.units.is_block, strict=True) if is_block}
        # Units that are no blocks recompute nothing in any mode: they take the name of the only one.
        self.modes = tuple(of_blocks) * len(modes) if len(of_blocks) == 1 else tuple(modes)
        self._modes = [MODES[mode] for mode in self.modes]
        self.memory_model = RankMemoryModel(self.table, self.layout, self._rows, self._modes)
        self._least_at_work: dict[tuple[BlockMode, ...], RankMemoryModel] = {}
        of_units: dict[int, OnDevice] = {}
        for place, priced in self._priced.items():
            times = priced.times
            forward_s, backward_s = tuple(self._of_units(times.forward_s)), tuple(self._of_units(times.backward_s))
            own = StageTimes(forward_s, backward_s, tuple(self._of_units(times.weight_s)))
            of_units[place] = OnDevice(*priced, own)
        self._ranks = tuple(of_units[place] for place in self._places)

    def with_modes(self, modes: Sequence[BlockMode]) -> Self:
        """The same layout with other modes of its units."""
        found = copy(self)
        found._set_modes(modes)
        return found

    @cached_property
    def free_modes(self) -> list[BlockMode]:
        """Those that every block may take, the one of least time first."""
        layout = self.layout
        places = places_of_modes(layout.recompute, offloads_activations=layout.offloads_activations)
        return [ALL_MODES[place] for place in places]

    def with_rank_of(self, other: Self, rank: int) -> Self:
        """The same layout and modes with the devices of one pipeline rank as ``other`` has them."""
        found = copy(self)
        found._ranks = (*self._ranks[:rank], other._ranks[rank], *self._ranks[rank + 1 :])
        return found

    def _of_units(self, array: Array, units: Sequence[int] | None = None) -> list[float]:
        """Of an array [modes, kinds] the entries of ``units``, each in its own mode; of all units without them."""
        places = range(len(self._kinds)) if units is None else units
        found: list[float] = array[[self._modes[u] for u in places], [self._kinds[u] for u in places]].tolist()
        return found

    # -- stages ---------------------------------------------------------------------------------

    @property
    def hides_exchanges(self) -> bool:
        """Whether exchanges of experts may run beside passes of other micro-batches."""
        return bool(self._rows.hides_exchanges[0])

    @property
    def num_stages(self) -> int:
        """Pipeline stages over all ranks."""
        return self.layout.mesh.pp * self.layout.virtual_stages

    @cached_property
    def rank_of_stage(self) -> tuple[int, ...]:
        """The pipeline rank that holds each stage."""
        rules, pp = self.layout.schedule.rules, self.layout.mesh.pp
        return tuple(rules.rank_of(stage, pp) for stage in range(self.num_stages))

    def _rank_of(self, stage: int) -> int:
        return self.rank_of_stage[stage]

    def _units_of_stages(self, starts: Sequence[int]) -> list[range]:
        ends = (*starts[1:], len(self._kinds))
        return [range(start, end) for start, end in zip(starts, ends, strict=True)]

    def stages_of_ranks(self, starts: Sequence[int]) -> list[dict[int, range]]:
        """For each pipeline rank the units of each stage that it holds."""
        return [self.stages_of_rank(rank, starts) for rank in range(self.layout.mesh.pp)]

    def stages_of_rank(self, rank: int, starts: Sequence[int]) -> dict[int, range]:
        """The same of one pipeline rank."""
        ends = (*starts[1:], len(self._kinds))
        return {stage: range(starts[stage], ends[stage]) for stage in self._stages_of_rank[rank]}

    @cached_property
    def _stages_of_rank(self) -> list[list[int]]:
        found: list[list[int]] = [[] for _ in range(self.layout.mesh.pp)]
        for stage, rank in enumerate(self.rank_of_stage):
            found[rank].append(stage)
        return found

    def _units_of_ranks(self, starts: Sequence[int]) -> list[list[int]]:
        return [list(chain.from_iterable(stages.values())) for stages in self.stages_of_ranks(starts)]

    @property
    def capacity_bytes(self) -> tuple[float, ...]:
        """What a plan may take of one device of each pipeline rank."""
        return tuple(rank.facts.memory_bytes for rank in self._ranks)

    # -- memory ---------------------------------------------------------------------------------

    def memory(self, starts: tuple[int, ...]) -> tuple[RankMemory, ...]:
        """The memory of every pipeline rank in every phase."""
        if starts not in self._memory_of:  # that of the last cut is asked for again
            ranks = enumerate(self.stages_of_ranks(starts))
            self._memory_of = {starts: tuple(self._rank_memory(rank, stages) for rank, stages in ranks)}
        return self._memory_of[starts]

    def _rank_memory(self, rank: int, stages: Mapping[int, range]) -> RankMemory:
        return self.memory_model.rank(list(stages.values()), self.activation_bytes(rank, stages))

    def rank_fits(self, rank: int, stages: Mapping[int, range], modes: Mapping[int, BlockMode] | None = None) -> bool:
        """Whether ``rank`` holds ``stages`` within its device; ``modes``: of its units, where not those of all."""
        return self.excess_bytes(rank, stages, modes) <= 0

    def excess_bytes(
        self, rank: int, stages: Mapping[int, range], modes: Mapping[int, BlockMode] | None = None
    ) -> float:
        """What ``rank`` needs at its peak to hold ``stages``, less what its device has."""
        model = self.memory_model
        if modes is not None:
            model = model.with_some({unit: MODES[mode] for unit, mode in modes.items()})
        needed = model.peak_bytes(list(stages.values()), self._activation_bytes(model, rank, stages))
        return needed - self._ranks[rank].facts.memory_bytes

    def excess_with(self, rank: int, stages: Mapping[int, range], activation_bytes: OfPasses) -> float:
        """The same with so many ``activation_bytes``, as the method of that name finds them."""
        needed = self.memory_model.peak_bytes(list(stages.values()), activation_bytes)
        return needed - self._ranks[rank].facts.memory_bytes

    @property
    def reserve(self) -> float:
        """Bytes that a byte of tensors that come and go takes, with the allocator's reserve."""
        return 1 + self.memory_model.software.reserve_fraction

    def with_some(self, modes: Mapping[int, BlockMode]) -> Self:
        """With other modes of some units; for what is asked of these units alone."""
        found = copy(self)
        places = {unit: MODES[mode] for unit, mode in modes.items()}
        found._modes = list(self._modes)
        for unit, place in places.items():
            found._modes[unit] = place
        found.memory_model = self.memory_model.with_some(places)
        return found

    def times_of_stages(self, rank: int, stages: Sequence[range]) -> StageTimes:
        """Seconds of each of these stages on the devices of ``rank``."""
        times, units = self._ranks[rank].times, list(chain.from_iterable(stages))
        ends = list(accumulate(map(len, stages)))
        borders = list(zip([0, *ends], ends, strict=False))
        rows: list[tuple[float, ...]] = []
        for of_kinds in (times.forward_s, times.backward_s, times.weight_s):
            seconds = self._of_units(of_kinds, units)
            rows.append(tuple([sum(seconds[start:end]) for start, end in borders]))
        return StageTimes(rows[0], rows[1], rows[2])

    def at_work_at_least(self, modes: tuple[BlockMode, ...]) -> RankMemoryModel:
        """Memory whose passing bytes are no more than those in whichever of ``modes`` each block is."""
        if modes not in self._least_at_work:
            self._least_at_work[modes] = self.memory_model.with_least([MODES[mode] for mode in modes])
        return self._least_at_work[modes]

    def room_bytes(self, rank: int, stages: Mapping[int, range], moment: Flying, modes: tuple[BlockMode, ...]) -> float:
        """At most so many bytes fit then of what units keep, in whichever of ``modes`` each block is.

        The device less states, software, and what passes.
        """
        held = list(stages.values())
        passing = self.at_work_at_least(modes).passing_bytes(held, moment.stage)
        taken = self.memory_model.lasting_bytes(held, moment.made) + passing
        return (self._ranks[rank].facts.memory_bytes - taken) / self.reserve

    def holding_of_modes(self, holding: Holding) -> Array:
        """Bytes of one holding, [modes, kinds]."""
        return held_bytes(self.table, self._rows.work, self._rows.mode)[..., PLACE[holding]]

    def bytes_on_host_of_modes(self) -> Array:
        """Bytes of one micro-batch that lie in host memory, [modes, kinds]."""
        return bytes_on_host(self.table, self._rows.work, self._rows.mode)

    def extra_of_modes(self, rank: int) -> Array:
        """Seconds of one micro-batch in a unit more than if it kept everything on the device, [modes, kinds]."""
        times = self._ranks[rank].times
        whole = times.forward_s + times.backward_s
        return whole - whole[MODES[Recompute.NONE]]

    @property
    def in_flight(self) -> InFlight:
        """Micro-batches in flight on every rank."""
        return self._in_flight

    def unit_times_of(self, rank: int) -> StageTimes:
        """Seconds of every unit on the devices of a pipeline rank, as if it were a stage of its own."""
        return self._ranks[rank].unit_times

    def times_of_kinds(self, rank: int) -> UnitTimes:
        """Seconds of one micro-batch in every kind of units on the devices of ``rank``, a row for each free mode."""
        return self._ranks[rank].times

    def place_of(self, rank: int) -> int:
        """Place of the rank's devices on the table's axis of devices."""
        return self._places[rank]

    def ledgers(self, starts: tuple[int, ...]) -> tuple[MemoryLedger, ...]:
        """The memory of every pipeline rank at its peak, row by row."""
        return tuple(rank.peak for rank in self.memory(starts))

    def host(self, starts: tuple[int, ...]) -> HostMemory | None:
        """The fullest node's own memory; None where nothing is offloaded."""
        ranks = list(enumerate(self.stages_of_ranks(starts)))
        activations = [self._bytes_on_host(rank, stages) for rank, stages in ranks]
        if self.layout.offload is Offload.NONE and not any(activations):
            return None
        pairs = zip(ranks, activations, strict=True)
        kept = [replace(self._states_on_host(stages), activations=most) for (_, stages), most in pairs]
        return fullest_node(kept, self.table.cluster, self._host_facts)

    @property
    def _host_facts(self) -> HostFacts:
        """Where activations alone are offloaded, they lie in RAM."""
        offload = self.layout.offload
        return self.table.cluster.host(Offload.CPU if offload is Offload.NONE else offload)

    def _states_on_host(self, stages: Mapping[int, range]) -> HostStates:
        """What one device of a rank keeps off itself of its states."""
        layout, table = self.layout, self.table
        if layout.offload is Offload.NONE:
            return HostStates(0.0, 0.0, 0.0, on_nvme=False)
        on_device = key_of(StateKey, layout)._replace(offload=Offload.NONE)
        row = table.state_bytes[table.state_rows([on_device])[0]]
        trainable, frozen, experts = self.memory_model.elements(list(stages.values()))
        updated = num_updated(layout, trainable, experts)
        return host_states(state_bytes(row, trainable, frozen, experts).optimizer, updated, self._host_facts)

    def host_room_bytes(self, stages: Mapping[int, range]) -> float:
        """Of one device's share of its node's memory, what its states leave to activations."""
        copies = self.table.cluster.copies
        return 0.0 if copies is None else copies.ram_bytes - self._states_on_host(stages).ram_bytes

    def _bytes_on_host(self, rank: int, stages: Mapping[int, range]) -> float:
        """The most that a pipeline rank keeps of activations in host memory."""
        if not self.layout.offloads_activations:
            return 0.0
        on_host = self.memory_model.on_host
        if self._passes_cross:
            return self._across([on_host(unit) for units in stages.values() for unit in units])
        kept = {stage: sum(map(on_host, units)) for stage, units in stages.items()}
        return max(self._in_flight.most_bytes(rank, kept, {}).numbers)

    def activation_bytes(self, rank: int, stages: Mapping[int, range]) -> OfPasses:
        """The most that a pipeline rank holds of activations while each of its backward passes goes on.

        Found from what one micro-batch keeps in each of them.
        """
        return self._activation_bytes(self.memory_model, rank, stages)

    def _activation_bytes(self, model: RankMemoryModel, rank: int, stages: Mapping[int, range]) -> OfPasses:
        held_of = model.held_of
        if self._passes_cross:
            held = model.held
            kept_of_units = [held(unit, Holding.KEPT) for units in stages.values() for unit in units]
            return OfPasses(ONLY_FIRST, (self._across(kept_of_units),))
        kept = {stage: held_of(units, Holding.KEPT) for stage, units in stages.items()}
        # More, or less, from the first to the second half of a split backward pass.
        halves = stages if self.layout.schedule.rules.splits_backward else {}
        waiting = {stage: held_of(units, Holding.WAITING) for stage, units in halves.items()}
        return self._in_flight.most_bytes(rank, kept, waiting)

    @property
    def _passes_cross(self) -> bool:
        """Whether a forward pass goes up through the units while a backward pass comes down."""
        return self.layout.mesh.pp == 1 and self.hides_exchanges and self.layout.num_microbatches > 1

    def _across(self, kept: Sequence[float]) -> float:
        """The most that two such passes keep, from what units do: one is filled at the moment that another is emptied.

        ``TransformerModelChunkSchedulePlan.run`` of Megatron-Core (megatron/core/models/common).
        """
        filled = np.cumsum(kept)
        return float(np.max(filled + filled[::-1]))


def device_places(table: CostTable, layout: Layout) -> tuple[int, ...]:
    """For each pipeline rank the place of its devices on the table's axis of devices."""
    pp = layout.mesh.pp
    if not layout.groups:
        return (0,) * pp
    each = table.cluster.num_devices // pp
    places = [table.cluster.place_of(name) for name in layout.groups]
    if pp == 1:  # the replicas on one group
        return tuple(places)
    return tuple(place for place in places for _ in range(table.cluster.devices[place].num_devices // each))
