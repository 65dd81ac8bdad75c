"""The schema of a hardware profile: what one kind of cluster can do, each number with its provenance.

Base units only: bytes, seconds, FLOP/s, bytes/s (per direction). A profile describes one kind of
node and the network between such nodes; the number of nodes is chosen when planning.
"""

from __future__ import annotations

import datetime
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

SCHEMA_VERSION = 1

Tag = Literal["measured", "published", "datasheet"]
OpClassName = Literal["gemm", "grouped_gemm", "attention", "convolution", "memory_bound"]
CollectiveName = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send_recv"]
DTypeName = Literal["fp32", "tf32", "bf16", "fp16", "fp8"]


class _Value(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class Quantity(_Value):
    """A number, how it is known, and where it stands."""

    value: Annotated[float, Field(ge=0, allow_inf_nan=False)]
    tag: Tag
    source: Annotated[str, Field(min_length=1)]
    date: datetime.date | None = None


class Efficiency(_Value):
    """Fraction of the peak an operator class reaches on large operands.

    ``half_size_flops``: work at which half of ``fraction`` is reached beyond the launch cost
    (0: constant efficiency). ``residual_spread``: standard deviation of log(measured / predicted).
    Attention is counted as graph.json counts it, the full product without regard to a mask, and the
    fraction is of a causal kernel, which skips half of it.
    """

    fraction: Quantity
    half_size_flops: Quantity | None = None
    residual_spread: Annotated[float, Field(ge=0)] = 0.1


class DeviceProfile(_Value):
    """One accelerator (or, for ``cpu-gloo``, one process's share of the host)."""

    name: str
    vendor: str
    memory_bytes: Quantity
    memory_bandwidth_bytes_per_s: Quantity
    peak_flops_per_s: dict[DTypeName, Quantity]
    kernel_launch_s: Quantity
    efficiency: dict[OpClassName, Efficiency]
    sm_count: int | None = None
    usd_per_hour: Quantity | None = None
    watts: Quantity | None = None
    failures_per_device_year: Quantity | None = None  # interruptions of a job, over all causes, per device of it
    detected_names: tuple[str, ...] = ()  # what the driver calls this device


class NodeProfile(_Value):
    """One host."""

    num_devices: Annotated[int, Field(ge=1)]
    cpu_cores: int | None = None
    num_numa_nodes: int | None = None
    ram_bytes: Quantity | None = None
    host_link_bytes_per_s: Quantity | None = None  # device <-> host, per device and direction
    devices_per_host_link: Quantity | None = None  # devices behind one link to the host; None: each has its own
    host_memory_bandwidth_bytes_per_s: Quantity | None = None  # per node, reading and writing together
    nvme_bandwidth_bytes_per_s: Quantity | None = None  # per node
    nvme_bytes: Quantity | None = None


class EfficiencyAtScale(_Value):
    """Fraction of ``bandwidth * efficiency`` that is left when a group spans ``num_nodes`` nodes."""

    num_nodes: Annotated[int, Field(ge=1)]
    fraction: Quantity


class CollectiveRate(_Value):
    """What one kind of collective reaches on one tier, where it was measured by itself."""

    latency_s: Quantity  # of one step between two devices
    efficiency: Quantity  # fraction of the tier's bandwidth at large sizes, all groups of the axis at work
    residual_spread: Annotated[float, Field(ge=0)] = 0.15


class NetworkTier(_Value):
    """One level of the network, innermost first in ``ClusterProfile.tiers``.

    ``num_devices`` is how many devices one domain of this tier joins (None: all that there are).
    ``bandwidth_bytes_per_s`` is of one link; a node has ``links_per_node`` of them, shared by the
    groups that cross this tier at the same time. Inside a node ``links_per_node`` equals the
    number of devices.
    """

    name: str
    num_devices: int | None
    latency_s: Quantity  # one message between two devices of this tier
    bandwidth_bytes_per_s: Quantity  # per link and direction
    links_per_node: Annotated[int, Field(ge=1)]
    efficiency: Quantity  # fraction of the bandwidth that large collectives reach
    all_to_all_efficiency: Quantity | None = None  # None: as ``efficiency``
    all_reduce_efficiency: Quantity | None = None  # None: as ``efficiency``; differs where switches reduce
    efficiency_at_scale: tuple[EfficiencyAtScale, ...] = ()
    oversubscription: Annotated[float, Field(ge=1)] = 1.0
    residual_spread: Annotated[float, Field(ge=0)] = 0.15
    collectives: dict[CollectiveName, CollectiveRate] = {}  # where known, in place of the tier's own numbers


class SoftwareProfile(_Value):
    """What the training software costs on this hardware, besides the operators themselves."""

    name: str
    context_bytes: Quantity  # device memory held by the driver and libraries before any tensor
    communicator_bytes: Quantity  # device memory per communicator (process group) that is in use
    allocator_reserve_fraction: Quantity  # share of tensors that come and go in a step, lost to fragmentation
    overlap_slowdown: Quantity  # compute takes (1 + this) times as long while communication runs
    overlappable_fraction: Quantity  # share of compute behind which communication can hide


class ClusterProfile(_Value):
    """One kind of cluster, as ``--hardware`` names it."""

    schema_version: Literal[1] = SCHEMA_VERSION
    name: str
    aliases: tuple[str, ...] = ()
    description: str
    backend: Literal["nccl", "gloo", "none"]  # "none": planning only
    device: DeviceProfile
    node: NodeProfile
    tiers: tuple[NetworkTier, ...]
    software: SoftwareProfile
    notes: tuple[str, ...] = ()  # what stood out when the cluster was measured, in words


class ClusterSpec(_Value):
    """A cluster to plan for: a profile and how many of its devices.

    ``mixed``: what it consists of where its devices differ; ``profile`` is then what all of them reach together.
    """

    profile: ClusterProfile
    num_devices: Annotated[int, Field(ge=1)]
    mixed: MixedCluster | None = None

    @property
    def devices_per_node(self) -> int:
        """Devices of one node that are used."""
        return min(self.profile.node.num_devices, self.num_devices)


class GroupLink(_Value):
    """The way between two groups of a mixed cluster, as it is sustained."""

    between: tuple[str, str]
    latency_s: Quantity
    bandwidth_bytes_per_s: Quantity  # of one node, per direction


class DeviceGroup(_Value):
    """Devices of one kind inside a mixed cluster."""

    name: str
    cluster: ClusterSpec


class MixedCluster(_Value):
    """A cluster of several kinds of nodes. Groups without a link of their own meet over the slower one's network."""

    schema_version: Literal[1] = SCHEMA_VERSION
    name: str
    groups: Annotated[tuple[DeviceGroup, ...], Field(min_length=2)]
    links: tuple[GroupLink, ...] = ()

    @property
    def num_devices(self) -> int:
        """Devices of all groups."""
        return sum(group.cluster.num_devices for group in self.groups)

    def link(self, one: str, other: str) -> GroupLink | None:
        """The link that was given for two groups."""
        return next((link for link in self.links if set(link.between) == {one, other}), None)


ClusterSpec.model_rebuild()
