"""Times of one micro-batch in every kind of unit, for many layouts; communication counts with its exposed time."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property, lru_cache, partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from costmodels.overlap import Overlap, exposed_s
from costmodels.vocabulary.choices import Offload, Recompute
from costmodels.vocabulary.mesh import ZERO_STAGES, Mesh
from costmodels.vocabulary.schedules import ScheduleName
from costmodels.vocabulary.terms import PLACE, Data, Pass, Term, Time
from planner.evaluation.block_modes import MODES, bytes_on_host, in_table, is_on_host, places_of_modes
from planner.evaluation.software import num_communicators
from planner.layout.columns import Array, Columns, Positions, key_of
from planner.layout.layout import Layout
from planner.table.cost_table import CostTable
from planner.table.keys import DataKey, StateKey, TensorSplit, WorkKey

_EXCHANGES = [PLACE[Time.EXPERT_FORWARD], PLACE[Time.EXPERT_BACKWARD]]
_SHARDS_GRADIENTS = np.array([stage.shards_gradients for stage in ZERO_STAGES])
_SHARDS_PARAMETERS = np.array([stage.shards_parameters for stage in ZERO_STAGES])


class _ModeKey(NamedTuple):
    recompute: Recompute | None


def _mode_of(key: _ModeKey) -> int:
    """The mode of every block; where each block has its own, the one that takes least time."""
    return MODES[key.recompute or Recompute.NONE]


class _ScheduleKey(NamedTuple):
    schedule: ScheduleName


class _MeshKey(NamedTuple):
    mesh: Mesh


class _LifetimesKey(NamedTuple):
    pp: int
    tp: int
    cp: int
    ep: int


def _mixes_lifetimes(key: _LifetimesKey) -> bool:
    """A pipeline keeps several micro-batches in flight; the other axes split or gather activations."""
    return key.pp * key.tp * key.cp * key.ep > 1


class _BesideKey(NamedTuple):
    schedule: ScheduleName
    pp: int
    ep: int
    zero_stage: int


class _ShardedKey(NamedTuple):
    zero_stage: int
    offload: Offload


def _hides_exchanges(table: CostTable, key: _BesideKey) -> bool:
    """What ZeRO gathers or reduces in every micro-batch hides behind the same compute, and there is one of that."""
    framework = table.framework
    under = key.schedule in framework.exchanges_hide_under
    beside = key.ep > 1 and (under if key.pp > 1 else framework.exchanges_hide_without_pipeline)
    return beside and not ZERO_STAGES[key.zero_stage].shards_gradients


@dataclass(frozen=True)
class LayoutRows:
    """For each of many layouts the table's rows with its prices, and the choices that say how to add them up.

    One entry a layout.
    """

    work: Positions
    mode: Positions
    data: Positions
    split: Positions
    state: Positions
    zero_stage: Positions
    num_microbatches: Array
    splits_backward: NDArray[np.bool]
    is_sharded: NDArray[np.bool]  # parameters have hooks of the framework's around them
    num_shards: Array
    expert_parts: Array
    hides_exchanges: NDArray[np.bool]  # of experts, beside passes of other micro-batches
    mixes_lifetimes: NDArray[np.bool]  # tensors that come and go have several lifetimes: pipeline, splits or gathers
    num_communicators: Array

    @staticmethod
    def of(table: CostTable, layouts: Columns[Layout]) -> LayoutRows:
        """The rows of ``layouts``; KeyError for a layout that ``table`` has no prices of."""
        work, work_of = layouts.by(WorkKey)
        data, data_of = layouts.by(DataKey)
        splits, split_of = layouts.by(TensorSplit)
        states, state_of = layouts.by(StateKey)
        return LayoutRows(
            work=table.work_rows(work)[work_of],
            mode=layouts.each(_ModeKey, _mode_of).astype(np.intp),
            data=table.data_rows(data)[data_of],
            split=table.split_rows(splits)[split_of],
            state=table.state_rows(states)[state_of],
            zero_stage=layouts.numbers("zero_stage").astype(np.intp),
            num_microbatches=layouts.numbers("num_microbatches"),
            splits_backward=layouts.each(_ScheduleKey, lambda key: key.schedule.rules.splits_backward).astype(bool),
            is_sharded=layouts.each(_ShardedKey, lambda key: table.framework.shards(*key)).astype(bool),
            num_shards=layouts.numbers("num_shards"),
            expert_parts=layouts.numbers("expert_parts"),
            hides_exchanges=layouts.each(_BesideKey, partial(_hides_exchanges, table)).astype(bool),
            mixes_lifetimes=layouts.each(_LifetimesKey, _mixes_lifetimes).astype(bool),
            num_communicators=layouts.each(_MeshKey, lambda key: num_communicators(table, key.mesh)),
        )

    @staticmethod
    def of_one(table: CostTable, layout: Layout) -> LayoutRows:
        """The rows of a single layout, without columns of it: of its work, one for each mode by its place."""
        places = places_of_modes(None, offloads_activations=layout.offloads_activations)
        rows = (
            np.repeat(table.work_rows([key_of(WorkKey, layout)]), len(places)),
            np.array(places),
            table.data_rows([key_of(DataKey, layout)]),
            table.split_rows([key_of(TensorSplit, layout)]),
            table.state_rows([key_of(StateKey, layout)]),
            np.array([layout.zero_stage]),
        )
        return LayoutRows(
            *rows,
            num_microbatches=np.array([layout.num_microbatches], dtype=np.float64),
            splits_backward=np.array([layout.schedule.rules.splits_backward]),
            is_sharded=np.array([table.framework.shards(layout.zero_stage, layout.offload)]),
            num_shards=np.array([layout.mesh.num_shards], dtype=np.float64),
            expert_parts=np.array([layout.mesh.expert_parts], dtype=np.float64),
            hides_exchanges=np.array([_hides_exchanges(table, key_of(_BesideKey, layout))]),
            mixes_lifetimes=np.array([_mixes_lifetimes(key_of(_LifetimesKey, layout))]),
            num_communicators=np.array([num_communicators(table, layout.mesh)]),
        )

    def take(self, places: Positions) -> LayoutRows:
        """Those of some of the layouts."""
        return _SomeRows(self, places)

    def in_modes(self, modes: Positions) -> LayoutRows:
        """The same layouts in other modes."""
        return replace(self, mode=modes)

    def unlike(self) -> tuple[Positions, Positions]:
        """One layout of each that differ in what ``unit_times`` reads, and which of these every layout is like."""
        combined = np.zeros(len(self.work), dtype=np.int64)
        for column in (
            self.work, self.mode, self.data, self.zero_stage, self.num_microbatches > 1, self.splits_backward,
            self.is_sharded, self.hides_exchanges,
        ):  # fmt: skip
            combined = combined * (int(column.max(initial=0)) + 1) + column
        numbers, like = np.unique(combined, return_inverse=True)
        found = np.empty(len(numbers), dtype=np.intp)
        found[like] = np.arange(len(like))  # any of those that are alike
        return found, like


class _SomeRows(LayoutRows):
    """Of some of many layouts; each kind of entries is looked up when it is asked for first."""

    def __init__(self, of: LayoutRows, places: Positions) -> None:
        self.__dict__.update(_of=of, _places=places)

    def __getattr__(self, name: str) -> Any:
        found = self.__dict__[name] = getattr(self.__dict__["_of"], name).take(self.__dict__["_places"])
        return found

    def take(self, places: Positions) -> LayoutRows:
        own = self.__dict__
        return _SomeRows(own["_of"], own["_places"].take(places))

    def in_modes(self, modes: Positions) -> LayoutRows:
        found = _SomeRows(self.__dict__["_of"], self.__dict__["_places"])
        found.__dict__.update(self.__dict__, mode=modes)
        return found


@dataclass(frozen=True)
class UnitTimes:
    """Seconds of one micro-batch through each unit kind, [layouts, kinds, ...].

    ``time_s``: by ``Time``, where compute holds besides what the layout adds to it: what hooks of sharded parameters
    take of the host where this has no time to spare, and backward also adding up gradients and kernels that run twice
    in split backward passes. ``data_s``: communication of data parallelism that stays exposed,
    forward and backward. ``weight_s``: part of the backward pass that a schedule which splits it runs later.
    ``exchanges_s``: forward and backward, exchanges of experts that may run beside another micro-batch, nothing hidden;
    ``time_s`` has what is left of them where all are hidden. ``offload_s``: copies of activations to the host and back
    that stay exposed, forward and backward.
    """

    time_s: Array
    data_s: Array
    weight_s: Array
    exchanges_s: Array
    offload_s: Array

    def term_s(self, term: Term, run: Pass) -> Array:
        """One term of one pass, [layouts, kinds]."""
        if term in (Term.DATA, Term.OFFLOAD):
            return (self.data_s if term is Term.DATA else self.offload_s)[..., 0 if run is Pass.FORWARD else 1]
        return self.time_s[..., _places_of(run, (term,))].sum(axis=-1)

    @cached_property
    def forward_s(self) -> Array:
        """The forward pass, everything included."""
        return self._of_pass(Pass.FORWARD, but=()) + self._moved_s[..., 0]

    @cached_property
    def backward_s(self) -> Array:
        """The backward pass, everything included."""
        return self._of_pass(Pass.BACKWARD, but=()) + self._moved_s[..., 1]

    @cached_property
    def exposed_forward_s(self) -> Array:
        """What compute does not hide of all communication in forward."""
        return self._of_pass(Pass.FORWARD, but=(Term.COMPUTE, Term.RECOMPUTE)) + self._moved_s[..., 0]

    @cached_property
    def exposed_backward_s(self) -> Array:
        """What compute does not hide of all communication in backward."""
        return self._of_pass(Pass.BACKWARD, but=(Term.COMPUTE, Term.RECOMPUTE)) + self._moved_s[..., 1]

    @cached_property
    def compute_forward_s(self) -> Array:
        """Compute alone, forward: what communication hides behind, without what hides the unit's own already."""
        return _free_forward_s(self.time_s)

    @cached_property
    def compute_backward_s(self) -> Array:
        """The same backward, with what is recomputed."""
        return _free_backward_s(self.time_s)

    @cached_property
    def _moved_s(self) -> Array:
        """States and activations, exposed; forward and backward."""
        return self.data_s + self.offload_s

    def _of_pass(self, run: Pass, but: tuple[Term, ...]) -> Array:
        return self.time_s[..., _places_of(run, tuple(term for term in Term if term not in but))].sum(axis=-1)


