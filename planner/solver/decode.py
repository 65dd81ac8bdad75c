"""From a priced coarse point to a Plan: names in place of numbers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from itertools import groupby

from costmodels.compute import peak_flops_per_s
from costmodels.memory import MASTER_BYTES, MemoryLedger, tag_of
from hardware_profiles.schema import ClusterSpec
from planner.graph.blocks import ancestors
from planner.graph.model_graph import ModelGraph, Unit
from planner.graph.trainable import untrainable
from planner.parallelism import Offload, Placement, Recompute, Replicate, ScheduleName, pp_rank_of_stage
from planner.plan.schema import (
    BreakdownSection,
    Candidate,
    MeshSection,
    ModelSection,
    ModulePlacement,
    PipelineSection,
    PlacementSection,
    PredictionSection,
    RecomputeRule,
    StageSection,
    TrainingSection,
)
from planner.pricing.cost_table import CostTable
from planner.pricing.offloading import HostMemory
from planner.pricing.point import Priced
from planner.pricing.sharded_unit import ShardedUnit
from planner.pricing.table_builder import Sharding
from planner.space.search_space import Choice


def model_section(graph: ModelGraph) -> ModelSection:
    """Which model the plan is for."""
    return ModelSection(source=graph.source, digest=graph.digest, num_params=graph.num_params)


def training_section(table: CostTable) -> TrainingSection:
    """What is trained with."""
    training = table.training
    return TrainingSection(
        global_batch_size=training.global_batch_size,
        seq_len=training.seq_len,
        precision=training.precision,
        optimizer=training.optimizer,
    )


def mesh_section(choice: Choice) -> MeshSection:
    """The degrees."""
    return MeshSection(**asdict(choice.mesh))


def group_of_ranks(choice: Choice, table: CostTable) -> tuple[str | None, ...]:
    """The group of unlike devices of each pipeline rank; None where all count as alike."""
    each = table.cluster.num_devices // choice.mesh.pp
    names = [name for name in choice.groups for _ in range(table.groups[name].cluster.num_devices // each)]
    return tuple(names) or (None,) * choice.mesh.pp


def pipeline_section(priced: Priced, graph: ModelGraph, table: CostTable) -> PipelineSection:
    """Stages as the modules they hold."""
    choice, starts = priced.choice, priced.starts
    groups = group_of_ranks(choice, table)
    ends = (*starts[1:], len(graph.units))
    return PipelineSection(
        schedule=choice.schedule,
        num_microbatches=choice.num_microbatches,
        micro_batch_size=choice.micro_batch_size,
        virtual_stages=choice.virtual_stages,
        stages=tuple(
            StageSection(
                index=index,
                pp_rank=pp_rank_of_stage(choice.schedule, index, choice.mesh.pp),
                modules=tuple(m for unit in graph.units[start:end] for m in unit.modules),
                device_group=groups[pp_rank_of_stage(choice.schedule, index, choice.mesh.pp)],
            )
            for index, (start, end) in enumerate(zip(starts, ends, strict=True))
        ),
    )


def placement_section(
    choice: Choice, graph: ModelGraph, sharding: Sharding, columns: tuple[int, ...]
) -> PlacementSection:
    """Tensor-parallel placements by module pattern, and the modules that FSDP shards as one."""
    patterns = _patterns(graph)
    entries: dict[str, ModulePlacement] = {}
    for unit, column in zip(graph.units, columns, strict=True):
        if choice.mesh.tp > 1:
            for entry in _module_placements(unit, graph.units, sharding[column], patterns):
                entries.setdefault(entry.module, entry)
    return PlacementSection(
        tp=tuple(entries.values()),
        sequence_parallel=choice.sequence_parallel,
        stage_input="shard(1)" if choice.sequence_parallel else "replicate",
        sharded_units=_sharded_units(choice, graph),
    )


def _patterns(graph: ModelGraph) -> Mapping[str, str]:
    """Block name -> pattern, where all that the pattern matches are blocks of the same kind."""
    blocks = {unit.name: unit.kind for unit in graph.units if unit.is_block}
    modules = {module for name in graph.parameter_of for module in ancestors(name.rpartition(".")[0])}
    kinds: dict[str, set[int | None]] = {}
    for module in modules | blocks.keys():
        kinds.setdefault(_starred(module), set()).add(blocks.get(module))
    return {name: _starred(name) if len(kinds[_starred(name)]) == 1 else name for name in blocks}


def _starred(name: str) -> str:
    return ".".join([*name.split(".")[:-1], "*"])


def _module_placements(
    unit: Unit, units: tuple[Unit, ...], sharded: ShardedUnit, patterns: Mapping[str, str]
) -> list[ModulePlacement]:
    """Entries of one unit, from the placements of the first unit of its kind."""
    first = next(u for u in units if u.kind == unit.kind)

    def renamed(fqn: str) -> str:
        if unit.is_block and (fqn == first.name or fqn.startswith(first.name + ".")):
            return patterns[unit.name] + fqn[len(first.name) :]
        return fqn

    parameters: dict[str, dict[str, str]] = {}
    for fqn, placement in sharded.parameters.items():
        module, _, name = fqn.rpartition(".")
        if placement != Replicate():
            parameters.setdefault(renamed(module), {})[name] = str(placement)
    outputs: dict[str, Placement] = {renamed(m): p for m, p in sharded.module_outputs.items()}
    return [
        ModulePlacement(
            module=module,
            parameters=parameters.get(module, {}),
            output=str(outputs[module]) if module in outputs else None,
        )
        for module in dict.fromkeys([*parameters, *outputs])
    ]


def _sharded_units(choice: Choice, graph: ModelGraph) -> tuple[str, ...]:
    """Every block and every other module with parameters by itself.

    Modules that tie parameters stay together in the root, unless a pipeline parts them.
    """
    tied = {name for name, p in graph.parameter_of.items() if p.aliases and choice.mesh.pp == 1}
    found: list[str] = []
    for unit in graph.units:
        for module in unit.modules:
            inside = [n for n in graph.parameter_of if n.startswith(module + ".")]
            if inside and not tied.intersection(inside):
                found.append(module)
    return tuple(found)


def recompute_rules(choice: Choice, graph: ModelGraph) -> tuple[RecomputeRule, ...]:
    """Every block, where anything is recomputed."""
    if choice.recompute is Recompute.NONE:
        return ()
    return (RecomputeRule(mode=choice.recompute, modules=tuple(u.name for u in graph.units if u.is_block)),)


def prediction_section(priced: Priced, table: CostTable, num_params: int) -> PredictionSection:
    """What the cost models say.

    Host memory is fullest while our executor starts: each process builds the whole model in fp32 before it shards it.
    """
    training, cluster = table.training, table.cluster
    num_devices, time = cluster.num_devices, priced.step_time_s
    tokens = training.global_batch_size * training.seq_len
    flops_per_s = table.flops_per_sequence * training.global_batch_size / time / num_devices
    price = cluster.profile.device.usd_per_hour
    # The runs that the band is of kept all states on their devices.
    band = table.recipe.error_band if priced.host is None else None
    return PredictionSection(
        step_time_s=time,
        tokens_per_s_per_gpu=tokens / time / num_devices,
        model_flops_per_gpu_per_s=flops_per_s,
        mfu=flops_per_s / mean_peak_flops_per_s(cluster, training.precision.value),
        peak_memory_bytes=tuple(round(ledger.total_bytes) for ledger in priced.ledgers),
        memory_capacity_bytes=round(table.capacity_bytes),
        memory_capacities_bytes=tuple(map(round, priced.capacity_bytes)) if priced.choice.groups else (),
        memory_breakdown_bytes=tuple(term_bytes(ledger) for ledger in priced.ledgers),
        memory_phases_bytes=tuple(
            {phase.value: term_bytes(ledger) for phase, ledger in rank.phases} for rank in priced.memory
        ),
        memory_term_tags={name: tag_of(name) for ledger in priced.ledgers for name in term_bytes(ledger)},
        host_memory_bytes={
            "models_being_built": num_params * MASTER_BYTES * cluster.devices_per_node,
            **offloaded_bytes(priced.host),
        },
        nvme_bytes=0 if priced.host is None else round(priced.host.states.nvme_bytes),
        breakdown_s=BreakdownSection(**asdict(priced.breakdown)),
        usd_per_step=None if price is None else price.value * num_devices * time / 3600,
        step_time_low_s=None if band is None else time * band.low,
        step_time_high_s=None if band is None else time * band.high,
        step_time_coverage=None if band is None else band.coverage,
    )


def offloaded_bytes(host: HostMemory | None) -> dict[str, int]:
    """What offloading keeps in a node's RAM, by name."""
    if host is None:
        return {}
    states = host.states
    rows = {"arriving_gradients": states.gradients, "updated_parameters": states.parameters}
    if not states.on_nvme:
        rows = {"optimizer": states.optimizer, **rows}
    return {name: round(num_bytes) for name, num_bytes in rows.items()}


