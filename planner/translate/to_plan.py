"""From an evaluated layout to a Plan: names in place of numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from itertools import accumulate, pairwise

from costmodels.compute import peak_flops_per_s
from costmodels.ledger import MemoryLedger
from costmodels.memory import MASTER_BYTES
from costmodels.vocabulary.choices import (
    BlockMode,
    KeptOnHost,
    Offload,
    Placement,
    Recompute,
    Replicate,
    recompute_of,
)
from costmodels.vocabulary.terms import MemoryTerm
from hardware_profiles.mixed import kept
from hardware_profiles.schema import ClusterSpec
from planner.axes.base import Executed
from planner.axes.placement import UnitPlacement
from planner.axes.registry import execution_warnings
from planner.axes.unlike_devices import ORDER_WARNING, group_of_ranks
from planner.evaluation.evaluator import Evaluated
from planner.evaluation.host import HostMemory
from planner.graph.blocks import ancestors
from planner.graph.experts import expert_parameters
from planner.graph.model_graph import ModelGraph, Unit
from planner.layout.layout import Layout, Training
from planner.plan.schema import (
    BatchShare,
    Candidate,
    MeshSection,
    ModelSection,
    ModulePlacement,
    PipelineSection,
    PlacementSection,
    Plan,
    PredictionSection,
    RecomputeRule,
    StageSection,
    TrainingSection,
)
from planner.pricing.placements import Decision
from planner.pricing.table_builder import unit_row
from planner.pricing.target import PricingTarget

HOST_WARNING = "planner run cannot start on these nodes for want of host memory"


def model_section(graph: ModelGraph) -> ModelSection:
    """Which model the plan is for."""
    return ModelSection(source=graph.source, digest=graph.digest, num_params=graph.num_params, files=graph.files)


def described(found: Evaluated, target: PricingTarget, training: Training, decision: Decision) -> Plan:
    """``found`` as a Plan without a search section; ``decision``: the placements of its tensor-parallel degree."""
    graph, cluster, layout = target.graph, target.cluster, found.layout
    prediction = prediction_section(found, target, training)
    on_host = tuple(name for name, mode in _block_modes(found, graph) if isinstance(mode, KeptOnHost))
    executed = Executed(layout._replace(offloads_activations=bool(on_host)), graph, cluster)
    return Plan(
        model=model_section(graph),
        hardware=cluster.profile.name,
        hardware_profile=kept(cluster),
        num_devices=cluster.num_devices,
        training=training_section(training),
        mesh=mesh_section(layout),
        zero_stage=layout.zero_stage,
        pipeline=pipeline_section(found, graph, cluster),
        placements=placement_section(layout, graph, decision),
        recompute=recompute_rules(found, graph),
        offload=layout.offload,
        offloaded_activations=on_host,
        cp_method=layout.cp_method,
        prediction=prediction,
        warnings=(*execution_warnings(executed, training), *host_warnings(prediction, cluster)),
    )


def training_section(training: Training) -> TrainingSection:
    """What is trained with."""
    return TrainingSection(
        global_batch_size=training.global_batch_size,
        seq_len=training.seq_len,
        precision=training.precision,
        optimizer=training.optimizer,
    )


def mesh_section(layout: Layout) -> MeshSection:
    """The degrees."""
    return MeshSection(**asdict(layout.mesh))


def pipeline_section(found: Evaluated, graph: ModelGraph, cluster: ClusterSpec) -> PipelineSection:
    """Stages as the modules they hold."""
    layout, starts = found.layout, found.starts
    groups = group_of_ranks(layout, cluster)
    ends = (*starts[1:], len(graph.units))
    return PipelineSection(
        schedule=layout.schedule,
        num_microbatches=layout.num_microbatches,
        micro_batch_size=layout.micro_batch_size,
        virtual_stages=layout.virtual_stages,
        batch_shares=_batch_shares(layout, cluster),
        stages=tuple(
            StageSection(
                index=index,
                pp_rank=layout.schedule.rules.rank_of(index, layout.mesh.pp),
                modules=tuple(m for unit in graph.units[start:end] for m in unit.modules),
                device_group=groups[layout.schedule.rules.rank_of(index, layout.mesh.pp)],
            )
            for index, (start, end) in enumerate(zip(starts, ends, strict=True))
        ),
    )


def _batch_shares(layout: Layout, cluster: ClusterSpec) -> tuple[BatchShare, ...]:
    """What the replicas on each group take of a micro-batch, in the order of ranks; empty where all take as much."""
    each, devices = layout.mesh.cp * layout.mesh.tp, _devices_of_groups(cluster)
    return tuple(
        BatchShare(device_group=name, num_replicas=devices[name].num_devices // each, micro_batch_size=size)
        for name, size in zip(layout.groups, layout.shares, strict=False)
    )


def _devices_of_groups(cluster: ClusterSpec) -> Mapping[str, ClusterSpec]:
    return {group.name: group.cluster for group in (() if cluster.mixed is None else cluster.mixed.groups)}


def placement_section(layout: Layout, graph: ModelGraph, decision: Decision) -> PlacementSection:
    """Tensor-parallel placements by module pattern, and the modules that FSDP shards as one."""
    patterns = _patterns(graph)
    entries: dict[str, ModulePlacement] = {}
    for unit, column in zip(graph.units, unit_row(graph).kinds, strict=True):
        if layout.mesh.tp > 1:
            for entry in _module_placements(unit, graph.units, decision[column], patterns):
                entries.setdefault(entry.module, entry)
    return PlacementSection(
        tp=tuple(entries.values()),
        sequence_parallel=layout.sequence_parallel,
        stage_input="shard(1)" if layout.sequence_parallel else "replicate",
        sharded_units=_sharded_units(layout, graph),
        experts=_experts(graph, patterns) if layout.mesh.ep > 1 else (),
    )


def _experts(graph: ModelGraph, patterns: Mapping[str, str]) -> tuple[str, ...]:
    """Parameters of one matrix an expert, by module pattern."""
    found: dict[str, None] = {}
    for fqn in expert_parameters(graph):
        block = next((module for module in ancestors(fqn) if module in patterns), "")
        found[patterns[block] + fqn[len(block) :] if block else fqn] = None
    return tuple(found)


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
    unit: Unit, units: tuple[Unit, ...], placed: UnitPlacement, patterns: Mapping[str, str]
) -> list[ModulePlacement]:
    """Entries of one unit, from the placements of the first unit of its kind."""
    first = next(u for u in units if u.kind == unit.kind)

    def renamed(fqn: str) -> str:
        if unit.is_block and (fqn == first.name or fqn.startswith(first.name + ".")):
            return patterns[unit.name] + fqn[len(first.name) :]
        return fqn

    parameters: dict[str, dict[str, str]] = {}
    for fqn, placement in placed.parameters.items():
        module, _, name = fqn.rpartition(".")
        if placement != Replicate():
            parameters.setdefault(renamed(module), {})[name] = str(placement)
    outputs: dict[str, Placement] = {renamed(m): p for m, p in placed.module_outputs.items()}
    return [
        ModulePlacement(
            module=module,
            parameters=parameters.get(module, {}),
            output=str(outputs[module]) if module in outputs else None,
        )
        for module in dict.fromkeys([*parameters, *outputs])
    ]


def _sharded_units(layout: Layout, graph: ModelGraph) -> tuple[str, ...]:
    """Every block and every other module with parameters by itself.

    Modules that tie parameters stay together in the root, unless a pipeline parts them.
    """
    tied = {name for name, p in graph.parameter_of.items() if p.aliases and layout.mesh.pp == 1}
    found: list[str] = []
    for unit in graph.units:
        for module in unit.modules:
            inside = [n for n in graph.parameter_of if n.startswith(module + ".")]
            if inside and not tied.intersection(inside):
                found.append(module)
    return tuple(found)


def recompute_rules(found: Evaluated, graph: ModelGraph) -> tuple[RecomputeRule, ...]:
    """The blocks of each mode, where anything is recomputed."""
    blocks = _block_modes(found, graph)
    return tuple(
        RecomputeRule(mode=mode, modules=names)
        for mode in (Recompute.SELECTIVE, Recompute.FULL)
        if (names := tuple(name for name, own in blocks if recompute_of(own) is mode))
    )


def _block_modes(found: Evaluated, graph: ModelGraph) -> list[tuple[str, BlockMode]]:
    return [(unit.name, mode) for unit, mode in zip(graph.units, found.modes, strict=True) if unit.is_block]


def prediction_section(found: Evaluated, target: PricingTarget, training: Training) -> PredictionSection:
    """What the cost models say."""
    graph, cluster = target.graph, target.cluster
    num_devices, time = cluster.num_devices, found.step_time_s
    tokens = training.global_batch_size * training.seq_len
    flops_per_sequence = (graph.forward_flops + graph.backward_flops) / graph.batch_size
    flops_per_s = flops_per_sequence * training.global_batch_size / time / num_devices
    price = cluster.profile.device.usd_per_hour
    # The runs that the band is of kept all states on their devices.
    band = target.recipe.error_band if found.host is None else None
    return PredictionSection(
        step_time_s=time,
        tokens_per_s_per_gpu=tokens / time / num_devices,
        model_flops_per_gpu_per_s=flops_per_s,
        mfu=flops_per_s / mean_peak_flops_per_s(cluster, training.precision.value),
        peak_memory_bytes=tuple(round(ledger.total_bytes) for ledger in found.ledgers),
        memory_capacity_bytes=round(cluster.profile.device.memory_bytes.value),
        memory_capacities_bytes=tuple(map(round, rank_memory_bytes(found.layout, cluster)))
        if found.layout.groups
        else (),
        memory_breakdown_bytes=tuple(term_bytes(ledger) for ledger in found.ledgers),
        memory_phases_bytes=tuple(
            {phase: term_bytes(ledger) for phase, ledger in rank.phases} for rank in found.memory
        ),
        memory_term_tags={name: name.provenance for ledger in found.ledgers for name in term_bytes(ledger)},
        host_memory_bytes={
            "initial_values": _start_elements(graph) * MASTER_BYTES * cluster.devices_per_node,
            **offloaded_bytes(found.host),
        },
        nvme_bytes=0 if found.host is None else round(found.host.states.nvme_bytes),
        breakdown_s=dict(found.breakdown),
        usd_per_step=None if price is None else price.value * num_devices * time / 3600,
        step_time_low_s=None if band is None else time * band.low,
        step_time_high_s=None if band is None else time * band.high,
        step_time_coverage=None if band is None else band.coverage,
        step_time_band_of="" if band is None else target.known_of_times,
        calibrated_by=target.calibrated_by,
        fit_probability=fit_probability(found, target),
    )


def _start_elements(graph: ModelGraph) -> int:
    """What a process of our executor holds in host memory, in fp32, while it starts: one parameter after the other.

    Before, context parallelism tries the model with values that lie in as much (``executor/stand_ins.py``). Models
    whose code cannot be recorded need more, all of them, which nobody knows before.
    """
    return max((parameter.num_elements for parameter in graph.parameters), default=0)


def warnings_again(
    known: Sequence[str], found: Evaluated, prediction: PredictionSection, cluster: ClusterSpec
) -> tuple[str, ...]:
    """``known``, a plan's warnings, as they are where it is priced as ``found`` on ``cluster``: those of the nodes are
    made anew, and where all devices are alike nothing is said of an order of their groups.
    """
    of_nodes = (HOST_WARNING,) if found.layout.groups else (HOST_WARNING, ORDER_WARNING)
    others = (text for text in known if not text.startswith(of_nodes))
    return (*others, *host_warnings(prediction, cluster))


def host_warnings(prediction: PredictionSection, cluster: ClusterSpec) -> tuple[str, ...]:
    """Where our executor would need more host memory than a node has.

    A warning and no refusal: the layout fits the devices, and only `planner run` starts in this way. What is offloaded
    is needed by whoever runs the layout, and is a limit of the search.
    """
    needed, ram = prediction.host_memory_bytes.get("initial_values", 0), cluster.profile.node.ram_bytes
    if ram is None or needed <= ram.value:
        return ()
    return (
        f"{HOST_WARNING}: {cluster.devices_per_node} processes make the model's initial values in 32 bits each, in "
        f"{needed / 2**30:,.0f} GiB, and a node of {cluster.profile.name} has {ram.value / 2**30:,.0f} GiB",
    )


def offloaded_bytes(host: HostMemory | None) -> dict[str, int]:
    """What offloading keeps in a node's RAM, by name."""
    if host is None:
        return {}
    states = host.states
    rows: dict[str, float] = {}
    if states.optimizer + states.gradients > 0:
        rows = {"arriving_gradients": states.gradients, "updated_parameters": states.parameters}
        if not states.on_nvme:
            rows = {"optimizer": states.optimizer, **rows}
    if states.activations > 0:
        rows["activations"] = states.activations
    return {name: round(num_bytes) for name, num_bytes in rows.items()}


