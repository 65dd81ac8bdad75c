"""The best plan of a small instance by trying all: each simulated, with the memory ledger of every rank.

The price is the planner's own definition (``Evaluator``), what is priced is ``enumeration``'s. One thing is skipped: a
layout whose ranks together have more work than its ranks could do in the time of a plan that is known already. The work
is read off one simulated step of the layout; no cut changes how much of it there is. Of plans whose stages hold the
same in another order, one is simulated where that one is too slow.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from benchmarks.judging.choice import Choice, is_legal, obeys
from benchmarks.judging.edits import even_cuts
from benchmarks.judging.enumeration import cuts, layouts, num_cuts, recomputations
from benchmarks.judging.evaluated import MIXES_BLOCKS, Evaluations
from benchmarks.judging.graphs import Graphs
from benchmarks.judging.questions import CRASHED, Drawn, Machine, Question, Reply, Shape, drawn, random_shape
from costmodels.vocabulary.choices import Precision, Recompute

TOLERANCE = 1e-3
Modes = tuple[Recompute, ...]  # of every unit

SLACK = 1e-9  # of sums of floats
MOST_PRICED = 40_000  # steps simulated of one instance; of a larger one the best so far is still a plan

MACHINES = (
    Machine("rtx-4090-x8", (2, 3, 4, 6, 8)),
    Machine("dgx-1-v100-16gb", (2, 4, 6), Precision.FP16),
    Machine("dgx-a100-80gb", (2, 4, 5, 8)),
    Machine("a100-pcie-40gb-x8", (3, 4, 8)),
    Machine("l40s-x8", (2, 4, 6)),
    Machine("dgx-a100-40gb:2,dgx-h100-80gb:2", (None,)),
    Machine("rtx-3090-x8:2,rtx-4090-x8:4", (None,)),
)
SMALL_MACHINES = (
    Machine("rtx-4090-x8", (2, 3, 4)),
    Machine("dgx-1-v100-16gb", (2, 4), Precision.FP16),
    Machine("rtx-3090-x8:2,rtx-4090-x8:2", (None,)),
)
SMALL_SHAPES = (
    Shape("llama", 3, 2048, 128_000, 2048),
    Shape("gpt", 3, 2048, 32_000, 2048),
    Shape("moe", 3, 1024, 32_000, 512),
)


class Best(NamedTuple):
    """The fastest plan over all ``num_devices`` that fits, by enumeration; without one nothing fits."""

    num_devices: int | None
    step_time_s: float | None
    choice: Choice | None
    num_layouts: int
    num_priced: int
    num_unpriced: int  # layouts that the evaluation cannot simulate
    is_whole: bool  # every layout that can be was tried


def instance_of(seed: int, index: int, graphs: Graphs, *, is_small: bool = False) -> Question:
    """The small question of this index."""
    draw = random.Random(f"oracle-{seed}-{index}")
    options: Drawn = drawn(draw, SMALL_MACHINES if is_small else MACHINES, 4 if is_small else 8)
    shape = SMALL_SHAPES[index % len(SMALL_SHAPES)] if is_small else random_shape(draw, (3, 4, 5, 6))
    precision = options.machine.precision
    return Question(
        name=shape.name,
        model=str(graphs.shape(shape, precision)),
        num_devices=options.num_devices,
        hardware=options.machine.hardware,
        seq_len=shape.seq_len,
        global_batch_size=options.global_batch_size,
        precision=precision,
        optimizer=options.optimizer,
        pins=options.pins,
    )


class _Tried:
    """Plans that were simulated, and the fastest of them that fits."""

    def __init__(self, evaluations: Evaluations) -> None:
        self._evaluations = evaluations
        units = evaluations.placed.graph.units
        self._kinds = [unit.kind for unit in units]
        self.best: tuple[float | None, Choice | None] = (None, None)
        self.num_priced = 0

    def beats(self, seconds: float) -> bool:
        """Whether a plan is known that takes no longer."""
        return self.best[0] is not None and seconds >= self.best[0]

    def price(self, choice: Choice, recomputed: Sequence[Modes], starts_of: Sequence[tuple[int, ...]]) -> None:
        """``choice`` with every recomputation and every cut given.

        Stages of as many units of each kind in each mode take the same time in whatever order these stand, so that
        of such plans only one is simulated where that is too slow.
        """
        too_slow: set[object] = set()
        for modes in recomputed:
            evaluator = self._evaluations.evaluator(choice._replace(modes=modes))
            for starts in starts_of:
                alike = self._alike(starts, modes)
                if alike in too_slow:
                    continue
                self.num_priced += 1
                found = evaluator.evaluate(starts, exact=True)
                if self.beats(found.step_time_s):
                    too_slow.add(alike)
                elif found.fits:
                    self.best = found.step_time_s, choice._replace(starts=starts, modes=modes)

    def _alike(self, starts: tuple[int, ...], modes: Modes) -> object:
        pairs = list(zip(self._kinds, modes, strict=True))
        ends = (*starts[1:], len(pairs))
        return tuple(tuple(sorted(pairs[start:end])) for start, end in zip(starts, ends, strict=True))


@dataclass(frozen=True)
class Oracle:
    """Of one question."""

    evaluations: Evaluations

    @staticmethod
    def of(question: Question, graphs: Graphs) -> Oracle:
        """For ``question``."""
        return Oracle(Evaluations.of(question, graphs))

    def choices(self) -> list[Choice]:
        """Every layout that obeys the pins and whose operators can be placed; what is recomputed is left open."""
        everything = self.evaluations
        mixed = everything.placed.cluster.mixed
        groups = [] if mixed is None else [(group.name, group.cluster.num_devices) for group in mixed.groups]
        pins, facts = replace(everything.question.pins, recompute=None), everything.facts
        listed = layouts(facts, groups)
        return [choice for choice in listed if obeys(choice, pins, facts) and everything.can_be_placed(choice)]

    def best(self) -> Best:
        """The fastest plan that fits."""
        choices, num_devices = self.choices(), self.evaluations.question.num_devices
        listed = self._by_work(choices)
        num_unpriced = len(choices) - len({choice for _, choice, _ in listed})
        tried = _Tried(self.evaluations)
        for floor_s, choice, recomputed in listed:  # even cuts first: what they take leaves little of the rest to try
            if tried.beats(floor_s):
                break
            tried.price(choice, recomputed[:1], even_cuts(choice.num_stages, self.evaluations.facts))
        for floor_s, choice, recomputed in listed:
            if tried.beats(floor_s):
                break
            more = num_cuts(choice, self.evaluations.facts) * len(recomputed)
            if tried.num_priced + more > MOST_PRICED:
                return Best(num_devices, *tried.best, len(choices), tried.num_priced, num_unpriced, is_whole=False)
            tried.price(choice, recomputed, list(cuts(choice, self.evaluations.facts)))
        return Best(num_devices, *tried.best, len(choices), tried.num_priced, num_unpriced, is_whole=True)

    def _by_work(self, choices: list[Choice]) -> list[tuple[float, Choice, list[Modes]]]:
        """Layouts with so many blocks in each mode, by the time below which no cut lets their ranks do the work."""
        facts, evaluations = self.evaluations.facts, self.evaluations
        by_counts = recomputations(facts, mixes_blocks=MIXES_BLOCKS)
        kinds = [facts.modes(mode) for mode in Recompute]
        kinds += [group[0] for group in by_counts.values() if group[0] not in kinds][:1]
        evaluations.prepare([choice._replace(modes=modes) for choice in choices for modes in kinds])
        found: list[tuple[float, Choice, list[Modes]]] = []
        for choice in choices:
            allowed = {counts: group for counts, group in by_counts.items() if self._is_allowed(choice, group[0])}
            if not allowed:
                continue
            try:
                work_s = self._work_s(choice)
            except (ValueError, LookupError):  # such as several stages a rank over unlike devices
                continue
            for counts, group in allowed.items():
                total_s = sum(count * seconds for count, seconds in zip(counts, work_s, strict=True)) / sum(counts)
                # Unlike devices take unlike time for the same work, which a cut then changes.
                found.append((0.0 if choice.groups else total_s / choice.pp * (1 - SLACK), choice, group))
        return sorted(found, key=lambda each: each[0])

    def _is_allowed(self, choice: Choice, modes: Modes) -> bool:
        changed, facts = choice._replace(modes=modes), self.evaluations.facts
        return is_legal(changed, facts) and obeys(changed, self.evaluations.question.pins, facts)

    def _work_s(self, choice: Choice) -> list[float]:
        """Work of all ranks with every block in each mode; where kinds of blocks differ, the least for each."""
        facts = self.evaluations.facts
        starts = even_cuts(choice.num_stages, facts)[0]
        found: list[float] = []
        for mode in Recompute:
            changed = choice._replace(modes=facts.modes(mode))
            # What cannot recompute has the work of what does not.
            able = changed if is_legal(changed, facts) else choice
            found.append(sum(self.evaluations.evaluator(able).timeline(starts).busy_s))
        alike = len({unit.kind for unit in self.evaluations.placed.graph.units if unit.is_block}) == 1
        return found if alike else [min(found)] * len(found)


def disagreement(reply: Reply, best: Best) -> str:
    """How the search's reply and the oracle's best differ; "" where both can be true.

    A faster plan may leave devices idle, which the oracle's do not.
    """
    plan, oracle_s = reply.plan, best.step_time_s
    if reply.status == CRASHED:
        return f"the search crashed: {reply.reason}"
    if plan is None:
        return f"{reply.status}, but a plan fits" if oracle_s is not None else ""
    assert plan.prediction is not None
    assert plan.search is not None
    step_s = plan.prediction.step_time_s
    if reply.status == "OPTIMAL" and oracle_s is not None and oracle_s < step_s * (1 - TOLERANCE):
        return f"OPTIMAL is refuted by {1 - oracle_s / step_s:.2%}"
    if oracle_s is not None and plan.search.bound_step_time_s > oracle_s * (1 + TOLERANCE):
        return f"the bound is above a plan that fits by {plan.search.bound_step_time_s / oracle_s - 1:.2%}"
    uses_all = plan.num_devices == best.num_devices
    if uses_all and best.is_whole and (oracle_s is None or step_s < oracle_s * (1 - TOLERANCE)):
        return "the search's plan is not in the oracle's space"
    return ""
