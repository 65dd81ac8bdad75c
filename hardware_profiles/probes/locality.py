"""Which NUMA node and PCIe link each part of this host hangs on, from sysfs."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict

from hardware_profiles.probes.sysfs import entries, text

# PCI class codes (PCI Code and ID Assignment Specification): 03 display, 12 accelerators, 02 network, 0108 NVMe.
PcieKind = Literal["gpu", "network", "nvme"]
_KINDS: dict[str, PcieKind] = {
    "0x03": "gpu",
    "0x12": "gpu",
    "0x02": "network",
    "0x0108": "nvme",
}
# Payload share of the line rate: 8b/10b coding up to 5 GT/s, 128b/130b above, flits of PCIe 6 (PCI-SIG specifications).
_CODING = ((5.0, 8 / 10), (32.0, 128 / 130), (64.0, 242 / 256))


class _Value(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class NumaNode(_Value):
    """One NUMA node: its cores and memory."""

    index: int
    cpus: str  # as the kernel lists them: "0-31,64-95"
    memory_bytes: int | None


class PcieDevice(_Value):
    """One GPU, network adapter or NVMe disk on the PCIe bus."""

    address: str
    kind: PcieKind
    numa_node: int | None  # None: the firmware does not say
    bytes_per_s: float | None  # of the link as it runs, per direction
    largest_bytes_per_s: float | None  # of the link as both ends could run it


def numa_nodes(sysfs: Path) -> tuple[NumaNode, ...]:
    """The NUMA nodes that the kernel lists."""
    found: list[NumaNode] = []
    for folder in entries(sysfs / "devices/system/node", r"node\d+"):
        total = re.search(r"MemTotal:\s*(\d+) kB", text(folder / "meminfo") or "")
        found.append(
            NumaNode(
                index=int(folder.name.removeprefix("node")),
                cpus=text(folder / "cpulist") or "",
                memory_bytes=int(total[1]) * 1024 if total else None,
            )
        )
    return tuple(sorted(found, key=lambda node: node.index))


def pcie_devices(sysfs: Path) -> tuple[PcieDevice, ...]:
    """GPUs, network adapters and NVMe disks with their links; virtual devices state no link."""
    found: list[PcieDevice] = []
    for folder in entries(sysfs / "bus/pci/devices", r"[0-9a-fA-F:.]+"):
        code = text(folder / "class") or ""
        kind: PcieKind | None = next((kind for prefix, kind in _KINDS.items() if code.startswith(prefix)), None)
        if kind is None:
            continue
        node = text(folder / "numa_node") or ""
        found.append(
            PcieDevice(
                address=folder.name,
                kind=kind,
                numa_node=int(node) if node.isdigit() else None,
                bytes_per_s=_link(folder, "current"),
                largest_bytes_per_s=_link(folder, "max"),
            )
        )
    return tuple(found)


def slow_links(devices: tuple[PcieDevice, ...]) -> tuple[str, ...]:
    """Links that run below what both ends can, in words. GPUs at rest lower the speed, not the width, of theirs."""
    return tuple(
        f"PCIe link of {device.kind} {device.address} runs at {device.bytes_per_s / 1e9:.3g} of "
        f"{device.largest_bytes_per_s / 1e9:.3g} GB/s: reseat it, or look at the slot (a GPU at rest saves power)"
        for device in devices
        if device.bytes_per_s and device.largest_bytes_per_s and device.bytes_per_s < 0.9 * device.largest_bytes_per_s
    )


def _link(folder: Path, which: str) -> float | None:
    """Bytes per second of ``current_link_speed`` ("16.0 GT/s PCIe") times ``current_link_width`` ("16")."""
    speed = re.match(r"([\d.]+) GT/s", text(folder / f"{which}_link_speed") or "")
    width = text(folder / f"{which}_link_width") or ""
    if speed is None or not width.isdigit() or width == "0":
        return None
    rate = float(speed[1])
    coding = next((share for limit, share in _CODING if rate <= limit), _CODING[-1][1])
    return rate * 1e9 * int(width) * coding / 8
