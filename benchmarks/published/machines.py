"""The cluster of a published run: a shipped profile, with the nodes and the network that the row names."""

from __future__ import annotations

from benchmarks.published.runs import Hardware, Run, UnpriceableRunError
from hardware_profiles.catalog import load_profile
from hardware_profiles.schema import ClusterProfile, ClusterSpec, NetworkTier, NodeProfile, Quantity

# GPU name of a row, by its first letters, to the profile of a machine that holds such GPUs; the first match counts.
PROFILE_OF_GPU = (
    ("A100-80GB-PCIE", "a100-pcie-80gb-x8"),
    ("A100-40GB-PCIE", "a100-pcie-40gb-x8"),
    ("A100-80GB", "dgx-a100-80gb"),
    ("A800", "dgx-a100-80gb"),
    ("A100-40GB", "dgx-a100-40gb"),
    ("A100", "dgx-a100-80gb"),
    ("V100-32GB-SXM3", "dgx-2-v100-32gb"),
    ("V100-32GB", "dgx-1-v100-32gb"),
    ("V100-16GB", "dgx-1-v100-16gb"),
    ("V100", "dgx-1-v100-32gb"),
    ("H100-96GB", "dgx-h100-80gb"),
    ("H100-NVL", "h100-nvl-x8"),
    ("H100-PCIE", "h100-pcie-x8"),
    ("H100", "dgx-h100-80gb"),
    ("H800", "h800-sxm"),
    ("H200", "dgx-h200"),
    ("GB200", "gb200-nvl72"),
    ("B200", "dgx-b200"),
    ("MI300X", "mi300x-x8"),
    ("MI250X", "mi250x-x8"),
)
# Clusters whose collectives were measured beside the runs, by a word of the row's text.
MEASURED_CLUSTERS = (("nanotron", "H100", "h100-nanotron-sweep"),)


def cluster_of(run: Run) -> ClusterSpec:
    """The machine of ``run``; UnpriceableRunError where no profile is known for its GPU."""
    hardware = run.hardware
    measured = next(
        (name for word, gpu, name in MEASURED_CLUSTERS if word in run.text.lower() and gpu in hardware.gpu_type), None
    )
    profile = load_profile(measured or profile_name(hardware))
    if measured is None:
        profile = _with_network(profile, hardware)
    return ClusterSpec(profile=profile, num_devices=hardware.num_devices)


def profile_name(hardware: Hardware) -> str:
    """The shipped profile that holds such GPUs."""
    gpu = hardware.gpu_type.upper()
    name = next((profile for start, profile in PROFILE_OF_GPU if gpu.startswith(start)), None)
    if name is None:
        raise UnpriceableRunError(f"no hardware profile for {hardware.gpu_type}")
    return name


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
    return tier.model_copy(update={"num_devices": per_node, "links_per_node": per_node})
