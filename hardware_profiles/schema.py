"""The schema of a hardware profile: what one kind of cluster can do, each number with its provenance.

Base units only: bytes, seconds, FLOP/s, bytes/s (per direction). A profile describes one kind of
node and the network between such nodes; the number of nodes is chosen when planning. Beside each field of a device, a
node and its software stands what a cluster of unlike devices has of it (``Weakest``).
"""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from enum import Enum
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

SCHEMA_VERSION = 1

# How a number is known. measured: read off a machine directly. published: somebody else's measurement. datasheet: what
# the maker says. specified: what some code does, a definition, or our own choice. fitted: chosen so that a formula
# comes close to measurements; ``Quantity.fit`` says to which.
Tag = Literal["measured", "published", "datasheet", "specified", "fitted"]
OpClassName = Literal["gemm", "grouped_gemm", "attention", "convolution", "memory_bound"]
CollectiveName = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send_recv", "ring_shift"]
DTypeName = Literal["fp32", "tf32", "bf16", "fp16", "fp8"]
# What measured runs of a cluster may correct (``hardware_profiles/calibrated.py`` says how each acts).
FactorName = Literal[
    "product_rate",
    "attention_rate",
    "memory_rate",
    "network_inside",
    "network_between",
    "host_time",
    "collective_delay",
    "allocator_reserve",
]


