"""Fits what the host needs to issue a kernel and a collective to the time of whole micro-batches.

    seconds = d + kernels · a                      without tensor parallelism
    seconds = d + kernels · b + collectives · c    with it

by least squares of relative errors; a, b and c are ``host_s_per_kernel``, ``host_s_per_sharded_kernel`` and
``host_s_per_collective`` of a recipe.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np


@dataclass(frozen=True)
class HostTiming:
    """A model under one setting, what the host issues for a micro-batch, and how long it takes."""

    model: str
    tp: int
    sequence_parallel: bool
    num_kernels: int
    num_collectives: int
    measured_s: float


@dataclass(frozen=True)
class HostCost:
    """The fitted seconds."""

    kernel_s: float
    sharded_kernel_s: float
    collective_s: float
    microbatch_s: float  # whatever the model

    def predict(self, timing: HostTiming) -> float:
        """Seconds of one micro-batch."""
        return float(np.dot(_counts(timing), list(asdict(self).values())))


def fit_host_cost(timings: Sequence[HostTiming]) -> HostCost:
    """The seconds that come closest to ``timings``."""
    rows = np.array([_counts(timing) for timing in timings]) / np.array([[timing.measured_s] for timing in timings])
    return HostCost(*map(float, np.linalg.lstsq(rows, np.ones(len(timings)))[0]))


def _counts(timing: HostTiming) -> list[int]:
    """What each of the fitted seconds is spent on."""
    plain, sharded = (timing.num_kernels, 0) if timing.tp == 1 else (0, timing.num_kernels)
    return [plain, sharded, timing.num_collectives, 1]
