"""One coarse point priced exactly: the stage program it poses, and its step time and memory once cut into stages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

import numpy as np

from costmodels.memory import MemoryLedger, RankMemory
from costmodels.pipeline import Timeline, simulate
from costmodels.step import exposed_s
from costmodels.vocabulary.action import ActionLists
from costmodels.vocabulary.schedules import STEADY_ROUNDS, ScheduleName, peak_in_flight
from planner.layout.columns import Columns
from planner.layout.layout import Layout
from planner.parallelism import Offload
from planner.pricing.cost_table import CostKey, CostTable, DataParallelTimes, Parts, num_updated
from planner.pricing.offloading import HostMemory, fullest_node
from planner.pricing.rank_memory import RankMemoryModel
from planner.pricing.stages import even_starts, spread_starts, weighted_starts
from planner.problems import StageProblem, stage_sums


@dataclass(frozen=True)
class Breakdown:
    """Seconds of the step on the rank that works longest; they sum to the step time."""

    compute: float
    recompute: float
    tensor_parallel: float
    context_parallel: float
    expert_parallel: float
    data_parallel: float
    pipeline_communication: float
    bubble: float
    optimizer: float


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
class Priced:
    """A coarse point with its stages: what it costs. ``starts[k]`` is the first unit of stage k."""

    layout: Layout
    starts: tuple[int, ...]
    step_time_s: float
    breakdown: Breakdown
    memory: tuple[RankMemory, ...]  # per pipeline rank
    capacity_bytes: tuple[float, ...]  # of one device of each pipeline rank
    host: HostMemory | None = None  # of the fullest node, where states are offloaded

    @property
    def ledgers(self) -> tuple[MemoryLedger, ...]:
        """Memory of each pipeline rank at its peak."""
        return tuple(rank.peak for rank in self.memory)

    @property
    def fits(self) -> bool:
        """Whether every rank stays within its device, and every node within its host memory."""
        return self.fits_devices and (self.host is None or self.host.share <= 1)

    @property
    def fits_devices(self) -> bool:
        """Whether every rank stays within its device."""
        return all(need.total_bytes <= room for need, room in zip(self.ledgers, self.capacity_bytes, strict=True))

    @property
    def peak_memory_bytes(self) -> float:
        """Peak of the worst rank."""
        return max(ledger.total_bytes for ledger in self.ledgers)


class _Rank(NamedTuple):
    """What one pipeline rank's devices take for the layout."""

    table: CostTable
    data: DataParallelTimes
    parts: Parts
    unit_times: StageTimes  # of every unit as a stage of its own


def _ranks(table: CostTable, layout: Layout) -> tuple[_Rank, ...]:
    tables, kinds = table.of_ranks(layout), list(table.units.kinds)
    found: dict[int, _Rank] = {}
    for each in tables:
        if id(each) not in found:
            alone = Columns.of(Layout, [layout])
            data = each.data_parallel_times(layout)
            parts = each.parts(alone, each.data_times(alone), each.key_rows(alone))
            rows = (tuple(array[0][kinds].tolist()) for array in (parts.forward_s, parts.backward_s, parts.weight_s))
            found[id(each)] = _Rank(each, data, parts, StageTimes(*rows))
    return tuple(found[id(each)] for each in tables)


