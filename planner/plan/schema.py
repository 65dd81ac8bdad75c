"""Plan: how one training run is split, as frozen, versioned data. Nothing in it is ever executed."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

from costmodels.vocabulary.choices import (
    ContextMethod,
    Offload,
    Optimizer,
    Precision,
    Recompute,
    parse_placement,
)
from costmodels.vocabulary.mesh import Mesh
from costmodels.vocabulary.schedules import ScheduleName
from costmodels.vocabulary.terms import MemoryTerm, Phase, Provenance, Term

SCHEMA_VERSION = 1

Positive = Annotated[int, Field(ge=1)]
PlacementText = Annotated[str, Field(max_length=16)]


class _Value(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class ModelSection(_Value):
    """Which model. ``source`` is MODEL as the user named it; ``digest`` that of its graph."""

    source: str
    digest: str
    num_params: Annotated[int, Field(ge=0)]


class TrainingSection(_Value):
    """What is trained with. Batch sizes are in sequences."""

    global_batch_size: Positive
    seq_len: Positive
    precision: Precision
    optimizer: Optimizer


class MeshSection(_Value):
    """Degrees; pp * dp_replicate * dp_shard * cp * tp is the number of devices."""

    pp: Positive = 1
    dp_replicate: Positive = 1
    dp_shard: Positive = 1
    cp: Positive = 1
    tp: Positive = 1
    ep: Positive = 1

    def shape(self) -> Mesh:
        """The same degrees as a value of the vocabulary."""
        return Mesh(self.pp, self.dp_replicate, self.dp_shard, self.cp, self.tp, self.ep)


class StageSection(_Value):
    """One pipeline stage. Stage ``index`` runs on ``pp_rank``; ``modules`` are whole modules.

    ``device_group``: where devices differ, the group that all devices of the rank belong to.
    """

    index: Annotated[int, Field(ge=0)]
    pp_rank: Annotated[int, Field(ge=0)]
    modules: tuple[str, ...]
    device_group: str | None = None


class PipelineSection(_Value):
    """The micro-batches and how they flow. ``virtual_stages`` is per rank."""

    schedule: ScheduleName
    num_microbatches: Positive
    micro_batch_size: Positive
    virtual_stages: Positive = 1
    stages: tuple[StageSection, ...]


class ModulePlacement(_Value):
    """Placements on the ``tp`` axis of one module's own parameters and of its output.

    ``module`` is an FQN in which a component ``*`` stands for any one component. Parameters not
    named by any entry are replicated. ``output`` is what the module's output is redistributed to.
    """

    module: str
    parameters: dict[str, PlacementText] = Field(default_factory=dict)
    output: PlacementText | None = None

    @field_validator("parameters")
    @classmethod
    def _check_parameters(cls, value: dict[str, str]) -> dict[str, str]:
        for text in value.values():
            parse_placement(text)
        return value

    @field_validator("output")
    @classmethod
    def _check_output(cls, value: str | None) -> str | None:
        if value is not None:
            parse_placement(value)
        return value


class RecomputeRule(_Value):
    """Activation checkpointing of ``modules``; modules not named keep their activations."""

    mode: Recompute
    modules: tuple[str, ...]


class PlacementSection(_Value):
    """Tensor parallelism, and the modules that FSDP shards and gathers as one unit each."""

    tp: tuple[ModulePlacement, ...] = ()
    sequence_parallel: bool = False
    stage_input: PlacementText = "replicate"  # placement on tp of what a pipeline stage sends and receives
    sharded_units: tuple[str, ...] = ()


class PredictionSection(_Value):
    """What the cost models say of the plan. The executor ignores this."""

    step_time_s: Annotated[float, Field(gt=0)]
    tokens_per_s_per_gpu: float
    model_flops_per_gpu_per_s: float
    mfu: float
    peak_memory_bytes: tuple[int, ...]  # per pp rank
    memory_capacity_bytes: int  # what the profile leaves to training on one device, the smallest where devices differ
    memory_capacities_bytes: tuple[int, ...] = ()  # per pp rank, where devices differ
    memory_breakdown_bytes: tuple[dict[MemoryTerm, int], ...] = ()  # per pp rank, at its peak
    memory_phases_bytes: tuple[dict[Phase, dict[MemoryTerm, int]], ...] = ()  # per pp rank: phase, term, bytes
    memory_term_tags: dict[MemoryTerm, Provenance] = Field(default_factory=dict)
    # Of one node, at its fullest: the models being built at the start, and from then on what is offloaded.
    host_memory_bytes: dict[str, int] = Field(default_factory=dict)
    nvme_bytes: int = 0  # of one node
    breakdown_s: dict[Term, float]  # where the step time goes on the slowest rank; sums to ``step_time_s``
    usd_per_step: float | None = None
    step_time_low_s: float | None = None  # band that held most published runs the cost models were not fitted to
    step_time_high_s: float | None = None
    step_time_coverage: float | None = None  # share of those runs inside the band
    # That the fullest rank fits, by what published runs needed over what was predicted; None: never compared.
    fit_probability: float | None = None


class Candidate(_Value):
    """A runner-up or baseline, for the table beside the plan."""

    label: str
    mesh: MeshSection
    zero_stage: Annotated[int, Field(ge=0, le=3)]
    micro_batch_size: Positive
    schedule: ScheduleName
    virtual_stages: Positive
    recompute: Recompute | None  # None: differs between modules
    sequence_parallel: bool
    offload: Offload = Offload.NONE
    offloads_activations: bool = False  # of some blocks
    cp_method: ContextMethod = ContextMethod.ALL_GATHER
    device_groups: tuple[str, ...] = ()  # in the order of the pipeline, where devices differ
    step_time_s: float
    peak_memory_bytes: int
    fits: bool
    fit_probability: float | None = None


class CaseSection(_Value):
    """One thing that may go wrong, and the step then; ``fastest_step_time_s`` of the plan that is fastest nominally."""

    case: str
    step_time_s: float
    fastest_step_time_s: float


class SearchSection(_Value):
    """What the search proved. ``gap`` = (step_time_s - bound_step_time_s) / step_time_s."""

    status: Literal["OPTIMAL", "FEASIBLE", "PRICED"]
    bound_step_time_s: float
    gap: float
    num_candidates: int
    elapsed_s: float
    memory_risk: float = 0.5  # that a plan was allowed of not fitting; 0.5: predictions are taken at their word
    error_between_layouts: float | None = None  # of predicted ratios of two layouts' times, on published runs
    preferred_within: float = 0.0  # above 0: by at most so much slower than the first runner-up, but simpler
    pins: dict[str, int | bool | str] = Field(default_factory=dict)  # what the user fixed, as ``Pins`` names it
    baseline: Candidate | None = None  # the best plain FSDP plan
    runners_up: tuple[Candidate, ...] = ()
    # Where devices are left idle: the fastest found over all of them.
    all_devices: Candidate | None = None
    cases: tuple[CaseSection, ...] = ()  # that a robust plan was chosen for, the nominal one first
    fewer_devices: tuple[Positive, ...] = ()  # smaller numbers of devices that were searched besides
    # Where the plan takes more than nine tenths of the memory it may: the fastest found that does not.
    roomier: Candidate | None = None


class RunSection(_Value):
    """A whole training run of ``num_tokens``, without interruptions. Only devices that are used are counted."""

    num_tokens: Positive
    num_steps: Positive
    days: float
    gpu_hours: float
    usd: float | None = None  # None: the profile has no price


class Plan(_Value):
    """The whole answer. Key names are the contract of plan.json."""

    schema_version: Literal[1] = SCHEMA_VERSION
    model: ModelSection
    hardware: str
    framework: str = "planner"  # whose recipe the prediction is of; `planner run` is the executor whatever it says
    num_devices: Positive  # that are used
    idle_devices: Annotated[int, Field(ge=0)] = 0  # of those there are, what the plan leaves to others
    training: TrainingSection
    mesh: MeshSection
    zero_stage: Annotated[int, Field(ge=0, le=3)]
    pipeline: PipelineSection
    placements: PlacementSection
    recompute: tuple[RecomputeRule, ...] = ()
    offload: Offload = Offload.NONE
    # Blocks that keep what they do not recompute in host memory from their forward to their backward pass.
    offloaded_activations: tuple[str, ...] = ()
    cp_method: ContextMethod = ContextMethod.ALL_GATHER  # how attention reaches other ranks' positions, where cp > 1
    prediction: PredictionSection | None = None
    search: SearchSection | None = None
    run: RunSection | None = None
    warnings: tuple[str, ...] = ()
