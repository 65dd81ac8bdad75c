from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from costmodels.communication import (
    TREE_BANDWIDTH_FRACTION,
    collective_lines,
    collective_time_s,
    dispatch_parts,
    fraction_at_scale,
    lines_over,
    num_domains_spanned,
    tier_at_unit_rates,
    tiers_used,
)
from costmodels.vocabulary.workload import Collective, CollectiveKind, GroupPlacement
from hardware_profiles.schema import ClusterSpec, CollectiveRate, GroupShare
from tests.unit.costmodels.toy_cluster import NIC, NVLINK, at_scale, make_cluster, make_tiers, quantity

KINDS = list(CollectiveKind)
ONE_GIB = 2.0**30

placements = st.builds(GroupPlacement, num_ranks=st.integers(2, 64), stride=st.sampled_from([1, 2, 4, 8, 16, 64]))


def seconds(kind: CollectiveKind, num_ranks: int, stride: int, num_devices: int = 512, **tiers: float) -> float:
    cluster = make_cluster(num_devices, make_tiers(**tiers))  # type: ignore[arg-type]
    return collective_time_s(Collective(kind, ONE_GIB, GroupPlacement(num_ranks, stride)), cluster)


@pytest.mark.parametrize("kind", KINDS)
def test_a_group_of_one_does_not_communicate(kind: CollectiveKind) -> None:
    group = GroupPlacement(1, 8)
    cluster = make_cluster(64, make_tiers(latency_s=1e-5))
    assert collective_time_s(Collective(kind, ONE_GIB, group), cluster) == 0
    assert collective_lines(kind, group, cluster) == ()


@pytest.mark.parametrize("num_ranks", [2, 4, 8])
def test_ring_inside_a_node(num_ranks: int) -> None:
    share = (num_ranks - 1) / num_ranks * ONE_GIB / NVLINK
    assert seconds(CollectiveKind.ALL_REDUCE, num_ranks, 1) == pytest.approx(2 * share)
    assert seconds(CollectiveKind.ALL_GATHER, num_ranks, 1) == pytest.approx(share)
    assert seconds(CollectiveKind.REDUCE_SCATTER, num_ranks, 1) == pytest.approx(share)
    assert seconds(CollectiveKind.ALL_TO_ALL, num_ranks, 1) == pytest.approx(share)


def test_one_rank_per_node_has_one_nic() -> None:
    assert seconds(CollectiveKind.ALL_REDUCE, 4, 8) == pytest.approx(2 * 3 / 4 * ONE_GIB / NIC)


def test_a_group_of_whole_nodes_uses_all_their_nics() -> None:
    # 8 NICs of 25 GB/s equal one NVLink port of 200 GB/s
    assert seconds(CollectiveKind.ALL_GATHER, 32, 1) == pytest.approx(31 / 32 * ONE_GIB / min(NVLINK, 8 * NIC))
    assert seconds(CollectiveKind.ALL_GATHER, 32, 1, nic=NIC / 2) == pytest.approx(31 / 32 * ONE_GIB / (4 * NIC))


@pytest.mark.parametrize(("num_links", "share"), [(8, 1.0), (4, 0.5), (1, 0.125), (32, 4.0)])
def test_groups_that_communicate_at_once_share_the_nics_of_a_node(num_links: int, share: float) -> None:
    # stride 8: eight groups, one rank each on every node
    expected = 3 / 4 * ONE_GIB / (NIC * share)
    assert seconds(CollectiveKind.REDUCE_SCATTER, 4, 8, num_links=num_links) == pytest.approx(expected)


def test_all_to_all_sends_only_what_leaves_the_node_through_the_nics() -> None:
    # 32 ranks on 4 nodes: 24 of 32 parts leave the node, each rank through its own NIC
    assert seconds(CollectiveKind.ALL_TO_ALL, 32, 1) == pytest.approx(24 / 32 * ONE_GIB / NIC)
    # with a fabric as fast as NVLink is slow, the 7 of 32 parts that stay inside bound the time
    assert seconds(CollectiveKind.ALL_TO_ALL, 32, 1, nic=1e15) == pytest.approx(7 / 32 * ONE_GIB / NVLINK)


def test_all_to_all_has_its_own_efficiency() -> None:
    tiers = tuple(tier.model_copy(update={"all_to_all_efficiency": quantity(0.5)}) for tier in make_tiers())
    time = collective_time_s(
        Collective(CollectiveKind.ALL_TO_ALL, ONE_GIB, GroupPlacement(8, 1)), make_cluster(8, tiers)
    )
    assert time == pytest.approx(2 * seconds(CollectiveKind.ALL_TO_ALL, 8, 1))


