"""Meta's RoCE cluster: full bisection inside a pod of 3,072 GPUs, a seventh of it between pods."""

import pytest

from costmodels.communication import collective_lines
from costmodels.vocabulary.workload import CollectiveKind, GroupPlacement
from hardware_profiles.catalog import load_profile, profile_for
from hardware_profiles.schema import ClusterSpec

NAME = "meta-h100-roce"
RATE = 50e9 * 0.92  # of one GPU's port, as large messages reach it


def slope(kind: CollectiveKind, group: GroupPlacement, num_devices: int = 16384) -> float:
    (line,) = collective_lines(kind, group, profile_for(num_devices, NAME))
    return line[1]


def test_a_pod_is_as_fast_as_a_network_without_oversubscription() -> None:
    group = GroupPlacement(384, 8)  # one GPU of each node of a pod
    assert slope(CollectiveKind.ALL_GATHER, group, 3072) == pytest.approx(383 / 384 / RATE)
    flat = ClusterSpec(profile=load_profile("dgx-h100-80gb"), num_devices=3072)
    (line,) = collective_lines(CollectiveKind.ALL_GATHER, group, flat)
    assert slope(CollectiveKind.ALL_GATHER, group, 3072) == pytest.approx(line[1])


def test_one_gpu_a_pod_has_a_seventh_of_its_port() -> None:
    # Four ranks, 4096 devices apart, each in a pod of its own: three of four parts cross at a seventh of the rate.
    assert slope(CollectiveKind.ALL_GATHER, GroupPlacement(4, 4096)) == pytest.approx(3 / 4 * 7 / RATE)
    assert slope(CollectiveKind.SEND_RECV, GroupPlacement(4, 4096)) == pytest.approx(7 / RATE)


def test_a_ring_with_seven_ranks_a_pod_fills_the_links_between_pods() -> None:
    """Rings cross a pod's border once, so ranks of one ring share what their pod has: from 7 on the port binds."""
    wide = slope(CollectiveKind.ALL_GATHER, GroupPlacement(2048, 8))
    assert wide == pytest.approx(2047 / 2048 / RATE)


def test_the_profile_says_where_it_comes_from() -> None:
    inside, between = load_profile(NAME).tiers[1:]
    assert (inside.num_devices, inside.oversubscription) == (3072, 1.0)
    assert (between.num_devices, between.oversubscription) == (None, 7.0)
    assert "section 3.3.1" in between.bandwidth_bytes_per_s.source
