"""Admissible bounds of many coarse points at once: no cut into stages is faster or smaller.

Let w_r be the work of pipeline rank r on one micro-batch, W their sum, m micro-batches on p ranks, c one send. With one
stage a rank, ``problems.pipeline_bound_s`` gives for every r

    GPipe          T >= W + (m - 1) w_r + 2 c (p-1)
    1F1B, m > p    T >= (W - w_r) + (m - (p-1-r)) w_r + sum_(i>r) w_i + 2 c (p-1)
    any            T >= sum_(i<r) w_i + m w_r, whose least maximum over the cuts is W / (1 - (1 - 1/m)^p)

and some w_r is at least W / p and at least its share, rounded up, of each kind of unit. A convex combination of the
second line whose coefficients of all w_i are equal bounds T by a multiple of W whatever the cut. A 1F1B rank r holds at
most p - r micro-batches, so the p - r-th waits for the first to come back: T >= x + 2 c r + q (W - x + 2 c (p-1-r)),
x = sum_(i<r) w_i, q rounds, while T >= m x / r; the least maximum of the two over x is a bound.

Over groups of unlike devices w_r is of rank r's own. The first and third line are T >= sum_i a_ri w_i, so weights l_r
that sum to 1 give T >= sum_i A_i w_i, A_i = sum_r l_r a_ri; a unit adds at least the least A_i times its work on rank
i. With S_i = sum_(r<i) l_r the lines make A_i = 1 + e S_i + d_i l_i; weights that make A_i times the work of the whole
model on rank i equal are near best.

A pipeline of several stages a rank is cut evenly, so the work and memory of its ranks are known. The first forward
comes to rank r through the first stages of the ranks below it, and the last gradient goes back through them. Where
backward passes are split, only the input gradients must: with u_r = w_r less the weight gradients,

    T >= sum_(i<r) f_i + c r + m w_r       and       T >= sum_(i<r) u_i + 2 c r + m u_r

Memory. For weights l_r that sum to 1 the worst rank holds at least sum_r l_r M_r, and a unit adds at least
min_r l_r (states + in flight on r * kept); weights that make the terms of the average unit equal are near best.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np
from numpy.typing import NDArray

from costmodels.memory import MemoryLedger
from costmodels.vocabulary.schedules import ScheduleName
from planner.layout.columns import Array, Columns, Positions
from planner.layout.layout import Layout
from planner.parallelism import Offload
from planner.pricing.cost_table import CostTable, UnitRow, num_updated
from planner.pricing.offloading import on_node
from planner.pricing.rank_memory import reserve_fraction
from planner.pricing.stages import even_starts
from planner.pricing.unit_costs import UnitStates

CHUNK = 20_000
# Trainable and frozen elements, and of the trainable those of experts.
_ELEMENTS: tuple[Callable[[UnitStates], float], ...] = (
    lambda s: s.trainable,
    lambda s: s.frozen,
    lambda s: s.experts,
)


@dataclass(frozen=True)
class Bounds:
    """Lower bounds per coarse point, in the order of the layouts given."""

    step_time_s: Array
    memory_bytes: Array
    host_share: Array  # of a node's own memory; 0 where nothing is offloaded


def bounds(table: CostTable, layouts: Sequence[Layout]) -> Bounds:
    """Bounds of every layout."""
    found = Bounds(*(np.empty(len(layouts)) for _ in range(3)))
    listed = Columns.of(Layout, layouts)
    if not layouts:
        return found
    rows = table.key_rows(listed)
    first, which = listed.distinct("mesh", "zero_stage", "sequence_parallel", "offload", "groups")
    shared = _Shared(table, listed.take(first))
    _, alike = listed.distinct("schedule", "mesh.pp", "virtual_stages", "offload", "groups")
    for members in np.split(np.argsort(alike, kind="stable"), np.cumsum(np.bincount(alike))[:-1]):
        for start in range(0, len(members), CHUNK):
            part = members[start : start + CHUNK]
            group = _Group(table, listed.take(part), rows[part], (shared, which[part]))
            found.step_time_s[part] = group.step_time_s()
            found.memory_bytes[part] = group.memory_bytes()
    found.host_share[:] = shared.host_share[which]
    return found


class _Shared:
    """What layouts of one mesh, ZeRO stage, sequence parallelism and place of states have in common; a row each."""

    def __init__(self, table: CostTable, layouts: Columns[Layout]) -> None:
        self._table, each = table, list(layouts)
        self.times = table.data_times(layouts)
        states = [table.states[layout.mesh.tp, layout.sequence_parallel] for layout in each]
        kinds = [np.array([[take(s) for s in row] for row in states], dtype=np.float64) for take in _ELEMENTS]
        self._elements = kinds  # of ``_ELEMENTS``, [shared, kinds] each
        whole = [(elements @ table.units.counts).tolist() for elements in kinds]
        self.update_s = np.array([self._update_s(*row) for row in zip(each, *whole, strict=True)])
        self.host_share = np.array([self._host_share(*row) for row in zip(each, *whole, strict=True)])
        self.reserve = 1 + np.array([reserve_fraction(table, layout) for layout in each])
        self._state_bytes = np.array([self._with_and_without_gradients(layout) for layout in each])

    def static_bytes(self, which: Positions, holds_gradients: NDArray[np.bool]) -> Array:
        """States of each unit kind when backward begins, [layouts, kinds]."""
        found = self._state_bytes[which, np.where(holds_gradients, 0, 1)]
        parts = (found[:, i : i + 1] * elements[which] for i, elements in enumerate(self._elements))
        return sum(parts, start=np.zeros(1))

    def _with_and_without_gradients(self, layout: Layout) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Bytes of one trainable and one frozen element, and what one of an expert has more than a trainable one.

        That is less than nothing.
        """
        one = self._table.state_bytes
        trainable, frozen, expert = one(layout, 1.0, 0.0), one(layout, 0.0, 1.0), one(layout, 1.0, 0.0, 1.0)
        without = trainable.total - trainable.gradients
        return (
            (trainable.total, frozen.total, expert.total - trainable.total),
            (without, frozen.total, expert.total - expert.gradients - without),
        )

    def _update_s(self, layout: Layout, trainable: float, _: float, experts: float) -> float:
        """The optimiser step of all pipeline ranks together, on the fastest devices."""
        tables = {id(table): table for table in self._table.of_ranks(layout)}.values()
        held = num_updated(layout, trainable, experts)
        return min(table.update_s(held, layout.offload) for table in tables)

    def _host_share(self, layout: Layout, *elements: float) -> float:
        """What the mean node keeps off its devices, as a share of what it has."""
        if layout.offload is Offload.NONE:
            return 0.0
        cluster = self._table.cluster
        devices_a_node = cluster.num_devices / -(-cluster.num_devices // cluster.devices_per_node)
        mean = self._table.host_states(layout, *elements).times(devices_a_node / layout.mesh.pp)
        return on_node(mean, cluster).share


class _Group:
    """Choices of one schedule, pipeline degree, number of virtual stages, place of states and order of groups.

    Arrays are [layouts, kinds] or fewer.
    """

    def __init__(
        self, table: CostTable, layouts: Columns[Layout], rows: Positions, shared: tuple[_Shared, Positions]
    ) -> None:
        self._table, self._layouts = table, layouts
        self._shared, self._which = shared
        first = layouts[0]
        self._schedule, self._pp, self._virtual = first.schedule, first.mesh.pp, first.virtual_stages
        self._m = layouts.numbers("num_microbatches")
        self._counts = table.units.counts
        self._rows = rows
        parts = table.parts(layouts, self._shared.times.take(self._which), rows)
        self._forward, self._weight = parts.forward_s, parts.weight_s
        self._work = parts.forward_s + parts.backward_s
        self._tables = table.of_ranks(first)
        # Memory of each rank's device over that of the smallest: what a rank holds counts by its share of its device.
        self._room = np.array([t.capacity_bytes / table.capacity_bytes for t in self._tables])
        lines = table.send_lines(first)
        latency_s, s_per_byte = lines[0] if lines else (0.0, 0.0)
        num_bytes = table.column("boundary_bytes")[self._rows].max(axis=1)
        self._send = latency_s + s_per_byte * num_bytes
        self._way = sum(latency for latency, _ in lines) + sum(slope for _, slope in lines) * num_bytes

    # -- time ---------------------------------------------------------------------------------

    def step_time_s(self) -> Array:
        """Pipeline, plus what comes once a step on the mean rank."""
        return self._pipeline_s() + self._shared.update_s[self._which] / self._pp

    def _pipeline_s(self) -> Array:
        total = self._work @ self._counts
        if self._pp == 1:
            return self._m * total
        if not self._schedule.rules.has_one_stage:
            return self._evenly_cut_s()
        if self._layouts[0].groups:
            return self._unlike_s()
        p, m, send = self._pp, self._m, self._send
        coefficient = self._layouts.each(
            lambda layout: pipeline_coefficient(self._schedule, p, layout.num_microbatches), "num_microbatches"
        )
        best = coefficient * total + 2 * send * (p - 1)
        blocks = np.ceil(self._counts / p)
        most = (self._work * blocks).max(axis=1)
        if self._schedule is ScheduleName.GPIPE:
            return np.maximum(best, total + (m - 1) * most + 2 * send * (p - 1))
        least = self._work.min(axis=1)
        whole = np.where(m > p, total + (m - p) * most + (p - 1) * least + 2 * send * (p - 1), m * most)
        best = np.maximum(best, whole)
        for rank in sorted({p // 4, p // 2, 3 * p // 4} - {0}):
            best = np.maximum(best, self._rounds_s(total, rank))
        return best

    def _unlike_s(self) -> Array:
        """The bound over groups of unlike devices, from the lines that hold for every number of micro-batches."""
        p, m = self._pp, self._m
        if self._schedule is ScheduleName.GPIPE:
            return self._weighted_s(0.0, [m - 1] * p)
        least = self._weighted_s(-1.0, [m - 1] * p)
        steady = self._weighted_s(1.0, [np.maximum(m - p + rank, 1) for rank in range(p)])
        return np.where(m > p, np.maximum(least, steady), least)

    @cached_property
    def _work_of_ranks(self) -> list[Array]:
        """``_work`` on each pipeline rank's own devices."""
        found: dict[int, Array] = {}
        for table in self._tables:
            if id(table) not in found:
                parts = table.parts(self._layouts, table.data_times(self._layouts), table.key_rows(self._layouts))
                found[id(table)] = parts.forward_s + parts.backward_s
        return [found[id(table)] for table in self._tables]

    def _weighted_s(self, e: float, d: list[Array]) -> Array:
        """sum over units of min_i A_i times its work on rank i, A_i = 1 + e S_i + d_i l_i, and what sends take."""
        work = self._work_of_ranks
        whole = [each @ self._counts for each in work]
        # A_i = t / whole_i makes l_i, and with it S_i, linear in t: l_i = slopes_i t + offsets_i, and S_p = 1 gives t.
        slope, offset = np.zeros_like(self._m), np.zeros_like(self._m)
        parts: list[tuple[Array, Array]] = []
        for all_units, own in zip(whole, d, strict=True):
            rate = np.maximum(own, 1e-6)  # any weights give a bound
            parts.append(((1 / all_units - e * slope) / rate, (-1 - e * offset) / rate))
            slope, offset = slope + parts[-1][0], offset + parts[-1][1]
        t = (1 - offset) / slope
        weights = np.maximum(1e-12, np.array([a * t + b for a, b in parts]))  # [ranks, layouts]
        weights /= weights.sum(axis=0)
        before = np.cumsum(weights, axis=0) - weights
        factors = 1 + e * before + np.array(d) * weights
        least = np.min([factor[:, None] * each for factor, each in zip(factors, work, strict=True)], axis=0)
        return least @ self._counts + 2 * self._way

    def _evenly_cut_s(self) -> Array:
        """The bound where ranks hold several stages."""
        ranks, below = _even_counts(self._table.units, self._schedule, self._pp, self._virtual)
        hops = self._send[:, None] * np.arange(self._pp)
        m = self._m[:, None]
        if not self._schedule.rules.splits_backward:
            return (self._work @ below.T + m * (self._work @ ranks.T) + 2 * hops).max(axis=1)
        if self._schedule is ScheduleName.ZB_2P:  # whose ranks do not wait for each other to end a step
            return (m * (self._work @ ranks.T)).max(axis=1)
        sent = self._work - self._weight
        whole = self._forward @ below.T + hops + m * (self._work @ ranks.T)
        return np.maximum(whole, sent @ below.T + 2 * hops + m * (sent @ ranks.T)).max(axis=1)

    def _rounds_s(self, total: Array, rank: int) -> Array:
        """The bound by rounds of micro-batches in flight at ``rank``."""
        p, m, send = self._pp, self._m, self._send
        rounds = np.floor((m - 1) / (p - rank)) + 1
        way = 2 * send * (p - 1 - rank)
        below = (rounds * (total + way) + 2 * send * rank) / (m / rank + rounds - 1)
        return np.where(below <= total, m * below / rank, total + 2 * send * rank + rounds * way)

    # -- memory -------------------------------------------------------------------------------

    def memory_bytes(self) -> Array:
        """The worst rank's states and activations, reserve included."""
        holds_gradients = (self._m > 1) | self._table.recipe.memory.keeps_gradients
        static = self._shared.static_bytes(self._which, holds_gradients)
        kept = self._table.column("kept_bytes")[self._rows]
        working = self._table.column("working_bytes")[self._rows].min(axis=1)
        outside = MemoryLedger().with_reserve(self._table.software, 0).total_bytes
        reserve = self._shared.reserve[self._which]
        if self._schedule.rules.has_one_stage:
            tensors = self._weighted_bytes(static, kept * reserve[:, None])
        else:
            waiting = self._table.column("waiting_bytes")[self._rows]
            tensors = self._evenly_cut_bytes(static, kept * reserve[:, None], waiting * reserve[:, None])
        return tensors + (working * reserve + outside) / self._room.max()

    def _weighted_bytes(self, static: Array, kept: Array) -> Array:
        if self._schedule is ScheduleName.GPIPE and self._pp > 1:
            flying = np.repeat(self._m[:, None], self._pp, axis=1)
        else:
            flying = self._layouts.each(
                lambda layout: self._schedule.rules.in_flight(self._pp, layout.num_microbatches), "num_microbatches"
            )
        states, activations = static @ self._counts, kept @ self._counts
        weights = self._room / (states[:, None] + flying * activations[:, None])
        weights /= weights.sum(axis=1, keepdims=True) * self._room
        # [layouts, kinds]: the least that a unit of the kind can add to the weighted sum.
        least = np.min(weights[:, :, None] * (static[:, None, :] + flying[:, :, None] * kept[:, None, :]), axis=1)
        return least @ self._counts

    def _evenly_cut_bytes(self, static: Array, kept: Array, waiting: Array) -> Array:
        ranks, _ = _even_counts(self._table.units, self._schedule, self._pp, self._virtual)
        worst = np.empty(len(self._layouts))
        shortened = self._layouts.each(
            lambda layout: self._schedule.rules.shortened(self._pp, layout.num_microbatches, MOST_ROUNDS),
            "num_microbatches",
        )
        for m in np.unique(shortened):
            members = np.flatnonzero(shortened == m)
            flying, waits = _flying_counts(self._table.units, self._schedule, self._pp, self._virtual, int(m))
            held = kept[members] @ flying.T + waiting[members] @ waits.T
            worst[members] = (static[members] @ ranks.T + held).max(axis=1)
        return worst


# Rounds of micro-batches after which a rank of several stages has seen its peak (warm-up is below two rounds a chunk).
MOST_ROUNDS = 3


@lru_cache(maxsize=4096)
def pipeline_coefficient(schedule: ScheduleName, num_ranks: int, num_microbatches: int) -> float:
    """c such that no cut makes a pipeline of one stage a rank shorter than c times W."""
    p, m = num_ranks, num_microbatches
    best = max(m / p, 1 / (1 - (1 - 1 / m) ** p))
    if schedule is ScheduleName.GPIPE:
        return max(best, (m + p - 1) / p)
    if m > p:
        # Weights l_r with 1 + sum_(i<r) l_i + l_r (m - p + r) = c for all r, scaled to sum 1.
        weights: list[float] = []
        for r in range(p):
            weights.append((1 - sum(weights)) / (m - p + r))
        if min(weights) >= 0:
            best = max(best, 1 + 1 / sum(weights))
    return best


@lru_cache(maxsize=1024)
def _even_counts(units: UnitRow, schedule: ScheduleName, num_ranks: int, virtual_stages: int) -> tuple[Array, Array]:
    """Units of each kind on each rank, and in the first stages of the ranks below it; [ranks, kinds]."""
    stages = _stage_counts(units, num_ranks * virtual_stages)
    ranks = _by_rank(stages, schedule, num_ranks)
    below = np.vstack([np.zeros((1, stages.shape[1])), np.cumsum(stages[: num_ranks - 1], axis=0)])
    return ranks, below


@lru_cache(maxsize=1024)
def _flying_counts(
    units: UnitRow, schedule: ScheduleName, num_ranks: int, virtual_stages: int, num_microbatches: int
) -> tuple[Array, Array]:
    """Units of each kind whose activations a rank holds when it holds most stages, and of those that wait for their
    weight gradients; [ranks, kinds] each.
    """
    stages = _stage_counts(units, num_ranks * virtual_stages)
    flying, waits = (
        _by_rank(stages * np.array(counts)[:, None], schedule, num_ranks)
        for counts in schedule.rules.in_flight_by_stage(num_ranks, virtual_stages, num_microbatches)
    )
    return flying, waits


def _by_rank(stages: Array, schedule: ScheduleName, num_ranks: int) -> Array:
    """Sums of the rows of ``stages`` over the stages of each rank."""
    ranks = np.zeros((num_ranks, stages.shape[1]))
    np.add.at(ranks, [schedule.rules.rank_of(stage, num_ranks) for stage in range(len(stages))], stages)
    return ranks


def _stage_counts(units: UnitRow, num_stages: int) -> Array:
    starts = even_starts(units.is_block, num_stages)
    ends = (*starts[1:], len(units.kinds))
    width = max(units.kinds) + 1
    return np.array(
        [np.bincount(units.kinds[a:b], minlength=width) for a, b in zip(starts, ends, strict=True)], dtype=np.float64
    )
