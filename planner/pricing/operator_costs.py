"""What every operator of a unit takes on one rank, and how far that is from the roofline of the device.

Kernels are priced by the function that fills the cost table, so their times add up to its compute, but for what no
kernel takes: the wait for a host that is slower than the device, attention in blocks, and sums of gradients.

What limits a kernel is asked of the prices themselves: twice the arithmetic, or twice the memory bandwidth, whichever
saves more; where both together save less than a quarter, most of its time is its launch. The roofline is that of
Williams, Waterman and Patterson, "Roofline", CACM 52(4), 2009, at the peaks of the profile: the least time for these
FLOPs and bytes. FLOPs of attention are counted without regard to a mask; where it is causal, the least time is that of
a kernel that skips half of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

import numpy as np

from costmodels.compute import peak_of_class
from costmodels.vocabulary.terms import Pass
from planner.axes.lowered import Kernel
from planner.axes.registry import WorkLowering, work_fields
from planner.axes.traced import representatives, whole_work
from planner.layout.columns import Array
from planner.pricing.kernels import WORK_OF_CAUSAL, kernel_times, work_of
from planner.pricing.machine import Machine
from planner.pricing.placements import Decision
from planner.pricing.target import PricingTarget
from planner.pricing.what_if import Change, changed
from planner.table.keys import WorkKey


class Limit(StrEnum):
    """What a kernel waits for most."""

    ARITHMETIC = "arithmetic"
    MEMORY = "memory"
    LAUNCH = "launch"


@dataclass(frozen=True)
class OperatorCost:
    """One operator on one rank, for one micro-batch, forward and backward together, nothing recomputed."""

    module: str  # FQN of the module that it belongs to, "" for the root
    operator: str
    limit: Limit
    seconds: float
    flops: float
    num_bytes: float
    roofline_s: float  # the least that these FLOPs and bytes take at the peaks of the device

    def times(self, factor: float) -> OperatorCost:
        """So often."""
        return replace(
            self,
            seconds=self.seconds * factor,
            flops=self.flops * factor,
            num_bytes=self.num_bytes * factor,
            roofline_s=self.roofline_s * factor,
        )


def operator_costs(
    target: PricingTarget, key: WorkKey, decision: Decision, machine: Machine
) -> list[tuple[OperatorCost, ...]]:
    """The operators of each kind of unit on the devices of ``machine``, where work is split as ``key`` says.

    Operators that take no time are left out. ``decision``: the placements of that split.
    """
    graph = target.graph
    slowdown = machine.straggler_slowdown(target.cluster.num_devices)
    found: list[tuple[OperatorCost, ...]] = []
    for unit, placement in zip(representatives(graph), decision, strict=True):
        work = WorkLowering(whole_work(graph, unit), target.framework).under(work_fields(key), placement)
        size = key.micro_batch_size * work.part_of_sequence
        priced = _Kernels(work.unit.kernels, size, target, machine)
        found.append(
            tuple(
                OperatorCost(graph.nodes[kernel.id].module, kernel.operator, *priced.cost(place, slowdown))
                for place, kernel in enumerate(work.unit.kernels)
                if priced.seconds[place] > 0
            )
        )
    return found


class _Kernels:
    """Kernels for ``size`` sequences on one machine, and on machines with twice of something."""

    def __init__(self, kernels: Sequence[Kernel], size: float, target: PricingTarget, machine: Machine) -> None:
        self._kernels, self._size, self._target, self._machine = kernels, size, target, machine
        self.seconds = self._with(Change())
        self._saved_by_arithmetic = self.seconds - self._with(Change(arithmetic=2))
        self._saved_by_memory = self.seconds - self._with(Change(memory_bandwidth=2))
        self._saved_by_both = self.seconds - self._with(Change(arithmetic=2, memory_bandwidth=2))

    def cost(self, place: int, slowdown: float) -> tuple[Limit, float, float, float, float]:
        """Limit, seconds, FLOPs, bytes and seconds at the roofline of one kernel."""
        loads = [self._load(self._kernels[place], run) for run in Pass]
        flops, num_bytes = (sum(values) for values in zip(*loads, strict=True))
        least_s = sum(self._roofline_s(self._kernels[place], *load) for load in loads)
        return self._limit(place), float(self.seconds[place]) * slowdown, flops, num_bytes, least_s

    def _with(self, change: Change) -> Array:
        machine = Machine(changed(self._machine.cluster, change))
        times = kernel_times(self._kernels, np.array([self._size]), machine, self._target.framework)
        return (times.forward_s + times.backward_s)[0]

    def _limit(self, place: int) -> Limit:
        if self._saved_by_both[place] < self.seconds[place] / 4:
            return Limit.LAUNCH
        by_arithmetic = self._saved_by_arithmetic[place] >= self._saved_by_memory[place]
        return Limit.ARITHMETIC if by_arithmetic else Limit.MEMORY

    def _load(self, kernel: Kernel, run: Pass) -> tuple[float, float]:
        """FLOPs and bytes."""
        work, grown = work_of(kernel, run), self._size if kernel.follows_batch else 1.0
        return work.flops * grown, work.moved_bytes * grown + work.weight_bytes

    def _roofline_s(self, kernel: Kernel, flops: float, num_bytes: float) -> float:
        device = self._machine.cluster.profile.device
        peak = peak_of_class(device, kernel.op_class, self._target.framework.precision)
        if kernel.is_causal:
            flops *= WORK_OF_CAUSAL
        return max(flops / peak, num_bytes / device.memory_bandwidth_bytes_per_s.value)
