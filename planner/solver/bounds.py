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

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple

import numpy as np

from costmodels.vocabulary.mesh import ZERO_STAGES
from costmodels.vocabulary.schedules import ScheduleName
from costmodels.vocabulary.terms import Element, Holding
from planner.evaluation.cuts import even_starts
from planner.evaluation.evaluator import device_places
from planner.evaluation.rank_memory import reserve_fraction
from planner.evaluation.states import held_elements
from planner.evaluation.unit_times import LayoutRows, unit_times
from planner.layout.columns import Array, Columns
from planner.layout.layout import Layout
from planner.parallelism import Offload
from planner.table.cost_table import CostTable
from planner.table.facts import UnitRow
from planner.table.keys import SendKey, StateKey

CHUNK = 20_000
_TRAINABLE, _FROZEN, _TIED, _EXPERT = range(len(Element))
_PARAMETERS, _GRADIENTS, _OPTIMIZER = range(3)  # of the last axis of the table's ``state_bytes``
_HOLDINGS = {holding: place for place, holding in enumerate(Holding)}
_SHARDS_OPTIMIZER = np.array([stage.shards_optimizer for stage in ZERO_STAGES])


@dataclass(frozen=True)
class Bounds:
    """Lower bounds of each layout, in the order of the layouts given."""

    step_time_s: Array
    memory_bytes: Array
    host_share: Array  # of a node's own memory; 0 where nothing is offloaded


class _AlikeKey(NamedTuple):
    """Layouts whose pipelines have one shape are bounded together."""

    schedule: ScheduleName
    pp: int
    virtual_stages: int
    offload: Offload
    groups: tuple[str, ...]


class _MicroBatches(NamedTuple):
    num_microbatches: int


def bounds(table: CostTable, layouts: Sequence[Layout]) -> Bounds:
    """Bounds of every layout."""
    found = Bounds(*(np.zeros(len(layouts)) for _ in range(3)))
    listed = Columns.of(Layout, layouts)
    if not layouts:
        return found
    rows = LayoutRows.of(table, listed)
    keys, alike = listed.by(_AlikeKey)
    for key, members in zip(
        keys, np.split(np.argsort(alike, kind="stable"), np.cumsum(np.bincount(alike))[:-1]), strict=True
    ):
        for start in range(0, len(members), CHUNK):
            part = members[start : start + CHUNK]
            group = _Group(table, key, listed.take(part), rows.take(part))
            found.step_time_s[part] = group.step_time_s()
            found.memory_bytes[part] = group.memory_bytes()
            found.host_share[part] = group.host_share()
    return found