class _Value(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class Weakest(Enum):
    """What stands for several unlike devices, nodes or softwares that are used as if they were alike.

    None of one of them, which is not known, makes the whole None, except under ``MOST_OR_ONE``.
    """

    LEAST = "the least of them"
    MOST = "the most of them"
    MOST_OR_ONE = "the most of them, None counted as 1"
    MEAN = "the mean over all devices"
    NAMES = "all names that differ"
    LEFT_OUT = "the schema's default: together they are no kind of their own"
    BY_SLOWEST = "worked out in hardware_profiles/slowest.py from several fields"


class Fit(_Value):
    """What a number was fitted to, and how close the formula came to rows that had no part in the fit."""

    to: Annotated[str, Field(min_length=1)]
    num_rows: Annotated[int, Field(ge=1)]
    held_out_error: Annotated[float, Field(ge=0)] | None = None  # mean absolute relative error; None: never tried


class Quantity(_Value):
    """A number, how it is known, and where it stands."""

    value: Annotated[float, Field(ge=0, allow_inf_nan=False)]
    tag: Tag
    source: Annotated[str, Field(min_length=1)]
    date: datetime.date | None = None
    fit: Fit | None = None  # of a fitted number, and of no other

    @model_validator(mode="after")
    def _says_its_fit(self) -> Quantity:
        if (self.tag == "fitted") != (self.fit is not None):
            raise ValueError(f"a number is tagged fitted where, and only where, it says its fit; the tag is {self.tag}")
        return self


class Efficiency(_Value):
    """Fraction of the peak an operator class reaches on large operands.

    ``half_size_flops``: work at which half of ``fraction`` is reached beyond the launch cost (0: constant efficiency).
    ``half_rows``, of attention: rows of queries (batch · heads · positions) at which half of it is reached, since
    blocks of rows are what a device's processors share. ``eight_bit_fraction``: in place of ``fraction`` where operands
    have 8 bits (None: the same). ``residual_spread``: standard deviation of log(measured / predicted).
    Attention is counted as graph.json counts it, the full product without regard to a mask, and the
    fraction is of a causal kernel, which skips half of it.
    """

    fraction: Quantity
    eight_bit_fraction: Quantity | None = None
    half_size_flops: Quantity | None = None
    half_rows: Quantity | None = None
    residual_spread: Annotated[float, Field(ge=0)] = 0.1


class DeviceProfile(_Value):
    """One accelerator (or, for ``cpu-gloo``, one process's share of the host)."""

    name: Annotated[str, Weakest.NAMES]
    vendor: Annotated[str, Weakest.NAMES]
    memory_bytes: Annotated[Quantity, Weakest.LEAST]
    memory_bandwidth_bytes_per_s: Annotated[Quantity, Weakest.LEAST]
    peak_flops_per_s: Annotated[dict[DTypeName, Quantity], Weakest.BY_SLOWEST]
    kernel_launch_s: Annotated[Quantity, Weakest.MOST]
    efficiency: Annotated[dict[OpClassName, Efficiency], Weakest.BY_SLOWEST]
    sm_count: Annotated[int | None, Weakest.LEAST] = None
    usd_per_hour: Annotated[Quantity | None, Weakest.MEAN] = None
    watts: Annotated[Quantity | None, Weakest.MEAN] = None
    # Interruptions of a job, over all causes, per device of it.
    failures_per_device_year: Annotated[Quantity | None, Weakest.MEAN] = None
    # How unlike devices of this kind are: the standard deviation of the logarithm of their slowdowns, which the slowest
    # of a job makes felt, in jobs of more devices than those that the rates of this profile hold for; None: not known.
    slowdown_spread: Annotated[Quantity | None, Weakest.MOST] = None
    slowdown_beyond_devices: Annotated[Quantity | None, Weakest.LEAST] = None
    detected_names: Annotated[tuple[str, ...], Weakest.LEFT_OUT] = ()  # what the driver calls this device

    @property
    def has_tensor_cores(self) -> bool:
        """Whether NVIDIA's rules for the sizes of 16-bit products hold."""
        return "nvidia" in self.vendor.lower()


class NodeProfile(_Value):
    """One host."""

    num_devices: Annotated[int, Field(ge=1), Weakest.LEAST]
    # Jobs that do not fill their nodes take as many devices of each, and leave the others idle; otherwise they fill
    # all but the last. Racks of 72 are used so: 64 of each is what degrees of powers of two divide.
    is_used_evenly: Annotated[bool, Weakest.LEAST] = False
    cpu_cores: Annotated[int | None, Weakest.LEAST] = None
    num_numa_nodes: Annotated[int | None, Weakest.LEAST] = None
    ram_bytes: Annotated[Quantity | None, Weakest.LEAST] = None
    host_link_bytes_per_s: Annotated[Quantity | None, Weakest.LEAST] = None  # device <-> host, per direction
    # Devices behind one link to the host; None: each has its own.
    devices_per_host_link: Annotated[Quantity | None, Weakest.MOST_OR_ONE] = None
    # Per node, reading and writing together.
    host_memory_bandwidth_bytes_per_s: Annotated[Quantity | None, Weakest.LEAST] = None
    nvme_bandwidth_bytes_per_s: Annotated[Quantity | None, Weakest.LEAST] = None  # per node
    nvme_bytes: Annotated[Quantity | None, Weakest.LEAST] = None
    # The host issues a small kernel of a training step in so much time (hardware_profiles/probes/issuing.py).
    host_s_per_kernel: Annotated[Quantity | None, Weakest.MOST] = None


class EfficiencyAtScale(_Value):
    """Fraction of ``bandwidth * efficiency`` that is left when a group spans ``num_nodes`` nodes."""

    num_nodes: Annotated[int, Field(ge=1)]
    fraction: Quantity


class GroupShare(_Value):
    """Fraction of ``bandwidth * efficiency`` that groups of ``num_ranks`` devices of one domain reach."""

    num_ranks: Annotated[int, Field(ge=2)]
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
    # Where devices are wired to one another without a switch, a group has the links between its own devices alone; and
    # with a switch, too, groups of two or three are a little slower. Groups of sizes that are not named reach all.
    share_of_groups: tuple[GroupShare, ...] = ()
    oversubscription: Annotated[float, Field(ge=1)] = 1.0
    residual_spread: Annotated[float, Field(ge=0)] = 0.15
    collectives: dict[CollectiveName, CollectiveRate] = {}  # where known, in place of the tier's own numbers

    def wire_bytes_per_s(self, devices_per_node: int) -> float:
        """What one device owns of the links while all devices of its node use them, before any efficiency."""
        return self.bandwidth_bytes_per_s.value / self.oversubscription * (self.links_per_node / devices_per_node)


class SoftwareProfile(_Value):
    """What the training software costs on this hardware, besides the operators themselves."""

    name: Annotated[str, Weakest.NAMES]
    # Device memory that each rank's libraries and framework keep as tensors, whatever the layout; None: not known.
    workspace_bytes: Annotated[Quantity | None, Weakest.MOST_OR_ONE] = None
    # Device memory held by the driver and libraries before any tensor.
    context_bytes: Annotated[Quantity, Weakest.MOST]
    # Device memory per communicator (process group) that is in use.
    communicator_bytes: Annotated[Quantity, Weakest.MOST]
    # Share of tensors that come and go in a step, lost to gaps between them.
    allocator_reserve_fraction: Annotated[Quantity, Weakest.MOST]
    # Of that share, what is lost where no pipeline keeps several micro-batches in flight and no collective splits or
    # gathers activations, so that tensors go in the order in which they came; None: all of it.
    plain_reserve_share: Annotated[Quantity | None, Weakest.MOST] = None
    # Kernels that wait for the device before a launch blocks: no farther ahead can the host be; None: not known.
    launch_queue_kernels: Annotated[Quantity | None, Weakest.MOST] = None
    # Compute takes (1 + this) times as long while communication runs.
    overlap_slowdown: Annotated[Quantity, Weakest.MOST]
    # Share of compute behind which communication can hide.
    overlappable_fraction: Annotated[Quantity, Weakest.LEAST]


# Beyond a factor of 20 a run was not of this machine, or its time not that of a step.
LARGEST_CALIBRATION = 20.0
EXPLAINED = 2.0  # a step so many times off its calibrated price is explained by nothing: none of 785 published runs is


class CalibratedFactor(_Value):
    """So many times what the profile, or the framework's recipe, says of something, as measured runs tell.

    Spreads are standard deviations of the natural logarithm: before the runs were known, and after.
    """

    value: Annotated[float, Field(ge=1 / LARGEST_CALIBRATION, le=LARGEST_CALIBRATION)]
    prior_spread: Annotated[float, Field(gt=0, le=LARGEST_CALIBRATION)]
    spread: Annotated[float, Field(gt=0, le=LARGEST_CALIBRATION)]


class CalibrationRun(_Value):
    """A measured run that a calibration rests on, with what was predicted of it before and after."""

    name: Annotated[str, Field(min_length=1)]
    framework: Annotated[str, Field(min_length=1)]
    step_time_s: Annotated[float, Field(gt=0, le=1e9)] | None = None
    predicted_step_time_s: Annotated[float, Field(gt=0, le=1e9)] | None = None
    calibrated_step_time_s: Annotated[float, Field(gt=0, le=1e9)] | None = None
    peak_memory_bytes: Annotated[float, Field(gt=0, le=1e18)] | None = None
    predicted_peak_memory_bytes: Annotated[float, Field(gt=0, le=1e18)] | None = None
    calibrated_peak_memory_bytes: Annotated[float, Field(gt=0, le=1e18)] | None = None
    memory_kind: Literal["allocated", "reserved", "device"] | None = None

    @property
    def is_explained(self) -> bool:
        """Whether its step time, where it was measured, lies near what is predicted with the calibration."""
        measured, found = self.step_time_s, self.calibrated_step_time_s
        return measured is None or found is None or 1 / EXPLAINED <= measured / found <= EXPLAINED


class Calibration(_Value):
    """What measured runs of a cluster say of it beyond its profile: an overlay, applied when it is planned for.

    ``constant_bytes``: device memory that every run took besides what is predicted, with its standard deviation before
    and after. ``prior``: where the spreads before come from.
    """

    factors: dict[FactorName, CalibratedFactor] = {}
    constant_bytes: Annotated[float, Field(ge=0, le=1e12)] = 0.0
    constant_prior_spread_bytes: Annotated[float, Field(gt=0, le=1e12)] | None = None
    constant_spread_bytes: Annotated[float, Field(gt=0, le=1e12)] | None = None
    runs: Annotated[tuple[CalibrationRun, ...], Field(min_length=1, max_length=10_000)]
    date: datetime.date
    prior: Annotated[str, Field(min_length=1)]

    @property
    def values(self) -> dict[FactorName, float]:
        """Each factor's value."""
        return {name: factor.value for name, factor in self.factors.items()}

    @property
    def num_timed(self) -> int:
        """Runs whose step time was known."""
        return sum(run.step_time_s is not None for run in self.runs)

    @property
    def num_weighed(self) -> int:
        """Runs whose memory was known."""
        return sum(run.peak_memory_bytes is not None for run in self.runs)

    @property
    def frameworks(self) -> tuple[str, ...]:
        """The frameworks that ran, each once."""
        return tuple(dict.fromkeys(run.framework for run in self.runs))


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
    calibration: Calibration | None = None  # what measured runs say beyond all that stands above

    @property
    def computes_on_host(self) -> bool:
        """Whether its devices are processes of the host, whose Python delays what they compute."""
        return self.backend == "gloo"

    @property
    def most_devices(self) -> int | None:
        """How many devices its network joins; None: any number."""
        return self.tiers[-1].num_devices if self.tiers else 1

    @property
    def is_launched_on(self) -> bool:
        """Whether a driver launches kernels on its devices; otherwise the host runs them itself, or a whole program."""
        return self.device.sm_count is not None


# To use as many devices of each node, a job takes at most so many times the nodes that it would fill.
MOST_NODES_OVER_FEWEST = 1.25


class ClusterSpec(_Value):
    """A cluster to plan for: a profile and how many of its devices.

    ``mixed``: what it consists of where its devices differ; ``profile`` is then what all of them reach together.
    """

    profile: ClusterProfile
    num_devices: Annotated[int, Field(ge=1)]
    mixed: MixedCluster | None = None

    @property
    def devices_per_node(self) -> int:
        """Devices of one node that are used; of a node that is full, where not all are alike in this."""
        node = self.profile.node
        fewest = -(-self.num_devices // node.num_devices)
        most = fewest * MOST_NODES_OVER_FEWEST if node.is_used_evenly else fewest
        evenly = (n for n in range(fewest, int(most) + 1) if node.is_used_evenly and self.num_devices % n == 0)
        num_nodes = next(evenly, None)
        return min(node.num_devices, self.num_devices) if num_nodes is None else self.num_devices // num_nodes

    def node_sizes(self, group_order: Sequence[str] = ()) -> tuple[int, ...]:
        """Devices of each node that are used, in the order of the ranks.

        ``group_order``: groups of a mixed cluster in the order of their ranks; those that are not named come last.
        """
        if self.mixed is None:
            whole, rest = divmod(self.num_devices, self.devices_per_node)
            return (self.devices_per_node,) * whole + ((rest,) if rest else ())
        clusters = {group.name: group.cluster for group in self.mixed.groups}
        names = dict.fromkeys([*(name for name in group_order if name in clusters), *clusters])
        return tuple(size for name in names for size in clusters[name].node_sizes())

    def used_devices(self, domain_devices: int) -> int:
        """Of a domain of so many devices, whole nodes or a part of one, those that are used."""
        node = self.profile.node.num_devices
        if self.devices_per_node >= node or self.num_devices <= node or domain_devices % node:
            return domain_devices
        return domain_devices // node * self.devices_per_node


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
