"""The words that profiles, cost models and graphs share: classes of operators, collectives and precisions."""

from __future__ import annotations

from enum import StrEnum


class OpClass(StrEnum):
    """Operators that share an efficiency."""

    GEMM = "gemm"
    GROUPED_GEMM = "grouped_gemm"
    ATTENTION = "attention"
    CONVOLUTION = "convolution"
    MEMORY_BOUND = "memory_bound"
    VIEW = "view"  # moves no bytes: reshapes, slices, tuple elements; no profile has an efficiency for it

    @property
    def is_product(self) -> bool:
        """Whether its time is that of multiplications."""
        return self not in (OpClass.MEMORY_BOUND, OpClass.VIEW)


class CollectiveKind(StrEnum):
    """Communication operators."""

    ALL_REDUCE = "all_reduce"
    ALL_GATHER = "all_gather"
    REDUCE_SCATTER = "reduce_scatter"
    ALL_TO_ALL = "all_to_all"
    SEND_RECV = "send_recv"
    RING_SHIFT = "ring_shift"  # every rank sends to the next, the last to the first, and receives meanwhile
