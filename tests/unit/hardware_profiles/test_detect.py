"""Detection reads what a machine states about itself, says what is absent, and finds the nearest profile."""

import os
from pathlib import Path

import psutil
import pytest

from hardware_profiles.catalog import list_profiles
from hardware_profiles.probes.detect import DetectedHardware, InfinibandPort, detect, nearest_profile
from hardware_profiles.probes.gpus import DetectedGpu


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text + "\n")


@pytest.fixture
def sysfs(tmp_path: Path) -> Path:
    """The part of /sys of a host with two NUMA nodes, an RDMA adapter, an Ethernet port and two disks."""
    for node in ("node0", "node1"):
        (tmp_path / "devices/system/node" / node).mkdir(parents=True)
    _write(tmp_path / "class/net/eth0/speed", "100000")
    _write(tmp_path / "class/net/eth0/operstate", "up")
    _write(tmp_path / "class/net/eth1/speed", "-1")
    _write(tmp_path / "class/net/eth1/operstate", "down")
    _write(tmp_path / "class/net/lo/operstate", "unknown")
    _write(tmp_path / "class/infiniband/mlx5_0/ports/1/rate", "400 Gb/sec (4X NDR)")
    _write(tmp_path / "class/infiniband/mlx5_0/ports/1/state", "4: ACTIVE")
    _write(tmp_path / "class/infiniband/mlx5_0/ports/1/link_layer", "InfiniBand")
    _write(tmp_path / "block/nvme0n1/size", "7501476528")
    _write(tmp_path / "block/nvme0n1/queue/rotational", "0")
    _write(tmp_path / "block/sda/size", "1953525168")
    _write(tmp_path / "block/sda/queue/rotational", "1")
    _write(tmp_path / "block/loop0/size", "8")
    return tmp_path


def test_this_machine_is_described_without_a_failure():
    found = detect()
    assert found.ram_bytes == psutil.virtual_memory().total
    assert found.num_cpu_cores == len(os.sched_getaffinity(0))
    assert found.cpu_model
    profile, _ = nearest_profile(found)
    assert profile in list_profiles()
    assert any(what == "CPU" for what, _ in found.summary())


def test_what_a_machine_lacks_is_said_in_words(tmp_path: Path):
    found = detect(sysfs=tmp_path / "nothing", environment={})
    said = {line.split(":")[0] for line in found.absent}
    assert {"NUMA", "InfiniBand", "SLURM", "Kubernetes"} <= said
    assert found.network_interfaces == found.infiniband_ports == found.block_devices == ()
    assert found.num_numa_nodes is None


def test_sysfs_is_read_in_base_units(sysfs: Path):
    found = detect(sysfs=sysfs, environment={})
    assert found.num_numa_nodes == 2
    assert [(link.name, link.is_up, link.bandwidth_bytes_per_s) for link in found.network_interfaces] == [
        ("eth0", True, 12.5e9),
        ("eth1", False, None),
    ]
    assert found.infiniband_ports == (
        InfinibandPort(adapter="mlx5_0", port=1, is_active=True, link_layer="InfiniBand", bandwidth_bytes_per_s=50e9),
    )
    assert [(disk.name, disk.size_bytes, disk.is_rotational, disk.is_nvme) for disk in found.block_devices] == [
        ("nvme0n1", 7501476528 * 512, False, True),
        ("sda", 1953525168 * 512, True, False),
    ]
    assert not any(line.startswith(("NUMA", "InfiniBand")) for line in found.absent)


def test_the_scheduler_is_read_from_the_environment(tmp_path: Path):
    found = detect(
        sysfs=tmp_path,
        environment={
            "SLURM_JOB_ID": "17",
            "SLURM_JOB_NUM_NODES": "4",
            "SLURM_NTASKS": "32",
            "SLURM_JOB_NODELIST": "node[1-4]",
            "KUBERNETES_SERVICE_HOST": "10.0.0.1",
            "POD_NAME": "worker-0",
        },
    )
    assert found.slurm is not None
    assert (found.slurm.job_id, found.slurm.num_nodes, found.slurm.num_tasks) == ("17", 4, 32)
    assert found.kubernetes is not None
    assert found.kubernetes.pod_name == "worker-0"
    assert not any(line.startswith(("SLURM:", "Kubernetes:")) for line in found.absent)
    assert "SLURM nodes: scontrol is not on the PATH" in found.absent
    assert any(line.startswith("Kubernetes node: NODE_NAME") for line in found.absent)


def _host(name: str, memory_gib: float, count: int, port_gbit: float = 0.0, ram_gib: float = 2000) -> DetectedHardware:
    gpus = tuple(
        DetectedGpu(
            index=index,
            name=name,
            memory_bytes=int(memory_gib * 2**30),
            sm_count=None,
            driver=None,
            known_from="nvml",
        )
        for index in range(count)
    )
    ports = tuple(
        InfinibandPort(
            adapter=f"mlx5_{index}",
            port=1,
            is_active=True,
            link_layer="InfiniBand",
            bandwidth_bytes_per_s=port_gbit * 1e9 / 8,
        )
        for index in range(count if port_gbit else 0)
    )
    return DetectedHardware(
        cpu_model="any",
        num_cpu_cores=64,
        num_physical_cores=64,
        ram_bytes=int(ram_gib * 2**30),
        num_numa_nodes=2,
        gpus=gpus,
        network_interfaces=(),
        infiniband_ports=ports,
        block_devices=(),
        slurm=None,
        kubernetes=None,
        absent=(),
    )


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        (_host("NVIDIA H100 80GB HBM3", 79.6, 8, 400), "dgx-h100-80gb"),
        (_host("NVIDIA H100 80GB HBM3", 79.6, 8, 200), "gcp-a3-mega"),
        (_host("NVIDIA A100-SXM4-80GB", 80.0, 8, 200), "dgx-a100-80gb"),
        (_host("NVIDIA A100-SXM4-40GB", 40.0, 8, 200), "dgx-a100-40gb"),
        (_host("NVIDIA A100-SXM4-80GB", 80.0, 8, 12.5), "gcp-a2-ultragpu-8g"),
        (_host("NVIDIA H200", 140.4, 1), "dgx-h200"),
        (_host("NVIDIA B200", 179.0, 8, 400), "dgx-b200"),
        (_host("Tesla V100-SXM2-32GB", 32.0, 8, 50), "dgx-1-v100-32gb"),
        (_host("Tesla V100-SXM2-16GB", 16.0, 8), "dgx-1-v100-16gb"),
        (_host("NVIDIA A100 80GB PCIe", 80.0, 4), "a100-pcie-80gb-x8"),
        (_host("NVIDIA GeForce RTX 4090", 23.6, 2), "rtx-4090-x8"),
        (_host("AMD Instinct MI300X", 191.7, 8), "mi300x-x8"),
        (_host("NVIDIA A100-PG509-200", 40.0, 8, 200), "dgx-a100-40gb"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_a_host_finds_its_profile(host: DetectedHardware, expected: str):
    assert nearest_profile(host)[0].name == expected


def test_the_differences_are_said():
    _, differences = nearest_profile(_host("NVIDIA H200", 120.0, 1, ram_gib=128))
    text = " / ".join(differences)
    assert "GPUs on the host: 1 here, 8 in the profile" in text
    assert "GPU memory: 120.0 GiB here" in text
    assert "RAM: 128 GiB here" in text
    assert "network: its rate is unknown here" in text


def test_a_host_equal_to_its_profile_differs_in_nothing():
    assert nearest_profile(_host("NVIDIA H100 80GB HBM3", 79.2, 8, 400, ram_gib=2e12 / 2**30))[1] == ()
