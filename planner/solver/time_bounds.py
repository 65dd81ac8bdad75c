"""Lower bounds of the time of layouts that are alike. The lines (1) to (4) and the symbols are of ``solver.bounds``."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import numpy as np

from costmodels.overlap import message_beside_s
from costmodels.vocabulary.action import Transfer
from costmodels.vocabulary.choices import Offload
from costmodels.vocabulary.mesh import ZERO_STAGES
from costmodels.vocabulary.terms import Element
from planner.evaluation.cuts import stage_sizes
from planner.evaluation.states import held_elements
from planner.evaluation.unit_times import UnitTimes, unit_times
from planner.layout.columns import Array, Positions
from planner.layout.short_rows import largest_of_each, least_of_each, running_sums
from planner.solver.glance import num_beside, pipeline_coefficient
from planner.solver.memory_bounds import AlikeMemory, NumMicroBatches
from planner.solver.of_table import UnitPasses, by_kind
from planner.solver.round_trips import round_trips
from planner.table.keys import SendKey, StateKey

_TRAINABLE, _FROZEN, _TIED, _EXPERT = range(len(Element))
_OPTIMIZER = 2  # on the last axis of the table's ``state_bytes``
_SHARDS_OPTIMIZER = np.array([stage.shards_optimizer for stage in ZERO_STAGES])


class AlikeLayouts(AlikeMemory):
    """Lower bounds of the time of layouts that are alike in what ``AlikeKey`` says, and of their memory."""

    def take(self, places: Positions) -> AlikeLayouts:
        """Some of the layouts."""
        return AlikeLayouts(*self._parts_of(places), is_at_peak=self._is_at_peak)

    @cached_property
    def _updated(self) -> Array:
        """Elements that one pipeline updates: those of one optimiser a pipeline rank, summed over the ranks."""
        whole = self._whole_elements
        divided = whole[:, _TRAINABLE] / self.rows.num_shards
        kept = held_elements(whole[:, _TRAINABLE], whole[:, _EXPERT], self.rows.expert_parts)
        return np.where(_SHARDS_OPTIMIZER[self.rows.zero_stage], divided, kept)

    @property
    def _whole_elements(self) -> Array:
        return self._of_table.whole_elements.take(self.rows.split, axis=0)

    def update_s(self) -> Array:
        """The optimiser step of a whole pipeline on its fastest device: some rank takes at least a p-th of it."""
        cluster, offload = self.table.cluster, self._key.offload
        if offload is not Offload.NONE:
            lines = [cluster.host(offload).update]
        else:
            lines = [cluster.devices[place].update for place in sorted(set(self.places))]
        times = [np.where(self._updated > 0, line.latency_s + self._updated * line.s_per_item, 0.0) for line in lines]
        return np.minimum.reduce(times)

    def host_share(self) -> Array:
        """What an average node keeps off its devices, as a share of what a node has. The fullest needs no less."""
        table, offload = self.table, self._key.offload
        if offload is Offload.NONE:
            return np.zeros(len(self.rows.work))
        cluster, host = table.cluster, table.cluster.host(offload)
        keys, which = self.layouts.by(StateKey)
        on_device = table.state_rows([key._replace(offload=Offload.NONE) for key in keys])[which]
        whole = self._whole_elements
        optimizer = np.einsum("le,le->l", by_kind(whole), table.state_bytes[on_device][..., _OPTIMIZER])
        devices_a_node = cluster.num_devices / -(-cluster.num_devices // cluster.devices_per_node)
        factor = devices_a_node / self.pp
        buffers = self._updated * (host.gradient_bytes + host.parameter_bytes)
        if offload is Offload.NVME:
            return np.maximum(factor * buffers / host.ram_bytes, factor * optimizer / host.nvme_bytes)
        return factor * (optimizer + buffers) / host.ram_bytes

    @cached_property
    def _lines(self) -> Array:
        """Latency and seconds a byte between each two ranks."""
        return self.table.send(SendKey(self._key.pp, self._key.groups))[: self._key.pp - 1]

    @cached_property
    def _sent_bytes(self) -> Array:
        return self._of_table.most_sent_bytes(tuple(self.modes)).take(self.rows.work)

    @cached_property
    def send_s(self) -> Array:
        """One send from the first rank to the next."""
        latency_s, s_per_byte = self._lines[0] if len(self._lines) else (0.0, 0.0)
        return latency_s + s_per_byte * self._sent_bytes

    @property
    def least_send_s(self) -> Array:
        """The shortest send between any two ranks that are neighbours, the last and the first among them."""
        lines = self.table.send(SendKey(self._key.pp, self._key.groups)) if self.is_over_groups else self._lines
        return np.min([latency_s + s_per_byte * self._sent_bytes for latency_s, s_per_byte in lines], axis=0)

    @property
    def hops_s(self) -> Array:
        """One send over each border between the first rank and each, [ranks, layouts]."""
        before = np.vstack([np.zeros((1, 2)), np.cumsum(self._lines, axis=0)])
        return before[:, :1] + before[:, 1:] * self._sent_bytes

    @property
    def links_s(self) -> Array:
        """What the busiest rank's link takes for all that it sends beside passes, one result after another."""
        transfer, rules = self.table.framework.transfer(self.schedule), self.schedule.rules
        if self.pp == 1 or rules.overlaps_steps or not transfer.receives_beside:
            return np.zeros_like(self.num_microbatches)
        # As many messages come to a rank as go from it.
        num_sent = num_beside(self.schedule, self.pp, self.virtual_stages, transfer).max() / 2
        return num_sent * self.num_microbatches * self.least_send_s * (1 - 1e-12)

    def step_time_s(self) -> Array:
        """The pipeline's bound, and the optimiser step of the average rank: the slowest rank's takes no less."""
        passes_s = self.unlike_s(recomputes=True) if self.is_over_groups else self._alike_s(self.recomputed_s)
        return np.maximum(passes_s, self.links_s) + self.once_s

    def without_recomputing_s(self) -> Array:
        """The same if no block recomputes what it need not."""
        if self.is_over_groups:
            return np.maximum(self.unlike_s(recomputes=False), self.links_s) + self.once_s
        return np.maximum(self._alike_s(np.zeros_like(self.num_microbatches)), self.links_s) + self.once_s

    @cached_property
    def once_s(self) -> Array:
        """The optimiser step of the average rank and its exposed data-parallel communication that comes once a step.

        What compute hides is a concave function of both that grows as they do, so all ranks hide no more than one that
        had all units would; the slowest rank takes no less than the average.
        """
        places = sorted(set(self.places))
        over_groups = self.is_over_groups
        data_s = self._of_table.data_once_s(self.rows, places) if over_groups else self.times.data_once_s
        return (self.update_s() + data_s) / self.pp

    def _alike_s(self, recomputed_s: Array) -> Array:
        """The pipeline's bound where all devices are alike, and so much is recomputed of one micro-batch."""
        total = self.work_s @ self.counts + recomputed_s + self.beside_s * self.num_beside.sum()
        if self.pp == 1:
            return self.num_microbatches * total
        if not self.schedule.rules.has_one_stage:
            return self._any_cut_s(total)
        p, m, send, receive = self.pp, self.num_microbatches, self.send_s, self.beside_s * self.num_beside.min()
        if self.is_on_demand:
            # A rank stands and waits for what it receives, as if its passes took longer and sends nothing.
            total, send, receive = total + 2 * send * (p - 1), np.zeros_like(send), receive + send
        coefficient = self.layouts.each(
            NumMicroBatches, lambda key: pipeline_coefficient(self.schedule, p, key.num_microbatches)
        )
        best = coefficient * total + 2 * send * (p - 1)
        blocks = np.ceil(self.counts / p)
        most = largest_of_each(self.work_s * blocks) + receive
        if self.schedule.rules.forwards_first:
            return np.maximum(best, total + (m - 1) * most + 2 * send * (p - 1))
        shortest = least_of_each(self.work_s) + receive
        whole = total + (m - p) * most + 2 * send * (p - 1)
        # Line (4) is least for the first rank or for the last.
        of_ends = [(whole + total + (rank - 1) * most) / (1 + rank / m) for rank in (0, p - 1)]
        whole = np.maximum(whole + (p - 1) * shortest, np.minimum(*of_ends))
        best = np.maximum(best, np.where(m > p, whole, m * most))
        for rank in sorted({p // 4, p // 2, 3 * p // 4} - {0}):
            best = np.maximum(best, self._rounds_s(total, send, rank))
        return best

    @property
    def is_on_demand(self) -> bool:
        """Whether results go from rank to rank on demand."""
        return self.table.framework.transfer(self.schedule) is Transfer.ON_DEMAND

    @cached_property
    def beside_s(self) -> Array:
        """What a message adds to a pass of a rank beside which it goes on, [layouts]; see ``Evaluator.beside_s``."""
        pass_s = self.times.forward_s @ self.counts / (self.pp * self.virtual_stages)
        slowdown = self.table.cluster.devices[0].message_slowdown
        return message_beside_s(self.send_s, pass_s, slowdown) * (1 - 1e-12)

    @cached_property
    def num_beside(self) -> Array:
        """So many messages go on beside the passes of each rank on one micro-batch; over unlike devices none count."""
        transfer = self.table.framework.transfer(self.schedule)
        found = num_beside(self.schedule, self.pp, self.virtual_stages, transfer)
        return found * (not self.is_over_groups)

    def unlike_s(self, *, recomputes: bool) -> Array:
        """The pipeline's bound where the devices of the ranks differ; with what blocks must recompute, or without."""
        p, m = self.pp, self.num_microbatches
        if not self.schedule.rules.has_one_stage:
            return self._several_s(recomputes=recomputes)
        if self.schedule.rules.forwards_first:
            return self._weighted_s(0.0, [m - 1] * p, recomputes=recomputes)
        least = self._weighted_s(-1.0, [m - 1] * p, recomputes=recomputes)
        steady = self._weighted_s(1.0, [np.maximum(m - p + rank, 1) for rank in range(p)], recomputes=recomputes)
        return np.where(m > p, np.maximum(least, steady), least)

    def _recomputed_over_groups_s(self, factors: Array) -> Array:
        """What blocks that must recompute add at least where a second of each rank adds ``factors``, [ranks, layouts].

        As ``recomputed_s``, but a second of a unit counts by the least that it adds on any rank.
        """
        found, (short, part) = np.zeros(len(self.num_microbatches)), self._short
        if part is not None:
            extra = np.full((len(self.modes), len(short), len(self.counts)), np.inf)
            for place, each in part._extra_of_places.items():
                least = np.min(factors[np.equal(self.places, place)], axis=0)
                np.minimum(extra, least[short, None] * each, out=extra)
            found[short] = part.least_extra(extra)
        return found

    @cached_property
    def _short(self) -> tuple[Positions, AlikeLayouts | None]:
        """The layouts some of whose blocks must recompute; nothing where blocks may also go to the host."""
        if len(self.modes) == 1 or self.offloads_activations:
            return np.zeros(0, dtype=np.intp), None
        short = np.flatnonzero(self.lacks_memory)
        return short, self.take(short) if len(short) else None

    @cached_property
    def _extra_of_places(self) -> dict[int, Array]:
        """``extra_s_on`` the devices of every rank."""
        return {place: self.extra_s_on(place) for place in set(self.places)}

    @cached_property
    def times_of_ranks(self) -> Sequence[UnitPasses | UnitTimes]:
        """Of units on each pipeline rank's own devices; once for all ranks where these are alike."""
        if not self.is_over_groups:
            return [self.times]
        found = {place: unit_times(self.table, self.rows, place) for place in set(self.places)}
        return [found[place] for place in self.places]

    @cached_property
    def work_of_ranks(self) -> list[Array]:
        """Both passes, for each of ``times_of_ranks``."""
        return [times.forward_s + times.backward_s for times in self.times_of_ranks]

    @property
    def slowness(self) -> Array:
        """About how much longer each rank takes for the whole model than the fastest, [ranks, layouts]."""
        whole_s = np.array(self.work_of_ranks) @ self.counts
        return np.round(whole_s / whole_s.min(axis=0), 2)

    def _several_s(self, *, recomputes: bool) -> Array:
        """Over unlike devices, of which each may hold several stages, or halves of backward passes apart.

        Each rank works so long and stands still for ``before_s``, and one micro-batch goes through all stages and back,
        but for gradients of weights, u. For weights q and l_r that together sum to 1,

            T >= q (sum_r u_r + 2 c (p-1)) + sum_r l_r (m w_r + before_r)

        Wherever a unit lies, it adds at least the least over r of its q u_r + m l_r w_r: near its best where that is
        alike for the whole model on all ranks. So q is 0 where m >= p, and else as large as it can be.
        Example: the units take 1 s on rank 0 and 2 s on rank 1. The weights l are 2/3 and 1/3, so each adds 4 * 2/3 s:
        T >= 16 s, as long as four units on rank 0 work, and two on rank 1.
        """
        p, m, rules = self.pp, self.num_microbatches, self.schedule.rules
        work = np.array(self.work_of_ranks)  # [ranks, layouts, kinds]
        weight = np.array([times.weight_s for times in self.times_of_ranks]) if rules.splits_backward else 0.0
        whole = work @ self.counts
        rates, slowest = (1 / whole).sum(axis=0), whole.max(axis=0)
        q = np.zeros(len(m)) if rules.overlaps_steps else np.where(m < p, m / (slowest * rates - (p - m)), 0.0)
        each = np.maximum(0.0, ((m * (1 - q) + p * q) / rates / whole - q) / m)
        each *= (1 - q) / np.maximum(each.sum(axis=0), 1e-300)
        least = (q[:, None] * (work - weight) + (m * each)[..., None] * work).min(axis=0) @ self.counts
        if recomputes:  # no schedule that splits backward passes does
            least += self._recomputed_over_groups_s(q + m * each)
        if rules.overlaps_steps:
            return least
        away = (work - weight).min(axis=0) @ self.counts
        return np.maximum(
            least + 2 * q * self.hops_s[-1] + (each * self.before_s.T).sum(axis=0), self._round_trips_s(away)
        )

    def _weighted_s(self, e: float, d: list[Array], *, recomputes: bool) -> Array:
        """A weighted mean of line (1), (2) or (3), from below over all cuts, and what sends take.

        For weights l_r that sum to 1, T >= sum_r l_r line_r = sum_i A_i w_i, with A_i = 1 + e S_i + d_i l_i and S_i =
        sum_(r<i) l_r. Line (1) has e = -1 and d_i = m - 1, line (2) e = 0 and d_i = m - 1, line (3) e = 1 and d_i =
        m - p + i. Wherever a unit lies, it adds at least the least of A_i times its seconds on rank i. Any weights give
        a bound; it is near its best where A_i times the whole model's seconds on rank i is the same for all ranks.
        Example, GPipe: the units take 1 s on rank 0 and 2 s on rank 1. The weights are 7/9 and 2/9, A = (10/3, 5/3), so
        each unit adds 10/3 s: T >= 20 s, which the cut into four and two units meets (8 + 3 * 4).
        """
        work = self.work_of_ranks
        whole = [each @ self.counts for each in work]
        # Let A_i * whole_i = t for all i. Then l_i, and so S_i, is linear in t, and that the weights sum to 1 gives t.
        slope, offset = np.zeros_like(self.num_microbatches), np.zeros_like(self.num_microbatches)
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
        recomputed = self._recomputed_over_groups_s(factors) if recomputes else 0.0
        return least @ self.counts + recomputed + 2 * self.hops_s[-1]

    def _any_cut_s(self, total: Array) -> Array:
        """The bound where ranks hold several stages, or halves of backward passes apart.

        Some rank works at least the mean, and at least as many units of one kind as some rank must hold; on the mean
        ranks work so long and stand still for ``before_s``; and one micro-batch goes through all stages and back, but
        for gradients of weights.
        Example: four stages of one or two units (six of 1 s), two on each of two ranks. Rank 1 waits for one unit:
        T >= 4 * 3 + (0 + 1) / 2 s.
        """
        p, m = self.pp, self.num_microbatches
        most = largest_of_each(self.work_s * np.ceil(self.counts / p))
        busiest = m * np.maximum(total / p, most)
        if self.schedule.rules.overlaps_steps:
            return busiest
        sent = self.work_s - self.times.weight_s if self.schedule.rules.splits_backward else self.work_s
        busiest = np.maximum(busiest, m * total / p + self.before_s.mean(axis=1))
        away = sent @ self.counts
        return np.maximum.reduce([busiest, away + 2 * self.send_s * (p - 1), self._round_trips_s(away)])

    def _round_trips_s(self, away_s: Array) -> Array:
        """The bound by what ranks of several stages have in flight; ``away_s``: one micro-batch in all stages."""
        hop_s = 2 * self.least_send_s
        first, whole, most = self.layouts.each(
            NumMicroBatches,
            lambda key: round_trips(self.schedule, self.pp, self.virtual_stages, key.num_microbatches),
        ).T
        least: Array = self.num_microbatches * np.maximum(whole * away_s + first * hop_s, most * hop_s)
        return least

    @cached_property
    def before_s(self) -> Array:
        """What the ranks before each take at least until the first micro-batch comes, and the last gradient is gone.

        [layouts, ranks]. Each of their first stages holds the least blocks that it may; where it may hold none, a unit.
        Where passes are split, weight gradients may come last, so the way back does not count.
        """
        splits, v, units = self.schedule.rules.splits_backward, self.virtual_stages, self.table.units
        blocks = sorted({kind for kind, is_block in zip(units.kinds, units.is_block, strict=True) if is_block})
        fewest = stage_sizes(units, self.pp * v, are_alike=self.has_alike_stages).least
        works = [times.forward_s if splits else times.forward_s + times.backward_s for times in self.times_of_ranks]
        each = [fewest * least_of_each(work[:, blocks]) if fewest else least_of_each(work) for work in works]
        stages = np.stack(each if self.is_over_groups else each * self.pp, axis=1)
        stages[:, 0] = works[0][:, units.kinds[0]]
        return running_sums(stages) - stages + (1 if splits else 2) * self.hops_s.T

    def _rounds_s(self, total: Array, send: Array, rank: int) -> Array:
        """The bound by the rounds of micro-batches that 1F1B holds at rank r.

        With x = sum_(i<r) w_i and q = floor((m - 1) / (p - r)) + 1 rounds, one micro-batch of each round goes through
        all ranks from r on before the next round can: T >= x + 2 c r + q (W - x + 2 c (p-1-r)). The ranks before r work
        m times x / r on average: T >= m x / r. The first line falls with x and the second rises, so the larger of
        them is least where they meet.
        Example, r = 1: q = 4, T >= x + 4 (6 - x) and T >= 4 x meet at x = 24 / 7: T >= 13.7 s.
        """
        p, m = self.pp, self.num_microbatches
        rounds = np.floor((m - 1) / (p - rank)) + 1
        way = 2 * send * (p - 1 - rank)
        below = (rounds * (total + way) + 2 * send * rank) / (m / rank + rounds - 1)
        return np.where(below <= total, m * below / rank, total + 2 * send * rank + rounds * way)
