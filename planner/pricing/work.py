"""What one micro-batch through one unit takes on one rank: seconds by term, bytes by holding.

Compute is the sum of the unit's kernels. Where the host needs longer to issue kernels and collectives than the device
needs to run them, compute is the host's time less the collectives' instead. No axis is named here: what an axis does
to a unit is already in its kernels, tensors and collectives.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from costmodels.vocabulary.terms import PLACE, Holding, Pass, Time
from planner.axes.framework import Framework
from planner.axes.lowered import Collective, RankUnit, RankWork, Recomputation
from planner.layout.columns import Array, Positions
from planner.pricing.holdings import holdings
from planner.pricing.kernels import KernelTimes, kernel_times, kernels_issued
from planner.pricing.machine import Machine
from planner.pricing.split_work import WeightGradients, weight_gradients


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
    held = holdings(unit, framework, machine.launch_queue)
    num_bytes = held[:, :, 0] + held[:, :, 1] * on_rank[:, None, None]
    time_s = np.empty((len(cases), len(unit.recomputations), len(Time)))
    for work, rows in _by_work(cases):
        exchanged = priced.exchanges(work.collectives)
        at = place[rows]
        for mode, recomputation in enumerate(unit.recomputations):
            time_s[rows, mode] = priced.times(exchanged, recomputation)[at]
        # What is sent lies beside what is received.
        buffered = [each.num_bytes(unit.tensors) for each in work.collectives if each.is_buffered]
        num_bytes[rows, :, PLACE[Holding.WORKING]] += max(buffered, default=0.0) * on_rank[rows, None]
    return WorkPrices(time_s, num_bytes)


def _by_work(cases: Sequence[Case]) -> list[tuple[RankWork, Positions]]:
    found: dict[int, tuple[RankWork, list[int]]] = {}
    for row, case in enumerate(cases):
        found.setdefault(id(case.work), (case.work, []))[1].append(row)
    return [(work, np.array(rows, dtype=np.intp)) for work, rows in found.values()]


class _Exchanges(NamedTuple):
    """Collectives of a unit, their seconds at each size, and the host's seconds to issue kernels and collectives."""

    collectives: tuple[Collective, ...]
    seconds: tuple[Array, ...]
    host_s: tuple[float, float]

    def summed(self, run: Pass, zero: Array) -> Array:
        """Of one pass."""
        pairs = zip(self.collectives, self.seconds, strict=True)
        return sum((seconds for collective, seconds in pairs if collective.runs_in is run), zero)


class _PricedUnit:
    """One unit at several sizes of the micro-batch; what its cases share is computed once."""

    def __init__(self, unit: RankUnit, sizes: Array, machine: Machine, framework: Framework) -> None:
        self._unit, self._sizes, self._machine, self._framework = unit, sizes, machine, framework
        self._zero = np.zeros(len(sizes))
        self._kernels: KernelTimes = kernel_times(unit.kernels, sizes, machine, framework)
        self._compute_s = tuple(each.sum(axis=1) for each in self._kernels)
        self._weights: WeightGradients = weight_gradients(unit.kernels, self._kernels.backward_s, framework)
        self._num_launches = {run: sum(kernels_issued(k, framework, run) for k in unit.kernels) for run in Pass}
        self._seconds: dict[int, Array] = {}

    def exchanges(self, collectives: tuple[Collective, ...]) -> _Exchanges:
        """Times of ``collectives`` of this unit."""
        forward_s, backward_s = (self._host_s(collectives, run) for run in Pass)
        return _Exchanges(collectives, tuple(map(self._collective_s, collectives)), (forward_s, backward_s))

    def times(self, exchanges: _Exchanges, mode: Recomputation) -> Array:
        """[sizes, ``Time``]."""
        found = np.zeros((len(self._sizes), len(Time)))
        for collective, seconds in zip(exchanges.collectives, exchanges.seconds, strict=True):
            found[:, PLACE[Time((collective.term, collective.runs_in))]] += seconds
        in_forward, in_backward = (exchanges.summed(run, self._zero) for run in Pass)
        compute_forward, compute_backward = self._compute_s
        host_forward, host_backward = exchanges.host_s
        forward = np.maximum(compute_forward, host_forward - in_forward)
        backward = np.maximum(compute_backward, host_backward - in_backward)
        factor = self._framework.recipe.split_host_factor
        host_of_halves = host_backward * (1.0 if factor is None else factor.value)
        twice = np.maximum(backward + self._weights.repeated_s, host_of_halves - in_backward) - backward
        found[:, PLACE[Time.COMPUTE_FORWARD]] = forward
        found[:, PLACE[Time.COMPUTE_BACKWARD]] = backward
        found[:, PLACE[Time.RECOMPUTE]] = self._again_s(exchanges, mode)
        found[:, PLACE[Time.WEIGHT_GRADIENT]] = self._weights.share * backward
        found[:, PLACE[Time.SPLIT_EXTRA]] = twice
        return found

    def _again_s(self, exchanges: _Exchanges, mode: Recomputation) -> Array:
        """Forward work that the backward pass repeats."""
        places = [place for place, kernel in enumerate(self._unit.kernels) if kernel.id in mode.kernels]
        compute = self._kernels.forward_s[:, places].sum(axis=1)
        repeated = [
            seconds
            for collective, seconds in zip(exchanges.collectives, exchanges.seconds, strict=True)
            if collective.runs_in is Pass.FORWARD and collective.role in mode.roles
        ]
        sent = sum(repeated, self._zero)
        if mode.waits_for_host:
            compute = np.maximum(compute, exchanges.host_s[0] - sent)
        return compute + sent

    def _collective_s(self, collective: Collective) -> Array:
        """Cases share collectives: each is worked out once."""
        if id(collective) not in self._seconds:
            num_bytes = collective.num_bytes(self._unit.tensors)
            grown = self._sizes if collective.follows_batch else np.ones(len(self._sizes))
            self._seconds[id(collective)] = self._machine.collective_s(collective, num_bytes * grown)
        return self._seconds[id(collective)]

    def _host_s(self, collectives: Sequence[Collective], run: Pass) -> float:
        """Seconds that the host needs to issue the unit's kernels, however short these are on the device.

        Of the collectives only those count that the placements of tensor parallelism ask for.
        """
        recipe, launches = self._framework.recipe, self._num_launches[run]
        seconds = launches * recipe.issue_s(is_sharded=self._unit.is_split)
        per_rank = recipe.host_s_per_collective_rank
        for collective in issued_by_host(collectives, run):
            seconds += recipe.host_s_per_collective.value
            if per_rank is not None and self._machine.has_several_nodes:
                seconds += per_rank.value * collective.group.num_ranks
        return seconds


def issued_by_host(collectives: Sequence[Collective], run: Pass) -> list[Collective]:
    """Those of one pass whose issue takes the host's time."""
    return [each for each in collectives if each.issued_by_host and each.runs_in is run]
