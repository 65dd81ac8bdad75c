"""Keeps half of a machine's timings from the fit and asks the cost models for the other half."""

from __future__ import annotations

from collections.abc import Sequence

from costmodels.communication import collective_time_s
from costmodels.compute import op_time_s
from costmodels.vocabulary.workload import Collective, CollectiveKind, GroupPlacement, OpClass, OpWorkload
from hardware_profiles.probes.measurement import ClusterMeasurement, CollectiveTiming, OpTiming
from hardware_profiles.schema import ClusterSpec, DeviceProfile, OpClassName

HELD_CLASSES: tuple[OpClassName, ...] = ("gemm", "attention")  # memory-bound operators are few, and all fitted


def without_half_of_operators(operators: Sequence[OpTiming]) -> tuple[tuple[OpTiming, ...], tuple[OpTiming, ...]]:
    """(kept, held back): of each class and dtype every second shape by work is held back."""
    kept: list[OpTiming] = []
    held: list[OpTiming] = []
    for key in {(op.op_class, op.dtype): None for op in operators}:
        alike = sorted((op for op in operators if (op.op_class, op.dtype) == key), key=lambda op: (op.flops, op.shape))
        for index, op in enumerate(alike):
            (held if op.op_class in HELD_CLASSES and index % 2 else kept).append(op)
    return tuple(kept), tuple(held)


def without_half_of_collectives(
    measurement: ClusterMeasurement,
) -> tuple[ClusterMeasurement, tuple[CollectiveTiming, ...]]:
    """The measurement with every second size of each sweep, and the timings of the other sizes.

    The largest size stays in the fit: prediction is between the sizes, as in use.
    """
    kept: list[CollectiveTiming] = []
    held: list[CollectiveTiming] = []
    sweeps = {(t.kind, t.num_ranks, t.stride): None for t in measurement.collectives}
    for kind, num_ranks, stride in sweeps:
        sweep = [t for t in measurement.collectives if (t.kind, t.num_ranks, t.stride) == (kind, num_ranks, stride)]
        for index, timing in enumerate(sorted(sweep, key=lambda t: t.num_bytes, reverse=True)):
            (held if index % 2 else kept).append(timing)
    return measurement.model_copy(update={"collectives": tuple(kept)}), tuple(held)


def predicted_operator_s(device: DeviceProfile, timing: OpTiming) -> float:
    """Seconds that the cost model gives the operator that was timed."""
    return op_time_s(OpWorkload(OpClass(timing.op_class), timing.flops, timing.num_bytes), device, timing.dtype)


def predicted_collective_s(cluster: ClusterSpec, timing: CollectiveTiming) -> float:
    """Seconds that the cost model gives the collective that was timed."""
    group = GroupPlacement(timing.num_ranks, timing.stride)
    return collective_time_s(Collective(CollectiveKind(timing.kind), timing.num_bytes, group), cluster)