@lru_cache(maxsize=64)
def _places_of(run: Pass, terms: tuple[Term, ...]) -> list[int]:
    """Of the times of one pass that these terms count."""
    return [PLACE[time] for time in Time if time.term in terms and time.runs_in is run]


def unit_times(table: CostTable, rows: LayoutRows, device: int) -> UnitTimes:
    """Times of ``rows`` on the devices at place ``device``.

    ZeRO 3 gathers parameters in forward and again in backward; from ZeRO 2 on gradients are reduced in every
    micro-batch, and before it they are added up.
    """
    time_s = table.time_s[device][rows.work, in_table(rows.mode)]
    data = data_times(table, rows, device)
    zero = rows.zero_stage[:, None]
    adds_up = ~_SHARDS_GRADIENTS[zero] & (rows.num_microbatches[:, None] > 1)
    accumulation = np.where(adds_up, data[..., PLACE[Data.ACCUMULATE]], 0.0)
    twice = np.where(rows.splits_backward[:, None], time_s[..., PLACE[Time.SPLIT_EXTRA]], 0.0)
    time_s[..., PLACE[Time.COMPUTE_FORWARD]] += _hooks_s(table, rows, Pass.FORWARD, time_s)
    time_s[..., PLACE[Time.COMPUTE_BACKWARD]] += accumulation + twice + _hooks_s(table, rows, Pass.BACKWARD, time_s)
    in_forward = np.where(_SHARDS_PARAMETERS[zero], data[..., PLACE[Data.GATHER]], 0.0)
    in_backward = in_forward + np.where(_SHARDS_GRADIENTS[zero], data[..., PLACE[Data.REDUCE]], 0.0)
    if table.framework.gathers_to_recompute:
        in_backward = in_backward + in_forward * (time_s[..., PLACE[Time.RECOMPUTE]] > 0)
    overlap = table.cluster.devices[device].overlap
    passes = ((in_forward, _free_forward_s(time_s)), (in_backward, _free_backward_s(time_s)))
    hides = table.framework.overlaps_micro_batches
    exposed = [exposed_s(moved_s, compute_s if hides else 0 * compute_s, overlap) for moved_s, compute_s in passes]
    offloaded = [_copies_s(table, rows, moved_s, compute_s, overlap.fraction) for moved_s, compute_s in passes]
    weight_s = time_s[..., PLACE[Time.WEIGHT_GRADIENT]] + accumulation + twice
    hidden = time_s[..., _EXCHANGES] * rows.hides_exchanges[:, None, None]
    if rows.hides_exchanges.any():
        time_s[..., _EXCHANGES] -= hidden * max(0.0, 1 - overlap.slowdown)
    return UnitTimes(time_s, np.stack(exposed, axis=-1), weight_s, hidden, np.stack(offloaded, axis=-1))


