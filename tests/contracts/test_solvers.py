"""What every solver backend must do, over one list of backends; and that they agree on random small problems."""

import random
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from costmodels.pipeline import simulate
from costmodels.vocabulary.schedules import ScheduleName
from planner.problems import (
    DegreeProblem,
    PlacementProblem,
    StageProblem,
    fits,
    pipeline_bound_s,
    rank_sums,
)
from planner.solver.base import Solver, StageSolver
from planner.solver.cp_sat import CpSatSolver
from planner.solver.dynamic_program import DynamicProgramSolver
from planner.solver.exhaustive import ExhaustiveSolver, placement_cost_ns
from tests.random_problems import MIB, random_degrees, random_placement, random_stages

SOLVERS: tuple[Solver, ...] = (CpSatSolver(), ExhaustiveSolver())
STAGE_SOLVERS: tuple[StageSolver, ...] = (*SOLVERS, DynamicProgramSolver())
NUM_RANDOM = 200
NUM_CHUNKS = 4  # of random instances, so that a failure names few of them
# CP-SAT rounds each unit's times to a millionth of the model's; a rank works m micro-batches of a few units.
TICK_TOLERANCE = 1e-4

every_solver = pytest.mark.parametrize("solver", SOLVERS, ids=lambda s: type(s).__name__)
every_stage_solver = pytest.mark.parametrize("solver", STAGE_SOLVERS, ids=lambda s: type(s).__name__)
every_chunk = pytest.mark.parametrize("chunk", range(NUM_CHUNKS))


def seeds(chunk: int) -> range:
    return range(chunk, NUM_RANDOM, NUM_CHUNKS)


def stages(
    forward: Sequence[float], num_ranks: int, *, m: int, windowed: bool = True, **changes: tuple[float, ...]
) -> StageProblem:
    """A problem without memory limits, to be narrowed by ``changes``."""
    free = (0.0,) * len(forward)
    return replace(
        StageProblem(
            forward_s=(tuple(forward),) * num_ranks,
            backward_s=(tuple(2 * f for f in forward),) * num_ranks,
            static_bytes=free,
            kept_bytes=free,
            in_flight=tuple(min(m, num_ranks - r) if windowed else m for r in range(num_ranks)),
            room_bytes=(1.0,) * num_ranks,
            num_microbatches=m,
            send_s=(0.0,) * (num_ranks - 1),
            windowed=windowed,
        ),
        **changes,
    )


# -- known answers --------------------------------------------------------------------------------


@every_solver
def test_a_chain_pays_for_a_redistribution_only_where_it_is_worth_it(solver: Solver) -> None:
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
def test_an_impossible_edge_is_never_taken(solver: Solver) -> None:
    problem = PlacementProblem(((0, 9), (0, 9)), ((0, 1, ((None, None), (7, 0))),))
    solution = solver.solve_placement(problem)
    assert solution is not None
    assert (solution.choices, solution.cost_ns) == ((1, 0), 9 + 7)
    assert solver.solve_placement(replace(problem, edges=((0, 1, ((None, None), (None, None))),))) is None


@every_stage_solver
def test_four_equal_layers_on_two_devices_are_halved(solver: StageSolver) -> None:
    solution = solver.solve_stages(stages([1.0] * 4, 2, m=8))
    assert solution is not None
    assert solution.starts == (0, 2)
    assert solution.bound_s == pytest.approx((8 + 2 - 1) * 6.0)


@every_stage_solver
def test_memory_moves_a_cut(solver: StageSolver) -> None:
    # The first rank of 1F1B holds two micro-batches: three units would be balanced, only one fits.
    unbalanced = stages([1.0, 1.0, 1.0, 3.0], 2, m=4)
    assert (solution := solver.solve_stages(unbalanced)) is not None
    assert solution.starts == (0, 3)
    tight = replace(unbalanced, kept_bytes=(10.0 * MIB,) * 4, room_bytes=(30.0 * MIB,) * 2)
    assert (solution := solver.solve_stages(tight)) is not None
    assert solution.starts == (0, 1)
    assert solver.solve_stages(replace(tight, room_bytes=(29.0 * MIB,) * 2)) is None


@every_stage_solver
def test_as_many_ranks_as_units_leave_one_cut(solver: StageSolver) -> None:
    solution = solver.solve_stages(stages([3.0, 1.0, 2.0], 3, m=5, windowed=False))
    assert solution is not None
    assert solution.starts == (0, 1, 2)


@every_stage_solver
def test_only_what_beats_the_cutoff_is_an_answer(solver: StageSolver) -> None:
    problem = stages([1.0] * 4, 2, m=8)
    assert solver.solve_stages(problem, cutoff_s=54.0) is None
    found = solver.solve_stages(problem, cutoff_s=54.01)
    assert found is not None
    assert found.starts == (0, 2)


