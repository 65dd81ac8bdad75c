"""The one module here that knows the planner's interface: neutral cases in, plain numbers out.

A setting is a model on a cluster with its training, recipe and attention kernel; a layout is flat; all are JSON.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any

from costmodels.recipe import attention_kernel, load_recipe
from planner.api import Problem, check_offload, limits_of, load_cluster, load_graph, shard_for_degrees
from planner.layout.columns import Columns
from planner.layout.layout import Layout, Pins, Training
from planner.parallelism import MeshShape, Offload, Optimizer, Precision, Preference, Recompute, ScheduleName
from planner.pricing.operator_time import PricingTarget
from planner.pricing.point import Point, Priced
from planner.pricing.table_builder import build_table, shard_units
from planner.problems import PlacementProblem, PlacementSolution
from planner.solver.bounds import bounds
from planner.solver.cp_sat import CpSatSolver
from planner.solver.dynamic_program import DynamicProgramSolver
from planner.solver.search import search
from planner.space.device_groups import over_groups
from planner.space.search_space import build_space

Json = dict[str, Any]
ROOT = Path(__file__).resolve().parents[2]
ENUMS: dict[str, Callable[[Any], Any]] = {
    "schedule": ScheduleName, "recompute": Recompute, "offload": Offload, "groups": tuple,
}  # fmt: skip
_graph = cache(load_graph)


def _target(setting: Json) -> tuple[PricingTarget, Training]:
    model, precision = setting["model"], Precision(setting["precision"])
    graph = _graph(str(ROOT / model) if (ROOT / model).exists() else model, setting["seq_len"], precision)
    cluster = load_cluster(setting["hardware"], setting["num_devices"], [])
    kernel = attention_kernel(setting["attention"]) if setting["attention"] else None
    recipe, once = load_recipe(setting["recipe"]), setting["dispatches_once_a_node"]
    training = Training(setting["global_batch_size"], graph.seq_len, precision, Optimizer(setting["optimizer"]))
    return PricingTarget(graph, cluster, precision.value, recipe, kernel, once), training


def _choice(layout: Json) -> Layout:
    mesh = MeshShape(**{name: layout[name] for name in asdict(MeshShape())})
    return Layout(mesh, *(ENUMS.get(n, lambda value: value)(layout[n]) for n in Layout._fields if n != "mesh"))


def _layout(choice: Layout) -> Json:
    return {**asdict(choice.mesh), **choice._asdict(), "groups": list(choice.groups)} | {"mesh": None}


def _pins(pins: Json) -> Pins:
    return Pins(**{name: ENUMS.get(name, lambda value: value)(value) for name, value in pins.items()})


class Space:
    """The layouts that one setting allows."""

    def __init__(self, setting: Json) -> None:
        self._target, self._training = _target(setting)
        shardings = shard_for_degrees(self._target, Pins(), {}, CpSatSolver())
        self._limits = limits_of(self._target.graph, self._target.cluster, shardings)

    def with_pins(self, pins: Json) -> tuple[int, Callable[[int], Json]]:
        """How many layouts the pins leave, and each by its number; planner.errors.PlannerError where none."""
        fixed, cluster = _pins(pins), self._target.cluster
        check_offload(cluster, fixed.offload)
        choices = build_space(self._training, fixed, self._limits).choices
        if cluster.mixed is not None:
            choices = Columns.joined([choices, over_groups(choices, cluster.mixed.groups)])
        return len(choices), lambda index: _layout(choices[index])


class Table:
    """The prices of some layouts of one setting."""

    def __init__(self, setting: Json, layouts: Sequence[Json]) -> None:
        target, training = _target(setting)
        self._choices, solve = [_choice(layout) for layout in layouts], CpSatSolver().solve_placement
        keys = sorted({(choice.mesh.tp, choice.sequence_parallel) for choice in self._choices})
        found = {key: shard_units(target, key, {}, solve) for key in keys}
        shardings = {key: sharding for key, sharding in found.items() if sharding is not None}
        self._table = build_table(target, training, shardings, self._choices)
        self._points = [Point(self._table, choice) for choice in self._choices]
        self.is_block = list(self._table.units.is_block)

    def bounds(self) -> list[Json]:
        """Lower bounds of every layout."""
        found = asdict(bounds(self._table, self._choices))
        return [{name: float(array[i]) for name, array in found.items()} for i in range(len(self._choices))]

    def cuts(self, index: int) -> Json:
        """How a layout is cut: as the recipe's framework does, and by the solver where it is cut freely."""
        point = self._points[index]
        cuts: Json = {"framework": list(point.starts()), "even": list(point.even_starts())}
        if point.choice.mesh.pp > 1 and point.choice.schedule.is_cut_freely:
            solution = DynamicProgramSolver().solve_stages(point.stage_problem())
            cuts["solver"] = (
                None if solution is None else {"starts": list(solution.starts), "bound_s": solution.bound_s}
            )
        return cuts

    def price(self, index: int, starts: Sequence[int]) -> Json:
        """Everything that a layout with its cut costs."""
        steady, exact = (self._points[index].price(tuple(starts), exact=exact) for exact in (False, True))
        memory: Json = {}
        for phase, ledger in steady.memory[0].phases:
            held = [rank.ledger(phase) for rank in steady.memory]
            memory[phase.value] = {row: [float(each.bytes_of(row)) for each in held] for row, _ in ledger.rows}
        return {
            "steady": _times(steady), "exact": _times(exact), "memory": memory, "fits": steady.fits,
            "capacity_bytes": list(steady.capacity_bytes), "host": None if steady.host is None else asdict(steady.host),
        }  # fmt: skip


