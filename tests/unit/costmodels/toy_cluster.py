"""A small made-up cluster with round numbers, so that expected times can be worked out by hand."""

from hardware_profiles.schema import (
    ClusterProfile,
    ClusterSpec,
    DeviceProfile,
    Efficiency,
    EfficiencyAtScale,
    NetworkTier,
    NodeProfile,
    Quantity,
    SoftwareProfile,
)

DEVICES_PER_NODE = 8
NVLINK = 200e9  # bytes per second and device
NIC = 25e9  # bytes per second and link
PEAK_BF16 = 100e12
BANDWIDTH = 1e12


def quantity(value: float) -> Quantity:
    return Quantity(value=value, tag="datasheet", source="made up for tests")


def make_device(*, peak: float = PEAK_BF16, bandwidth: float = BANDWIDTH, half_size: float = 0.0) -> DeviceProfile:
    half = quantity(half_size) if half_size else None
    return DeviceProfile(
        name="toy",
        vendor="none",
        memory_bytes=quantity(80e9),
        memory_bandwidth_bytes_per_s=quantity(bandwidth),
        peak_flops_per_s={"bf16": quantity(peak), "fp32": quantity(peak / 10)},
        kernel_launch_s=quantity(0.0),
        efficiency={
            "gemm": Efficiency(fraction=quantity(0.5), half_size_flops=half),
            "attention": Efficiency(fraction=quantity(0.25)),
            "memory_bound": Efficiency(fraction=quantity(0.8)),
        },
    )


def make_tiers(
    *, nvlink: float = NVLINK, nic: float = NIC, num_links: int = 8, latency_s: float = 0.0
) -> tuple[NetworkTier, ...]:
    return (
        NetworkTier(
            name="nvlink",
            num_devices=DEVICES_PER_NODE,
            latency_s=quantity(latency_s),
            bandwidth_bytes_per_s=quantity(nvlink),
            links_per_node=DEVICES_PER_NODE,
            efficiency=quantity(1.0),
        ),
        NetworkTier(
            name="nic",
            num_devices=None,
            latency_s=quantity(5 * latency_s),
            bandwidth_bytes_per_s=quantity(nic),
            links_per_node=num_links,
            efficiency=quantity(1.0),
        ),
    )


def make_cluster(num_devices: int, tiers: tuple[NetworkTier, ...] | None = None) -> ClusterSpec:
    profile = ClusterProfile(
        name="toy-cluster",
        description="made up for tests",
        backend="nccl",
        device=make_device(),
        node=NodeProfile(num_devices=DEVICES_PER_NODE),
        tiers=make_tiers() if tiers is None else tiers,
        software=SoftwareProfile(
            name="toy",
            context_bytes=quantity(1e9),
            communicator_bytes=quantity(0.5e9),
            allocator_reserve_fraction=quantity(0.1),
            overlap_slowdown=quantity(0.2),
            overlappable_fraction=quantity(0.75),
        ),
    )
    return ClusterSpec(profile=profile, num_devices=num_devices)


def at_scale(points: dict[int, float]) -> tuple[EfficiencyAtScale, ...]:
    return tuple(EfficiencyAtScale(num_nodes=n, fraction=quantity(f)) for n, f in points.items())
