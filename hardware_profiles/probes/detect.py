"""Finds out what this machine has: CPU, memory, GPUs, network, storage and scheduler, each source optional."""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Mapping
from pathlib import Path

import psutil
from pydantic import BaseModel, ConfigDict

from hardware_profiles.catalog import list_profiles
from hardware_profiles.probes.gpus import DetectedGpu, gpus_from_nvml, gpus_from_torch
from hardware_profiles.probes.locality import NumaNode, PcieDevice, numa_nodes, pcie_devices, slow_links
from hardware_profiles.probes.scheduler import (
    KubernetesPod,
    NodeResources,
    SlurmAllocation,
    kubernetes_pod,
    slurm_allocation,
)
from hardware_profiles.probes.sysfs import entries, text
from hardware_profiles.schema import ClusterProfile

_VIRTUAL_INTERFACE = re.compile(r"lo|(docker|veth|br-|cni|cali|flannel|virbr|tun|tap|dummy|tunl|sit|ifb).*")
_VIRTUAL_DISK = re.compile(r"(loop|ram|zram|dm-|md|sr|nbd)\d*")
# Relative differences below which a machine counts as equal to a profile: drivers differ by this much.
_SAME_MEMORY, _SAME_RATE, _SAME_RAM = 0.02, 0.05, 0.1
_SECTOR_BYTES = 512  # /sys/block/*/size counts sectors of 512 bytes whatever the disk's own (Linux, block/genhd.c)


