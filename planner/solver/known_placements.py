"""Placement programs that were solved before: the same program has the same answer, today and tomorrow.

An entry's name is a digest of the program's numbers, and of nothing else: model, cluster and degree are in them. Only
proved answers are kept. One that is read is checked against the program, whose cost it must have; one that has another
cost, or that is no answer, is solved again. OR-Tools is imported for a program that is not known.
"""

from __future__ import annotations

import hashlib
import json
from typing import Protocol

from planner.layout.deadline import Deadline
from planner.problems import PlacementProblem, PlacementSolution
from planner.solver.base import PlacementSolver

# Counts up when entries of earlier versions must not be read any more.
VERSION = 1


class Store(Protocol):
    """Where entries are kept between processes."""

    def read(self, name: str) -> bytes | None:
        """The entry of that name; None where there is none."""
        ...

    def write(self, name: str, content: str) -> None:
        """Puts an entry there, where that is possible."""
        ...


class KnownPlacements(PlacementSolver):
    """Answers from ``store`` where they are there, else from CP-SAT, and puts them there."""

    def __init__(self, store: Store | None, deadline: Deadline) -> None:
        self._store, self._deadline = store, deadline

    def solve_placement(self, problem: PlacementProblem) -> PlacementSolution | None:
        """Strategies of least total cost."""
        if self._store is None:
            return self._solve(problem)
        name = digest(problem)
        found = _checked(self._store.read(name), problem)
        if found is None:
            found = self._solve(problem)
            if found is not None and found.cost_ns == found.bound_ns:
                self._store.write(name, json.dumps({"choices": found.choices, "cost_ns": found.cost_ns}))
        return found

    def _solve(self, problem: PlacementProblem) -> PlacementSolution | None:
        from planner.solver.cp_sat import CpSatSolver

        return CpSatSolver(deadline=self._deadline).solve_placement(problem)


def digest(problem: PlacementProblem) -> str:
    """SHA-256 of the program's numbers."""
    return hashlib.sha256(repr((VERSION, problem.node_costs_ns, problem.edges)).encode()).hexdigest()


def cost_of(problem: PlacementProblem, choices: tuple[int, ...]) -> int | None:
    """Nanoseconds of these strategies; None where they are not one an operator, or two of them do not go together."""
    costs = problem.node_costs_ns
    if len(choices) != len(costs) or any(not 0 <= s < len(own) for s, own in zip(choices, costs, strict=True)):
        return None
    paid = [matrix[choices[source]][choices[target]] for source, target, matrix in problem.edges]
    if any(each is None for each in paid):
        return None
    return sum(own[s] for s, own in zip(choices, costs, strict=True)) + sum(each or 0 for each in paid)


def _checked(content: bytes | None, problem: PlacementProblem) -> PlacementSolution | None:
    """The answer in ``content``, where it is one to ``problem``."""
    try:
        entry = json.loads(content or b"")
        choices, cost_ns = tuple(entry["choices"]), entry["cost_ns"]
    except (ValueError, TypeError, KeyError):
        return None
    if not all(type(each) is int for each in (*choices, cost_ns)) or cost_of(problem, choices) != cost_ns:
        return None
    return PlacementSolution(choices, cost_ns, cost_ns)
