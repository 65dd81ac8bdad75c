"""What stands out in a measurement, in words a person can act on."""

from __future__ import annotations

import statistics
from collections.abc import Iterator

from hardware_profiles.probes.measurement import ClusterMeasurement, HostFacts
from hardware_profiles.schema import ClusterProfile

# Fractions of what is normal below which something is said. Links repeat within a few percent, compute within ten;
# validation guides for GPU fabrics call for an investigation below 80 % of the line rate, where RDMA fills the port;
# one TCP connection may well stay at half of a fast one.
SLOW_HOST = 0.6
SLOW_RANK = 0.7
ASYMMETRY = 1.5
FAR_FROM_NIC = 0.5
FAR_FROM_DATASHEET = 0.5
CORE_SHARE = 0.8

HostRates = dict[tuple[int, int], float]


def diagnose(measurement: ClusterMeasurement, nearest: ClusterProfile | None = None) -> tuple[str, ...]:
    """Findings, the gravest kind first; empty where nothing stands out. ``nearest``: the shipped profile of the GPU."""
    hosts = list({host.key: host for host in measurement.hosts}.values())
    rates = _host_rates(measurement, hosts)
    slow_ways, blamed = _slow_hosts(hosts, rates)
    return (
        *slow_ways,
        *_asymmetric_pairs(hosts, rates, blamed),
        *_slow_interfaces(hosts),
        *_slow_ranks(measurement),
        *_shared_cores(measurement),
        *_far_from_nic(hosts, rates),
        *_missing_rdma(hosts, rates),
        *_far_from_datasheet(measurement, nearest),
    )


def _host_rates(measurement: ClusterMeasurement, hosts: list[HostFacts]) -> HostRates:
    """Best bytes per second from each host to each other one."""
    number = {host.key: index for index, host in enumerate(hosts)}
    rates: HostRates = {}
    for pair in measurement.pairs:
        way = number[measurement.hosts[pair.source].key], number[measurement.hosts[pair.target].key]
        if way[0] != way[1]:
            rates[way] = max(rates.get(way, 0.0), pair.bytes_per_s)
    return rates


def _slow_hosts(hosts: list[HostFacts], rates: HostRates) -> tuple[list[str], set[int]]:
    """Hosts that are slow even with the peer that suits them best.

    Takes 3 hosts, of which two are well: with only one that is well, every pair is slow and none stands out.
    """
    if len(hosts) < 3:
        return [], set()
    lines: list[str] = []
    blamed: set[int] = set()
    best = {
        "sends": [max(rates.get((i, j), 0.0) for j in range(len(hosts)) if j != i) for i in range(len(hosts))],
        "receives": [max(rates.get((j, i), 0.0) for j in range(len(hosts)) if j != i) for i in range(len(hosts))],
    }
    for index, host in enumerate(hosts):
        ways = [way for way, values in best.items() if values[index] < SLOW_HOST * _normal(values)]
        if ways:
            blamed.add(index)
            way = ways[0]
            lines.append(
                f"host {host.label} is slow: it {' and '.join(ways)} at no more than "
                f"{_rate(best[way][index])} with any other host, where others reach {_rate(_normal(best[way]))}. "
                f"Look at its cable, port and {host.interface or 'interface'} "
                "(negotiated speed, errors, traffic control); until then it holds back every collective"
            )
    return lines, blamed


