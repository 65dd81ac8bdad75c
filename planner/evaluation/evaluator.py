"""One layout on a cost table: the step and the memory of a given cut into stages.

The step is that of the very schedule that the executor runs, simulated action by action.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import NamedTuple

import numpy as np

from costmodels.ledger import MemoryLedger, RankMemory
from costmodels.overlap import exposed_s
from costmodels.pipeline import Timeline, seconds_of_actions, simulate, simulate_actions
from costmodels.vocabulary.action import ActionLists
from costmodels.vocabulary.choices import Offload, Recompute
from costmodels.vocabulary.schedules import STEADY_ROUNDS, ScheduleName, peak_in_flight
from costmodels.vocabulary.terms import PLACE, Data, Element, Holding, Pass, Term
from planner.evaluation.cuts import even_starts, spread_starts, weighted_starts
from planner.evaluation.exchanges import StageExchanges, stage_exchanges, unhidden_s, without_pipeline
from planner.evaluation.host import HostMemory, fullest_node, host_states
from planner.evaluation.once_a_step import Collected, Passes, once_a_step_s
from planner.evaluation.rank_memory import RankMemoryModel
from planner.evaluation.states import num_updated, state_bytes
from planner.evaluation.unit_times import MODES, LayoutRows, UnitTimes, data_times, unit_times
from planner.layout.columns import Array, key_of
from planner.layout.layout import Layout
from planner.table.cost_table import CostTable
from planner.table.facts import DeviceFacts
from planner.table.keys import SendKey, StateKey

_TRAINABLE, _FROZEN, _TIED, _EXPERT = range(len(Element))
_GATHER, _REDUCE, _ = range(len(Data))


class StageTimes(NamedTuple):
    """Seconds of each stage on one micro-batch; ``weight_s`` is the part of ``backward_s`` that can wait.

    ``exchanges``: those that may hide beside other micro-batches, with all hidden in the seconds here; () if none may.
    """

    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]
    weight_s: tuple[float, ...]
    exchanges: tuple[StageExchanges, ...] = ()

    def run(self, schedule: ActionLists, send_s: float | Sequence[float], *, sends_block: bool) -> Timeline:
        """The schedule simulated."""
        input_s = tuple(b - w for b, w in zip(self.backward_s, self.weight_s, strict=True))
        split_s = input_s, self.weight_s
        if not self.exchanges:
            return simulate(schedule, self.forward_s, self.backward_s, send_s, split_s, sends_block=sends_block)
        sends = [send_s] * (len(self.forward_s) - 1) if isinstance(send_s, float | int) else send_s
        hidden_s = seconds_of_actions(schedule, self.forward_s, self.backward_s, split_s)
        pairs = zip(hidden_s, unhidden_s(schedule, self.exchanges), strict=True)
        seconds = tuple(tuple(a + b for a, b in zip(*rank, strict=True)) for rank in pairs)
        return simulate_actions(schedule, seconds, sends, sends_block=sends_block)


@dataclass(frozen=True)
class Evaluated:
    """A layout with its stages: what it costs.

    ``starts[k]`` is the first unit of stage k, ``modes[u]`` what unit u recomputes.
    """

    layout: Layout
    starts: tuple[int, ...]
    modes: tuple[Recompute, ...]
    step_time_s: float
    breakdown: Mapping[Term, float]  # seconds on the rank that works longest; they sum to the step time
    memory: tuple[RankMemory, ...]  # per pipeline rank
    capacity_bytes: tuple[float, ...]  # that a plan may take of one device of each pipeline rank
    host: HostMemory | None = None  # of the fullest node, where states are offloaded

    @property
    def only_mode(self) -> Recompute | None:
        """What every block recomputes; None where they differ."""
        modes = set(self.modes)
        return modes.pop() if len(modes) == 1 else None

    @property
    def ledgers(self) -> tuple[MemoryLedger, ...]:
        """Memory of each pipeline rank at its peak."""
        return tuple(rank.peak for rank in self.memory)

    @property
    def fits(self) -> bool:
        """Whether every rank stays within what it may take of its device, and every node within its host memory."""
        return self.fits_devices and (self.host is None or self.host.share <= 1)

    @property
    def fits_devices(self) -> bool:
        """Whether every rank stays within its device."""
        return all(need.total_bytes <= room for need, room in zip(self.ledgers, self.capacity_bytes, strict=True))

    @property
    def peak_memory_bytes(self) -> float:
        """Peak of the worst rank."""
        return max(ledger.total_bytes for ledger in self.ledgers)


class _Priced(NamedTuple):
    """What the kinds of units take on the devices of one place: the layout's own rows of the table."""

    facts: DeviceFacts
    times: UnitTimes  # [modes of recomputation, kinds]
    data_s: Array  # [kinds, Data]


