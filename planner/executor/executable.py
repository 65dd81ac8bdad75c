"""What of a plan can be executed at all. No torch here: those who only ask do not wait for it."""

from __future__ import annotations

from costmodels.vocabulary.choices import Precision
from planner.errors import PlanError
from planner.plan.checks import contradictions
from planner.plan.schema import Plan

EXECUTED_PRECISIONS = (Precision.BF16, Precision.FP32)


def check_executable(plan: Plan) -> None:
    """PlanError that lists everything in ``plan`` that is contradictory or that no executor exists for yet."""
    problems = [*contradictions(plan), *_not_executed(plan)]
    if problems:
        raise PlanError(
            "this plan cannot be executed: " + "; ".join(problems), hint="correct the plan, or search again with pins"
        )


def _not_executed(plan: Plan) -> list[str]:
    problems: list[str] = []
    if plan.mesh.cp > 1 and plan.training.seq_len % (2 * plan.mesh.cp):
        problems.append(
            f"context parallelism (cp = {plan.mesh.cp}) gives each rank two equal chunks of a sequence: "
            f"2 * cp does not divide the {plan.training.seq_len} tokens"
        )
    if plan.mesh.shape().etp is not None:
        problems.append(
            f"experts that are whole beside tensor parallelism (etp = {plan.mesh.etp}) are not executed yet"
        )
    if plan.mesh.ep > 1 and not plan.placements.experts:
        problems.append(
            f"expert parallelism (ep = {plan.mesh.ep}) divides the parameters that placements.experts names, and it "
            "names none"
        )
    if not plan.pipeline.schedule.rules.in_torch:
        problems.append(f"pipeline.schedule = {plan.pipeline.schedule} is not one of torch's, so it is priced only")
    if plan.training.precision not in EXECUTED_PRECISIONS:
        problems.append(f"precision = {plan.training.precision.value} is not executed yet (bf16 and fp32 are)")
    return problems
