"""What a training framework's config says of a run, in our words: what every format is written from and read into."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Protocol

from costmodels.vocabulary.choices import ContextMethod, Offload, Optimizer, Precision, Recompute
from costmodels.vocabulary.schedules import ScheduleName
from planner.models.config import FamilyConfig
from planner.plan.schema import Plan


@dataclass(frozen=True)
class Settings:
    """A run's layout. None: the config does not say. Batch sizes are in sequences.

    ``dp_shard`` * ``cp`` ranks divide what ``zero_stage`` divides. ``stage_blocks`` counts the model's repeated blocks
    of each pipeline stage, in the order of the stages; ``end_blocks`` says as how many of them the embedding and the
    head count where the framework shares them out by itself. ``recompute`` is of every block, or one mode for each.
    """

    num_devices: int | None = None
    pp: int | None = None
    dp_replicate: int | None = None
    dp_shard: int | None = None
    cp: int | None = None
    tp: int | None = None
    ep: int | None = None
    zero_stage: int | None = None
    micro_batch_size: int | None = None
    num_microbatches: int | None = None
    global_batch_size: int | None = None
    seq_len: int | None = None
    precision: Precision | None = None
    optimizer: Optimizer | None = None
    schedule: ScheduleName | None = None
    virtual_stages: int | None = None
    stage_blocks: tuple[int, ...] | None = None
    recompute: Recompute | tuple[Recompute, ...] | None = None
    sequence_parallel: bool | None = None
    offload: Offload | None = None
    cp_method: ContextMethod | None = None
    etp: int | None = None  # tensor-parallel degree of experts where it is not tp
    end_blocks: tuple[int, int] | None = None

    def said(self) -> dict[str, object]:
        """What the config says, by name."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value for name, value in values.items() if value is not None}

    def joined(self, *others: Settings) -> Settings:
        """With what ``others`` say, which say other things."""
        found = self
        for other in others:
            found = replace(found, **other.said())  # pyright: ignore[reportArgumentType]
        return found


@dataclass(frozen=True)
class Layout:
    """The same as ``Settings`` where everything is known: what a plan says. ``num_blocks`` None: not one stack."""

    num_devices: int
    pp: int
    dp_replicate: int
    dp_shard: int
    cp: int
    tp: int
    ep: int
    zero_stage: int
    micro_batch_size: int
    num_microbatches: int
    global_batch_size: int
    seq_len: int
    precision: Precision
    optimizer: Optimizer
    schedule: ScheduleName
    virtual_stages: int
    stage_blocks: tuple[int, ...] | None
    recompute: Recompute | tuple[Recompute, ...]
    sequence_parallel: bool
    offload: Offload
    cp_method: ContextMethod
    etp: int | None = None  # tensor-parallel degree of experts where it is not tp
    offloads_activations: bool = False  # of some blocks, to host memory
    micro_batch_sizes: tuple[int, ...] = ()  # of groups of replicas, where they differ
    end_blocks: tuple[int, int] | None = None  # where ``stage_blocks`` is left to the framework, as in ``Settings``

    @property
    def dp(self) -> int:
        """Data-parallel degree."""
        return self.dp_replicate * self.dp_shard

    @property
    def num_blocks(self) -> int | None:
        """Repeated blocks of the whole model."""
        return None if self.stage_blocks is None else sum(self.stage_blocks)

    @property
    def is_cut_evenly(self) -> bool:
        """Whether every stage holds as many blocks."""
        return self.pp == 1 or (self.stage_blocks is not None and len(set(self.stage_blocks)) == 1)

    def modes_by_stage(self) -> tuple[tuple[Recompute, ...], ...] | None:
        """What the blocks of each stage recompute; None where the blocks are not known."""
        if self.stage_blocks is None:
            return None
        modes = (self.recompute,) * sum(self.stage_blocks) if isinstance(self.recompute, Recompute) else self.recompute
        ends = [sum(self.stage_blocks[: i + 1]) for i in range(len(self.stage_blocks))]
        return tuple(modes[end - size : end] for end, size in zip(ends, self.stage_blocks, strict=True))