class Point:
    """A coarse point of ``table``; everything here is derived from the table's numbers."""

    def __init__(self, table: CostTable, layout: Layout) -> None:
        self.table, self.layout = table, layout
        self._ranks = _ranks(table, layout)
        self._costs = table.costs[CostKey.of(layout)]
        self._states = table.states[layout.mesh.tp, layout.sequence_parallel]
        self._memory = RankMemoryModel(table, layout)

    # -- the stage program --------------------------------------------------------------------

    @property
    def num_stages(self) -> int:
        """Pipeline stages over all ranks."""
        return self.layout.mesh.pp * self.layout.virtual_stages

    def even_starts(self) -> tuple[int, ...]:
        """Stages of equal numbers of blocks."""
        return even_starts(self.table.units.is_block, self.num_stages)

    def starts(self) -> tuple[int, ...]:
        """Stages as the recipe's framework cuts them by itself."""
        units, num_stages = self.table.units, self.num_stages
        num_blocks = sum(units.is_block)
        if num_stages == 1:
            return (0,)
        if num_blocks % num_stages and (num_blocks + 2) % num_stages == 0:
            return spread_starts(units.is_block, num_stages)
        if self.table.recipe.partition == "weighted":
            elements = [self._states[kind].total + self._states[kind].tied for kind in units.kinds]
            return weighted_starts(elements, num_stages)
        return self.even_starts()

    def stage_problem(self) -> StageProblem:
        """The program that cuts the units into one stage a rank."""
        table, layout = self.table, self.layout
        kinds = list(table.units.kinds)
        software = self._memory.software
        reserve = 1 + software.allocator_reserve_fraction.value
        pp = layout.mesh.pp
        by_kind = {k: self._memory.unit_states(kinds.index(k), tied_copy=pp > 1).total for k in set(kinds)}
        outside = MemoryLedger().with_reserve(software, self._memory.num_communicators).total_bytes
        transient = [self._memory.most_transient(self._likely_units(r)) for r in range(pp)]
        return StageProblem(
            forward_s=tuple(rank.unit_times.forward_s for rank in self._ranks),
            backward_s=tuple(rank.unit_times.backward_s for rank in self._ranks),
            static_bytes=tuple(by_kind[k] for k in kinds),
            kept_bytes=tuple(self._costs[k].kept_bytes * reserve for k in kinds),
            in_flight=layout.schedule.rules.in_flight(pp, layout.num_microbatches),
            room_bytes=tuple(
                capacity - outside - t.tensors * reserve - t.cached
                for capacity, t in zip(self.capacity_bytes, transient, strict=True)
            ),
            num_microbatches=layout.num_microbatches,
            send_s=table.send_s(layout),
            windowed=layout.schedule is not ScheduleName.GPIPE,
        )

    @property
    def capacity_bytes(self) -> tuple[float, ...]:
        """Memory of one device of each pipeline rank."""
        return tuple(rank.table.capacity_bytes for rank in self._ranks)

    def _likely_units(self, rank: int) -> list[int]:
        """Units whose transient memory a rank must be ready for: the first or last unit only where it must lie."""
        last = len(self.table.units.kinds) - 1
        pp = self.layout.mesh.pp
        return [u for u in range(last + 1) if (u != 0 or rank == 0) and (u != last or rank == pp - 1)] or [0]

    # -- the price ------------------------------------------------------------------------------

    def price(self, starts: tuple[int, ...], *, exact: bool = False) -> Priced:
        """Simulates the schedule.

        ``exact`` runs every micro-batch and parts what sending costs from the bubble; otherwise long steady
        states are extrapolated, and the time lost to sending counts as bubble.
        """
        times = self._stage_times(starts)
        makespan = self._makespan_s(times, self.table.send_s(self.layout), exact=exact)
        send_on_path = makespan - self._makespan_s(times, 0.0, exact=True) if exact else 0.0
        m = self.layout.num_microbatches
        busy = [m * seconds for seconds in self._work_of_ranks(times)]
        slowest = max(range(len(busy)), key=lambda r: busy[r])
        once = self.once_a_step(starts)
        data_once = max(data for data, _ in once)
        optimizer = max(seconds for _, seconds in once)
        units = self._units_of_ranks(starts)[slowest]
        kinds = [self.table.units.kinds[u] for u in units]
        idle = max(0.0, makespan - busy[slowest])  # rounding may leave less
        parts = self._ranks[slowest].parts
        memory = self.memory(starts)
        overflow_s = m * self._overflow_s(memory)

        def total(*arrays: np.ndarray) -> float:
            return m * float(sum(array[0][kinds].sum() for array in arrays))

        breakdown = Breakdown(
            compute=total(parts.compute_forward_s, parts.compute_backward_s) + overflow_s,
            recompute=total(parts.recompute_s),
            tensor_parallel=total(parts.tensor_forward_s, parts.tensor_backward_s),
            context_parallel=total(parts.context_forward_s, parts.context_backward_s),
            expert_parallel=total(parts.expert_forward_s, parts.expert_backward_s),
            data_parallel=total(parts.data_forward_s, parts.data_backward_s) + data_once,
            pipeline_communication=min(idle, max(0.0, send_on_path)),
            bubble=idle - min(idle, max(0.0, send_on_path)),
            optimizer=optimizer,
        )
        step = makespan + overflow_s + data_once + optimizer
        return Priced(self.layout, starts, step, breakdown, memory, self.capacity_bytes, self.host(starts))

    def _overflow_s(self, memory: tuple[RankMemory, ...]) -> float:
        """What one micro-batch waits for the allocator, where the framework is known to run on in too little memory."""
        per_byte = self.table.recipe.overflow_s_per_byte
        if per_byte is None:
            return 0.0
        over = max(rank.peak.total_bytes - room for rank, room in zip(memory, self.capacity_bytes, strict=True))
        return max(0.0, over) * per_byte.value

    def timeline(self, starts: tuple[int, ...]) -> Timeline:
        """The simulated schedule, action by action."""
        layout, pp = self.layout, self.layout.mesh.pp
        # Without a pipeline the executor finishes each micro-batch at once, whatever the schedule is called.
        name = ScheduleName.ONE_F_ONE_B if pp == 1 else layout.schedule
        schedule = name.rules.actions(pp, layout.virtual_stages, layout.num_microbatches)
        times, sends_block = self._stage_times(starts), self.table.recipe.sends_block
        return times.run(schedule, self.table.send_s(layout), sends_block=sends_block)

    def exposed_s(self, starts: tuple[int, ...]) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Communication that compute does not hide within the forward and the backward pass of each stage."""
        forward_s: list[float] = []
        backward_s: list[float] = []
        for stage, kinds in enumerate(self._kinds_of_stages(starts)):
            parts = self._ranks[self._rank_of(stage)].parts
            forward_s.append(float(parts.communication_forward_s[0][kinds].sum()))
            backward_s.append(float(parts.communication_backward_s[0][kinds].sum()))
        return tuple(forward_s), tuple(backward_s)

    def _kinds_of_stages(self, starts: tuple[int, ...]) -> list[list[int]]:
        kinds = self.table.units.kinds
        return [[kinds[unit] for unit in units] for units in self._units_of_stages(starts)]

    def once_a_step(self, starts: tuple[int, ...]) -> list[tuple[float, float]]:
        """What each rank does after its last action: exposed data-parallel communication, and the optimiser step."""
        pairs = zip(self._ranks, self._units_of_ranks(starts), strict=True)
        return [self._once_a_step_s(rank, units) for rank, units in pairs]

    def _stage_times(self, starts: tuple[int, ...]) -> StageTimes:
        """Seconds of each stage on one micro-batch."""
        ends = (*starts[1:], len(self.table.units.kinds))
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
            timeline = times.run(schedule, send_s, sends_block=self.table.recipe.sends_block)
            # The framework of ZB-2P checks gradients after the step: no rank waits for others to begin the next.
            return timeline.longest_rank_s if layout.schedule is ScheduleName.ZB_2P else timeline.makespan_s

        # The busiest rank works without a pause once the state is steady; with unequal stages that can take long.
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
        ends = (*starts[1:], len(self.table.units.kinds))
        return [range(start, end) for start, end in zip(starts, ends, strict=True)]

    def _stages_of_ranks(self, starts: tuple[int, ...]) -> list[list[range]]:
        ranks: list[list[range]] = [[] for _ in range(self.layout.mesh.pp)]
        for stage, units in enumerate(self._units_of_stages(starts)):
            ranks[self._rank_of(stage)].append(units)
        return ranks

    def _units_of_ranks(self, starts: tuple[int, ...]) -> list[list[int]]:
        return [list(chain.from_iterable(stages)) for stages in self._stages_of_ranks(starts)]

    def _once_a_step_s(self, rank: _Rank, units: list[int]) -> tuple[float, float]:
        """Exposed data-parallel communication that happens once a step, and the optimiser step."""
        kinds = [self.table.units.kinds[u] for u in units]
        trainable, experts = (sum(getattr(self._states[k], name) for k in kinds) for name in ("trainable", "experts"))
        held, offload = num_updated(self.layout, trainable, experts), self.layout.offload
        optimizer = rank.table.update_s(held, offload)
        if offload is not Offload.NONE:  # beside the reductions, on links of its own
            down_s = rank.table.download_s(held, offload)
            behind_s = float((rank.parts.compute_backward_s + rank.parts.recompute_s)[0][kinds].sum())
            optimizer += exposed_s(down_s, behind_s, rank.table.software)
        return once_a_step_s(rank.table, self.layout, rank.data, rank.parts, kinds), optimizer

    def ledgers(self, starts: tuple[int, ...]) -> tuple[MemoryLedger, ...]:
        """The memory of every pipeline rank at its peak, row by row."""
        return tuple(rank.peak for rank in self.memory(starts))

    def memory(self, starts: tuple[int, ...]) -> tuple[RankMemory, ...]:
        """The memory of every pipeline rank in every phase."""
        costs = [self._costs[kind] for kind in self.table.units.kinds]
        kept = stage_sums(tuple(c.kept_bytes for c in costs), starts)
        waiting = stage_sums(tuple(c.waiting_bytes for c in costs), starts)
        flying = self._activation_bytes(kept, waiting)
        pairs = zip(self._stages_of_ranks(starts), flying, strict=True)
        return tuple(self._memory.rank(stages, num_bytes) for stages, num_bytes in pairs)

    def host(self, starts: tuple[int, ...]) -> HostMemory | None:
        """The fullest node's own memory; None where nothing is offloaded."""
        if self.layout.offload is Offload.NONE:
            return None
        ranks = [self._memory.elements(stages) for stages in self._stages_of_ranks(starts)]
        kept = [self.table.host_states(self.layout, *elements) for elements in ranks]
        return fullest_node(kept, self.table.cluster)

    def _activation_bytes(self, kept: tuple[float, ...], waiting: tuple[float, ...]) -> list[float]:
        """The most that each pipeline rank holds of activations, from what one micro-batch keeps in each stage.

        ``waiting``: what it keeps more, or less, from the first to the second half of a split backward pass.
        """
        layout = self.layout
        pp = layout.mesh.pp
        rules, m = layout.schedule.rules, layout.num_microbatches
        if rules.has_one_stage:
            return [number * num_bytes for number, num_bytes in zip(rules.in_flight(pp, m), kept, strict=True)]
        schedule = rules.actions(pp, layout.virtual_stages, rules.shortened(pp, m))
        by_stage, waits = dict(enumerate(kept)), dict(enumerate(waiting))
        return [peak_in_flight(actions, by_stage, waits) for actions in schedule]


