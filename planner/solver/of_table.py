"""What bounds ask of the rows of one cost table, worked out once for all layouts that are alike."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from costmodels.overlap import exposed_s, least_exposing
from costmodels.vocabulary.mesh import ZERO_STAGES
from costmodels.vocabulary.terms import PLACE, Data, Element, Holding
from planner.evaluation.block_modes import held_bytes
from planner.evaluation.unit_times import Hiding, LayoutRows, data_times, unit_times
from planner.layout.columns import Array, Positions
from planner.layout.short_rows import largest_of_each
from planner.table.cost_table import CostTable

# Layouts whose units are timed at once.
CHUNK = 8_000

_TRAINABLE, _FROZEN, _TIED, _EXPERT = range(len(Element))
_SHARDS_OPTIMIZER = np.array([stage.shards_optimizer for stage in ZERO_STAGES])
_SHARDS_GRADIENTS = np.array([stage.shards_gradients for stage in ZERO_STAGES])
_SHARDS_PARAMETERS = np.array([stage.shards_parameters for stage in ZERO_STAGES])


@dataclass(frozen=True)
class UnitPasses:
    """``forward_s``, ``backward_s`` and ``weight_s`` of ``unit_times``, of many layouts that are mostly alike."""

    unlike_s: Array  # [forward backward weight, layouts of which no two are alike, kinds]
    unlike_work_s: Array  # forward and backward
    unlike_data_s: Array  # what ``data_once_s`` says of these
    like: Positions  # which of these each layout is like

    def take(self, places: Positions) -> UnitPasses:
        """Those of some of the layouts."""
        return UnitPasses(self.unlike_s, self.unlike_work_s, self.unlike_data_s, self.like.take(places))

    @cached_property
    def forward_s(self) -> Array:
        """The forward pass, everything included, [layouts, kinds]."""
        return self.unlike_s[0].take(self.like, axis=0)

    @cached_property
    def backward_s(self) -> Array:
        """The backward pass, everything included, [layouts, kinds]."""
        return self.unlike_s[1].take(self.like, axis=0)

    @cached_property
    def weight_s(self) -> Array:
        """Part of the backward pass that a schedule which splits it runs later, [layouts, kinds]."""
        return self.unlike_s[2].take(self.like, axis=0)

    @cached_property
    def work_s(self) -> Array:
        """Both passes, everything included, [layouts, kinds]."""
        return self.unlike_work_s.take(self.like, axis=0)

    @property
    def data_once_s(self) -> Array:
        """Exposed communication of data parallelism once a step, of a rank that holds all units; [layouts]."""
        return self.unlike_data_s.take(self.like)


def by_kind(elements: Array) -> Array:
    """[..., KindOfElement] of [..., Element]."""
    dense = elements[..., _TRAINABLE] - elements[..., _EXPERT]
    return np.stack([dense, elements[..., _FROZEN], elements[..., _EXPERT]], axis=-1)


class OfTable:
    """Of one table."""

    def __init__(self, table: CostTable) -> None:
        self.table = table
        self._held: dict[tuple[int, ...], Array] = {}
        self._sent: dict[tuple[int, ...], Array] = {}
        self._hidings: dict[int, Hiding] = {}

    def held(self, modes: tuple[int, ...]) -> Array:
        """The least that units hold in any of these modes, [rows of work, kinds, Holding]."""
        if modes not in self._held:
            every = np.arange(len(self.table.work_keys))
            each = [held_bytes(self.table, every, np.full_like(every, mode)) for mode in modes]
            self._held[modes] = np.min(each, axis=0)
        return self._held[modes]

    @cached_property
    def elements_by_kind(self) -> Array:
        """Parameters of each kind of units on one tensor-parallel rank, [splits, kinds, KindOfElement]."""
        return by_kind(self.table.elements)

    @cached_property
    def whole_elements(self) -> Array:
        """Those of all units together, [splits, Element]."""
        return np.einsum("lke,k->le", self.table.elements, self.table.counts)

    def most_sent_bytes(self, modes: tuple[int, ...]) -> Array:
        """The most that any unit then sends to the next, [rows of work]."""
        if modes not in self._sent:
            self._sent[modes] = largest_of_each(self.held(modes)[..., PLACE[Holding.BOUNDARY]])
        return self._sent[modes]

    def passes(self, rows: LayoutRows, device: int = 0) -> UnitPasses:
        """Of units of these layouts on the devices at place ``device``."""
        first, like = rows.unlike()
        unlike_s, data_s = np.empty((3, len(first), len(self.table.counts))), np.empty(len(first))
        for start in range(0, len(first), CHUNK):
            part = slice(start, start + CHUNK)
            of_part = rows.take(first[part])
            times = unit_times(self.table, of_part, device)
            unlike_s[:, part] = times.forward_s, times.backward_s, times.weight_s
            data_s[part] = self.data_once_s(of_part, [device])
        return UnitPasses(unlike_s, unlike_s[0] + unlike_s[1], data_s, like)

    def data_once_s(self, rows: LayoutRows, devices: Sequence[int]) -> Array:
        """Exposed communication of data parallelism once a step, of a rank that holds all units; [layouts].

        No more than on any of the ``devices``, at these places, nor of units that are divided among them: with the
        least communication that they have, and the most compute that hides most of it.
        """
        framework, counts, zero = self.table.framework, self.table.counts, rows.zero_stage
        data = np.min([data_times(self.table, rows, device) for device in devices], axis=0)
        spare_s = np.max([self._hiding(device).of(rows) for device in devices], axis=0)
        forward_s, backward_s = (each @ counts for each in spare_s)
        once, each, gather_s = (data[..., PLACE[i]] @ counts for i in (Data.REPLICAS, Data.REDUCE, Data.GATHER))
        reduce_s = np.where(_SHARDS_GRADIENTS[zero], once, each)
        overlap = least_exposing([self.table.cluster.devices[device].overlap for device in devices])
        may_hide = np.where(rows.is_sharded, framework.overlaps_reduction, framework.overlaps_whole_reduction)
        hides = may_hide & ~rows.splits_backward
        reduce_s = np.where(hides, exposed_s(reduce_s, backward_s, overlap), reduce_s)
        if framework.overlaps_gather:
            gather_s = exposed_s(gather_s, forward_s, overlap)
        gathers = _SHARDS_OPTIMIZER[zero] & ~_SHARDS_PARAMETERS[zero]
        return reduce_s + np.where(gathers, gather_s, 0.0)

    def _hiding(self, device: int) -> Hiding:
        return self._hidings.setdefault(device, Hiding(self.table, device))
