"""The one module here that knows the planner's interface: neutral cases in, plain numbers out.

A setting is a model on a cluster with its training, recipe and attention kernel; a layout is flat; all are JSON.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import cache
from math import inf
from pathlib import Path
from typing import Any

from benchmarks.published.frameworks import recipe_called
from costmodels.recipe import attention_kernel
from costmodels.vocabulary.choices import ContextMethod, Offload, Optimizer, Precision, Preference, Recompute
from costmodels.vocabulary.mesh import Mesh
from costmodels.vocabulary.schedules import ScheduleName
from planner.axes.unlike_devices import over_groups
from planner.evaluation.evaluator import Evaluated, Evaluator
from planner.evaluation.stage_program import stage_problem
from planner.layout.columns import Columns
from planner.layout.decided import NOTHING
from planner.layout.layout import Layout, Pins, Training
from planner.pricing.decisions import decided, decided_for_degrees, limits_of
from planner.pricing.placements import decide
from planner.pricing.table_builder import build_table
from planner.pricing.target import PricingTarget
from planner.problem import Problem
from planner.problems import PlacementProblem, PlacementSolution
from planner.request import check_offload, load_cluster, load_graph
from planner.solver.bounds import bounds
from planner.solver.cp_sat import CpSatSolver
from planner.solver.dynamic_program import DynamicProgramSolver
from planner.space.search_space import build_space
from planner.table.keys import TensorSplit

Json = dict[str, Any]
ROOT = Path(__file__).resolve().parents[2]
ENUMS: dict[str, Callable[[Any], Any]] = {
    "schedule": ScheduleName, "recompute": Recompute, "offload": Offload, "groups": tuple, "shares": tuple,
    "cp_method": ContextMethod,
}  # fmt: skip
_graph = cache(load_graph)


def _target(setting: Json) -> tuple[PricingTarget, Training]:
    model, precision = setting["model"], Precision(setting["precision"])
    graph = _graph(str(ROOT / model) if (ROOT / model).exists() else model, setting["seq_len"], precision)
    cluster = load_cluster(setting["hardware"], setting["num_devices"], [])
    kernel = attention_kernel(setting["attention"]) if setting["attention"] else None
    recipe, once = recipe_called(setting["recipe"]), setting["dispatches_once_a_node"]
    training = Training(setting["global_batch_size"], graph.seq_len, precision, Optimizer(setting["optimizer"]))
    return PricingTarget(graph, cluster, precision.value, recipe, kernel, once), training


def _chosen(layout: Json) -> Layout:
    mesh = Mesh(**{name: layout[name] for name in asdict(Mesh()) if name in layout})
    known = [name for name in Layout._fields if name != "mesh" and name in layout]  # newer fields have their default
    return Layout(mesh, **{name: ENUMS.get(name, lambda value: value)(layout[name]) for name in known})


def _layout(chosen: Layout, index: int = 0) -> Json:
    """Where each block has its own recomputation, all have one of the modes in turn."""
    modes = list(Recompute)
    chosen = chosen._replace(recompute=chosen.recompute or modes[index % len(modes)])
    return {**asdict(chosen.mesh), **chosen._asdict(), "groups": list(chosen.groups)} | {"mesh": None}


def _pins(pins: Json) -> Pins:
    return Pins(**{name: ENUMS.get(name, lambda value: value)(value) for name, value in pins.items()})


class Space:
    """The layouts that one setting allows."""

    def __init__(self, setting: Json) -> None:
        self._target, self._training = _target(setting)
        decisions = decided_for_degrees(self._target, Pins(), CpSatSolver().solve_placement)
        self._limits = limits_of(self._target, decisions)

    def with_pins(self, pins: Json) -> tuple[int, Callable[[int], Json]]:
        """How many layouts the pins leave, and each by its number; planner.errors.PlannerError where none."""
        fixed, cluster = _pins(pins), self._target.cluster
        check_offload(cluster, fixed.offload)
        layouts = build_space(self._training, fixed, self._limits).layouts
        if cluster.mixed is not None:
            layouts = Columns.joined([layouts, over_groups(layouts, cluster.mixed.groups)])
        return len(layouts), lambda index: _layout(layouts[index], index)


class Table:
    """The prices of some layouts of one setting."""

    def __init__(self, setting: Json, layouts: Sequence[Json]) -> None:
        target, training = _target(setting)
        self._layouts, solve = [_chosen(layout) for layout in layouts], CpSatSolver().solve_placement
        splits = Columns.of(Layout, self._layouts).by(TensorSplit)[0]
        found = {split: decided(target, split, NOTHING, solve) for split in splits}
        decisions = {split: decision for split, decision in found.items() if decision is not None}
        self._table = build_table(target, training, decisions, self._layouts)
        self._evaluators = [Evaluator(self._table, layout) for layout in self._layouts]
        self.is_block = list(self._table.units.is_block)

    def bounds(self) -> list[Json]:
        """Lower bounds of every layout."""
        found = asdict(bounds(self._table, self._layouts))
        return [{name: float(array[i]) for name, array in found.items()} for i in range(len(self._layouts))]

    def cuts(self, index: int) -> Json:
        """How a layout is cut: as the recipe's framework does, and by the solver where it is cut freely."""
        evaluator = self._evaluators[index]
        cuts: Json = {"framework": list(evaluator.starts()), "even": list(evaluator.even_starts())}
        if evaluator.layout.mesh.pp > 1 and evaluator.layout.schedule.rules.has_one_stage:
            solution = next(DynamicProgramSolver().cuts(stage_problem(evaluator), lambda: inf))
            cuts["solver"] = {"starts": list(solution.starts), "bound_s": solution.bound_s}
        return cuts

    def price(self, index: int, starts: Sequence[int]) -> Json:
        """Everything that a layout with its cut costs."""
        steady, exact = (self._evaluators[index].evaluate(tuple(starts), exact=exact) for exact in (False, True))
        memory: Json = {}
        for phase, ledger in steady.memory[0].phases:
            held = [rank.ledger(phase) for rank in steady.memory]
            memory[phase.value] = {row: [float(each.bytes_of(row)) for each in held] for row, _ in ledger.rows}
        return {
            "steady": _times(steady), "exact": _times(exact), "memory": memory, "fits": steady.fits,
            "capacity_bytes": list(steady.capacity_bytes), "host": None if steady.host is None else asdict(steady.host),
        }  # fmt: skip


