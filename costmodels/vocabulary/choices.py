"""What a plan may choose besides mesh and schedule: placements, recomputation, offload, precision, optimiser."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum


class Recompute(StrEnum):
    """Activation checkpointing of one block.

    ``SELECTIVE`` keeps the outputs of matrix products and of attention and recomputes the rest;
    ``FULL`` keeps the block's input alone.
    """

    NONE = "none"
    SELECTIVE = "selective"
    FULL = "full"


class KeptOnHost(StrEnum):
    """The same, where what the block keeps lies in host memory from its forward to its backward pass."""

    NONE = "none, on the host"
    SELECTIVE = "selective, on the host"
    FULL = "full, on the host"

    @property
    def recompute(self) -> Recompute:
        """What the block recomputes."""
        return Recompute[self.name]


BlockMode = Recompute | KeptOnHost
"""What becomes of the activations of one block."""


def recompute_of(mode: BlockMode) -> Recompute:
    """What a block in this mode recomputes."""
    return mode.recompute if isinstance(mode, KeptOnHost) else mode


class Offload(StrEnum):
    """Where optimiser states live between steps."""

    NONE = "none"
    CPU = "cpu"
    NVME = "nvme"


class ContextMethod(StrEnum):
    """How attention reaches the positions that lie on other ranks of context parallelism.

    ``ALL_GATHER`` brings all keys and values to every rank before attention (Dubey et al., 2024); ``RING`` passes them
    on from rank to rank while attention works on those at hand (Liu et al., 2023); ``ALL_TO_ALL`` gives every rank all
    positions of some of the heads (DeepSpeed-Ulysses, Jacobs et al., 2023).
    """

    ALL_GATHER = "all-gather"
    RING = "ring"
    ALL_TO_ALL = "all-to-all"


class Precision(StrEnum):
    """Compute dtype of the forward and backward pass."""

    BF16 = "bf16"
    FP16 = "fp16"
    FP32 = "fp32"
    FP8 = "fp8"


MOMENTUM = 0.9  # of SGD that has it: Megatron-LM's default, and what recipes of vision models commonly have


class Optimizer(StrEnum):
    """Optimisers by their torch.optim names; what each keeps is in ``costmodels.memory``.

    torch.optim.SGD keeps nothing, or, with momentum, one moment.
    """

    ADAMW = "adamw"
    ADAM = "adam"
    SGD = "sgd"
    SGD_MOMENTUM = "sgd-momentum"


class Searches(StrEnum):
    """For which changes of the hardware the best plan is searched for; the plan at hand is priced under all of them."""

    NONE = "none"
    MEMORY = "memory"  # nothing else can be said of more memory
    ALL = "all"


class Preference(StrEnum):
    """What is taken of plans that are predicted alike."""

    SIMPLE = "simple"
    FASTEST = "fastest"


@dataclass(frozen=True)
class Replicate:
    """Every rank of the axis holds the whole tensor."""

    def __str__(self) -> str:
        return "replicate"


@dataclass(frozen=True)
class Shard:
    """Tensor dim ``dim`` is split in equal parts over the ranks of the axis.

    ``pieces``: equal pieces of the dim that lie one behind the other, such as the gate and the up projection of one
    fused parameter; a rank has its part of each of them.
    """

    dim: int
    pieces: int = 1

    def __str__(self) -> str:
        return f"shard({self.dim})" if self.pieces == 1 else f"shard({self.dim}, pieces={self.pieces})"


@dataclass(frozen=True)
class Partial:
    """Every rank holds a summand; the tensor is their sum."""

    def __str__(self) -> str:
        return "partial"


Placement = Replicate | Shard | Partial

_SHARD = re.compile(r"shard\((\d{1,2})(?:, pieces=([2-9]))?\)")


def parse_placement(text: str) -> Placement:
    """``replicate``, ``partial``, ``shard(DIM)`` or ``shard(DIM, pieces=N)`` as a value; ValueError otherwise."""
    if text == "replicate":
        return Replicate()
    if text == "partial":
        return Partial()
    match = _SHARD.fullmatch(text)
    if match is None:
        raise ValueError(f"placement must be replicate, partial, shard(DIM) or shard(DIM, pieces=N), got {text!r}")
    return Shard(int(match.group(1)), int(match.group(2) or 1))
