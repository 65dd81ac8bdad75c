"""From an existing plan back to a layout, its stages and its placements: the inverse of ``to_plan``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from costmodels.vocabulary.choices import (
    BlockMode,
    ContextMethod,
    KeptOnHost,
    Placement,
    Recompute,
    Replicate,
    parse_placement,
)
from costmodels.vocabulary.mesh import Mesh
from hardware_profiles.schema import ClusterSpec
from planner.errors import PlanError
from planner.graph.blocks import ancestors
from planner.graph.experts import expert_counts, num_experts
from planner.graph.model_graph import ModelGraph
from planner.graph.node_operators import num_heads
from planner.layout.decided import Decided
from planner.layout.layout import Layout
from planner.plan.checks import nearest
from planner.plan.schema import Plan


def layout_of(plan: Plan, num_devices: int) -> Layout:
    """The layout of ``plan`` with its data-parallel degree fitted to ``num_devices``; ``modes_of`` belongs to it."""
    if plan.pipeline.batch_shares:
        return _with_shares(plan, num_devices)
    mesh = _mesh_for(plan, num_devices)
    pipeline = plan.pipeline
    per_rank = plan.training.global_batch_size // mesh.dp
    if plan.training.global_batch_size % (mesh.dp * pipeline.micro_batch_size):
        raise PlanError(
            f"dp {mesh.dp} * micro-batch {pipeline.micro_batch_size} does not divide the global batch of "
            f"{plan.training.global_batch_size} sequences",
            hint="choose another --gpus, or search again",
        )
    num_microbatches = per_rank // pipeline.micro_batch_size
    broken = pipeline.schedule.rules.violations(mesh.pp, pipeline.virtual_stages, num_microbatches)
    if mesh.pp > 1 and broken:
        raise PlanError(
            f"on {num_devices} GPUs each data-parallel rank would run {num_microbatches} micro-batches: "
            + "; ".join(broken),
            hint="choose another --gpus, or search again",
        )
    groups = tuple(dict.fromkeys(s.device_group for s in plan.pipeline.stages if s.device_group is not None))
    return _layout(plan, mesh, num_microbatches)._replace(groups=groups)


def _with_shares(plan: Plan, num_devices: int) -> Layout:
    """The layout of a plan whose groups of replicas have shares of the batch, which are those of so many devices."""
    pipeline = plan.pipeline
    if num_devices != plan.num_devices:
        raise PlanError(
            f"pipeline.batch_shares are those of {plan.num_devices} GPUs, and not of {num_devices}",
            hint="search again for other devices: planner search, or planner replan",
        )
    return _layout(plan, plan.mesh.shape(), pipeline.num_microbatches)._replace(
        groups=tuple(share.device_group for share in pipeline.batch_shares),
        shares=tuple(share.micro_batch_size for share in pipeline.batch_shares),
    )


def _layout(plan: Plan, mesh: Mesh, num_microbatches: int) -> Layout:
    """Everything but groups of devices."""
    pipeline = plan.pipeline
    return Layout(
        mesh=mesh,
        zero_stage=plan.zero_stage,
        micro_batch_size=pipeline.micro_batch_size,
        num_microbatches=num_microbatches,
        schedule=pipeline.schedule,
        virtual_stages=pipeline.virtual_stages,
        recompute=None,
        sequence_parallel=plan.placements.sequence_parallel,
        offload=plan.offload,
        offloads_activations=bool(plan.offloaded_activations),
        cp_method=plan.cp_method,
    )


def check_shares(plan: Plan, cluster: ClusterSpec) -> None:
    """PlanError where the groups of the plan's shares, each with its devices, are not those of ``cluster``."""
    each = plan.mesh.cp * plan.mesh.tp
    wanted = {share.device_group: share.num_replicas * each for share in plan.pipeline.batch_shares}
    groups = () if cluster.mixed is None else cluster.mixed.groups
    found = {group.name: group.cluster.num_devices for group in groups}
    if wanted and wanted != found:
        text, own = (", ".join(f"{name}:{count}" for name, count in each.items()) for each in (wanted, found))
        raise PlanError(
            f"pipeline.batch_shares are of {text}, and {cluster.profile.name} has {own or 'no groups'}",
            hint="name a cluster of these groups with --hardware, or search again",
        )


