"""A run with everything chosen already, priced: what a framework's own config says."""

from __future__ import annotations

from planner.api import Answer
from planner.errors import PlanError
from planner.evaluation.evaluator import Evaluator
from planner.layout.layout import Layout
from planner.plan.checks import contradictions
from planner.plan.schema import Plan
from planner.pricing.table_builder import build_table
from planner.problem import decided, placement_solver
from planner.request import check_offload, check_precision, load_cluster, load_graph, target_of
from planner.table.keys import TensorSplit
from planner.translate import from_plan, to_plan
from planner.translate.pinned import PinnedRun


def price_run(run: PinnedRun, hardware: str | None) -> Answer:
    """The plan of ``run`` with its price; PlanError where its numbers do not agree, or it cannot be priced."""
    layout, training = run.layout, run.training
    _refuse([*layout.mesh.violations(), *_pipeline_problems(layout)])
    notes: list[str] = []
    cluster = load_cluster(hardware, layout.mesh.world_size, notes)
    check_precision(cluster, training.precision)
    check_offload(cluster, layout.offload)
    graph = load_graph(run.model, training.seq_len, training.precision)
    target = target_of(graph, cluster, training.precision, run.framework, notes)
    split = TensorSplit(layout.mesh.tp, layout.sequence_parallel)
    decision = decided(target, split, {}, placement_solver())
    if decision is None:
        raise PlanError(
            f"no placement of the operators of {run.model} for tp={layout.mesh.tp}", hint="does tp divide its heads?"
        )
    table = build_table(target, training, {split: decision}, (layout,))
    evaluator = Evaluator(table, layout, run.modes(graph))
    found = evaluator.evaluate(run.starts(graph) or evaluator.starts(), exact=True)
    plan = to_plan.described(found, target, training, decision).model_copy(update={"framework": run.framework})
    _check(plan)
    from_plan.check_priceable(plan, graph)
    if not found.fits:
        notes.append("this run does not fit: its worst GPU needs more memory than there is")
    return Answer(plan, (*notes, *graph.warnings), interrupted=False)


def _pipeline_problems(layout: Layout) -> tuple[str, ...]:
    if layout.mesh.pp == 1:
        return ()
    return layout.schedule.rules.violations(layout.mesh.pp, layout.virtual_stages, layout.num_microbatches)


def _check(plan: Plan) -> None:
    _refuse(contradictions(plan))


def _refuse(problems: list[str]) -> None:
    if problems:
        raise PlanError(
            "this run cannot be priced: " + "; ".join(problems), hint="correct the config, or give other options"
        )