def test_a_ring_shift_takes_what_was_measured_of_it_else_what_was_of_messages_one_way() -> None:
    def with_rates(**fractions: float) -> ClusterSpec:
        rates = {
            kind: CollectiveRate(latency_s=quantity(0.0), efficiency=quantity(each), residual_spread=0.0)
            for kind, each in fractions.items()
        }
        return make_cluster(8, tuple(tier.model_copy(update={"collectives": rates}) for tier in make_tiers()))

    def shift_s(cluster: ClusterSpec) -> float:
        return collective_time_s(Collective(CollectiveKind.RING_SHIFT, ONE_GIB, GroupPlacement(4, 1)), cluster)

    assert shift_s(with_rates()) == pytest.approx(ONE_GIB / NVLINK)
    assert shift_s(with_rates(send_recv=0.5)) == pytest.approx(2 * ONE_GIB / NVLINK)
    assert shift_s(with_rates(send_recv=0.5, ring_shift=0.25)) == pytest.approx(4 * ONE_GIB / NVLINK)


def test_without_a_switch_a_group_has_the_links_between_its_ranks() -> None:
    shares = (GroupShare(num_ranks=2, fraction=quantity(1 / 6)), GroupShare(num_ranks=4, fraction=quantity(0.5)))
    inside, outside = make_tiers()
    tiers = (inside.model_copy(update={"share_of_groups": shares}), outside)

    def ratio(kind: CollectiveKind, num_ranks: int, stride: int = 1) -> float:
        """Seconds in such nodes over those in nodes with a switch."""
        collective = Collective(kind, ONE_GIB, GroupPlacement(num_ranks, stride))
        return collective_time_s(collective, make_cluster(32, tiers)) / seconds(kind, num_ranks, stride)

    assert ratio(CollectiveKind.ALL_REDUCE, 2) == pytest.approx(6)
    assert ratio(CollectiveKind.ALL_GATHER, 4) == pytest.approx(2)
    assert ratio(CollectiveKind.REDUCE_SCATTER, 8) == pytest.approx(1)
    # A sender has its links to one neighbour, however many ranks there are in a row.
    assert ratio(CollectiveKind.SEND_RECV, 4) == pytest.approx(6)
    # Two ranks on each of four nodes: 2 · 25 GB/s of the NICs are more than a sixth of 200 GB/s.
    assert ratio(CollectiveKind.ALL_GATHER, 8, 4) == pytest.approx(2 * NIC / (NVLINK / 6))
    assert ratio(CollectiveKind.ALL_REDUCE, 4, 8) == pytest.approx(1)  # one rank a node uses none of them


def test_switches_that_reduce_speed_up_all_reduce_alone() -> None:
    tiers = tuple(
        tier.model_copy(update={"efficiency": quantity(0.5), "all_reduce_efficiency": quantity(0.9)})
        for tier in make_tiers()
    )
    cluster = make_cluster(8, tiers)
    group = GroupPlacement(8, 1)
    all_reduce = collective_time_s(Collective(CollectiveKind.ALL_REDUCE, ONE_GIB, group), cluster)
    all_gather = collective_time_s(Collective(CollectiveKind.ALL_GATHER, ONE_GIB, group), cluster)
    assert all_reduce == pytest.approx(2 * 7 / 8 * ONE_GIB / (0.9 * NVLINK))
    assert all_gather == pytest.approx(7 / 8 * ONE_GIB / (0.5 * NVLINK))


@pytest.mark.parametrize(("stride", "share"), [(1, 1.0), (4, 1.0), (8, 0.5), (64, 0.5)])
def test_senders_of_one_node_share_its_nics(stride: int, share: float) -> None:
    # 4 NICs a node: up to 4 neighbours crossing at once have one each, 8 share them
    time = seconds(CollectiveKind.SEND_RECV, 16, stride, num_links=4, num_devices=1024)
    assert time == pytest.approx(ONE_GIB / (NIC * share))


def test_a_send_inside_a_node_goes_over_nvlink() -> None:
    assert seconds(CollectiveKind.SEND_RECV, 2, 4) == pytest.approx(ONE_GIB / NVLINK)


def test_latency_counts_the_steps_of_the_ring() -> None:
    cluster = make_cluster(32, make_tiers(latency_s=1e-6))  # 1 us inside, 5 us across
    ((latency_s, _),) = collective_lines(CollectiveKind.ALL_GATHER, GroupPlacement(32, 1), cluster)
    assert latency_s == pytest.approx(28 * 1e-6 + 3 * 5e-6)