def lies_on(layout: Layout, cluster: ClusterSpec) -> bool:
    """Whether ``cluster`` has the groups of ``layout`` and each holds whole pipeline ranks."""
    groups = () if cluster.mixed is None else cluster.mixed.groups
    each = cluster.num_devices // layout.mesh.pp
    return sorted(layout.groups) == sorted(group.name for group in groups) and all(
        group.cluster.num_devices % each == 0 for group in groups
    )


def check_priceable(plan: Plan, graph: ModelGraph) -> None:
    """PlanError that lists what in ``plan`` the cost models have no price for."""
    found: list[str] = []
    if num_experts(graph) % plan.mesh.ep:
        counts = " and the ".join(map(str, expert_counts(graph))) or "0"
        found.append(f"mesh.ep: {plan.mesh.ep} does not divide the {counts} experts of layers of {graph.source}")
    mesh = plan.mesh
    if mesh.shape().etp is not None and not plan.placements.sequence_parallel:
        found.append(f"mesh.etp: {mesh.etp} beside tp {mesh.tp} needs placements.sequence_parallel")
    if plan.cp_method is ContextMethod.ALL_TO_ALL and mesh.cp > 1 and num_heads(graph) % (mesh.tp * mesh.cp):
        found.append(
            f"cp_method: {plan.cp_method} needs heads for every rank, but tp {mesh.tp} * cp {mesh.cp} does not divide "
            f"the {num_heads(graph)} that heads of queries and of keys in {graph.source} have in common"
        )
    blocks = {unit.name for unit in graph.units if unit.is_block}
    recomputed = (module for rule in plan.recompute for module in rule.modules)
    for key, modules in (("recompute", recomputed), ("offloaded_activations", plan.offloaded_activations)):
        unknown = sorted(set(modules) - blocks)
        if unknown:
            found.append(f"{key}: {', '.join(unknown)} are no repeated blocks of {graph.source}")
    if found:
        raise PlanError("this plan cannot be priced: " + "; ".join(found), hint="run it and measure, or search again")


def unknown_modules(plan: Plan, graph: ModelGraph) -> tuple[str, ...]:
    """What to say of names in stages and sharded units that the graph does not know.

    A module without operators, which it does not have, may be one of them; only who builds the model can tell.
    """
    owners = (name.rpartition(".")[0] for name in graph.parameter_of)
    inner = {*(node.module for node in graph.nodes), *owners, *(m for unit in graph.units for m in unit.modules)}
    known = {module for each in inner for module in (each, *ancestors(each))}
    named = [(f"pipeline.stages.{stage.index}", stage.modules) for stage in plan.pipeline.stages]
    named.append(("placements.sharded_units", plan.placements.sharded_units))
    return tuple(
        f"{key}: {module!r}{nearest(module, known)} has neither operators nor parameters in {graph.source}: if there "
        "is no such module, planner run refuses the plan"
        for key, modules in named
        for module in modules
        if module not in known
    )


def modes_of(plan: Plan, graph: ModelGraph) -> tuple[BlockMode, ...]:
    """The mode of every unit of ``graph``."""
    recomputed = {module: rule.mode for rule in plan.recompute for module in rule.modules}
    modes = {unit.name: recomputed.get(unit.name, Recompute.NONE) for unit in graph.units}
    on_host = set(plan.offloaded_activations)
    return tuple(KeptOnHost[mode.name] if name in on_host else mode for name, mode in modes.items())


