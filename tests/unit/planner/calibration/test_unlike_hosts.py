"""Slow hosts are told apart from the others, and a search gives them less work."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from hardware_profiles.catalog import load_profile
from hardware_profiles.mixed import cluster_for
from hardware_profiles.probes.measurement import ClusterMeasurement
from planner.calibration.profile import profile_of
from planner.calibration.unlike_hosts import SLOW_HOST, UnlikeHosts, unlike_hosts
from planner.cli.profile import write_kinds
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
    assert found.together.device == found.slow.profile.device
    assert found.usual.profile.tiers == found.slow.profile.tiers


@pytest.mark.parametrize("slow_first", [False, True])
def test_the_files_of_both_kinds_are_a_mixed_cluster(
    slow_first: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rates = [RATE, RATE, 0.5 * RATE]
    found = found_in(rates[::-1] if slow_first else rates)
    assert found is not None
    write_kinds(found, tmp_path / "my cluster.json")
    words = shlex.split(capsys.readouterr().err.replace("! ", ""))
    mixed = cluster_for(None, words[words.index("--hardware") + 1]).mixed
    assert mixed is not None
    expected = [(found.usual.profile.name, 4), (found.slow.profile.name, 2)]
    assert [(g.name, g.cluster.num_devices) for g in mixed.groups] == (expected[::-1] if slow_first else expected)