class _Group:
    """Layouts of one schedule, pipeline degree, number of virtual stages, place of states and order of groups.

    Arrays are [layouts, kinds] or fewer.
    """

    def __init__(self, table: CostTable, key: _AlikeKey, layouts: Columns[Layout], rows: LayoutRows) -> None:
        self._table, self._key, self._layouts, self._rows = table, key, layouts, rows
        self._schedule, self._pp, self._virtual = key.schedule, key.pp, key.virtual_stages
        self._m = rows.num_microbatches
        self._counts = table.counts
        self._times = unit_times(table, rows, 0)
        self._work = self._times.forward_s + self._times.backward_s
        self._held = table.num_bytes[rows.work, rows.mode]  # [layouts, kinds, Holding]
        self._places = device_places(table, layouts[0])
        # Memory of each rank's device over that of the smallest: what a rank holds counts by its share of its device.
        memory = [table.cluster.devices[place].memory_bytes for place in self._places]
        self._room = np.array(memory) / table.cluster.devices[0].memory_bytes
        lines = table.send(SendKey(key.pp, key.groups))
        num_bytes = self._held[..., _HOLDINGS[Holding.BOUNDARY]].max(axis=1)
        latency_s, s_per_byte = lines[0] if len(lines) else (0.0, 0.0)
        self._send = latency_s + s_per_byte * num_bytes
        self._way = lines[:, 0].sum() + lines[:, 1].sum() * num_bytes

    @cached_property
    def _elements(self) -> Array:
        """Parameters of each kind on one tensor-parallel rank, [layouts, kinds, Element]."""
        return self._table.elements[self._rows.split]

    @cached_property
    def _updated(self) -> Array:
        """Elements that the optimisers of all pipeline ranks together update, one of each."""
        whole = np.einsum("lke,k->le", self._elements, self._counts)
        divided = whole[:, _TRAINABLE] / self._rows.num_shards
        kept = held_elements(whole[:, _TRAINABLE], whole[:, _EXPERT], self._rows.ep)
        return np.where(_SHARDS_OPTIMIZER[self._rows.zero_stage], divided, kept)

    def _update_s(self) -> Array:
        """The optimiser step of all pipeline ranks together, on the fastest devices."""
        cluster, offload = self._table.cluster, self._key.offload
        if offload is not Offload.NONE:
            lines = [cluster.host(offload).update]
        else:
            lines = [cluster.devices[place].update for place in sorted(set(self._places))]
        times = [np.where(self._updated > 0, line.latency_s + self._updated * line.s_per_item, 0.0) for line in lines]
        return np.minimum.reduce(times)

    def host_share(self) -> Array:
        """What the mean node keeps off its devices, as a share of what it has."""
        table, offload = self._table, self._key.offload
        if offload is Offload.NONE:
            return np.zeros(len(self._rows.work))
        cluster, host = table.cluster, table.cluster.host(offload)
        keys, which = self._layouts.by(StateKey)
        on_device = table.state_rows([key._replace(offload=Offload.NONE) for key in keys])[which]
        whole = np.einsum("lke,k->le", self._elements, self._counts)
        optimizer = np.einsum("le,le->l", _by_kind(whole), table.state_bytes[on_device][..., _OPTIMIZER])
        devices_a_node = cluster.num_devices / -(-cluster.num_devices // cluster.devices_per_node)
        factor = devices_a_node / self._pp
        buffers = self._updated * (host.gradient_bytes + host.parameter_bytes)
        if offload is Offload.NVME:
            return np.maximum(factor * buffers / host.ram_bytes, factor * optimizer / host.nvme_bytes)
        return factor * (optimizer + buffers) / host.ram_bytes

    # -- time ---------------------------------------------------------------------------------

    def step_time_s(self) -> Array:
        """Pipeline, plus what comes once a step on the mean rank."""
        return self._pipeline_s() + self._update_s() / self._pp

    def _pipeline_s(self) -> Array:
        total = self._work @ self._counts
        if self._pp == 1:
            return self._m * total
        if not self._schedule.rules.has_one_stage:
            return self._evenly_cut_s()
        if self._key.groups:
            return self._unlike_s()
        p, m, send = self._pp, self._m, self._send
        coefficient = self._layouts.each(
            _MicroBatches, lambda key: pipeline_coefficient(self._schedule, p, key.num_microbatches)
        )
        best = coefficient * total + 2 * send * (p - 1)
        blocks = np.ceil(self._counts / p)
        most = (self._work * blocks).max(axis=1)
        if self._schedule.rules.forwards_first:
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
        if self._schedule.rules.forwards_first:
            return self._weighted_s(0.0, [m - 1] * p)
        least = self._weighted_s(-1.0, [m - 1] * p)
        steady = self._weighted_s(1.0, [np.maximum(m - p + rank, 1) for rank in range(p)])
        return np.where(m > p, np.maximum(least, steady), least)

    @cached_property
    def _work_of_ranks(self) -> list[Array]:
        """``_work`` on each pipeline rank's own devices."""
        found: dict[int, Array] = {}
        for place in set(self._places):
            times = unit_times(self._table, self._rows, place)
            found[place] = times.forward_s + times.backward_s
        return [found[place] for place in self._places]

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
        if self._schedule.rules.overlaps_steps:
            return (m * (self._work @ ranks.T)).max(axis=1)
        sent = self._work - self._times.weight_s
        whole = self._times.forward_s @ below.T + hops + m * (self._work @ ranks.T)
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
        kept = self._held[..., _HOLDINGS[Holding.KEPT]]
        working = self._held[..., _HOLDINGS[Holding.WORKING]].min(axis=1)
        reserve = 1 + reserve_fraction(self._table, self._rows.mixes_lifetimes)
        if self._schedule.rules.has_one_stage:
            tensors = self._weighted_bytes(self._static_bytes(), kept * reserve[:, None])
        else:
            waiting = self._held[..., _HOLDINGS[Holding.WAITING]] * reserve[:, None]
            tensors = self._evenly_cut_bytes(self._static_bytes(), kept * reserve[:, None], waiting)
        return tensors + (working * reserve + self._table.cluster.software.context_bytes) / self._room.max()

    def _static_bytes(self) -> Array:
        """States of each unit kind when backward begins."""
        state = self._table.state_bytes[self._rows.state]  # [layouts, KindOfElement, ...]
        holds_gradients = (self._m > 1) | self._table.framework.keeps_gradients
        each = state[..., _PARAMETERS] + state[..., _OPTIMIZER]
        each = each + np.where(holds_gradients[:, None], state[..., _GRADIENTS], 0.0)
        return np.einsum("lke,le->lk", _by_kind(self._elements), each)

    def _weighted_bytes(self, static: Array, kept: Array) -> Array:
        if self._schedule.rules.forwards_first and self._pp > 1:
            flying = np.repeat(self._m[:, None], self._pp, axis=1)
        else:
            flying = self._layouts.each(
                _MicroBatches, lambda key: self._schedule.rules.in_flight(self._pp, key.num_microbatches)
            )
        states, activations = static @ self._counts, kept @ self._counts
        weights = self._room / (states[:, None] + flying * activations[:, None])
        weights /= weights.sum(axis=1, keepdims=True) * self._room
        # [layouts, kinds]: the least that a unit of the kind can add to the weighted sum.
        least = np.min(weights[:, :, None] * (static[:, None, :] + flying[:, :, None] * kept[:, None, :]), axis=1)
        return least @ self._counts

    def _evenly_cut_bytes(self, static: Array, kept: Array, waiting: Array) -> Array:
        rules = self._schedule.rules
        ranks, _ = _even_counts(self._table.units, self._schedule, self._pp, self._virtual)
        worst = np.empty(len(self._layouts))
        shortened = self._layouts.each(
            _MicroBatches, lambda key: rules.shortened_to_peak(self._pp, key.num_microbatches, MOST_ROUNDS)
        )
        for m in np.unique(shortened):
            members = np.flatnonzero(shortened == m)
            flying, waits = _flying_counts(self._table.units, self._schedule, self._pp, self._virtual, int(m))
            held = kept[members] @ flying.T + waiting[members] @ waits.T
            worst[members] = (static[members] @ ranks.T + held).max(axis=1)
        return worst


def _by_kind(elements: Array) -> Array:
    """[..., KindOfElement] of [..., Element]."""
    dense = elements[..., _TRAINABLE] - elements[..., _EXPERT]
    return np.stack([dense, elements[..., _FROZEN], elements[..., _EXPERT]], axis=-1)


# Rounds of micro-batches after which a rank of several stages has seen its peak (warm-up is below two rounds a chunk).
MOST_ROUNDS = 3


@lru_cache(maxsize=4096)
def pipeline_coefficient(schedule: ScheduleName, num_ranks: int, num_microbatches: int) -> float:
    """c such that no cut makes a pipeline of one stage a rank shorter than c times W."""
    p, m = num_ranks, num_microbatches
    best = max(m / p, 1 / (1 - (1 - 1 / m) ** p))
    if schedule.rules.forwards_first:
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
