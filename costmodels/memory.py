"""Device memory of training state per parameter, and the ledger of everything a rank holds.

Bytes per parameter under FSDP2 (``fully_shard``), d = ranks that shard; the master copy is what the optimiser updates:

    16-bit compute, Adam      copy for compute   gradients   master + moments     total
    ZeRO 0                    2                  4           4 + 8                18
    ZeRO 1                    2                  4           (4 + 8)/d            6 + 12/d
    ZeRO 2                    2                  4/d         (4 + 8)/d            2 + 16/d
    ZeRO 3                    0 (gathered units  4/d         (4 + 8)/d            16/d
                              come extra)
    fp32: the copy for compute has 4 bytes. SGD without momentum: no moments.
    Offloaded: master and moments lie on the host; ZeRO 3 keeps its shard of the copy for compute in their place, 2/d.

The copy for compute exists in fp32 and in a group of one rank too: FSDP2 keeps the sharded parameters and copies them
into gathered ones (torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py, ``wait_for_unshard``). Gradients
accumulate in fp32 (``MixedPrecisionPolicy(reduce_dtype=torch.float32)``). fp8 keeps its weights in bf16 and casts them
inside each product.

Sources: Rajbhandari et al., "ZeRO" (2020), for what each stage divides; Narayanan et al. (2021) and Korthikanti et al.
(2022), for 18 bytes and 6 + 12/d with fp32 gradients; torch 2.13's FSDP2 for where the bytes lie.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum

from costmodels.recipe import StateFacts
from hardware_profiles.schema import SoftwareProfile

COMPUTE_BYTES = {"bf16": 2, "fp16": 2, "fp8": 2, "fp32": 4}
MASTER_BYTES = 4
GRADIENT_BYTES = 4
# torch.optim: two fp32 moments; SGD without momentum keeps nothing.
MOMENT_BYTES = {"adamw": 8, "adam": 8, "sgd": 0}

Rows = tuple[tuple[str, float], ...]


@dataclass(frozen=True)
class StateBytes:
    """Bytes on one rank; ``optimizer`` holds the fp32 master copy and, from the first step on, the moments."""

    parameters: float
    gradients: float
    optimizer: float
    moments: float = 0.0  # of ``optimizer``

    @property
    def before_first_step(self) -> StateBytes:
        """The same before the optimiser has made its moments."""
        return replace(self, optimizer=self.optimizer - self.moments, moments=0.0)

    def plus(self, other: StateBytes) -> StateBytes:
        """Both together."""
        return StateBytes(
            self.parameters + other.parameters,
            self.gradients + other.gradients,
            self.optimizer + other.optimizer,
            self.moments + other.moments,
        )

    @property
    def total(self) -> float:
        """All three together."""
        return self.parameters + self.gradients + self.optimizer


def state_bytes(  # over 6 arguments: every one is a choice of the recipe, and all are given by name
    num_trainable: float,
    *,
    num_frozen: float = 0.0,
    precision: str,
    optimizer: str,
    zero_stage: int,
    num_shards: int,
    facts: StateFacts | None = None,
    is_replicated: bool = False,
    on_host: bool = False,
) -> StateBytes:
    """State of so many parameter elements on one rank, between steps and at its largest.

    ``num_shards``: ranks the state is divided over (dp_shard, times cp where that shards too).
    ``facts``: how another framework keeps gradients; ``is_replicated``: there is more than one
    data-parallel rank, which is where its buffers come in. Frozen parameters have neither gradients nor moments, yet
    FSDP2 keeps both of their copies. ZeRO 3
    leaves out the units that are gathered at the moment. ``on_host``: master copy and moments do not lie on the
    device. ValueError names a value that is not known.
    """
    if precision not in COMPUTE_BYTES:
        raise ValueError(f"precision must be one of {', '.join(COMPUTE_BYTES)}, got {precision!r}")
    if optimizer not in MOMENT_BYTES:
        raise ValueError(f"optimizer must be one of {', '.join(MOMENT_BYTES)}, got {optimizer!r}")
    if zero_stage not in range(4):
        raise ValueError(f"ZeRO stage must be 0, 1, 2 or 3, got {zero_stage}")
    if num_shards < 1:
        raise ValueError(f"the number of shards must be at least 1, got {num_shards}")
    num_elements = num_trainable + num_frozen
    shards = num_shards if zero_stage >= 1 else 1
    gradient_shards = shards if zero_stage >= 2 else 1
    gradient_bytes, buffer_bytes, extra_bytes = float(GRADIENT_BYTES), 0.0, 0.0
    if facts is not None:
        gradient_bytes, extra_bytes = facts.gradient_bytes.value, facts.optimizer_extra_bytes.value
        buffers = facts.sharded_replica_bytes if zero_stage >= 1 else facts.replica_bytes
        buffer_bytes = buffers.value if is_replicated else 0.0
    moments = MOMENT_BYTES[optimizer] + extra_bytes
    compute_copy = num_elements * COMPUTE_BYTES[precision]
    gradients = num_trainable * (gradient_bytes / gradient_shards + buffer_bytes)
    if on_host:
        return StateBytes(compute_copy / (shards if zero_stage == 3 else 1), gradients, optimizer=0.0)
    return StateBytes(
        parameters=compute_copy * (zero_stage < 3),
        gradients=gradients,
        optimizer=(num_elements * MASTER_BYTES + num_trainable * moments) / shards,
        moments=num_trainable * moments / shards,
    )


class Phase(StrEnum):
    """When a rank's memory is looked at; ``backward`` is any moment of it."""

    INITIALISATION = "initialisation"
    FORWARD = "forward"
    BACKWARD = "backward"
    OPTIMIZER = "optimizer"
    CHECKPOINT = "checkpoint"


