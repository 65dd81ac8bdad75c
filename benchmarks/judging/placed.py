"""How operators lie on tensor-parallel ranks: a part of a plan that nobody edits by hand.

It follows from the degree alone (``planner search --tp N`` writes it), so the judges take the planner's own.
"""

from __future__ import annotations

import json
from typing import Any

from benchmarks.judging.graphs import Graphs
from benchmarks.judging.questions import Question
from costmodels.vocabulary.choices import Recompute
from costmodels.vocabulary.mesh import Mesh
from costmodels.vocabulary.schedules import ScheduleName
from hardware_profiles.schema import ClusterSpec
from planner.layout.decided import NOTHING
from planner.layout.layout import Layout
from planner.pricing.decisions import decided
from planner.pricing.placements import Decision
from planner.pricing.target import PricingTarget
from planner.request import load_cluster, target_of
from planner.solver.cp_sat import CpSatSolver
from planner.table.keys import TensorSplit
from planner.translate.to_plan import placement_section


class Placed:
    """Of one question: its cluster, its graph, and the placements of every tensor-parallel degree."""

    def __init__(self, question: Question, graphs: Graphs) -> None:
        self.graph = graphs.read(question.model)
        self.cluster: ClusterSpec = load_cluster(question.hardware, question.num_devices, [])
        request = question.request
        self.target: PricingTarget = target_of(self.graph, self.cluster, question.precision, request.framework, [])
        self._decisions: dict[TensorSplit, Decision | None] = {}

    def decision(self, tp: int, sequence_parallel: bool) -> Decision | None:
        """Least time of one sequence; None where operators cannot be split so, or no weight is."""
        split = TensorSplit(tp, sequence_parallel)
        if split not in self._decisions:
            found = decided(self.target, split, NOTHING, CpSatSolver().solve_placement)
            is_split = found is not None and (tp == 1 or any(unit.splits_weights for unit in found))
            self._decisions[split] = found if is_split else None
        return self._decisions[split]

    def section(self, tp: int, pp: int, sequence_parallel: bool) -> dict[str, Any] | None:
        """The section ``placements`` of a plan."""
        decision = self.decision(tp, sequence_parallel)
        if decision is None:
            return None
        layout = Layout(
            Mesh(pp=pp, tp=tp), 0, 1, 1, ScheduleName.ONE_F_ONE_B, 1, Recompute.NONE, sequence_parallel
        )  # fmt: skip
        section: dict[str, Any] = json.loads(placement_section(layout, self.graph, decision).model_dump_json())
        return section
