"""All rows of a cost table's arrays: every unit kind under every key."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

import numpy as np

from planner.axes.framework import Framework
from planner.axes.lowered import RankStates
from planner.axes.registry import Lowering, Own, lowered_states, own_fields, state_collectives
from planner.axes.tensor import split_states
from planner.axes.traced import representatives, whole_states, whole_work
from planner.graph.model_graph import ModelGraph
from planner.parallelism import Recompute
from planner.pricing.machine import Machine
from planner.pricing.placements import Decision
from planner.pricing.states import Data, StatePricer, counted, elements_of
from planner.pricing.work import Case, WorkPrices, price_work
from planner.space.columns import Array
from planner.table.keys import DataKey, TensorSplit, WorkKey
from planner.table.labels import Holding, Time

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
        alike[key.tensor, own_fields(key)].append(row)
    for column, unit in enumerate(kinds):
        cases: defaultdict[int, list[tuple[int, Case]]] = defaultdict(list)
        lowering = Lowering(whole_work(graph, unit), framework)
        for (split, own), places in alike.items():
            work = lowering.work(own, decisions[split][column])
            cases[id(work.unit)] += [(row, Case(work, keys[row].micro_batch_size)) for row in places]
        for found in cases.values():
            places = [row for row, _ in found]
            prices = price_work([case for _, case in found], machine, framework)
            rows.time_s[places, :, column] = prices.time_s
            rows.num_bytes[places, :, column] = prices.num_bytes
    return rows


def element_rows(graph: ModelGraph, decisions: Decisions, splits: Sequence[TensorSplit]) -> Array:
    """[splits, kinds, ``Element``]: parameters on one tensor-parallel rank."""
    return np.array([counted(elements_of(_split(graph, decisions[split]))) for split in splits])


def data_rows(
    graph: ModelGraph, decisions: Decisions, keys: Sequence[DataKey], machine: Machine, framework: Framework
) -> Array:
    """Seconds [keys, kinds, ``Data``]."""
    split = {tensor: _split(graph, decision) for tensor, decision in decisions.items()}
    pricers: dict[tuple[TensorSplit, Own], StatePricer] = {}
    rows = np.empty((len(keys), len(representatives(graph)), len(Data)))
    for row, key in enumerate(keys):
        place = key.tensor, own_fields(key)
        if place not in pricers:
            lowered = [lowered_states(states, place[1]) for states in split[key.tensor]]
            pricers[place] = StatePricer(elements_of(lowered), machine, framework)
        rows[row] = pricers[place].times(state_collectives(key, framework))
    return rows


def _split(graph: ModelGraph, decision: Decision) -> list[RankStates]:
    units = zip(representatives(graph), decision, strict=True)
    return [split_states(graph, whole_states(graph, unit), placement) for unit, placement in units]
