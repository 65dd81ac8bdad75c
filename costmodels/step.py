"""Exposed communication: what is left of it in the step time when it runs beside compute.

    hidden  = min(communication, overlappable_fraction · compute)
    exposed = communication - hidden + overlap_slowdown · hidden

Communication kernels take multiprocessors and memory bandwidth, so compute beside them runs (1 + overlap_slowdown)
times as long; overlap is never perfect, so only a fraction of the compute can hide anything. Both numbers come from the
software profile. The form follows Li et al., "PyTorch Distributed" (VLDB 2020), whose bucketed reduction overlaps the
backward pass, and the measured slowdown of overlapped kernels in Lee et al., "Characterizing compute-communication
overlap in GPU-accelerated distributed deep learning" (2025).
"""

from __future__ import annotations

from typing import overload

import numpy as np
import numpy.typing as npt

from hardware_profiles.schema import SoftwareProfile

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
