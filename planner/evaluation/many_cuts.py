"""Step times of many cuts of one layout at once, each with the least recomputation that its ranks need to fit.

What a rank recomputes, takes and does once a step depends on its own units alone, so it is worked out once for each
set of units; the schedule is simulated for all cuts together (``costmodels.pipeline_many``). The times are those of
``Evaluator.evaluate``, which says besides how they come about.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

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


class _OfCuts(NamedTuple):
    """Many cuts where nothing is recomputed."""

    borders: Positions  # [cuts, stages + 1]
    stages_s: Array  # forward, backward and weight gradients of every stage on one micro-batch, [3, stages, cuts]
    work_s: Array  # of every rank on one micro-batch, [ranks, cuts]
    first_s: Array  # as ``ManyCuts._least_s`` takes it


class ManyCuts:
    """Cuts of one layout whose exchanges, if it has any, hide behind nothing of other micro-batches."""

    def __init__(self, evaluator: Evaluator, least: LeastRecompute) -> None:
        self._evaluator, self._least = evaluator, least
        self._kinds = tuple(evaluator.table.units.kinds)
        self._known: dict[tuple[int, ...], _OfRank | None] = {}
        self._numbers: dict[tuple[int, int], int] = {}  # of each row of units: the number of its kinds
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
        found, of_cuts = np.full(len(cuts), np.inf), self._of_cuts(np.array(cuts, dtype=np.intp))
        most_s = limit_s / self._evaluator.layout.num_microbatches * (1 + 1e-9)
        may_do = np.flatnonzero(self._least_s(of_cuts.first_s, of_cuts.work_s) < limit_s)
        if not len(may_do):
            return found
        keys = self._keys(of_cuts.borders[may_do])
        works = of_cuts.work_s[:, may_do].T.tolist()
        ranks = [
            (place, each)
            for place, of_ranks, work in zip(may_do.tolist(), keys, works, strict=True)
            if (each := self._of_ranks(cuts[place], of_ranks, work, most_s)) is not None
        ]
        if not ranks:
            return found
        priced = [each for _, each in ranks]
        once = np.array([max(rank.data_s for rank in each) + max(rank.update_s for rank in each) for each in priced])
        seconds, work_s = self._seconds(self._stages_s(priced)), self._work_s(priced)
        passes = seconds.reshape(4, -1, len(priced))[: 1 if self._splits_backward else 2, : len(work_s)]
        left = np.flatnonzero(self._least_s(passes.sum(axis=0), work_s) + once < limit_s)
        makespans_s = self._makespans_s(seconds[:, left], work_s[:, left])
        places = [ranks[each][0] for each in left.tolist()]
        found[places] = makespans_s + once[left]
        self.makespans_s.update(zip([cuts[place] for place in places], makespans_s.tolist(), strict=True))
        return found

    def may_take_less(self, cuts: Positions, limit_s: float) -> NDArray[np.bool]:
        """Which of ``cuts``, [cuts, stages], may take less: of the others it is plain that none does."""
        of_cuts = self._of_cuts(cuts)
        return self._least_s(of_cuts.first_s, of_cuts.work_s) < limit_s

    def least_s(self, cuts: Positions) -> Array:
        """What a step takes at least under each cut, [cuts, stages]: nothing is recomputed, or done once a step."""
        of_cuts = self._of_cuts(cuts)
        return self._makespans_s(self._seconds(of_cuts.stages_s), of_cuts.work_s + self._beside_of_ranks_s)

    @property
    def _splits_backward(self) -> bool:
        return self._evaluator.layout.schedule.rules.splits_backward

    def _least_s(self, first_s: Array, work_s: Array) -> Array:
        """What the schedule takes at least under each cut: line (1) of ``solver.bounds``, of the ranks as they are.

        ``first_s``: of the first stage of each rank the passes that a micro-batch makes before, or after, any of the
        next rank; [ranks, cuts]. Where backward passes are split that is the forward pass alone.
        """
        layout = self._evaluator.layout
        whole_s = layout.num_microbatches * work_s
        if layout.mesh.pp > 1 and not layout.schedule.rules.overlaps_steps:
            ways = np.cumsum([0.0, *self._evaluator.send_s[: layout.mesh.pp - 1]])[:, None]
            whole_s += np.cumsum(first_s, axis=0) - first_s + (1 if self._splits_backward else 2) * ways
        found: Array = whole_s.max(axis=0) * (1 - 1e-9)
        return found

    def worth_a_look(self, base: Starts, cuts: Positions, *, are_likely: bool) -> Positions:
        """Of ``cuts`` those that may be faster than ``base``, which fits; the likeliest first. [cuts, stages].

        Each is simulated with what its ranks recompute, and do once a step, under ``base``: one that holds no fewer
        units in any stage does no less, but for what units at work may save it. One that holds fewer does nothing.
        ``are_likely``: only cuts under which no rank works longer than the longest does under ``base``.
        """
        if not len(cuts):
            return cuts
        of_cuts = self._of_cuts(np.concatenate([[base], cuts]))
        now = self._of_ranks(base, self._keys(of_cuts.borders[:1])[0], of_cuts.work_s[:, 0].tolist())
        if now is None:
            return cuts
        now_s, sizes = self._work_s([now]), np.diff(of_cuts.borders, axis=1).T
        of_rank = self._by_rank.reshape(len(now), -1)
        holds_no_less = np.logical_and.reduce((sizes >= sizes[:, :1])[of_rank], axis=1)  # [ranks, cuts]
        work_s = of_cuts.work_s + self._beside_of_ranks_s
        work_s += np.where(holds_no_less, now_s - work_s[:, :1], 0.0)
        may_do = work_s[:, 1:].max(axis=0) <= now_s.max() * (1 + 1e-9)
        near = np.concatenate([[0], 1 + np.flatnonzero(may_do | (not are_likely))])
        stages_s = of_cuts.stages_s[:, :, near]
        more_s = self._stages_s([now]) - stages_s[:, :, :1]
        stages_s += np.where(holds_no_less[list(self._evaluator.rank_of_stage)][:, near], more_s, 0.0)
        step_s = self._makespans_s(self._seconds(stages_s), work_s[:, near])
        once_s = np.array([(rank.data_s, rank.update_s) for rank in now]).T[..., None]
        step_s += np.where(holds_no_less[:, near], once_s, 0.0).max(axis=1).sum(axis=0)
        order = 1 + np.argsort(step_s[1:], kind="stable")
        return cuts[near[order[step_s[order] < step_s[0]]] - 1]

    @cached_property
    def _by_rank(self) -> Positions:
        """The stages of the first rank, then those of the second, and so on."""
        return np.argsort(self._evaluator.rank_of_stage, kind="stable")

    def _of_cuts(self, cuts: Positions) -> _OfCuts:
        evaluator, pp = self._evaluator, self._evaluator.layout.mesh.pp
        borders = np.concatenate([cuts, np.full((len(cuts), 1), len(self._kinds))], axis=1)
        ranks_of = np.repeat(np.arange(pp), len(self._by_rank) // pp)  # of the stages in this order
        stages_s = np.empty((3, len(self._by_rank), len(cuts)))
        for place in set(map(evaluator.place_of, range(pp))):
            there = [at for at, rank in enumerate(ranks_of.tolist()) if evaluator.place_of(rank) == place]
            times = evaluator.unit_times_of(int(ranks_of[there[0]]))
            stages = self._by_rank[there]
            for found, seconds in zip(stages_s, (times.forward_s, times.backward_s, times.weight_s), strict=True):
                passed = np.concatenate(([0.0], np.cumsum(seconds)))[borders.T]
                found[stages] = np.diff(passed, axis=0)[stages]
        whole_s = stages_s[0] + stages_s[1]
        work_s = whole_s[self._by_rank].reshape(pp, len(self._by_rank) // pp, len(cuts)).sum(axis=1)
        return _OfCuts(borders, stages_s, work_s, (stages_s[0] if self._splits_backward else whole_s)[:pp])

    def _of_ranks(
        self, starts: Starts, keys: Sequence[tuple[int, ...]], work: Sequence[float], most_s: float = np.inf
    ) -> list[_OfRank] | None:
        """None where one does not fit, or works ``most_s`` or longer on a micro-batch.

        ``work``: seconds of each without recomputation. Those that are known come first, then those that work longest.
        """
        unknown: list[int] = []
        for rank, key in enumerate(keys):
            if key not in self._known:
                unknown.append(rank)
            elif (each := self._known[key]) is None or each.work_s >= most_s:
                return None
        if unknown:
            for rank in sorted(unknown, key=lambda rank: -work[rank]):
                if keys[rank] not in self._known:
                    self._known[keys[rank]] = self._priced(rank, self._evaluator.stages_of_rank(rank, starts))
                each = self._known[keys[rank]]
                if each is None or each.work_s >= most_s:
                    return None
        return [each for key in keys if (each := self._known[key]) is not None]

    def _keys(self, borders: Positions) -> list[list[tuple[int, ...]]]:
        """For each rank under each cut a key; ranks with the same key hold units of the same kinds."""
        pp, width = self._evaluator.layout.mesh.pp, len(self._kinds) + 1
        rows, which = np.unique(borders[:, :-1] * width + borders[:, 1:], return_inverse=True)
        numbers = np.array([self._number(*divmod(row, width)) for row in rows.tolist()], dtype=np.intp)[which]
        stages = numbers.reshape(len(borders), -1)[:, self._by_rank].reshape(len(borders), pp, -1)
        ranks = np.broadcast_to(np.arange(pp)[:, None], (len(borders), pp, 1))
        return [list(map(tuple, each)) for each in np.concatenate([ranks, stages], axis=2).tolist()]

    def _number(self, start: int, end: int) -> int:
        """Rows of units of the same kinds have the same number."""
        if (start, end) not in self._numbers:
            alike = start == 0, self._kinds[start:end]
            self._numbers[start, end] = self._number_of_kinds.setdefault(alike, len(self._number_of_kinds))
        return self._numbers[start, end]

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

    @cached_property
    def _beside_of_ranks_s(self) -> Array:
        """What messages add to each rank's work on one micro-batch, [ranks, 1]."""
        return self._evaluator.beside_of_ranks_s().sum(axis=0)[:, None]

    def _work_s(self, priced: Sequence[Sequence[_OfRank]]) -> Array:
        """Of every rank on one micro-batch, with messages beside it; [ranks, cuts]."""
        return np.array([[rank.work_s for rank in each] for each in priced]).T + self._beside_of_ranks_s

    def _makespans_s(self, seconds: Array, work_s: Array) -> Array:
        """``seconds`` and ``work_s`` as ``_seconds`` and ``_work_s`` find them."""
        layout = self._evaluator.layout
        rules, p, m = layout.schedule.rules, layout.mesh.pp, layout.num_microbatches
        receives_s = np.sum(self._evaluator.receives_s(self._evaluator.send_s), axis=1)[:, None]
        longest_s = (work_s + receives_s).max(axis=0)
        if p == 1 or not len(longest_s):
            return m * longest_s
        longest_s = np.maximum(longest_s, self._evaluator.links_s(self._evaluator.send_s))

        def run(num_microbatches: int, cuts: Positions) -> Array:
            schedule = rules.columns(p, layout.virtual_stages, num_microbatches)
            span = simulate_many(schedule, seconds[:, cuts], self._evaluator.send_s, transfer=self._evaluator.transfer)
            return span.longest_rank_s if rules.overlaps_steps else span.makespan_s

        return whole_s(run, rules, p, m, longest_s)

    def _stages_s(self, priced: Sequence[Sequence[_OfRank]]) -> Array:
        """Forward, backward and weight gradients of every stage, [3, stages, cuts]."""
        ranks = list(self._evaluator.rank_of_stage)
        place = [ranks[:stage].count(rank) for stage, rank in enumerate(ranks)]
        parts = np.array([[(each.forward_s, each.backward_s, each.weight_s) for each in of_cut] for of_cut in priced])
        return parts[:, ranks, :, place].transpose(2, 0, 1)

    def _seconds(self, stages_s: Array) -> Array:
        """Forward, backward, input gradient and weight gradient of every stage, messages beside; [4 stages, cuts]."""
        forward, backward = stages_s[:2] + self._evaluator.beside_s[:, :, None]
        return np.concatenate([forward, backward, backward - stages_s[2], stages_s[2]])
