"""Turns timed collectives into the tiers of a profile: the cost models' formulas, solved for their constants.

A group with one rank in each inner domain crosses one tier alone, and a collective of it takes
t = launch + steps · latency + share · S / rate, with, for n ranks,

    all-reduce        steps 2(n-1)   share 2(n-1)/n        all-to-all   steps n-1   share (n-1)/n
    all-gather,       steps n-1      share (n-1)/n         send-recv    steps 1     share 1
    reduce-scatter

(see ``costmodels/communication.py``, which predicts with them). ``rate`` is what one rank has while all groups of
the axis are at work: bandwidth · links / devices of a node · efficiency.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from hardware_profiles.probes.fitting import LineFit, fit_line
from hardware_profiles.probes.measurement import ClusterMeasurement, CollectiveTiming
from hardware_profiles.schema import CollectiveName, CollectiveRate, NetworkTier, Quantity


@dataclass(frozen=True)
class RankRate:
    """What one rank reaches in one kind of collective across one tier."""

    latency_s: float  # of a step
    bytes_per_s: float
    sustained_bytes_per_s: float  # at the largest size, latency and all
    residual_spread: float
    num_sizes: int


@dataclass(frozen=True)
class Links:
    """The links of one node into a tier."""

    bytes_per_s: float  # of one
    count: int
    oversubscription: float


def steps_and_share(kind: CollectiveName, num_ranks: int) -> tuple[float, float]:
    """Steps, and bytes that each rank sends for each byte of ``num_bytes``."""
    if kind == "send_recv":
        return 1.0, 1.0
    passes = 2.0 if kind == "all_reduce" else 1.0
    return passes * (num_ranks - 1), passes * (num_ranks - 1) / num_ranks


def fit_rates(
    timings: Sequence[CollectiveTiming], num_ranks: int, stride: int, launch_s: float
) -> dict[CollectiveName, RankRate]:
    """One rate for each kind that was timed on groups of ``num_ranks`` at ``stride``."""
    placed = [t for t in timings if (t.num_ranks, t.stride) == (num_ranks, stride)]
    rates: dict[CollectiveName, RankRate] = {}
    kinds: list[CollectiveName] = [t.kind for t in placed]
    for kind in dict.fromkeys(kinds):
        own = [t for t in placed if t.kind == kind]
        line: LineFit = fit_line([t.num_bytes for t in own], [t.time_s for t in own])
        steps, share = steps_and_share(kind, num_ranks)
        slope = line.slope or min(t.time_s / t.num_bytes for t in own)  # no size was large enough to show the rate
        largest = max(own, key=lambda t: t.num_bytes)
        rates[kind] = RankRate(
            sustained_bytes_per_s=share * largest.num_bytes / largest.time_s,
            latency_s=max(0.0, line.intercept_s - launch_s) / steps,
            bytes_per_s=share / slope,
            residual_spread=line.residual_spread,
            num_sizes=len(own),
        )
    return rates


def tiers_of(measurement: ClusterMeasurement, launch_s: float) -> tuple[NetworkTier, ...]:
    """The tiers that were found, innermost first; empty where there was one rank."""
    node = measurement.devices_per_node
    tiers: list[NetworkTier] = []
    inner = 1
    for index, domain in enumerate(measurement.domains):
        rates = fit_rates(measurement.collectives, domain // inner, inner, launch_s)
        best = max(rate.sustained_bytes_per_s for rate in rates.values())
        alone = _pair_bytes_per_s(measurement, inner, domain)
        is_outermost = index == len(measurement.domains) - 1
        outside_node = inner >= node
        links = _links(best, alone, node, tiers[-1] if tiers and inner > node else None) if outside_node else None
        tiers.append(_tier(measurement, _tier_name(inner, domain, node), None if is_outermost else domain, rates,
                           links or Links(best, node, 1.0)))  # fmt: skip
        inner = domain
    return tuple(tiers)


def _links(best: float, alone: float | None, node: int, inner_tier: NetworkTier | None) -> Links:
    """How many links the devices of a node share, from what a rank has alone and when all are at work.

    The first tier beyond the node shows them; tiers further out have the same links, oversubscribed.
    """
    alone = alone or best
    if inner_tier is None:
        count = max(1, min(node, round(best * node / alone)))
        return Links(max(best * node / count, alone if count == 1 else 0.0), count, 1.0)
    count = inner_tier.links_per_node
    bandwidth = max(alone, best * node / count)
    return Links(bandwidth, count, max(1.0, bandwidth * count / (best * node)))


def _pair_bytes_per_s(measurement: ClusterMeasurement, inner: int, domain: int) -> float | None:
    """Best bandwidth of a single pair whose nearest common domain is this tier's."""
    rates = [
        pair.bytes_per_s
        for pair in measurement.pairs
        if pair.source // inner != pair.target // inner and pair.source // domain == pair.target // domain
    ]
    return max(rates, default=None)


def _tier_name(inner: int, domain: int, node: int) -> str:
    if domain <= node:
        return "node" if domain == node else f"inside-{domain}"
    return "network" if inner <= node else f"network-beyond-{inner}"


def _tier(
    measurement: ClusterMeasurement,
    name: str,
    num_devices: int | None,
    rates: dict[CollectiveName, RankRate],
    links: Links,
) -> NetworkTier:
    node = measurement.devices_per_node
    owned = links.bytes_per_s * links.count / node / links.oversubscription  # by one rank

    def quantity(value: float, what: str) -> Quantity:
        return measured(measurement, value, what)

    collectives: dict[CollectiveName, CollectiveRate] = {
        kind: CollectiveRate(
            latency_s=quantity(rate.latency_s, f"intercept over steps, fitted to {rate.num_sizes} sizes"),
            efficiency=quantity(min(1.0, rate.bytes_per_s / owned), f"slope fitted to {rate.num_sizes} sizes"),
            residual_spread=rate.residual_spread,
        )
        for kind, rate in rates.items()
    }
    shares = [rate.efficiency.value for rate in collectives.values()]
    steps = [rate.latency_s.value for rate in collectives.values()]
    return NetworkTier(
        name=name,
        num_devices=num_devices,
        latency_s=quantity(statistics.median(steps), "median step of the collectives"),
        bandwidth_bytes_per_s=quantity(
            links.bytes_per_s, "best of a single pair and of all collectives, all groups of the axis at work"
        ),
        links_per_node=links.count,
        efficiency=quantity(statistics.median(shares), "median of the collectives"),
        oversubscription=links.oversubscription,
        residual_spread=statistics.median(rate.residual_spread for rate in collectives.values()),
        collectives=collectives,
    )


def measured(measurement: ClusterMeasurement, value: float, what: str) -> Quantity:
    """A measured quantity with tool, cluster and date."""
    num_hosts = len({host.key for host in measurement.hosts})
    place = f"{num_hosts} x {measurement.devices_per_node} ranks"
    return Quantity(value=value, tag="measured", source=f"{what}; {measurement.tool} on {place}", date=measurement.date)
