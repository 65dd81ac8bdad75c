"""The best plan of a small instance by trying all: each simulated, with the memory ledger of every rank.

The price is the planner's own definition (``Evaluator``), what is priced is ``enumeration``'s. Two things are skipped,
each with a reason that no search has a part in. A layout with what it recomputes, whose ranks together have more work
than they could do in the time of a plan that is known already: no cut changes how much work there is. And the memory
of a plan whose simulated schedule alone takes as long as a plan that is known to fit (``makespans``).
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from benchmarks.judging.choice import Choice, is_legal, obeys
from benchmarks.judging.edits import even_cuts
from benchmarks.judging.enumeration import cuts, layouts, num_cuts, recomputations
from benchmarks.judging.evaluated import Evaluations
from benchmarks.judging.graphs import Graphs
from benchmarks.judging.makespans import Makespans, places_of
from benchmarks.judging.questions import (
    CRASHED,
    Drawn,
    Machine,
    Question,
    Reply,
    Shape,
    drawn,
    random_chain,
    random_shape,
)
from costmodels.vocabulary.choices import Precision, Recompute
from planner.evaluation.evaluator import Evaluator

TOLERANCE = 1e-3
Modes = tuple[Recompute, ...]  # of every unit

SLACK = 1e-9  # of sums of floats
MOST_PRICED = 1_000_000  # schedules simulated of one instance; of a larger one the best so far is still a plan

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


def instance_of(seed: int, index: int, graphs: Graphs, *, is_small: bool = False, is_unlike: bool = False) -> Question:
    """The small question of this index. ``is_unlike``: about a model whose blocks are unlike."""
    draw = random.Random(f"oracle-{seed}-{index}")
    options: Drawn = drawn(draw, SMALL_MACHINES if is_small else MACHINES, 4 if is_small else 8)
    precision = options.machine.precision
    if is_unlike:
        shape = random_chain(draw, (3,) if is_small else (3, 4, 5, 6))
        model = graphs.chain(shape, precision)
    else:
        shape = SMALL_SHAPES[index % len(SMALL_SHAPES)] if is_small else random_shape(draw, (3, 4, 5, 6))
        model = graphs.shape(shape, precision)
    return Question(
        name=shape.name,
        model=str(model),
        num_devices=options.num_devices,
        hardware=options.machine.hardware,
        seq_len=shape.seq_len,
        global_batch_size=options.global_batch_size,
        precision=precision,
        optimizer=options.optimizer,
        pins=options.pins,
    )


class _Layout(NamedTuple):
    """One layout with all that its blocks may recompute."""

    choice: Choice
    recomputed: list[Modes]  # those that are allowed
    places: NDArray[np.intp]  # the same as places in ``MODES``, [rows, units]
    least_s: NDArray[np.float64]  # that a step takes at least with each, whatever the cut

    @property
    def floor_s(self) -> float:
        """Whatever is recomputed."""
        return float(self.least_s.min())


class _Tried:
    """Plans that were simulated, and the fastest of them that fits."""

    def __init__(self, evaluations: Evaluations) -> None:
        self._evaluations = evaluations
        self.best: tuple[float | None, Choice | None] = (None, None)
        self.num_priced = 0

    def beats(self, seconds: float) -> bool:
        """Whether a plan is known that takes no longer."""
        return self.best[0] is not None and seconds >= self.best[0]

    def price(self, layout: _Layout, rows: NDArray[np.intp], starts_of: Sequence[tuple[int, ...]]) -> None:
        """``layout`` with some rows of its recomputations and every cut given.

        The schedule of each is simulated. Those that so take less than the best, the fastest first, are held against
        the memory of every rank, and what fits is priced whole.
        """
        choice, evaluations = layout.choice, self._evaluations
        number, parts = evaluations.facts.num_microbatches(choice), evaluations.free(choice).parts
        each = [Makespans(choice, part).of(layout.places[rows], starts_of, number) for part in parts]
        spans = np.maximum.reduce(each)  # replicas wait for the slowest
        self.num_priced += spans.size
        fits: list[dict[object, bool]] = [{} for _ in parts]
        least = spans.ravel() * (1 - SLACK)
        worth = np.arange(least.size) if self.best[0] is None else np.flatnonzero(least < self.best[0])
        for place in worth[np.argsort(least[worth], kind="stable")].tolist():
            if self.beats(float(least[place])):
                break
            modes, starts = layout.recomputed[rows[place // len(starts_of)]], starts_of[place % len(starts_of)]
            if all(self._fits(part, modes, starts, known) for part, known in zip(parts, fits, strict=True)):
                found = evaluations.evaluator(choice._replace(modes=modes)).evaluate(starts, exact=True)
                if found.fits and not self.beats(found.step_time_s):
                    self.best = found.step_time_s, choice._replace(starts=starts, modes=modes)

    @staticmethod
    def _fits(evaluator: Evaluator, modes: Modes, starts: tuple[int, ...], known: dict[object, bool]) -> bool:
        """Whether every rank does, by its ledger: which of its own stages and what these recompute says."""
        for rank, stages in enumerate(evaluator.stages_of_ranks(starts)):
            own = {unit: modes[unit] for units in stages.values() for unit in units}
            key = rank, tuple(stages.items()), tuple(own.values())
            if key not in known:
                known[key] = evaluator.rank_fits(rank, stages, own)
            if not known[key]:
                return False
        return True


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
        pins, facts = replace(everything.question.pins, recompute=None), everything.facts
        listed = layouts(facts, facts.groups)
        return [choice for choice in listed if obeys(choice, pins, facts) and everything.can_be_placed(choice)]

    def best(self) -> Best:
        """The fastest plan that fits."""
        choices, num_devices = self.choices(), self.evaluations.question.num_devices
        listed = self._by_work(choices)
        facts, num_unpriced = self.evaluations.facts, len(choices) - len(listed)
        tried = _Tried(self.evaluations)
        alike = [facts.modes(mode) for mode in Recompute]
        for layout in listed:  # even cuts first: what they take leaves little of the rest to try
            if tried.beats(layout.floor_s):
                break
            rows = [row for row, modes in enumerate(layout.recomputed) if modes in alike]
            tried.price(layout, np.array(rows, dtype=np.intp), even_cuts(layout.choice.num_stages, facts))
        for layout in listed:
            if tried.beats(layout.floor_s):
                break
            rows = np.flatnonzero([not tried.beats(seconds) for seconds in layout.least_s.tolist()])
            if tried.num_priced + num_cuts(layout.choice, facts) * len(rows) > MOST_PRICED:
                return Best(num_devices, *tried.best, len(choices), tried.num_priced, num_unpriced, is_whole=False)
            tried.price(layout, rows, list(cuts(layout.choice, facts)))
        return Best(num_devices, *tried.best, len(choices), tried.num_priced, num_unpriced, is_whole=True)

    def _by_work(self, choices: list[Choice]) -> list[_Layout]:
        """Layouts by the time below which no cut lets their ranks do the work; without those that have no price."""
        facts, evaluations = self.evaluations.facts, self.evaluations
        free = recomputations(facts)
        evaluations.prepare(choices)
        allowed: dict[object, tuple[list[Modes], NDArray[np.intp]]] = {}
        found: list[_Layout] = []
        for choice in choices:
            # Which recomputations are legal depends on what they recompute at all, and on the schedule.
            key = choice.schedule, choice.zero_stage, choice.pp > 1
            if key not in allowed:
                kept = [modes for modes in free if self._is_allowed(choice, modes)]
                allowed[key] = kept, places_of(kept)
            recomputed, places = allowed[key]
            if recomputed and self._has_price(choice):
                number = facts.num_microbatches(choice)
                each = [Makespans(choice, part).least_work_s(places, number) for part in evaluations.free(choice).parts]
                found.append(_Layout(choice, recomputed, places, np.maximum.reduce(each) * (1 - SLACK)))
        return sorted(found, key=lambda each: each.floor_s)

    def _is_allowed(self, choice: Choice, modes: Modes) -> bool:
        changed, facts = choice._replace(modes=modes), self.evaluations.facts
        return is_legal(changed, facts) and obeys(changed, self.evaluations.question.pins, facts)

    def _has_price(self, choice: Choice) -> bool:
        """Over unlike devices several stages a rank have none."""
        if not choice.groups:
            return True
        try:
            self.evaluations.free(choice).parts[0].timeline(even_cuts(choice.num_stages, self.evaluations.facts)[0])
        except (ValueError, LookupError):
            return False
        return True


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
