"""CostTable: everything the search needs about every coarse point, as numbers only.

Units of equal kind cost the same, so the table holds one column a kind. Times of many coarse points
are computed at once; a row of the result prices one point exactly.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields

import numpy as np

from costmodels.communication import Line, collective_lines, line_between
from costmodels.memory import COMPUTE_BYTES, StateBytes, state_bytes
from costmodels.offload import download_s, host_update_s
from costmodels.recipe import Recipe, load_recipe
from costmodels.step import exposed_s, optimizer_step_s
from costmodels.vocabulary.workload import CollectiveKind, GroupPlacement
from hardware_profiles.schema import ClusterSpec, SoftwareProfile
from planner.layout.columns import Array, Columns, Positions
from planner.layout.layout import Layout, Training
from planner.parallelism import Offload, Recompute
from planner.pricing.offloading import HostStates, host_states, host_work
from planner.pricing.unit_costs import UnitCosts, UnitStates, held_elements

# What keys of costs depend on.
KEY_FIELDS = ("mesh.tp", "mesh.cp", "mesh.ep", "sequence_parallel", "micro_batch_size", "recompute")


@dataclass(frozen=True)
class CostKey:
    """What the costs of a unit depend on besides its kind."""

    tp: int
    sequence_parallel: bool
    cp: int
    micro_batch_size: int
    recompute: Recompute
    ep: int = 1

    @staticmethod
    def of(layout: Layout) -> CostKey:
        """The key of a coarse point."""
        mesh = layout.mesh
        return CostKey(mesh.tp, layout.sequence_parallel, mesh.cp, layout.micro_batch_size, layout.recompute, mesh.ep)


@dataclass(frozen=True)
class UnitRow:
    """The units of the model in order."""

    kinds: tuple[int, ...]  # column of each unit
    names: tuple[str, ...]
    is_block: tuple[bool, ...]

    @property
    def counts(self) -> Array:
        """How many units each column stands for."""
        return np.bincount(self.kinds, minlength=max(self.kinds) + 1).astype(np.float64)


@dataclass(frozen=True)
class Parts:
    """Seconds per micro-batch and unit kind, [points, kinds]; ``*_data_s`` are what stays exposed."""

    compute_forward_s: Array
    compute_backward_s: Array
    recompute_s: Array
    tensor_forward_s: Array
    tensor_backward_s: Array
    context_forward_s: Array
    context_backward_s: Array
    expert_forward_s: Array
    expert_backward_s: Array
    data_forward_s: Array
    data_backward_s: Array
    weight_s: Array  # part of backward_s: what a schedule that splits backward passes runs later

    @property
    def forward_s(self) -> Array:
        """Forward, everything included."""
        parts = self.compute_forward_s + self.tensor_forward_s + self.context_forward_s
        return parts + self.expert_forward_s + self.data_forward_s

    @property
    def backward_s(self) -> Array:
        """Backward, recomputation and everything else included."""
        parts = self.compute_backward_s + self.recompute_s + self.tensor_backward_s + self.context_backward_s
        return parts + self.expert_backward_s + self.data_backward_s

    @property
    def communication_forward_s(self) -> Array:
        """What compute does not hide of all communication in forward."""
        return self.tensor_forward_s + self.context_forward_s + self.expert_forward_s + self.data_forward_s

    @property
    def communication_backward_s(self) -> Array:
        """What compute does not hide of all communication in backward."""
        return self.tensor_backward_s + self.context_backward_s + self.expert_backward_s + self.data_backward_s


@dataclass(frozen=True)
class DataParallelTimes:
    """Per unit kind: one gather of parameters and one reduction of gradients over the data-parallel ranks.

    And adding one micro-batch's gradients to those before it.
    """

    gather_s: Array
    reduce_s: Array
    accumulate_s: Array

    def plus(self, other: DataParallelTimes) -> DataParallelTimes:
        """One behind the other."""
        return DataParallelTimes(
            self.gather_s + other.gather_s, self.reduce_s + other.reduce_s, self.accumulate_s + other.accumulate_s
        )

    def take(self, rows: Positions) -> DataParallelTimes:
        """Of a layout a row: these rows."""
        return DataParallelTimes(self.gather_s[rows], self.reduce_s[rows], self.accumulate_s[rows])


@dataclass(frozen=True)
class CostTable:
    """Costs of every unit kind under every key, and the cluster's numbers."""

    training: Training
    cluster: ClusterSpec
    units: UnitRow
    costs: dict[CostKey, tuple[UnitCosts, ...]]
    states: dict[tuple[int, bool], tuple[UnitStates, ...]]
    flops_per_sequence: float  # forward and backward of the whole model, nothing recomputed
    recipe: Recipe = field(default_factory=load_recipe)
    # Of a mixed cluster: the costs on each group's own devices; this table's are those of the weakest everywhere.
    groups: Mapping[str, CostTable] = field(default_factory=dict[str, "CostTable"])
    _stacked: dict[str, Array] = field(default_factory=dict[str, Array], repr=False, compare=False)
    _index: dict[CostKey, int] = field(default_factory=dict[CostKey, int], repr=False, compare=False)
    _lines: dict[tuple[CollectiveKind, GroupPlacement], tuple[Line, ...]] = field(
        default_factory=dict[tuple[CollectiveKind, GroupPlacement], tuple[Line, ...]], repr=False, compare=False
    )
    _data: dict[tuple[object, ...], DataParallelTimes] = field(
        default_factory=dict[tuple[object, ...], DataParallelTimes], repr=False, compare=False
    )

    @property
    def item_bytes(self) -> int:
        """Bytes of one gathered parameter: the compute dtype's."""
        return COMPUTE_BYTES[self.training.precision.value]

    def column(self, name: str) -> Array:
        """One field of ``UnitCosts`` as [keys, kinds]."""
        if name not in self._stacked:
            self._stacked[name] = np.array([[getattr(c, name) for c in row] for row in self.costs.values()])
        return self._stacked[name]

    def data_parallel_times(self, layout: Layout) -> DataParallelTimes:
        """Times of each unit kind under the layout's mesh and ZeRO stage."""
        key = (layout.mesh, min(layout.zero_stage, 2), layout.sequence_parallel)
        if key not in self._data:
            self._data[key] = self._data_parallel_times(layout)
        return self._data[key]

    def _data_parallel_times(self, layout: Layout) -> DataParallelTimes:
        ep, states = layout.mesh.ep, self.states[layout.mesh.tp, layout.sequence_parallel]
        total, trainable = np.array([s.total for s in states]), np.array([s.trainable for s in states])
        if ep == 1:
            return self._times_over(layout, total, trainable)
        experts = np.array([s.experts for s in states])
        dense = self._times_over(layout, total - experts, trainable - experts)
        own = self._times_over(layout, experts / ep, experts / ep, ep)
        return dense.plus(own)

    def _times_over(self, layout: Layout, total: Array, trainable: Array, ep: int = 1) -> DataParallelTimes:
        """Times for so many elements of each unit kind; ``ep``: over groups so many times smaller."""
        mesh, device = layout.mesh, self.cluster.profile.device
        bandwidth = device.memory_bandwidth_bytes_per_s.value * device.efficiency["memory_bound"].fraction.value
        accumulate_s = trainable * self.recipe.accumulation_bytes.value / bandwidth
        total, trainable = total * self.item_bytes, trainable * self.recipe.state.reduction_bytes.value
        if layout.zero_stage == 0:
            across = GroupPlacement(mesh.dp_replicate * mesh.cp // ep, mesh.tp * ep)
            reduce_s = self._line(CollectiveKind.ALL_REDUCE, across, trainable)
            return DataParallelTimes(np.zeros(len(total)), reduce_s, accumulate_s)
        inside = GroupPlacement(mesh.dp_shard * mesh.cp // ep, mesh.tp * ep)
        across = GroupPlacement(mesh.dp_replicate, mesh.tp * mesh.cp * mesh.dp_shard)
        if layout.zero_stage == 1 and self.recipe.state.reduces_to_all:
            everywhere = GroupPlacement(mesh.dp * mesh.cp // ep, mesh.tp * ep)
            reduce_s = self._line(CollectiveKind.ALL_REDUCE, everywhere, trainable)
        else:
            reduce_s = self._line(CollectiveKind.REDUCE_SCATTER, inside, trainable)
            reduce_s = reduce_s + self._line(CollectiveKind.ALL_REDUCE, across, trainable / inside.num_ranks)
        return DataParallelTimes(self._line(CollectiveKind.ALL_GATHER, inside, total), reduce_s, accumulate_s)

    def _line(self, kind: CollectiveKind, group: GroupPlacement, num_bytes: Array) -> Array:
        moved = num_bytes / self.recipe.data_parallel_rate.value
        times = [latency_s + s_per_byte * moved for latency_s, s_per_byte in self._lines_of(kind, group)]
        return np.where(num_bytes > 0, np.minimum.reduce(times), 0.0) if times else np.zeros(len(num_bytes))

    def _lines_of(self, kind: CollectiveKind, group: GroupPlacement) -> tuple[Line, ...]:
        key = (kind, group)
        if key not in self._lines:
            self._lines[key] = collective_lines(kind, group, self.cluster)
        return self._lines[key]

    def key_rows(self, layouts: Columns[Layout]) -> Positions:
        """Row of each layout in ``column``."""
        if not self._index:
            self._index.update({key: i for i, key in enumerate(self.costs)})
        first, which = layouts.distinct(*KEY_FIELDS)
        return np.array([self._index[CostKey.of(layouts[i])] for i in first], dtype=np.intp)[which]

    def data_times(self, layouts: Columns[Layout]) -> DataParallelTimes:
        """``data_parallel_times`` of many layouts, [layouts, kinds]."""
        first, which = layouts.distinct("mesh", "zero_stage", "sequence_parallel")
        times = [self.data_parallel_times(layouts[i]) for i in first]
        names = (field.name for field in fields(DataParallelTimes))
        return DataParallelTimes(*(np.array([getattr(t, name) for t in times]) for name in names)).take(which)

    def parts(self, layouts: Columns[Layout], times: DataParallelTimes, rows: Positions) -> Parts:
        """Time parts of many coarse points at once, from their ``data_times`` and their ``key_rows``."""

        def take(name: str) -> Array:
            return self.column(name)[rows]

        zero = layouts.numbers("zero_stage")[:, None]
        adds_up = (zero < 2) & (layouts.numbers("num_microbatches")[:, None] > 1)
        accumulation = np.where(adds_up, times.accumulate_s, 0.0)
        splits = layouts.each(lambda layout: layout.schedule.rules.splits_backward, "schedule")[:, None]
        twice = np.where(splits, take("split_extra_s"), 0.0)
        compute_backward = take("backward_s") + accumulation + twice
        forward, backward = take("forward_s"), compute_backward + take("recompute_s")
        # ZeRO 3 gathers in forward and again in backward; from ZeRO 2 on gradients are reduced every micro-batch.
        in_forward = np.where(zero == 3, times.gather_s, 0.0)
        in_backward = in_forward + np.where(zero >= 2, times.reduce_s, 0.0)
        software = self.software
        return Parts(
            compute_forward_s=forward,
            compute_backward_s=compute_backward,
            recompute_s=take("recompute_s"),
            tensor_forward_s=take("tensor_forward_s"),
            tensor_backward_s=take("tensor_backward_s"),
            context_forward_s=take("context_forward_s"),
            context_backward_s=take("context_backward_s"),
            expert_forward_s=take("expert_forward_s"),
            expert_backward_s=take("expert_backward_s"),
            data_forward_s=np.asarray(exposed_s(in_forward, forward, software)),
            data_backward_s=np.asarray(exposed_s(in_backward, backward, software)),
            weight_s=take("weight_gradient_s") + accumulation + twice,
        )

    def state_bytes(self, layout: Layout, trainable: float, frozen: float, experts: float = 0.0) -> StateBytes:
        """Bytes of states that one rank holds for so many elements of the tp rank's parameters.

        ``experts``: of the trainable ones, those that expert parallelism divides.
        """
        ep = layout.mesh.ep
        if ep == 1:
            return self._state_bytes(layout, trainable, frozen)
        dense = self._state_bytes(layout, trainable - experts, frozen)
        return dense.plus(self._state_bytes(layout, experts / ep, 0.0, ep))

    def _state_bytes(self, layout: Layout, trainable: float, frozen: float, ep: int = 1) -> StateBytes:
        mesh = layout.mesh
        return state_bytes(
            trainable,
            num_frozen=frozen,
            precision=self.training.precision.value,
            optimizer=self.training.optimizer.value,
            zero_stage=layout.zero_stage,
            num_shards=max(1, num_shards(layout) // ep),
            facts=self.recipe.state,
            is_replicated=mesh.dp > 1 and mesh.dp * mesh.cp > ep,
            on_host=layout.offload is not Offload.NONE,
        )

    def host_states(self, layout: Layout, trainable: float, frozen: float, experts: float = 0.0) -> HostStates:
        """What one rank that offloads keeps on its host for so many elements of the tp rank's parameters."""
        kept = self.state_bytes(layout._replace(offload=Offload.NONE), trainable, frozen, experts).optimizer
        return host_states(kept, num_updated(layout, trainable, experts), self.training, layout.offload)

    def download_s(self, num_elements: float, offload: Offload) -> float:
        """Seconds until so many elements' gradients are on the host, where all ranks of a node have as many."""
        cluster = self.cluster
        work = host_work(num_elements, self.training, offload)
        return download_s(work, cluster.profile.node, cluster.devices_per_node)

    def update_s(self, num_elements: float, offload: Offload = Offload.NONE) -> float:
        """Seconds of the optimiser step over so many elements on one rank, where all its node's ranks have as many."""
        if offload is not Offload.NONE:
            cluster = self.cluster
            work = host_work(num_elements, self.training, offload)
            return host_update_s(work, cluster.profile.node, cluster.devices_per_node)
        device = self.cluster.profile.device
        return optimizer_step_s(
            num_elements, self.training.optimizer.value, device, self.recipe.update_extra_bytes.value
        )

    @property
    def software(self) -> SoftwareProfile:
        """The cluster's software."""
        return self.cluster.profile.software

    @property
    def capacity_bytes(self) -> float:
        """Memory of one device."""
        return self.cluster.profile.device.memory_bytes.value

    def of_ranks(self, layout: Layout) -> tuple[CostTable, ...]:
        """The table of each pipeline rank's devices."""
        pp = layout.mesh.pp
        if not layout.groups:
            return (self,) * pp
        each = self.cluster.num_devices // pp
        tables = (self.groups[name] for name in layout.groups)
        return tuple(table for table in tables for _ in range(table.cluster.num_devices // each))

    def send_s(self, layout: Layout) -> tuple[float, ...]:
        """One micro-batch's activations from each pipeline stage to the next."""
        num_borders = layout.mesh.pp * layout.virtual_stages - 1
        if num_borders == 0:
            return ()
        lines = self.send_lines(layout)
        num_bytes = max(c.boundary_bytes for c in self.costs[CostKey.of(layout)])
        ways = [latency_s + s_per_byte * num_bytes for latency_s, s_per_byte in lines]
        return tuple(ways) if layout.groups else (ways[0],) * num_borders

    def send_lines(self, layout: Layout) -> tuple[tuple[float, float], ...]:
        """Latency and seconds per byte from each pipeline rank to the next."""
        pp, mixed = layout.mesh.pp, self.cluster.mixed
        if pp == 1:
            return ()
        if not layout.groups or mixed is None:
            return (self.send_line(pp),) * (pp - 1)
        each = self.cluster.num_devices // pp
        lines: list[tuple[float, float]] = []
        for place, name in enumerate(layout.groups):
            table = self.groups[name]
            if place > 0:
                before = layout.groups[place - 1]
                way = line_between(self.groups[before].cluster, table.cluster, mixed.link(before, name), each)
                lines.append(way)
            num_ranks = table.cluster.num_devices // each
            lines += [table.send_line(num_ranks)] * (num_ranks - 1) if num_ranks > 1 else []
        return tuple(lines)

    def send_line(self, pp: int) -> tuple[float, float]:
        """Latency and seconds per byte from one pipeline rank to the next."""
        (line,) = self._lines_of(CollectiveKind.SEND_RECV, GroupPlacement(pp, self.cluster.num_devices // pp))
        return line


def num_shards(layout: Layout) -> int:
    """Ranks over which ZeRO divides: those that shard data and, since their gradients agree, those of context."""
    return layout.mesh.dp_shard * layout.mesh.cp if layout.zero_stage else 1


def num_updated(layout: Layout, trainable: float, experts: float) -> float:
    """Elements that one rank's optimiser updates, of so many that a tp rank trains, experts' among them.

    ZeRO divides dense ones over all its ranks, and a rank's experts over 1 / ep of them: each rank gets as many.
    """
    if layout.zero_stage:
        return trainable / num_shards(layout)
    return held_elements(trainable, experts, layout.mesh.ep)
