"""What the schema cannot say: a plan's numbers must agree with each other."""

from __future__ import annotations

from collections import Counter

from planner.parallelism import MeshAxis, ScheduleName
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
    if any(stage.pp_rank != stage.index % pp for stage in pipeline.stages):
        found.append(f"pipeline.stages: stage i must run on pp_rank i mod {pp}, as the schedules assume")
    counts = Counter(module for stage in pipeline.stages for module in stage.modules)
    found += [f"pipeline.stages: module {m} stands in {n} stages" for m, n in counts.items() if n > 1]
    if pp == 1:
        if pipeline.virtual_stages > 1:
            found.append(f"pipeline.virtual_stages: {pipeline.virtual_stages} stages a rank need pp > 1")
        return found
    microbatches, interleaved = pipeline.num_microbatches, pipeline.schedule is ScheduleName.INTERLEAVED_1F1B
    if interleaved != (pipeline.virtual_stages > 1):
        found.append(f"pipeline.virtual_stages: {pipeline.virtual_stages} does not go with {pipeline.schedule.value}")
    if pipeline.schedule is ScheduleName.ONE_F_ONE_B and microbatches < pp:
        found.append(f"pipeline.num_microbatches: 1F1B needs at least pp={pp}, got {microbatches}")
    if interleaved and microbatches % max(1, microbatches // pp):
        found.append(
            f"pipeline.num_microbatches: Interleaved1F1B runs {microbatches} in rounds of equal size over pp={pp}, "
            f"so it must be a multiple of {max(1, microbatches // pp)}"
        )
    return found
