"""What the search needs to know of cluster, framework and training besides the arrays: numbers, read once each."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal, NamedTuple, overload

import numpy as np
from numpy.typing import NDArray

from costmodels.ledger import SoftwareBytes
from costmodels.overlap import Overlap
from costmodels.vocabulary.action import Transfer
from costmodels.vocabulary.choices import Offload
from costmodels.vocabulary.schedules import ScheduleName


@dataclass(frozen=True)
class UnitRow:
    """The units of the model in order."""

    kinds: tuple[int, ...]  # place on the arrays' axis of kinds, for each unit
    names: tuple[str, ...]
    is_block: tuple[bool, ...]
    has_alike_blocks: bool = True  # whether all have about as much work

    @cached_property
    def counts(self) -> tuple[int, ...]:
        """How many units there are of each kind."""
        return tuple(self.kinds.count(kind) for kind in range(max(self.kinds) + 1))


class Line(NamedTuple):
    """A time that grows with a number: nothing for nothing, otherwise latency and so much for each."""

    latency_s: float
    s_per_item: float

    @overload
    def time_s(self, number: float) -> float: ...
    @overload
    def time_s(self, number: NDArray[np.float64]) -> NDArray[np.float64]: ...
    def time_s(self, number: float | NDArray[np.float64]) -> float | NDArray[np.float64]:
        """Seconds of so many; nothing for none."""
        if isinstance(number, np.ndarray):
            return np.where(number > 0, self.latency_s + number * self.s_per_item, 0.0)
        return self.latency_s + number * self.s_per_item if number > 0 else 0.0


@dataclass(frozen=True)
class DeviceFacts:
    """The devices of one group, or all of a cluster, which count as the weakest where they differ."""

    name: str
    num_devices: int
    memory_bytes: float  # what a plan may take of it by prediction
    overlap: Overlap
    update: Line  # an optimiser step on the device, by elements
    message_slowdown: float  # as ``overlap.slowdown``, beside messages between stages: ``overlap.message_beside_s``


@dataclass(frozen=True)
class HostFacts:
    """One node, where states are offloaded to it; seconds are by elements of one of its devices, all at work."""

    offload: Offload
    update: Line
    download: Line  # gradients to the host
    ram_bytes: float
    nvme_bytes: float
    gradient_bytes: float  # of one element, as it arrives
    parameter_bytes: float  # of one element, updated, on its way back


class HostCopies(NamedTuple):
    """Activations of one device in its host's memory, while all devices of the node keep theirs there."""

    s_per_byte: float  # one way
    slowdown: float  # compute takes (1 + this) times as long while a copy runs
    ram_bytes: float  # each device's equal share of its node's memory


@dataclass(frozen=True)
class ClusterFacts:
    """Where the ranks are."""

    name: str
    num_devices: int
    devices_per_node: int
    devices: tuple[DeviceFacts, ...]  # the first: all, as the weakest; then each group of unlike devices
    software: SoftwareBytes
    hosts: tuple[HostFacts, ...] = ()  # for each place that states can be offloaded to
    copies: HostCopies | None = None  # None: activations in host memory have no price
    memory_factor: float = 1.0  # a device's whole memory over what a plan may take of it

    def place_of(self, group: str) -> int:
        """Place in ``devices``, and on the arrays' axis of devices, of a group of unlike devices."""
        return next(place for place, device in enumerate(self.devices) if place > 0 and device.name == group)

    def with_memory_factor(self, factor: float) -> ClusterFacts:
        """The same cluster, of whose memory a plan may take the ``factor``-th part; what it was before is forgotten."""
        changed = self.memory_factor / factor
        devices = tuple(replace(device, memory_bytes=device.memory_bytes * changed) for device in self.devices)
        return replace(self, devices=devices, memory_factor=factor)

    def host(self, offload: Offload) -> HostFacts:
        """The node for states that are offloaded so; ValueError where that has no price."""
        found = next((host for host in self.hosts if host.offload is offload), None)
        if found is None:
            raise ValueError(f"{self.name} has no price for offload {offload}")
        return found


class ShardedHooks(NamedTuple):
    """Seconds of the host that FSDP2's hooks take around a unit, a micro-batch (``costmodels.recipe.HookTimes``)."""

    forward_s: float
    backward_s: float
    gather_s: float
    reduce_s: float


@dataclass(frozen=True)
class FrameworkFacts:
    """How the framework runs what the arrays hold the prices of; the words are ``costmodels.recipe.Recipe``'s."""

    name: str
    overlaps_reduction: bool
    overlaps_whole_reduction: bool  # the same of parameters that nothing shards
    overlaps_gather: bool
    overlaps_micro_batches: bool
    gathers_to_recompute: bool
    transfers: Transfer
    exchanges_hide_under: tuple[ScheduleName, ...]
    exchanges_hide_without_pipeline: bool
    partition: Literal["even", "weighted"]
    head_weight: float  # of its elements, where stages are filled by weight
    plain_reserve: float  # of the allocator's reserve, what is left where no axis mixes the lifetimes of tensors
    units_in_transit: int  # gathered or reduced at once
    has_fsdp_moments: bool
    keeps_gradients: bool
    reduces_in_place: bool
    leaves_whole: bool  # parameters that neither ZeRO nor offloading moves, and that are computed with in fp32
    hooks: ShardedHooks | None
    reduction_bytes: float
    bucket_elements: float  # of each of the two flat buffers of a sharded optimiser
    extra_communicators: float
    gathered_update_bytes: float
    gathered_update_shard_bytes: float
    overflow_s_per_byte: float | None
    item_bytes: int  # of one gathered parameter
    error_between_layouts: float | None  # of predicted ratios of two layouts' times; None: never measured

    def transfer(self, schedule: ScheduleName) -> Transfer:
        """How results go from stage to stage: with several stages a rank, or split passes, none is on demand."""
        on_demand = self.transfers is Transfer.ON_DEMAND
        return Transfer.AHEAD if on_demand and not schedule.rules.has_one_stage else self.transfers

    def hides_reduction(self, zero_stage: int, offload: Offload) -> bool:
        """Whether gradients that are reduced once a step are reduced beside a backward pass."""
        return self.overlaps_reduction if self.shards(zero_stage, offload) else self.overlaps_whole_reduction

    @property
    def has_first_gradients(self) -> bool:
        """Whether it is known that a stage of a pipeline has no gradients before its first backward pass of a step."""
        return self.has_fsdp_moments and not self.keeps_gradients

    def shards(self, zero_stage: int, offload: Offload) -> bool:
        """Whether parameters are the framework's to shard, cast or move, and not left as the model made them."""
        return not (self.leaves_whole and zero_stage == 0 and offload is Offload.NONE)
