"""The vocabulary of parallel training: mesh axes and shapes, placements, recomputation, schedules."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum
from math import prod


class MeshAxis(StrEnum):
    """Axes of the device mesh, outermost first: neighbouring ranks differ in ``tp``."""

    PP = "pp"
    DP_REPLICATE = "dp_replicate"
    DP_SHARD = "dp_shard"
    CP = "cp"
    TP = "tp"


@dataclass(frozen=True)
class MeshShape:
    """Degrees of the device mesh. ``ep`` lies inside ``dp_shard * cp`` and adds no ranks."""

    pp: int = 1
    dp_replicate: int = 1
    dp_shard: int = 1
    cp: int = 1
    tp: int = 1
    ep: int = 1

    @property
    def world_size(self) -> int:
        """Number of ranks, which equals the number of devices."""
        return prod(self.degree(axis) for axis in MeshAxis)

    @property
    def dp(self) -> int:
        """Data-parallel degree: how many different micro-batches are in work at once."""
        return self.dp_replicate * self.dp_shard

    def degree(self, axis: MeshAxis) -> int:
        """Number of ranks along ``axis``."""
        return int(getattr(self, axis.value))

    def stride(self, axis: MeshAxis) -> int:
        """Distance in rank numbers between neighbours along ``axis``."""
        axes = list(MeshAxis)
        return prod(self.degree(inner) for inner in axes[axes.index(axis) + 1 :])


class Recompute(StrEnum):
    """Activation checkpointing of one block.

    ``SELECTIVE`` keeps the outputs of matrix products and of attention and recomputes the rest;
    ``FULL`` keeps the block's input alone.
    """

    NONE = "none"
    SELECTIVE = "selective"
    FULL = "full"


class Offload(StrEnum):
    """Where optimiser states live between steps."""

    NONE = "none"
    CPU = "cpu"
    NVME = "nvme"


class Precision(StrEnum):
    """Compute dtype of the forward and backward pass."""

    BF16 = "bf16"
    FP16 = "fp16"
    FP32 = "fp32"
    FP8 = "fp8"


class Optimizer(StrEnum):
    """Optimisers by their torch.optim names; what each keeps is in ``costmodels.memory``."""

    ADAMW = "adamw"
    ADAM = "adam"
    SGD = "sgd"


class Preference(StrEnum):
    """What is taken of plans that are predicted alike."""

    SIMPLE = "simple"
    FASTEST = "fastest"


class ScheduleName(StrEnum):
    """Pipeline schedules, named as torch.distributed.pipelining names them."""

    GPIPE = "GPipe"
    ONE_F_ONE_B = "1F1B"
    INTERLEAVED_1F1B = "Interleaved1F1B"
    INTERLEAVED_ZERO_BUBBLE = "InterleavedZeroBubble"
    ZBV_ZERO_BUBBLE = "ZBVZeroBubble"
    DUAL_PIPE_V = "DualPipeV"
    ZB_2P = "ZB-2P"  # of Qi et al. (2024): torch does not have it, so it is priced, but not searched or executed

    @property
    def is_v(self) -> bool:
        """Whether a rank holds two stages, one towards the last rank and one back from it."""
        return self in (ScheduleName.ZBV_ZERO_BUBBLE, ScheduleName.DUAL_PIPE_V)

    @property
    def splits_backward(self) -> bool:
        """Whether gradients of inputs and of weights are made at different times."""
        return self.is_v or self in (ScheduleName.INTERLEAVED_ZERO_BUBBLE, ScheduleName.ZB_2P)

    @property
    def stages_a_rank(self) -> tuple[int, int | None]:
        """Fewest and most stages that a rank can hold; None: any number."""
        if self.is_v:
            return 2, 2
        if self is ScheduleName.INTERLEAVED_1F1B:
            return 2, None
        return 1, None if self is ScheduleName.INTERLEAVED_ZERO_BUBBLE else 1

    @property
    def is_cut_freely(self) -> bool:
        """Whether each rank holds one stage, whose size the solver chooses; the others' stages are alike."""
        return self in (ScheduleName.GPIPE, ScheduleName.ONE_F_ONE_B)


def pp_rank_of_stage(schedule: ScheduleName, stage: int, num_ranks: int) -> int:
    """The pipeline rank that holds ``stage``: in turn, or down and up again in a V."""
    if schedule.is_v and stage >= num_ranks:
        return 2 * num_ranks - 1 - stage
    return stage % num_ranks


@dataclass(frozen=True)
class Replicate:
    """Every rank of the axis holds the whole tensor."""

    def __str__(self) -> str:
        return "replicate"


@dataclass(frozen=True)
class Shard:
    """Tensor dim ``dim`` is split in equal parts over the ranks of the axis."""

    dim: int

    def __str__(self) -> str:
        return f"shard({self.dim})"


@dataclass(frozen=True)
class Partial:
    """Every rank holds a summand; the tensor is their sum."""

    def __str__(self) -> str:
        return "partial"


Placement = Replicate | Shard | Partial

_SHARD = re.compile(r"shard\((\d{1,2})\)")


def parse_placement(text: str) -> Placement:
    """``replicate``, ``partial`` or ``shard(DIM)`` as a value; ValueError otherwise."""
    if text == "replicate":
        return Replicate()
    if text == "partial":
        return Partial()
    match = _SHARD.fullmatch(text)
    if match is None:
        raise ValueError(f"placement must be replicate, partial or shard(DIM), got {text!r}")
    return Shard(int(match.group(1)))
