"""A closer lower bound of one layout over a pipeline of like devices.

The loads of its ranks in whole blocks, with what they must recompute to fit; and where ranks hold several stages, or
halves of backward passes apart, the longest paths of the schedule, over all ways to spread the work over the stages.
``bounds`` leaves both out: they take milliseconds.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property
from itertools import permutations, product
from typing import NamedTuple

import numpy as np

from costmodels.ledger import MemoryLedger
from costmodels.pipeline_paths import coefficients
from costmodels.vocabulary.terms import PLACE, Holding
from planner.evaluation.block_modes import MODES, held_bytes
from planner.evaluation.cuts import StageSizes, stage_sizes
from planner.evaluation.rank_memory import RankMemoryModel
from planner.evaluation.unit_times import LayoutRows, unit_times
from planner.layout.columns import Array, Columns, Positions, key_of
from planner.layout.layout import Layout
from planner.solver.bounds import AlikeLayouts
from planner.solver.memory_bounds import MOST_ROUNDS, AlikeKey, flying_by_stage
from planner.table.cost_table import CostTable


class CloserBounds:
    """Of layouts with the prices of one table; ``number``: how many were bounded closely."""

    def __init__(self, table: CostTable) -> None:
        self._table, self.number = table, 0
        self._passing_bytes: dict[tuple[object, ...], float] = {}

    def of(self, one: Columns[Layout], enough_s: float = np.inf) -> float:
        """Seconds that no cut of the only layout of ``one`` undercuts; above ``enough_s`` more need not be known.

        0 where it has no pipeline, or one over unlike devices, of which no more is known than ``bounds`` says.
        """
        layout = one[0]
        if layout.mesh.pp == 1 or layout.groups:
            return 0.0
        self.number += 1
        bound = _Pipeline(self._table, one, self._passing_bytes)
        loads_s = bound.loads_s()
        if layout.schedule.rules.has_one_stage or loads_s >= enough_s:
            return loads_s
        return max(loads_s, bound.path_s())


class _End(NamedTuple):
    """One end of the model."""

    kind: int
    stage: int
    rank: int


class _Pipeline:
    """One layout. Blocks of several kinds have no bound of loads."""

    def __init__(self, table: CostTable, one: Columns[Layout], passing_bytes: dict[tuple[object, ...], float]) -> None:
        """``passing_bytes``: what is known of this and of other layouts with the same prices."""
        self._known_bytes, layout = passing_bytes, one[0]
        self._rows_of_modes = rows = LayoutRows.of_one(table, layout)
        first = np.zeros(1, dtype=np.intp)
        rows = replace(
            rows, work=rows.work[:1], mode=first if layout.recompute is None else first + MODES[layout.recompute]
        )
        self._of = AlikeLayouts(table, key_of(AlikeKey, layout), one, rows)

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
        return float(units + recomputed + paths.sends * self._of.send_s[0] + self._of.once_s()[0])

    def loads_s(self) -> float:
        """However the blocks are dealt out, some rank takes so long.

        A rank with n blocks takes m times their seconds, with what they must recompute so that it may fit, after the
        first micro-batch has come through the first stages of the ranks before it; with one stage a rank, longer
        (``_waiting_s``). The least step that is long enough for all ranks to take all blocks is the bound.
        Example: seven blocks of 1 s on two ranks, four micro-batches, and a head of 1.5 s: 5 and 2 blocks take 20 s, 4
        and 3 take 18 s: T >= 18 s, where the mean says 17 s.
        """
        units = self._of.table.units
        if self._block is None or self._of.schedule.rules.overlaps_steps:
            return 0.0
        fewest, extra_s = self._extra_of_each_rank
        costs = self._loads_of_ranks_s(self._block, fewest, extra_s)
        candidates = np.unique(costs[np.isfinite(costs)])
        low, high = 0, len(candidates) - 1
        if high < 0 or self._dealt(fewest, costs, candidates[-1]) < sum(units.is_block):
            return float("inf")
        while low < high:
            middle = (low + high) // 2
            enough = self._dealt(fewest, costs, candidates[middle]) >= sum(units.is_block)
            low, high = (low, middle) if enough else (middle + 1, high)
        return float(candidates[low] * (1 - 1e-12) + self._of.once_s()[0])

    def _extra_of_ranks_s(self) -> float:
        """What all ranks must at least recompute of one micro-batch, however the blocks are dealt out.

        What a rank recomputes rises ever faster with its blocks, so that the cheapest next blocks are dealt first.
        """
        if self._block is None or len(self._of.modes) == 1:
            return 0.0
        fewest, extra_s = self._extra_of_each_rank
        left = sum(self._of.table.units.is_block) - int(fewest.sum())
        with np.errstate(invalid="ignore"):
            steps = np.diff(extra_s, axis=1)
        more = np.sort(steps[np.isfinite(steps)])
        if left > len(more) or not np.isfinite(extra_s[:, 0]).all():
            return float("inf")
        return float(extra_s[:, 0].sum() + more[: max(0, left)].sum())

    @staticmethod
    def _dealt(fewest: Positions, costs: Array, limit_s: float) -> float:
        """The most blocks that ranks take within a time; less than nothing where one cannot take its least."""
        if not (costs[:, 0] <= limit_s).all():
            return -np.inf
        return float((fewest + (costs <= limit_s).sum(axis=1) - 1).sum())

    def _loads_of_ranks_s(self, kind: int, fewest: Positions, extra_s: Array) -> Array:
        """The seconds that each rank takes with its fewest blocks, one more, and so on, [ranks, numbers]."""
        own = fewest[:, None] + np.arange(extra_s.shape[1])
        ends = np.zeros(self._of.pp)
        for end in self._ends:
            ends[end.rank] += self._of.work_s[0, end.kind]
        seconds = ends[:, None] + own * self._of.work_s[0, kind] + extra_s
        whole_s = float(self._of.num_microbatches[0]) * seconds + self._before_s(kind)[:, None]
        return np.maximum(whole_s, self._waiting_s(seconds)) if self._of.schedule.rules.has_one_stage else whole_s

    def _waiting_s(self, seconds: Array) -> Array:
        """Lines (2) and (3) of ``bounds`` for ranks that work so long on one micro-batch, [ranks, numbers]."""
        p, m = self._of.pp, int(self._of.num_microbatches[0])
        total_s = float(self._of.work_s[0] @ self._of.counts) + self._extra_of_ranks_s()
        ways_s = 2 * float(self._of.send_s[0]) * (p - 1)
        if self._of.schedule.rules.forwards_first:
            return np.where(
                np.isfinite(seconds), total_s + (m - 1) * np.nan_to_num(seconds, posinf=0.0) + ways_s, np.inf
            )
        if m <= p:
            return np.zeros_like(seconds)
        behind = np.arange(p - 1, -1, -1)[:, None]
        return total_s + (m - 1 - behind) * seconds + behind * self._least_work_s + ways_s

    @property
    def _least_work_s(self) -> float:
        """Of a rank that holds one unit."""
        return float(self._of.work_s[0].min())

    @cached_property
    def _ends(self) -> tuple[_End, ...]:
        """The first and the last unit of the model, as far as they are no blocks."""
        units, num_stages = self._of.table.units, self._of.pp * self._of.virtual_stages
        rank_of = self._of.schedule.rules.rank_of
        return tuple(
            _End(units.kinds[unit], stage, rank_of(stage, self._of.pp))
            for unit, stage in ((0, 0), (-1, num_stages - 1))
            if not units.is_block[unit]
        )

    @cached_property
    def _sizes(self) -> StageSizes:
        """Blocks that a stage may hold; a rank's only stage may hold any number, and units alone that are no blocks."""
        num_blocks = sum(self._of.table.units.is_block)
        if self._of.schedule.rules.has_one_stage:
            return StageSizes(0, num_blocks)
        return stage_sizes(num_blocks, self._of.pp * self._of.virtual_stages)

    @cached_property
    def _extra_of_each_rank(self) -> tuple[Positions, Array]:
        """The fewest blocks of each rank; what so many, one more, and so on must at least recompute so that they fit.

        Seconds of one micro-batch, [ranks, numbers]; infinite where so many do not fit. Where blocks may go to the host
        either none does, or they do in one way, for which the rank has buffers.
        """
        num_modes, ways = len(self._of.modes), self._of.buffers if self._of.offloads_activations else {}
        here = list(range(num_modes - len(ways)))
        fewest, extra_s = self._extra_of_mix(here, 0.0)
        mixes = [self._extra_of_mix([*here, way], float(more[0]))[1] for way, more in ways.items()]
        return fewest, np.min([extra_s, *mixes], axis=0)

    def _extra_of_mix(self, modes: list[int], more_bytes: float) -> tuple[Positions, Array]:
        """The same with blocks in some ``modes`` alone, and ``more_bytes`` taken besides.

        For any price of a byte: a block in stage s costs the least over all modes of its seconds and the price of what
        it keeps there; the blocks go where that is least; and what the device has is paid back. So much is recomputed
        at least, whatever the price; those at which a mode becomes worth it are tried.
        """
        kind, p, num_stages = self._block, self._of.pp, self._of.pp * self._of.virtual_stages
        assert kind is not None
        rules, held = self._of.schedule.rules, self._held_of_modes[modes, kind]
        extra_s = self._extra_s_of_modes[modes, kind][:, None, None, None]
        least = np.array([self._sizes.least if 0 < stage < num_stages - 1 else 0 for stage in range(num_stages)])
        ranks = np.array([rules.rank_of(stage, p) for stage in range(num_stages)])
        of_rank = np.argsort(ranks, kind="stable").reshape(p, -1)  # [ranks, stages of one]
        flying, waits = (each[of_rank] for each in self._flying)
        kept = np.multiply.outer(held[:, PLACE[Holding.KEPT]], flying)
        kept = (kept + np.multiply.outer(held[:, PLACE[Holding.WAITING]], waits)) * self._of.reserve[0]
        least, static = least[of_rank], self._of.static_bytes[0][kind]
        fewest, prices = least.sum(axis=1), self._prices(kept, extra_s[:, 0, 0, 0])
        # Of a block in each stage at each price, with its own states; [ranks, prices, stages of one].
        each = np.min(extra_s + prices[:, :, None] * kept[:, :, None, :], axis=0)
        total = (each * least[:, None]).sum(axis=2)[..., None] + self._filled(each + prices[..., None] * static, least)
        room = self._room_bytes(fewest, total.shape[2]) - more_bytes
        total += prices[..., None] * (static * fewest[:, None] - room)[:, None]
        slight = kept.min(axis=0)
        smallest = (slight * least).sum(axis=1)[:, None] + self._filled(slight[:, None], least)[:, 0]
        numbers = fewest[:, None] + np.arange(total.shape[2])
        fits = smallest + numbers * static <= room * (1 + 1e-12)
        return fewest, np.where(fits, np.maximum(0.0, total.max(axis=1)), np.inf)

    @cached_property
    def _flying(self) -> Array:
        """Micro-batches in flight, and waiting for gradients of weights, at the peak of each stage's rank."""
        p, rules = self._of.pp, self._of.schedule.rules
        shortened = rules.shortened_to_peak(p, int(self._of.num_microbatches[0]), MOST_ROUNDS)
        return flying_by_stage(self._of.schedule, p, self._of.virtual_stages, shortened)

    def _filled(self, each: Array, least: Positions) -> Array:
        """The least that no, one, two, ... blocks beyond a rank's fewest take, [ranks, rows, numbers].

        ``each``: of one block in each stage, [ranks, rows, stages of one]; ``least``: the fewest there, [ranks, stages
        of one]. Infinite beyond what the rank's stages may hold.
        """
        if least.shape[1] == 1:
            return each * np.arange(self._sizes.most + 1)
        slots = np.arange(self._sizes.most)
        free = slots < (self._sizes.most - least)[..., None]  # [ranks, stages of one, slots]
        more = np.where(free[:, None], each[..., None], np.inf).reshape(*each.shape[:2], -1)
        more = np.sort(more, axis=2)[..., : int(free.sum(axis=(1, 2)).max())]
        return np.concatenate([np.zeros((*more.shape[:2], 1)), np.cumsum(more, axis=2)], axis=2)

    def _room_bytes(self, fewest: Positions, most: int) -> Array:
        """What blocks' states and kept activations find on each rank with its fewest blocks, one more, and so on.

        The ends of the model, software and what passes while a unit is at work take the rest; [ranks, numbers].
        """
        p, reserve = self._of.pp, float(self._of.reserve[0])
        taken = np.full(p, self._outside_bytes)
        for kind, stage, rank in self._ends:
            kept = float(self._held_of_modes[:, kind, PLACE[Holding.KEPT]].min())
            taken[rank] += self._of.static_bytes[0][kind] + self._flying[0][stage] * kept * reserve
        held = [tuple(end.kind for end in self._ends if end.rank == rank) for rank in range(p)]
        known = {ends: self._passing_bytes(ends) for ends in set(held)}
        passing = np.array([known[ends] for ends in held])
        numbers = fewest[:, None] + np.arange(most)
        # More blocks than stages: two are in one stage; where the model ends, in one before that.
        few = np.full(p, self._of.virtual_stages)
        few[self._of.schedule.rules.rank_of(p * self._of.virtual_stages - 1, p)] += self._sizes.most - 1
        at_work = np.where(numbers > few[:, None], passing[:, 1:], passing[:, :1])
        return self._of.table.cluster.devices[0].memory_bytes - taken[:, None] - at_work

    @property
    def _kinds_between(self) -> list[int]:
        """Kinds of the units that are no blocks, besides the first and the last of the model."""
        units = self._of.table.units
        pairs = list(zip(units.kinds, units.is_block, strict=True))[1:-1]
        return [kind for kind, is_block in pairs if not is_block]

    @cached_property
    def _memory_model(self) -> RankMemoryModel:
        layout, table = self._of.layouts[0], self._of.table
        return RankMemoryModel(table, layout, self._rows_of_modes, [0] * len(table.units.kinds))

    @cached_property
    def _outside_bytes(self) -> float:
        model = self._memory_model
        return MemoryLedger().with_reserve(model.software, model.num_communicators).total_bytes

    def _passing_bytes(self, ends: tuple[int, ...]) -> tuple[float, float]:
        """What a rank needs at least while a unit is at work, and one that holds two blocks in a stage.

        ``ends``: kinds of the ends of the model that it holds. A stage needs no less than its last units alone,
        whatever each recomputes. Where ranks hold several stages each has one that ends with a block, or with a unit
        that stands between blocks and the model's end; of a rank's only stage the last unit may be of any kind.
        """
        kind, between = self._block, self._kinds_between
        assert kind is not None
        last = self._of.table.units.kinds[-1]
        any_kind = [kind, *between] if self._of.virtual_stages > 1 else list(range(len(self._of.table.units.counts)))
        few = min(self._least_of_stage((each,)) for each in any_kind)
        if last in ends:
            few = max(few, self._least_of_stage((last,)))
        return few, few if between else max(few, self._least_of_stage((kind, kind)))

    def _least_of_stage(self, kinds: tuple[int, ...]) -> float:
        """What passes at least while a stage of these units is at work."""
        key = (*self._passing_key, kinds)
        if key not in self._known_bytes:
            modes = product(self._of.modes, repeat=len(kinds))
            reserve = float(self._of.reserve[0])
            stages = ([*zip(each, kinds, strict=True)] for each in modes)
            self._known_bytes[key] = min(self._memory_model.passing_bytes(stage, reserve) for stage in stages)
        return self._known_bytes[key]

    @cached_property
    def _passing_key(self) -> tuple[object, ...]:
        """All that ``RankMemoryModel.passing_bytes`` depends on."""
        layout, rows = self._of.layouts[0], self._of.rows
        mesh, places = layout.mesh, (int(each[0]) for each in (rows.work, rows.split, rows.zero_stage))
        sharing = mesh.num_shards, mesh.expert_parts, mesh.dp * mesh.cp == 1, layout.num_microbatches == 1
        return *places, *sharing, float(self._of.reserve[0]), *self._of.modes

    @staticmethod
    def _prices(kept: Array, extra_s: Array) -> Array:
        """Seconds a byte at which one mode becomes as good as another in some stage of a rank, [ranks, prices].

        ``kept``: [modes, ranks, stages of one].
        """
        found = [np.zeros((kept.shape[1], 1))]
        for a, b in permutations(range(len(extra_s)), 2):
            if extra_s[b] > extra_s[a]:
                saved = kept[a] - kept[b]
                with np.errstate(divide="ignore"):
                    found.append(np.where(saved > 0, (extra_s[b] - extra_s[a]) / saved, 0.0))
        return np.concatenate(found, axis=1)

    @cached_property
    def _extra_s_of_modes(self) -> Array:
        """Seconds of one micro-batch that a unit takes more in each mode, [modes, kinds]."""
        rows = replace(
            self._of.rows, work=np.repeat(self._of.rows.work, len(self._of.modes)), mode=np.array(self._of.modes)
        )
        times = unit_times(self._of.table, rows, 0)
        work = times.forward_s + times.backward_s
        return np.maximum(0.0, work - work[0])

    def _before_s(self, kind: int) -> Array:
        """What the ranks before each take at least until the first micro-batch comes, and the last gradient is gone."""
        splits = self._of.schedule.rules.splits_backward
        work = self._of.times.forward_s[0] if splits else self._of.work_s[0]
        has_blocks = self._of.virtual_stages > 1
        stages = np.full(self._of.pp, max(1, self._sizes.least) * work[kind] if has_blocks else work.min())
        stages[0] = work[self._of.table.units.kinds[0]]
        before: Array = np.concatenate(([0.0], np.cumsum(stages)[:-1]))
        return before + (1 if splits else 2) * np.arange(self._of.pp) * float(self._of.send_s[0])

    @cached_property
    def _held_of_modes(self) -> Array:
        """What a unit holds of one micro-batch, [modes, kinds, Holding]."""
        return held_bytes(self._of.table, self._of.rows.work[:1], np.array(self._of.modes))