class _OnDevice(NamedTuple):
    """What every unit takes on the devices of one place, each in its mode of recomputation."""

    facts: DeviceFacts
    times: UnitTimes
    data_s: Array
    unit_times: StageTimes  # of every unit as a stage of its own


class Evaluator:
    """A layout of ``table``. Everything here is computed from the numbers of the table alone."""

    def __init__(self, table: CostTable, layout: Layout, modes: Sequence[Recompute] | None = None) -> None:
        """``modes``: what each unit recomputes; where none are given, what the layout says, or nothing."""
        self.table, self.layout = table, layout
        self._rows = LayoutRows.of_one(table, layout)
        self._kinds = list(table.units.kinds)
        self._places = device_places(table, layout)
        self._priced = {
            place: _Priced(
                table.cluster.devices[place],
                unit_times(table, self._rows, place),
                data_times(table, self._rows, place)[0],
            )
            for place in set(self._places)
        }
        self._set_modes(modes or [layout.recompute or Recompute.NONE] * len(self._kinds))

    def _set_modes(self, modes: Sequence[Recompute]) -> None:
        self._memory_of: dict[tuple[int, ...], tuple[RankMemory, ...]] = {}
        of_blocks = {mode for mode, is_block in zip(modes, self.table.units.is_block, strict=True) if is_block}
        # Units that are no blocks recompute nothing in any mode: they take the name of the only one.
        self.modes = tuple(of_blocks) * len(modes) if len(of_blocks) == 1 else tuple(modes)
        self._modes = [MODES[mode] for mode in self.modes]
        self.memory_model = RankMemoryModel(self.table, self.layout, self._rows, self._modes)
        of_units = {}
        for place, priced in self._priced.items():
            times = priced.times
            rows = (tuple(self._of_units(each)) for each in (times.forward_s, times.backward_s, times.weight_s))
            of_units[place] = _OnDevice(*priced, StageTimes(*rows))
        self._ranks = tuple(of_units[place] for place in self._places)

    def with_modes(self, modes: Sequence[Recompute]) -> Evaluator:
        """The same layout with other choices of what each unit recomputes."""
        found = copy(self)
        found._set_modes(modes)
        return found

    def with_rank_of(self, other: Evaluator, rank: int) -> Evaluator:
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
    def num_stages(self) -> int:
        """Pipeline stages over all ranks."""
        return self.layout.mesh.pp * self.layout.virtual_stages

    def even_starts(self) -> tuple[int, ...]:
        """Stages of equal numbers of blocks."""
        return even_starts(self.table.units.is_block, self.num_stages)

    def starts(self) -> tuple[int, ...]:
        """Stages as the framework cuts them by itself."""
        units, num_stages, framework = self.table.units, self.num_stages, self.table.framework
        num_blocks = sum(units.is_block)
        if num_stages == 1:
            return (0,)
        if num_blocks % num_stages and (num_blocks + 2) % num_stages == 0:
            return spread_starts(units.is_block, num_stages)
        if framework.partition == "weighted":
            counts = self.table.elements[self._rows.split[0]]
            elements = counts[:, [_TRAINABLE, _FROZEN, _TIED]].sum(axis=1)[self._kinds]
            return weighted_starts(elements.tolist(), num_stages, framework.head_weight)
        return self.even_starts()

    @property
    def capacity_bytes(self) -> tuple[float, ...]:
        """What a plan may take of one device of each pipeline rank."""
        return tuple(rank.facts.memory_bytes for rank in self._ranks)

    # -- the price ------------------------------------------------------------------------------

    @cached_property
    def send_s(self) -> tuple[float, ...]:
        """One micro-batch's activations from each pipeline stage to the next."""
        layout, table = self.layout, self.table
        num_borders = self.num_stages - 1
        if num_borders == 0:
            return ()
        lines = table.send(SendKey(layout.mesh.pp, layout.groups))
        num_bytes = max(self.memory_model.held(unit, Holding.BOUNDARY) for unit in range(len(self._kinds)))
        ways = (lines[:, 0] + lines[:, 1] * num_bytes).tolist()
        return tuple(ways) if layout.groups else (ways[0],) * num_borders

    def evaluate(self, starts: tuple[int, ...], *, exact: bool = False) -> Evaluated:
        """Simulates the schedule.

        ``exact`` runs every micro-batch, and tells the time that is lost to sending from the bubble. Otherwise the
        steady part of a long schedule is extrapolated, and the time lost to sending counts as bubble.
        """
        times = self._stage_times(starts)
        makespan = self._makespan_s(times, self.send_s, exact=exact)
        send_on_path = makespan - self._makespan_s(times, 0.0, exact=False) if exact else 0.0
        m = self.layout.num_microbatches
        unhidden = self._unhidden_s(times)
        busy = [m * seconds + more for seconds, more in zip(self._work_of_ranks(times), unhidden, strict=True)]
        slowest = max(range(len(busy)), key=lambda r: busy[r])
        once = self.once_a_step(starts)
        data_once = max(data for data, _ in once)
        optimizer = max(seconds for _, seconds in once)
        idle = max(0.0, makespan - busy[slowest])  # rounding may leave less
        sending = min(idle, max(0.0, send_on_path))
        memory = self.memory(starts)
        overflow_s = m * self._overflow_s(memory)
        breakdown = self._terms_s(slowest, starts)
        breakdown[Term.COMPUTE] += overflow_s
        breakdown[Term.EXPERT] += unhidden[slowest]
        breakdown[Term.DATA] += data_once
        breakdown[Term.SEND] += sending
        breakdown[Term.BUBBLE] += idle - sending
        breakdown[Term.OPTIMIZER] += optimizer
        step = makespan + overflow_s + data_once + optimizer
        host = self.host(starts)
        return Evaluated(self.layout, starts, self.modes, step, breakdown, memory, self.capacity_bytes, host)

    def _terms_s(self, rank: int, starts: tuple[int, ...]) -> dict[Term, float]:
        """Seconds of every term in all micro-batches of one pipeline rank."""
        units = self._units_of_ranks(starts)[rank]
        times, m = self._ranks[rank].times, self.layout.num_microbatches
        return {term: m * sum(sum(self._of_units(times.term_s(term, run), units)) for run in Pass) for term in Term}

    def _overflow_s(self, memory: tuple[RankMemory, ...]) -> float:
        """Seconds that a micro-batch waits for the allocator, for frameworks known to go on where memory is short."""
        per_byte = self.table.framework.overflow_s_per_byte
        if per_byte is None:
            return 0.0
        whole = [room * self.table.cluster.memory_factor for room in self.capacity_bytes]
        over = max(rank.peak.total_bytes - room for rank, room in zip(memory, whole, strict=True))
        return max(0.0, over) * per_byte

    def timeline(self, starts: tuple[int, ...]) -> Timeline:
        """The simulated schedule, action by action."""
        blocks = self.table.framework.sends_block
        return self._stage_times(starts).run(self._schedule(), self.send_s, sends_block=blocks)

    def _schedule(self) -> ActionLists:
        """Without a pipeline the executor finishes each micro-batch at once, whatever the schedule is called."""
        layout, pp = self.layout, self.layout.mesh.pp
        if pp == 1 and self._hides_exchanges:
            return without_pipeline(layout.num_microbatches)
        name = ScheduleName.ONE_F_ONE_B if pp == 1 else layout.schedule
        return name.rules.actions(pp, layout.virtual_stages, layout.num_microbatches)

    def _unhidden_s(self, times: StageTimes) -> list[float]:
        """Seconds of each rank's exchanges in all micro-batches, besides what is left of them if all are hidden."""
        if not times.exchanges:
            return [0.0] * self.layout.mesh.pp
        return [sum(actions) for actions in unhidden_s(self._schedule(), times.exchanges)]

    def exposed_s(self, starts: tuple[int, ...]) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Communication that compute does not hide within the forward and the backward pass of each stage."""
        forward_s: list[float] = []
        backward_s: list[float] = []
        for stage, units in enumerate(self._units_of_stages(starts)):
            times = self._ranks[self._rank_of(stage)].times
            forward_s.append(sum(self._of_units(times.exposed_forward_s, units)))
            backward_s.append(sum(self._of_units(times.exposed_backward_s, units)))
        return tuple(forward_s), tuple(backward_s)

    def once_a_step(self, starts: tuple[int, ...]) -> list[tuple[float, float]]:
        """What each rank does after its last action: exposed data-parallel communication, and the optimiser step."""
        pairs = zip(self._ranks, self._units_of_ranks(starts), strict=True)
        return [self._once_a_step_s(rank, units) for rank, units in pairs]

    def _stage_times(self, starts: tuple[int, ...]) -> StageTimes:
        """Seconds of each stage on one micro-batch."""
        ends = (*starts[1:], len(self._kinds))
        rows = [self._ranks[self._rank_of(stage)].unit_times for stage in range(len(starts))]
        stages = list(zip(rows, starts, ends, strict=True))
        return StageTimes(
            forward_s=tuple(sum(row.forward_s[a:b]) for row, a, b in stages),
            backward_s=tuple(sum(row.backward_s[a:b]) for row, a, b in stages),
            weight_s=tuple(sum(row.weight_s[a:b]) for row, a, b in stages),
            exchanges=self._exchanges(starts) if self._hides_exchanges else (),
        )

    @property
    def _hides_exchanges(self) -> bool:
        return bool(self._rows.hides_exchanges[0])

    def _exchanges(self, starts: tuple[int, ...]) -> tuple[StageExchanges, ...]:
        stages = [[(self._modes[u], self._kinds[u]) for u in units] for units in self._units_of_stages(starts)]
        ranks = [self._ranks[self._rank_of(stage)] for stage in range(len(stages))]
        return tuple(
            stage_exchanges(rank.times, units, rank.facts.overlap) for rank, units in zip(ranks, stages, strict=True)
        )

    def _rank_of(self, stage: int) -> int:
        return self.layout.schedule.rules.rank_of(stage, self.layout.mesh.pp)

    def _makespan_s(self, times: StageTimes, send_s: float | Sequence[float], *, exact: bool) -> float:
        layout = self.layout
        pp, m, rules = layout.mesh.pp, layout.num_microbatches, layout.schedule.rules
        if pp == 1:
            return m * (times.forward_s[0] + times.backward_s[0]) + self._unhidden_s(times)[0]

        def run(num_microbatches: int) -> float:
            schedule = rules.actions(pp, layout.virtual_stages, num_microbatches)
            timeline = times.run(schedule, send_s, sends_block=self.table.framework.sends_block)
            return timeline.longest_rank_s if rules.overlaps_steps else timeline.makespan_s

        # In the steady state the busiest rank works without a pause; with unequal stages it takes long to get there.
        each, rounds, seen = rules.microbatches_a_round(pp, m), m // pp, STEADY_ROUNDS
        steady_s = each * max(self._work_of_ranks(times)) * (1 - 1e-9)  # at least: with all exchanges hidden
        while not exact and seen + 1 < rounds:
            near, far = run(rules.shortened(pp, m, seen)), run(rules.shortened(pp, m, seen + 1))
            if far - near >= steady_s:
                return near + (rounds - seen) * (far - near)
            seen *= 2
        return run(m)

    def _work_of_ranks(self, times: StageTimes) -> list[float]:
        """Seconds of each pipeline rank on one micro-batch."""
        work = [0.0] * self.layout.mesh.pp
        for stage, seconds in enumerate(zip(times.forward_s, times.backward_s, strict=True)):
            work[self._rank_of(stage)] += sum(seconds)
        return work

    def _units_of_stages(self, starts: Sequence[int]) -> list[range]:
        ends = (*starts[1:], len(self._kinds))
        return [range(start, end) for start, end in zip(starts, ends, strict=True)]

    def stages_of_ranks(self, starts: Sequence[int]) -> list[dict[int, range]]:
        """For each pipeline rank the units of each stage that it holds."""
        ranks: list[dict[int, range]] = [{} for _ in range(self.layout.mesh.pp)]
        for stage, units in enumerate(self._units_of_stages(starts)):
            ranks[self._rank_of(stage)][stage] = units
        return ranks

    def _units_of_ranks(self, starts: Sequence[int]) -> list[list[int]]:
        return [list(chain.from_iterable(stages.values())) for stages in self.stages_of_ranks(starts)]

    def _once_a_step_s(self, rank: _OnDevice, units: list[int]) -> tuple[float, float]:
        """Exposed data-parallel communication that happens once a step, and the optimiser step."""
        if not units:
            return 0.0, 0.0
        kinds = [self._kinds[unit] for unit in units]
        counts = self.table.elements[self._rows.split[0]][kinds].sum(axis=0)
        data = rank.data_s[kinds]
        whole = data.sum(axis=0)
        passes = Passes(
            sum(self._of_units(rank.times.compute_forward_s, units)),
            sum(self._of_units(rank.times.compute_backward_s, units)),
            rank.facts.overlap,
        )
        collected = Collected(whole[_REDUCE], data[0, _REDUCE], whole[_GATHER], data[0, _GATHER])
        held = num_updated(self.layout, float(counts[_TRAINABLE]), float(counts[_EXPERT]))
        exposed = float(once_a_step_s(self.layout, collected, passes, self.table.framework))
        return exposed, float(self._update_s(rank, held, passes))

    def _update_s(self, rank: _OnDevice, held: float | Array, passes: Passes) -> float | Array:
        """The optimiser step of so many elements; offloaded ones are fetched beside the reductions, on other links."""
        if self.layout.offload is Offload.NONE:
            return rank.facts.update.time_s(held)
        host = self.table.cluster.host(self.layout.offload)
        fetched = exposed_s(np.asarray(host.download.time_s(held)), np.asarray(passes.backward_s), passes.overlap)
        return host.update.time_s(held) + fetched

    def least_once_a_step_s(self, rank: int) -> Array:
        """What a rank does at least once a step if it holds units a..b-1 alone, [units, units + 1]; 0 where b <= a.

        Communication hides behind as much compute as any mode of recomputation makes.
        """
        on_device, kinds = self._ranks[rank], self._kinds
        data = on_device.data_s[kinds]
        counts = self.table.elements[self._rows.split[0]][kinds]
        first = data[:, None, :]

        def between(values: Array) -> Array:
            running = np.concatenate(([0.0], np.cumsum(values)))
            return running[None, :] - running[:-1, None]

        times = on_device.times
        passes = Passes(
            between(times.compute_forward_s.max(axis=0)[kinds]),
            between(times.compute_backward_s.max(axis=0)[kinds]),
            on_device.facts.overlap,
        )
        collected = Collected(
            between(data[:, _REDUCE]), first[..., _REDUCE], between(data[:, _GATHER]), first[..., _GATHER]
        )
        held = num_updated(self.layout, between(counts[:, _TRAINABLE]), between(counts[:, _EXPERT]))
        total = once_a_step_s(self.layout, collected, passes, self.table.framework) + self._update_s(
            on_device, held, passes
        )
        start, end = np.indices(total.shape)
        return np.where(start < end, total * (1 - 1e-12), 0.0)

    # -- memory ---------------------------------------------------------------------------------

    def memory(self, starts: tuple[int, ...]) -> tuple[RankMemory, ...]:
        """The memory of every pipeline rank in every phase."""
        if starts not in self._memory_of:  # that of the last cut is asked for again
            ranks = enumerate(self.stages_of_ranks(starts))
            self._memory_of = {starts: tuple(self._rank_memory(rank, stages) for rank, stages in ranks)}
        return self._memory_of[starts]

    def _rank_memory(self, rank: int, stages: Mapping[int, range]) -> RankMemory:
        return self.memory_model.rank(list(stages.values()), self._activation_bytes(rank, stages))

    def rank_fits(self, rank: int, stages: Mapping[int, range], modes: Mapping[int, Recompute] | None = None) -> bool:
        """Whether ``rank`` holds ``stages`` within its device; ``modes``: of its units, where not those of all."""
        return self.excess_bytes(rank, stages, modes) <= 0

    def excess_bytes(
        self, rank: int, stages: Mapping[int, range], modes: Mapping[int, Recompute] | None = None
    ) -> float:
        """What ``rank`` needs at its peak to hold ``stages``, less what its device has."""
        chosen = self if modes is None else self._with_some(modes)
        return chosen._rank_memory(rank, stages).peak.total_bytes - self.capacity_bytes[rank]

    @property
    def reserve(self) -> float:
        """Bytes that a byte of tensors that come and go takes, with the allocator's reserve."""
        return 1 + self.memory_model.software.reserve_fraction

    def _with_some(self, modes: Mapping[int, Recompute]) -> Evaluator:
        """With other modes of some units; for memory alone."""
        found = copy(self)
        places = list(self._modes)
        for unit, mode in modes.items():
            places[unit] = MODES[mode]
        found.memory_model = self.memory_model.with_modes(places)
        return found

    def room_bytes(self, rank: int, stages: Mapping[int, range]) -> float:
        """At least so much of a device is not taken by states and software: tensors that come and go must fit in it."""
        lasting = self.memory_model.lasting_bytes(list(stages.values()))
        return (self.capacity_bytes[rank] - lasting) / self.reserve

    def holding_of_modes(self, holding: Holding) -> Array:
        """Bytes of one holding, [modes of recomputation, kinds]."""
        return self.table.num_bytes[self._rows.work, self._rows.mode][..., PLACE[holding]]

    def extra_of_modes(self, rank: int) -> Array:
        """Seconds of one micro-batch in a unit more than if nothing were recomputed, [modes, kinds]."""
        times = self._ranks[rank].times
        whole = times.forward_s + times.backward_s
        return whole - whole[MODES[Recompute.NONE]]

    def flying(self, rank: int) -> tuple[int, ...]:
        """Micro-batches in flight at each stage when ``rank`` holds most of them; 0 at stages of other ranks."""
        layout, rules = self.layout, self.layout.schedule.rules
        pp, m = layout.mesh.pp, layout.num_microbatches
        if rules.has_one_stage or pp == 1:
            number = rules.in_flight(pp, m)[rank] if pp > 1 else 1
            return tuple(number if stage == rank else 0 for stage in range(self.num_stages))
        counts, _ = rules.in_flight_by_stage(pp, layout.virtual_stages, rules.shortened_to_peak(pp, m))
        return tuple(count if self._rank_of(stage) == rank else 0 for stage, count in enumerate(counts))

    def unit_times_of(self, rank: int) -> StageTimes:
        """Seconds of every unit on the devices of a pipeline rank, as if it were a stage of its own."""
        return self._ranks[rank].unit_times

    def place_of(self, rank: int) -> int:
        """Place of the rank's devices on the table's axis of devices."""
        return self._places[rank]

    def ledgers(self, starts: tuple[int, ...]) -> tuple[MemoryLedger, ...]:
        """The memory of every pipeline rank at its peak, row by row."""
        return tuple(rank.peak for rank in self.memory(starts))

    def host(self, starts: tuple[int, ...]) -> HostMemory | None:
        """The fullest node's own memory; None where nothing is offloaded."""
        layout, table = self.layout, self.table
        if layout.offload is Offload.NONE:
            return None
        host = table.cluster.host(layout.offload)
        on_device = key_of(StateKey, layout)._replace(offload=Offload.NONE)
        row = table.state_bytes[table.state_rows([on_device])[0]]
        ranks = [self.memory_model.elements(list(stages.values())) for stages in self.stages_of_ranks(starts)]
        kept = [
            host_states(state_bytes(row, trainable, frozen, experts).optimizer, updated, host)
            for trainable, frozen, experts in ranks
            for updated in [num_updated(layout, trainable, experts)]
        ]
        return fullest_node(kept, table.cluster, host)

    def _activation_bytes(self, rank: int, stages: Mapping[int, range]) -> float:
        """The most that a pipeline rank holds of activations, from what one micro-batch keeps in each of its stages."""
        layout, held = self.layout, self.memory_model.held
        pp, rules, m = layout.mesh.pp, layout.schedule.rules, layout.num_microbatches
        kept = {stage: sum(held(unit, Holding.KEPT) for unit in units) for stage, units in stages.items()}
        if pp == 1 and self._hides_exchanges:  # the next micro-batch's forward pass runs beside a backward pass
            return min(m, 2) * sum(kept.values())
        if rules.has_one_stage:
            return rules.in_flight(pp, m)[rank] * sum(kept.values())
        # More, or less, from the first to the second half of a split backward pass.
        waiting = {stage: sum(held(unit, Holding.WAITING) for unit in units) for stage, units in stages.items()}
        actions = rules.actions(pp, layout.virtual_stages, rules.shortened_to_peak(pp, m))
        return peak_in_flight(actions[rank], kept, waiting)


def device_places(table: CostTable, layout: Layout) -> tuple[int, ...]:
    """For each pipeline rank the place of its devices on the table's axis of devices."""
    pp = layout.mesh.pp
    if not layout.groups:
        return (0,) * pp
    each = table.cluster.num_devices // pp
    places = [table.cluster.place_of(name) for name in layout.groups]
    return tuple(place for place in places for _ in range(table.cluster.devices[place].num_devices // each))
