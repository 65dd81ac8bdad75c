"""The least that any layout can take: every product at the peak of the fastest arithmetic, nothing else."""

from __future__ import annotations

import numpy as np

from planner.axes.data import MAX_MICRO_BATCH_SIZE
from planner.axes.traced import representatives, whole_work
from planner.graph.model_graph import OpClass
from planner.layout.layout import Training
from planner.pricing.kernels import kernel_times
from planner.pricing.target import PricingTarget


def ideal_step_s(target: PricingTarget, training: Training) -> float:
    """Seconds of the FLOPs of a step, spread over all devices at their peaks: below the bound of every layout.

    What memory limits, what is communicated and what is computed twice is left out, so this is a bound, not a goal.
    """
    cluster, graph = target.cluster, target.graph
    clusters = [cluster] if cluster.mixed is None else [group.cluster for group in cluster.mixed.groups]
    peak = sum(
        each.num_devices * max(p.value for p in each.profile.device.peak_flops_per_s.values()) for each in clusters
    )
    flops_of_kind = {
        unit.kind: sum(
            kernel.forward.flops + kernel.backward.flops
            for kernel in whole_work(graph, unit).unit.kernels
            if kernel.op_class is not OpClass.MEMORY_BOUND and kernel.follows_batch
        )
        for unit in representatives(graph)
    }
    return training.global_batch_size * sum(flops_of_kind[unit.kind] for unit in graph.units) / peak


def compute_device_s(target: PricingTarget, training: Training) -> float:
    """Device-seconds that the kernels of a step take at least, by the recipe's own rooflines.

    Kernels run whole, on as many sequences at once as a micro-batch may have: no layout splits them into larger ones.
    Devices of a mixed cluster count as its weakest, so of these it is no bound.
    """
    size = np.array([float(MAX_MICRO_BATCH_SIZE)])
    of_kind: dict[int, float] = {}
    for unit in representatives(target.graph):
        kernels = [kernel for kernel in whole_work(target.graph, unit).unit.kernels if kernel.follows_batch]
        times = kernel_times(kernels, size, target.machine, target.framework)
        of_kind[unit.kind] = float(times.forward_s.sum() + times.backward_s.sum()) / MAX_MICRO_BATCH_SIZE
    return training.global_batch_size * sum(of_kind[unit.kind] for unit in target.graph.units)
