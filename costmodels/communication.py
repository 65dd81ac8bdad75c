"""Time of one collective: t = latency + seconds_per_byte · num_bytes, from where the ranks of its group sit.

A group of n ranks spans c_t domains of network tier t (c_0: NVLink domains or nodes, and so on outwards; c_{-1} = n).
With b_t = bandwidth that one rank owns at tier t (links of a node shared by all its devices, because every group along
the axis communicates at once; times efficiency, efficiency at that number of nodes, and the share of groups of that
size, over oversubscription) and g_t = ranks of the group inside one domain of tier t-1 (g_0 = 1), whose links the group
uses together:

    bus bandwidth   B = min over crossed tiers of g_t · b_t
    ring            k · (n-1)/n · S / B  + k · Σ_t (c_{t-1} - c_t) · latency_t
    hierarchical    2 · S / (0.9 · B)    + 2 · ((n/c_0 - 1) · latency_0 + Σ_{t>0} log2(c_{t-1}/c_t) · latency_t)
    all-to-all      max over tiers of S · (share of peers reached over tier t) / b_t + Σ_t peers_t · latency_t
    send-recv       S / (a sender's own share of the slowest hop between neighbours) + its latency
    ring shift      the same, of ranks that all send and receive at once

A tier's latency and efficiency are those of the collective itself where the profile has measured it by itself, and of
send-recv for a ring shift that it has not.
k = 2 for all-reduce, 1 for all-gather and reduce-scatter; each collective adds one kernel launch. "Hierarchical" is
reduce inside the node, all-reduce across, broadcast inside, pipelined in chunks so that the slowest phase counts
alone; only for all-reduce. The faster algorithm is taken, as NCCL takes it.

Sources: Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms", JPDC 2009 (ring); NCCL's tuning model,
src/graph/tuning.cc (step counts of ring and tree, tree at 0.9 of the bus bandwidth); Thakur, Rabenseifner and Gropp,
"Optimization of collective communication operations in MPICH", 2005 (pairwise all-to-all).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import ceil, log2

import numpy as np
import numpy.typing as npt

from costmodels.vocabulary.workload import Collective, CollectiveKind, GroupPlacement
from hardware_profiles.schema import ClusterSpec, CollectiveRate, EfficiencyAtScale, GroupLink, NetworkTier

# NCCL src/graph/tuning.cc: a tree reaches 0.9 of the ring's bus bandwidth.
TREE_BANDWIDTH_FRACTION = 0.9
_BETWEEN_NEIGHBOURS = (CollectiveKind.SEND_RECV, CollectiveKind.RING_SHIFT)

Line = tuple[float, float]
FloatArray = npt.NDArray[np.float64]


@dataclass(frozen=True)
class TierUse:
    """How one group uses one network tier that it crosses."""

    is_innermost: bool
    latency_s: float
    bytes_per_s: float  # owned by one rank, for all-gather and reduce-scatter
    all_reduce_bytes_per_s: float  # the same for all-reduce, which some switches do themselves
    all_to_all_bytes_per_s: float  # the same for all-to-all
    send_bytes_per_s: float  # of one sender to its neighbour
    num_inner_domains: int  # c_{t-1}
    num_domains: int  # c_t
    ranks_per_inner_domain: int  # g_t

    @property
    def num_crossings(self) -> int:
        """Steps of a ring once around that cross this tier: c_{t-1} - c_t."""
        return self.num_inner_domains - self.num_domains


def collective_time_s(collective: Collective, cluster: ClusterSpec) -> float:
    """Seconds from the last rank's start to the last rank's end; 0 for a group of one rank."""
    lines = collective_lines(collective.kind, collective.group, cluster)
    return min((latency_s + slope * collective.num_bytes for latency_s, slope in lines), default=0.0)


def collective_lines(kind: CollectiveKind, group: GroupPlacement, cluster: ClusterSpec) -> tuple[Line, ...]:
    """Latency and seconds per byte of every algorithm there is for the collective; empty for a group of one rank."""
    uses = tiers_used(group, cluster, kind)
    if not uses:
        return ()
    launch_s = cluster.profile.device.kernel_launch_s.value
    lines = lines_over(kind, group.num_ranks, uses, knows_trees=cluster.profile.backend != "gloo")
    return tuple((launch_s + latency_s, slope) for latency_s, slope in lines)


def lines_over(
    kind: CollectiveKind, num_ranks: int, uses: tuple[TierUse, ...], *, knows_trees: bool
) -> tuple[Line, ...]:
    """As ``collective_lines`` over tiers that are used as ``uses`` says, without the launch; a ring stands first."""
    match kind:
        case CollectiveKind.ALL_REDUCE:
            bus_bytes_per_s = min(use.ranks_per_inner_domain * use.all_reduce_bytes_per_s for use in uses)
            ring = _ring(2, num_ranks, uses, bus_bytes_per_s)
            if not knows_trees or (len(uses) == 1 and uses[0].is_innermost):
                return (ring,)
            return ring, _hierarchical(uses, bus_bytes_per_s)
        case CollectiveKind.ALL_GATHER | CollectiveKind.REDUCE_SCATTER:
            bus_bytes_per_s = min(use.ranks_per_inner_domain * use.bytes_per_s for use in uses)
            return (_ring(1, num_ranks, uses, bus_bytes_per_s),)
        case CollectiveKind.ALL_TO_ALL:
            return (_all_to_all(num_ranks, uses),)
        case CollectiveKind.SEND_RECV | CollectiveKind.RING_SHIFT:
            return ((max(use.latency_s for use in uses), max(1.0 / use.send_bytes_per_s for use in uses)),)


def tier_at_unit_rates(num_ranks: int) -> TierUse:
    """A tier of one second a step and one byte a second, crossed by ``num_ranks`` ranks in as many inner domains.

    The line over it is what a line over any such tier has of its latency and of one over its rate.
    """
    return TierUse(
        is_innermost=True,
        latency_s=1.0,
        bytes_per_s=1.0,
        all_reduce_bytes_per_s=1.0,
        all_to_all_bytes_per_s=1.0,
        send_bytes_per_s=1.0,
        num_inner_domains=num_ranks,
        num_domains=1,
        ranks_per_inner_domain=1,
    )


def collective_times_s(lines: Sequence[Line], num_bytes: FloatArray) -> FloatArray:
    """``collective_time_s`` of many sizes at once, from the collective's ``lines``."""
    if not lines:
        return np.zeros_like(num_bytes)
    return np.minimum.reduce([latency_s + slope * num_bytes for latency_s, slope in lines])


