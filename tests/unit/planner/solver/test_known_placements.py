import json
from dataclasses import replace

import pytest

from planner.layout.deadline import Deadline
from planner.problems import PlacementProblem, PlacementSolution
from planner.solver.cp_sat import CpSatSolver
from planner.solver.known_placements import KnownPlacements, cost_of, digest

# Two operators with two strategies each; the cheap ones do not go together.
PROBLEM = PlacementProblem(((1, 5), (2, 11)), ((0, 1, ((None, 0), (3, 1))),))
ANSWER = PlacementSolution((1, 0), 10, 10)


class Memory:
    """A store without a disk."""

    def __init__(self) -> None:
        self.entries: dict[str, bytes] = {}

    def read(self, name: str) -> bytes | None:
        return self.entries.get(name)

    def write(self, name: str, content: str) -> None:
        self.entries[name] = content.encode()


@pytest.fixture
def solved(monkeypatch: pytest.MonkeyPatch) -> list[PlacementProblem]:
    """The programs that CP-SAT is asked to solve."""
    asked: list[PlacementProblem] = []
    solve = CpSatSolver.solve_placement

    def counting(self: CpSatSolver, problem: PlacementProblem) -> PlacementSolution | None:
        asked.append(problem)
        return solve(self, problem)

    monkeypatch.setattr(CpSatSolver, "solve_placement", counting)
    return asked


def test_the_same_program_is_solved_once(solved: list[PlacementProblem]) -> None:
    store = Memory()
    for _ in range(2):
        assert KnownPlacements(store, Deadline.never()).solve_placement(PROBLEM) == ANSWER
    assert solved == [PROBLEM]


def test_without_a_store_every_program_is_solved(solved: list[PlacementProblem]) -> None:
    for _ in range(2):
        assert KnownPlacements(None, Deadline.never()).solve_placement(PROBLEM) == ANSWER
    assert len(solved) == 2


@pytest.mark.parametrize(
    "entry",
    [
        b"",
        b"\xff",
        b"[]",
        b"{}",
        b'{"choices": 3, "cost_ns": 10}',
        b'{"choices": ["1", "0"], "cost_ns": 10}',
        b'{"choices": [1], "cost_ns": 10}',
        b'{"choices": [1, 2], "cost_ns": 10}',
        b'{"choices": [-1, 0], "cost_ns": 10}',
        b'{"choices": [0, 0], "cost_ns": 3}',  # does not go together
        b'{"choices": [1, 0], "cost_ns": 9}',  # the answer to another program
        b'{"choices": [true, 0], "cost_ns": 10}',
    ],
)
def test_what_is_no_answer_is_made_again(entry: bytes, solved: list[PlacementProblem]) -> None:
    store = Memory()
    store.entries[digest(PROBLEM)] = entry
    assert KnownPlacements(store, Deadline.never()).solve_placement(PROBLEM) == ANSWER
    assert solved == [PROBLEM]
    assert json.loads(store.entries[digest(PROBLEM)]) == {"choices": [1, 0], "cost_ns": 10}


def test_what_is_not_proved_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    def hurried(_self: CpSatSolver, _problem: PlacementProblem) -> PlacementSolution:
        return replace(ANSWER, bound_ns=9)

    monkeypatch.setattr(CpSatSolver, "solve_placement", hurried)
    store = Memory()
    KnownPlacements(store, Deadline.never()).solve_placement(PROBLEM)
    assert not store.entries


def test_every_number_is_in_the_name() -> None:
    others = [
        PlacementProblem(((1, 5), (2, 9)), PROBLEM.edges),
        PlacementProblem(PROBLEM.node_costs_ns, ((0, 1, ((None, 0), (3, 0))),)),
        PlacementProblem(PROBLEM.node_costs_ns, ((0, 1, ((0, 0), (3, 1))),)),
        PlacementProblem(PROBLEM.node_costs_ns, ()),
    ]
    assert len({digest(each) for each in (PROBLEM, *others)}) == 5


def test_costs_are_those_of_operators_and_edges() -> None:
    found = {(s, t): cost_of(PROBLEM, (s, t)) for s in (0, 1) for t in (0, 1)}
    assert found == {(0, 0): None, (0, 1): 12, (1, 0): 10, (1, 1): 17}
