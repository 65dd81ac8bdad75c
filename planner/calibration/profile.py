"""Turns what was timed on a machine or cluster into the profile that ``--hardware`` takes."""

from __future__ import annotations

import re
import statistics

from hardware_profiles.catalog import parse_profile
from hardware_profiles.probes.diagnosis import diagnose
from hardware_profiles.probes.measurement import ClusterMeasurement, HostFacts
from hardware_profiles.schema import ClusterProfile, NodeProfile, Quantity, SoftwareProfile
from planner.calibration.device import device_of
from planner.calibration.network import tiers_of
from planner.calibration.provenance import measured

# Where a slowdown was measured, and the nearest profile takes nothing to be hidden.
OVERLAPPABLE = Quantity(
    value=0.9,
    tag="published",
    source="as on GPUs: the last bucket has nothing to hide behind, with ten or more blocks one tenth at most (PyTorch "
    "DDP, Li et al. 2020, section on buckets)",
)


def profile_of(measurement: ClusterMeasurement, nearest: ClusterProfile, name: str | None = None) -> ClusterProfile:
    """The profile that ``measurement`` supports; what it lacks is ``nearest``'s, with the sources given there."""
    device = device_of(measurement, nearest)
    is_single = measurement.num_ranks == 1
    num_hosts = len({host.key for host in measurement.hosts})
    node = measurement.devices_per_node
    tiers = tiers_of(measurement, device.kernel_launch_s.value)
    shape = f"{num_hosts} host{'s' if num_hosts > 1 else ''} with {node} device{'s' if node > 1 else ''}"
    slug = re.sub(r"[^a-z0-9]+", "-", device.name.lower()).strip("-")
    profile = ClusterProfile(
        name=name or f"measured-{slug}-{num_hosts}x{node}",
        description=f"{device.name} on {shape}, measured on {measurement.date} by {measurement.tool}"
        + (f"; network taken over from {nearest.name}" if is_single else ""),
        backend="nccl" if measurement.backend == "nccl" else "gloo",
        device=device,
        node=node_of(measurement, nearest),
        tiers=nearest.tiers if is_single else tiers,
        software=_software(measurement, nearest.software),
        notes=diagnose(measurement, nearest),
    )
    return parse_profile(profile.model_dump_json().encode(), source="the measured profile")


def node_of(measurement: ClusterMeasurement, nearest: ClusterProfile) -> NodeProfile:
    """A node as its processes found it; what they could not measure is ``nearest``'s or unknown."""
    host: HostFacts = measurement.hosts[0]
    storage = measurement.storage
    links = [statistics.median(d.host_link_samples_bytes_per_s) for d in measurement.devices
             if d.host_link_samples_bytes_per_s]  # fmt: skip
    issuing = [statistics.median(d.issuing_samples_s) for d in measurement.devices if d.issuing_samples_s]
    return NodeProfile(
        num_devices=nearest.node.num_devices if measurement.num_ranks == 1 else measurement.devices_per_node,
        cpu_cores=host.cpu_cores,
        num_numa_nodes=host.num_numa_nodes,
        ram_bytes=measured(measurement, host.ram_bytes, "as the kernel states it") if host.ram_bytes else None,
        host_link_bytes_per_s=measured(
            measurement, statistics.median(links), "pinned copies of 256 MiB, the slower direction, all devices at once"
        ) if links else None,
        nvme_bandwidth_bytes_per_s=measured(
            measurement,
            min(map(statistics.median, (storage.write_samples_bytes_per_s, storage.read_samples_bytes_per_s))),
            f"slower of writing and reading a file of 256 MiB in {storage.folder}",
        ) if storage else None,
        nvme_bytes=measured(measurement, storage.free_bytes, f"free space in {storage.folder}") if storage else None,
        host_s_per_kernel=measured(
            measurement, statistics.median(issuing), "small kernels of a training step, one after another"
        ) if issuing else None,
    )  # fmt: skip


def _software(measurement: ClusterMeasurement, nearest: SoftwareProfile) -> SoftwareProfile:
    found: dict[str, Quantity] = {}
    held = [device.context_bytes for device in measurement.devices if device.context_bytes is not None]
    if held:
        what = "memory held before the first tensor"
        found["context_bytes"] = measured(measurement, statistics.median(held), what)
    if measurement.overlap is not None:
        what = "an all-reduce over all ranks beside matrix products that take longer"
        found["overlap_slowdown"] = measured(measurement, measurement.overlap.slowdown, what)
        if nearest.overlappable_fraction.value == 0:
            found["overlappable_fraction"] = OVERLAPPABLE
    return nearest.model_copy(update=found)
