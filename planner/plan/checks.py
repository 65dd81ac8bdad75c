"""What the schema cannot say: a plan's numbers must agree with each other."""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Iterable
from itertools import accumulate
from operator import mul

from costmodels.vocabulary.choices import Recompute
from costmodels.vocabulary.mesh import ZERO_STAGES, MeshAxis
from planner.plan.schema import Plan

MOST_SHOWN = 20  # of a list


def contradictions(plan: Plan) -> list[str]:
    """Every rule that ``plan`` breaks, with its values; empty where it is sound."""
    of_layout = [*_mesh(plan), *_batch(plan), *_sharding(plan), *_stages(plan), *_recomputation(plan)]
    return [*of_layout, *_prediction(plan), *_hardware(plan)]


def nearest(name: str, known: Iterable[str]) -> str:
    """What of ``known`` may be meant by a name that is none of them, as words behind it."""
    near = difflib.get_close_matches(name, list(known), n=1)
    return f" (nearest: {near[0]!r})" if near else ""


def degrees_text(plan: Plan) -> str:
    """``pp=2 dp_replicate=1 ...``"""
    return " ".join(f"{axis.value}={plan.mesh.shape().degree(axis)}" for axis in MeshAxis)


def _hardware(plan: Plan) -> list[str]:
    own = plan.hardware_profile
    if own is None or own.get("name") == plan.hardware:
        return []
    return [f"hardware: is {plan.hardware!r}, but the name of hardware_profile is {own.get('name')!r}"]


def _mesh(plan: Plan) -> list[str]:
    found: list[str] = []
    size = plan.mesh.shape().world_size
    if size != plan.num_devices:
        found.append(f"mesh: {degrees_text(plan)} makes {size} ranks, but num_devices is {plan.num_devices}")
    found += [f"mesh: {problem}" for problem in plan.mesh.shape().violations()]
    if plan.placements.sequence_parallel and plan.mesh.tp == 1:
        found.append("placements.sequence_parallel: needs tp > 1, but mesh.tp is 1")
    return found


def _batch(plan: Plan) -> list[str]:
    pipeline, dp = plan.pipeline, plan.mesh.shape().dp
    if pipeline.batch_shares:
        return _shares(plan)
    product = dp * pipeline.num_microbatches * pipeline.micro_batch_size
    if product == plan.training.global_batch_size:
        return []
    return [
        f"training.global_batch_size: {plan.training.global_batch_size} is not dp * num_microbatches * "
        f"micro_batch_size = {dp} * {pipeline.num_microbatches} * {pipeline.micro_batch_size} = {product}"
    ]


def _shares(plan: Plan) -> list[str]:
    """Rules of replicas whose micro-batches are of unlike sizes."""
    pipeline, mesh, found = plan.pipeline, plan.mesh.shape(), list[str]()
    shares, name = pipeline.batch_shares, "pipeline.batch_shares"
    if mesh.pp > 1:
        found.append(f"{name}: only replicas without a pipeline have them, and mesh.pp is {mesh.pp}: set it to 1")
    counts, sizes = [each.num_replicas for each in shares], [each.micro_batch_size for each in shares]
    if sum(counts) != mesh.dp:
        text = " + ".join(map(str, counts))
        found.append(f"{name}: num_replicas must add up to dp_replicate * dp_shard = {mesh.dp}, not {text}")
    groups = Counter(share.device_group for share in shares)
    twice = (group for group, times in groups.items() if times > 1)
    found += [f"{name}: device_group {group} stands twice: give each group one share" for group in twice]
    if pipeline.micro_batch_size != max(sizes):
        found.append(f"pipeline.micro_batch_size: must be the largest of batch_shares, {max(sizes)}, not "
                     f"{pipeline.micro_batch_size}")  # fmt: skip
    each = zip(groups, accumulate(counts), strict=False)
    together = mesh.ep * mesh.expert_tp  # ranks that exchange rows of experts have micro-batches of one size
    found += [
        f"{name}: {group} ends within {together} ranks that share experts: set mesh.ep to 1, or let the replicas up to "
        f"there, of cp * tp = {mesh.cp * mesh.tp} ranks each, fill them"
        for group, end in each
        if end * mesh.cp * mesh.tp % together
    ]
    product = pipeline.num_microbatches * sum(map(mul, counts, sizes))
    if product != plan.training.global_batch_size:
        text = " + ".join(f"{count} * {size}" for count, size in zip(counts, sizes, strict=True))
        found.append(
            f"training.global_batch_size: {plan.training.global_batch_size} is not num_microbatches * the sum of "
            f"num_replicas * micro_batch_size = {pipeline.num_microbatches} * ({text}) = {product}"
        )
    return found


