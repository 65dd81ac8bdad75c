"""What this host says about itself and its way to others: name, network interface, limits on it, RDMA."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
from collections.abc import Mapping
from pathlib import Path

import psutil

from hardware_profiles.probes.detect import DetectedHardware
from hardware_profiles.probes.measurement import HostFacts, RdmaPort

_TOOL_TIMEOUT_S = 5.0


def host_facts(
    detected: DetectedHardware, proc: Path = Path("/proc"), environment: Mapping[str, str] | None = None
) -> HostFacts:
    """The facts of this host; what cannot be read is None. The default arguments are the machine's own."""
    variables = os.environ if environment is None else environment
    interface = _interface(proc, variables)
    active = [port for port in detected.infiniband_ports if port.is_active]
    return HostFacts(
        label=_label(proc, interface),
        key=_key(proc),
        interface=interface,
        nic_bytes_per_s=_nic_bytes_per_s(interface),
        shaper_bytes_per_s=_shaper_bytes_per_s(interface),
        rdma_ports=tuple(RdmaPort(name=p.adapter, bytes_per_s=p.bandwidth_bytes_per_s) for p in active),
        settings={k: v for k, v in sorted(variables.items()) if k.startswith(("NCCL_", "GLOO_", "RCCL_"))},
        cpu_cores=detected.num_cpu_cores,
        ram_bytes=detected.ram_bytes,
        num_numa_nodes=detected.num_numa_nodes,
    )


def shaper_rate_bytes_per_s(qdiscs: object) -> float | None:
    """The lowest rate in what ``tc -json qdisc show`` lists, None where nothing limits the interface."""
    rates: list[float] = []
    for qdisc in qdiscs if isinstance(qdiscs, list) else []:
        options = qdisc.get("options") if isinstance(qdisc, dict) else None
        rate = options.get("rate") if isinstance(options, dict) else None
        if isinstance(rate, int | float) and rate > 0:
            rates.append(float(rate))
    return min(rates, default=None)


def _key(proc: Path) -> str:
    """Kernel and network namespace: a boot has an id of its own, and so has each network on it."""
    try:
        boot = (proc / "sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        boot = socket.gethostname()
    try:
        network = str((proc / "self/ns/net").stat().st_ino)
    except OSError:
        network = ""
    return f"{boot}/{network}"


def _label(proc: Path, interface: str | None) -> str:
    """Name of the network namespace where it has one, else of the host, with its address."""
    name = socket.gethostname()
    try:
        own = (proc / "self/ns/net").stat()
        for path in sorted(Path("/run/netns").iterdir()):
            status = path.stat()
            if (status.st_dev, status.st_ino) == (own.st_dev, own.st_ino):
                name = path.name
    except OSError:
        pass
    addresses = psutil.net_if_addrs().get(interface or "", [])
    address = next((a.address for a in addresses if a.family == socket.AF_INET), None)
    return f"{name} ({address})" if address else name


def _interface(proc: Path, variables: Mapping[str, str]) -> str | None:
    """The interface that collectives are told to use, else that of the default route, else the first that is up."""
    present = psutil.net_if_stats()
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        for name in variables.get(variable, "").lstrip("=").split(","):
            if name in present:
                return name
    try:
        for line in (proc / "net/route").read_text().splitlines()[1:]:
            fields = line.split()
            if len(fields) > 1 and fields[1] == "00000000" and fields[0] in present:
                return fields[0]
    except OSError:
        pass
    return next((name for name, state in sorted(present.items()) if state.isup and name != "lo"), None)


def _nic_bytes_per_s(interface: str | None) -> float | None:
    state = psutil.net_if_stats().get(interface or "")
    return state.speed * 1e6 / 8 if state is not None and state.speed > 0 else None


def _shaper_bytes_per_s(interface: str | None) -> float | None:
    tool = shutil.which("tc")
    if tool is None or interface is None:
        return None
    try:
        done = subprocess.run([tool, "-json", "qdisc", "show", "dev", interface],
                              capture_output=True, text=True, check=False, timeout=_TOOL_TIMEOUT_S)  # fmt: skip
        return shaper_rate_bytes_per_s(json.loads(done.stdout or "[]"))
    except (OSError, ValueError, subprocess.TimeoutExpired):
        return None