def mean_peak_flops_per_s(cluster: ClusterSpec, precision: str) -> float:
    """Peak arithmetic of a device, the mean where they differ."""
    if cluster.mixed is None:
        return peak_flops_per_s(cluster.profile.device, precision)
    parts = [group.cluster for group in cluster.mixed.groups]
    peaks = [peak_flops_per_s(part.profile.device, precision) * part.num_devices for part in parts]
    return sum(peaks) / cluster.num_devices


def mean_memory_bytes_per_s(cluster: ClusterSpec) -> float:
    """Memory bandwidth of a device, the mean where they differ."""
    parts = [cluster] if cluster.mixed is None else [group.cluster for group in cluster.mixed.groups]
    rates = [part.profile.device.memory_bandwidth_bytes_per_s.value * part.num_devices for part in parts]
    return sum(rates) / sum(part.num_devices for part in parts)


def term_bytes(ledger: MemoryLedger) -> dict[MemoryTerm, int]:
    """The terms of ``ledger`` that there are."""
    return {name: round(num_bytes) for name, num_bytes in ledger.rows if round(num_bytes) > 0}


def term_bytes_exactly(ledger: MemoryLedger) -> dict[MemoryTerm, int]:
    """The terms of ``ledger`` that there are, in whole bytes that add up to its rounded total."""
    rows = [(name, num_bytes) for name, num_bytes in ledger.rows if num_bytes > 0]
    ends = [round(end) for end in accumulate((num_bytes for _, num_bytes in rows), initial=0.0)]
    pairs = zip(rows, pairwise(ends), strict=True)
    return {name: end - start for (name, _), (start, end) in pairs if end > start}


