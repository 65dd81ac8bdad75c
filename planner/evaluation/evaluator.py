"""One layout on a cost table: the step and the memory of a given cut into stages.

The step is that of the very schedule that the executor runs, simulated action by action.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import pairwise

import numpy as np

from costmodels.ledger import MemoryLedger, RankMemory
from costmodels.overlap import exposed_s, message_beside_s
from costmodels.pipeline import Timeline
from costmodels.pipeline_many import simulate_many, whole_s
from costmodels.pipeline_steady import simulate_long
from costmodels.vocabulary.action import ActionLists, Transfer
from costmodels.vocabulary.choices import BlockMode, Offload, Recompute, recompute_of
from costmodels.vocabulary.schedules import ScheduleName
from costmodels.vocabulary.terms import Element, Holding, Pass, Term
from planner.evaluation.block_modes import MODES
from planner.evaluation.cuts import even_starts, spread_starts, weighted_starts
from planner.evaluation.exchanges import StageExchanges, stage_exchanges, unhidden_s, without_pipeline
from planner.evaluation.host import HostMemory
from planner.evaluation.layout_units import LayoutUnits, OnDevice, StageTimes
from planner.evaluation.once_a_step import Collected, Passes, once_a_step_s
from planner.evaluation.states import num_updated
from planner.layout.columns import Array, Positions
from planner.layout.layout import Layout
from planner.table.keys import SendKey

_TRAINABLE, _FROZEN, _TIED, _EXPERT = range(len(Element))


@dataclass(frozen=True)
class Evaluated:
    """A layout with its stages: what it costs.

    ``starts[k]`` is the first unit of stage k, ``modes[u]`` the mode of unit u.
    """

    layout: Layout
    starts: tuple[int, ...]
    modes: tuple[BlockMode, ...]
    step_time_s: float
    breakdown: Mapping[Term, float]  # seconds on the rank that works longest; they sum to the step time
    find_memory: Callable[[], tuple[RankMemory, ...]] = field(compare=False, repr=False)  # what ``memory`` says
    capacity_bytes: tuple[float, ...]  # that a plan may take of one device of each pipeline rank or share of the batch
    host: HostMemory | None = None  # of the fullest node, where states or activations are offloaded

    @property
    def only_mode(self) -> Recompute | None:
        """What every block recomputes; None where they differ."""
        modes = set(map(recompute_of, self.modes))
        return modes.pop() if len(modes) == 1 else None

    @cached_property
    def memory(self) -> tuple[RankMemory, ...]:
        """Of each pipeline rank, or share of the batch. Of most layouts that are priced nobody asks for it."""
        return self.find_memory()

    @property
    def ledgers(self) -> tuple[MemoryLedger, ...]:
        """The same at their peak."""
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
    def memory_share(self) -> float:
        """Of the fullest rank, what it takes of what it may."""
        pairs = zip(self.ledgers, self.capacity_bytes, strict=True)
        return max(ledger.total_bytes / room for ledger, room in pairs)

    @property
    def peak_memory_bytes(self) -> float:
        """Peak of the worst rank."""
        return max(ledger.total_bytes for ledger in self.ledgers)


class Evaluator(LayoutUnits):
    """A layout of ``table``. Everything here is computed from the numbers of the table alone."""

    @property
    def parts(self) -> tuple[Evaluator, ...]:
        """As of ``SharesEvaluator``: all replicas are alike."""
        return (self,)

    def slowest(self, starts: tuple[int, ...]) -> Evaluator:
        """As of ``SharesEvaluator``."""
        return self

    # -- stages ---------------------------------------------------------------------------------

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
        if not layout.groups:
            return (ways[0],) * num_borders
        pairs = pairwise(map(self._rank_of, range(self.num_stages)))
        # From the last rank back to the first where ranks hold several stages in turn.
        return tuple([ways[min(a, b)] if abs(a - b) == 1 else ways[-1] for a, b in pairs])

    @property
    def transfer(self) -> Transfer:
        """When activations and gradients go from stage to stage."""
        return self.table.framework.transfer(self.layout.schedule)

    def receives_s(self, sends: Sequence[float]) -> tuple[tuple[float, float], ...]:
        """What each pipeline rank waits for inputs while nothing else runs, before a forward and a backward pass.

        That is where results go on demand: the rest of a rank's waiting depends on the schedule. ``sends``: ``send_s``.
        """
        if self.transfer is not Transfer.ON_DEMAND:
            return ((0.0, 0.0),) * self.layout.mesh.pp
        return tuple(zip((0.0, *sends), (*sends, 0.0), strict=True))

    def links_s(self, sends: Sequence[float]) -> float:
        """How long the busiest rank's link carries what it sends of one micro-batch, while ranks work on."""
        if not self.transfer.receives_beside:
            return 0.0
        over = np.zeros(self.layout.mesh.pp)
        for way, (a, b) in zip(sends, pairwise(self.rank_of_stage), strict=True):
            over[[a, b]] += way * (a != b)  # one sends a result forward, the other a gradient back
        return float(over.max())

    @cached_property
    def beside_s(self) -> Array:
        """What messages to and from other ranks add to a forward and a backward pass of each stage, [2, stages].

        Where they go on beside passes (``Transfer``), and what computes moves them. A pass counts as long as the mean
        stage's forward one.
        """
        if self.num_stages == 1 or not self.transfer.sends_beside:
            return np.zeros((2, self.num_stages))
        ranks = [self._ranks[rank] for rank in self.rank_of_stage]
        over = [way * (a != b) for way, (a, b) in zip(self.send_s, pairwise(self.rank_of_stage), strict=True)]
        mode = MODES[self.layout.recompute or Recompute.NONE]
        pass_s = [sum(rank.times.forward_s[mode, self._kinds].tolist()) / self.num_stages for rank in ranks]
        slowdowns = np.array([rank.facts.message_slowdown for rank in ranks])
        before, behind = (message_beside_s(ways, pass_s, slowdowns) for ways in ([0.0, *over], [*over, 0.0]))
        if self.transfer.receives_beside:
            return np.array([before + behind, before + behind])
        return np.array([behind, before])

    def beside_of_ranks_s(self) -> Array:
        """The same of each pipeline rank on one micro-batch, [2, ranks]."""
        found = np.zeros((self.layout.mesh.pp, 2))
        np.add.at(found, np.array(self.rank_of_stage), self.beside_s.T)
        return found.T

    def evaluate(self, starts: tuple[int, ...], *, exact: bool = False, makespan_s: float | None = None) -> Evaluated:
        """Simulates the schedule.

        ``exact``: every micro-batch counts as in the simulated schedule, and the time that is lost to sending is told
        from the bubble. Otherwise the steady part of a long schedule is extrapolated once the busiest rank works
        without a pause, and the time lost to sending counts as bubble. ``makespan_s``: what comes of that, where it is
        known.
        """
        times = self._stage_times(starts)
        makespan = self._makespan_s(times, self.send_s, exact=exact) if makespan_s is None else makespan_s
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
        overflow_s = m * self._overflow_s(starts)
        breakdown = self._terms_s(slowest, starts)
        breakdown[Term.COMPUTE] += overflow_s
        breakdown[Term.EXPERT] += unhidden[slowest]
        breakdown[Term.DATA] += data_once
        breakdown[Term.SEND] += sending + m * float(self.beside_of_ranks_s()[:, slowest].sum())
        breakdown[Term.BUBBLE] += idle - sending
        breakdown[Term.OPTIMIZER] += optimizer
        step = makespan + overflow_s + data_once + optimizer
        host = self.host(starts)
        memory = partial(self.memory, starts)
        return Evaluated(self.layout, starts, self.modes, step, breakdown, memory, self.capacity_bytes, host)

    def _terms_s(self, rank: int, starts: tuple[int, ...]) -> dict[Term, float]:
        """Seconds of every term in all micro-batches of one pipeline rank."""
        units = self._units_of_ranks(starts)[rank]
        times, m = self._ranks[rank].times, self.layout.num_microbatches
        terms = [term for term in Term if term is not Term.OFFLOAD or self.layout.offloads_activations]
        return {term: m * sum(sum(self._of_units(times.term_s(term, run), units)) for run in Pass) for term in terms}

    def _overflow_s(self, starts: tuple[int, ...]) -> float:
        """Seconds that a micro-batch waits for the allocator, for frameworks known to go on where memory is short."""
        per_byte = self.table.framework.overflow_s_per_byte
        if per_byte is None:
            return 0.0
        whole = [room * self.table.cluster.memory_factor for room in self.capacity_bytes]
        over = max(rank.peak.total_bytes - room for rank, room in zip(self.memory(starts), whole, strict=True))
        return max(0.0, over) * per_byte

    def timeline(self, starts: tuple[int, ...]) -> Timeline:
        """The simulated schedule, action by action."""
        return self._stage_times(starts).run(self._schedule(), self.send_s, self.transfer)

    def _schedule(self) -> ActionLists:
        """Without a pipeline the executor finishes each micro-batch at once, whatever the schedule is called."""
        layout, pp = self.layout, self.layout.mesh.pp
        if pp == 1 and self.hides_exchanges:
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
        return [self.once_a_step_of(rank, units) for rank, units in enumerate(self._units_of_ranks(starts))]

    def once_a_step_of(self, rank: int, units: list[int]) -> tuple[float, float]:
        """The same of one rank that holds these units."""
        of_rank = self._ranks[rank]
        forward_s, backward_s = of_rank.times.compute_forward_s, of_rank.times.compute_backward_s
        passes = sum(self._of_units(forward_s, units)), sum(self._of_units(backward_s, units))
        return self._once_a_step_s(of_rank, units, passes)

    def least_once_of_cut_s(self, starts: tuple[int, ...]) -> float:
        """What a step takes at least after the last action of its ranks, whatever these recompute.

        Communication hides behind as much compute as any mode makes.
        """
        found: list[tuple[float, float]] = []
        for rank, units in zip(self._ranks, self._units_of_ranks(starts), strict=True):
            kinds = [self._kinds[unit] for unit in units]
            passes = (rank.times.compute_forward_s, rank.times.compute_backward_s)
            forward_s, backward_s = (float(seconds.max(axis=0)[kinds].sum()) for seconds in passes)
            found.append(self._once_a_step_s(rank, units, (forward_s, backward_s)))
        data_s, update_s = (max(each) for each in zip(*found, strict=True))
        return (data_s + update_s) * (1 - 1e-12)

    def _stage_times(self, starts: tuple[int, ...]) -> StageTimes:
        """Seconds of each stage on one micro-batch."""
        ends = (*starts[1:], len(self._kinds))
        rows = [self._ranks[self._rank_of(stage)].unit_times for stage in range(len(starts))]
        stages, (forward_s, backward_s) = list(zip(rows, starts, ends, strict=True)), self.beside_s.tolist()
        return StageTimes(
            forward_s=tuple(sum(row.forward_s[a:b]) + s for (row, a, b), s in zip(stages, forward_s, strict=True)),
            backward_s=tuple(sum(row.backward_s[a:b]) + s for (row, a, b), s in zip(stages, backward_s, strict=True)),
            weight_s=tuple(sum(row.weight_s[a:b]) for row, a, b in stages),
            exchanges=self._exchanges(starts) if self.hides_exchanges else (),
        )

    def _exchanges(self, starts: tuple[int, ...]) -> tuple[StageExchanges, ...]:
        stages = [[(self._modes[u], self._kinds[u]) for u in units] for units in self._units_of_stages(starts)]
        ranks = [self._ranks[self._rank_of(stage)] for stage in range(len(stages))]
        return tuple(
            stage_exchanges(rank.times, units, rank.facts.overlap) for rank, units in zip(ranks, stages, strict=True)
        )

    def _makespan_s(self, times: StageTimes, send_s: float | Sequence[float], *, exact: bool) -> float:
        layout = self.layout
        pp, m, rules = layout.mesh.pp, layout.num_microbatches, layout.schedule.rules
        if pp == 1:
            return m * (times.forward_s[0] + times.backward_s[0]) + self._unhidden_s(times)[0]

        sends = [send_s] * (self.num_stages - 1) if isinstance(send_s, float | int) else send_s

        def run(num_microbatches: int, _sets: Positions | None = None) -> Array:
            shape = pp, layout.virtual_stages, num_microbatches
            if times.exchanges:  # what is left of them differs from action to action
                span = times.run(rules.actions(*shape), sends, self.transfer)
            elif exact:
                span = simulate_long(rules, shape, times.of_actions, sends, transfer=self.transfer)
            else:
                span = simulate_many(rules.columns(*shape), times.of_actions, sends, transfer=self.transfer)
            return np.atleast_1d(span.longest_rank_s if rules.overlaps_steps else span.makespan_s)

        # With all exchanges hidden the busiest rank works no longer.
        of_ranks = zip(self._work_of_ranks(times), self.receives_s(sends), strict=True)
        work_s = np.array([max(self.links_s(sends), *(work + sum(receives) for work, receives in of_ranks))])
        return float((run(m) if exact else whole_s(run, rules, pp, m, work_s))[0])

    def _work_of_ranks(self, times: StageTimes) -> list[float]:
        """Seconds of each pipeline rank on one micro-batch."""
        work = [0.0] * self.layout.mesh.pp
        for stage, seconds in enumerate(zip(times.forward_s, times.backward_s, strict=True)):
            work[self._rank_of(stage)] += sum(seconds)
        return work

    def _once_a_step_s(self, rank: OnDevice, units: list[int], passes_s: tuple[float, float]) -> tuple[float, float]:
        """Exposed data-parallel communication that happens once a step, and the optimiser step.

        ``passes_s``: what the rank computes forward and backward on one micro-batch.
        """
        if not units:
            return 0.0, 0.0
        kinds = [self._kinds[unit] for unit in units]
        counts = self.table.elements[self._rows.split[0]][kinds].sum(axis=0)
        data = rank.data_s[kinds]
        passes = Passes(*passes_s, rank.facts.overlap)
        collected = Collected.of(data.sum(axis=0), data[0])
        held = num_updated(self.layout, float(counts[_TRAINABLE]), float(counts[_EXPERT]))
        exposed = float(once_a_step_s(self.layout, collected, passes, self.table.framework))
        return exposed, float(self._update_s(rank, held, passes))

    def _update_s(self, rank: OnDevice, held: float | Array, passes: Passes) -> float | Array:
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

        def between(values: Array) -> Array:
            running = np.concatenate(([0.0], np.cumsum(values)))
            return running[None, :] - running[:-1, None]

        times = on_device.times
        passes = Passes(
            between(times.compute_forward_s.max(axis=0)[kinds]),
            between(times.compute_backward_s.max(axis=0)[kinds]),
            on_device.facts.overlap,
        )
        whole = np.stack([between(seconds) for seconds in data.T], axis=-1)
        collected = Collected.of(whole, data[:, None, :])
        held = num_updated(self.layout, between(counts[:, _TRAINABLE]), between(counts[:, _EXPERT]))
        exposed = once_a_step_s(self.layout, collected, passes, self.table.framework)
        start, end = np.indices((len(kinds), len(kinds) + 1))
        return np.where(start < end, (exposed + self._update_s(on_device, held, passes)) * (1 - 1e-12), 0.0)