def _copies_s(table: CostTable, rows: LayoutRows, moved_s: Array, compute_s: Array, fraction: float) -> Array:
    """What stays exposed of one pass's copies of activations between device and host, [layouts, kinds].

    A unit's copies run beside its own pass alone, behind the compute that hides nothing of data parallelism: at most
    ``fraction`` of ``compute_s``, less ``moved_s``. Where exchanges of experts hide behind that compute, copies do not.
    """
    copies = table.cluster.copies
    if copies is None or not is_on_host(rows.mode).any():
        return np.zeros_like(compute_s)
    copied_s = bytes_on_host(table, rows.work, rows.mode) * copies.s_per_byte
    free_s = np.maximum(0.0, fraction * compute_s - moved_s) * ~rows.hides_exchanges[:, None]
    return exposed_s(copied_s, free_s, Overlap(1.0, copies.slowdown))


def _hooks_s(table: CostTable, rows: LayoutRows, run: Pass, time_s: Array) -> Array:
    """Seconds by which hooks of sharded parameters delay one pass, where the host has this to spare: ``time_s``."""
    hooks = table.framework.hooks
    if hooks is None:
        return np.zeros(1)
    zero, is_forward = rows.zero_stage, run is Pass.FORWARD
    each_s = (hooks.forward_s if is_forward else hooks.backward_s) + hooks.gather_s * _SHARDS_PARAMETERS[zero]
    if not is_forward:
        each_s = each_s + hooks.reduce_s * _SHARDS_GRADIENTS[zero]
    spare = PLACE[Time.SPARE_FORWARD if is_forward else Time.SPARE_BACKWARD]
    return np.maximum(0.0, (each_s * rows.is_sharded)[:, None] - time_s[..., spare])


