"""What offloading asks of the hosts: work per device, and memory of the fullest node, from numbers of elements."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from costmodels.memory import COMPUTE_BYTES, GRADIENT_BYTES, MASTER_BYTES, MOMENT_BYTES
from costmodels.offload import HostWork, missing_facts
from costmodels.step import FP32_ACCESSES, FP32_BYTES
from hardware_profiles.schema import ClusterSpec
from planner.layout.layout import Training
from planner.parallelism import Offload


@dataclass(frozen=True)
class HostStates:
    """Bytes that one device, or one node, keeps off the devices; ``on_nvme``: states lie there, the rest in RAM."""

    optimizer: float
    gradients: float  # as they arrive
    parameters: float  # updated, on their way up
    on_nvme: bool

    @property
    def ram_bytes(self) -> float:
        """Of host memory."""
        return self.gradients + self.parameters + (0.0 if self.on_nvme else self.optimizer)

    @property
    def nvme_bytes(self) -> float:
        """On NVMe."""
        return self.optimizer if self.on_nvme else 0.0

    def times(self, factor: float) -> HostStates:
        """The same of ``factor`` devices."""
        return HostStates(self.optimizer * factor, self.gradients * factor, self.parameters * factor, self.on_nvme)


@dataclass(frozen=True)
class HostMemory:
    """The fullest node of a layout that offloads, and what a node has."""

    states: HostStates
    ram_capacity_bytes: float
    nvme_capacity_bytes: float

    @property
    def share(self) -> float:
        """Of what is scarcest; above 1 it does not fit."""
        ram = self.states.ram_bytes / self.ram_capacity_bytes
        return max(ram, self.states.nvme_bytes / self.nvme_capacity_bytes) if self.states.on_nvme else ram


def unpriced_offload(cluster: ClusterSpec, offload: Offload) -> str | None:
    """Why ``offload`` has no price on ``cluster``; None where it has one."""
    if offload is Offload.NONE:
        return None
    if cluster.mixed is not None:
        return "offloading has no price on clusters of several kinds of nodes"
    missing = missing_facts(cluster.profile.node, uses_nvme=offload is Offload.NVME)
    names = ", ".join(f"node.{name}" for name in missing)
    return f"the profile of {cluster.profile.name} does not say {names}" if missing else None


def host_work(num_elements: float, training: Training, offload: Offload) -> HostWork:
    """What the update of one device's ``num_elements`` parameters asks of its host."""
    optimizer, item_bytes = training.optimizer.value, COMPUTE_BYTES[training.precision.value]
    stored = MASTER_BYTES + MOMENT_BYTES[optimizer]
    return HostWork(
        down_bytes=num_elements * GRADIENT_BYTES,
        up_bytes=num_elements * item_bytes,
        update_bytes=num_elements * (FP32_ACCESSES[optimizer] * FP32_BYTES + item_bytes),
        streamed_bytes=2 * num_elements * stored if offload is Offload.NVME else 0.0,
    )


def host_states(optimizer_bytes: float, num_elements: float, training: Training, offload: Offload) -> HostStates:
    """What one device keeps on its host: its optimiser's bytes, and buffers for its ``num_elements`` gradients."""
    item_bytes = COMPUTE_BYTES[training.precision.value]
    return HostStates(
        optimizer_bytes, num_elements * GRADIENT_BYTES, num_elements * item_bytes, offload is Offload.NVME
    )


def fullest_node(ranks: Sequence[HostStates], cluster: ClusterSpec) -> HostMemory:
    """The node that needs most, from what a device of each pipeline rank keeps; ranks lie node by node in order."""
    each = cluster.num_devices // len(ranks)
    firsts = np.arange(0, cluster.num_devices, cluster.devices_per_node)

    def of_nodes(values: list[float]) -> np.ndarray:
        return np.add.reduceat(np.repeat(np.array(values), each), firsts)

    parts = [
        of_nodes([r.optimizer for r in ranks]),
        of_nodes([r.gradients for r in ranks]),
        of_nodes([r.parameters for r in ranks]),
    ]
    worst = int(np.argmax(sum(parts)))
    optimizer, gradients, parameters = (float(part[worst]) for part in parts)
    return on_node(HostStates(optimizer, gradients, parameters, ranks[0].on_nvme), cluster)


def on_node(states: HostStates, cluster: ClusterSpec) -> HostMemory:
    """``states`` beside what one node has."""
    node = cluster.profile.node
    ram, nvme = (0.0 if q is None else q.value for q in (node.ram_bytes, node.nvme_bytes))
    return HostMemory(states, ram, nvme)
