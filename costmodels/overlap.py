"""Communication that compute does not hide.

    hidden  = min(communication, fraction · compute)
    exposed = communication - hidden + slowdown · hidden

Communication kernels take multiprocessors and memory bandwidth, so compute beside them runs (1 + slowdown) times as
long; overlap is never perfect, so only a fraction of the compute can hide anything. The form follows Li et al.,
"PyTorch Distributed" (VLDB 2020), whose bucketed reduction overlaps the backward pass, and the measured slowdown of
overlapped kernels in Lee et al., "Characterizing compute-communication overlap in GPU-accelerated distributed deep
learning" (2025).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, overload

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]


class Overlap(NamedTuple):
    """How well a machine's software hides communication; both from its profile."""

    fraction: float  # of compute, behind which communication can hide
    slowdown: float  # compute takes (1 + this) times as long while communication runs


def least_exposing(overlaps: Sequence[Overlap]) -> Overlap:
    """One that leaves no more exposed than any of these."""
    return Overlap(max(each.fraction for each in overlaps), min(each.slowdown for each in overlaps))


def message_beside_s(way_s: npt.ArrayLike, pass_s: npt.ArrayLike, slowdown: npt.ArrayLike) -> FloatArray:
    """Seconds by which a message between stages lengthens a pass beside it, at either of its ends; arrays broadcast.

    So it is where the cores that compute move the message: chosen for plans over gloo on two hosts, which come nearer
    to the order measured with it (``benchmarks/measured_plans.py``), though passes traced under DualPipeV do not show
    it. Published runs on GPUs, whose network cards move it, do not say.
    ``slowdown`` was measured beside an all-reduce, in which every rank sends and receives all the time. Of a message
    one rank sends and another receives, so each end bears half. A message goes on beside one pass at most.
    Example: 10 ms beside a pass of 30 ms with a slowdown of 0.2 cost the sender 1 ms, and as much the receiver.
    """
    return np.asarray(slowdown) / 2 * np.minimum(way_s, pass_s)


@overload
def exposed_s(communication_s: float, compute_s: float, overlap: Overlap) -> float: ...


@overload
def exposed_s(communication_s: FloatArray, compute_s: FloatArray | float, overlap: Overlap) -> FloatArray: ...


def exposed_s(
    communication_s: FloatArray | float, compute_s: FloatArray | float, overlap: Overlap
) -> FloatArray | float:
    """Seconds that communication adds to the step beside ``compute_s`` of compute; arrays broadcast.

    Never above ``communication_s``: whoever overlaps at a loss can still run one after the other.
    """
    hidden = np.minimum(communication_s, overlap.fraction * np.asarray(compute_s))
    exposed = np.asarray(communication_s - hidden * max(0.0, 1.0 - overlap.slowdown))
    return exposed if exposed.ndim else float(exposed)
