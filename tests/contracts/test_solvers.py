"""What every solver backend must do, over one list of backends; and that they agree on random small problems."""

import random
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest

from costmodels.pipeline import simulate
from costmodels.vocabulary.action import Transfer
from costmodels.vocabulary.schedules import ScheduleName
from planner.problems import PlacementProblem, StageProblem, StageSolution, of_stages, pipeline_bound_s, rank_sums
from planner.solver.base import PlacementSolver, StageSolver
from planner.solver.cp_sat import CpSatSolver
from planner.solver.dynamic_program import DynamicProgramSolver
from planner.solver.exhaustive import ExhaustiveSolver, placement_cost_ns
from tests.random_problems import random_placement, random_stages

SOLVERS: tuple[PlacementSolver, ...] = (CpSatSolver(), ExhaustiveSolver())
ORACLE = ExhaustiveSolver()
STAGE_SOLVERS: tuple[StageSolver, ...] = (ORACLE, DynamicProgramSolver())
NUM_RANDOM = 200
NUM_CHUNKS = 4  # of random instances, so that a failure names few of them

every_solver = pytest.mark.parametrize("solver", SOLVERS, ids=lambda s: type(s).__name__)
every_stage_solver = pytest.mark.parametrize("solver", STAGE_SOLVERS, ids=lambda s: type(s).__name__)
every_chunk = pytest.mark.parametrize("chunk", range(NUM_CHUNKS))


def seeds(chunk: int) -> range:
    return range(chunk, NUM_RANDOM, NUM_CHUNKS)


def stages(
    forward: Sequence[float], num_ranks: int, *, m: int, windowed: bool = True, send_s: tuple[float, ...] | None = None
) -> StageProblem:
    """A problem in which every stage fits as it is."""
    free = np.zeros((num_ranks, len(forward), len(forward) + 1))
    return StageProblem(
        forward_s=(tuple(forward),) * num_ranks,
        backward_s=(tuple(2 * f for f in forward),) * num_ranks,
        extra_s=free,
        once_s=free,
        num_microbatches=m,
        send_s=send_s or (0.0,) * (num_ranks - 1),
        windowed=windowed,
        receive_s=((0.0, 0.0),) * num_ranks,
    )


def least(solver: StageSolver, problem: StageProblem, limit_s: float = np.inf) -> StageSolution | None:
    """The cut of least bound."""
    return next(solver.cuts(problem, lambda: limit_s), None)


# -- known answers --------------------------------------------------------------------------------


@every_solver
def test_a_chain_pays_for_a_redistribution_only_where_it_is_worth_it(solver: PlacementSolver) -> None:
    # Each operator is cheap by strategy 1; going from 0 to 1 or back costs 3.
    change = ((0, 3), (3, 0))
    problem = PlacementProblem(((10, 4), (5, 4), (10, 2)), ((0, 1, change), (1, 2, change)))
    solution = solver.solve_placement(problem)
    assert solution is not None
    assert (solution.choices, solution.cost_ns, solution.bound_ns) == ((1, 1, 1), 10, 10)
    torn = PlacementProblem(((10, 4), (1, 9), (10, 2)), ((0, 1, change), (1, 2, change)))
    solution = solver.solve_placement(torn)
    assert solution is not None
    assert (solution.choices, solution.cost_ns) == ((1, 0, 1), 4 + 3 + 1 + 3 + 2)


@every_solver
def test_an_impossible_edge_is_never_taken(solver: PlacementSolver) -> None:
    problem = PlacementProblem(((0, 9), (0, 9)), ((0, 1, ((None, None), (7, 0))),))
    solution = solver.solve_placement(problem)
    assert solution is not None
    assert (solution.choices, solution.cost_ns) == ((1, 0), 9 + 7)
    assert solver.solve_placement(replace(problem, edges=((0, 1, ((None, None), (None, None))),))) is None


@every_stage_solver
def test_four_equal_layers_on_two_devices_are_halved(solver: StageSolver) -> None:
    solution = least(solver, stages([1.0] * 4, 2, m=8))
    assert solution is not None
    assert solution.starts == (0, 2)
    assert solution.bound_s == pytest.approx((8 + 2 - 1) * 6.0)


