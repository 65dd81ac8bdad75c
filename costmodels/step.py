"""What a step adds to its operators: communication that compute does not hide, and the optimiser.

    hidden  = min(communication, overlappable_fraction · compute)
    exposed = communication - hidden + overlap_slowdown · hidden
    optimiser step = launch + elements · bytes per element / memory bandwidth

Communication kernels take multiprocessors and memory bandwidth, so compute beside them runs (1 + overlap_slowdown)
times as long; overlap is never perfect, so only a fraction of the compute can hide anything. Both numbers come from the
software profile. The form follows Li et al., "PyTorch Distributed" (VLDB 2020), whose bucketed reduction overlaps the
backward pass, and the measured slowdown of overlapped kernels in Lee et al., "Characterizing compute-communication
overlap in GPU-accelerated distributed deep learning" (2025).

Bytes per element of a fused optimiser (torch.optim with ``fused=True``: one pass), all in fp32: Adam reads parameter,
gradient and two moments and writes parameter and moments, 7 · 4; SGD reads parameter and gradient and writes the
parameter, 3 · 4.
"""

from __future__ import annotations

from typing import overload

import numpy as np
import numpy.typing as npt

from costmodels.compute import op_time_s
from costmodels.vocabulary.workload import OpClass, OpWorkload
from hardware_profiles.schema import DeviceProfile, SoftwareProfile

FP32_ACCESSES = {"adamw": 7, "adam": 7, "sgd": 3}
FP32_BYTES = 4

FloatArray = npt.NDArray[np.float64]


@overload
def exposed_s(communication_s: float, overlappable_compute_s: float, software: SoftwareProfile) -> float: ...


@overload
def exposed_s(
    communication_s: FloatArray, overlappable_compute_s: FloatArray | float, software: SoftwareProfile
) -> FloatArray: ...


def exposed_s(
    communication_s: FloatArray | float, overlappable_compute_s: FloatArray | float, software: SoftwareProfile
) -> FloatArray | float:
    """Seconds that communication adds to the step beside ``overlappable_compute_s``; arrays broadcast.

    Never above ``communication_s``: whoever overlaps at a loss can still run one after the other.
    """
    hidden = np.minimum(communication_s, software.overlappable_fraction.value * np.asarray(overlappable_compute_s))
    exposed = np.asarray(communication_s - hidden * max(0.0, 1.0 - software.overlap_slowdown.value))
    return exposed if exposed.ndim else float(exposed)


def optimizer_step_s(num_elements: float, optimizer: str, device: DeviceProfile, extra_bytes: float = 0.0) -> float:
    """Seconds to update ``num_elements`` fp32 parameters on one device; ValueError for an unknown optimiser.

    ``extra_bytes``: moved per element besides, to copy, check and clip.
    """
    if optimizer not in FP32_ACCESSES:
        raise ValueError(f"optimizer must be one of {', '.join(FP32_ACCESSES)}, got {optimizer!r}")
    if num_elements <= 0:
        return 0.0
    num_bytes = num_elements * (FP32_ACCESSES[optimizer] * FP32_BYTES + extra_bytes)
    return op_time_s(OpWorkload(OpClass.MEMORY_BOUND, 0.0, num_bytes), device, "fp32")