@every_solver
def test_degrees_multiply_to_the_devices_and_fit(solver: Solver) -> None:
    problem = DegreeProblem(
        num_devices=8,
        step_time_s={(8, 1, 1): 1.0, (4, 2, 1): 2.0, (2, 2, 2): 3.0, (1, 1, 1): 0.1},
        memory_bytes={(8, 1, 1): 90.0 * MIB, (4, 2, 1): 50.0 * MIB, (2, 2, 2): 20.0 * MIB, (1, 1, 1): 1.0 * MIB},
        capacity_bytes=80.0 * MIB,
    )
    solution = solver.solve_degrees(problem)
    assert solution is not None
    assert (solution.degrees, solution.step_time_s) == ((4, 2, 1), 2.0)
    assert solver.solve_degrees(replace(problem, capacity_bytes=10.0 * MIB)) is None
    assert solver.solve_degrees(DegreeProblem(8, {}, {}, 1.0)) is None


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
        answers = [solver.solve_stages(problem) for solver in STAGE_SOLVERS]
        assert len({a is None for a in answers}) == 1, (seed, answers)
        for answer in answers:
            if answer is not None:
                assert fits(problem, answer.starts), seed
                assert answer.bound_s == pipeline_bound_s(problem, answer.starts), seed
        times = [a.bound_s for a in answers if a is not None]
        if times:
            assert max(times) <= min(times) * (1 + TICK_TOLERANCE), (seed, answers)


@every_chunk
def test_stages_agree_under_a_cutoff(chunk: int) -> None:
    for seed in seeds(chunk):
        problem = random_stages(seed)
        best = SOLVERS[1].solve_stages(problem)
        if best is None:
            continue
        for solver in STAGE_SOLVERS:
            assert solver.solve_stages(problem, best.bound_s * (1 - TICK_TOLERANCE)) is None, seed
            found = solver.solve_stages(problem, best.bound_s * (1 + 2 * TICK_TOLERANCE))
            assert found is not None, seed
            assert found.bound_s <= best.bound_s * (1 + TICK_TOLERANCE), seed


@pytest.mark.parametrize(("num_blocks", "num_ranks", "m"), [(32, 4, 16), (80, 8, 64), (96, 16, 64)])
def test_cp_sat_and_dynamic_program_agree_on_real_sizes(num_blocks: int, num_ranks: int, m: int) -> None:
    """A large embedding and head, memory that binds on the first ranks, sends that cost something."""
    problem = stages([0.2, *[1.0] * num_blocks, 0.9], num_ranks, m=m, send_s=(0.02,) * (num_ranks - 1))
    each = 1.05 * num_blocks / num_ranks * num_ranks * 10.0 * MIB
    problem = replace(problem, kept_bytes=(10.0 * MIB,) * problem.num_units, room_bytes=(each,) * num_ranks)
    answers = [solver.solve_stages(problem) for solver in (CpSatSolver(), DynamicProgramSolver())]
    times = [answer.bound_s for answer in answers if answer is not None]
    assert len(times) == 2
    assert max(times) <= min(times) * (1 + TICK_TOLERANCE)


@every_chunk
def test_degrees_agree(chunk: int) -> None:
    for seed in seeds(chunk):
        answers = [solver.solve_degrees(random_degrees(seed)) for solver in SOLVERS]
        assert len(set(answers)) == 1, (seed, answers)


def test_random_instances_are_of_every_sort() -> None:
    """The agreement above means something only where there are feasible and infeasible instances of each sort."""
    oracle = ExhaustiveSolver()
    problems = [random_stages(seed) for seed in range(NUM_RANDOM)]
    sorts: dict[str, Callable[[StageProblem], bool]] = {
        "1F1B": lambda p: p.windowed,
        "GPipe": lambda p: not p.windowed,
        "m < p": lambda p: p.num_microbatches < p.num_ranks,
        "m > p": lambda p: p.num_microbatches > p.num_ranks > 1,
        "mixed": lambda p: len(set(p.forward_s)) > 1,
        "infeasible": lambda p: oracle.solve_stages(p) is None,
        "feasible": lambda p: oracle.solve_stages(p) is not None,
        "bound by memory": lambda p: (
            (found := oracle.solve_stages(p)) is not None
            and found != oracle.solve_stages(replace(p, room_bytes=(1e18,) * p.num_ranks))
        ),
    }
    for name, belongs in sorts.items():
        assert sum(map(belongs, problems)) >= 10, name
    solved = [oracle.solve_placement(random_placement(seed)) for seed in range(NUM_RANDOM)]
    assert 10 <= sum(answer is None for answer in solved) <= NUM_RANDOM - 50
    degrees = [oracle.solve_degrees(random_degrees(seed)) for seed in range(NUM_RANDOM)]
    assert 10 <= sum(answer is None for answer in degrees) <= NUM_RANDOM - 50


# -- the formula that the programs minimise ---------------------------------------------------------


def makespan_s(problem: StageProblem, starts: tuple[int, ...]) -> float:
    """What the schedule itself takes, simulated action by action."""
    schedule = ScheduleName("1F1B" if problem.windowed else "GPipe").rules.actions(
        problem.num_ranks, 1, problem.num_microbatches
    )
    forward, backward = rank_sums(problem.forward_s, starts), rank_sums(problem.backward_s, starts)
    return simulate(schedule, forward, backward, problem.send_s).makespan_s


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
