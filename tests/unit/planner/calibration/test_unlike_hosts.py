"""Slow hosts are told apart from the others, and a search gives them less work."""

from __future__ import annotations

from pathlib import Path

import pytest

from hardware_profiles.catalog import load_profile
from hardware_profiles.mixed import cluster_for
from hardware_profiles.probes.measurement import ClusterMeasurement
from planner.calibration.profile import profile_of
from planner.calibration.unlike_hosts import SLOW_HOST, UnlikeHosts, unlike_hosts
from planner.output_file import write_text
from tests.unit.costmodels.toy_cluster import make_cluster, make_tiers
from tests.unit.hardware_profiles.probes.measurements import device, host, measurement, timed_as_modelled

NEAREST = load_profile("cpu-gloo")
RATE = 1e11


def measured(rates: list[float], node: int = 2) -> ClusterMeasurement:
    """Hosts of ``node`` devices that compute at ``rates``."""
    num_ranks = node * len(rates)
    cluster = make_cluster(num_ranks, make_tiers(latency_s=1e-5))
    devices = tuple(device(rates[rank // node]) for rank in range(num_ranks))
    domains = (node, num_ranks)
    more = {"devices": devices, "domains": domains, "collectives": timed_as_modelled(cluster, domains)}
    return measurement([host(rank // node) for rank in range(num_ranks)], **more)


def found_in(rates: list[float]) -> UnlikeHosts | None:
    timed = measured(rates)
    return unlike_hosts(timed, NEAREST, profile_of(timed, NEAREST))


@pytest.mark.parametrize("rates", [[RATE] * 4, [RATE, (SLOW_HOST + 0.05) * RATE, RATE]])
def test_hosts_that_are_alike_have_one_profile(rates: list[float]) -> None:
    assert found_in(rates) is None


@pytest.mark.parametrize(
    ("rates", "runs", "labels"),
    [
        ([RATE, RATE, 0.5 * RATE], (("usual", 4), ("slow", 2)), ("host2",)),
        ([0.5 * RATE, RATE], (("slow", 2), ("usual", 2)), ("host0",)),  # of two hosts the faster is as hosts should be
        ([RATE, 0.5 * RATE, RATE], (("usual", 2), ("slow", 2), ("usual", 2)), ("host1",)),
        ([RATE, 0.5 * RATE, 0.6 * RATE, RATE], (("usual", 2), ("slow", 4), ("usual", 2)), ("host1", "host2")),
    ],
)
def test_slow_hosts_have_a_profile_of_their_own(
    rates: list[float], runs: tuple[tuple[str, int], ...], labels: tuple[str, ...]
) -> None:
    found = found_in(rates)
    assert found is not None
    assert (found.runs, found.slow.labels) == (runs, labels)
    slow = [rate for rate in rates if rate < RATE]
    assert found.slow.rate == pytest.approx(sum(slow) / len(slow) / RATE, rel=0.01)
    sustained = [
        each.peak_flops_per_s["fp32"].value * each.efficiency["gemm"].fraction.value
        for each in (found.usual.profile.device, found.slow.profile.device)
    ]
    assert sustained == pytest.approx([RATE, sum(slow) / len(slow)], rel=0.05)
    assert found.usual.profile.tiers == found.slow.profile.tiers


def test_both_profiles_are_a_mixed_cluster(tmp_path: Path) -> None:
    found = found_in([RATE, RATE, 0.5 * RATE])
    assert found is not None
    parts: list[str] = []
    for kind, (name, count) in zip((found.usual, found.slow), found.runs, strict=True):
        assert kind.name == name
        write_text(tmp_path / f"{name}.json", kind.profile.model_dump_json())
        parts.append(f"{tmp_path / name}.json:{count}")
    mixed = cluster_for(None, ",".join(parts)).mixed
    assert mixed is not None
    assert [group.cluster.num_devices for group in mixed.groups] == [4, 2]
    assert [group.name for group in mixed.groups] == [found.usual.profile.name, found.slow.profile.name]
