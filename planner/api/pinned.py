"""A run with everything chosen already, priced: what a framework's own config says."""

from __future__ import annotations

from dataclasses import dataclass

from costmodels.vocabulary.mesh import Mesh
from planner.api import Answer
from planner.errors import PlanError
from planner.evaluation.evaluator import Evaluated, Evaluator
from planner.formats.settings import Layout as Settings
from planner.layout.decided import NOTHING
from planner.layout.layout import Layout, Training
from planner.plan.checks import contradictions
from planner.plan.schema import Plan
from planner.pricing.decisions import decided
from planner.pricing.placements import Decision
from planner.pricing.table_builder import build_table
from planner.pricing.target import PricingTarget
from planner.problem import placement_solver
from planner.request import check_offload, check_precision, load_cluster, load_graph, target_of
from planner.table.keys import TensorSplit
from planner.translate import from_plan, to_plan
from planner.translate.pinned import PinnedRun


@dataclass(frozen=True)
class PricedRun:
    """A run, its price and what it was priced with."""

    run: PinnedRun
    target: PricingTarget
    decision: Decision
    evaluator: Evaluator
    found: Evaluated
    plan: Plan
    notes: tuple[str, ...]

    def on(self, target: PricingTarget) -> Evaluated:
        """The same layout, cut and placements on another cluster."""
        layout = self.run.layout
        split = TensorSplit(layout.mesh.tp, layout.sequence_parallel, layout.mesh.etp)
        table = build_table(target, self.run.training, {split: self.decision}, (layout,))
        return Evaluator(table, layout, self.evaluator.modes).evaluate(self.found.starts, exact=True)

    @property
    def answer(self) -> Answer:
        """The plan, and what was assumed."""
        return Answer(self.plan, self.notes, interrupted=False)


def pinned_run(model: str, framework: str, said: Settings) -> PinnedRun:
    """What a config says, as a run of MODEL under ``framework``."""
    layout = Layout(
        mesh=Mesh(said.pp, said.dp_replicate, said.dp_shard, said.cp, said.tp, said.ep, said.etp),
        zero_stage=said.zero_stage,
        micro_batch_size=said.micro_batch_size,
        num_microbatches=said.num_microbatches,
        schedule=said.schedule,
        virtual_stages=said.virtual_stages,
        recompute=None,
        sequence_parallel=said.sequence_parallel,
        offload=said.offload,
        cp_method=said.cp_method,
    )
    training = Training(said.global_batch_size, said.seq_len, said.precision, said.optimizer)
    return PinnedRun(model, framework, layout, training, said.stage_blocks, said.recompute, said.end_blocks)


def price_run(run: PinnedRun, hardware: str | None) -> PricedRun:
    """``run`` on other hardware, or the default; PlanError where its numbers do not agree, or it cannot be priced."""
    _refuse([*run.layout.mesh.violations()])
    notes: list[str] = []
    cluster, training = load_cluster(hardware, run.layout.mesh.world_size, notes), run.training
    check_precision(cluster, training.precision)
    graph = load_graph(run.model, training.seq_len, training.precision)
    target = target_of(graph, cluster, training.precision, run.framework, notes)
    return price_on(run, target, tuple(notes))


def price_on(run: PinnedRun, target: PricingTarget, said: tuple[str, ...] = ()) -> PricedRun:
    """``run`` on a target of its model, its framework and as many devices; errors as of ``price_run``."""
    layout, training, graph = run.layout, run.training, target.graph
    _refuse([*layout.mesh.violations(), *_pipeline_problems(layout)])
    notes = [*said]
    check_precision(target.cluster, training.precision)
    check_offload(target.cluster, layout.offload)
    split = TensorSplit(layout.mesh.tp, layout.sequence_parallel, layout.mesh.etp)
    decision = decided(target, split, NOTHING, placement_solver().solve_placement)
    if decision is None:
        raise PlanError(
            f"no placement of the operators of {run.model} for tp={layout.mesh.tp}", hint="does tp divide its heads?"
        )
    table = build_table(target, training, {split: decision}, (layout,))
    evaluator = Evaluator(table, layout, run.modes(graph))
    found = evaluator.evaluate(run.starts(graph) or evaluator.starts(), exact=True)
    plan = to_plan.described(found, target, training, decision).model_copy(update={"framework": run.framework})
    _refuse(contradictions(plan))
    from_plan.check_priceable(plan, graph)
    if not found.fits:
        notes.append("this run does not fit: its worst GPU needs more memory than there is")
    return PricedRun(run, target, decision, evaluator, found, plan, (*notes, *graph.warnings))


def _pipeline_problems(layout: Layout) -> tuple[str, ...]:
    if layout.mesh.pp == 1:
        return ()
    return layout.schedule.rules.violations(layout.mesh.pp, layout.virtual_stages, layout.num_microbatches)


def _refuse(problems: list[str]) -> None:
    if problems:
        raise PlanError(
            "this run cannot be priced: " + "; ".join(problems),
            hint="correct the config, or give other options, such as --gpus",
        )