@every_stage_solver
def test_memory_moves_a_cut(solver: StageSolver) -> None:
    unbalanced = stages([1.0, 1.0, 1.0, 3.0], 2, m=4)
    assert (solution := least(solver, unbalanced)) is not None
    assert solution.starts == (0, 3)
    # Three units on the first rank are balanced, but only one fits there.
    tight = replace(unbalanced, extra_s=unbalanced.extra_s.copy())
    tight.extra_s[0, 0, 2:] = np.inf
    assert (solution := least(solver, tight)) is not None
    assert solution.starts == (0, 1)
    tight.extra_s[0] = np.inf
    assert least(solver, tight) is None


@every_stage_solver
def test_what_is_recomputed_moves_a_cut(solver: StageSolver) -> None:
    problem = stages([1.0] * 4, 2, m=8)
    problem.extra_s[0, 0, 2:] = 4.0  # two units on the first rank recompute for longer than a third takes on the other
    assert (solution := least(solver, problem)) is not None
    assert solution.starts == (0, 1)


@every_stage_solver
def test_as_many_ranks_as_units_leave_one_cut(solver: StageSolver) -> None:
    solution = least(solver, stages([3.0, 1.0, 2.0], 3, m=5, windowed=False))
    assert solution is not None
    assert solution.starts == (0, 1, 2)


@every_stage_solver
def test_only_what_beats_the_limit_is_an_answer(solver: StageSolver) -> None:
    problem = stages([1.0] * 4, 2, m=8)
    assert least(solver, problem, 54.0) is None
    found = least(solver, problem, 54.01)
    assert found is not None
    assert found.starts == (0, 2)


# -- agreement ------------------------------------------------------------------------------------


@every_chunk
def test_placements_agree(chunk: int) -> None:
    for seed in seeds(chunk):
        problem = random_placement(seed)
        answers = [solver.solve_placement(problem) for solver in SOLVERS]
        assert len({None if a is None else a.cost_ns for a in answers}) == 1, (seed, answers)
        for answer in answers:
            if answer is not None:
                assert answer.cost_ns == answer.bound_ns == placement_cost_ns(problem, answer.choices), seed


@every_chunk
def test_stages_agree(chunk: int) -> None:
    for seed in seeds(chunk):
        problem = random_stages(seed)
        oracle, found = (least(solver, problem) for solver in STAGE_SOLVERS)
        assert (oracle is None) == (found is None), seed
        if oracle is None or found is None:
            continue
        assert np.isfinite(of_stages(problem.extra_s, found.starts)).all(), seed
        assert found.bound_s <= oracle.bound_s * (1 + 1e-12), seed
        if is_plain(problem):  # what other stages recompute is left out of the bound
            assert found.bound_s == pytest.approx(oracle.bound_s, rel=1e-12), seed
            assert found.bound_s == pytest.approx(pipeline_bound_s(problem, found.starts), rel=1e-12), seed


