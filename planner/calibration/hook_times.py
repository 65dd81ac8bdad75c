"""Fits what hooks take of the host to how much longer passes take with them than without.

    more seconds forward  = units · (sharded + cast) + gathers · gather + blocks · checkpoint + kernels · selected
    more seconds backward = the same with times of its own + reductions · reduce + kernels again · kernel

by least squares of relative errors. Kernels are those that blocks issue forward. Full recomputation issues them again,
at what a kernel takes without hooks; selective recomputation does as well, but that counts with ``selected``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from costmodels.vocabulary.choices import Recompute
from costmodels.vocabulary.mesh import ZERO_STAGES


@dataclass(frozen=True)
class HookTiming:
    """One micro-batch of a model under one setting, and under none of FSDP's hooks or checkpoints."""

    model: str
    is_sharded: bool  # parameters are FSDP2's
    is_cast: bool  # and computed with in 16 bits
    zero_stage: int
    recompute: Recompute
    num_units: int
    num_blocks: int
    num_kernels: int  # of all blocks, forward
    kernel_s: float  # without hooks
    more_forward_s: float
    more_backward_s: float

    @property
    def more_s(self) -> float:
        """Of both passes."""
        return self.more_forward_s + self.more_backward_s

    def counts(self, *, forward: bool) -> list[int]:
        """Of units sharded, cast, gathered and reduced, of blocks checkpointed, of kernels that are selected from."""
        units, repeats = self.num_units * self.is_sharded, self.recompute is not Recompute.NONE
        zero = ZERO_STAGES[self.zero_stage]
        return [
            units,
            units * self.is_cast,
            units * zero.shards_parameters,
            units * (zero.shards_gradients and not forward),
            self.num_blocks * repeats,
            self.num_kernels * (self.recompute is Recompute.SELECTIVE),
        ]

    @property
    def again_s(self) -> float:
        """Of kernels that full recomputation issues again."""
        return self.num_kernels * self.kernel_s * (self.recompute is Recompute.FULL)


@dataclass(frozen=True)
class PassTimes:
    """The fitted seconds of one pass, in the order of ``HookTiming.counts``."""

    sharded_s: float
    cast_s: float
    gather_s: float
    reduce_s: float
    checkpoint_s: float
    selected_s: float


def fit_pass(timings: Sequence[HookTiming], *, forward: bool) -> PassTimes:
    """The seconds that come closest to ``timings`` of one pass."""
    rows = np.array([timing.counts(forward=forward) for timing in timings], dtype=np.float64)
    more = np.array([t.more_forward_s if forward else t.more_backward_s - t.again_s for t in timings])
    weights = 1 / np.abs([t.more_forward_s if forward else t.more_backward_s for t in timings])
    return PassTimes(*map(float, np.linalg.lstsq(rows * weights[:, None], more * weights)[0]))


def predicted_s(timing: HookTiming, forward: PassTimes, backward: PassTimes) -> float:
    """How much longer both passes take."""
    times = ((forward, True), (backward, False))
    each = [np.dot(timing.counts(forward=way), list(vars(fitted).values())) for fitted, way in times]
    return float(sum(each)) + timing.again_s
