"""What the scheduler that started this process says: SLURM's environment and scontrol, Kubernetes and kubectl."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from pydantic import BaseModel, ConfigDict

_TOOL_TIMEOUT_S = 10.0
PODINFO = Path("/etc/podinfo")  # where Kubernetes' own examples mount a downward API volume
_UNITS = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "m": 1e-3,
          "Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}  # fmt: skip


class _Value(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class NodeResources(_Value):
    """What one node of the cluster offers, as the scheduler counts it."""

    name: str
    num_gpus: int | None
    gpu_type: str | None
    num_cpu_cores: int | None
    ram_bytes: int | None
    num_sockets: int | None = None
    instance_type: str | None = None  # as a cloud names it


class SlurmAllocation(_Value):
    """The job this process belongs to, as SLURM's environment tells it."""

    job_id: str
    num_nodes: int | None
    num_tasks: int | None
    gpus_per_node: str | None
    node_list: str | None
    partition: str | None
    nodes: tuple[NodeResources, ...] = ()  # from scontrol


class KubernetesPod(_Value):
    """The pod this process belongs to, as its environment and the downward API tell it."""

    pod_name: str | None
    namespace: str | None
    node_name: str | None
    podinfo: dict[str, str] = {}  # one-line files of the downward API volume
    node: NodeResources | None = None  # from kubectl


def slurm_allocation(variables: Mapping[str, str], absent: list[str]) -> SlurmAllocation | None:
    """The SLURM job, with its nodes where ``scontrol`` answers; adds to ``absent`` what is not there."""
    if not variables.get("SLURM_JOB_ID"):
        absent.append("SLURM: no job (SLURM_JOB_ID is not set)")
        return None
    node_list = variables.get("SLURM_JOB_NODELIST")
    nodes: tuple[NodeResources, ...] = ()
    if node_list:
        text, reason = _output(["scontrol", "show", "node", "--oneliner", node_list], variables)
        nodes = tuple(node_from_scontrol(line) for line in text.splitlines() if line.startswith("NodeName="))
        if not nodes:
            absent.append(f"SLURM nodes: {reason or 'scontrol lists none'}")
    return SlurmAllocation(
        job_id=variables["SLURM_JOB_ID"],
        num_nodes=_count(variables.get("SLURM_JOB_NUM_NODES") or variables.get("SLURM_NNODES")),
        num_tasks=_count(variables.get("SLURM_NTASKS")),
        gpus_per_node=variables.get("SLURM_GPUS_PER_NODE") or variables.get("SLURM_GPUS_ON_NODE"),
        node_list=node_list,
        partition=variables.get("SLURM_JOB_PARTITION"),
        nodes=nodes,
    )


def kubernetes_pod(variables: Mapping[str, str], absent: list[str], podinfo: Path = PODINFO) -> KubernetesPod | None:
    """The pod, with its node where ``kubectl`` answers; adds to ``absent`` what is not there.

    POD_NAME, POD_NAMESPACE and NODE_NAME are the usual names given to the downward API.
    """
    if not variables.get("KUBERNETES_SERVICE_HOST"):
        absent.append("Kubernetes: no pod (KUBERNETES_SERVICE_HOST is not set)")
        return None
    node_name = variables.get("NODE_NAME")
    node: NodeResources | None = None
    if node_name is None:
        absent.append("Kubernetes node: NODE_NAME is not set (downward API, spec.nodeName)")
    else:
        text, reason = _output(["kubectl", "get", "node", node_name, "--output", "json"], variables)
        node = node_from_kubectl(text) if text else None
        if node is None:
            absent.append(f"Kubernetes node: {reason or 'kubectl does not answer as expected'}")
    return KubernetesPod(
        pod_name=variables.get("POD_NAME") or variables.get("HOSTNAME"),
        namespace=variables.get("POD_NAMESPACE"),
        node_name=node_name,
        podinfo=_podinfo(podinfo),
        node=node,
    )


def node_from_scontrol(line: str) -> NodeResources:
    """One line of ``scontrol show node --oneliner``: ``Gres=gpu:a100:8(S:0-1) CPUTot=128 RealMemory=2063000`` (MiB)."""
    fields = dict(re.findall(r"(\w+)=(\S*)", line))
    gpu = re.search(r"\bgpu:(?:([A-Za-z][\w.-]*):)?(\d+)", fields.get("Gres", ""))
    memory = _count(fields.get("RealMemory"))
    return NodeResources(
        name=fields.get("NodeName", ""),
        num_gpus=int(gpu[2]) if gpu else 0,
        gpu_type=gpu[1] if gpu else None,
        num_cpu_cores=_count(fields.get("CPUTot")),
        ram_bytes=memory * 2**20 if memory is not None else None,
        num_sockets=_count(fields.get("Sockets")),
    )


def node_from_kubectl(text: str) -> NodeResources | None:
    """What ``kubectl get node NAME --output json`` prints; None where it is something else."""
    try:
        document = json.loads(text)
        capacity: dict[str, str] = document["status"]["capacity"]
        metadata = document["metadata"]
        labels: dict[str, str] = metadata.get("labels", {})
        gpus = [amount for name, amount in capacity.items() if name.endswith("/gpu")]
        return NodeResources(
            name=metadata["name"],
            num_gpus=sum(int(amount) for amount in gpus),
            gpu_type=labels.get("nvidia.com/gpu.product"),
            num_cpu_cores=_amount(capacity.get("cpu")),
            ram_bytes=_amount(capacity.get("memory")),
            instance_type=labels.get("node.kubernetes.io/instance-type"),
        )
    except (ValueError, KeyError, TypeError, AttributeError):
        return None


def _amount(text: str | None) -> int | None:
    """A quantity in Kubernetes' notation: 128, 500m, 2113405180Ki."""
    parts = re.fullmatch(r"(\d+(?:\.\d+)?)([A-Za-z]*)", text or "")
    return int(float(parts[1]) * _UNITS[parts[2]]) if parts and parts[2] in _UNITS else None


def _podinfo(folder: Path) -> dict[str, str]:
    try:
        files = [path for path in sorted(folder.iterdir()) if path.is_file() and not path.name.startswith(".")]
        return {path.name: path.read_text(errors="replace").strip() for path in files}
    except OSError:
        return {}


def _output(command: Sequence[str], variables: Mapping[str, str]) -> tuple[str, str]:
    """What a tool prints, or nothing and the reason in words. It runs in ``variables`` alone, and is found there."""
    tool = shutil.which(command[0], path=variables.get("PATH", ""))
    if tool is None:
        return "", f"{command[0]} is not on the PATH"
    try:
        done = subprocess.run([tool, *command[1:]], env=dict(variables), capture_output=True, text=True, check=False,
                              timeout=_TOOL_TIMEOUT_S, stdin=subprocess.DEVNULL)  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as error:
        return "", f"{command[0]} does not answer ({type(error).__name__})"
    if done.returncode != 0:
        return "", f"{command[0]} fails: {(done.stderr.strip() or str(done.returncode)).splitlines()[-1]}"
    return done.stdout, ""


def _count(text: str | None) -> int | None:
    return int(text) if text is not None and text.isdigit() else None
