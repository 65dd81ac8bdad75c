"""Gathering a unit's parameters and reducing its gradients over the data-parallel ranks, once each."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from costmodels.vocabulary.terms import PLACE, Data
from costmodels.vocabulary.workload import OpClass
from planner.axes.framework import Framework
from planner.axes.lowered import Collective, RankStates, Role, StateKind
from planner.layout.columns import Array
from planner.pricing.machine import Machine

_STATES = tuple(StateKind)
_PLACES = {
    Role.GATHER: PLACE[Data.GATHER],
    Role.REDUCE: PLACE[Data.REDUCE],
    Role.REPLICAS: PLACE[Data.REPLICAS],
}


def elements_of(states: Sequence[RankStates]) -> Array:
    """[units, ``StateKind``]."""
    return np.array([[each.elements(kind) for kind in _STATES] for each in states])


def _tensors_of(states: Sequence[RankStates]) -> Array:
    """[units, ``StateKind``]: parameters."""
    return np.array([[each.tensors(kind) for kind in _STATES] for each in states], dtype=np.float64)


def counted(elements: Array) -> Array:
    """[units, ``Element``] of ``elements_of`` units."""
    dense, frozen, tied, expert = elements.T
    return np.stack([dense + expert, frozen, tied, expert], axis=1)


class StatePricer:
    """Prices of moving the states of some units; collectives that keys share are priced once."""

    def __init__(self, states: Sequence[RankStates], machine: Machine, framework: Framework) -> None:
        self._elements, self._tensors, self._machine = elements_of(states), _tensors_of(states), machine
        line = machine.roofline(OpClass.MEMORY_BOUND, framework.precision)
        trained = self._elements[:, [StateKind.DENSE.value, StateKind.EXPERT.value]].sum(axis=1)
        recipe = framework.recipe
        moved = recipe.accumulation_bytes.value + recipe.state.summed_bytes(framework.precision)
        self._accumulate_s = trained * moved * line.seconds_per_byte
        self._seconds: dict[Collective, Array] = {}

    def times(self, collectives: Sequence[Collective]) -> Array:
        """[units, ``Data``]."""
        found = np.zeros((len(self._elements), len(Data)))
        for collective in collectives:
            found[:, _PLACES[collective.role]] += self._collective_s(collective)
        found[:, PLACE[Data.ACCUMULATE]] = self._accumulate_s
        return found

    def _collective_s(self, collective: Collective) -> Array:
        """Nothing at all of units that have no such states."""
        if collective not in self._seconds:
            kinds = list(collective.of)
            num_bytes = self._elements[:, kinds].sum(axis=1) * collective.times
            parts = np.maximum(1.0, self._tensors[:, kinds].sum(axis=1)) if collective.each_tensor else 1.0
            seconds = parts * self._machine.collective_s(collective, num_bytes / parts)
            self._seconds[collective] = np.where(num_bytes > 0, seconds, 0.0)
        return self._seconds[collective]
