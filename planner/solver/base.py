"""The contract of a solver backend."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator

from planner.problems import PlacementProblem, PlacementSolution, StageProblem, StageSolution

Limit = Callable[[], float]
"""Seconds from which on nothing is of interest; it may fall between two answers."""


class UnprovedError(Exception):
    """A backend reached its time limit before it could prove its answer, or prove that there is none."""


class StageSolver(ABC):
    """What the search needs to cut pipelines."""

    def only_cut(self, num_stages: int) -> tuple[int, ...] | None:
        """The first unit of each of so many stages where no other cut is allowed; None: all cuts are."""
        del num_stages
        return None

    @abstractmethod
    def cuts(self, problem: StageProblem, limit_s: Limit) -> Iterator[StageSolution]:
        """Every cut whose ``pipeline_bound_s`` may be below the limit, the first with the least bound.

        The first solution's ``bound_s`` bounds all cuts. Nothing where no cut can be below the limit.
        """


class PlacementSolver(ABC):
    """What placing operators needs."""

    @abstractmethod
    def solve_placement(self, problem: PlacementProblem) -> PlacementSolution | None:
        """Strategies of least total cost; None where nothing is feasible.

        May be unproved, which shows in the solution's bound; UnprovedError where nothing was found in time.
        """
