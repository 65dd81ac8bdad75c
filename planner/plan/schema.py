"""Plan: how one training run is split, as frozen, versioned data. Nothing in it is ever executed."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal, NamedTuple, TypeVar

from pydantic import BaseModel, ConfigDict, FailFast, Field, JsonValue, PrivateAttr, field_validator

from costmodels.vocabulary.bounds import (
    MOST_BYTES,
    MOST_DEVICES,
    MOST_ITEMS,
    MOST_SEQ_LEN,
    MOST_SEQUENCES,
    MOST_STAGES_A_RANK,
    MOST_TEXT,
    MOST_TOKENS,
)
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

# Numbers are numbers: strict fields take no text for one, and no number for a yes or no.
Degree = Annotated[int, Field(strict=True, ge=1, le=MOST_DEVICES)]
StagesARank = Annotated[int, Field(strict=True, ge=1, le=MOST_STAGES_A_RANK)]
Sequences = Annotated[int, Field(strict=True, ge=1, le=MOST_SEQUENCES)]
Tokens = Annotated[int, Field(strict=True, ge=1, le=MOST_SEQ_LEN)]
Index = Annotated[int, Field(strict=True, ge=0, le=MOST_DEVICES * MOST_STAGES_A_RANK)]
Amount = Annotated[int, Field(strict=True, ge=0, le=MOST_BYTES)]  # of bytes, or of what else is counted
Number = Annotated[float, Field(strict=True, ge=-1e30, le=1e30, allow_inf_nan=False)]  # any that is one
Seconds = Annotated[float, Field(strict=True, gt=0, le=1e30, allow_inf_nan=False)]  # that something is divided by
IdleDevices = Annotated[int, Field(strict=True, ge=0, le=MOST_DEVICES)]
Flag = Annotated[bool, Field(strict=True)]
ZeroStage = Annotated[int, Field(strict=True, ge=0, le=3)]
Text = Annotated[str, Field(max_length=MOST_TEXT)]
PlacementText = Annotated[str, Field(max_length=16)]
Value = TypeVar("Value")
Several = Annotated[tuple[Value, ...], Field(max_length=MOST_ITEMS), FailFast()]


class _Value(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Origin(NamedTuple):
    """Where a plan was read from, and whether the user trusts code that lies elsewhere."""

    folder: Path
    is_trusted: bool


class ModelSection(_Value):
    """Which model. ``source`` is MODEL as the user named it; ``digest`` that of the model, as its graph has it.

    In a file a ``source`` that names a file is relative to the folder of the plan, otherwise to the current folder.
    ``files``: of a Python model the SHA-256 of each file that its code was made of, by its path from the folder of the
    model file: that file itself, and what it imported or read from there while it was traced. Plans made before these
    were recorded have none.
    """

    source: Text
    digest: Text
    num_params: Amount  # 0: nobody has counted them, as in a plan by hand
    files: dict[str, Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]] = Field(default_factory=dict)
    _origin: Origin | None = PrivateAttr(None)

    @property
    def origin(self) -> Origin | None:
        """Where it was read from; None: it was made in this process, or names no code."""
        return self._origin

    def found_in(self, origin: Origin | None, source: str) -> ModelSection:
        """The same model, as a plan from ``origin`` names it here."""
        found = self.model_copy(update={"source": source})
        found._origin = origin
        return found


class TrainingSection(_Value):
    """What is trained with. Batch sizes are in sequences."""

    global_batch_size: Sequences
    seq_len: Tokens
    precision: Precision
    optimizer: Optimizer


class MeshSection(_Value):
    """Degrees; pp * dp_replicate * dp_shard * cp * tp is the number of devices.

    ``etp``: tensor-parallel degree of experts; without it tp.
    """

    pp: Degree = 1
    dp_replicate: Degree = 1
    dp_shard: Degree = 1
    cp: Degree = 1
    tp: Degree = 1
    ep: Degree = 1
    etp: Annotated[Degree | None, Field(exclude_if=lambda degree: degree is None)] = None

    def shape(self) -> Mesh:
        """The same degrees as a value of the vocabulary."""
        etp = None if self.etp == self.tp else self.etp
        return Mesh(self.pp, self.dp_replicate, self.dp_shard, self.cp, self.tp, self.ep, etp)


class StageSection(_Value):
    """One pipeline stage. Stage ``index`` runs on ``pp_rank``; ``modules`` are whole modules.

    ``device_group``: where devices differ, the group that all devices of the rank belong to.
    """

    index: Index
    pp_rank: Index
    modules: Several[Text]
    device_group: Text | None = None


class BatchShare(_Value):
    """What one group of unlike devices takes of every micro-batch: so many sequences on each of its replicas."""

    device_group: Text
    num_replicas: Degree
    micro_batch_size: Sequences


class PipelineSection(_Value):
    """The micro-batches and how they flow. ``virtual_stages`` is per rank.

    ``batch_shares``: where data-parallel ranks have micro-batches of unlike sizes, those of the first ranks first, and
    ``micro_batch_size`` is the largest; empty where all have that.
    """

    schedule: ScheduleName
    num_microbatches: Sequences
    micro_batch_size: Sequences
    virtual_stages: StagesARank = 1
    stages: Several[StageSection]
    batch_shares: Annotated[Several[BatchShare], Field(exclude_if=lambda shares: not shares)] = ()


class ModulePlacement(_Value):
    """Placements on the ``tp`` axis of one module's own parameters and of its output.

    ``module`` is an FQN in which a component ``*`` stands for any one component. Parameters not
    named by any entry are replicated. ``output`` is what the module's output is redistributed to.
    """

    module: Text
    parameters: dict[Text, PlacementText] = Field(default_factory=dict)
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
    modules: Several[Text]


class PlacementSection(_Value):
    """Tensor parallelism, the modules that FSDP shards and gathers as one unit each, and the experts' parameters.

    ``experts``: FQNs, ``*`` for any one component, of the parameters (experts, in, out) that ``ep`` divides.
    """

    tp: Several[ModulePlacement] = ()
    sequence_parallel: Flag = False
    stage_input: PlacementText = "replicate"  # placement on tp of what a pipeline stage sends and receives
    sharded_units: Several[Text] = ()
    experts: Annotated[Several[Text], Field(exclude_if=lambda names: not names)] = ()


class PredictionSection(_Value):
    """What the cost models say of the plan. The executor ignores this.

    Where replicas on unlike devices have shares of the batch, what is said of each pp rank is said of each share.
    """

    step_time_s: Seconds
    tokens_per_s_per_gpu: Number
    model_flops_per_gpu_per_s: Number
    mfu: Number
    peak_memory_bytes: Several[Amount]  # per pp rank
    memory_capacity_bytes: Amount  # what the profile leaves to training on a device, the smallest where they differ
    memory_capacities_bytes: Several[Amount] = ()  # per pp rank, where devices differ
    memory_breakdown_bytes: Several[dict[MemoryTerm, Amount]] = ()  # per pp rank, at its peak
    memory_phases_bytes: Several[dict[Phase, dict[MemoryTerm, Amount]]] = ()  # per pp rank: phase, term, bytes
    memory_term_tags: dict[MemoryTerm, Provenance] = Field(default_factory=dict)
    # Of one node, at its fullest: the models being built at the start, and from then on what is offloaded.
    host_memory_bytes: dict[Text, Amount] = Field(default_factory=dict)
    nvme_bytes: Amount = 0  # of one node
    breakdown_s: dict[Term, Number]  # where the step time goes on the slowest rank; sums to ``step_time_s``
    usd_per_step: Number | None = None
    step_time_low_s: Number | None = None  # band that held most published runs the cost models were not fitted to
    step_time_high_s: Number | None = None
    step_time_coverage: Number | None = None  # share of those runs inside the band
    step_time_band_of: Text = ""  # what is known of the cluster, by which that band was taken
    calibrated_by: Text = ""  # the measured runs that correct the profile; "": it is not calibrated
    # That the fullest rank fits, by what published runs needed over what was predicted; None: never compared.
    fit_probability: Number | None = None

    @property
    def rooms_bytes(self) -> tuple[int, ...]:
        """What the profile leaves to training on a device of each pp rank."""
        return self.memory_capacities_bytes or (self.memory_capacity_bytes,) * len(self.peak_memory_bytes)


class Candidate(_Value):
    """A runner-up or baseline, for the table beside the plan."""

    label: Text
    mesh: MeshSection
    zero_stage: ZeroStage
    micro_batch_size: Sequences
    schedule: ScheduleName
    virtual_stages: StagesARank
    recompute: Recompute | None  # None: differs between modules
    sequence_parallel: Flag
    offload: Offload = Offload.NONE
    offloads_activations: Flag = False  # of some blocks
    cp_method: ContextMethod = ContextMethod.ALL_GATHER
    device_groups: Several[Text] = ()  # in the order of the pipeline, where devices differ
    # Of the replicas on each of these groups, where they have unlike shares of a batch.
    micro_batch_sizes: Annotated[Several[Sequences], Field(exclude_if=lambda sizes: not sizes)] = ()
    step_time_s: Number
    peak_memory_bytes: Amount
    fits: Flag
    fit_probability: Number | None = None


class CaseSection(_Value):
    """One thing that may go wrong, and the step then; ``fastest_step_time_s`` of the plan that is fastest nominally."""

    case: Text
    step_time_s: Number
    fastest_step_time_s: Number


class SearchSection(_Value):
    """What the search proved. ``gap`` = (step_time_s - bound_step_time_s) / step_time_s."""

    status: Literal["OPTIMAL", "FEASIBLE", "PRICED"]
    bound_step_time_s: Number
    gap: Number
    num_candidates: Amount
    elapsed_s: Number
    memory_risk: Number = 0.5  # that a plan was allowed of not fitting; 0.5: predictions are taken at their word
    error_between_layouts: Number | None = None  # of predicted ratios of two layouts' times, on published runs
    preferred_within: Number = 0.0  # above 0: by at most so much slower than the first runner-up, but simpler
    pins: dict[Text, Amount | Flag | Text] = Field(default_factory=dict)  # what the user fixed, as ``Pins`` names it
    baseline: Candidate | None = None  # the best plain FSDP plan
    runners_up: Several[Candidate] = ()
    # Where devices are left idle: the fastest found over all of them.
    all_devices: Candidate | None = None
    cases: Several[CaseSection] = ()  # that a robust plan was chosen for, the nominal one first
    fewer_devices: Several[Degree] = ()  # smaller numbers of devices that were searched besides
    # Where the plan takes more than nine tenths of the memory it may: the fastest found that does not.
    roomier: Candidate | None = None


class RunSection(_Value):
    """A whole training run of ``num_tokens``, without interruptions. Only devices that are used are counted."""

    num_tokens: Annotated[int, Field(strict=True, ge=1, le=MOST_TOKENS)]
    num_steps: Annotated[int, Field(strict=True, ge=1, le=MOST_TOKENS)]
    days: Number
    gpu_hours: Number
    usd: Number | None = None  # None: the profile has no price


class Plan(_Value):
    """The whole answer. Key names are the contract of plan.json."""

    schema_version: Literal[1] = SCHEMA_VERSION
    model: ModelSection
    hardware: Text
    # The cluster itself (``hardware_profiles.mixed.kept``), where no shipped profile of that name says what it is.
    hardware_profile: dict[Text, JsonValue] | None = None
    framework: Text = "planner"  # whose recipe the prediction is of; `planner run` is the executor whatever it says
    num_devices: Degree  # that are used
    idle_devices: IdleDevices = 0  # of those there are, what the plan leaves to others
    training: TrainingSection
    mesh: MeshSection
    zero_stage: ZeroStage
    pipeline: PipelineSection
    placements: PlacementSection
    recompute: Several[RecomputeRule] = ()
    offload: Offload = Offload.NONE
    # Blocks that keep what they do not recompute in host memory from their forward to their backward pass.
    offloaded_activations: tuple[str, ...] = ()
    cp_method: ContextMethod = ContextMethod.ALL_GATHER  # how attention reaches other ranks' positions, where cp > 1
    prediction: PredictionSection | None = None
    search: SearchSection | None = None
    run: RunSection | None = None
    warnings: Several[Text] = ()

    @property
    def made_on(self) -> str | dict[str, JsonValue]:
        """The cluster that it was made for."""
        return self.hardware if self.hardware_profile is None else self.hardware_profile
