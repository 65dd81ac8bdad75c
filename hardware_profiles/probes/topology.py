"""Finds the tiers of a network from how fast its ranks reach each other, without being told what is where."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from hardware_profiles.probes.measurement import PairTiming

REFERENCE_BYTES = 2**20  # a message whose time shows bandwidth and latency both
# Steps between the times of two tiers. A border between hosts is expected where the hosts' own words say so, and a
# smaller step is believed there; elsewhere (switches, islands of links inside a host) it must stand out of the noise.
HOST_STEP, OTHER_STEP = 1.25, 2.0

Matrix = np.ndarray[tuple[int, int], np.dtype[np.float64]]


def message_times_s(pairs: Sequence[PairTiming], keys: Sequence[str]) -> Matrix:
    """Seconds of a reference message between any two ranks; a pair that was not timed takes the median of its hosts."""
    num_ranks = len(keys)
    known = {(p.source, p.target): p.latency_s + REFERENCE_BYTES / p.bytes_per_s for p in pairs}
    by_hosts: dict[tuple[str, str], list[float]] = {}
    for (source, target), time_s in known.items():
        by_hosts.setdefault((keys[source], keys[target]), []).append(time_s)
    anywhere = statistics.median(known.values()) if known else 0.0
    times = np.zeros((num_ranks, num_ranks))
    for source in range(num_ranks):
        for target in range(num_ranks):
            if source != target:
                alike = by_hosts.get((keys[source], keys[target]), [anywhere])
                times[source, target] = known.get((source, target), statistics.median(alike))
    return times


def discover_domains(times_s: Matrix, keys: Sequence[str]) -> tuple[int, ...]:
    """Ranks in one domain of each tier, innermost first; the last is the world. Empty for a single rank.

    Single-linkage clustering: two ranks belong together where a chain of fast pairs joins them. A level counts where
    the next pairs are slower by a clear step and all its clusters are equally large runs of neighbouring ranks: one
    slow host or pair cannot make a tier.
    """
    num_ranks = len(times_s)
    if num_ranks == 1:
        return ()
    both_ways = np.minimum(times_s, times_s.T)
    heights = _merge_heights(both_ways)
    host_size = _regular_size(_labels(keys))
    domains: list[int] = []
    for below, above in pairwise(heights):
        size = _regular_size(_clusters(both_ways, below))
        step = HOST_STEP if size == host_size else OTHER_STEP
        if size is not None and 1 < size < num_ranks and above >= step * below and size not in domains:
            domains.append(size)
    return (*domains, num_ranks)


def _merge_heights(distance: Matrix) -> list[float]:
    """Distances at which clusters merge, rising: the edges of the minimum spanning tree (Prim)."""
    num_ranks = len(distance)
    nearest = distance[0].copy()
    outside = set(range(1, num_ranks))
    heights: list[float] = []
    while outside:
        following = min(outside, key=lambda rank: float(nearest[rank]))
        outside.remove(following)
        heights.append(float(nearest[following]))
        nearest = np.minimum(nearest, distance[following])
    return sorted(heights)


def _clusters(distance: Matrix, height: float) -> list[int]:
    """For each rank the lowest rank that a chain of pairs within ``height`` joins it to."""
    labels = list(range(len(distance)))
    for first in range(len(distance)):
        for second in range(first + 1, len(distance)):
            if distance[first, second] <= height and labels[first] != labels[second]:
                keep, drop = sorted((labels[first], labels[second]))
                labels = [keep if label == drop else label for label in labels]
    return labels


def _labels(keys: Sequence[str]) -> list[int]:
    return [keys.index(key) for key in keys]


def _regular_size(labels: Sequence[int]) -> int | None:
    """Ranks in each cluster where all are equally large runs of neighbouring ranks, else None."""
    size = labels.count(labels[0])
    regular = all(label == rank - rank % size for rank, label in enumerate(labels))
    return size if regular and len(labels) % size == 0 else None
