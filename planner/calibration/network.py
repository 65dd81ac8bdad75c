"""Turns timed collectives into the tiers of a profile, by the cost models' own lines.

A group with one rank in each inner domain crosses one tier alone. What ``costmodels.communication`` predicts for it is

    t = launch + steps · latency + share · S / rate

where steps and share are its prediction over a tier at unit rates, and ``rate`` is what one rank has while all groups
of the axis are at work: the wire (``NetworkTier.wire_bytes_per_s``) times efficiency. Latency and rate are fitted.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from costmodels.communication import lines_over, tier_at_unit_rates
from costmodels.vocabulary.workload import CollectiveKind
from hardware_profiles.probes.measurement import ClusterMeasurement, CollectiveTiming
from hardware_profiles.schema import CollectiveName, CollectiveRate, NetworkTier
from planner.calibration.fitting import LineFit, fit_line
from planner.calibration.provenance import fitted, measured


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
    """Steps, and bytes that each rank sends for each byte of ``num_bytes``, of a ring or a pair over one tier."""
    uses = (tier_at_unit_rates(num_ranks),)
    return lines_over(CollectiveKind(kind), num_ranks, uses, knows_trees=False)[0]


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
    num_rows = sum(rate.num_sizes for rate in rates.values())
    bandwidth = measured(
        measurement, links.bytes_per_s, "best of a single pair and of all collectives, all groups of the axis at work"
    )
    full = NetworkTier(
        name=name,
        num_devices=num_devices,
        latency_s=bandwidth.model_copy(update={"value": 0.0}),
        bandwidth_bytes_per_s=bandwidth,
        links_per_node=links.count,
        efficiency=bandwidth.model_copy(update={"value": 1.0}),
        oversubscription=links.oversubscription,
    )
    owned = full.wire_bytes_per_s(measurement.devices_per_node)  # by one rank
    collectives: dict[CollectiveName, CollectiveRate] = {
        kind: CollectiveRate(
            latency_s=fitted(measurement, rate.latency_s, f"intercept of {kind} over its steps", rate.num_sizes),
            efficiency=fitted(measurement, min(1.0, rate.bytes_per_s / owned), f"slope of {kind}", rate.num_sizes),
            residual_spread=rate.residual_spread,
        )
        for kind, rate in rates.items()
    }
    shares = [rate.efficiency.value for rate in collectives.values()]
    steps = [rate.latency_s.value for rate in collectives.values()]
    return full.model_copy(
        update={
            "latency_s": fitted(measurement, statistics.median(steps), "median step of the collectives", num_rows),
            "efficiency": fitted(measurement, statistics.median(shares), "median of the collectives", num_rows),
            "residual_spread": statistics.median(rate.residual_spread for rate in collectives.values()),
            "collectives": collectives,
        }
    )