# Terms that are neither tensors that some line of code allocates (specified) nor seen on machines: fitted to runs.
FITTED_TERMS = frozenset({"allocator_reserve", "waiting_collectives"})
MEASURED_TERMS = frozenset({"communicators", "context"})
# Terms that are allocated once and stay: they leave no gaps. All other tensors come and go in every step.
LASTING_TERMS = frozenset({"parameters", "gradients", "optimizer"})
# Terms that PyTorch counts as reserved and not as allocated, and those that its allocator does not see.
RESERVED_TERMS = frozenset({"waiting_collectives", "stranded_copies", "allocator_reserve"})
UNALLOCATED_TERMS = MEASURED_TERMS


def tag_of(term: str) -> str:
    """How the bytes of ``term`` are known: specified, fitted or measured."""
    return "fitted" if term in FITTED_TERMS else "measured" if term in MEASURED_TERMS else "specified"


@dataclass(frozen=True)
class MemoryLedger:
    """What one rank holds at one moment: one row a term, in bytes, in the order they were added."""

    rows: Rows = ()

    @property
    def total_bytes(self) -> float:
        """Sum of all rows: what the device has to have."""
        return sum(num_bytes for _, num_bytes in self.rows)

    @property
    def reserved_bytes(self) -> float:
        """What the caching allocator holds."""
        return sum(num_bytes for name, num_bytes in self.rows if name not in UNALLOCATED_TERMS)

    @property
    def allocated_bytes(self) -> float:
        """What lies in tensors."""
        unseen = UNALLOCATED_TERMS | RESERVED_TERMS
        return sum(num_bytes for name, num_bytes in self.rows if name not in unseen)

    def bytes_of(self, name: str) -> float:
        """The row ``name``; 0 if there is none."""
        return sum(num_bytes for row, num_bytes in self.rows if row == name)

    def plus(self, name: str, num_bytes: float) -> MemoryLedger:
        """This ledger and one more row. ValueError if the row exists or is negative."""
        if num_bytes < 0:
            raise ValueError(f"memory of {name} must not be negative, got {num_bytes}")
        if any(row == name for row, _ in self.rows):
            raise ValueError(f"the ledger already has a row {name}")
        return MemoryLedger((*self.rows, (name, num_bytes)))

    def with_reserve(
        self, software: SoftwareProfile, num_communicators: float, *, waiting: float = 0.0, stranded: float = 0.0
    ) -> MemoryLedger:
        """This ledger and what the software takes besides tensors.

        ``waiting`` and ``stranded``: bytes that were freed, yet cannot be reused now: those that collectives are not
        done with, and those too small for what is allocated next. ``allocator_reserve`` is a share of the tensors that
        come and go in a step (other fragmentation of the caching allocator); ``communicators`` and ``context`` are
        allocated outside it.
        """
        passing = sum(num_bytes for name, num_bytes in self.rows if name not in LASTING_TERMS)
        reserve = passing * software.allocator_reserve_fraction.value
        return (
            self.plus("waiting_collectives", waiting)
            .plus("stranded_copies", stranded)
            .plus("allocator_reserve", reserve)
            .plus("communicators", num_communicators * software.communicator_bytes.value)
            .plus("context", software.context_bytes.value)
        )


@dataclass(frozen=True)
class RankMemory:
    """The memory of one rank in every phase of training."""

    phases: tuple[tuple[Phase, MemoryLedger], ...]

    @property
    def peak(self) -> MemoryLedger:
        """The ledger of the phase that needs most of the device."""
        return max((ledger for _, ledger in self.phases), key=lambda ledger: ledger.total_bytes)

    def ledger(self, phase: Phase) -> MemoryLedger:
        """The ledger of ``phase``."""
        return dict(self.phases)[phase]