def mean_peak_flops_per_s(cluster: ClusterSpec, precision: str) -> float:
    """Peak arithmetic of a device, the mean where they differ."""
    if cluster.mixed is None:
        return peak_flops_per_s(cluster.profile.device, precision)
    parts = [group.cluster for group in cluster.mixed.groups]
    peaks = [peak_flops_per_s(part.profile.device, precision) * part.num_devices for part in parts]
    return sum(peaks) / cluster.num_devices


def term_bytes(ledger: MemoryLedger) -> dict[str, int]:
    """The terms of ``ledger`` that there are."""
    return {name: round(num_bytes) for name, num_bytes in ledger.rows if round(num_bytes) > 0}


def candidate(label: str, priced: Priced) -> Candidate:
    """A row of the table beside the plan."""
    choice = priced.choice
    return Candidate(
        label=label,
        mesh=mesh_section(choice),
        zero_stage=choice.zero_stage,
        micro_batch_size=choice.micro_batch_size,
        schedule=choice.schedule,
        virtual_stages=choice.virtual_stages,
        recompute=choice.recompute,
        sequence_parallel=choice.sequence_parallel,
        offload=choice.offload,
        device_groups=choice.groups,
        step_time_s=priced.step_time_s,
        peak_memory_bytes=round(priced.peak_memory_bytes),
        fits=priced.fits,
    )