def _normal(values: list[float]) -> float:
    """What a quarter of the hosts reach: half of them may be slow together, and one fast pair is no measure."""
    return sorted(values)[3 * (len(values) - 1) // 4]


def _asymmetric_pairs(hosts: list[HostFacts], rates: HostRates, blamed: set[int]) -> Iterator[str]:
    for (source, target), rate in sorted(rates.items()):
        back = rates.get((target, source), 0.0)
        if back > ASYMMETRY * rate and not {source, target} & blamed:
            yield (
                f"host {hosts[source].label} sends to {hosts[target].label} at {_rate(rate)}, but {_rate(back)} come "
                f"back: the sending side of {hosts[source].label} is slow, or else the receiving side of "
                f"{hosts[target].label}. Compare both with a third host"
            )


def _slow_interfaces(hosts: list[HostFacts]) -> Iterator[str]:
    """Hosts whose own settings or driver say less than the others' do."""
    limits = [_interface_bytes_per_s(host) for host in hosts]
    highest = max((limit for limit in limits if limit), default=0.0)
    for host, limit in zip(hosts, limits, strict=True):
        if limit and limit < SLOW_HOST * highest:
            shaped = host.shaper_bytes_per_s == limit
            reason = "traffic control (tc) limits it" if shaped else "it negotiated no more: check cable and port"
            yield (
                f"host {host.label} is slow: its {host.interface} has {_rate(limit)}, where others have "
                f"{_rate(highest)}; {reason}"
            )


def _slow_ranks(measurement: ClusterMeasurement) -> Iterator[str]:
    for dtype in ("bf16", "fp32"):
        rates = [device.best_flops_per_s(dtype) for device in measurement.devices]
        if not rates or not all(rates):
            continue  # on some device there was no time for this dtype
        normal = statistics.median(rates)
        for rank, rate in enumerate(rates):
            if rate < SLOW_RANK * normal:
                yield (
                    f"rank {rank} on host {measurement.hosts[rank].label} computes slowly: its best {dtype} matrix "
                    f"product runs at {rate / 1e12:.3g} TFLOP/s, the median rank's at {normal / 1e12:.3g}. Look at "
                    "clocks, power and temperature, and at other processes on the device"
                )


def _shared_cores(measurement: ClusterMeasurement) -> Iterator[str]:
    shares = [device.core_share for device in measurement.devices]
    short = [rank for rank, share in enumerate(shares) if share < CORE_SHARE]
    if short:
        yield (
            f"{len(short)} of {len(shares)} processes had a core for {min(shares):.0%} to "
            f"{max(shares[rank] for rank in short):.0%} of the time: there are more of them than cores, or other "
            "programs run. All rates are as slow as that; start fewer processes a host, or stop the others"
        )


def _far_from_nic(hosts: list[HostFacts], rates: HostRates) -> Iterator[str]:
    for index, host in enumerate(hosts):
        limits = [_interface_bytes_per_s(other) or 0.0 for other in hosts]
        expected = min(limits[index], max((limit for i, limit in enumerate(limits) if i != index), default=0.0))
        best = max((rate for (source, _), rate in rates.items() if source == index), default=None)
        if expected and best and not host.rdma_ports and best < FAR_FROM_NIC * expected:
            yield (
                f"host {host.label} sends at {_rate(best)} at best, {best / expected:.0%} of the {_rate(expected)} "
                f"that {host.interface} of both ends states: the way between the hosts is slower than that, or one "
                "connection cannot fill it"
            )


def _missing_rdma(hosts: list[HostFacts], rates: HostRates) -> Iterator[str]:
    others = sum(bool(host.rdma_ports) for host in hosts)
    for index, host in enumerate(hosts):
        if not host.rdma_ports and others:
            yield (
                f"host {host.label} shows no active RDMA port, while {others} of {len(hosts)} hosts do: whatever runs "
                "with it goes over TCP. Look at `rdma link` or `ibstat`, its driver, and /dev/infiniband in containers"
            )
        if not host.rdma_ports:
            continue
        if host.settings.get("NCCL_IB_DISABLE", "0") not in ("0", ""):
            yield f"host {host.label} has RDMA adapters, but NCCL_IB_DISABLE turns them off: unset it"
            continue
        port = max((p.bytes_per_s or 0.0 for p in host.rdma_ports), default=0.0)
        best = max((rate for (source, _), rate in rates.items() if source == index), default=None)
        if port and best and best < FAR_FROM_NIC * port:
            names = ", ".join(p.name for p in host.rdma_ports)
            yield (
                f"host {host.label} has RDMA at {_rate(port)} a port ({names}), but sends at {_rate(best)} at best: "
                "RDMA is probably not used. Look at NCCL_IB_HCA and "
                "NCCL_NET_GDR_LEVEL, the nvidia-peermem module, and the limit on locked memory (ulimit -l)"
            )


def _far_from_datasheet(measurement: ClusterMeasurement, nearest: ClusterProfile | None) -> Iterator[str]:
    """Inside a host, against the shipped profile of the same GPU."""
    if nearest is None or nearest.backend != "nccl":
        return
    expected = nearest.tiers[0].bandwidth_bytes_per_s.value
    inside = [p.bytes_per_s for p in measurement.pairs if measurement.hosts[p.source] == measurement.hosts[p.target]]
    if inside and max(inside) < FAR_FROM_DATASHEET * expected:
        yield (
            f"inside a host, two devices reach {_rate(max(inside))} at best, {max(inside) / expected:.0%} of the "
            f"{_rate(expected)} of {nearest.tiers[0].name} in {nearest.name}: look at `nvidia-smi topo -m` and "
            "NCCL_P2P_DISABLE"
        )


def _interface_bytes_per_s(host: HostFacts) -> float | None:
    known = [limit for limit in (host.nic_bytes_per_s, host.shaper_bytes_per_s) if limit]
    return min(known, default=None)


def _rate(bytes_per_s: float) -> str:
    return f"{bytes_per_s * 8 / 1e9:.3g} Gb/s"
