"""What the schema cannot say: a plan's numbers must agree with each other."""

from __future__ import annotations

from collections import Counter

from planner.parallelism import MeshAxis, Recompute, ScheduleName, pp_rank_of_stage
from planner.plan.schema import Plan


def contradictions(plan: Plan) -> list[str]:
    """Every rule that ``plan`` breaks, with its values; empty where it is sound."""
    return [*_mesh(plan), *_batch(plan), *_sharding(plan), *_stages(plan)]


def degrees_text(plan: Plan) -> str:
    """``pp=2 dp_replicate=1 ...``"""
    return " ".join(f"{axis.value}={plan.mesh.shape().degree(axis)}" for axis in MeshAxis)


def _mesh(plan: Plan) -> list[str]:
    found: list[str] = []
    size, inside = plan.mesh.shape().world_size, plan.mesh.dp_shard * plan.mesh.cp
    if size != plan.num_devices:
        found.append(f"mesh: {degrees_text(plan)} makes {size} ranks, but num_devices is {plan.num_devices}")
    if inside % plan.mesh.ep:
        found.append(f"mesh.ep: {plan.mesh.ep} does not divide dp_shard * cp = {inside}")
    if plan.placements.sequence_parallel and plan.mesh.tp == 1:
        found.append("placements.sequence_parallel: needs tp > 1, but mesh.tp is 1")
    return found


def _batch(plan: Plan) -> list[str]:
    pipeline, dp = plan.pipeline, plan.mesh.shape().dp
    product = dp * pipeline.num_microbatches * pipeline.micro_batch_size
    if product == plan.training.global_batch_size:
        return []
    return [
        f"training.global_batch_size: {plan.training.global_batch_size} is not dp * num_microbatches * "
        f"micro_batch_size = {dp} * {pipeline.num_microbatches} * {pipeline.micro_batch_size} = {product}"
    ]


def _sharding(plan: Plan) -> list[str]:
    found: list[str] = []
    if plan.zero_stage == 0 and plan.mesh.dp_shard > 1:
        found.append(f"zero_stage: 0 shards nothing, but mesh.dp_shard is {plan.mesh.dp_shard}")
    return found


def _stages(plan: Plan) -> list[str]:
    pipeline, pp = plan.pipeline, plan.mesh.pp
    num_stages = pp * pipeline.virtual_stages
    if [stage.index for stage in pipeline.stages] != list(range(num_stages)):
        return [
            f"pipeline.stages: must be stages 0 to {num_stages - 1} in order (pp={pp}, "
            f"virtual_stages={pipeline.virtual_stages}), got {[stage.index for stage in pipeline.stages]}"
        ]
    found: list[str] = []
    ranks = [pp_rank_of_stage(pipeline.schedule, index, pp) for index in range(num_stages)]
    if [stage.pp_rank for stage in pipeline.stages] != ranks:
        rule = f"up to pp_rank {pp - 1} and back again" if pipeline.schedule.is_v else f"on pp_rank i mod {pp}"
        found.append(f"pipeline.stages: stage i must run {rule}, as {pipeline.schedule.value} assumes")
    counts = Counter(module for stage in pipeline.stages for module in stage.modules)
    found += [f"pipeline.stages: module {m} stands in {n} stages" for m, n in counts.items() if n > 1]
    if pp == 1:
        if pipeline.virtual_stages > 1:
            found.append(f"pipeline.virtual_stages: {pipeline.virtual_stages} stages a rank need pp > 1")
        return found
    fewest, most = pipeline.schedule.stages_a_rank
    if not fewest <= pipeline.virtual_stages <= (most or pipeline.virtual_stages):
        found.append(f"pipeline.virtual_stages: {pipeline.virtual_stages} does not go with {pipeline.schedule.value}")
    return [*found, *_microbatches(plan), *_split_backward(plan)]


def _microbatches(plan: Plan) -> list[str]:
    pp, microbatches, schedule = plan.mesh.pp, plan.pipeline.num_microbatches, plan.pipeline.schedule
    least = {ScheduleName.ONE_F_ONE_B: pp, ScheduleName.DUAL_PIPE_V: 2 * pp}.get(schedule, 1)
    if microbatches < least:
        times = "2 * " if schedule.is_v else ""
        return [f"pipeline.num_microbatches: {schedule.value} needs at least {times}pp={least}, got {microbatches}"]
    in_rounds = schedule in (ScheduleName.INTERLEAVED_1F1B, ScheduleName.INTERLEAVED_ZERO_BUBBLE)
    if in_rounds and microbatches % max(1, microbatches // pp):
        return [
            f"pipeline.num_microbatches: {schedule.value} runs {microbatches} in rounds of equal size over pp={pp}, "
            f"so it must be a multiple of {max(1, microbatches // pp)}"
        ]
    return []


def _split_backward(plan: Plan) -> list[str]:
    """What does not go with gradients of weights made apart from those of inputs.

    torch would gather resharded parameters and repeat recomputed blocks once for every group of weights.
    """
    schedule = plan.pipeline.schedule
    if not schedule.splits_backward:
        return []
    found: list[str] = []
    if plan.zero_stage > 1:
        found.append(f"zero_stage: {schedule.value} splits backward passes, so it is 0 or 1, got {plan.zero_stage}")
    if any(rule.mode is not Recompute.NONE and rule.modules for rule in plan.recompute):
        found.append(f"recompute: {schedule.value} splits backward passes, so nothing can be recomputed")
    return found
