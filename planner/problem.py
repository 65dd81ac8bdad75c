"""One search, ready to be solved: operators placed for every degree, the space of layouts, and its cost table."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from costmodels.vocabulary.choices import Placement, Preference
from costmodels.vocabulary.mesh import Mesh
from hardware_profiles.schema import ClusterSpec
from planner.axes.base import divisors
from planner.axes.unlike_devices import over_groups
from planner.evaluation.evaluator import Evaluated, Evaluator
from planner.graph.experts import num_experts
from planner.graph.model_graph import ModelGraph, OpClass
from planner.graph.node_operators import mixes_positions_outside_attention
from planner.layout.columns import Columns
from planner.layout.layout import Layout, Limits, Pins, Training
from planner.pricing.placements import Decision, decide
from planner.pricing.rows import Decisions
from planner.pricing.table_builder import build_table
from planner.pricing.target import PricingTarget
from planner.solver.base import StageSolver
from planner.solver.cp_sat import CpSatSolver
from planner.solver.dynamic_program import DynamicProgramSolver
from planner.solver.preference import simplest, tie_share
from planner.solver.search import Outcome, Progress, search
from planner.space.search_space import SearchSpace, build_space
from planner.table.cost_table import CostTable
from planner.table.keys import TensorSplit

# The risk of not fitting at which predictions of memory are taken at their word.
EVEN_RISK = 0.5
# Risks that are tried where nothing fits at a smaller one.
RISKS = (0.1, 0.15, 0.2, 0.25, 0.3, 0.4, EVEN_RISK)
# A plan that leaves a tenth of what it may take of every device has room.
ROOMY = 0.9


class _MeshKey(NamedTuple):
    mesh: Mesh


@dataclass(frozen=True)
class Problem:
    """One search, ready to be solved."""

    target: PricingTarget
    space: SearchSpace
    baseline_layouts: Columns[Layout]
    decisions: Decisions
    table: CostTable
    solver: StageSolver
    memory_risk: float = EVEN_RISK  # that a plan does not fit after all

    @staticmethod
    def build(target: PricingTarget, training: Training, pins: Pins, memory_risk: float = EVEN_RISK) -> Problem:
        """Places the operators for every degree, enumerates the space and prices it."""
        cluster = target.cluster
        decisions = decided_for_degrees(target, pins, CpSatSolver())
        limits = limits_of(target.graph, cluster, decisions)
        space = build_space(training, pins, limits)
        baseline = baseline_space(training, limits)
        if cluster.mixed is not None:
            pipelines = over_groups(space.layouts, cluster.mixed.groups)
            space = replace(space, layouts=Columns.joined([space.layouts, pipelines]))
        table = build_table(target, training, decisions, Columns.joined([space.layouts, baseline]))
        return Problem(target, space, baseline, decisions, table, DynamicProgramSolver()).at_risk(memory_risk)

    def at_risk(self, memory_risk: float) -> Problem:
        """The same problem, whose plans may need more memory than there is with this probability.

        At 1/2 predictions are taken at their word, as they are where the recipe has no band of memory.
        """
        band = self.target.recipe.memory_band
        factor = 1.0 if band is None else band.factor(memory_risk)
        table = replace(self.table, cluster=self.table.cluster.with_memory_factor(factor))
        return replace(self, table=table, memory_risk=memory_risk)

    @property
    def least_risk_that_fits(self) -> float | None:
        """The least risk, of ``RISKS`` above this problem's, at which any layout fits; None where none does at 1/2."""
        higher = [risk for risk in RISKS if risk > self.memory_risk]
        if not higher or not self.at_risk(higher[-1]).has_any_fit:
            return None
        return next((risk for risk in higher[:-1] if self.at_risk(risk).has_any_fit), higher[-1])

    def roomier(self, outcome: Outcome, time_limit_s: float | None = None) -> Evaluated | None:
        """The fastest layout known whose ranks take at most ``ROOMY`` of what they may.

        Known are the layouts that were visited and the best over the mesh of the plan, which is a search of few
        layouts: others may be faster. None where the plan itself takes no more, and where none is known.
        """
        found = outcome.best
        if found is None or _memory_share(found) <= ROOMY:
            return None
        cluster = self.table.cluster
        table = replace(self.table, cluster=cluster.with_memory_factor(cluster.memory_factor / ROOMY))
        over_mesh = self.space.layouts.where(_MeshKey, lambda key: key.mesh == found.layout.mesh)
        best = search(table, over_mesh, self.solver, time_limit_s=time_limit_s).best
        known = [each for each in outcome.ranking if _memory_share(each) <= ROOMY]
        return min([*known, *([] if best is None else [best])], key=lambda each: each.step_time_s, default=None)

    def preferred(self, outcome: Outcome, baseline: Outcome, preference: Preference) -> Outcome:
        """``outcome`` with a simpler layout about as fast as its best, if there is one; never slower than FSDP."""
        assert outcome.best is not None
        tie = tie_share(self.table)
        if preference is Preference.FASTEST or not outcome.is_exhausted or tie == 0:
            return outcome
        limit_s = outcome.best.step_time_s * (1 + tie)
        if baseline.best is not None:
            limit_s = min(limit_s, baseline.best.step_time_s)
        found = simplest(self.table, outcome, limit_s, self.solver)
        if found is None:
            return outcome
        others = [each for each in outcome.ranking if each.layout != found.layout]
        return replace(outcome, best=found, ranking=tuple(sorted([*others, found], key=lambda each: each.step_time_s)))

    def solved(self, *, time_limit_s: float | None, progress: Progress | None) -> Outcome:
        """The fastest layout of the space that fits, with what was seen on the way."""
        return search(self.table, self.space.layouts, self.solver, time_limit_s=time_limit_s, progress=progress)

    def solved_baseline(self) -> Outcome:
        """The fastest plain FSDP layout that fits."""
        return search(self.table, self.baseline_layouts, self.solver)

    @property
    def has_any_fit(self) -> bool:
        """Whether any layout fits; stops at the first."""
        return search(self.table, self.space.layouts, self.solver, stop_at_first=True).best is not None

    @property
    def placements_are_proved(self) -> bool:
        """Whether no operators can be placed in less time, for any degree."""
        return all(unit.is_proved for decision in self.decisions.values() for unit in decision)

    def exactly(self, found: Evaluated) -> Evaluated:
        """The same layout and cut with every micro-batch simulated."""
        return Evaluator(self.table, found.layout).evaluate(found.starts, exact=True)

    def closest_baseline(self, baseline: Outcome) -> Evaluated | None:
        """The best plain FSDP layout, or where none fits the one that lacks least memory."""
        if baseline.best is not None:
            return baseline.best
        return None if baseline.closest is None else Evaluator(self.table, baseline.closest).evaluate((0,))