def _mesh_for(plan: Plan, num_devices: int) -> Mesh:
    mesh = plan.mesh.shape()
    if num_devices == mesh.world_size:
        return mesh
    rest = mesh.world_size // mesh.dp
    shard = mesh.dp_shard > 1
    kept = mesh.dp_replicate if shard else mesh.dp_shard
    if num_devices % (rest * kept):
        raise PlanError(
            f"{num_devices} GPUs are no multiple of the {rest * kept} that one replica of this plan takes",
            hint=f"choose a multiple of {rest * kept}, or search again for {num_devices} GPUs",
        )
    degree = num_devices // (rest * kept)
    fitted = replace(mesh, dp_shard=degree) if shard else replace(mesh, dp_replicate=degree)
    if shard and fitted.num_expert_ranks % fitted.ep:  # its experts need more ranks that share states
        fitted = _with_as_many_shards(mesh, fitted.dp)
    if fitted.num_expert_ranks % fitted.ep:
        raise PlanError(
            f"on {num_devices} GPUs ep {fitted.ep} does not divide dp_shard {fitted.dp_shard} * cp {fitted.cp}"
            + ("" if fitted.etp is None else f" * tp {fitted.tp}"),
            hint=f"choose another --gpus, or search again for {num_devices} GPUs",
        )
    return fitted


def _with_as_many_shards(mesh: Mesh, dp: int) -> Mesh:
    """``mesh`` with this data-parallel degree: fewer replicas of its shards, or one where these do not divide it."""
    shards = mesh.dp_shard if dp % mesh.dp_shard == 0 else dp
    return replace(mesh, dp_shard=shards, dp_replicate=dp // shards)


def placements_of(plan: Plan, graph: ModelGraph) -> Decided:
    """All that a plan says of placements; PlanError for an entry that names nothing."""
    modules = {node.module for node in graph.nodes}
    outputs: dict[str, Placement] = {}
    for entry in plan.placements.tp:
        if entry.output is not None:
            pattern = entry.module.split(".")
            matched = [module for module in modules if _matches(module.split("."), pattern)]
            outputs.update(dict.fromkeys(matched, parse_placement(entry.output)))
    return Decided(parameter_placements(plan, graph), outputs)


def parameter_placements(plan: Plan, graph: ModelGraph) -> Mapping[str, Placement]:
    """Placement of every parameter, by each of its FQNs; PlanError for an entry that names nothing."""
    placements: dict[str, Placement] = dict.fromkeys(graph.parameter_of, Replicate())
    unknown: list[str] = []
    for entry in plan.placements.tp:
        pattern = entry.module.split(".")
        for parameter, text in entry.parameters.items():
            matched = [n for n in graph.parameter_of if _matches(n.split("."), [*pattern, *parameter.split(".")])]
            if not matched:
                unknown.append(f"{entry.module}.{parameter}")
            tied = [alias for name in matched for alias in graph.parameter_of[name].names]
            placements.update(dict.fromkeys(tied, parse_placement(text)))
    if unknown:
        raise PlanError(
            f"placements.tp names parameters that {graph.source} does not have: {', '.join(unknown)}",
            hint="was the plan made for another model? search again",
        )
    return placements


def _matches(name: list[str], pattern: list[str]) -> bool:
    return len(name) == len(pattern) and all(p in ("*", n) for n, p in zip(name, pattern, strict=True))


def starts_of(plan: Plan, graph: ModelGraph) -> tuple[int, ...]:
    """First unit of each stage; PlanError where the stages do not hold whole units in order."""
    stage_of = {module: stage.index for stage in plan.pipeline.stages for module in stage.modules}
    if not stage_of and len(plan.pipeline.stages) == 1:
        return (0,)  # by hand: the only stage has everything
    stages: list[int] = []
    for unit in graph.units:
        found = {stage_of.get(module) for module in unit.modules}
        if len(found) != 1 or None in found:
            raise PlanError(
                f"pipeline.stages: the modules of {unit.name} ({', '.join(unit.modules)}) must all lie in one stage",
                hint="was the plan made for another model? search again",
            )
        stages.append(next(index for index in found if index is not None))
    if stages != sorted(stages) or set(stages) != set(range(len(plan.pipeline.stages))):
        raise PlanError(
            f"pipeline.stages: stages must hold the model's pieces in order, got stages {stages}",
            hint="reorder the modules of the stages",
        )
    return tuple(stages.index(stage) for stage in range(len(plan.pipeline.stages)))
