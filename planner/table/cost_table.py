"""CostTable: everything that bounds, search and evaluation need of every layout, as arrays and numbers.

Axes are labelled by keys (``table.keys``) and by the terms of ``costmodels.vocabulary.terms`` in the order in which
they are declared. Units of one kind cost the same, so there is one column a kind. Nothing here is hidden behind
anything else yet: what stays exposed depends on the whole layout, and ``evaluation`` finds it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from planner.layout.columns import Array, Positions
from planner.table.facts import ClusterFacts, FrameworkFacts, UnitRow
from planner.table.keys import DataKey, SendKey, StateKey, TensorSplit, WorkKey

KeyT = TypeVar("KeyT")


class KindOfElement:
    """Places on the axis of elements in ``state_bytes``: dense trainable, frozen, and an expert's."""

    DENSE, FROZEN, EXPERT = range(3)


@dataclass(frozen=True)
class CostTable:
    """Prices of one model's units on one cluster in one framework."""

    units: UnitRow
    cluster: ClusterFacts
    framework: FrameworkFacts
    work_keys: tuple[WorkKey, ...]
    data_keys: tuple[DataKey, ...]
    splits: tuple[TensorSplit, ...]
    state_keys: tuple[StateKey, ...]
    send_keys: tuple[SendKey, ...]
    time_s: Array  # [devices, work keys, modes of recomputation, kinds, Time]
    num_bytes: Array  # [work keys, modes, kinds, Holding]
    data_s: Array  # [devices, data keys, kinds, Data]
    elements: Array  # [splits, kinds, Element]
    state_bytes: Array  # [state keys, KindOfElement, parameters gradients optimizer moments]: of one element
    sends: tuple[Array, ...]  # [borders, latency and seconds per byte] for each of ``send_keys``

    @cached_property
    def counts(self) -> Array:
        """Units of each kind."""
        return np.array(self.units.counts, dtype=np.float64)

    def on_devices(self, place: int) -> CostTable:
        """The prices of layouts without a pipeline as if there were the devices at one place alone."""
        return replace(
            self,
            cluster=replace(self.cluster, devices=(self.cluster.devices[place],)),
            time_s=self.time_s[[place]],
            data_s=self.data_s[[place]],
            send_keys=(SendKey(1, ()),),
            sends=(np.zeros((0, 2)),),
        )

    def work_rows(self, keys: Sequence[WorkKey]) -> Positions:
        """Rows of ``time_s`` and ``num_bytes``."""
        return _rows(self._work_places, keys)

    def data_rows(self, keys: Sequence[DataKey]) -> Positions:
        """Rows of ``data_s``."""
        return _rows(self._data_places, keys)

    def split_rows(self, keys: Sequence[TensorSplit]) -> Positions:
        """Rows of ``elements``."""
        return _rows(self._split_places, keys)

    def state_rows(self, keys: Sequence[StateKey]) -> Positions:
        """Rows of ``state_bytes``."""
        return _rows(self._state_places, keys)

    def send(self, key: SendKey) -> Array:
        """Latency and seconds per byte from every pipeline rank to the next, over groups also from the last back."""
        return self.sends[self._send_places[key]]

    @cached_property
    def _work_places(self) -> Mapping[WorkKey, int]:
        return _places(self.work_keys)

    @cached_property
    def _data_places(self) -> Mapping[DataKey, int]:
        return _places(self.data_keys)

    @cached_property
    def _split_places(self) -> Mapping[TensorSplit, int]:
        return _places(self.splits)

    @cached_property
    def _state_places(self) -> Mapping[StateKey, int]:
        return _places(self.state_keys)

    @cached_property
    def _send_places(self) -> Mapping[SendKey, int]:
        return _places(self.send_keys)


def _places(keys: Sequence[KeyT]) -> Mapping[KeyT, int]:
    return {key: place for place, key in enumerate(keys)}


def _rows(places: Mapping[KeyT, int], keys: Sequence[KeyT]) -> NDArray[np.intp]:
    return np.array([places[key] for key in keys], dtype=np.intp)