def _times(priced: Priced) -> Json:
    return {"step_time_s": float(priced.step_time_s), **{k: float(v) for k, v in asdict(priced.breakdown).items()}}


def placements(setting: Json, tp: int, sequence_parallel: bool) -> list[Json]:
    """The placement program of each kind of unit, the last first, with its solution and what that stands for."""
    target, _ = _target(setting)
    seen: list[tuple[PlacementProblem, PlacementSolution | None]] = []

    def solve(problem: PlacementProblem) -> PlacementSolution | None:
        seen.append((problem, CpSatSolver().solve_placement(problem)))
        return seen[-1][1]

    units = shard_units(target, (tp, sequence_parallel), {}, solve) or ()
    placed = [{n: {str(k): str(v) for k, v in getattr(unit, n).items()} for n in PLACED} for unit in reversed(units)]
    programs = [{"problem": asdict(p), "solution": None if s is None else asdict(s)} for p, s in seen]
    return [{**program, "placed": placed[i] if i < len(placed) else None} for i, program in enumerate(programs)]


PLACED = ("placements", "parameters", "module_outputs", "fractions")


def searched(setting: Json, pins: Json) -> Json:
    """A whole search as ``planner search`` makes it, and its processor seconds."""
    target, training = _target(setting)
    began = time.process_time()
    problem = Problem.build(target.graph, target.cluster, training, _pins(pins))
    outcome = search(problem.table, problem.space.choices, problem.solver)
    best, preferred = outcome.best, None
    if best is not None:
        baseline = search(problem.table, problem.baseline_choices, problem.solver)
        preferred = problem.preferred(outcome, baseline, Preference.SIMPLE).best
    return {
        "fastest": best and {"layout": _layout(best.choice), "starts": list(best.starts), **_times(best)},
        "preferred": preferred and {"layout": _layout(preferred.choice), "step_time_s": preferred.step_time_s},
        "bound_s": outcome.bound_s, "status": "OPTIMAL" if outcome.is_exhausted else "FEASIBLE",
        "num_candidates": outcome.num_candidates, "num_visited": outcome.num_visited,
        "cpu_s": time.process_time() - began,
    }  # fmt: skip
