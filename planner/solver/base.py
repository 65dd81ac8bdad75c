"""The contract of a solver backend."""

from __future__ import annotations

from abc import ABC, abstractmethod

from planner.problems import (
    DegreeProblem,
    DegreeSolution,
    PlacementProblem,
    PlacementSolution,
    StageProblem,
    StageSolution,
)


class UnprovedError(Exception):
    """A backend reached its time limit before it could prove its answer, or prove that there is none."""


class StageSolver(ABC):
    """What the search needs of a backend."""

    @abstractmethod
    def solve_stages(self, problem: StageProblem, cutoff_s: float | None = None) -> StageSolution | None:
        """Stages of least ``pipeline_bound_s`` within memory; None also when none is below ``cutoff_s``."""


class PlacementSolver(ABC):
    """What decides placements."""

    @abstractmethod
    def solve_placement(self, problem: PlacementProblem) -> PlacementSolution | None:
        """Strategies of least total cost, or the least known: the solution's bound tells."""


class Solver(StageSolver, PlacementSolver):
    """A backend for all three programs: each method returns a proved optimum, or None where nothing is feasible.

    UnprovedError where the backend gives up before it knows.

    The exception: ``solve_placement`` may return what it could not prove, which shows in the solution's bound.
    """

    @abstractmethod
    def solve_degrees(self, problem: DegreeProblem) -> DegreeSolution | None:
        """Degrees of least step time within memory."""
