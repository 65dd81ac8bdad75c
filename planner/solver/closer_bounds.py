"""A closer lower bound of layouts over a pipeline, of many layouts at once.

The loads of their ranks in whole blocks, with what they must recompute to fit; and where ranks hold several stages, or
halves of backward passes apart, the longest paths of the schedule (``solver.path_bounds``). ``bounds`` leaves both
out: they take some tenths of a millisecond each.
"""

from __future__ import annotations

from functools import cached_property
from typing import NamedTuple

import numpy as np

from costmodels.vocabulary.terms import PLACE, Holding
from planner.evaluation.block_modes import held_bytes
from planner.evaluation.cuts import StageSizes, stage_sizes
from planner.evaluation.unit_times import LayoutRows, unit_times
from planner.layout.columns import Array, Columns, Positions
from planner.layout.layout import Layout
from planner.solver.flying import Counted, flying_by_stage
from planner.solver.least_extra import prices_of_modes
from planner.solver.memory_bounds import MOST_ROUNDS, AlikeKey, NumMicroBatches
from planner.solver.of_table import OfTable
from planner.solver.one_kind import OneKind
from planner.solver.passing_bytes import PassingBytes
from planner.solver.path_bounds import path_s
from planner.solver.time_bounds import AlikeLayouts
from planner.table.cost_table import CostTable

# Numbers in the largest array of layouts that are bounded together.
MOST_NUMBERS = 400_000


class Closer(NamedTuple):
    """Of each layout two lower bounds in seconds. ``path_s`` is 0 where it was not asked for, or adds nothing."""

    loads_s: Array
    path_s: Array

    @property
    def most_s(self) -> Array:
        """The larger of the two."""
        return np.maximum(self.loads_s, self.path_s)


class CloserBounds:
    """Of layouts with the prices of one table."""

    def __init__(self, table: CostTable) -> None:
        self._of_table = OfTable(table)

    def of(self, listed: Columns[Layout], enough_s: float = np.inf) -> Closer:
        """Seconds that no cut of each layout undercuts.

        Of one whose loads take ``enough_s`` that alone is said of them, or more, and nothing of its paths.
        """
        return self.among(listed).of(np.arange(len(listed)), enough_s)

    def among(self, listed: Columns[Layout]) -> Among:
        """Of layouts some of which will be asked for."""
        return Among(self._of_table, listed)