def once_a_step_s(table: CostTable, layout: Layout, data: DataParallelTimes, parts: Parts, kinds: list[int]) -> float:
    """Exposed seconds of the reductions and gathers that happen once a step on a rank that holds ``kinds``.

    Reduction hides behind the backward of the last micro-batch, except for the last bucket, and not at all where a
    schedule splits it: it waits for the last weight gradient. Gathering hides behind the forward of the first, except
    for the first unit.
    """
    if not kinds:
        return 0.0
    software = table.software
    reduce, gather = data.reduce_s[kinds], data.gather_s[kinds]
    exposed = 0.0
    recipe = table.recipe
    if not recipe.overlaps_reduction or layout.schedule.rules.splits_backward:
        exposed += float(reduce.sum())
    elif layout.zero_stage <= 1:
        behind = float((parts.compute_backward_s + parts.recompute_s)[0][kinds].sum())
        exposed += max(float(exposed_s(float(reduce.sum()), behind, software)), float(reduce[0]))
    else:
        exposed += float(reduce[0])
    if layout.zero_stage in (1, 2) and not recipe.overlaps_gather:
        exposed += float(gather.sum())
    elif layout.zero_stage in (1, 2):
        behind = float(parts.compute_forward_s[0][kinds].sum())
        exposed += max(float(exposed_s(float(gather.sum()), behind, software)), float(gather[0]))
    elif layout.zero_stage == 3:
        exposed += float(gather[0])
    return exposed
