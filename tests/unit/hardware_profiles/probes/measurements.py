"""Measurements of clusters that obey the cost models exactly, or not at all."""

import datetime
from collections.abc import Mapping

from costmodels.communication import collective_time_s
from costmodels.vocabulary.workload import Collective, CollectiveKind, GroupPlacement
from hardware_profiles.probes.communication import KINDS, placements_of
from hardware_profiles.probes.measurement import (
    ClusterMeasurement,
    CollectiveTiming,
    DeviceMeasurement,
    HostFacts,
    OpTiming,
    PairTiming,
)
from hardware_profiles.schema import ClusterSpec

SIZES = tuple(4096 * 4**power for power in range(8))


def host(index: int, **facts: object) -> HostFacts:
    return HostFacts(label=f"host{index}", key=f"boot/{index}", interface="eth0").model_copy(update=facts)


def device(flops_per_s: float = 1e11, launch_s: float = 1e-6, half_size: float = 1e6) -> DeviceMeasurement:
    """A CPU process whose operators take launch + (flops + half size) / rate."""

    def op(op_class: str, flops: float, num_bytes: float, time_s: float) -> OpTiming:
        values = {"op_class": op_class, "dtype": "fp32", "shape": f"{flops:g} of {num_bytes:g}", "flops": flops}
        return OpTiming.model_validate({**values, "num_bytes": num_bytes, "samples_s": (time_s, time_s)})

    gemms = [op("gemm", f, f / 100, launch_s + (f + half_size) / flops_per_s) for f in (1e6, 1e7, 1e8, 1e9, 1e10)]
    attention = [op("attention", f, f / 100, launch_s + 2 * f / flops_per_s) for f in (1e7, 1e8, 1e9)]
    streams = [op("memory_bound", 0.0, b, launch_s + b / 1e10) for b in (2.0**24, 2.0**26)]
    return DeviceMeasurement(
        device_name="cpu",
        memory_bytes=2**34,
        sm_count=None,
        context_bytes=2**28,
        launch_samples_s=(launch_s, launch_s),
        operators=(*gemms, *attention, *streams),
    )


def measurement(hosts: list[HostFacts], **more: object) -> ClusterMeasurement:
    return ClusterMeasurement(
        date=datetime.date(2026, 1, 2),
        tool="a test",
        backend="gloo",
        hosts=tuple(hosts),
        devices=tuple(device() for _ in hosts),
    ).model_copy(update=more)


def host_pairs(rates: Mapping[tuple[int, int], float]) -> tuple[PairTiming, ...]:
    return tuple(PairTiming(source=a, target=b, latency_s=1e-4, bytes_per_s=rate) for (a, b), rate in rates.items())


def timed_as_modelled(cluster: ClusterSpec, domains: tuple[int, ...]) -> tuple[CollectiveTiming, ...]:
    """Every collective of every placement, taking exactly what the cost model says."""
    timings: list[CollectiveTiming] = []
    for placement in placements_of(domains):
        for kind in KINDS:
            for size in SIZES:
                group = GroupPlacement(placement.num_ranks, placement.stride)
                time_s = collective_time_s(Collective(CollectiveKind(kind), size, group), cluster)
                timings.append(
                    CollectiveTiming(
                        kind=kind,
                        num_ranks=placement.num_ranks,
                        stride=placement.stride,
                        num_bytes=size,
                        samples_s=(time_s, time_s * 1.5, time_s),
                    )
                )
    return tuple(timings)