class Among:
    """Some of these layouts, whichever: what is the same for all is worked out once."""

    def __init__(self, of_table: OfTable, listed: Columns[Layout]) -> None:
        self._of_table, self._listed = of_table, listed
        self._rows = LayoutRows.of(of_table.table, listed)
        self._passes = of_table.passes(self._rows)
        self._keys, self._alike = listed.by(AlikeKey)

    def like(self, place: int) -> Positions:
        """Places of the layouts that are like the one at ``place``: to bound them together takes less."""
        return np.flatnonzero(self._alike == self._alike[place])

    def of(self, places: Positions, enough_s: float = np.inf) -> Closer:
        """As ``CloserBounds.of`` says, of the layouts at these places."""
        found, num_blocks = Closer(*np.zeros((2, len(places)))), sum(self._of_table.table.units.is_block)
        for number in np.unique(self._alike[places]).tolist():
            key, members = self._keys[number], np.flatnonzero(self._alike[places] == number)
            if key.pp == 1:
                continue
            at_once = max(1, MOST_NUMBERS // (key.pp * key.virtual_stages * num_blocks))
            for start in range(0, len(members), at_once):
                part = members[start : start + at_once]
                some = self._listed.take(places[part]), self._rows.take(places[part]), self._passes.take(places[part])
                alike = AlikeLayouts(self._of_table, key, *some)
                group = _Pipelines(alike, enough_s)
                found.loads_s[part] = loads_s = group.loads_s()
                if not key.schedule.rules.has_one_stage:
                    found.path_s[part] = path_s(alike, group.extra_of_ranks_s, loads_s < enough_s)
        return found


class _End(NamedTuple):
    """One end of the model."""

    kind: int
    stage: int
    rank: int


class _Pipelines:
    """Layouts that are alike (``AlikeKey``). Of blocks of several kinds those of one are dealt out (``OneKind``)."""

    def __init__(self, of: AlikeLayouts, enough_s: float, whole: _Pipelines | None = None) -> None:
        """``whole``: the same at another moment, and more layouts: these are those of its ``with_two_moments``."""
        self._of, self._enough_s, self._whole = of, enough_s, whole

    @property
    def _has_one_stage(self) -> bool:
        return self._of.schedule.rules.has_one_stage

    @cached_property
    def _blocks(self) -> OneKind:
        return OneKind.of(self._of.table)

    def loads_s(self) -> Array:
        """However the blocks are dealt out, some rank takes so long.

        A rank with n blocks takes m times their seconds, with what they must recompute so that it may fit, after the
        first micro-batch has come through the first stages of the ranks before it; with one stage a rank, longer
        (``_waiting_s``). The least step that is long enough for all ranks to take all blocks is the bound.
        Example: seven blocks of 1 s on two ranks, four micro-batches, and a head of 1.5 s: 5 and 2 blocks take 20 s, 4
        and 3 take 18 s: T >= 18 s, where the mean says 17 s.
        """
        num_layouts, num_blocks = len(self._of.num_microbatches), self._blocks.number
        if self._of.schedule.rules.overlaps_steps:
            return np.zeros(num_layouts)
        fewest, extra_s = self._extra_of_each_rank
        costs = self._loads_of_ranks_s(fewest, extra_s)
        candidates = np.sort(costs.reshape(num_layouts, -1), axis=1)
        low, high = np.zeros(num_layouts, dtype=np.intp), np.isfinite(candidates).sum(axis=1) - 1
        every = np.arange(num_layouts)
        longest_s = candidates[every, np.maximum(high, 0)]
        possible = (high >= 0) & (self._dealt(fewest, costs, longest_s) >= num_blocks)
        high = np.where(possible, high, 0)
        while (low < high).any():
            middle = (low + high) // 2
            enough = self._dealt(fewest, costs, candidates[every, middle]) >= num_blocks
            low, high = np.where(enough, low, np.minimum(middle + 1, high)), np.where(enough, middle, high)
        beyond_s = self._enough_s if self._sizes.most < num_blocks and self._has_one_stage else np.inf
        return np.where(possible, candidates[every, low] * (1 - 1e-12) + self._of.once_s, beyond_s)

    @cached_property
    def extra_of_ranks_s(self) -> Array:
        """What all ranks must at least recompute of one micro-batch, however the blocks are dealt out.

        What a rank recomputes rises ever faster with its blocks, so that the cheapest next blocks are dealt first.
        """
        num_layouts = len(self._of.num_microbatches)
        if len(self._of.modes) == 1:
            return np.zeros(num_layouts)
        fewest, extra_s = self._extra_of_each_rank
        left = max(0, self._blocks.number - int(fewest.sum()))
        with np.errstate(invalid="ignore"):
            steps = np.diff(extra_s, axis=2).reshape(num_layouts, -1)
        if left > steps.shape[1]:
            return np.full(num_layouts, np.inf)
        more = np.sort(np.where(np.isfinite(steps), steps, np.inf), axis=1)[:, :left]
        return extra_s[:, :, 0].sum(axis=1) + more.sum(axis=1)

    @staticmethod
    def _dealt(fewest: Positions, costs: Array, limit_s: Array) -> Array:
        """The most blocks that ranks take within a time; less than nothing where one cannot take its least."""
        within = costs <= limit_s[:, None, None]
        return np.where(within[:, :, 0].all(axis=1), fewest.sum() + within.sum(axis=(1, 2)) - len(fewest), -np.inf)

    def _loads_of_ranks_s(self, fewest: Positions, extra_s: Array) -> Array:
        """The seconds that each rank takes with its fewest blocks, one more, and so on, [layouts, ranks, numbers]."""
        own, work_s = fewest[:, None] + np.arange(extra_s.shape[2]), self._work_s
        work_s = np.broadcast_to(work_s, (len(work_s), self._of.pp, work_s.shape[2]))
        ends = np.zeros(extra_s.shape[:2])
        for end in self._ends:
            ends[:, end.rank] += work_s[:, end.rank, end.kind]
        receives_s = self._receives_s
        besides = ends + receives_s + self._beside_s
        seconds = own * work_s[:, :, self._blocks.kind, None] + extra_s + besides[:, :, None]
        if self._blocks.others:
            seconds += self._others_beside(own) * work_s[:, :, self._blocks.others].min(axis=2)[..., None]
        whole_s = self._of.num_microbatches[:, None, None] * seconds + self._first_s[:, :, None]
        return np.maximum(whole_s, self._waiting_s(seconds)) if self._of.schedule.rules.has_one_stage else whole_s

    @cached_property
    def _first_s(self) -> Array:
        """What each rank stands still beside its work, [layouts, ranks]: line (1) of ``bounds``."""
        before_s = self._of.before_s.copy()
        before_s[:, 1:] -= np.minimum(self._receives_s[:, 1:], self._ways_s)  # one way less than they send
        return before_s

    def _others_beside(self, numbers: Positions) -> Positions:
        """Blocks of other kinds that ranks hold at least beside so many of the kind, [ranks, numbers]."""
        of_ranks = self._blocks.others_of_ranks(self._of.pp, self._of.virtual_stages)
        return np.take_along_axis(of_ranks, np.minimum(numbers, self._blocks.number), axis=1)

    def _waiting_s(self, seconds: Array) -> Array:
        """Lines (2) to (4) of ``bounds`` for ranks that work so long on one micro-batch, [layouts, ranks, numbers]."""
        p, m = self._of.pp, self._of.num_microbatches[:, None, None]
        beside_s, work_s = self._beside_s, self._work_s.min(axis=1)  # wherever a unit lies
        total_s = work_s @ self._of.counts + self.extra_of_ranks_s + beside_s.sum(axis=1)
        whole_s = total_s[:, None, None] + (2 * self._of.hops_s[-1])[:, None, None]
        finite = np.isfinite(seconds)
        own_s = np.where(finite, seconds, 0.0)
        if self._of.schedule.rules.forwards_first:
            return np.where(finite, whole_s + (m - 1) * own_s, np.inf)
        behind = np.arange(p - 1, -1, -1)[:, None]
        least_s = work_s.min(axis=1) + (self._receives_s + beside_s).min(axis=1)  # of a rank that holds one unit
        rounds = np.maximum(1, m - 1 - behind)
        until_s = (np.cumsum(self._first_s, axis=1) - self._first_s)[:, :, None]  # what those before r stand still
        all_s = total_s[:, None, None] + self._receives_s.sum(axis=1)[:, None, None]
        fourth_s = (whole_s + all_s + (rounds - 1) * own_s + until_s / m) / (1 + np.arange(p)[:, None] / m)
        found = np.maximum(whole_s + rounds * own_s + behind * least_s[:, None, None], fourth_s)
        return np.where(m > p, np.where(finite, found, np.inf), 0.0)

    @cached_property
    def _receives_s(self) -> Array:
        """Where results go on demand, what each rank stands and waits for them on one micro-batch, [layouts, ranks].

        It counts as work, and sends are free: the ranks before r > 0 take 2 r - 1 ways, one less than they send.
        """
        found, ways_s = np.zeros((len(self._of.send_s), self._of.pp)), self._ways_s
        if self._of.is_on_demand:
            found[:, 1:] += ways_s
            found[:, :-1] += ways_s
        return found

    @property
    def _ways_s(self) -> Array:
        """One send from each rank to the next, [layouts, ranks - 1]."""
        return np.diff(self._of.hops_s, axis=0).T

    @cached_property
    def _work_s(self) -> Array:
        """Both passes of units on each rank, or once for all ranks; [layouts, ranks or 1, kinds]."""
        return np.stack(self._of.work_of_ranks, axis=1)

    @property
    def _beside_s(self) -> Array:
        """What messages beside a rank's passes add to its work on one micro-batch, [layouts, ranks]."""
        return self._of.beside_s[:, None] * self._of.num_beside

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
        """Blocks that a stage may hold; a rank's only stage may hold none, units alone that are no blocks."""
        units, num_stages = self._of.table.units, self._of.pp * self._of.virtual_stages
        if self._has_one_stage:
            # A rank that holds more takes longer than is asked.
            least_s = float((self._of.num_microbatches * self._work_s[..., self._blocks.kind].min(axis=1)).min())
            return StageSizes(0, max(1, int(min(self._blocks.number, self._enough_s / least_s))))
        return self._blocks.sizes(stage_sizes(units, num_stages, are_alike=self._of.has_alike_stages))

    @cached_property
    def _extra_of_each_rank(self) -> tuple[Positions, Array]:
        """The fewest blocks of each rank; what so many, one more, and so on must at least recompute so that they fit.

        Seconds of one micro-batch, [layouts, ranks, numbers]; infinite where so many do not fit.
        """
        fewest, extra_s = self._extra_then
        if self._of.at_peak is not None:
            places = self._of.with_two_moments
            at_peak_s = _Pipelines(self._of.at_peak, self._enough_s, self)._extra_then[1]
            extra_s[places] = np.maximum(extra_s[places], at_peak_s)
        return fewest, extra_s

    @property
    def _extra_then(self) -> tuple[Positions, Array]:
        """The same so that they fit at the moment at which memory is counted.

        Where blocks may go to the host either none does, or they do in one way, for which the rank has buffers.
        """
        num_modes, ways = len(self._of.modes), self._of.buffers if self._of.offloads_activations else {}
        here = list(range(num_modes - len(ways)))
        fewest, extra_s = self._extra_of_mix(here, np.zeros(len(self._of.num_microbatches)))
        mixes = [self._extra_of_mix([*here, way], more)[1] for way, more in ways.items()]
        return fewest, np.min([extra_s, *mixes], axis=0)

    def _extra_of_mix(self, modes: list[int], more_bytes: Array) -> tuple[Positions, Array]:
        """The same with blocks in some ``modes`` alone, and ``more_bytes`` taken besides.

        For any price of a byte: a block in stage s costs the least over all modes of its seconds and the price of what
        it keeps there; the blocks go where that is least; and what the device has is paid back. So much is recomputed
        at least, whatever the price; those at which a mode becomes worth it are tried.
        """
        kind, p, num_stages = self._blocks.kind, self._of.pp, self._of.pp * self._of.virtual_stages
        rules, held = self._of.schedule.rules, self._held_of_modes[:, modes, kind]  # [layouts, modes, Holding]
        reserve = self._of.reserve[:, None, None, None]
        least = np.array([self._sizes.least if 0 < stage < num_stages - 1 else 0 for stage in range(num_stages)])
        ranks = np.array([rules.rank_of(stage, p) for stage in range(num_stages)])
        of_rank = np.argsort(ranks, kind="stable").reshape(p, -1)  # [ranks, stages of one]
        flying, waits = (self._flying[:, None, each][..., of_rank] for each in range(2))
        kept = held[:, :, PLACE[Holding.KEPT], None, None] * flying
        kept = (kept + held[:, :, PLACE[Holding.WAITING], None, None] * waits) * reserve  # [layouts, modes, *of_rank]
        least, static = least[of_rank], self._static(kind)[:, None]
        fewest = least.sum(axis=1)
        slight = kept.min(axis=1) + static
        smallest = (slight * least).sum(axis=2)[..., None] + self._filled(slight[:, :, None], least)[:, :, 0]
        room = self._room_bytes(fewest, smallest.shape[2]) - more_bytes[:, None, None]
        fits = smallest <= room * (1 + 1e-12)
        if len(modes) == 1:  # there is nothing to choose
            return fewest, np.where(fits, 0.0, np.inf)
        extra_s = self._extra_s_of_modes[..., kind][:, modes]  # [layouts, modes, ranks], or one for all ranks
        prices = prices_of_modes(kept, extra_s)
        # Of a block in each stage at each price, with its own states; [layouts, ranks, prices, stages of one].
        each = np.full((*prices.shape, least.shape[1]), np.inf)
        for mode in range(len(modes)):
            of_mode = prices[..., None] * (kept[:, mode] + static)[:, :, None]
            np.minimum(each, of_mode + extra_s[:, mode, :, None, None], out=each)
        total = (each * least[:, None]).sum(axis=3)[..., None] + self._filled(each, least)
        total -= prices[..., None] * room[:, :, None]
        return fewest, np.where(fits, np.maximum(0.0, total.max(axis=2)), np.inf)

    def _static(self, kind: int) -> Array:
        """States of a unit of ``kind`` in each stage of a rank, lowest first; [layouts, stages of one]."""
        is_highest = np.arange(self._of.virtual_stages) == self._of.virtual_stages - 1
        return self._of.static_bytes[:, kind, None] + self._of.highest_bytes[:, kind, None] * is_highest

    @cached_property
    def _flying(self) -> Array:
        """Micro-batches in flight, and waiting for gradients of weights, at each stage; [layouts, 2, stages].

        At the moment of its rank that ``AlikeMemory.is_at_lowest`` says.
        """
        p, v, schedule = self._of.pp, self._of.virtual_stages, self._of.schedule

        def peak(key: NumMicroBatches) -> Array:
            m = schedule.rules.shortened_to_peak(p, key.num_microbatches, MOST_ROUNDS)
            return flying_by_stage(Counted(schedule, p, v, m, self._of.is_at_lowest(key)))

        return self._of.layouts.each(NumMicroBatches, peak)

    def _filled(self, each: Array, least: Positions) -> Array:
        """The least that no, one, two, ... blocks beyond a rank's fewest take, [layouts, ranks, rows, numbers].

        ``each``: of one block in each stage, [layouts, ranks, rows, stages of one]; ``least``: the fewest there,
        [ranks, stages of one]. Infinite beyond what the rank's stages may hold.
        """
        if least.shape[1] == 1:
            return each * np.arange(self._sizes.most + 1)
        slots = np.arange(self._sizes.most)
        free = slots < (self._sizes.most - least)[..., None]  # [ranks, stages of one, slots]
        more = np.where(free[:, None], each[..., None], np.inf).reshape(*each.shape[:3], -1)
        more = np.sort(more, axis=3)[..., : int(free.sum(axis=(1, 2)).max())]
        return np.concatenate([np.zeros((*more.shape[:3], 1)), np.cumsum(more, axis=3)], axis=3)

    def _room_bytes(self, fewest: Positions, most: int) -> Array:
        """What blocks' states and kept activations find on each rank with its fewest blocks, one more, and so on.

        The ends of the model, software and what passes while a unit is at work take the rest; [layouts, ranks,
        numbers].
        """
        p, passing = self._of.pp, self._passing
        taken = np.repeat(self._of.outside_bytes[:, None], p, axis=1)
        for kind, stage, rank in self._ends:
            kept = self._held_of_modes[:, :, kind, PLACE[Holding.KEPT]].min(axis=1)
            taken[:, rank] += self._static(kind)[:, stage // p] + self._flying[:, 0, stage] * kept * self._of.reserve
        held_ends = [tuple(end.kind for end in self._ends if end.rank == rank) for rank in range(p)]
        bytes_of = {ends: passing.while_at_work(ends) for ends in dict.fromkeys(held_ends)}
        few_bytes, more_bytes = np.array([bytes_of[ends] for ends in held_ends]).transpose(1, 2, 0)
        numbers = fewest[:, None] + np.arange(most)
        # Two blocks are in a rank's only stage; where the model ends, more stands behind them.
        few = np.ones(p)
        few[-1] = self._sizes.most
        at_work = np.where(numbers > few[:, None], more_bytes[..., None], few_bytes[..., None])
        room = self._of.memory_of_ranks[:, None] - taken[:, :, None] - at_work
        return room - self._others_beside(numbers) * self._least_of_others[..., None] if self._blocks.others else room

    @property
    def _least_of_others(self) -> Array:
        """What a block of another kind keeps at least, states and activations of its modes, [layouts, ranks]."""
        others, is_highest = self._blocks.others, float(self._has_one_stage)
        static = self._of.static_bytes[:, others] + is_highest * self._of.highest_bytes[:, others]
        kept = self._held_of_modes[:, :, others, PLACE[Holding.KEPT]].min(axis=1) * self._of.reserve[:, None]
        flying = self._flying[:, 0, : self._of.pp, None] * is_highest
        return (static[:, None] + kept[:, None] * flying).min(axis=2)

    @cached_property
    def _passing(self) -> PassingBytes:
        if self._whole is not None:
            return self._whole._passing.of_some(self._of, self._whole._of.with_two_moments)
        return PassingBytes(self._of, self._held_of_modes)

    @cached_property
    def _extra_s_of_modes(self) -> Array:
        """Seconds of one micro-batch that a unit takes more in each mode, [layouts, modes, ranks, kinds].

        On each rank's own devices; where these are alike one for all ranks.
        """
        if self._whole is not None:
            return self._whole._extra_s_of_modes[self._whole._of.with_two_moments]
        every, modes = np.arange(len(self._of.num_microbatches)), self._of.modes
        rows = self._of.rows.take(np.repeat(every, len(modes))).in_modes(np.tile(modes, len(every)))
        work: dict[int, Array] = {}
        places = self._of.places if self._of.is_over_groups else self._of.places[:1]
        for place in set(places):
            times = unit_times(self._of.table, rows, place)
            work[place] = (times.forward_s + times.backward_s).reshape(len(every), len(modes), -1)
        of_ranks = np.stack([work[place] for place in places], axis=2)
        return np.maximum(0.0, of_ranks - of_ranks[:, :1])

    @cached_property
    def _held_of_modes(self) -> Array:
        """What a unit holds of one micro-batch, [layouts, modes, kinds, Holding]."""
        if self._whole is not None:
            return self._whole._held_of_modes[self._whole._of.with_two_moments]
        work, modes = self._of.rows.work, self._of.modes
        found = held_bytes(self._of.table, np.repeat(work, len(modes)), np.tile(modes, len(work)))
        return found.reshape(len(work), len(modes), *found.shape[1:])
