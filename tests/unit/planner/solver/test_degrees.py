"""The one integer program over n_d * n_m * n_p = N, on the prices of a real model, against the search itself."""

from math import prod

import pytest

from planner.layout.layout import Layout
from planner.problem import Problem
from planner.problems import DegreeProblem
from planner.solver.cp_sat import CpSatSolver
from planner.solver.exhaustive import ExhaustiveSolver
from planner.solver.search import search
from tests.planning import problem_of


def degrees_of(choice: Layout) -> tuple[int, int, int]:
    """(data, tensor, pipeline); context parallelism is left out of the program."""
    return choice.mesh.dp, choice.mesh.tp, choice.mesh.pp


def degree_problem(problem: Problem) -> DegreeProblem:
    """For every triple of degrees the best that the search finds within it."""
    choices = [c for c in problem.space.layouts if c.mesh.cp == 1]
    times: dict[tuple[int, int, int], float] = {}
    memory: dict[tuple[int, int, int], float] = {}
    for degrees in {degrees_of(c) for c in choices}:
        found = search(problem.table, [c for c in choices if degrees_of(c) == degrees], problem.solver)
        if found.best is not None:
            times[degrees], memory[degrees] = found.best.step_time_s, found.best.peak_memory_bytes
    return DegreeProblem(
        problem.table.cluster.num_devices, times, memory, problem.table.cluster.devices[0].memory_bytes
    )


@pytest.mark.parametrize(("model", "num_devices", "hardware"), [("llama-tiny", 8, "cpu-gloo"), ("gpt-tiny", 12, None)])
def test_the_program_the_enumeration_and_the_search_agree(model: str, num_devices: int, hardware: str | None) -> None:
    options = {"batch": 24, "seq_len": 64} | ({} if hardware is None else {"hardware": hardware})
    problem = problem_of(model, num_devices, **options)
    degrees = degree_problem(problem)
    assert len(degrees.step_time_s) > 4
    answers = [solver.solve_degrees(degrees) for solver in (CpSatSolver(), ExhaustiveSolver())]
    whole = search(problem.table, [c for c in problem.space.layouts if c.mesh.cp == 1], problem.solver)
    assert whole.best is not None
    for answer in answers:
        assert answer is not None
        assert prod(answer.degrees) == num_devices
        assert answer.step_time_s == pytest.approx(whole.best.step_time_s, rel=1e-6)