def _times(found: Evaluated) -> Json:
    return {"step_time_s": float(found.step_time_s), **{term.value: float(v) for term, v in found.breakdown.items()}}


def placements(setting: Json, tp: int, sequence_parallel: bool) -> list[Json]:
    """The placement program of each kind of unit, the last first, with its solution and what that stands for."""
    target, _ = _target(setting)
    seen: list[tuple[PlacementProblem, PlacementSolution | None]] = []

    def solve(problem: PlacementProblem) -> PlacementSolution | None:
        seen.append((problem, CpSatSolver().solve_placement(problem)))
        return seen[-1][1]

    split = TensorSplit(tp, sequence_parallel)
    units = decide(target.graph, split, NOTHING, target.machine, target.framework, solve) or ()
    placed = [
        {n: {str(k): str(v) for k, v in getattr(unit, field).items()} for n, field in PLACED.items()}
        for unit in reversed(units)
    ]
    programs = [{"problem": asdict(p), "solution": None if s is None else asdict(s)} for p, s in seen]
    return [{**program, "placed": placed[i] if i < len(placed) else None} for i, program in enumerate(programs)]


PLACED = {name: name for name in ("placements", "parameters", "module_outputs")} | {"fractions": "shares"}


def searched(setting: Json, pins: Json) -> Json:
    """A whole search as ``planner search`` makes it, and its processor seconds."""
    target, training = _target(setting)
    began = time.process_time()
    problem = Problem.build(target, training, _pins(pins))
    outcome = problem.solved()
    best, preferred = outcome.best, None
    if best is not None:
        baseline = problem.solved_baseline()
        preferred = problem.preferred(outcome, baseline, Preference.SIMPLE).best
    return {
        "fastest": best and {"layout": _layout(best.layout), "starts": list(best.starts), **_times(best)},
        "preferred": preferred and {"layout": _layout(preferred.layout), "step_time_s": preferred.step_time_s},
        "bound_s": outcome.bound_s, "status": "OPTIMAL" if outcome.is_exhausted else "FEASIBLE",
        "num_candidates": outcome.num_candidates, "num_visited": outcome.num_visited,
        "cpu_s": time.process_time() - began,
    }  # fmt: skip
