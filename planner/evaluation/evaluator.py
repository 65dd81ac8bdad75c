"""One layout on a cost table: the problem of cutting it into stages, and the step and memory of a given cut.

The step is that of the very schedule that the executor runs, simulated action by action.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import NamedTuple

from costmodels.ledger import MemoryLedger, RankMemory
from costmodels.overlap import exposed_s
from costmodels.pipeline import Timeline, simulate
from costmodels.vocabulary.action import ActionLists
from costmodels.vocabulary.choices import Offload
from costmodels.vocabulary.schedules import STEADY_ROUNDS, ScheduleName, peak_in_flight
from costmodels.vocabulary.terms import Element, Holding, Pass, Term
from planner.evaluation.cuts import even_starts, spread_starts, weighted_starts
from planner.evaluation.host import HostMemory, fullest_node, host_states
from planner.evaluation.once_a_step import Passes, once_a_step_s
from planner.evaluation.rank_memory import RankMemoryModel
from planner.evaluation.states import num_updated, state_bytes
from planner.evaluation.unit_times import LayoutRows, UnitTimes, data_times, unit_times
from planner.layout.columns import Array, key_of
from planner.layout.layout import Layout
from planner.problems import StageProblem, stage_sums
from planner.table.cost_table import CostTable
from planner.table.facts import DeviceFacts
from planner.table.keys import SendKey, StateKey

_TRAINABLE, _FROZEN, _TIED, _EXPERT = range(len(Element))


class StageTimes(NamedTuple):
    """Seconds of each stage on one micro-batch; ``weight_s`` is the part of ``backward_s`` that can wait."""

    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]
    weight_s: tuple[float, ...]

    def run(self, schedule: ActionLists, send_s: float | Sequence[float], *, sends_block: bool) -> Timeline:
        """The schedule simulated."""
        input_s = tuple(b - w for b, w in zip(self.backward_s, self.weight_s, strict=True))
        split_s = input_s, self.weight_s
        return simulate(schedule, self.forward_s, self.backward_s, send_s, split_s, sends_block=sends_block)


@dataclass(frozen=True)
class Evaluated:
    """A layout with its stages: what it costs. ``starts[k]`` is the first unit of stage k."""

    layout: Layout
    starts: tuple[int, ...]
    step_time_s: float
    breakdown: Mapping[Term, float]  # seconds on the rank that works longest; they sum to the step time
    memory: tuple[RankMemory, ...]  # per pipeline rank
    capacity_bytes: tuple[float, ...]  # that a plan may take of one device of each pipeline rank
    host: HostMemory | None = None  # of the fullest node, where states are offloaded

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


class _OnDevice(NamedTuple):
    """What the units take on the devices of one kind: the layout's own row of each array of the table."""

    facts: DeviceFacts
    times: UnitTimes
    data_s: Array  # [kinds, Data]
    unit_times: StageTimes  # of every unit as a stage of its own