def dispatch_parts(
    group: GroupPlacement, spread: tuple[float, float | None], cluster: ClusterSpec
) -> tuple[tuple[GroupPlacement, float], ...]:
    """The all-to-alls into which sending every token's rows falls where a node gets each token only once.

    ``spread``: copies of a token, and the most nodes that its experts lie on (None: as many as there are). With the
    share of the rows' bytes that each counts; they run at the same time. Of n nodes

        over NVLink     ranks · (1 - (1 - 1/ranks)^copies) tokens of each rank, rather than all copies: a rank that
                        holds several experts of a token gets it once
        between nodes   (n - 1) · (1 - (1 - 1/n)^copies) tokens of each rank, rather than (n - 1) / n of the rows;
                        or (n - 1) / n of the most nodes if that is less

    as if a token could choose an expert twice, which makes the second less by 0.1 % for 8 of 128. Sources: DeepSeek-AI,
    "DeepSeek-V3 Technical Report" (2024), section 3.2.2; DeepEP, csrc/kernels/layout.cu, which counts tokens by rank
    (``is_token_in_rank``), and csrc/hybrid_ep of the same.
    """
    copies, most_nodes = spread
    num_nodes = num_domains_spanned(group, cluster.devices_per_node)
    ranks = _distinct(group.num_ranks, copies)
    if num_nodes == 1:
        return ((group, ranks / copies),)
    inside = GroupPlacement(max(1, group.num_ranks // num_nodes), group.stride)
    # Of an all-to-all (n - 1) / n leaves the node.
    nodes = _distinct(num_nodes, copies)
    between = nodes if most_nodes is None else min(nodes, most_nodes)
    return (inside, ranks / copies), (group, between / copies)


def _distinct(places: int, choices: float) -> float:
    """Expected number of different places among so many choices, each of any place alike."""
    return places * (1 - (1 - 1 / places) ** choices)


def line_between(one: ClusterSpec, other: ClusterSpec, link: GroupLink | None, num_senders: int) -> Line:
    """The line of a send from ``num_senders`` devices of one cluster to as many of another, all at once.

    Each gets its share of its node's part of ``link``; without a link of their own the clusters meet over the network
    of the slower one.
    """
    launch_s = max(cluster.profile.device.kernel_launch_s.value for cluster in (one, other))
    if link is not None:
        sharing = max(min(cluster.profile.node.num_devices, num_senders) for cluster in (one, other))
        return launch_s + link.latency_s.value, sharing / link.bandwidth_bytes_per_s.value
    group = GroupPlacement(2, num_senders)
    uses: list[TierUse] = []
    for cluster in (one, other):
        tier = cluster.profile.tiers[-1]
        rate = _rate_of(tier, CollectiveKind.SEND_RECV)
        uses.append(_use(cluster, tier if rate is None else _with_rate(tier, rate), group, (2, 1), 2))
    return launch_s + max(use.latency_s for use in uses), max(1.0 / use.send_bytes_per_s for use in uses)


def num_domains_spanned(group: GroupPlacement, domain_devices: int) -> int:
    """How many domains of ``domain_devices`` neighbouring devices the worst-placed group of the axis touches.

    The groups of an axis tile the cluster in runs of ``num_ranks * stride`` devices. Where runs and domains do not
    divide each other, some group straddles one border more.
    """
    run = group.num_ranks * group.stride
    if run <= domain_devices:
        return 1 if domain_devices % run == 0 else min(2, group.num_ranks)
    ranks_per_domain = max(1, domain_devices // group.stride)
    aligned = ceil(group.num_ranks / ranks_per_domain)
    return min(group.num_ranks, aligned if run % domain_devices == 0 else aligned + 1)


def tiers_used(group: GroupPlacement, cluster: ClusterSpec, kind: CollectiveKind | None = None) -> tuple[TierUse, ...]:
    """The tiers that ``group`` crosses, innermost first; ValueError where the profile's tiers do not reach.

    With the numbers measured for ``kind`` by itself where the profile has them.
    """
    if group.num_ranks < 1 or group.stride < 1:
        raise ValueError(f"a group needs at least 1 rank and a stride of at least 1, got {group}")
    num_devices = max(cluster.num_devices, group.num_ranks * group.stride)

    def spanned(domain_devices: int | None) -> int:
        if domain_devices is None or num_devices <= domain_devices:
            return 1
        return num_domains_spanned(group, cluster.used_devices(domain_devices))

    num_nodes = spanned(cluster.profile.node.num_devices)
    if kind in _BETWEEN_NEIGHBOURS:  # however many there are in a row
        num_nodes = min(2, num_nodes)
    uses: list[TierUse] = []
    inner = group.num_ranks
    for tier in cluster.profile.tiers:
        outer = min(inner, spanned(tier.num_devices))
        if outer < inner:
            rate = None if kind is None else _rate_of(tier, kind)
            found = _for_group(tier, 2 if kind in _BETWEEN_NEIGHBOURS else ceil(inner / outer))
            uses.append(
                _use(cluster, found if rate is None else _with_rate(found, rate), group, (inner, outer), num_nodes)
            )
        inner = outer
    if inner > 1:
        raise ValueError(
            f"{group.num_ranks} ranks at stride {group.stride} reach beyond the outermost network tier of "
            f"{cluster.profile.name}"
        )
    return tuple(uses)


def fraction_at_scale(points: tuple[EfficiencyAtScale, ...], num_nodes: int) -> float:
    """Efficiency left on ``num_nodes`` nodes: linear in log2(nodes) between the points, constant outside them."""
    known = sorted((point.num_nodes, point.fraction.value) for point in points)
    if not known:
        return 1.0
    if num_nodes <= known[0][0]:
        return known[0][1]
    for (low, at_low), (high, at_high) in pairwise(known):
        if num_nodes <= high:
            weight = (log2(num_nodes) - log2(low)) / (log2(high) - log2(low))
            return at_low + weight * (at_high - at_low)
    return known[-1][1]


def _for_group(tier: NetworkTier, num_ranks: int) -> NetworkTier:
    """``tier`` as groups of so many ranks of one of its domains find it."""
    shares = (share.fraction.value for share in tier.share_of_groups if share.num_ranks == num_ranks)
    share = next(shares, None)
    if share is None:
        return tier
    link = tier.bandwidth_bytes_per_s
    return tier.model_copy(update={"bandwidth_bytes_per_s": link.model_copy(update={"value": share * link.value})})


def _rate_of(tier: NetworkTier, kind: CollectiveKind) -> CollectiveRate | None:
    """What was measured of ``kind`` by itself; of a ring's messages, else, what was of messages one way."""
    of_kind = tier.collectives.get(kind.value)
    if of_kind is None and kind is CollectiveKind.RING_SHIFT:
        return tier.collectives.get(CollectiveKind.SEND_RECV.value)
    return of_kind


def _with_rate(tier: NetworkTier, rate: CollectiveRate) -> NetworkTier:
    """``tier`` as one kind of collective finds it."""
    own = {"latency_s": rate.latency_s, "efficiency": rate.efficiency}
    return tier.model_copy(update={**own, "all_to_all_efficiency": None, "all_reduce_efficiency": None})


def _use(
    cluster: ClusterSpec, tier: NetworkTier, group: GroupPlacement, domains: tuple[int, int], num_nodes: int
) -> TierUse:
    inner, outer = domains
    node = cluster.profile.node.num_devices
    at_scale = fraction_at_scale(tier.efficiency_at_scale, num_nodes)
    link = tier.bandwidth_bytes_per_s.value * at_scale / tier.oversubscription
    wire = tier.wire_bytes_per_s(node) * at_scale
    links_per_device = tier.links_per_node / node
    all_reduce = tier.all_reduce_efficiency or tier.efficiency
    all_to_all = tier.all_to_all_efficiency or tier.efficiency
    senders = min(group.stride, node)  # of one node, each towards its neighbour `stride` devices further
    links_per_sender = min(max(1.0, links_per_device), tier.links_per_node / senders)
    return TierUse(
        is_innermost=tier.name == cluster.profile.tiers[0].name,
        latency_s=tier.latency_s.value,
        bytes_per_s=wire * tier.efficiency.value,
        all_reduce_bytes_per_s=wire * all_reduce.value,
        all_to_all_bytes_per_s=wire * all_to_all.value,
        send_bytes_per_s=link * links_per_sender * tier.efficiency.value,
        num_inner_domains=inner,
        num_domains=outer,
        ranks_per_inner_domain=max(1, group.num_ranks // inner),
    )


def _ring(num_passes: int, num_ranks: int, uses: tuple[TierUse, ...], bus_bytes_per_s: float) -> Line:
    latency_s = num_passes * sum(use.num_crossings * use.latency_s for use in uses)
    return latency_s, num_passes * (num_ranks - 1) / num_ranks / bus_bytes_per_s


def _hierarchical(uses: tuple[TierUse, ...], bus_bytes_per_s: float) -> Line:
    """A chain inside the innermost domain, a double binary tree across."""
    steps_s = 0.0
    for use in uses:
        fan = use.num_inner_domains / use.num_domains
        steps_s += (ceil(fan) - 1 if use.is_innermost else log2(fan)) * use.latency_s
    return 2 * steps_s, 2 / (TREE_BANDWIDTH_FRACTION * bus_bytes_per_s)


def _all_to_all(num_ranks: int, uses: tuple[TierUse, ...]) -> Line:
    latency_s = 0.0
    slope = 0.0
    reached = 1  # ranks inside one domain of the tiers so far, the rank itself included
    for use in uses:
        within = ceil(num_ranks / use.num_domains)
        latency_s += (within - reached) * use.latency_s
        slope = max(slope, (within - reached) / num_ranks / use.all_to_all_bytes_per_s)
        reached = within
    return latency_s, slope