def most_hooks_s(table: CostTable) -> tuple[float, float]:
    """The most that hooks of sharded parameters take of the host in a unit, forward and backward, in any layout."""
    hooks = table.framework.hooks
    if hooks is None:
        return 0.0, 0.0
    return hooks.forward_s + hooks.gather_s, hooks.backward_s + hooks.gather_s + hooks.reduce_s


def _free_forward_s(time_s: Array) -> Array:
    return time_s[..., PLACE[Time.COMPUTE_FORWARD]] - time_s[..., PLACE[Time.HIDING_FORWARD]]


def _free_backward_s(time_s: Array) -> Array:
    compute_s = time_s[..., PLACE[Time.COMPUTE_BACKWARD]] + time_s[..., PLACE[Time.RECOMPUTE]]
    return compute_s - time_s[..., PLACE[Time.HIDING_BACKWARD]]


@dataclass(frozen=True)
class Hiding:
    """At most so much compute of one micro-batch hides what happens once a step, whatever is recomputed."""

    table: CostTable
    device: int

    @cached_property
    def _of_work(self) -> tuple[Array, Array, Array]:
        """Forward and backward, and the least that is spare, of every row of the table's work; [rows, kinds, ...]."""
        time_s = self.table.time_s[self.device]
        backward_s = _free_backward_s(time_s) + time_s[..., PLACE[Time.SPLIT_EXTRA]]
        return _free_forward_s(time_s).max(axis=1), backward_s.max(axis=1), time_s.min(axis=1)

    def of(self, rows: LayoutRows) -> tuple[Array, Array]:
        """Of layouts, forward and backward; [layouts, kinds]."""
        forward_s, backward_s, least_spare = (each[rows.work] for each in self._of_work)
        late = [_hooks_s(self.table, rows, run, least_spare) for run in Pass]
        accumulation = data_times(self.table, rows, self.device)[..., PLACE[Data.ACCUMULATE]]
        return forward_s + late[0], backward_s + accumulation + late[1]


def data_times(table: CostTable, rows: LayoutRows, device: int) -> Array:
    """Gathers, reductions and sums of gradients once each, nothing hidden, [layouts, kinds, Data]."""
    return table.data_s[device][rows.data]
