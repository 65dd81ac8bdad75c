"""Lower bounds of the memory of many layouts at once, and of what their blocks must recompute to fit.

However a layout is cut into stages, and whatever each of its blocks recomputes, it needs and takes no less.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Literal, NamedTuple, Self, TypeAlias

import numpy as np
from numpy.typing import NDArray

from costmodels.vocabulary.choices import Offload, Recompute
from costmodels.vocabulary.mesh import ZERO_STAGES
from costmodels.vocabulary.schedules import ScheduleName
from costmodels.vocabulary.terms import PLACE, Element, Holding
from planner.evaluation.block_modes import bytes_on_host, places_of_modes
from planner.evaluation.cuts import stage_sizes
from planner.evaluation.layout_units import device_places
from planner.evaluation.rank_memory import BLOCKS_IN_TRANSIT
from planner.evaluation.software import reserve_fraction
from planner.evaluation.states import held_elements
from planner.evaluation.unit_times import LayoutRows, unit_times
from planner.layout.columns import Array, Columns, Positions
from planner.layout.layout import Layout
from planner.layout.short_rows import least_of_each
from planner.solver.flying import Counted, means_by_kind
from planner.solver.least_extra import least_extra_s
from planner.solver.of_table import OfTable, UnitPasses

_TRAINABLE, _FROZEN, _TIED, _EXPERT = range(len(Element))
_PARAMETERS, _GRADIENTS, _OPTIMIZER = range(3)  # of the last axis of the table's ``state_bytes``
_SHARDS_PARAMETERS = np.array([stage.shards_parameters for stage in ZERO_STAGES])
# Rounds of micro-batches that are counted to find the peak of a rank of several stages; too few count too little.
MOST_ROUNDS = 3

Flags: TypeAlias = NDArray[np.bool]


class AlikeKey(NamedTuple):
    """Layouts whose pipelines have one shape are bounded together."""

    schedule: ScheduleName
    pp: int
    virtual_stages: int
    offload: Offload
    groups: tuple[str, ...]
    recompute: Recompute | None
    offloads_activations: bool


class NumMicroBatches(NamedTuple):
    """What is worked out once for each number of micro-batches."""

    num_microbatches: int


class AlikeMemory:
    """Layouts with the same schedule, pipeline degree, number of virtual stages, offload and order of groups.

    Arrays have the axes [layouts, kinds of units], or the first alone.
    """

    def __init__(
        self,
        of_table: OfTable,
        key: AlikeKey,
        layouts: Columns[Layout],
        rows: LayoutRows,
        passes: UnitPasses,
        *,
        is_at_peak: bool = False,
    ) -> None:
        """``passes``: of units on the first devices of the table. ``is_at_peak``: see ``at_peak``."""
        self._is_at_peak = is_at_peak
        self._of_table, self.table, table = of_table, of_table.table, of_table.table
        self._key, self.layouts, self.rows, self.times = key, layouts, rows, passes
        self.schedule, self.pp, self.virtual_stages = key.schedule, key.pp, key.virtual_stages
        self.offload, self.num_microbatches = key.offload, rows.num_microbatches
        self.counts = table.counts
        self.work_s = self.times.work_s
        self.modes = places_of_modes(key.recompute, offloads_activations=key.offloads_activations)
        self.places = device_places(table, layouts[0])
        # Each device's memory over that of the smallest. Bytes on a larger device count for less by this factor.
        memory = [table.cluster.devices[place].memory_bytes for place in self.places]
        self._room = np.array(memory) / table.cluster.devices[0].memory_bytes

    @property
    def is_over_groups(self) -> bool:
        """Whether each rank has devices of its own kind."""
        return bool(self._key.groups)

    @property
    def has_alike_stages(self) -> bool:
        """As ``Layout.has_alike_stages``."""
        return self.virtual_stages > 1 and not self.is_over_groups

    @property
    def memory_of_ranks(self) -> Array:
        """What a plan may take of a device of each rank."""
        return self._room * self.table.cluster.devices[0].memory_bytes

    def _parts_of(self, places: Positions) -> tuple[OfTable, AlikeKey, Columns[Layout], LayoutRows, UnitPasses]:
        """What some of the layouts are made of."""
        rows, passes = self.rows.take(places), self.times.take(places)
        return self._of_table, self._key, self.layouts.take(places), rows, passes

    @cached_property
    def least_held(self) -> Array:
        """The least of every mode, [layouts, kinds, Holding]."""
        return self._of_table.held(tuple(self.modes)).take(self.rows.work, axis=0)

    @property
    def offloads_activations(self) -> bool:
        """Whether each block may keep its activations in host memory."""
        return self._key.offloads_activations

    def _held_in(self, mode: int) -> Array:
        """What units hold where all blocks are in one mode, [layouts, kinds, Holding]."""
        return self._of_table.held((mode,)).take(self.rows.work, axis=0)

    @cached_property
    def elements(self) -> Array:
        """Parameters of each kind on one tensor-parallel rank, [layouts, kinds, Element]."""
        return self.table.elements.take(self.rows.split, axis=0)

    # -- memory -------------------------------------------------------------------------------

    def memory_bytes(self) -> Array:
        """The fullest rank's states and activations, with the allocator's reserve and what lies outside it.

        Of the working set only the least over all kinds is counted: some unit is at work on every rank.
        """
        least = self.least_of_units @ self.counts + self._besides
        return self._at_peak_too(least, lambda at_peak: at_peak.memory_bytes())

    @cached_property
    def least_of_units(self) -> Array:
        """What a unit of each kind adds at least to the mean of the ranks, in any mode, [layouts, kinds]."""
        return self._least(self.least_held)

    @property
    def most_room(self) -> float:
        """The largest device's memory over that of the smallest."""
        return float(self._room.max())

    @cached_property
    def _besides(self) -> Array:
        working = least_of_each(self.least_held[..., PLACE[Holding.WORKING]])
        return (working * self.reserve + self.outside_bytes) / self.most_room

    @cached_property
    def outside_bytes(self) -> Array:
        """What a rank takes that holds nothing: communicators, the context and the workspace."""
        software = self.table.cluster.software
        communicators = self.rows.num_communicators * software.communicator_bytes
        return communicators + software.context_bytes + software.workspace_bytes

    @cached_property
    def reserve(self) -> Array:
        """Bytes that a byte of tensors that come and go takes, with the allocator's reserve."""
        return 1 + reserve_fraction(self.table, self.rows.mixes_lifetimes)

    @cached_property
    def recomputed_s(self) -> Array:
        """Seconds that all blocks must recompute of one micro-batch so that ranks have memory at every moment.

        Over groups on devices as the weakest, so on faster ones that is no bound.
        """
        return self._at_peak_too(self._recomputed_then_s, lambda at_peak: at_peak._recomputed_then_s)

    @cached_property
    def _recomputed_then_s(self) -> Array:
        if self._key.offloads_activations and len(self.modes) > 1:
            return self.likely_s if self.pp == 1 else self._partly_on_host_s
        return self._least_extra_then(None)

    def least_extra(self, extra: Array) -> Array:
        """``recomputed_s`` where units take ``extra`` more of anything in each mode, [modes, layouts, kinds]."""
        places = self.with_two_moments
        of_lowest = self._least_extra_then(extra)
        return self._at_peak_too(of_lowest, lambda at_peak: at_peak._least_extra_then(extra[:, places]))

    @property
    def lacks_memory(self) -> Flags:
        """Whether some blocks must recompute at any moment."""
        return self._at_peak_too(self._lacking, lambda at_peak: at_peak._lacking) > 0

    def _least_extra_then(self, given: Array | None) -> Array:
        """What blocks take more so that the mean of ``_least`` stays in memory: as ``given``, else seconds.

        Of each kind, parts of blocks may change their mode: first those that save most bytes a second. Blocks that
        cannot be parted take no less.
        Example: six units of 1 s whose mean is 12 GiB where 9 fit. A unit saves 1 GiB for 0.3 s, or 1.5 GiB for 0.9 s:
        three units recompute the first way, 0.9 s.
        """
        if len(self.modes) == 1:
            return np.zeros(len(self.num_microbatches))
        lacking = self._lacking
        short = np.flatnonzero(lacking > 0)
        if len(short) < len(lacking):
            found = np.zeros(len(lacking))
            if len(short):
                part = AlikeMemory(*self._parts_of(short), is_at_peak=self._is_at_peak)
                found[short] = part._least_extra_then(None if given is None else given[:, short])
            return found
        saved, extra = self._saved, self.extra_s_on(0) if given is None else given
        with np.errstate(divide="ignore", invalid="ignore"):
            few, many = (np.where(saved[q] > 0, extra[q] / saved[q], np.inf) for q in (1, 2))
            both = few <= many
            # Steps from no recomputation to the cheaper mode a byte, and from there to what saves more.
            first = np.where(both, saved[1], saved[2]), np.where(both, few, many)
            more = np.where(both, np.maximum(0.0, saved[2] - saved[1]), 0.0)
            second = more, np.where(more > 0, (extra[2] - extra[1]) / more, np.inf)
        sizes = np.concatenate([first[0] * self.counts, second[0] * self.counts], axis=1)
        rates = np.concatenate([first[1], np.maximum(second[1], 0.0)], axis=1)
        order = np.argsort(rates, axis=1)
        sizes, rates = np.take_along_axis(sizes, order, axis=1), np.take_along_axis(rates, order, axis=1)
        before = np.cumsum(sizes, axis=1) - sizes
        taken = np.clip(lacking[:, None] - before, 0.0, sizes)
        return (taken * np.where(taken > 0, rates, 0.0)).sum(axis=1)

    @cached_property
    def _saved(self) -> Array:
        """Bytes that a unit in each mode saves of the mean of ``_least``, [modes, layouts, kinds]."""
        least = [self._of_first_mode, *(self._least(self._held_in(mode)) for mode in self.modes[1:])]
        return np.array([np.maximum(0.0, least[0] - each) for each in least])

    def extra_s_on(self, place: int) -> Array:
        """Seconds that a unit in each mode takes more on the devices at ``place``, [modes, layouts, kinds]."""
        rows = self.rows
        times = [unit_times(self.table, rows.in_modes(np.full_like(rows.mode, mode)), place) for mode in self.modes]
        work = [each.forward_s + each.backward_s for each in times]
        return np.array([np.maximum(0.0, each - work[0]) for each in work])

    @cached_property
    def _of_first_mode(self) -> Array:
        return self._least(self._held_in(self.modes[0]))

    @cached_property
    def _lacking(self) -> Array:
        """Bytes that the mean of ``_least`` is above a device's memory if no block recomputes anything."""
        return self._of_first_mode @ self.counts + self._besides - self.table.cluster.devices[0].memory_bytes

    @cached_property
    def likely_s(self) -> Array:
        """What blocks take more so that ranks fit that all hold about the same; infinite where they cannot.

        Either nothing lies on the host, or it is copied in one way, for which each rank has buffers. Without a pipeline
        the one rank takes no less.
        """
        saved, extra, lacking = self._saved, self.extra_s_on(0), self._lacking
        here = len(self.modes) // 2
        mixes = [(list(range(here)), 0.0), *(([*range(here), way], self.buffers[way]) for way in self.buffers)]
        found: list[Array] = []
        for modes, buffers in mixes:
            needed = lacking + self._beside_all + buffers
            of_mix = saved[modes]
            least = least_extra_s(of_mix, extra[modes], self.counts, needed)
            found.append(np.where(needed > of_mix.max(axis=0) @ self.counts * (1 + 1e-9), np.inf, least))
        return np.min(found, axis=0)

    @cached_property
    def _partly_on_host_s(self) -> Array:
        """What blocks take at least where only some ranks may have buffers.

        A rank has them whole once it copies any block. Of n blocks that it may hold, each counts with an n-th part.
        """
        extra, lacking, left = self.extra_s_on(0), self._lacking, self._saved.copy()
        num_blocks = sum(self.table.units.is_block)
        if self.schedule.rules.has_one_stage:
            most, least_weight = num_blocks, self._weights[0].min(axis=1)
        else:
            sizes = stage_sizes(self.table.units, self.pp * self.virtual_stages, are_alike=self.has_alike_stages)
            most = sizes.most * self.virtual_stages
            least_weight = np.full(len(lacking), 1 / self.pp)
        for way, buffers in self.buffers.items():
            left[way] = np.maximum(0.0, left[way] - (least_weight * buffers / most)[:, None])
        return least_extra_s(left, extra, self.counts, lacking + self._whole_bytes("least"))

    @cached_property
    def buffers(self) -> dict[int, Array]:
        """For each place in ``modes`` of a way to the host what a rank needs besides that copies so, [layouts]."""
        table, rows, half = self.table, self.rows, len(self.modes) // 2
        blocks = [kind for kind, is_block in zip(table.units.kinds, table.units.is_block, strict=True) if is_block]
        on_host = {
            way: bytes_on_host(table, rows.work, np.full_like(rows.mode, self.modes[way]))
            for way in range(half, len(self.modes))
        }
        return {
            way: BLOCKS_IN_TRANSIT * of_kinds[:, blocks].min(axis=1) * self.reserve for way, of_kinds in on_host.items()
        }

    @property
    def _beside_all(self) -> Array:
        """What a rank with every kind of unit holds, and ``_besides`` leaves out.

        Its last unit is at work while nothing behind it has been freed.
        """
        last, working = self.table.units.kinds[-1], self.least_held[..., PLACE[Holding.WORKING]]
        more = working[:, last] - working.min(axis=1) if self.pp == 1 else np.zeros(len(working))
        stranded = self.least_held[..., PLACE[Holding.STRANDED]].max(axis=1)
        return more * self.reserve + self._whole_bytes("largest") + stranded

    def _whole_bytes(self, which: Literal["largest", "least"]) -> Array:
        """Parameters that ZeRO 3 gathers of the largest unit, or of the least, with the allocator's reserve."""
        framework, zero = self.table.framework, self.rows.zero_stage
        sizes = self.elements[..., _TRAINABLE] + self.elements[..., _FROZEN]
        held = held_elements(sizes, self.elements[..., _EXPERT], self.rows.expert_parts[:, None])
        size = held.max(axis=1) if which == "largest" else held.min(axis=1)
        return framework.units_in_transit * framework.item_bytes * size * _SHARDS_PARAMETERS[zero] * self.reserve

    def _least(self, held: Array) -> Array:
        """What a unit of each kind adds at least to a weighted mean of the ranks' memory, [layouts, kinds].

        For weights l_r that sum to 1 the fullest rank needs at least sum_r l_r M_r, M_r what rank r needs. Wherever a
        unit lies, it adds at least the least over r of l_r (its states + micro-batches in flight on r * what it keeps
        of one). The weights make the terms of the average unit equal, which is near the best.
        Example: six units of 2 GiB of states that keep 1 GiB, two and one micro-batches in flight. A unit needs 4 GiB
        on rank 0 and 3 GiB on rank 1, so the weights are 3/7 and 4/7 and each unit adds 12/7 GiB: at least 10.3 GiB.
        The best cut, into halves, needs 12 GiB.
        """
        static, kept = self.static_bytes, held[..., PLACE[Holding.KEPT]] * self.reserve[:, None]
        if not self.schedule.rules.has_one_stage:
            waiting = held[..., PLACE[Holding.WAITING]] * self.reserve[:, None]
            return self._least_of_stages(static, kept, waiting)
        weights, flying = self._weights
        each = weights[:, :, None] * (static[:, None, :] + flying[:, :, None] * kept[:, None, :])
        return np.min(each, axis=1)

    @cached_property
    def _weights(self) -> tuple[Array, Array]:
        """Weights of the ranks and micro-batches in flight on each, [layouts, ranks]."""
        if self.schedule.rules.forwards_first and self.pp > 1:
            flying = np.repeat(self.num_microbatches[:, None], self.pp, axis=1)
        else:
            flying = self.layouts.each(
                NumMicroBatches, lambda key: self.schedule.rules.in_flight(self.pp, key.num_microbatches)
            )
        # Any weights give a bound. Those of what blocks keep on the device are near the best where some do.
        here = self.modes[: len(self.modes) // 2] if self._key.offloads_activations else self.modes
        held = self._of_table.held(tuple(here))[self.rows.work, :, PLACE[Holding.KEPT]]
        kept = held * self.reserve[:, None]
        states, activations = self.static_bytes @ self.counts, kept @ self.counts
        weights = self._room / (states[:, None] + flying * activations[:, None])
        weights /= weights.sum(axis=1, keepdims=True) * self._room
        return weights, flying

    def _least_of_stages(self, static: Array, kept: Array, waiting: Array) -> Array:
        """As ``_least`` with equal weights, where a rank holds several stages; on like devices of nearly equal size."""
        flying, waits, most, highest = self._means_of_stages
        if self._is_at_peak:
            static = static + highest * self.highest_bytes
        return (static + flying * kept + np.minimum(waits * waiting, most * waiting)) / self._room.sum()

    @cached_property
    def _means_of_stages(self) -> Array:
        """``_means`` of each layout, [4, layouts, kinds]."""
        return self.layouts.each(NumMicroBatches, self._means).transpose(1, 0, 2)

    def _means(self, key: NumMicroBatches) -> Array:
        """``means_by_kind`` of the micro-batches that it takes to see the peak, [4, kinds]."""
        m = self.schedule.rules.shortened_to_peak(self.pp, key.num_microbatches, MOST_ROUNDS)
        counted = Counted(self.schedule, self.pp, self.virtual_stages, m, self.is_at_lowest(key))
        return means_by_kind(self.table.units, counted, are_alike=self.has_alike_stages)

    @cached_property
    def at_peak(self) -> Self | None:
        """The layouts whose ranks have not all gradients when most micro-batches are in flight, then; None without any.

        What ranks need is counted at a moment at which they have all gradients: when most micro-batches are in flight,
        if they have them then, and otherwise before the first backward pass through their lowest stages, with what is
        in flight then. The ledger takes the largest of all moments, so it is no less than what is counted at that one,
        nor than what is counted at the peak. That is the first backward pass, which goes through the rank's highest
        stage, and only what that stage holds has gradients (``highest_bytes``).
        """
        places = self.with_two_moments
        return type(self)(*self._parts_of(places), is_at_peak=True) if len(places) else None

    @property
    def with_two_moments(self) -> Positions:
        """The layouts of ``at_peak``."""
        return np.flatnonzero(self.at_lowest)

    def _at_peak_too(self, found: Array, of: Callable[[Self], Array]) -> Array:
        """The larger of what was found, a number for each layout, and of what it is at the peak."""
        if self.at_peak is not None:
            found = found.copy()
            found[self.with_two_moments] = np.maximum(found[self.with_two_moments], of(self.at_peak))
        return found

    @cached_property
    def at_lowest(self) -> Flags:
        """``is_at_lowest`` of each layout."""
        return self.layouts.each(NumMicroBatches, self.is_at_lowest).astype(bool)

    def is_at_lowest(self, key: NumMicroBatches) -> bool:
        """Whether what ranks hold is counted before the first backward pass through their lowest stages."""
        rules, m = self.schedule.rules, key.num_microbatches
        if self._is_at_peak or m == 1 or not rules.begins_stage_by_stage:
            return False
        return self.table.framework.has_first_gradients and not rules.peak_comes_again(self.pp, self.virtual_stages, m)

    @cached_property
    def static_bytes(self) -> Array:
        """States of each unit kind when backward begins; of gradients those that it has in every stage."""
        state = self.table.state_bytes.take(self.rows.state, axis=0)  # [layouts, KindOfElement, ...]
        holds_gradients = (self.num_microbatches > 1) | self.table.framework.keeps_gradients
        each = state[..., _PARAMETERS] + state[..., _OPTIMIZER]
        if not self._is_at_peak:
            each = each + np.where(holds_gradients[:, None], state[..., _GRADIENTS], 0.0)
        return np.einsum("lke,le->lk", self._of_table.elements_by_kind.take(self.rows.split, axis=0), each)

    @cached_property
    def highest_bytes(self) -> Array:
        """Gradients that each unit kind has then in its rank's highest stage alone."""
        each = self.table.state_bytes[self.rows.state][..., _GRADIENTS] * self._is_at_peak
        return np.einsum("lke,le->lk", self._of_table.elements_by_kind.take(self.rows.split, axis=0), each)
