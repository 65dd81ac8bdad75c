"""Step times of many cuts of one layout at once, each with the least recomputation that its ranks need to fit.

What a rank recomputes, takes and does once a step depends on its own units alone, so it is worked out once for each
set of units; the schedule is simulated for all cuts together (``costmodels.pipeline_many``). The times are those of
``Evaluator.evaluate``, which says besides how they come about.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from costmodels.pipeline_many import simulate_many, whole_s
from planner.evaluation.evaluator import Evaluator
from planner.evaluation.least_recompute import LeastRecompute
from planner.layout.columns import Array, Positions

Starts = tuple[int, ...]


class _OfRank(NamedTuple):
    """What one pipeline rank takes; the first three of each of its stages, on one micro-batch."""

    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]
    weight_s: tuple[float, ...]
    data_s: float  # once a step
    update_s: float
    work_s: float  # on one micro-batch, in all of its stages


class ManyCuts:
    """Cuts of one layout whose exchanges, if it has any, hide behind nothing of other micro-batches."""

    def __init__(self, evaluator: Evaluator, least: LeastRecompute) -> None:
        self._evaluator, self._least = evaluator, least
        self._kinds = tuple(evaluator.table.units.kinds)
        self._known: dict[tuple[int, ...], _OfRank | None] = {}
        self._numbers: dict[range, int] = {}  # of each row of units: the number of its kinds
        self._number_of_kinds: dict[tuple[bool, tuple[int, ...]], int] = {}
        self._timed: dict[tuple[object, ...], _OfRank] = {}
        self.makespans_s: dict[
            Starts, float
        ] = {}  # of the schedule under each cut that was priced, on all micro-batches

    @staticmethod
    def can_price(evaluator: Evaluator) -> bool:
        """Whether nothing of a step depends on more than the seconds of stages, and the ranks' own units."""
        return not evaluator.hides_exchanges and evaluator.table.framework.overflow_s_per_byte is None

    def step_s(self, cuts: Sequence[Starts], limit_s: float = np.inf) -> Array:
        """Seconds of a step under each cut; infinite where a rank fits its device with no choice.

        Also where what one rank works, and waits for its first micro-batch, takes ``limit_s`` or longer.
        """
        found = np.full(len(cuts), np.inf)
        most_s = limit_s / self._evaluator.layout.num_microbatches * (1 + 1e-9)
        works = self._works_s(np.array(cuts, dtype=np.intp))[0].tolist()
        ranks = [
            self._of_ranks(cut, work, most_s) if max(work) < most_s else None
            for cut, work in zip(cuts, works, strict=True)
        ]
        fits = [place for place, each in enumerate(ranks) if each is not None]
        priced = [each for each in ranks if each is not None]
        if not priced:
            return found
        once = np.array([max(rank.data_s for rank in each) + max(rank.update_s for rank in each) for each in priced])
        seconds, work_s = self._seconds(priced), np.array([[rank.work_s for rank in each] for each in priced]).T
        left = np.flatnonzero(self._least_s(seconds, work_s) + once < limit_s)
        makespans_s = self._makespans_s(seconds[:, left], work_s[:, left].max(axis=0))
        places = np.array(fits)[left]
        found[places] = makespans_s + once[left]
        self.makespans_s.update(zip([cuts[place] for place in places.tolist()], makespans_s.tolist(), strict=True))
        return found

    def _least_s(self, seconds: Array, work_s: Array) -> Array:
        """What the schedule takes at least under each cut: line (1) of ``solver.bounds``, of the ranks as they are.

        Where backward passes are split, only forward passes are known to go through the ranks before.
        """
        rules, p = self._evaluator.layout.schedule.rules, self._evaluator.layout.mesh.pp
        whole_s = self._evaluator.layout.num_microbatches * work_s
        if p > 1 and not rules.overlaps_steps:
            forward, backward = seconds.reshape(4, -1, seconds.shape[1])[:2, :p]  # of the ranks' first stages
            passes_s, way_s = forward if rules.splits_backward else forward + backward, self._evaluator.send_s[: p - 1]
            whole_s += np.cumsum(passes_s, axis=0) - passes_s
            whole_s += (1 if rules.splits_backward else 2) * np.cumsum([0.0, *way_s])[:, None]
        found: Array = whole_s.max(axis=0) * (1 - 1e-9)
        return found

    def worth_a_look(self, base: Starts, cuts: Positions) -> Positions:
        """Of ``cuts`` those under which no rank works longer than the longest does under ``base``; the shortest first.

        ``base`` must fit. A rank that holds no fewer units than under ``base`` recomputes no less. This proves nothing:
        a step may be shorter although its longest rank works longer. ``cuts``: [cuts, stages].
        """
        if not len(cuts):
            return cuts
        work, held = self._works_s(np.concatenate([[base], cuts]))
        now = self._of_ranks(base, work[0].tolist())
        if now is None:
            return cuts
        now_s = np.array([rank.work_s for rank in now])
        least = work + np.where(held >= held[0], now_s - work[0], 0.0)
        longest = least[1:].max(axis=1)
        order = np.argsort(longest, kind="stable")
        return cuts[order[longest[order] <= now_s.max() * (1 + 1e-9)]]

    def _works_s(self, cuts: Positions) -> tuple[Array, Array]:
        """Seconds of every rank on one micro-batch if nothing is recomputed, and its units; [cuts, ranks]."""
        layout, num_units = self._evaluator.layout, len(self._kinds)
        rank_of = [layout.schedule.rules.rank_of(stage, layout.mesh.pp) for stage in range(self._evaluator.num_stages)]
        by_rank = np.argsort(rank_of, kind="stable")
        borders = np.concatenate([cuts, np.full((len(cuts), 1), num_units)], axis=1)
        seconds = np.empty((len(cuts), len(rank_of)))
        for place in set(map(self._evaluator.place_of, range(layout.mesh.pp))):
            there = [stage for stage, rank in enumerate(rank_of) if self._evaluator.place_of(rank) == place]
            times = self._evaluator.unit_times_of(rank_of[there[0]])
            passed = np.concatenate(([0.0], np.cumsum(np.add(times.forward_s, times.backward_s))))[borders]
            seconds[:, there] = np.diff(passed, axis=1)[:, there]
        shape = len(cuts), layout.mesh.pp, -1
        work = seconds[:, by_rank].reshape(shape).sum(axis=2)
        units = np.diff(borders, axis=1)[:, by_rank].reshape(shape).sum(axis=2)
        return work, units

    def _of_ranks(self, starts: Starts, work: Sequence[float], most_s: float = np.inf) -> list[_OfRank] | None:
        """None where one does not fit, or works ``most_s`` or longer on a micro-batch.

        ``work``: seconds of each without recomputation. Those that are known come first, then those that work longest.
        """
        held = self._evaluator.stages_of_ranks(starts)
        keys = [self._key(rank, stages) for rank, stages in enumerate(held)]
        unknown: list[int] = []
        for rank, key in enumerate(keys):
            if key not in self._known:
                unknown.append(rank)
            elif (each := self._known[key]) is None or each.work_s >= most_s:
                return None
        for rank in sorted(unknown, key=lambda rank: -work[rank]):
            if keys[rank] not in self._known:
                self._known[keys[rank]] = self._priced(rank, held[rank])
            each = self._known[keys[rank]]
            if each is None or each.work_s >= most_s:
                return None
        return [each for key in keys if (each := self._known[key]) is not None]

    def _key(self, rank: int, stages: Mapping[int, range]) -> tuple[int, ...]:
        """Ranks with the same key hold units of the same kinds."""
        numbers: list[int] = [rank]
        for units in stages.values():
            number = self._numbers.get(units)
            if number is None:
                alike = units.start == 0, self._kinds[units.start : units.stop]
                number = self._numbers[units] = self._number_of_kinds.setdefault(alike, len(self._number_of_kinds))
            numbers.append(number)
        return tuple(numbers)

    def _priced(self, rank: int, stages: Mapping[int, range]) -> _OfRank | None:
        choice = self._least.of_rank(rank, stages)
        if choice is None:
            return None
        # Ranks that hold alike units in the same modes on the same devices take the same time.
        held = [[(self._kinds[unit], choice.modes[unit]) for unit in units] for units in stages.values()]
        key = self._evaluator.place_of(rank), *map(tuple, held)
        if key not in self._timed:
            evaluator = self._evaluator.with_some(choice.modes)
            forward_s, backward_s, weight_s, _ = evaluator.times_of_stages(rank, list(stages.values()))
            data_s, update_s = evaluator.once_a_step_of(rank, [unit for units in stages.values() for unit in units])
            work_s = sum(forward_s) + sum(backward_s)
            self._timed[key] = _OfRank(forward_s, backward_s, weight_s, data_s, update_s, work_s)
        return self._timed[key]

    def _makespans_s(self, seconds: Array, work_s: Array) -> Array:
        """``work_s``: of the busiest rank under each cut, on one micro-batch."""
        layout = self._evaluator.layout
        rules, p, m = layout.schedule.rules, layout.mesh.pp, layout.num_microbatches
        if p == 1 or not len(work_s):
            return m * work_s

        def run(num_microbatches: int, cuts: Positions) -> Array:
            schedule = rules.actions(p, layout.virtual_stages, num_microbatches)
            blocks = self._evaluator.table.framework.sends_block
            span = simulate_many(schedule, seconds[:, cuts], self._evaluator.send_s, sends_block=blocks)
            return span.longest_rank_s if rules.overlaps_steps else span.makespan_s

        return whole_s(run, rules, p, m, work_s)

    def _seconds(self, priced: Sequence[Sequence[_OfRank]]) -> Array:
        """Forward, backward, input gradient and weight gradient of every stage, [4 stages, cuts]."""
        evaluator = self._evaluator
        stages, p = evaluator.num_stages, evaluator.layout.mesh.pp
        ranks = [evaluator.layout.schedule.rules.rank_of(stage, p) for stage in range(stages)]
        place = [ranks[:stage].count(rank) for stage, rank in enumerate(ranks)]
        parts = np.array([[(each.forward_s, each.backward_s, each.weight_s) for each in of_cut] for of_cut in priced])
        forward, backward, weight = parts[:, ranks, :, place].transpose(2, 0, 1)
        return np.concatenate([forward, backward, backward - weight, weight])
