"""Memory of the fullest node where states or activations are offloaded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from costmodels.vocabulary.choices import Offload
from planner.table.facts import ClusterFacts, HostFacts


@dataclass(frozen=True)
class HostStates:
    """Bytes that one device, or one node, keeps off the devices; ``on_nvme``: states lie there, the rest in RAM."""

    optimizer: float
    gradients: float  # as they arrive
    parameters: float  # updated, on their way up
    on_nvme: bool
    activations: float = 0.0

    @property
    def ram_bytes(self) -> float:
        """Of host memory."""
        states = self.gradients + self.parameters + (0.0 if self.on_nvme else self.optimizer)
        return states + self.activations

    @property
    def nvme_bytes(self) -> float:
        """On NVMe."""
        return self.optimizer if self.on_nvme else 0.0

    def times(self, factor: float) -> HostStates:
        """The same of ``factor`` devices."""
        return HostStates(
            self.optimizer * factor,
            self.gradients * factor,
            self.parameters * factor,
            self.on_nvme,
            self.activations * factor,
        )


@dataclass(frozen=True)
class HostMemory:
    """The fullest node of a layout that offloads, and what a node has."""

    states: HostStates
    ram_capacity_bytes: float
    nvme_capacity_bytes: float

    @property
    def share(self) -> float:
        """Needed over available, of RAM or NVMe, whichever is fuller; above 1 the layout does not fit."""
        ram = self.states.ram_bytes / self.ram_capacity_bytes
        return max(ram, self.states.nvme_bytes / self.nvme_capacity_bytes) if self.states.on_nvme else ram


def host_states(optimizer_bytes: float, num_elements: float, host: HostFacts) -> HostStates:
    """What one device keeps on its host: its optimiser's bytes, and buffers for its ``num_elements`` gradients."""
    return HostStates(
        optimizer_bytes,
        num_elements * host.gradient_bytes,
        num_elements * host.parameter_bytes,
        on_nvme=host.offload is Offload.NVME,
    )


def fullest_node(ranks: Sequence[HostStates], cluster: ClusterFacts, host: HostFacts) -> HostMemory:
    """The node that needs most, from what a device of each pipeline rank keeps; ranks lie node by node in order.

    Where activations are offloaded no device may take more than an equal share of its node's memory, so that each rank
    can choose by itself: the node then counts as full of devices of the rank that needs most.
    """
    if any(rank.activations > 0 for rank in ranks):
        most = max(ranks, key=lambda rank: max(rank.ram_bytes / host.ram_bytes, _nvme_share(rank, host)))
        return on_node(most.times(cluster.devices_per_node), host)
    each = cluster.num_devices // len(ranks)
    firsts = np.arange(0, cluster.num_devices, cluster.devices_per_node)

    def of_nodes(values: list[float]) -> np.ndarray:
        return np.add.reduceat(np.repeat(np.array(values), each), firsts)

    parts = [
        of_nodes([rank.optimizer for rank in ranks]),
        of_nodes([rank.gradients for rank in ranks]),
        of_nodes([rank.parameters for rank in ranks]),
    ]
    worst = int(np.argmax(sum(parts)))
    optimizer, gradients, parameters = (float(part[worst]) for part in parts)
    return on_node(HostStates(optimizer, gradients, parameters, ranks[0].on_nvme), host)


def _nvme_share(states: HostStates, host: HostFacts) -> float:
    return states.nvme_bytes / host.nvme_bytes if states.on_nvme else 0.0


def on_node(states: HostStates, host: HostFacts) -> HostMemory:
    """``states`` with the capacities of one node."""
    return HostMemory(states, host.ram_bytes, host.nvme_bytes)