def rank_memory_bytes(layout: Layout, cluster: ClusterSpec) -> tuple[float, ...]:
    """The whole memory of one device of each pipeline rank, or share of the batch."""
    groups = _devices_of_groups(cluster)
    names = layout.groups if layout.shares else group_of_ranks(layout, cluster)
    clusters = [cluster if name is None else groups[name] for name in names]
    return tuple(each.profile.device.memory_bytes.value for each in clusters)


def fit_probability(found: Evaluated, target: PricingTarget) -> float | None:
    """That the fullest rank fits into its device; None where predictions of memory were never held against runs.

    All ranks are one prediction: where it is off, it is off on all of them.
    """
    band = target.recipe.memory_band
    if band is None:
        return None
    needs = zip(found.ledgers, rank_memory_bytes(found.layout, target.cluster), strict=True)
    return min(band.fit_probability(ledger.total_bytes, whole) for ledger, whole in needs)


def candidate(label: str, found: Evaluated, target: PricingTarget) -> Candidate:
    """A row of the table beside the plan."""
    layout = found.layout
    return Candidate(
        label=label,
        mesh=mesh_section(layout),
        zero_stage=layout.zero_stage,
        micro_batch_size=layout.micro_batch_size,
        schedule=layout.schedule,
        virtual_stages=layout.virtual_stages,
        recompute=found.only_mode,
        sequence_parallel=layout.sequence_parallel,
        offload=layout.offload,
        offloads_activations=any(isinstance(mode, KeptOnHost) for mode in found.modes),
        cp_method=layout.cp_method,
        device_groups=layout.groups,
        micro_batch_sizes=layout.shares,
        step_time_s=found.step_time_s,
        peak_memory_bytes=round(found.peak_memory_bytes),
        fits=found.fits,
        fit_probability=fit_probability(found, target),
    )


def layout_text(layout: Layout) -> str:
    """A layout in one line: the degrees above 1, ZeRO stage, micro-batch, recomputation and offload."""
    degrees = {name: degree for name, degree in asdict(layout.mesh).items() if degree is not None}
    parts = [f"{name}={degree}" for name, degree in degrees.items() if degree > 1 or name == "etp"] or ["one GPU"]
    if layout.mesh.cp > 1:
        parts.append(f"cp by {layout.cp_method}")
    parts += [
        f"ZeRO {layout.zero_stage}",
        f"micro-batch {' and '.join(map(str, layout.shares)) or layout.micro_batch_size}",
        f"recompute {'any' if layout.recompute is None else layout.recompute.value}",
    ]
    if layout.offload is not Offload.NONE:
        parts.append(f"offload {layout.offload.value}")
    if layout.offloads_activations:
        parts.append("activations to the host where that helps")
    return ", ".join(parts)
