"""What scontrol and kubectl print is read, and whatever they do detection goes on."""

import json
from pathlib import Path

import pytest

from hardware_profiles.probes.detect import detect
from hardware_profiles.probes.scheduler import kubernetes_pod, node_from_kubectl, node_from_scontrol, slurm_allocation

SCONTROL_LINE = (
    "NodeName=gpu-7 Arch=x86_64 CoresPerSocket=64 CPUAlloc=0 CPUTot=128 Gres=gpu:a100:8(S:0-1) "
    "RealMemory=2063000 Sockets=2 State=IDLE"
)
NODE = {
    "metadata": {
        "name": "worker-7",
        "labels": {
            "nvidia.com/gpu.product": "NVIDIA-H100-80GB-HBM3",
            "node.kubernetes.io/instance-type": "p5.48xlarge",
        },
    },
    "status": {"capacity": {"cpu": "192", "memory": "2097152000Ki", "nvidia.com/gpu": "8"}},
}


def tool(folder: Path, name: str, script: str) -> dict[str, str]:
    """An environment in which ``name`` is a small program of its own."""
    path = folder / name
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return {"PATH": f"{folder}:/usr/bin:/bin", "SLURM_JOB_ID": "17", "SLURM_JOB_NODELIST": "gpu-[7-8]",
            "KUBERNETES_SERVICE_HOST": "10.0.0.1", "NODE_NAME": "worker-7"}  # fmt: skip


def test_nodes_of_a_slurm_job_are_described(tmp_path: Path):
    variables = tool(tmp_path, "scontrol", f'[ "$4" = "gpu-[7-8]" ] && echo "{SCONTROL_LINE}"')
    absent: list[str] = []
    job = slurm_allocation(variables, absent)
    assert job is not None
    assert absent == []
    (node,) = job.nodes
    assert (node.name, node.num_gpus, node.gpu_type) == ("gpu-7", 8, "a100")
    assert (node.num_cpu_cores, node.num_sockets, node.ram_bytes) == (128, 2, 2063000 * 2**20)


@pytest.mark.parametrize(
    ("gres", "expected"),
    [("gpu:8", (8, None)), ("(null)", (0, None)), ("gpu:h100_80:4,nvme:1", (4, "h100_80")), ("", (0, None))],
)
def test_gres_is_read_in_its_forms(gres: str, expected: tuple[int, str | None]):
    node = node_from_scontrol(f"NodeName=a Gres={gres} CPUTot=4")
    assert (node.num_gpus, node.gpu_type) == expected


def test_a_scontrol_that_fails_is_told(tmp_path: Path):
    absent: list[str] = []
    job = slurm_allocation(tool(tmp_path, "scontrol", "echo 'slurm is down' >&2; exit 1"), absent)
    assert job is not None
    assert job.nodes == ()
    assert absent == ["SLURM nodes: scontrol fails: slurm is down"]


def test_the_node_of_a_pod_is_described(tmp_path: Path):
    podinfo = tmp_path / "podinfo"
    podinfo.mkdir()
    (podinfo / "labels").write_text('app="train"\n')
    (tmp_path / "node.json").write_text(json.dumps(NODE))
    absent: list[str] = []
    pod = kubernetes_pod(tool(tmp_path, "kubectl", f"cat {tmp_path}/node.json"), absent, podinfo)
    assert pod is not None
    assert pod.node is not None
    assert absent == []
    assert pod.podinfo == {"labels": 'app="train"'}
    assert (pod.node.num_gpus, pod.node.gpu_type, pod.node.num_cpu_cores) == (8, "NVIDIA-H100-80GB-HBM3", 192)
    assert (pod.node.ram_bytes, pod.node.instance_type) == (2097152000 * 1024, "p5.48xlarge")


@pytest.mark.parametrize("text", ["", "null", "[]", "{}", '{"status": {}, "metadata": {}}', "not json"])
def test_what_is_no_node_is_none(text: str):
    assert node_from_kubectl(text) is None


def test_links_and_numa_nodes_are_read_from_sysfs(tmp_path: Path):
    def write(path: str, text: str) -> None:
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text + "\n")

    write("devices/system/node/node1/cpulist", "64-127")
    write("devices/system/node/node1/meminfo", "Node 1 MemTotal:  1048576 kB")
    gpu = "bus/pci/devices/0000:17:00.0"
    texts = {"class": "0x030200", "numa_node": "1", "current_link_width": "16", "max_link_width": "16",
             "current_link_speed": "16.0 GT/s PCIe", "max_link_speed": "32.0 GT/s PCIe"}  # fmt: skip
    for name, text in texts.items():
        write(f"{gpu}/{name}", text)
    write("bus/pci/devices/0000:00:01.0/class", "0x060000")  # a bridge
    found = detect(sysfs=tmp_path, environment={})
    assert [(node.index, node.cpus, node.memory_bytes) for node in found.numa_nodes] == [(1, "64-127", 2**30)]
    (device,) = found.pcie_devices
    assert (device.kind, device.numa_node) == ("gpu", 1)
    assert device.bytes_per_s == pytest.approx(31.5e9, rel=0.01)
    assert device.largest_bytes_per_s == pytest.approx(63e9, rel=0.01)
    assert "0000:17:00.0 runs at 31.5 of 63 GB/s" in found.warnings[0]