class _Value(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class NetworkInterface(_Value):
    """One network interface of the host that leaves it."""

    name: str
    is_up: bool
    bandwidth_bytes_per_s: float | None  # None: the driver does not say


class InfinibandPort(_Value):
    """One port of an RDMA adapter."""

    adapter: str
    port: int
    is_active: bool
    link_layer: str  # "InfiniBand" or "Ethernet" (RoCE)
    bandwidth_bytes_per_s: float | None


class BlockDevice(_Value):
    """One disk."""

    name: str
    size_bytes: int
    is_rotational: bool
    is_nvme: bool


class DetectedHardware(_Value):
    """What was found on this host; what could not be found stands in ``absent``, in words."""

    cpu_model: str
    num_cpu_cores: int  # logical cores that this process may use
    num_physical_cores: int | None
    ram_bytes: int
    num_numa_nodes: int | None
    gpus: tuple[DetectedGpu, ...]
    network_interfaces: tuple[NetworkInterface, ...]
    infiniband_ports: tuple[InfinibandPort, ...]
    block_devices: tuple[BlockDevice, ...]
    slurm: SlurmAllocation | None
    kubernetes: KubernetesPod | None
    absent: tuple[str, ...]
    numa_nodes: tuple[NumaNode, ...] = ()
    pcie_devices: tuple[PcieDevice, ...] = ()
    warnings: tuple[str, ...] = ()  # what runs below what it could

    def summary(self) -> tuple[tuple[str, str], ...]:
        """What was found, as (what, in words)."""
        rows = [
            ("CPU", f"{self.cpu_model}, {self.num_cpu_cores} cores"),
            ("RAM", f"{self.ram_bytes / 2**30:.1f} GiB"),
        ]
        rows += [
            (f"NUMA node {node.index}", f"CPUs {node.cpus or 'unknown'}, {(node.memory_bytes or 0) / 2**30:.1f} GiB")
            for node in self.numa_nodes
        ]
        rows += [
            (
                f"PCIe {link.kind} {link.address}",
                ("NUMA node unknown" if link.numa_node is None else f"NUMA node {link.numa_node}")
                + (", link unknown" if link.bytes_per_s is None else f", {link.bytes_per_s / 1e9:.3g} GB/s"),
            )
            for link in self.pcie_devices
        ]
        rows += [(f"GPU {gpu.index}", f"{gpu.name}, {gpu.memory_bytes / 2**30:.1f} GiB") for gpu in self.gpus]
        rows += [
            (f"network {link.name}", f"{_rate_text(link.bandwidth_bytes_per_s)}, {'up' if link.is_up else 'down'}")
            for link in self.network_interfaces
        ]
        rows += [
            (
                f"RDMA {port.adapter} port {port.port}",
                f"{port.link_layer}, {_rate_text(port.bandwidth_bytes_per_s)}, "
                f"{'active' if port.is_active else 'not active'}",
            )
            for port in self.infiniband_ports
        ]
        rows += [
            (f"disk {disk.name}", f"{disk.size_bytes / 2**30:.0f} GiB{', NVMe' if disk.is_nvme else ''}")
            for disk in self.block_devices
        ]
        if self.slurm is not None:
            rows.append(("SLURM job", f"{self.slurm.job_id} on {self.slurm.node_list or 'unnamed nodes'}"))
            rows += [(f"SLURM node {node.name}", _resources_text(node)) for node in self.slurm.nodes]
        if self.kubernetes is not None:
            rows.append(("Kubernetes pod", self.kubernetes.pod_name or "unnamed"))
            if self.kubernetes.node is not None:
                rows.append((f"Kubernetes node {self.kubernetes.node.name}", _resources_text(self.kubernetes.node)))
        return tuple(rows)


def detect(sysfs: Path = Path("/sys"), environment: Mapping[str, str] | None = None) -> DetectedHardware:
    """Looks at this machine. Never fails for want of a source; the default arguments are the machine's own."""
    variables = os.environ if environment is None else environment
    absent: list[str] = []
    gpus = _gpus(absent)
    nodes, devices = numa_nodes(sysfs), pcie_devices(sysfs)
    infiniband = _infiniband_ports(sysfs)
    for missing, words in (
        (not nodes, "NUMA: the kernel lists no NUMA nodes"),
        (not infiniband, "InfiniBand: no RDMA adapter in /sys/class/infiniband"),
        (not devices, "PCIe: no GPU, network adapter or NVMe disk on the bus"),
    ):
        if missing:
            absent.append(words)
    slurm, kubernetes = slurm_allocation(variables, absent), kubernetes_pod(variables, absent)
    return DetectedHardware(
        cpu_model=_cpu_model(),
        num_cpu_cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        num_physical_cores=psutil.cpu_count(logical=False),
        ram_bytes=psutil.virtual_memory().total,
        num_numa_nodes=len(nodes) or None,
        gpus=gpus,
        network_interfaces=_network_interfaces(sysfs),
        infiniband_ports=infiniband,
        block_devices=_block_devices(sysfs),
        slurm=slurm,
        kubernetes=kubernetes,
        absent=tuple(absent),
        numa_nodes=nodes,
        pcie_devices=devices,
        warnings=slow_links(devices),
    )


def nearest_profile(detected: DetectedHardware) -> tuple[ClusterProfile, tuple[str, ...]]:
    """The shipped profile most like ``detected``, and in words where the machine differs from it."""
    profiles = {profile.name: profile for profile in list_profiles()}
    if not detected.gpus:
        profile = profiles["cpu-gloo"]
        memory = detected.ram_bytes // profile.node.num_devices
        if abs(memory / profile.device.memory_bytes.value - 1) <= _SAME_MEMORY:
            return profile, ()
        words = (
            f"RAM for each of {profile.node.num_devices} processes: {memory / 2**30:.1f} GiB here, "
            f"{profile.device.memory_bytes.value / 2**30:.1f} GiB in the profile"
        )
        return profile, (words,)
    profile = min(
        (p for p in profiles.values() if p.backend == "nccl"),
        key=lambda p: (_distance(detected, p), p.name),
    )
    return profile, tuple(_differences(detected, profile))


def _distance(detected: DetectedHardware, profile: ClusterProfile) -> tuple[float, ...]:
    """Smaller is nearer: name of the GPU, its memory, GPUs on the host, rate of the network."""
    gpu = detected.gpus[0]
    known = (profile.device.name, *profile.device.detected_names)
    shared = max(len(_words(gpu.name) & _words(name)) / len(_words(gpu.name) | _words(name)) for name in known)
    memory = abs(gpu.memory_bytes / profile.device.memory_bytes.value - 1)
    rate, expected = _network_bytes_per_s(detected), _profile_network_bytes_per_s(profile)
    named = gpu.name in profile.device.detected_names
    return (
        0.0 if named else 1.0 - shared,
        round(memory, 1),
        abs(len(detected.gpus) - profile.node.num_devices),
        abs(rate - expected) / expected if rate and expected else 0.0,
        0.0 if profile.name.startswith("dgx") else 1.0,
    )


def _differences(detected: DetectedHardware, profile: ClusterProfile) -> list[str]:
    gpu, lines = detected.gpus[0], []
    names = sorted({each.name for each in detected.gpus})
    if len(names) > 1:
        lines.append(f"several kinds of GPU: {', '.join(names)}; the profile has one kind")
    if gpu.name not in profile.device.detected_names:
        lines.append(f"GPU: {gpu.name} here, {profile.device.name} in the profile")
    if abs(gpu.memory_bytes / profile.device.memory_bytes.value - 1) > _SAME_MEMORY:
        lines.append(
            f"GPU memory: {gpu.memory_bytes / 2**30:.1f} GiB here, "
            f"{profile.device.memory_bytes.value / 2**30:.1f} GiB in the profile"
        )
    if len(detected.gpus) != profile.node.num_devices:
        lines.append(f"GPUs on the host: {len(detected.gpus)} here, {profile.node.num_devices} in the profile")
    expected, rate = _profile_network_bytes_per_s(profile), _network_bytes_per_s(detected)
    if rate is None:
        lines.append("network: its rate is unknown here")
    elif expected and abs(rate / expected - 1) > _SAME_RATE:
        lines.append(f"network of the host: {_rate_text(rate)} here, {_rate_text(expected)} in the profile")
    ram = profile.node.ram_bytes
    if ram is not None and abs(detected.ram_bytes / ram.value - 1) > _SAME_RAM:
        lines.append(f"RAM: {detected.ram_bytes / 2**30:.0f} GiB here, {ram.value / 2**30:.0f} GiB in the profile")
    return lines


def _profile_network_bytes_per_s(profile: ClusterProfile) -> float | None:
    if len(profile.tiers) < 2:
        return None
    return profile.tiers[-1].bandwidth_bytes_per_s.value * profile.tiers[-1].links_per_node


def _network_bytes_per_s(detected: DetectedHardware) -> float | None:
    """Rate of all RDMA ports that are active, else of all interfaces that are up; None where no driver says."""
    rates = [port.bandwidth_bytes_per_s for port in detected.infiniband_ports if port.is_active]
    rates = rates or [link.bandwidth_bytes_per_s for link in detected.network_interfaces if link.is_up]
    known = [rate for rate in rates if rate]
    return sum(known) if known else None


def _words(name: str) -> frozenset[str]:
    """The words of a GPU's name that tell it from others, its memory ("80gb") among them."""
    return frozenset(re.split(r"[^a-z0-9]+", name.lower())) - {"", "nvidia", "amd", "tesla"}


def _gpus(absent: list[str]) -> tuple[DetectedGpu, ...]:
    """GPUs from NVML, else from torch; adds what each source lacks to ``absent``."""
    found, reason = gpus_from_nvml()
    if not found:
        absent.append(f"NVML: {reason}")
        found, reason = gpus_from_torch()
        if not found:
            absent.append(f"torch: {reason}")
    return found


def _cpu_model() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        for line in cpuinfo.read_text(errors="replace").splitlines():
            key, _, value = line.partition(":")
            if key.strip() in ("model name", "Model", "cpu model") and value.strip():
                return value.strip()
    return platform.processor() or platform.machine()


def _network_interfaces(sysfs: Path) -> tuple[NetworkInterface, ...]:
    found: list[NetworkInterface] = []
    for path in entries(sysfs / "class/net", r".+"):
        if _VIRTUAL_INTERFACE.fullmatch(path.name) or not path.is_dir():
            continue
        megabits = text(path / "speed") or ""
        known = megabits.isdigit() and int(megabits) > 0
        found.append(
            NetworkInterface(
                name=path.name,
                is_up=text(path / "operstate") == "up",
                bandwidth_bytes_per_s=int(megabits) * 1e6 / 8 if known else None,
            )
        )
    return tuple(found)


def _infiniband_ports(sysfs: Path) -> tuple[InfinibandPort, ...]:
    found: list[InfinibandPort] = []
    for adapter in entries(sysfs / "class/infiniband", r".+"):
        for port in entries(adapter / "ports", r"\d+"):
            rate = re.match(r"([\d.]+) Gb/sec", text(port / "rate") or "")
            found.append(
                InfinibandPort(
                    adapter=adapter.name,
                    port=int(port.name),
                    is_active="ACTIVE" in (text(port / "state") or ""),
                    link_layer=text(port / "link_layer") or "unknown",
                    bandwidth_bytes_per_s=float(rate[1]) * 1e9 / 8 if rate else None,
                )
            )
    return tuple(found)


def _block_devices(sysfs: Path) -> tuple[BlockDevice, ...]:
    found: list[BlockDevice] = []
    for disk in entries(sysfs / "block", r".+"):
        sectors = text(disk / "size") or ""
        if _VIRTUAL_DISK.fullmatch(disk.name) or not sectors.isdigit() or sectors == "0":
            continue
        found.append(
            BlockDevice(
                name=disk.name,
                size_bytes=int(sectors) * _SECTOR_BYTES,
                is_rotational=text(disk / "queue/rotational") == "1",
                is_nvme=disk.name.startswith("nvme"),
            )
        )
    return tuple(found)


def _resources_text(node: NodeResources) -> str:
    gpus = "GPUs unknown" if node.num_gpus is None else f"{node.num_gpus} x {node.gpu_type or 'GPU'}"
    memory = "" if node.ram_bytes is None else f", {node.ram_bytes / 2**30:.0f} GiB"
    return f"{gpus}, {node.num_cpu_cores or '?'} cores{memory}"


def _rate_text(bytes_per_s: float | None) -> str:
    return "rate unknown" if bytes_per_s is None else f"{bytes_per_s * 8 / 1e9:g} Gb/s"