class Evaluator:
    """A layout of ``table``. Everything here is computed from the numbers of the table alone."""

    def __init__(self, table: CostTable, layout: Layout) -> None:
        self.table, self.layout = table, layout
        self._rows = LayoutRows.of_one(table, layout)
        self._memory = RankMemoryModel(table, layout, self._rows)
        self._kinds = list(table.units.kinds)
        self._ranks = self._on_devices()

    def _on_devices(self) -> tuple[_OnDevice, ...]:
        """For each pipeline rank."""
        table, kinds = self.table, self._kinds
        places = device_places(table, self.layout)
        found: dict[int, _OnDevice] = {}
        for place in set(places):
            times = unit_times(table, self._rows, place)
            rows = (tuple(each[0][kinds].tolist()) for each in (times.forward_s, times.backward_s, times.weight_s))
            data = data_times(table, self._rows, place)[0]
            found[place] = _OnDevice(table.cluster.devices[place], times, data, StageTimes(*rows))
        return tuple(found[place] for place in places)

    # -- the stage program --------------------------------------------------------------------

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

    def stage_problem(self) -> StageProblem:
        """The program that cuts the units into one stage a rank."""
        layout, memory, kinds = self.layout, self._memory, self._kinds
        software = memory.software
        reserve = 1 + software.reserve_fraction
        pp = layout.mesh.pp
        by_kind = {k: memory.unit_states(kinds.index(k), tied_copy=pp > 1).total for k in set(kinds)}
        outside = MemoryLedger().with_reserve(software, memory.num_communicators).total_bytes
        transient = [memory.most_transient(self._likely_units(r)) for r in range(pp)]
        return StageProblem(
            forward_s=tuple(rank.unit_times.forward_s for rank in self._ranks),
            backward_s=tuple(rank.unit_times.backward_s for rank in self._ranks),
            static_bytes=tuple(by_kind[k] for k in kinds),
            kept_bytes=tuple(memory.held(unit, Holding.KEPT) * reserve for unit in range(len(kinds))),
            in_flight=layout.schedule.rules.in_flight(pp, layout.num_microbatches),
            room_bytes=tuple(
                capacity - outside - t.tensors * reserve - t.cached
                for capacity, t in zip(self.capacity_bytes, transient, strict=True)
            ),
            num_microbatches=layout.num_microbatches,
            send_s=self.send_s,
            windowed=not layout.schedule.rules.forwards_first,
        )

    @property
    def capacity_bytes(self) -> tuple[float, ...]:
        """What a plan may take of one device of each pipeline rank."""
        return tuple(rank.facts.memory_bytes for rank in self._ranks)

    def _likely_units(self, rank: int) -> list[int]:
        """Units that may lie on a rank before the cut is known: the first and last unit lie on the end ranks."""
        last = len(self._kinds) - 1
        pp = self.layout.mesh.pp
        return [u for u in range(last + 1) if (u != 0 or rank == 0) and (u != last or rank == pp - 1)] or [0]

    # -- the price ------------------------------------------------------------------------------

    @cached_property
    def send_s(self) -> tuple[float, ...]:
        """One micro-batch's activations from each pipeline stage to the next."""
        layout, table = self.layout, self.table
        num_borders = self.num_stages - 1
        if num_borders == 0:
            return ()
        lines = table.send(SendKey(layout.mesh.pp, layout.groups))
        num_bytes = max(self._memory.held(unit, Holding.BOUNDARY) for unit in range(len(self._kinds)))
        ways = (lines[:, 0] + lines[:, 1] * num_bytes).tolist()
        return tuple(ways) if layout.groups else (ways[0],) * num_borders

    def evaluate(self, starts: tuple[int, ...], *, exact: bool = False) -> Evaluated:
        """Simulates the schedule.

        ``exact`` runs every micro-batch, and tells the time that is lost to sending from the bubble. Otherwise the
        steady part of a long schedule is extrapolated, and the time lost to sending counts as bubble.
        """
        times = self._stage_times(starts)
        makespan = self._makespan_s(times, self.send_s, exact=exact)
        send_on_path = makespan - self._makespan_s(times, 0.0, exact=True) if exact else 0.0
        m = self.layout.num_microbatches
        busy = [m * seconds for seconds in self._work_of_ranks(times)]
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
        breakdown[Term.DATA] += data_once
        breakdown[Term.SEND] += sending
        breakdown[Term.BUBBLE] += idle - sending
        breakdown[Term.OPTIMIZER] += optimizer
        step = makespan + overflow_s + data_once + optimizer
        return Evaluated(self.layout, starts, step, breakdown, memory, self.capacity_bytes, self.host(starts))

    def _terms_s(self, rank: int, starts: tuple[int, ...]) -> dict[Term, float]:
        """Seconds of every term in all micro-batches of one pipeline rank."""
        kinds = [self._kinds[unit] for unit in self._units_of_ranks(starts)[rank]]
        times, m = self._ranks[rank].times, self.layout.num_microbatches
        return {term: m * sum(float(times.term_s(term, run)[0][kinds].sum()) for run in Pass) for term in Term}

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
        layout, pp = self.layout, self.layout.mesh.pp
        # Without a pipeline the executor finishes each micro-batch at once, whatever the schedule is called.
        name = ScheduleName.ONE_F_ONE_B if pp == 1 else layout.schedule
        schedule = name.rules.actions(pp, layout.virtual_stages, layout.num_microbatches)
        return self._stage_times(starts).run(schedule, self.send_s, sends_block=self.table.framework.sends_block)

    def exposed_s(self, starts: tuple[int, ...]) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Communication that compute does not hide within the forward and the backward pass of each stage."""
        forward_s: list[float] = []
        backward_s: list[float] = []
        for stage, units in enumerate(self._units_of_stages(starts)):
            kinds = [self._kinds[unit] for unit in units]
            times = self._ranks[self._rank_of(stage)].times
            forward_s.append(float(times.exposed_forward_s[0][kinds].sum()))
            backward_s.append(float(times.exposed_backward_s[0][kinds].sum()))
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
        )

    def _rank_of(self, stage: int) -> int:
        return self.layout.schedule.rules.rank_of(stage, self.layout.mesh.pp)

    def _makespan_s(self, times: StageTimes, send_s: float | Sequence[float], *, exact: bool) -> float:
        layout = self.layout
        pp, m, rules = layout.mesh.pp, layout.num_microbatches, layout.schedule.rules
        if pp == 1:
            return m * (times.forward_s[0] + times.backward_s[0])

        def run(num_microbatches: int) -> float:
            schedule = rules.actions(pp, layout.virtual_stages, num_microbatches)
            timeline = times.run(schedule, send_s, sends_block=self.table.framework.sends_block)
            return timeline.longest_rank_s if rules.overlaps_steps else timeline.makespan_s

        # In the steady state the busiest rank works without a pause; with unequal stages it takes long to get there.
        each, rounds, seen = rules.microbatches_a_round(pp, m), m // pp, STEADY_ROUNDS
        steady_s = each * max(self._work_of_ranks(times)) * (1 - 1e-9)
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

    def _units_of_stages(self, starts: tuple[int, ...]) -> list[range]:
        ends = (*starts[1:], len(self._kinds))
        return [range(start, end) for start, end in zip(starts, ends, strict=True)]

    def _stages_of_ranks(self, starts: tuple[int, ...]) -> list[list[range]]:
        ranks: list[list[range]] = [[] for _ in range(self.layout.mesh.pp)]
        for stage, units in enumerate(self._units_of_stages(starts)):
            ranks[self._rank_of(stage)].append(units)
        return ranks

    def _units_of_ranks(self, starts: tuple[int, ...]) -> list[list[int]]:
        return [list(chain.from_iterable(stages)) for stages in self._stages_of_ranks(starts)]

    def _once_a_step_s(self, rank: _OnDevice, units: list[int]) -> tuple[float, float]:
        """Exposed data-parallel communication that happens once a step, and the optimiser step."""
        kinds = [self._kinds[unit] for unit in units]
        counts = self.table.elements[self._rows.split[0]][kinds].sum(axis=0)
        held = num_updated(self.layout, float(counts[_TRAINABLE]), float(counts[_EXPERT]))
        passes = Passes(
            float(rank.times.compute_forward_s[0][kinds].sum()),
            float(rank.times.compute_backward_s[0][kinds].sum()),
            rank.facts.overlap,
        )
        if self.layout.offload is Offload.NONE:
            optimizer = rank.facts.update.time_s(held)
        else:  # beside the reductions, on links of its own
            host = self.table.cluster.host(self.layout.offload)
            optimizer = host.update.time_s(held)
            optimizer += exposed_s(host.download.time_s(held), passes.backward_s, passes.overlap)
        return once_a_step_s(self.layout, rank.data_s[kinds], passes, self.table.framework), optimizer

    # -- memory ---------------------------------------------------------------------------------

    def memory(self, starts: tuple[int, ...]) -> tuple[RankMemory, ...]:
        """The memory of every pipeline rank in every phase."""
        units = range(len(self._kinds))
        kept = stage_sums(tuple(self._memory.held(unit, Holding.KEPT) for unit in units), starts)
        waiting = stage_sums(tuple(self._memory.held(unit, Holding.WAITING) for unit in units), starts)
        flying = self._activation_bytes(kept, waiting)
        pairs = zip(self._stages_of_ranks(starts), flying, strict=True)
        return tuple(self._memory.rank(stages, num_bytes) for stages, num_bytes in pairs)

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
        ranks = [self._memory.elements(stages) for stages in self._stages_of_ranks(starts)]
        kept = [
            host_states(state_bytes(row, trainable, frozen, experts).optimizer, updated, host)
            for trainable, frozen, experts in ranks
            for updated in [num_updated(layout, trainable, experts)]
        ]
        return fullest_node(kept, table.cluster, host)

    def _activation_bytes(self, kept: tuple[float, ...], waiting: tuple[float, ...]) -> list[float]:
        """The most that each pipeline rank holds of activations, from what one micro-batch keeps in each stage.

        ``waiting``: what it keeps more, or less, from the first to the second half of a split backward pass.
        """
        layout = self.layout
        pp, rules, m = layout.mesh.pp, layout.schedule.rules, layout.num_microbatches
        if rules.has_one_stage:
            return [number * num_bytes for number, num_bytes in zip(rules.in_flight(pp, m), kept, strict=True)]
        schedule = rules.actions(pp, layout.virtual_stages, rules.shortened_to_peak(pp, m))
        by_stage, waits = dict(enumerate(kept)), dict(enumerate(waiting))
        return [peak_in_flight(actions, by_stage, waits) for actions in schedule]


def device_places(table: CostTable, layout: Layout) -> tuple[int, ...]:
    """For each pipeline rank the place of its devices on the table's axis of devices."""
    pp = layout.mesh.pp
    if not layout.groups:
        return (0,) * pp
    each = table.cluster.num_devices // pp
    places = [table.cluster.place_of(name) for name in layout.groups]
    return tuple(place for place in places for _ in range(table.cluster.devices[place].num_devices // each))