# Steps of a ring or of pairs one after the other, and what a rank sends for each byte of the operand (nccl-tests'
# factors of bus bandwidth, PERFORMANCE.md).
STEPS_AND_SHARE = {
    CollectiveKind.ALL_REDUCE: (2 * 5, 2 * 5 / 6),
    CollectiveKind.ALL_GATHER: (5, 5 / 6),
    CollectiveKind.REDUCE_SCATTER: (5, 5 / 6),
    CollectiveKind.ALL_TO_ALL: (5, 5 / 6),
    CollectiveKind.SEND_RECV: (1, 1.0),
    CollectiveKind.RING_SHIFT: (1, 1.0),
}


@pytest.mark.parametrize("kind", KINDS)
def test_at_unit_rates_a_line_is_steps_and_the_share_that_is_sent(kind: CollectiveKind) -> None:
    found = lines_over(kind, 6, (tier_at_unit_rates(6),), knows_trees=False)
    assert found == (pytest.approx(STEPS_AND_SHARE[kind]),)


def test_a_collective_launches_one_kernel() -> None:
    cluster = make_cluster(8)
    device = cluster.profile.device.model_copy(update={"kernel_launch_s": quantity(7e-6)})
    cluster = cluster.model_copy(update={"profile": cluster.profile.model_copy(update={"device": device})})
    empty = Collective(CollectiveKind.ALL_REDUCE, 0, GroupPlacement(8, 1))
    assert collective_time_s(empty, cluster) == pytest.approx(7e-6)


def test_small_all_reduces_over_many_nodes_go_up_a_tree_and_large_ones_round_the_ring() -> None:
    cluster = make_cluster(512, make_tiers(latency_s=1e-6))
    group = GroupPlacement(64, 8)
    small = collective_time_s(Collective(CollectiveKind.ALL_REDUCE, 1, group), cluster)
    assert small == pytest.approx(2 * 6 * 5e-6, rel=1e-3)
    large = collective_time_s(Collective(CollectiveKind.ALL_REDUCE, 1e12, group), cluster)
    assert large == pytest.approx(2 * 63 * 5e-6 + 2 * 63 / 64 * 1e12 / NIC)
    assert large < 2 * 1e12 / (TREE_BANDWIDTH_FRACTION * NIC)


@given(kind=st.sampled_from(KINDS), group=placements, num_bytes=st.floats(0, 1e12))
def test_the_fastest_algorithm_is_taken(kind: CollectiveKind, group: GroupPlacement, num_bytes: float) -> None:
    cluster = make_cluster(4096, make_tiers(latency_s=2e-6))
    times = [latency_s + slope * num_bytes for latency_s, slope in collective_lines(kind, group, cluster)]
    assert collective_time_s(Collective(kind, num_bytes, group), cluster) == min(times)


@given(
    kind=st.sampled_from(KINDS),
    group=placements,
    factor=st.floats(1, 50),
    num_links=st.sampled_from([1, 2, 4, 8, 16]),
)
def test_more_bandwidth_is_never_slower(
    kind: CollectiveKind, group: GroupPlacement, factor: float, num_links: int
) -> None:
    base = seconds(kind, group.num_ranks, group.stride, 4096, num_links=num_links)
    assert seconds(kind, group.num_ranks, group.stride, 4096, num_links=num_links, nvlink=NVLINK * factor) <= base
    assert seconds(kind, group.num_ranks, group.stride, 4096, num_links=num_links, nic=NIC * factor) <= base
    assert seconds(kind, group.num_ranks, group.stride, 4096, num_links=2 * num_links) <= base


@given(kind=st.sampled_from(KINDS), group=placements)
def test_nothing_is_faster_than_its_wire(kind: CollectiveKind, group: GroupPlacement) -> None:
    whole = ONE_GIB * (1 if kind is CollectiveKind.SEND_RECV else (group.num_ranks - 1) / group.num_ranks)
    reach = group.num_ranks * group.stride
    bandwidth = NVLINK if reach <= 8 else max(NVLINK, 8 * NIC)
    if kind is CollectiveKind.ALL_TO_ALL:
        bandwidth = NVLINK + NIC  # it drives both at once
    assert seconds(kind, group.num_ranks, group.stride, 4096) >= 0.9999 * whole / bandwidth


@given(kind=st.sampled_from(KINDS), group=placements, smaller=st.floats(0, 1e9), more=st.floats(0, 1e9))
def test_more_bytes_are_never_faster(kind: CollectiveKind, group: GroupPlacement, smaller: float, more: float) -> None:
    cluster = make_cluster(4096, make_tiers(latency_s=2e-6))
    base = collective_time_s(Collective(kind, smaller, group), cluster)
    assert collective_time_s(Collective(kind, smaller + more, group), cluster) >= base


