"""A run with everything chosen already, priced: what a framework's own config says."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

from costmodels.vocabulary.choices import Recompute
from planner.api import Answer
from planner.errors import PlanError
from planner.evaluation.evaluator import Evaluator
from planner.layout.layout import Layout, Training
from planner.plan.checks import contradictions
from planner.plan.schema import Plan
from planner.pricing.table_builder import build_table
from planner.problem import decided, placement_solver
from planner.request import check_offload, check_precision, load_cluster, load_graph, target_of
from planner.table.keys import TensorSplit
from planner.translate import from_plan, to_plan


@dataclass(frozen=True)
class PinnedRun:
    """A run of ``model`` under ``framework``.

    ``stage_blocks``: repeated blocks of every pipeline stage; None: as the framework cuts by itself. ``recompute``: of
    all blocks, or one mode for each.
    """

    model: str
    framework: str
    layout: Layout
    training: Training
    stage_blocks: tuple[int, ...] | None
    recompute: Recompute | tuple[Recompute, ...]


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
    blocks = [index for index, unit in enumerate(graph.units) if unit.is_block]
    table = build_table(target, training, {split: decision}, (layout,))
    modes = _modes(run.recompute, blocks, len(graph.units))
    evaluator = Evaluator(table, layout, modes)
    starts = evaluator.starts() if run.stage_blocks is None else _starts(run.stage_blocks, blocks)
    found = evaluator.evaluate(starts, exact=True)
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


def _starts(stage_blocks: tuple[int, ...], blocks: list[int]) -> tuple[int, ...]:
    """First unit of each stage: what stands before the blocks is in the first, what stands behind them in the last."""
    if sum(stage_blocks) != len(blocks):
        raise PlanError(
            f"the stages hold {sum(stage_blocks)} blocks, the model has {len(blocks)}",
            hint="correct the stages, or name another model: --model MODEL",
        )
    if any(size == 0 for size in stage_blocks[1:-1]):
        raise PlanError("a stage between the first and the last holds no block", hint="correct the stages")
    firsts = [*blocks, blocks[-1] + 1]
    return (0, *(firsts[before] for before in accumulate(stage_blocks[:-1])))


def _modes(recompute: Recompute | tuple[Recompute, ...], blocks: list[int], num_units: int) -> tuple[Recompute, ...]:
    """What every unit recomputes."""
    each = (recompute,) * len(blocks) if isinstance(recompute, Recompute) else recompute
    if len(each) != len(blocks):
        raise PlanError(
            f"the config has {len(each)} blocks, the model {len(blocks)}", hint="name another model: --model MODEL"
        )
    of_unit = dict(zip(blocks, each, strict=True))
    return tuple(of_unit.get(unit, Recompute.NONE) for unit in range(num_units))