class Asked(Protocol):
    """A layout of a model, of which a framework says whether it can run it: a ``Job``, or before there is a plan."""

    @property
    def layout(self) -> Layout:
        """What is asked about."""
        ...

    @property
    def shape(self) -> FamilyConfig | None:
        """The model's, where it is one of the generic families."""
        ...

    @property
    def preset(self) -> str | None:
        """The name of the model where it is a preset."""
        ...

    @property
    def devices_per_node(self) -> int:
        """Devices of a node."""
        ...


@dataclass(frozen=True)
class Job:
    """A plan to be written for a target. None: not known.

    ``shape`` is the model's, where it is one of the generic families; ``preset`` the name of the model where it is a
    preset. ``plan_path`` is where ``planner run`` finds the plan, ``device`` the name of the GPU in its profile.
    """

    plan: Plan
    layout: Layout
    shape: FamilyConfig | None
    preset: str | None
    plan_path: str
    devices_per_node: int
    device: str | None = None

    @property
    def num_nodes(self) -> int:
        """Nodes that the plan's devices fill; ``devices_on_node`` of each."""
        return max(1, self.layout.num_devices // self.devices_per_node)

    @property
    def devices_on_node(self) -> int:
        """Devices of a node that take part."""
        return min(self.layout.num_devices, self.devices_per_node)


def layout_of(plan: Plan) -> Layout:
    """What ``plan`` says, in one form for plans that mean the same.

    Without a pipeline the schedule says nothing, nor does a ZeRO stage over one rank, nor a way of context parallelism
    over one rank.
    """
    mesh, pipeline = plan.mesh, plan.pipeline
    stages = stack_of([stage.modules for stage in plan.pipeline.stages])
    shards = mesh.dp_shard * mesh.cp > 1
    return Layout(
        num_devices=plan.num_devices,
        pp=mesh.pp, dp_replicate=mesh.dp_replicate, dp_shard=mesh.dp_shard, cp=mesh.cp, tp=mesh.tp, ep=mesh.ep,
        zero_stage=plan.zero_stage if shards else 0,
        micro_batch_size=pipeline.micro_batch_size,
        num_microbatches=pipeline.num_microbatches,
        global_batch_size=plan.training.global_batch_size,
        seq_len=plan.training.seq_len,
        precision=plan.training.precision,
        optimizer=plan.training.optimizer,
        schedule=pipeline.schedule if mesh.pp > 1 else ScheduleName.ONE_F_ONE_B,
        virtual_stages=pipeline.virtual_stages,
        stage_blocks=None if stages is None else tuple(map(len, stages)),
        recompute=_recompute_of(plan, stages),
        sequence_parallel=plan.placements.sequence_parallel,
        offload=plan.offload,
        cp_method=plan.cp_method if mesh.cp > 1 else ContextMethod.ALL_GATHER,
        etp=mesh.shape().etp,
        offloads_activations=bool(plan.offloaded_activations),
        micro_batch_sizes=tuple(share.micro_batch_size for share in pipeline.batch_shares),
    )  # fmt: skip


def stack_of(stages: Sequence[Sequence[str]]) -> tuple[tuple[str, ...], ...] | None:
    """Of modules by stage the repeated blocks: those called by a number. None where they form no single stack."""
    blocks = tuple(tuple(name for name in names if name.rpartition(".")[2].isdigit()) for names in stages)
    stacks = Counter(name.rpartition(".")[0] for names in blocks for name in names)
    numbers = [int(name.rpartition(".")[2]) for names in blocks for name in names]
    return blocks if len(stacks) == 1 and numbers == list(range(len(numbers))) else None


def _recompute_of(plan: Plan, stages: tuple[tuple[str, ...], ...] | None) -> Recompute | tuple[Recompute, ...]:
    """One mode where all blocks have the same, else the mode of each block."""
    named = {module: rule.mode for rule in plan.recompute for module in rule.modules}
    if stages is None:
        return (*sorted({*named.values()}), Recompute.NONE) if named else Recompute.NONE
    modes = tuple(named.get(name, Recompute.NONE) for names in stages for name in names)
    return modes[0] if len(set(modes)) == 1 else modes