@every_chunk
def test_every_cut_below_the_limit_is_listed_once(chunk: int) -> None:
    for seed in seeds(chunk):
        problem = random_stages(seed)
        every = list(ORACLE.cuts(problem, lambda: np.inf))
        if not every:
            continue
        limit_s = every[len(every) // 2].bound_s * (1 + 1e-9)
        found = [solution.starts for solution in DynamicProgramSolver().cuts(problem, lambda at=limit_s: at)]
        wanted = {solution.starts for solution in every if solution.bound_s < limit_s}
        assert len(found) == len(set(found)), seed
        assert wanted <= set(found), seed
        if is_plain(problem):
            assert wanted == set(found), seed


def is_plain(problem: StageProblem) -> bool:
    """Nothing is recomputed: a stage fits or does not."""
    return not ((problem.extra_s > 0) & np.isfinite(problem.extra_s)).any()


def test_random_instances_are_of_every_sort() -> None:
    """The agreement above means something only where there are feasible and infeasible instances of each sort."""
    problems = [random_stages(seed) for seed in range(NUM_RANDOM)]
    sorts: dict[str, Callable[[StageProblem], bool]] = {
        "1F1B": lambda p: p.windowed,
        "GPipe": lambda p: not p.windowed,
        "m < p": lambda p: p.num_microbatches < p.num_ranks,
        "m > p": lambda p: p.num_microbatches > p.num_ranks > 1,
        "mixed": lambda p: len(set(p.forward_s)) > 1,
        "recomputed": lambda p: not is_plain(p),
        "infeasible": lambda p: least(ORACLE, p) is None,
        "feasible": lambda p: least(ORACLE, p) is not None,
        "on demand": lambda p: any(map(any, p.receive_s)),
        "bound by memory": lambda p: (
            (found := least(ORACLE, p)) is not None
            and found != least(ORACLE, replace(p, extra_s=np.zeros_like(p.extra_s)))
        ),
    }
    for name, belongs in sorts.items():
        assert sum(map(belongs, problems)) >= 10, name
    solved = [ORACLE.solve_placement(random_placement(seed)) for seed in range(NUM_RANDOM)]
    assert 10 <= sum(answer is None for answer in solved) <= NUM_RANDOM - 50


# -- the formula that the programs minimise ---------------------------------------------------------


def makespan_s(problem: StageProblem, starts: tuple[int, ...]) -> float:
    """What the schedule itself takes, simulated action by action, and what the slowest rank does once behind it."""
    schedule = ScheduleName("1F1B" if problem.windowed else "GPipe").rules.actions(
        problem.num_ranks, 1, problem.num_microbatches
    )
    forward, extra = rank_sums(problem.forward_s, starts), of_stages(problem.extra_s, starts)
    backward = [b + e for b, e in zip(rank_sums(problem.backward_s, starts), extra, strict=True)]
    once_s = max(of_stages(problem.once_s, starts))
    received = [first for first, _ in problem.receive_s[1:]]  # what a rank waits before a forward pass is one way
    if any(received):
        return simulate(schedule, forward, backward, received, transfer=Transfer.ON_DEMAND).makespan_s + once_s
    return simulate(schedule, forward, backward, problem.send_s).makespan_s + once_s


@every_chunk
def test_the_bound_never_exceeds_the_simulated_schedule(chunk: int) -> None:
    for seed in range(chunk, 4 * NUM_RANDOM, NUM_CHUNKS):
        problem = random_stages(seed)
        rng = random.Random(seed)
        starts = (0, *sorted(rng.sample(range(1, problem.num_units), problem.num_ranks - 1)))
        bound, simulated = pipeline_bound_s(problem, starts), makespan_s(problem, starts)
        assert bound <= simulated * (1 + 1e-9), (seed, starts)


@pytest.mark.parametrize("windowed", [True, False])
@pytest.mark.parametrize(("num_ranks", "m"), [(1, 3), (2, 2), (2, 9), (4, 4), (4, 5), (4, 16), (7, 8)])
def test_the_bound_is_exact_for_equal_stages_and_free_sends(num_ranks: int, m: int, windowed: bool) -> None:
    problem = stages([1.5] * num_ranks, num_ranks, m=m, windowed=windowed)
    starts = tuple(range(num_ranks))
    expected = (m + num_ranks - 1) * 4.5
    assert pipeline_bound_s(problem, starts) == pytest.approx(expected)
    assert makespan_s(problem, starts) == pytest.approx(expected)


@pytest.mark.parametrize("num_ranks", [2, 3, 5])
def test_gpipe_is_exact_with_fewer_micro_batches_than_ranks(num_ranks: int) -> None:
    problem = stages([1.0] * num_ranks, num_ranks, m=1, windowed=False, send_s=(0.25,) * (num_ranks - 1))
    starts = tuple(range(num_ranks))
    assert pipeline_bound_s(problem, starts) == pytest.approx(3.0 * num_ranks + 0.5 * (num_ranks - 1))
    assert makespan_s(problem, starts) == pytest.approx(pipeline_bound_s(problem, starts))
