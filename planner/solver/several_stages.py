"""A closer lower bound of one layout whose ranks hold several stages, or halves of backward passes apart.

The larger of two: the longest paths of its schedule, over all ways to spread the work over the stages, and the loads of
its ranks in whole blocks, with what they must recompute to fit. ``bounds`` leaves it out: it takes milliseconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property

import numpy as np

from costmodels.ledger import MemoryLedger
from costmodels.pipeline_paths import coefficients
from costmodels.vocabulary.terms import PLACE, Holding
from planner.evaluation.block_modes import held_bytes
from planner.evaluation.cuts import stage_sizes
from planner.evaluation.rank_memory import RankMemoryModel
from planner.evaluation.unit_times import LayoutRows, unit_times
from planner.layout.columns import Array, Columns
from planner.layout.layout import Layout
from planner.solver.bounds import AlikeLayouts
from planner.solver.memory_bounds import MOST_ROUNDS, AlikeKey, flying_by_stage
from planner.table.cost_table import CostTable


def bound_of_several_s(table: CostTable, layout: Layout, enough_s: float) -> float:
    """Seconds that no cut of ``layout`` undercuts; above ``enough_s`` more need not be known."""
    bound = _SeveralStages(table, layout)
    loads_s = bound.loads_s()
    return loads_s if loads_s >= enough_s else max(loads_s, bound.path_s())


class _SeveralStages:
    """One layout. Blocks of several kinds have no bound of loads."""

    def __init__(self, table: CostTable, layout: Layout) -> None:
        listed = Columns.of(Layout, [layout])
        keys, _ = listed.by(AlikeKey)
        self._of = AlikeLayouts(table, keys[0], listed, LayoutRows.of(table, listed))

    @cached_property
    def _block(self) -> int | None:
        """The kind of all blocks; None where they differ."""
        units = self._of.table.units
        kinds = {kind for kind, is_block in zip(units.kinds, units.is_block, strict=True) if is_block}
        return kinds.pop() if len(kinds) == 1 else None

    def path_s(self) -> float:
        """What the longest paths of the schedule take (``costmodels.pipeline_paths``)."""
        paths = coefficients(self._of.schedule, self._of.pp, self._of.virtual_stages, int(self._of.num_microbatches[0]))
        times = self._of.times
        weight_s = times.weight_s if self._of.schedule.rules.splits_backward else np.zeros_like(times.weight_s)
        units = paths.least(times.forward_s[0], times.backward_s[0] - weight_s[0], weight_s[0]) @ self._of.counts
        recomputed = min(paths.forward, paths.backward) * self._extra_of_ranks_s()
        return float(units + recomputed + paths.sends * self._of.send_s[0] + self._of.update_s()[0] / self._of.pp)

    def loads_s(self) -> float:
        """However the blocks are dealt out, some rank takes so long.

        A rank with n blocks takes m times their seconds, with what they must recompute so that it may fit, after the
        first micro-batch has come through the first stages of the ranks before it. The least step that is long enough
        for all ranks to take all blocks is the bound.
        Example: seven blocks of 1 s on two ranks, four micro-batches, and a head of 1.5 s: 5 and 2 blocks take 20 s, 4
        and 3 take 18 s: T >= 18 s, where the mean says 17 s.
        """
        units = self._of.table.units
        if self._block is None or self._of.schedule.rules.overlaps_steps:
            return 0.0
        ranks = [self._load_of_rank_s(rank, self._block) for rank in range(self._of.pp)]
        candidates = np.unique(np.concatenate([costs for _, costs in ranks]))
        low, high = 0, len(candidates) - 1
        if high < 0 or self._dealt(ranks, candidates[-1]) < sum(units.is_block):
            return float("inf")
        while low < high:
            middle = (low + high) // 2
            enough = self._dealt(ranks, candidates[middle]) >= sum(units.is_block)
            low, high = (low, middle) if enough else (middle + 1, high)
        return float(candidates[low] * (1 - 1e-12) + self._of.update_s()[0] / self._of.pp)

    def _extra_of_ranks_s(self) -> float:
        """What all ranks must at least recompute of one micro-batch, however the blocks are dealt out.

        What a rank recomputes rises ever faster with its blocks, so that the cheapest next blocks are dealt first.
        """
        ranks = self._extra_of_each_rank
        if self._block is None or len(self._of.modes) == 1:
            return 0.0
        left = sum(self._of.table.units.is_block) - sum(fewest for fewest, _ in ranks)
        more = np.sort(np.concatenate([np.diff(extra[np.isfinite(extra)]) for _, extra in ranks]))
        if left > len(more) or not all(np.isfinite(extra[0]) for _, extra in ranks):
            return float("inf")
        return float(sum(extra[0] for _, extra in ranks) + more[: max(0, left)].sum())

    @staticmethod
    def _dealt(ranks: Sequence[tuple[int, Array]], limit_s: float) -> float:
        """The most blocks that ranks take within a time; less than nothing where one cannot take its least."""
        held = [fewest + int(np.searchsorted(costs, limit_s, side="right")) - 1 for fewest, costs in ranks]
        can = all(len(costs) and costs[0] <= limit_s for _, costs in ranks)
        return sum(held) if can else -np.inf

    def _load_of_rank_s(self, rank: int, kind: int) -> tuple[int, Array]:
        """The fewest blocks that a rank holds, and the seconds that it takes with so many, one more, and so on."""
        fewest, extra_s = self._extra_of_each_rank[rank]
        numbers = fewest + np.arange(len(extra_s))
        own = self._of.work_s[0, self._ends_of(rank)].sum() + numbers * self._of.work_s[0, kind] + extra_s
        sizes = stage_sizes(sum(self._of.table.units.is_block), self._of.pp * self._of.virtual_stages)
        costs = float(self._of.num_microbatches[0]) * own + self._before_s(rank, kind, sizes.least)
        return fewest, costs[np.isfinite(costs)]

    def _ends_of(self, rank: int) -> list[int]:
        """Kinds of the first and the last unit of the model, as far as they are no blocks and lie on this rank."""
        units, rules = self._of.table.units, self._of.schedule.rules
        ends = ((0, 0), (-1, self._of.pp * self._of.virtual_stages - 1))
        return [
            units.kinds[unit]
            for unit, stage in ends
            if rules.rank_of(stage, self._of.pp) == rank and not units.is_block[unit]
        ]

    @cached_property
    def _extra_of_each_rank(self) -> list[tuple[int, Array]]:
        kind = self._block
        return [] if kind is None else [self._extra_of_rank(rank, kind) for rank in range(self._of.pp)]

    def _extra_of_rank(self, rank: int, kind: int) -> tuple[int, Array]:
        """The fewest blocks of a rank; what so many, one more, and so on must at least recompute so that they may fit.

        Where blocks may go to the host either none does, or they do in one way, for which the rank has buffers.
        """
        num_modes, ways = len(self._of.modes), self._of.buffers if self._of.offloads_activations else {}
        here = list(range(num_modes - len(ways)))
        found = [self._extra_of_mix((rank, kind), here, 0.0)]
        found += [self._extra_of_mix((rank, kind), [*here, way], float(more[0])) for way, more in ways.items()]
        return found[0][0], np.min([extra for _, extra in found], axis=0)

    def _extra_of_mix(self, where: tuple[int, int], modes: Sequence[int], more_bytes: float) -> tuple[int, Array]:
        """The same on a rank, of a kind, with blocks in some ``modes`` alone and ``more_bytes`` taken besides.

        Seconds of one micro-batch. For any price of a byte: a block in stage s costs the least over all modes of its
        seconds and the price of what it keeps there; the blocks go where that is least; and what the device has is paid
        back. So much is recomputed at least, whatever the price; those at which a mode becomes worth it are tried.
        """
        rank, kind = where
        units, p, num_stages = self._of.table.units, self._of.pp, self._of.pp * self._of.virtual_stages
        rules, held = self._of.schedule.rules, self._held_of_modes[modes, kind]
        extra_s = self._extra_s_of_modes[modes, kind]
        sizes = stage_sizes(sum(units.is_block), num_stages)
        shortened = rules.shortened_to_peak(p, int(self._of.num_microbatches[0]), MOST_ROUNDS)
        flying, waits = flying_by_stage(self._of.schedule, p, self._of.virtual_stages, shortened)
        stages = [stage for stage in range(num_stages) if rules.rank_of(stage, p) == rank]
        least = np.array([sizes.least if 0 < stage < num_stages - 1 else 0 for stage in stages])
        kept = np.outer(held[:, PLACE[Holding.KEPT]], flying[stages])
        kept = (kept + np.outer(held[:, PLACE[Holding.WAITING]], waits[stages])) * self._of.reserve[0]
        static = self._of.static_bytes[0]
        room = self._of.table.cluster.devices[0].memory_bytes - self._beside_blocks - more_bytes
        room -= static[self._ends_of(rank)].sum()
        prices = self._prices(kept, extra_s)
        # Of a block in each stage at each price, with its own states; [prices, stages].
        each = np.min(extra_s[None, :, None] + prices[:, None, None] * kept[None], axis=1)
        each = each + prices[:, None] * static[kind]
        more = np.sort(np.repeat(each, sizes.most - least, axis=1), axis=1)
        held_s = np.concatenate([np.zeros((len(prices), 1)), np.cumsum(more, axis=1)], axis=1)
        total = (each @ least)[:, None] + held_s - (prices * room)[:, None]
        smallest = (kept.min(axis=0) @ least) + np.concatenate(
            ([0.0], np.cumsum(np.sort(np.repeat(kept.min(axis=0), sizes.most - least))))
        )
        numbers = int(least.sum()) + np.arange(total.shape[1])
        fits = smallest + numbers * static[kind] <= room * (1 + 1e-12)
        return int(least.sum()), np.where(fits, np.maximum(0.0, total.max(axis=0)), np.inf)

    @cached_property
    def _beside_blocks(self) -> float:
        """What every rank needs besides states and kept activations while a block is at work.

        Where ranks hold several stages each has one that ends with a block, behind which nothing has been freed yet.
        """
        layout, table = self._of.layouts[0], self._of.table
        model = RankMemoryModel(table, layout, LayoutRows.of_one(table, layout), [0] * len(table.units.kinds))
        outside = MemoryLedger().with_reserve(model.software, model.num_communicators).total_bytes
        kind = self._block
        if kind is None or self._of.virtual_stages == 1:
            return outside
        held = self._held_of_modes[:, kind]
        passing = (held[:, PLACE[Holding.WORKING]] + held[:, PLACE[Holding.BUFFER]]).min() + model.gathered_bytes(kind)
        return outside + float(passing * self._of.reserve[0] + held[:, PLACE[Holding.STRANDED]].min())

    @staticmethod
    def _prices(kept: Array, extra: Array) -> Array:
        """Seconds a byte at which one mode becomes as good as another in some stage; ``kept``: [modes, stages]."""
        kept = np.unique(kept, axis=1)
        found = {0.0}
        for a in range(len(extra)):
            for b in range(len(extra)):
                saved = kept[a] - kept[b]
                found.update(((extra[b] - extra[a]) / saved[saved > 0]).tolist() if extra[b] > extra[a] else ())
        return np.array(sorted(found))

    @cached_property
    def _extra_s_of_modes(self) -> Array:
        """Seconds of one micro-batch that a unit takes more in each mode, [modes, kinds]."""
        rows = replace(
            self._of.rows, work=np.repeat(self._of.rows.work, len(self._of.modes)), mode=np.array(self._of.modes)
        )
        times = unit_times(self._of.table, rows, 0)
        work = times.forward_s + times.backward_s
        return np.maximum(0.0, work - work[0])

    def _before_s(self, rank: int, kind: int, fewest: int) -> float:
        """What the ranks before take at least until the first micro-batch has come, and the last gradient gone."""
        work = self._of.times.forward_s[0] if self._of.schedule.rules.splits_backward else self._of.work_s[0]
        ways = 1 if self._of.schedule.rules.splits_backward else 2
        stages = [work[self._of.table.units.kinds[0]]] + [max(1, fewest) * work[kind]] * (rank - 1)
        return sum(stages[:rank]) + ways * rank * float(self._of.send_s[0])

    @cached_property
    def _held_of_modes(self) -> Array:
        """What a unit holds of one micro-batch, [modes, kinds, Holding]."""
        return held_bytes(self._of.table, self._of.rows.work[:1], np.array(self._of.modes))
