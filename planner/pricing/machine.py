"""A cluster as prices ask it: rooflines of its devices, times of collectives."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np

from costmodels.communication import Line, collective_lines, collective_times_s, dispatch_parts
from costmodels.compute import Roofline, roofline
from costmodels.overlap import Overlap
from costmodels.recipe import Recipe
from costmodels.stragglers import straggler_slowdown
from costmodels.vocabulary.workload import CollectiveKind, GroupPlacement, OpClass
from hardware_profiles.schema import ClusterSpec, DTypeName
from planner.axes.lowered import Collective
from planner.layout.columns import Array


@dataclass(frozen=True)
class Machine:
    """A cluster. Rooflines and lines of collectives are worked out once each."""

    cluster: ClusterSpec
    _rooflines: dict[tuple[OpClass, str], Roofline] = field(
        default_factory=dict[tuple[OpClass, str], Roofline], repr=False, compare=False
    )
    _lines: dict[tuple[CollectiveKind, GroupPlacement], tuple[Line, ...]] = field(
        default_factory=dict[tuple[CollectiveKind, GroupPlacement], tuple[Line, ...]], repr=False, compare=False
    )

    @property
    def has_several_nodes(self) -> bool:
        """Whether the job spans nodes."""
        return self.cluster.num_devices > self.cluster.devices_per_node

    def prices_as(self, other: Machine) -> bool:
        """Whether kernels and collectives take as long on ``other``: the same devices, links and nodes, if not as many.

        Both must reach beyond every tier that joins a number of devices: what lies within one crosses no other.
        """
        one, two = self.cluster, other.cluster
        if one.mixed is not None or two.mixed is not None or one.profile != two.profile:
            return False
        largest = max((tier.num_devices or 0 for tier in one.profile.tiers), default=0)
        bounds = max(largest, one.profile.node.num_devices)
        return one.devices_per_node == two.devices_per_node and min(one.num_devices, two.num_devices) > bounds

    def straggler_slowdown(self, num_devices: int) -> float:
        """Compute of the slowest device of a job of so many, over that of a job that the profile's rates hold for."""
        device = self.cluster.profile.device
        spread, beyond = device.slowdown_spread, device.slowdown_beyond_devices
        if spread is None or beyond is None:
            return 1.0
        return straggler_slowdown(num_devices, int(beyond.value), spread.value)

    @property
    def launch_queue(self) -> float:
        """Kernels that the driver queues before a launch blocks; infinite where no such number is known."""
        queued = self.cluster.profile.software.launch_queue_kernels
        return math.inf if queued is None else queued.value

    @property
    def computes_on_host(self) -> bool:
        """Whether what the host does in Python delays what is computed."""
        return self.cluster.profile.computes_on_host

    def issue_s(self, recipe: Recipe, *, is_sharded: bool) -> float:
        """Seconds of the host for one kernel; on a processor those besides what the kernel's own time begins with."""
        seconds, launch = recipe.issue_s(is_sharded=is_sharded), recipe.host_s_per_launch
        profile = self.cluster.profile
        if profile.computes_on_host:
            return max(0.0, seconds - profile.device.kernel_launch_s.value)
        return seconds if launch is None or not profile.is_launched_on else seconds + launch.value

    @property
    def overlap(self) -> Overlap:
        """How well compute hides communication."""
        software = self.cluster.profile.software
        return Overlap(software.overlappable_fraction.value, software.overlap_slowdown.value)

    def idle_factor(self, query_rows: Array) -> Array:
        """Time of an attention of so many rows over that at its full rate: few rows do not fill the device."""
        half = self.cluster.profile.device.efficiency["attention"].half_rows
        return np.ones_like(query_rows) if half is None else 1 + half.value / query_rows

    @property
    def has_tensor_cores(self) -> bool:
        """Whether 16-bit products run on tensor cores, which want rows of some width."""
        return self.cluster.profile.device.has_tensor_cores

    def has_arithmetic(self, dtype: DTypeName) -> bool:
        """Whether the profile says how fast the devices multiply in ``dtype``."""
        return dtype in self.cluster.profile.device.peak_flops_per_s

    def roofline(self, op_class: OpClass, precision: str) -> Roofline:
        """The roofline of one class of operators."""
        key = (op_class, precision)
        if key not in self._rooflines:
            self._rooflines[key] = roofline(self.cluster.profile.device, op_class, precision)
        return self._rooflines[key]

    def lines(self, kind: CollectiveKind, group: GroupPlacement) -> tuple[Line, ...]:
        """Latency and seconds per byte of every algorithm of a collective."""
        key = (kind, group)
        if key not in self._lines:
            self._lines[key] = collective_lines(kind, group, self.cluster)
        return self._lines[key]

    def collective_s(self, collective: Collective, num_bytes: Array) -> Array:
        """Seconds of a collective of so many bytes that compute cannot hide, at each size; and of waiting for it."""
        moved = num_bytes / self._rate_of(collective)
        if collective.copies is None:
            seconds = collective_times_s(self.lines(collective.kind, collective.group), moved)
        else:
            parts = dispatch_parts(collective.group, (collective.copies, collective.nodes), self.cluster)
            ways = [collective_times_s(self.lines(collective.kind, ranks), share * moved) for ranks, share in parts]
            seconds = np.maximum.reduce(ways)
        return collective.repeats * ((1 - collective.hidden_share) * seconds + collective.wait_s)

    def _rate_of(self, collective: Collective) -> float:
        """What the framework reaches of what the links sustain: all of it where a group has one rank on each node.

        A ring comes into a node and leaves it through one network card: NCCL's src/graph/search.cc (v2.10), "NET n ->
        GPU a -> GPU b -> .. -> GPU x -> NET n". A rank alone on its node is both a and x, and takes its own card. Of
        several ranks some lie behind another PCIe switch, and src/graph/paths.cc sends what they send and receive
        through the processor, a way that does not deliver full bandwidth (NVIDIA, "Doubling all2all Performance with
        NVIDIA Collective Communication Library 2.12", 2022). How much of it is left is fitted, with all else that slows
        groups with several ranks on a node.
        """
        is_one_a_node = collective.group.stride >= self.cluster.devices_per_node
        return 1.0 if is_one_a_node else collective.rate
