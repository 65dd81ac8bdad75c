"""Classes of operators that share an efficiency."""

from __future__ import annotations

from enum import StrEnum


class OpClass(StrEnum):
    """Operators that share an efficiency; the same names as ``costmodels.workload.OpClass``."""

    GEMM = "gemm"
    GROUPED_GEMM = "grouped_gemm"
    ATTENTION = "attention"
    CONVOLUTION = "convolution"
    MEMORY_BOUND = "memory_bound"
    VIEW = "view"  # moves no bytes: reshapes, slices, tuple elements

    @property
    def is_product(self) -> bool:
        """Whether its time is that of multiplications."""
        return self not in (OpClass.MEMORY_BOUND, OpClass.VIEW)