@pytest.mark.parametrize(
    ("num_ranks", "stride", "nodes"),
    [
        (8, 1, 1),
        (16, 1, 2),
        (2, 4, 1),
        (4, 4, 2),
        (3, 8, 3),
        (3, 16, 3),
        (6, 1, 2),  # six do not tile a node of eight: the second group straddles two
        (12, 1, 3),  # nor does a node and a half
        (3, 2, 2),
    ],
)
def test_nodes_spanned(num_ranks: int, stride: int, nodes: int) -> None:
    assert num_domains_spanned(GroupPlacement(num_ranks, stride), 8) == nodes


@pytest.mark.parametrize(("num_ranks", "stride"), list(product([2, 3, 4, 6, 8, 12, 16, 24], [1, 2, 3, 4, 6, 8, 12])))
def test_no_group_of_the_axis_touches_more_nodes_than_said(num_ranks: int, stride: int) -> None:
    run = num_ranks * stride
    touched = max(
        len({(start + offset + rank * stride) // 8 for rank in range(num_ranks)})
        for start in range(0, 8 * run, run)
        for offset in range(stride)
    )
    assert num_domains_spanned(GroupPlacement(num_ranks, stride), 8) >= touched


def test_one_partly_used_node_is_one_node() -> None:
    uses = tiers_used(GroupPlacement(6, 1), make_cluster(6))
    assert [use.num_domains for use in uses] == [1]


def test_tiers_of_any_depth() -> None:
    node, fabric = make_tiers(latency_s=1e-6)
    pod = fabric.model_copy(update={"name": "pod", "num_devices": 32})
    spine = fabric.model_copy(update={"name": "spine", "oversubscription": 4.0})
    cluster = make_cluster(128, (node, pod, spine))
    inside, pods, spines = tiers_used(GroupPlacement(128, 1), cluster)
    assert (inside.num_domains, pods.num_domains, spines.num_domains) == (16, 4, 1)
    assert spines.bytes_per_s == pytest.approx(NIC / 4)
    assert spines.ranks_per_inner_domain == 32
    # a rank's share of the spine is a quarter of a NIC, but the whole pod's ranks share their way out
    ((_, slope),) = collective_lines(CollectiveKind.ALL_GATHER, GroupPlacement(128, 1), cluster)
    assert slope == pytest.approx(127 / 128 / min(NVLINK, 8 * NIC, 32 * NIC / 4))


def test_a_group_beyond_the_outermost_tier_is_refused() -> None:
    node, _ = make_tiers()
    with pytest.raises(ValueError, match="reach beyond the outermost network tier of toy-cluster"):
        tiers_used(GroupPlacement(16, 1), make_cluster(16, (node,)))


def test_efficiency_falls_with_the_number_of_nodes() -> None:
    points = at_scale({1: 1.0, 4: 0.5, 16: 0.1})
    assert [fraction_at_scale(points, n) for n in (1, 2, 4, 8, 16, 64)] == pytest.approx([1, 0.75, 0.5, 0.3, 0.1, 0.1])
    assert fraction_at_scale(at_scale({4: 0.5, 16: 0.1}), 2) == 0.5  # nothing is known of fewer nodes
    assert fraction_at_scale((), 2) == 1.0
    node, fabric = make_tiers()
    fabric = fabric.model_copy(update={"efficiency_at_scale": points})
    collective = Collective(CollectiveKind.ALL_GATHER, ONE_GIB, GroupPlacement(4, 8))
    slower = collective_time_s(collective, make_cluster(32, (node, fabric)))
    assert slower == pytest.approx(2 * seconds(CollectiveKind.ALL_GATHER, 4, 8))


def mean_distinct(places: int, choices: int) -> float:
    """Different places among so many choices, by counting all there are."""
    drawn = [len(set(each)) for each in product(range(places), repeat=choices)]
    return sum(drawn) / len(drawn)


def test_a_token_is_sent_to_a_rank_once_and_to_a_node_once() -> None:
    cluster = make_cluster(16, make_tiers())  # nodes of 8
    one, two = GroupPlacement(8, 1), GroupPlacement(16, 1)
    assert dispatch_parts(one, (2, None), cluster) == ((one, pytest.approx(mean_distinct(8, 2) / 2)),)
    inside, between = dispatch_parts(two, (3, None), cluster)
    assert inside == (GroupPlacement(8, 1), pytest.approx(mean_distinct(16, 3) / 3))
    assert between == (two, pytest.approx(mean_distinct(2, 3) / 3))
    assert dispatch_parts(two, (3, 1.2), cluster)[1] == (two, pytest.approx(1.2 / 3))
