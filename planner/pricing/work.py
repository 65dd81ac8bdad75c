"""What one micro-batch through one unit takes on one rank: seconds by term, bytes by holding.

Compute is the sum of the kernels, with what attention costs more in blocks than in one piece (``pricing.blocks``).
Of messages that run beside those blocks the time counts that stays exposed. Where the host needs longer to issue
kernels and collectives than the device needs to run them, compute is the host's time less the collectives' instead.
No axis is named here: what an axis does to a unit is already in its kernels, tensors and collectives.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from costmodels.vocabulary.terms import PLACE, Holding, Pass, Time
from planner.axes.framework import Framework
from planner.axes.lowered import Collective, Hides, RankUnit, RankWork, Recomputation, Role
from planner.layout.columns import Array, Positions
from planner.pricing.blocks import BlockTimes, beside_blocks, block_times, more_kernels
from planner.pricing.eight_bit_copies import with_copies
from planner.pricing.holdings import holdings, kept_results
from planner.pricing.kernels import KernelTimes, kernel_times, kernels_issued
from planner.pricing.machine import Machine
from planner.pricing.split_work import WeightGradients, weight_gradients

_AT_WORK = (Holding.WORKING, Holding.GRADIENTS)


class Case(NamedTuple):
    """A unit on one rank, and the sequences in a micro-batch."""

    work: RankWork
    micro_batch_size: int


class WorkPrices(NamedTuple):
    """[cases, modes, ``Time``] and [cases, modes, ``Holding``]."""

    time_s: Array
    num_bytes: Array


def price_work(cases: Sequence[Case], machine: Machine, framework: Framework) -> WorkPrices:
    """Prices of one unit in several cases, which differ only in collectives and in the size of the micro-batch."""
    unit = cases[0].work.unit
    assert all(case.work.unit is unit for case in cases)
    on_rank = np.array([case.micro_batch_size * case.work.part_of_sequence for case in cases])
    sizes, place = np.unique(on_rank, return_inverse=True)
    priced = _PricedUnit(unit, sizes, machine, framework)
    num_bytes = holdings(unit, framework, machine.launch_queue, on_rank)
    time_s = np.empty((len(cases), len(unit.recomputations), len(Time)))
    for work, rows in _by_work(cases):
        exchanged = priced.exchanges(work)
        at = place[rows]
        time_s[rows] = priced.times(exchanged)[at]
        for holding in _AT_WORK:
            num_bytes[rows, :, PLACE[holding]] += _buffered_bytes(work) * on_rank[rows, None]
        lead = priced.host_lead(exchanged)[at, None]
        for holding in (Holding.COLLECTIVE, Holding.QUEUED):  # where the device is ahead, no collective is waited for
            num_bytes[rows, :, PLACE[holding]] *= lead if holding is Holding.COLLECTIVE else lead > 0
        for mode, recomputation in enumerate(unit.recomputations):
            kept, saved = kept_results(work, recomputation)
            num_bytes[rows, mode, PLACE[Holding.KEPT]] += kept * on_rank[rows]
            for holding in _AT_WORK:
                num_bytes[rows, mode, PLACE[holding]] -= saved * on_rank[rows]
    return WorkPrices(time_s, num_bytes)


def _by_work(cases: Sequence[Case]) -> list[tuple[RankWork, Positions]]:
    found: dict[int, tuple[RankWork, list[int]]] = {}
    for row, case in enumerate(cases):
        found.setdefault(id(case.work), (case.work, []))[1].append(row)
    return [(work, np.array(rows, dtype=np.intp)) for work, rows in found.values()]


def _buffered_bytes(work: RankWork) -> float:
    """Bytes of one sequence that lie beside what is sent: of attention all of a pass together, else one at a time."""
    buffered = [each for each in work.collectives if each.is_buffered]
    sizes = [each.num_bytes(work.unit.tensors) for each in buffered]
    of_attention = dict.fromkeys(Pass, 0.0)
    for collective, size in zip(buffered, sizes, strict=True):
        if collective.role is Role.ATTENTION:
            of_attention[collective.runs_in] += size
    alone = [size for each, size in zip(buffered, sizes, strict=True) if each.role is not Role.ATTENTION]
    return max(*of_attention.values(), *alone)


class _Exchanges(NamedTuple):
    """Collectives of a unit, and what they and attention in blocks take at each size."""

    collectives: tuple[Collective, ...]
    seconds: tuple[Array, ...]  # that stay exposed
    hiding_s: tuple[Array, ...]  # of compute that they hide behind
    blocks: BlockTimes
    host_s: tuple[float, float]  # to issue kernels and collectives, forward and backward

    def summed(self, run: Pass, zero: Array) -> Array:
        """Exposed seconds of one pass."""
        pairs = zip(self.collectives, self.seconds, strict=True)
        return sum((seconds for collective, seconds in pairs if collective.runs_in is run), zero)

    def hidden_behind(self, run: Pass, zero: Array) -> Array:
        """Compute of one pass that hides them."""
        pairs = zip(self.collectives, self.hiding_s, strict=True)
        return sum((seconds for collective, seconds in pairs if collective.runs_in is run), zero)

    def repeated(self, mode: Recomputation, zero: Array) -> tuple[Array, Array]:
        """Exposed seconds of what recomputation sends again, and compute that hides it."""
        places = [place for place, each in enumerate(self.collectives) if mode.repeats(each)]
        bare = [place for place in places if not mode.kernels.issuperset(self.collectives[place].behind)]
        hidden = [place for place in places if place not in bare]  # the kernels that hide them run again as well
        exposed = sum((self.seconds[i] for i in places), zero) + sum((self.hiding_s[i] for i in bare), zero)
        return exposed, sum((self.hiding_s[i] for i in hidden), zero)


class _Repeated(NamedTuple):
    """The kernels that a mode of recomputation runs again."""

    compute_s: Array  # at each size
    has_attention: bool
    share_issued: float  # of the kernels that the host issues forward


class _Again(NamedTuple):
    """Forward work that the backward pass repeats, at each size."""

    seconds: Array
    hiding_s: Array  # that hide what is sent again
    spare_s: Array  # that the host does not need


class _PricedUnit:
    """One unit at several sizes of the micro-batch; what its cases share is computed once."""

    def __init__(self, unit: RankUnit, sizes: Array, machine: Machine, framework: Framework) -> None:
        self._unit, self._sizes, self._machine, self._framework = unit, sizes, machine, framework
        self._zero = np.zeros(len(sizes))
        times = kernel_times(unit.kernels, sizes, machine, framework)
        self._kernels: KernelTimes = with_copies(times, unit, sizes, machine, framework)
        self._compute_s = tuple(each.sum(axis=1) for each in self._kernels)
        self._weights: WeightGradients = weight_gradients(unit.kernels, self._kernels.backward_s, framework)
        self._num_launches = {run: sum(kernels_issued(k, framework, run) for k in unit.kernels) for run in Pass}
        self._seconds: dict[int, tuple[Array, Array]] = {}
        self._more: dict[int, BlockTimes] = {}
        self._again: dict[int, _Repeated] = {}  # by the mode of the unit's own

    def exchanges(self, work: RankWork) -> _Exchanges:
        """Times of the collectives of this unit, and of attention in as many blocks as ``work`` says."""
        seconds = [self._collective_s(each) for each in work.collectives]
        blocks = self._blocks(work.num_blocks)
        host_s = [self._host_s(work, run) for run in Pass]
        return _Exchanges(
            work.collectives,
            tuple(exposed for exposed, _ in seconds),
            tuple(hiding for _, hiding in seconds),
            blocks,
            (host_s[0], host_s[1]),
        )

    def host_lead(self, exchanges: _Exchanges) -> Array:
        """At each size, of the units that the host has issued forward, the share that the device has not run by then.

        Each unit takes the host h seconds and the device d: when the host has issued n, the device has run n · h / d.
        """
        if self._machine.computes_on_host:
            return self._zero
        device_s = self._compute_s[0] + exchanges.blocks.forward_s + exchanges.summed(Pass.FORWARD, self._zero)
        behind = np.maximum(0.0, device_s - exchanges.host_s[0])
        return np.divide(behind, device_s, where=device_s > 0, out=np.zeros_like(device_s))

    def times(self, exchanges: _Exchanges) -> Array:
        """[sizes, modes, ``Time``]: modes differ in what is repeated alone."""
        found = np.zeros((len(self._sizes), len(Time)))
        for collective, seconds in zip(exchanges.collectives, exchanges.seconds, strict=True):
            found[:, PLACE[Time((collective.term, collective.runs_in))]] += seconds
        in_forward, in_backward = (exchanges.summed(run, self._zero) for run in Pass)
        compute_forward, compute_backward = (
            compute + more for compute, more in zip(self._compute_s, exchanges.blocks, strict=True)
        )
        host_forward, host_backward = exchanges.host_s
        forward, spare_forward = self._passed(compute_forward, host_forward, in_forward)
        backward, spare_backward = self._passed(compute_backward, host_backward, in_backward)
        factor = self._framework.recipe.split_host_factor
        more_s = 0.0 if factor is None else (factor.value - 1) * host_backward
        twice, _ = self._passed(self._weights.repeated_s, more_s, spare_backward)
        found[:, PLACE[Time.COMPUTE_FORWARD]] = forward
        found[:, PLACE[Time.COMPUTE_BACKWARD]] = backward
        found[:, PLACE[Time.WEIGHT_GRADIENT]] = self._weights.share * backward
        found[:, PLACE[Time.SPLIT_EXTRA]] = twice
        found[:, PLACE[Time.HIDING_FORWARD]] = exchanges.hidden_behind(Pass.FORWARD, self._zero)
        found[:, PLACE[Time.HIDING_BACKWARD]] = exchanges.hidden_behind(Pass.BACKWARD, self._zero)
        found[:, PLACE[Time.SPARE_FORWARD]] = spare_forward
        found[:, PLACE[Time.SPARE_BACKWARD]] = spare_backward
        every = np.repeat(found[:, None], len(self._unit.recomputations), axis=1)
        for place, mode in enumerate(self._unit.recomputations):
            again = self._again_s(exchanges, mode)
            every[:, place, PLACE[Time.RECOMPUTE]] = again.seconds
            every[:, place, PLACE[Time.HIDING_BACKWARD]] += again.hiding_s
            every[:, place, PLACE[Time.SPARE_BACKWARD]] += again.spare_s
            self._add_checkpoint(every[:, place], mode)
        return every

    def _passed(self, compute_s: Array, host_s: float, besides_s: Array) -> tuple[Array, Array]:
        """Seconds of a pass, and how many of them the host does not need: it may issue ``besides_s`` as well.

        A host that computes itself needs them all: it issues nothing meanwhile.
        """
        if self._machine.computes_on_host:
            return compute_s + host_s, self._zero
        passed_s = np.maximum(compute_s, host_s - besides_s)
        return passed_s, passed_s - (host_s - besides_s)

    def _add_checkpoint(self, found: Array, mode: Recomputation) -> None:
        """Adds to [sizes, ``Time``] what hooks of recomputation take of the host, as far as this has none to spare."""
        hooks = self._framework.recipe.hooks
        if hooks is None or not mode.kernels:
            return
        selected = 0 if mode.waits_for_host else self._num_launches[Pass.FORWARD]
        forward_s = hooks.checkpoint_forward_s + selected * hooks.selected_forward_s
        backward_s = hooks.checkpoint_backward_s + selected * hooks.selected_backward_s
        for more_s, into, spare in (
            (forward_s, Time.COMPUTE_FORWARD, Time.SPARE_FORWARD),
            (backward_s, Time.RECOMPUTE, Time.SPARE_BACKWARD),
        ):
            left = found[:, PLACE[spare]] - more_s
            found[:, PLACE[into]] += np.maximum(0.0, -left)
            found[:, PLACE[spare]] = np.maximum(0.0, left)

    def _again_s(self, exchanges: _Exchanges, mode: Recomputation) -> _Again:
        """Forward work that the backward pass repeats."""
        if id(mode) not in self._again:
            self._again[id(mode)] = self._repeated(mode)
        again = self._again[id(mode)]
        compute = again.compute_s + exchanges.blocks.forward_s if again.has_attention else again.compute_s
        sent, hiding = exchanges.repeated(mode, self._zero)
        spare = self._zero  # selective recomputation: what the host issues again counts with its hooks
        if mode.waits_for_host:
            compute, spare = self._passed(compute, exchanges.host_s[0] * again.share_issued, sent)
        return _Again(compute + sent, hiding, spare)

    def _repeated(self, mode: Recomputation) -> _Repeated:
        places = [place for place, kernel in enumerate(self._unit.kernels) if kernel.id in mode.kernels]
        kernels = [self._unit.kernels[place] for place in places]
        issued = sum(kernels_issued(kernel, self._framework, Pass.FORWARD) for kernel in kernels)
        return _Repeated(
            self._kernels.forward_s[:, places].sum(axis=1),
            any(kernel.keys_and_values for kernel in kernels),
            issued / max(1, self._num_launches[Pass.FORWARD]),
        )

    def _blocks(self, num_blocks: int) -> BlockTimes:
        """Cases share numbers of blocks, too."""
        if num_blocks not in self._more:
            self._more[num_blocks] = block_times(self._unit, num_blocks, self._sizes, self._machine, self._framework)
        return self._more[num_blocks]

    def _collective_s(self, collective: Collective) -> tuple[Array, Array]:
        """Exposed seconds, and seconds of compute that hide the rest. Cases share collectives: each is priced once."""
        if id(collective) not in self._seconds:
            num_bytes = collective.num_bytes(self._unit.tensors)
            grown = self._sizes if collective.follows_batch else np.ones(len(self._sizes))
            seconds = self._machine.collective_s(collective, num_bytes * grown)
            found = seconds, self._zero
            if collective.hides is Hides.BLOCKS:
                found = beside_blocks(collective, seconds, self._behind_s(collective), self._machine.overlap)
            self._seconds[id(collective)] = found
        return self._seconds[id(collective)]

    def _behind_s(self, collective: Collective) -> Array:
        """Seconds of the kernels that a collective runs beside."""
        places = [place for place, kernel in enumerate(self._unit.kernels) if kernel.id in collective.behind]
        of_pass = self._kernels.forward_s if collective.runs_in is Pass.FORWARD else self._kernels.backward_s
        return of_pass[:, places].sum(axis=1)

    def _host_s(self, work: RankWork, run: Pass) -> float:
        """Seconds that the host needs to issue the unit's kernels, however short these are on the device.

        Of the collectives only those count that the placements of tensor parallelism ask for.
        """
        recipe, machine = self._framework.recipe, self._machine
        seconds = self._num_launches[run] * machine.issue_s(recipe, is_sharded=self._unit.is_split)
        # Inside attention tensors are a rank's own: nothing of them is sharded.
        more = more_kernels(self._unit, work.num_blocks, self._framework, run)
        seconds += more * machine.issue_s(recipe, is_sharded=False)
        per_rank = recipe.host_s_per_collective_rank
        for collective in issued_by_host(work.collectives, run):
            seconds += recipe.host_s_per_collective.value
            if per_rank is not None and self._machine.has_several_nodes:
                seconds += per_rank.value * collective.group.num_ranks
        return seconds


def issued_by_host(collectives: Sequence[Collective], run: Pass) -> list[Collective]:
    """Those of one pass whose issue takes the host's time."""
    return [each for each in collectives if each.issued_by_host and each.runs_in is run]
