"""The cluster of a published run: a shipped profile, with the nodes and the network that the row names."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

from hardware_profiles.catalog import list_profiles, load_profile
from hardware_profiles.schema import ClusterProfile, ClusterSpec, GroupShare, NetworkTier, NodeProfile, Quantity
from planner.formats.run_table import GIB, Hardware, Run, UnpriceableRunError

# Words of a GPU's name, and the profile of a machine that holds such GPUs; the first entry with all of them counts.
PROFILE_OF_GPU = (
    (("A100", "PCIE"), "a100-pcie-80gb-x8"),
    (("A100",), "dgx-a100-80gb"),
    (("A800",), "a800-sxm"),
    (("V100", "SXM3"), "dgx-2-v100-32gb"),
    (("V100",), "dgx-1-v100-32gb"),
    (("H100", "HBM2E"), "h100-hbm2e-96gb-x8"),
    (("H100", "NVL"), "h100-nvl-x8"),
    (("H100", "PCIE"), "h100-pcie-x8"),
    (("H100",), "dgx-h100-80gb"),
    (("H800",), "h800-sxm"),
    (("H200",), "dgx-h200"),
    (("GH200",), "dgx-h100-80gb"),  # the same GPU with more memory
    (("GB200",), "gb200-nvl72"),
    (("GB300",), "gb300-nvl72"),
    (("B300",), "dgx-b300"),
    (("B200",), "dgx-b200"),
)
# The same machine with GPUs of half the memory.
HALF_THE_MEMORY = {
    "a100-pcie-80gb-x8": "a100-pcie-40gb-x8",
    "dgx-a100-80gb": "dgx-a100-40gb",
    "dgx-1-v100-32gb": "dgx-1-v100-16gb",
}
# A GPU with less than this share of a profile's memory is the one with half of it.
SMALLER_SHARE = 0.75
# What a driver leaves usable: 79.18 GiB of an H100's 80, 178.35 of a B200's 180, as their profiles say.
USABLE_SHARE = 0.99
# Clusters of which more is known than their machines, by the name that the table gives them. Of the nanotron sweep's
# rows that do not say their year, none has a pipeline: they are like those of 2024.
STUDY_PROFILES = Path(__file__).resolve().parents[1] / "data" / "profiles"
KNOWN_CLUSTERS = {
    "huggingface-h100": "h100-nanotron-sweep-early",
    "huggingface-h100-2024": "h100-nanotron-sweep-early",
    "huggingface-h100-2025": "h100-nanotron-sweep",
    "aleph-alpha-dgx-a100": "a100-layout-study",
}


def cluster_of(run: Run) -> ClusterSpec:
    """The machine of ``run``; UnpriceableRunError where no profile is known for its GPU."""
    hardware = run.hardware
    known = KNOWN_CLUSTERS.get(run.software.cluster)
    profile = load_profile(profile_name(hardware)) if known is None else study_profile(known)
    profile = _with_memory(profile, hardware)
    if known is None:
        profile = _with_network(profile, hardware)
    return ClusterSpec(profile=profile, num_devices=hardware.num_devices)


@cache
def study_profile(name: str) -> ClusterProfile:
    """The cluster of a single study."""
    return load_profile(str(STUDY_PROFILES / f"{name}.json"))


def profile_name(hardware: Hardware) -> str:
    """The shipped profile that holds such GPUs; of two that differ in memory, the one with the row's memory."""
    words = re.split(r"[^A-Z0-9.]+", hardware.gpu_type.upper())
    known = (name for needed, name in PROFILE_OF_GPU if all(any(w.startswith(n) for w in words) for n in needed))
    named = next(known, None) or next((p.name for p in list_profiles() if _is_of(words, p.device.name.upper())), None)
    if named is None:
        raise UnpriceableRunError(f"no hardware profile for {hardware.gpu_type}")
    memory_gb = hardware.memory_gb
    if memory_gb is not None and memory_gb < SMALLER_SHARE * load_profile(named).device.memory_bytes.value / GIB:
        return HALF_THE_MEMORY.get(named, named)
    return named


def _is_of(words: list[str], device: str) -> bool:
    """Whether every word of a GPU's name that has a digit and is no amount of memory stands in ``device``'s."""
    telling = [word for word in words if re.search(r"\d", word) and not re.fullmatch(r"\d+GB", word)]
    return bool(telling) and set(telling) <= set(device.split("-"))


def _with_memory(profile: ClusterProfile, hardware: Hardware) -> ClusterProfile:
    """``profile`` with the row's memory where that is another than its own by more than a tenth."""
    own = profile.device.memory_bytes
    stated = None if hardware.memory_gb is None else hardware.memory_gb * USABLE_SHARE * GIB
    if stated is None or abs(stated / own.value - 1) < 0.1:
        return profile
    memory = Quantity(value=stated, tag="published", source="memory that the row names")
    return profile.model_copy(update={"device": profile.device.model_copy(update={"memory_bytes": memory})})


def _with_network(profile: ClusterProfile, hardware: Hardware) -> ClusterProfile:
    """``profile`` with the row's devices per node, and its rate between nodes on every tier outside the node."""
    per_node = hardware.devices_per_node
    node = NodeProfile.model_copy(profile.node, update={"num_devices": per_node})
    tiers = [_inside(profile.tiers[0], per_node)]
    for tier in profile.tiers[1:]:
        links = min(per_node, tier.links_per_node)
        update: dict[str, object] = {"links_per_node": links}
        if hardware.inter_node_bits_per_s is not None:
            update["bandwidth_bytes_per_s"] = Quantity(
                value=hardware.inter_node_bits_per_s / 8 * per_node / links,
                tag="published",
                source="rate between nodes that the row names",
            )
        tiers.append(tier.model_copy(update=update))
    return profile.model_copy(update={"node": node, "tiers": tuple(tiers)})


def _inside(tier: NetworkTier, per_node: int) -> NetworkTier:
    if tier.num_devices is None or tier.num_devices == per_node:
        return tier
    update: dict[str, object] = {"num_devices": per_node, "links_per_node": per_node}
    if tier.share_of_groups:
        update["share_of_groups"] = _shares_of_joined(per_node)
    return tier.model_copy(update=update)


def _shares_of_joined(num_devices: int) -> tuple[GroupShare, ...]:
    """Of a smaller node without a switch, whose devices have as many links to each of the others."""
    source = f"each of {num_devices} devices has as many links to each of the others: nodes of 4 V100 have 2"
    return tuple(
        GroupShare(num_ranks=n, fraction=Quantity(value=(n - 1) / (num_devices - 1), tag="specified", source=source))
        for n in range(2, num_devices)
    )
