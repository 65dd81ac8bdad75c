"""The price of a choice without a file: the same evaluation as ``estimate``'s, quick enough for thousands of them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from benchmarks.judging.choice import METHODS, Choice, Facts
from benchmarks.judging.graphs import Graphs
from benchmarks.judging.placed import Placed
from benchmarks.judging.questions import Question
from costmodels.vocabulary import choices as vocabulary
from costmodels.vocabulary.choices import Recompute
from costmodels.vocabulary.mesh import Mesh
from planner.evaluation.evaluator import Evaluated
from planner.evaluation.shares import AnyEvaluator, evaluator_of
from planner.graph import node_operators
from planner.layout.layout import Layout, Training
from planner.pricing.table_builder import build_table
from planner.table.cost_table import CostTable
from planner.table.keys import TensorSplit


@dataclass(frozen=True)
class Evaluations:
    """Of one question."""

    question: Question
    facts: Facts
    placed: Placed
    _tables: dict[Layout, CostTable] = field(default_factory=dict[Layout, CostTable])
    _known: dict[Layout, AnyEvaluator] = field(default_factory=dict[Layout, AnyEvaluator])

    @staticmethod
    def of(question: Question, graphs: Graphs) -> Evaluations:
        """For ``question``."""
        placed = Placed(question, graphs)
        cluster = placed.cluster
        facts = Facts.of(placed.graph, question.global_batch_size, cluster)
        return Evaluations(question, facts, placed)

    def can_be_placed(self, choice: Choice) -> bool:
        """Whether operators can be split over its tensor-parallel ranks, and heads over those that share sequences."""
        heads = getattr(node_operators, "num_heads", None)
        if choice.cp_method == "all-to-all" and heads and heads(self.placed.graph) % (choice.tp * choice.cp):
            return False
        return self.placed.decision(choice.tp, choice.sequence_parallel) is not None

    def prepare(self, choices: Sequence[Choice]) -> None:
        """Prices all layouts of ``choices`` at once, whatever their blocks recompute."""
        each = [layout for choice in choices for layout in self._layouts_of(choice)]
        listed = tuple(dict.fromkeys(each))
        splits = {TensorSplit(choice.tp, choice.sequence_parallel) for choice in choices}
        pairs = ((split, self.placed.decision(split.tp, split.sequence_parallel)) for split in splits)
        decisions = {split: decision for split, decision in pairs if decision is not None}
        question = self.question
        training = Training(question.global_batch_size, question.seq_len, question.precision, question.optimizer)
        if listed:
            parts = tuple(dict.fromkeys(part for layout in listed for part in layout.parts))
            table = build_table(self.placed.target, training, decisions, parts)
            self._tables.update(dict.fromkeys(listed, table))

    def evaluator(self, choice: Choice) -> AnyEvaluator:
        """What simulates the layout of ``choice`` and what its blocks recompute, under any cut."""
        found = self._evaluator(self.layout(choice), choice)
        return found if self.is_uniform(choice) else found.with_modes(choice.modes)

    def _evaluator(self, layout: Layout, choice: Choice) -> AnyEvaluator:
        if layout not in self._tables:
            self.prepare([choice])
        if layout not in self._known:
            self._known[layout] = evaluator_of(self._tables[layout], layout)
        return self._known[layout]

    def _layouts_of(self, choice: Choice) -> list[Layout]:
        layout = self.layout(choice)
        return [layout._replace(recompute=mode) for mode in (*Recompute, None)]

    def free(self, choice: Choice) -> AnyEvaluator:
        """The same, in whose table every block may recompute what it likes; here none does."""
        return self._evaluator(self.layout(choice)._replace(recompute=None), choice)

    def is_uniform(self, choice: Choice) -> bool:
        """Whether all blocks recompute alike."""
        return any(choice.modes == self.facts.modes(mode) for mode in Recompute)

    def evaluate(self, choice: Choice) -> Evaluated | None:
        """The simulated step and the memory of every rank; None where there is no price."""
        if not self.can_be_placed(choice):
            return None
        try:
            return self.evaluator(choice).evaluate(choice.starts, exact=True)
        except (ValueError, LookupError):  # such as several stages a rank over unlike devices
            return None

    def price(self, choice: Choice) -> float:
        """Step time; infinite where the plan does not fit or has no price."""
        found = self.evaluate(choice)
        return math.inf if found is None or not found.fits else found.step_time_s

    def layout(self, choice: Choice) -> Layout:
        """Everything but the cut, in the planner's words."""
        mode = next((mode for mode in Recompute if choice.modes == self.facts.modes(mode)), None)
        method = {"cp_method": cast("Any", vocabulary).ContextMethod(choice.cp_method)} if len(METHODS) > 1 else {}
        return Layout(
            **method,
            mesh=Mesh(choice.pp, choice.dp_replicate, choice.dp_shard, choice.cp, choice.tp, choice.ep),
            zero_stage=choice.zero_stage,
            micro_batch_size=choice.micro_batch_size,
            num_microbatches=self.facts.num_microbatches(choice),
            schedule=choice.schedule,
            virtual_stages=choice.virtual_stages,
            recompute=mode,  # None: each block has its own
            sequence_parallel=choice.sequence_parallel,
            groups=tuple(dict.fromkeys(name for name in choice.groups if name is not None))
            or tuple(share.group for share in choice.shares),
            shares=tuple(share.size for share in choice.shares),
        )