def _memory_share(found: Evaluated) -> float:
    """Of the fullest rank, what it takes of what it may."""
    pairs = zip(found.ledgers, found.capacity_bytes, strict=True)
    return max(ledger.total_bytes / room for ledger, room in pairs)


def decided_for_degrees(target: PricingTarget, pins: Pins, solver: CpSatSolver) -> dict[TensorSplit, Decision]:
    """Placements for every tensor-parallel degree of the space, with and without sequence parallelism."""
    cluster = target.cluster
    degrees = {1, *(d for d in divisors(cluster.num_devices) if d <= cluster.devices_per_node)}
    if pins.tp is not None and pins.tp >= 1:
        degrees = {1, pins.tp}
    found: dict[TensorSplit, Decision] = {}
    for degree in sorted(degrees):
        for sequence_parallel in (False, True) if degree > 1 else (False,):
            split = TensorSplit(degree, sequence_parallel)
            decision = decided(target, split, {}, solver)
            if decision is not None:
                found[split] = decision
    return found


def decided(
    target: PricingTarget, split: TensorSplit, fixed: Mapping[str, Placement], solver: CpSatSolver
) -> Decision | None:
    """Placements for one degree; None where there are none."""
    return decide(target.graph, split, fixed, target.machine, target.framework, solver.solve_placement)


def limits_of(graph: ModelGraph, cluster: ClusterSpec, decisions: Decisions) -> Limits:
    """What this model on this cluster allows."""
    has_attention = any(node.op_class is OpClass.ATTENTION for node in graph.nodes)
    splitting = {
        split for split, decision in decisions.items() if split.tp > 1 and any(u.splits_weights for u in decision)
    }
    return Limits(
        num_devices=cluster.num_devices,
        devices_per_node=cluster.devices_per_node,
        num_pipeline_units=max(1, sum(unit.is_block for unit in graph.units)),
        tensor_degrees=frozenset(split.tp for split in splitting),
        sequence_degrees=frozenset(split.tp for split in splitting if split.sequence_parallel),
        num_experts=num_experts(graph),
        context_splits=has_attention and not mixes_positions_outside_attention(graph),
    )


def baseline_space(training: Training, limits: Limits) -> Columns[Layout]:
    """Plain FSDP over all devices, whatever the user pinned; empty where the batch does not divide."""
    n = limits.num_devices
    if training.global_batch_size % n or n == 1:
        return Columns.of(Layout, ())
    pins = Pins(tp=1, pp=1, cp=1, ep=1, dp=n, dp_replicate=1, zero=3)
    return build_space(training, pins, limits).layouts
