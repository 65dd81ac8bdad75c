"""The least that any layout can take: every product at the peak of the fastest arithmetic, nothing else."""

from __future__ import annotations

from planner.axes.traced import representatives, whole_work
from planner.graph.model_graph import OpClass
from planner.layout.layout import Training
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
