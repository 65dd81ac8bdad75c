"""A cluster with more, or less, of something than its profile says: everything else stays as it is."""

from __future__ import annotations

from typing import NamedTuple

from hardware_profiles.schema import ClusterProfile, ClusterSpec, NetworkTier, Quantity


class Change(NamedTuple):
    """So many times as much of each. The time to start a kernel and the host's own time stay."""

    arithmetic: float = 1.0  # FLOP/s of every class of operators and dtype
    memory_bandwidth: float = 1.0  # of a device
    memory: float = 1.0  # of a device
    network_inside: float = 1.0  # bandwidth inside a node
    network_between: float = 1.0  # bandwidth between nodes


def changed(cluster: ClusterSpec, change: Change) -> ClusterSpec:
    """``cluster`` so changed; where devices differ, every group of them and the links between groups."""
    update: dict[str, object] = {"profile": _profile(cluster.profile, change)}
    mixed = cluster.mixed
    if mixed is not None:
        groups = (each.model_copy(update={"cluster": changed(each.cluster, change)}) for each in mixed.groups)
        links = (
            each.model_copy(
                update={"bandwidth_bytes_per_s": _times(each.bandwidth_bytes_per_s, change.network_between)}
            )
            for each in mixed.links
        )
        update["mixed"] = mixed.model_copy(update={"groups": tuple(groups), "links": tuple(links)})
    return cluster.model_copy(update=update)


def _profile(profile: ClusterProfile, change: Change) -> ClusterProfile:
    device = profile.device
    peaks = {name: _times(peak, change.arithmetic) for name, peak in device.peak_flops_per_s.items()}
    faster = device.model_copy(
        update={
            "memory_bytes": _times(device.memory_bytes, change.memory),
            "memory_bandwidth_bytes_per_s": _times(device.memory_bandwidth_bytes_per_s, change.memory_bandwidth),
            "peak_flops_per_s": peaks,
        }
    )
    tiers = tuple(_tier(tier, profile.node.num_devices, change) for tier in profile.tiers)
    return profile.model_copy(update={"device": faster, "tiers": tiers})


def _tier(tier: NetworkTier, devices_per_node: int, change: Change) -> NetworkTier:
    is_inside = tier.num_devices is not None and tier.num_devices <= devices_per_node
    factor = change.network_inside if is_inside else change.network_between
    return tier.model_copy(update={"bandwidth_bytes_per_s": _times(tier.bandwidth_bytes_per_s, factor)})


def _times(quantity: Quantity, factor: float) -> Quantity:
    return quantity.model_copy(update={"value": quantity.value * factor})