def execution_warnings(choice: Choice, table: CostTable, graph: ModelGraph) -> tuple[str, ...]:
    """What `planner run` would refuse in the plan, and the pin that avoids it."""
    found = list(untrainable(graph))
    between = _reads_between_units(graph)
    if choice.mesh.pp > 1 and between:
        found.append(
            f"planner run cannot cut this model into stages: between its blocks {between[0] or 'its forward'} reads "
            "values of tensors: pin --pp 1 to train with it"
        )
    if choice.mesh.cp > 1:
        found.append(
            f"planner run does not execute context parallelism yet (cp={choice.mesh.cp}): pin --cp 1 to train with it"
        )
    if choice.mesh.ep > 1:
        found.append(
            f"planner run does not execute expert parallelism yet (ep={choice.mesh.ep}): pin --ep 1 to train with it"
        )
    if choice.schedule is ScheduleName.ZB_2P:
        found.append("planner run does not execute ZB-2P, which torch does not have: pin --schedule ZBVZeroBubble")
    if choice.offload is not Offload.NONE:
        found.append(
            f"planner run does not execute offloading yet (offload={choice.offload.value}): pin --offload none to "
            "train with it"
        )
    if choice.groups:
        each = table.cluster.num_devices // choice.mesh.pp
        places = enumerate(group_of_ranks(choice, table))
        ranks = {name: [rank for rank, _ in run] for name, run in groupby(places, key=lambda place: place[1])}
        order = ", ".join(f"ranks {r[0] * each} to {(r[-1] + 1) * each - 1} on {name}" for name, r in ranks.items())
        found.append(f"nodes must be started in the order of the pipeline: {order}")
    if table.training.precision.value in ("fp16", "fp8"):
        found.append(f"planner run does not execute {table.training.precision.value} yet: bf16 and fp32 it does")
    return tuple(found)


def _reads_between_units(graph: ModelGraph) -> tuple[str, ...]:
    """Modules that read values of tensors and lie in no module that a stage runs as a whole."""
    whole = [module for unit in graph.units for module in unit.modules]
    return tuple(
        name
        for name in graph.reads_values
        if not any(not module or name == module or name.startswith(module + ".") for module in whole)
    )


def layout_text(choice: Choice) -> str:
    """A choice in one line, with what is not at its simplest value."""
    degrees = {name: degree for name, degree in asdict(choice.mesh).items() if degree > 1}
    parts = [f"{name}={degree}" for name, degree in degrees.items()] or ["one GPU"]
    parts += [
        f"ZeRO {choice.zero_stage}",
        f"micro-batch {choice.micro_batch_size}",
        f"recompute {choice.recompute.value}",
    ]
    if choice.offload is not Offload.NONE:
        parts.append(f"offload {choice.offload.value}")
    return ", ".join(parts)
