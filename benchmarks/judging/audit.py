"""Whether a small change of a plan beats what the search says of it, priced as ``planner estimate`` does."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path

from benchmarks.judging.choice import Choice, Facts, is_legal, obeys, read_choice, written
from benchmarks.judging.edits import Edit, borders, edits, recomputation
from benchmarks.judging.estimate import Document, Price, document_of, estimate
from benchmarks.judging.graphs import Graphs
from benchmarks.judging.placed import Placed
from benchmarks.judging.questions import (
    MACHINES,
    PRESETS,
    SMALL_MACHINES,
    Question,
    Shape,
    ask,
    drawn,
    pins_of_a_pipeline,
)
from planner.plan.schema import Plan

TOLERANCE = 1e-3  # what is faster by no more than this share refutes nothing
# Neighbours that are slower by no more than this share, or faster and too large, have their own borders moved as well.
NEAR = 0.03
MOST_SECOND = 6  # of such neighbours
SAME = 1e-9  # the search's and the estimate's price of one plan

# For the sample in the tests: traced in a second each, and searched about as fast.
SMALL_SHAPES = (
    Shape("llama", 5, 2048, 128_000, 2048),
    Shape("gpt", 6, 1024, 32_000, 1024),
    Shape("moe", 4, 1024, 32_000, 512),
)


@dataclass(frozen=True)
class Verdict:
    """What the changes of one plan came to."""

    plan_s: float
    bound_s: float  # what the search says that no plan is faster than: of an OPTIMAL plan its own step
    estimated_s: float | None  # the plan itself, priced again
    num_edits: Counter[str]  # of each kind, priced
    num_refused: Counter[str]  # of each kind: ``estimate`` would not price them, so they say nothing
    reasons: Counter[str]  # why
    faster: tuple[tuple[Edit, float], ...]  # changes that fit and are faster than the plan, with their step times

    @property
    def refutations(self) -> tuple[tuple[Edit, float], ...]:
        """Changes that fit and are faster than the search says any plan is, the fastest first."""
        return tuple((edit, seconds) for edit, seconds in self.faster if seconds < self.bound_s * (1 - TOLERANCE))

    @property
    def agrees(self) -> bool:
        """Whether the search and the estimate name the same price."""
        return self.estimated_s is not None and abs(self.estimated_s / self.plan_s - 1) <= SAME

    @property
    def best_gain(self) -> float:
        """How much faster the fastest refutation is than what was said, as a share of that."""
        return 1 - self.refutations[0][1] / self.bound_s if self.refutations else 0.0

    @property
    def improvement(self) -> float:
        """How much faster the fastest change is than the plan, as a share of its step: what FEASIBLE leaves open."""
        return 1 - self.faster[0][1] / self.plan_s if self.faster else 0.0


def question_of(seed: int, index: int, graphs: Graphs, *, is_small: bool = False) -> Question:
    """The question of this index: the same on every machine."""
    draw = random.Random(f"{seed}-{index}")
    options = drawn(draw, SMALL_MACHINES if is_small else MACHINES, 8 if is_small else 32)
    machine, pins, count = options.machine, options.pins, options.world_size
    if is_small:
        shape = SMALL_SHAPES[index % len(SMALL_SHAPES)]
        name, model = shape.name, graphs.shape(shape, machine.precision)
        pins = pins_of_a_pipeline(draw, count) if index % 2 else pins
    else:
        name = draw.choice(PRESETS)
        seq_len = draw.choice((None, None, 512, 2048, 4096, 16384)) if not name.endswith("tiny") else None
        model = graphs.preset(name, seq_len, machine.precision)
    return Question(
        name=name,
        model=str(model),
        num_devices=options.num_devices,
        hardware=machine.hardware,
        seq_len=graphs.read(model).seq_len,
        global_batch_size=options.global_batch_size,
        precision=machine.precision,
        optimizer=options.optimizer,
        pins=pins,
    )


@dataclass(frozen=True)
class Auditor:
    """Prices changes of the plans for one question."""

    question: Question
    facts: Facts
    placed: Placed
    folder: Path
    most: int | None = None  # so many changes alone, of all kinds in turn; None: all, and those of near neighbours

    @staticmethod
    def of(question: Question, graphs: Graphs, folder: Path, most: int | None = None) -> Auditor:
        """For ``question``; ``folder`` takes the files of edited plans."""
        placed = Placed(question, graphs)
        cluster = placed.cluster
        facts = Facts.of(placed.graph, question.global_batch_size, cluster)
        return Auditor(question, facts, placed, folder, most)

    def price(self, choice: Choice, document: Document) -> Price:
        """Of ``document`` with ``choice`` in it."""
        edited = written(choice, document, self.facts, self.placed.section)
        if edited is None:
            return Price(None, fits=False, refused="no weight is split by this tensor-parallel degree")
        return estimate(edited, self.question.hardware, self.folder)

    def verdict(self, plan: Plan) -> Verdict:
        """What every small change of ``plan`` comes to."""
        assert plan.prediction is not None
        document = document_of(plan, self.question.model)
        original, plan_s = read_choice(document, self.facts), plan.prediction.step_time_s
        counted, refused, reasons = (Counter[str]() for _ in range(3))
        priced: list[tuple[Edit, Price]] = []

        def priced_all(changes: Iterable[Edit]) -> None:
            for edit in changes:
                price = self.price(edit.choice, document)
                (counted if price.step_time_s is not None else refused)[edit.kind] += 1
                if price.step_time_s is None:
                    reasons[price.refused.split(":")[0] + ":" + price.refused.split(":")[-1]] += 1
                priced.append((edit, price))

        first = [edit for edit in edits(original, self.facts) if obeys(edit.choice, self.question.pins, self.facts)]
        priced_all(first if self.most is None else _in_turn(first, self.most))
        if self.most is None:
            seen = {original, *(edit.choice for edit in first)}
            priced_all(list(self._second(priced, plan_s, seen)))
        limit_s = plan_s * (1 - TOLERANCE)
        better = [(e, p.step_time_s) for e, p in priced if p.step_time_s and p.fits and p.step_time_s < limit_s]
        search = plan.search
        return Verdict(
            plan_s=plan_s,
            bound_s=plan_s if search is None or search.status == "OPTIMAL" else search.bound_step_time_s,
            estimated_s=estimate(document, self.question.hardware, self.folder).step_time_s,
            num_edits=counted,
            num_refused=refused,
            reasons=reasons,
            faster=tuple(sorted(better, key=lambda pair: pair[1])),
        )

    def _second(self, priced: list[tuple[Edit, Price]], plan_s: float, seen: set[Choice]) -> Iterator[Edit]:
        """Borders, and blocks recomputed, of neighbours that come near the plan or are faster and do not fit."""
        near = [
            (price.step_time_s, edit)
            for edit, price in priced
            if price.step_time_s is not None
            and edit.choice.pp > 1
            and not edit.kind.startswith("recompute of")
            and (price.step_time_s < plan_s or (price.fits and price.step_time_s < plan_s * (1 + NEAR)))
        ]
        for _, edit in sorted(near, key=lambda pair: pair[0])[:MOST_SECOND]:
            moved = [*borders(edit.choice, self.facts)]
            moved += [each for each in recomputation(edit.choice, self.facts) if each.kind != "recompute of a block"]
            for each in moved:
                if each.choice in seen or not is_legal(each.choice, self.facts):
                    continue
                if obeys(each.choice, self.question.pins, self.facts):
                    seen.add(each.choice)
                    yield Edit(f"{edit.kind}, then {each.kind}", f"{edit.text}; {each.text}", each.choice)


def _in_turn(found: list[Edit], most: int) -> list[Edit]:
    """``most`` of ``found``: one of each kind in turn, evenly spread over those of its kind."""
    by_kind: dict[str, list[Edit]] = {}
    for edit in found:
        by_kind.setdefault(edit.kind, []).append(edit)
    for edits_of_kind in by_kind.values():
        random.Random(len(found)).shuffle(edits_of_kind)
    turns = [edit for turn in zip_longest(*by_kind.values()) for edit in turn if edit is not None]
    return turns[:most]


def audited(question: Question, graphs: Graphs, folder: Path) -> tuple[str, str, Verdict | None]:
    """The search's status, its reason where there is no plan, and what changes of the plan come to."""
    reply = ask(question)
    if reply.plan is None:
        return reply.status, reply.reason, None
    return reply.status, reply.reason, Auditor.of(question, graphs, folder).verdict(reply.plan)
