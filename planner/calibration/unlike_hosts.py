"""Hosts that compute slower than the others: a profile of each kind, so that a search gives the slow ones less work.

A plan with equal shares waits for the slow hosts in every step, so one profile of all hosts has their devices. A
search over both kinds (``--hardware FILE:COUNT,FILE:COUNT``) gives the slow hosts smaller shares of the batch, or fewer
layers.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from itertools import groupby

from hardware_profiles.probes.measurement import ClusterMeasurement, DeviceMeasurement
from hardware_profiles.schema import ClusterProfile, DTypeName
from planner.calibration.device import PRIMARY_DTYPES, device_of
from planner.calibration.profile import node_of

# Products repeat within ten percent from host to host; below this share of the usual rate a host is of another kind.
SLOW_HOST = 0.85


@dataclass(frozen=True)
class HostKind:
    """One kind of host. ``labels``: how a person finds its hosts; ``rate``: of its products, over the usual kind's."""

    name: str  # "usual" or "slow"
    profile: ClusterProfile
    labels: tuple[str, ...]
    rate: float


@dataclass(frozen=True)
class UnlikeHosts:
    """Both kinds, neighbouring ranks of one kind with their number in the order of ranks, and all hosts as one."""

    usual: HostKind
    slow: HostKind
    runs: tuple[tuple[str, int], ...]
    together: ClusterProfile


def unlike_hosts(measurement: ClusterMeasurement, nearest: ClusterProfile, found: ClusterProfile) -> UnlikeHosts | None:
    """What tells slow hosts apart from the others; None where all are alike. ``found``: the profile of all together."""
    node = measurement.devices_per_node
    rates = _host_rates(measurement)
    usual = statistics.median_high(rates)
    is_slow = [rate < SLOW_HOST * usual for rate in rates]
    if not any(is_slow):
        return None

    def kind(name: str, *, slow: bool) -> HostKind:
        places = [place for place, each in enumerate(is_slow) if each is slow]
        devices = [measurement.devices[place * node + rank] for place in places for rank in range(node)]
        part = measurement.model_copy(update={"devices": tuple(devices)})
        labels = tuple(measurement.hosts[place * node].label for place in places)
        profile = found.model_copy(
            update={
                "name": f"{found.name}-{name}",
                "description": f"{found.description}; the {len(places)} {name} of {len(rates)} hosts",
                "device": device_of(part, nearest),
                "node": node_of(part, nearest),
                "notes": (),
            }
        )
        return HostKind(name, profile, labels, statistics.median(rates[place] for place in places) / usual)

    names = ["slow" if slow else "usual" for slow in is_slow]
    runs = tuple((name, node * len(list(hosts))) for name, hosts in groupby(names))
    slow = kind("slow", slow=True)
    update = {
        "description": f"{found.description}; as fast as its {len(slow.labels)} slow hosts: equal shares wait for them",
        "device": slow.profile.device,
        "node": slow.profile.node,
    }
    return UnlikeHosts(kind("usual", slow=False), slow, runs, found.model_copy(update=update))


def _host_rates(measurement: ClusterMeasurement) -> list[float]:
    """The median over its ranks of each host's fastest product, of the first dtype that all have timed; host by host.

    As products usually run: the best sample of one may have slipped between whatever else keeps a processor busy.
    """
    node = measurement.devices_per_node
    for dtype in PRIMARY_DTYPES:
        rates = [_rate(device, dtype) for device in measurement.devices]
        if all(rates):
            return [statistics.median(rates[first : first + node]) for first in range(0, len(rates), node)]
    return [1.0]


def _rate(device: DeviceMeasurement, dtype: DTypeName) -> float:
    products = [op for op in device.operators if op.op_class == "gemm" and op.dtype == dtype]
    return max((op.flops / op.time_s for op in products), default=0.0)
