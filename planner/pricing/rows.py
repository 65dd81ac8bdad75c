"""The rows of a cost table's arrays: prices of every kind of unit under every key."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

import numpy as np

from costmodels.vocabulary.choices import Recompute
from costmodels.vocabulary.terms import Data, Holding, Time
from planner.axes.framework import Framework
from planner.axes.lowered import Collective, RankStates
from planner.axes.registry import (
    Own,
    WorkLowering,
    collective_fields,
    lowered_states,
    state_collectives,
    state_fields,
    work_fields,
)
from planner.axes.tensor import TENSOR
from planner.axes.traced import representatives, whole_states, whole_work
from planner.graph.model_graph import ModelGraph
from planner.layout.columns import Array
from planner.pricing.machine import Machine
from planner.pricing.placements import Decision
from planner.pricing.states import StatePricer, counted, elements_of
from planner.pricing.work import Case, WorkPrices, price_work
from planner.table.keys import DataKey, TensorSplit, WorkKey

Decisions = Mapping[TensorSplit, Decision]


def work_rows(
    graph: ModelGraph, decisions: Decisions, keys: Sequence[WorkKey], machine: Machine, framework: Framework
) -> WorkPrices:
    """Seconds [keys, modes, kinds, ``Time``] and bytes [keys, modes, kinds, ``Holding``]."""
    kinds = representatives(graph)
    shape = (len(keys), len(Recompute), len(kinds))
    rows = WorkPrices(np.empty((*shape, len(Time))), np.empty((*shape, len(Holding))))
    alike: defaultdict[tuple[TensorSplit, Own], list[int]] = defaultdict(list)
    for row, key in enumerate(keys):
        alike[key.tensor, work_fields(key)].append(row)
    for column, unit in enumerate(kinds):
        cases: defaultdict[int, list[tuple[int, Case]]] = defaultdict(list)
        lowering = WorkLowering(whole_work(graph, unit), framework)
        for (split, own), places in alike.items():
            work = lowering.under(own, decisions[split][column])
            cases[id(work.unit)] += [(row, Case(work, keys[row].micro_batch_size)) for row in places]
        for found in cases.values():
            places = [row for row, _ in found]
            prices = price_work([case for _, case in found], machine, framework)
            rows.time_s[places, :, column] = prices.time_s
            rows.num_bytes[places, :, column] = prices.num_bytes
    return rows


class KnownWork:
    """Rows of work of one model in one framework, on machines of the same prices: each is priced once.

    Rows are those of the decisions that were given last for their split.
    """

    def __init__(self, graph: ModelGraph, machine: Machine, framework: Framework) -> None:
        self._graph, self._machine, self._framework = graph, machine, framework
        self._decisions: dict[TensorSplit, Decision] = {}
        self._rows: dict[WorkKey, tuple[Array, Array]] = {}

    def priced(self, decisions: Decisions, keys: Sequence[WorkKey]) -> WorkPrices:
        """As ``work_rows``."""
        for split, decision in decisions.items():
            if self._decisions.setdefault(split, decision) is not decision:
                self._rows = {key: row for key, row in self._rows.items() if key.tensor != split}
                self._decisions[split] = decision
        missing = [key for key in keys if key not in self._rows]
        found = work_rows(self._graph, decisions, missing, self._machine, self._framework)
        self._rows.update(zip(missing, zip(found.time_s, found.num_bytes, strict=True), strict=True))
        if len(missing) == len(keys):
            return found
        rows = [self._rows[key] for key in keys]
        return WorkPrices(np.array([time_s for time_s, _ in rows]), np.array([num_bytes for _, num_bytes in rows]))


def element_rows(graph: ModelGraph, decisions: Decisions, splits: Sequence[TensorSplit]) -> Array:
    """[splits, kinds, ``Element``]: parameters on one tensor-parallel rank."""
    whole = whole_states(graph)

    def on_one_rank(split: TensorSplit) -> list[RankStates]:
        return [TENSOR.states(states, split, at) for states, at in zip(whole, decisions[split], strict=True)]

    return np.array([counted(elements_of(on_one_rank(split))) for split in splits])


def data_rows(
    graph: ModelGraph, decisions: Decisions, keys: Sequence[DataKey], machine: Machine, framework: Framework
) -> Array:
    """Seconds [keys, kinds, ``Data``]."""
    whole = whole_states(graph)
    pricers: dict[tuple[TensorSplit, Own], StatePricer] = {}
    alike: dict[tuple[RankStates, ...], StatePricer] = {}  # splits along the sequence leave the states as they are
    found: dict[tuple[StatePricer, Own], Array] = {}
    moves: dict[Own, tuple[Collective, ...]] = {}
    rows = np.empty((len(keys), len(whole), len(Data)))
    for row, key in enumerate(keys):
        own, moved = state_fields(key), collective_fields(key)
        if (key.tensor, own) not in pricers:
            placed = zip(whole, decisions[key.tensor], strict=True)
            states = tuple([lowered_states(each, own, placement) for each, placement in placed])
            if states not in alike:
                alike[states] = StatePricer(states, machine, framework)
            pricers[key.tensor, own] = alike[states]
        place = pricers[key.tensor, own], moved
        if place not in found:
            if moved not in moves:
                moves[moved] = state_collectives(moved, framework)
            found[place] = place[0].times(moves[moved])
        rows[row] = found[place]
    return rows