def _sharding(plan: Plan) -> list[str]:
    return [f"zero_stage: {problem}" for problem in ZERO_STAGES[plan.zero_stage].violations(plan.mesh.shape())]


def _stages(plan: Plan) -> list[str]:
    pipeline, pp = plan.pipeline, plan.mesh.pp
    num_stages = pp * pipeline.virtual_stages
    indices = [stage.index for stage in pipeline.stages]
    if len(indices) != num_stages or indices != list(range(num_stages)):
        more = f" and {len(indices) - MOST_SHOWN} more" if len(indices) > MOST_SHOWN else ""
        shown = f"{indices[:MOST_SHOWN]}{more}"
        return [
            f"pipeline.stages: must be stages 0 to {num_stages - 1} in order (pp={pp}, "
            f"virtual_stages={pipeline.virtual_stages}), got {shown}"
        ]
    found: list[str] = []
    rules = pipeline.schedule.rules
    ranks = [rules.rank_of(index, pp) for index in range(num_stages)]
    if [stage.pp_rank for stage in pipeline.stages] != ranks:
        rule = f"up to pp_rank {pp - 1} and back again" if rules.is_v else f"on pp_rank i mod {pp}"
        found.append(f"pipeline.stages: stage i must run {rule}, as {pipeline.schedule.value} assumes")
    counts = Counter(module for stage in pipeline.stages for module in stage.modules)
    found += [f"pipeline.stages: module {m} stands in {n} stages" for m, n in counts.items() if n > 1]
    if pp == 1:
        if pipeline.virtual_stages > 1:
            found.append(f"pipeline.virtual_stages: {pipeline.virtual_stages} stages a rank need pp > 1")
        return found
    modes = {rule.mode.value for rule in plan.recompute if rule.mode is not Recompute.NONE and rule.modules}
    if rules.splits_backward and plan.offloaded_activations:
        found.append(f"pipeline.schedule: {rules.name} splits backward passes, so no activations can be offloaded")
    problems = [
        *rules.violations(pp, pipeline.virtual_stages, pipeline.num_microbatches),
        *rules.conflicts(zero_stage=plan.zero_stage, recomputation=sorted(modes)),
    ]
    return [*found, *(f"pipeline.schedule: {problem}" for problem in problems)]


def _recomputation(plan: Plan) -> list[str]:
    counts = Counter(module for rule in plan.recompute for module in set(rule.modules))
    return [f"recompute: module {m} stands in {n} rules" for m, n in counts.items() if n > 1]


def _prediction(plan: Plan) -> list[str]:
    """Whoever shows a prediction looks for every pipeline rank in it, or every share of the batch."""
    prediction, shares = plan.prediction, len(plan.pipeline.batch_shares)
    if prediction is None:
        return []
    number, kinds = (shares, "shares of the batch") if shares else (plan.mesh.pp, "pipeline ranks")
    found = [] if len(prediction.peak_memory_bytes) == number else ["peak_memory_bytes"]
    optional = ("memory_capacities_bytes", "memory_breakdown_bytes", "memory_phases_bytes")
    found += [name for name in optional if len(getattr(prediction, name)) not in (0, number)]
    found += [] if all(prediction.memory_phases_bytes) else ["memory_phases_bytes"]
    return [f"prediction.{name}: must have an entry for each of {number} {kinds}" for name in found]
