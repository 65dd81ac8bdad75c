"""What it takes to keep optimiser states or activations off the devices, in host memory or on NVMe.

Optimiser states, which the host updates:

One device of n in a node, k of which share a link to the host (H: the host's memory bandwidth, L: a link's):

    copy rate r   = min(0.75 L / k, 0.455 H / n)
    gradients     = bytes / r, while the backward pass of the last micro-batch makes them (see costmodels.step)
    update        = max(bytes the update reads and writes / (0.455 H / n),  updated parameters / r,
                        states read from and written to NVMe / (its bandwidth / n))

Activations of a block go down beside its forward pass and come back beside its backward pass, one way or the other at
r. Copies are made by engines of their own and take no multiprocessors (NVIDIA, CUDA C++ Programming Guide,
"Asynchronous Concurrent Execution"), but bandwidth of the device's memory: compute beside them takes longer by at most
the share of it that r is.

The update, the way up and NVMe work on different parts of the parameters at once, so the slowest of them counts.

Sources: Ren et al., "ZeRO-Offload" (2021), for what moves and what overlaps: gradients go down during the backward
pass, a tiled update sends up what is done. Its table 4: the CPU updates 4 billion parameters in 1.03 s and 10 billion
in 2.57 s on a DGX-2, at 28 bytes of Adam and 2 of the half-precision copy each 117 GB/s of the 256 of its memory,
which is HOST_EFFICIENCY. So slow an update is bound by memory, and cores come in nowhere else. Rajbhandari et al.,
"ZeRO-Infinity" (2021), for NVMe beside the update, and for 12 of the 16 GB/s of a PCIe 3.0 link that one GPU reaches,
which is LINK_EFFICIENCY; a link that was measured has all that it was measured at, with all devices at work.
"""

from __future__ import annotations

from dataclasses import dataclass

from hardware_profiles.schema import NodeProfile

HOST_EFFICIENCY = 0.455
LINK_EFFICIENCY = 0.75


@dataclass(frozen=True)
class HostWork:
    """What one device asks of its host in a step, in bytes."""

    down_bytes: float  # gradients
    up_bytes: float  # updated parameters
    update_bytes: float  # read and written in host memory by the update
    streamed_bytes: float = 0.0  # read from and written to NVMe


def missing_facts(node: NodeProfile, *, uses_nvme: bool) -> tuple[str, ...]:
    """Names of what a profile must say of its nodes before offloading can be priced, and does not."""
    needed = {
        "host_link_bytes_per_s": node.host_link_bytes_per_s,
        "host_memory_bandwidth_bytes_per_s": node.host_memory_bandwidth_bytes_per_s,
        "ram_bytes": node.ram_bytes,
    }
    if uses_nvme:
        needed |= {"nvme_bandwidth_bytes_per_s": node.nvme_bandwidth_bytes_per_s, "nvme_bytes": node.nvme_bytes}
    return tuple(name for name, quantity in needed.items() if quantity is None)


def download_s(work: HostWork, node: NodeProfile, num_devices: int) -> float:
    """Seconds until the gradients of one of ``num_devices`` devices in use are on the host, nothing hidden."""
    return work.down_bytes / _copy_bytes_per_s(node, num_devices)


def host_update_s(work: HostWork, node: NodeProfile, num_devices: int) -> float:
    """Seconds from the last gradient on the host to the last updated parameter on the device.

    ValueError where the profile does not say enough.
    """
    streams = [
        work.update_bytes / _host_bytes_per_s(node, num_devices),
        work.up_bytes / _copy_bytes_per_s(node, num_devices),
    ]
    if work.streamed_bytes > 0:
        if node.nvme_bandwidth_bytes_per_s is None:
            raise ValueError("the profile does not say node.nvme_bandwidth_bytes_per_s")
        streams.append(work.streamed_bytes / (node.nvme_bandwidth_bytes_per_s.value / num_devices))
    return max(streams)


def copy_s_per_byte(node: NodeProfile, num_devices: int) -> float:
    """Seconds for a byte between one of ``num_devices`` devices in use and the host, one way, while all of them copy.

    ValueError where the profile does not say enough.
    """
    return 1 / _copy_bytes_per_s(node, num_devices)


def _host_bytes_per_s(node: NodeProfile, num_devices: int) -> float:
    """One device's share of the host's memory bandwidth."""
    if node.host_memory_bandwidth_bytes_per_s is None:
        raise ValueError("the profile does not say node.host_memory_bandwidth_bytes_per_s")
    return HOST_EFFICIENCY * node.host_memory_bandwidth_bytes_per_s.value / num_devices


def _copy_bytes_per_s(node: NodeProfile, num_devices: int) -> float:
    """Between one device and the host while all of ``num_devices`` copy."""
    link = node.host_link_bytes_per_s
    if link is None:
        raise ValueError("the profile does not say node.host_link_bytes_per_s")
    rate = link.value
    if link.tag != "measured":
        sharing = 1.0 if node.devices_per_host_link is None else node.devices_per_host_link.value
        rate *= LINK_EFFICIENCY / min(sharing, num_devices)
    return min(rate, _host_bytes_per_s(node, num_devices))
