"""Bounds of paths against what judges them: the simulation, and the least of all cuts by another solver."""

import random
from collections.abc import Iterator

import numpy as np
import pytest
from numpy.typing import NDArray
from ortools.linear_solver import pywraplp

from costmodels.pipeline import simulate
from costmodels.pipeline_hops import ROUNDS
from costmodels.pipeline_paths import (
    ALIKE,
    SPLIT,
    WHOLE,
    coefficients,
    few_paths,
    has_paths,
    rank_coefficients,
    unlike_coefficients,
)
from costmodels.vocabulary.action import Action
from costmodels.vocabulary.schedules import SCHEDULES, ScheduleName

Array = NDArray[np.float64]
Shape = tuple[ScheduleName, int, int, int]


def shapes(name: ScheduleName, ranks: tuple[int, ...], stages: tuple[int, ...]) -> Iterator[Shape]:
    """Few and many micro-batches, with rounds of p and of more."""
    for p in ranks:
        for v in stages:
            numbers = sorted({*range(1, 2 * p + 2), 3 * p, 3 * p + 1, 3 * p + 3, 4 * p, 5 * p, 6 * p + 2, 9 * p})
            yield from ((name, p, v, m) for m in numbers if not name.rules.violations(p, v, m))


def step_s(shape: Shape, times: Array, send_s: float) -> float:
    """Seconds of the simulated step; ``times`` [stages, 3]."""
    name, p, v, m = shape
    forward, inputs, weights = times.T.tolist()
    whole = (times[:, 1] + times[:, 2]).tolist()
    timeline = simulate(name.rules.actions(p, v, m), forward, whole, send_s, (inputs, weights))
    return timeline.longest_rank_s if name.rules.overlaps_steps else timeline.makespan_s


def random_times(rng: random.Random, num_stages: int) -> Array:
    """Far from even, nearly even, some stages of nothing, one stage nearly alone, or one kind alone."""
    kind = rng.randrange(5)
    times = np.array([[rng.random() for _ in range(3)] for _ in range(num_stages)])
    if kind == 0:
        return times**5
    if kind == 1:
        return 1 + 0.1 * times
    if kind == 2:
        return times * np.array([[rng.random() < 0.6] for _ in range(num_stages)])
    if kind == 3:
        return times * (np.eye(num_stages)[rng.randrange(num_stages)][:, None] + 0.02)
    return times * np.eye(3)[rng.randrange(3)]


@pytest.mark.parametrize("name", list(SCHEDULES))
def test_no_stage_times_take_less_than_the_bounds(name: ScheduleName) -> None:
    rng = random.Random(7)
    for shape in shapes(name, (1, 2, 3, 4, 6), (1, 2, 3)):
        bound = coefficients(*shape)
        counts, sends = rank_coefficients(*shape)
        for _ in range(4):
            times, send_s = random_times(rng, shape[1] * shape[2]), rng.choice([0.0, rng.random()])
            step = step_s(shape, times, send_s) * (1 + 1e-9)
            assert bound.least(*times.T).sum() + bound.sends * send_s <= step, shape
            sums = bound.forward * times[:, 0].sum() + bound.input_gradient * times[:, 1].sum()
            assert sums + bound.weight_gradient * times[:, 2].sum() + bound.sends * send_s <= step, shape
            assert ((counts * times).sum(axis=(1, 2)) + sends * send_s).max() <= step, shape


@pytest.mark.parametrize("name", [name for name in SCHEDULES if name not in ("GPipe", "ZB-2P")])
def test_no_stage_times_take_less_than_many_paths(name: ScheduleName) -> None:
    rng = random.Random(8)
    units = SPLIT if name.rules.splits_backward else WHOLE
    for shape in shapes(name, (2, 3, 4), (1, 2, 3)):
        bound = coefficients(*shape, units=rng.choice([units, ALIKE]), thorough=True)
        for _ in range(4):
            times, send_s = random_times(rng, shape[1] * shape[2]), rng.choice([0.0, rng.random()])
            step = step_s(shape, times, send_s) * (1 + 1e-9)
            assert bound.least(*times.T).sum() + bound.sends * send_s <= step, shape


@pytest.mark.parametrize("name", [name for name in SCHEDULES if name not in ("GPipe", "ZB-2P")])
def test_no_path_is_longer_than_the_step(name: ScheduleName) -> None:
    """Each path by itself, whether or not the mean has it."""
    rng = random.Random(9)
    for shape in shapes(name, (2, 3, 5), (1, 2, 3)):
        paths = few_paths(*shape, ALIKE)
        counts = shape[3] * paths.own[:, :, None] + paths.gains
        assert counts.min() >= 0, shape
        for _ in range(3):
            times, send_s = random_times(rng, shape[1] * shape[2]), rng.choice([0.0, rng.random()])
            longest = (np.tensordot(counts, times, axes=2) + paths.sends * send_s).max()
            assert longest <= step_s(shape, times, send_s) * (1 + 1e-9), shape


@pytest.mark.parametrize("name", [name for name in SCHEDULES if name not in ("GPipe", "ZB-2P")])
def test_what_runs_before_the_first_round_has_left_does_not_depend_on_later_rounds(name: ScheduleName) -> None:
    """And what runs after the last round has come, seen from the end: paths of many rounds are made in ``ROUNDS``."""
    long = [(p, v, m) for p in (2, 3, 4, 7) for v in (1, 2, 3) for m in range(5 * p, 9 * p)]
    for p, v, m in [numbers for numbers in long if not name.rules.violations(*numbers)]:
        short, a_round = name.rules.shortened(p, m, ROUNDS), name.rules.microbatches_a_round(p, m)
        assert short < m
        assert not name.rules.violations(p, v, short)
        for actions, others in zip(name.rules.actions(p, v, short), name.rules.actions(p, v, m), strict=True):
            last = max(i for i, (kind, _, k) in enumerate(actions) if k < a_round and kind != "W")
            assert actions[: last + 1] == others[: last + 1]
            first = min(i for i, (kind, _, k) in enumerate(actions) if k >= short - a_round and kind != "W")
            after = [(kind, stage, short - k) for kind, stage, k in actions[first:]]
            assert after == [(kind, stage, m - k) for kind, stage, k in others[first - len(actions) :]]


def least_of_all_cuts(shape: Shape, unit: tuple[float, float, float], slowness: tuple[float, ...] = ()) -> float:
    """The shortest step of any cut of a model into stages, in fractions of a unit: a linear program over the actions.

    The model takes the seconds of ``unit`` on one micro-batch, and so many times as long on each rank. Shares nothing
    with what it judges but the lists.
    """
    name, p, v, m = shape
    slow = slowness or (1.0,) * p
    solver = pywraplp.Solver.CreateSolver("GLOP")
    parts = [solver.NumVar(0, 1, "") for _ in range(p * v)]
    solver.Add(sum(parts) == 1)
    seconds = {"F": unit[0], "I": unit[1], "W": unit[2], "B": unit[1] + unit[2]}
    lists = name.rules.actions(p, v, m)
    ends = {action: solver.NumVar(0, solver.infinity(), "") for actions in lists for action in actions}
    step = solver.NumVar(0, solver.infinity(), "")
    for actions in lists:
        for before, action in zip((None, *actions), actions, strict=False):
            kind, stage, microbatch = action
            took = seconds[kind] * parts[stage] * slow[name.rules.rank_of(stage, p)]
            needed = [before] if before else []
            if kind == "F":
                needed += [Action("F", stage - 1, microbatch)]
            elif kind != "W":
                needed += [Action("B", stage + 1, microbatch), Action("I", stage + 1, microbatch)]
                needed += [Action("F", p * v - 1, microbatch)]
            solver.Add(step >= ends[action])
            solver.Add(ends[action] >= took)
            for other in needed:
                if other in ends:
                    solver.Add(ends[action] >= ends[other] + took)
    solver.Minimize(step)
    assert solver.Solve() == pywraplp.Solver.OPTIMAL
    return step.solution_value()


@pytest.mark.parametrize(
    ("name", "p", "v", "m", "few", "many"),
    [
        ("1F1B", 4, 1, 4, 0.999, 0.999),
        ("1F1B", 4, 1, 12, 0.999, 0.999),
        ("GPipe", 4, 1, 6, 0.999, 0.999),
        ("Interleaved1F1B", 2, 2, 4, 0.99, 0.999),
        ("Interleaved1F1B", 4, 2, 4, 0.93, 0.99),
        ("Interleaved1F1B", 4, 2, 7, 0.95, 0.99),
        ("Interleaved1F1B", 4, 2, 24, 0.985, 0.995),
        ("Interleaved1F1B", 4, 3, 8, 0.975, 0.995),
        ("InterleavedZeroBubble", 4, 1, 8, 0.999, 0.999),
        ("InterleavedZeroBubble", 4, 2, 8, 0.98, 0.999),
        ("InterleavedZeroBubble", 4, 3, 8, 0.98, 0.998),
        ("ZBVZeroBubble", 4, 2, 8, 0.985, 0.999),
        ("ZBVZeroBubble", 4, 2, 20, 0.985, 0.995),
        ("DualPipeV", 4, 2, 8, 0.985, 0.99),
    ],
)
def test_no_cut_takes_less_and_one_hardly_more(name: str, p: int, v: int, m: int, few: float, many: float) -> None:
    shape = (ScheduleName(name), p, v, m)
    least = least_of_all_cuts(shape, (1.0, 1.0, 1.0))
    for thorough, share in ((False, few), (True, many)):
        found = float(coefficients(*shape, thorough=thorough).least(*np.ones((3, 1)))[0])
        assert share * least <= found <= least * (1 + 1e-7)


@pytest.mark.parametrize(
    ("name", "p", "v", "m", "slowness", "share"),
    [
        ("1F1B", 3, 1, 6, (1.0, 2.0, 2.0), 0.999),
        ("Interleaved1F1B", 2, 2, 4, (1.0, 2.0), 0.99),
        ("Interleaved1F1B", 2, 3, 2, (2.0, 1.0), 0.95),
        ("Interleaved1F1B", 4, 2, 8, (1.0, 1.0, 3.0, 3.0), 0.93),
        ("InterleavedZeroBubble", 3, 1, 9, (1.5, 1.0, 1.0), 0.99),
        ("InterleavedZeroBubble", 2, 2, 4, (1.0, 1.5), 0.97),
        ("ZBVZeroBubble", 4, 2, 8, (1.0, 1.0, 2.0, 2.0), 0.95),
        ("ZBVZeroBubble", 2, 2, 6, (2.0, 1.0), 0.97),
    ],
)
def test_over_unlike_ranks_no_cut_takes_less_and_one_hardly_more(
    name: str, p: int, v: int, m: int, slowness: tuple[float, ...], share: float
) -> None:
    shape = (ScheduleName(name), p, v, m)
    least = least_of_all_cuts(shape, (1.0, 1.0, 1.0), slowness)
    of_ranks = zip(unlike_coefficients(*shape, slowness), slowness, strict=True)
    found = min(float(bound.least(*np.full((3, 1), slow))[0]) for bound, slow in of_ranks)
    assert share * least <= found <= least * (1 + 1e-7)


@pytest.mark.parametrize("name", [name for name in SCHEDULES if has_paths(name, 2)])
def test_no_units_on_unlike_ranks_take_less_than_the_bound(name: ScheduleName) -> None:
    """Whatever the units take on each rank, wherever they lie, and for any slowness that was taken."""
    rng = random.Random(10)
    for shape in shapes(name, (2, 3, 4), (1, 2, 3)):
        p, num_stages = shape[1], shape[1] * shape[2]
        bounds = unlike_coefficients(*shape, tuple(rng.choice([1.0, 1.3, 4.0]) for _ in range(p)))
        for _ in range(4):
            units = np.array([random_times(rng, 2 * num_stages) for _ in range(p)])  # [ranks, units, 3]
            stages, send_s = np.zeros((num_stages, 3)), rng.choice([0.0, rng.random()])
            for unit in range(2 * num_stages):
                stage = rng.randrange(num_stages)
                stages[stage] += units[name.rules.rank_of(stage, p), unit]
            least = np.min([bound.least(*times.T) for bound, times in zip(bounds, units, strict=True)], axis=0)
            step = step_s(shape, stages, send_s) * (1 + 1e-9)
            assert least.sum() + bounds[0].sends * send_s <= step, shape


@pytest.mark.parametrize(
    ("name", "p", "v", "m", "extra"),
    [
        ("1F1B", 4, 1, 8, 3),
        ("1F1B", 6, 1, 30, 5),
        ("GPipe", 5, 1, 7, 4),
        ("InterleavedZeroBubble", 4, 1, 12, 1),  # a third of 1F1B's bubble
        ("InterleavedZeroBubble", 4, 2, 8, 1 / 2),
    ],
)
def test_the_even_cut_takes_no_more_than_the_bound(name: str, p: int, v: int, m: int, extra: float) -> None:
    found = coefficients(ScheduleName(name), p, v, m, thorough=v > 1)
    assert found.least(*np.ones((3, 1)))[0] == pytest.approx(3 * (m + extra) / p, rel=1e-3)
    even = step_s((ScheduleName(name), p, v, m), np.ones((p * v, 3)), 0.0)
    assert found.least(*np.full((3, p * v), 1.0)).sum() == pytest.approx(even, rel=1e-3)


def test_a_wide_pipeline_has_more_than_its_average_rank() -> None:
    found = coefficients(ScheduleName("Interleaved1F1B"), 32, 4, 128)
    assert 128 + 0.95 * 31 / 8 <= 32 * found.forward <= 128 + 31 / 4
    assert found.forward == pytest.approx(found.backward, rel=1e-3)


def test_numbers_that_cannot_run_are_refused() -> None:
    with pytest.raises(ValueError, match="DualPipeV needs at least as many micro-batches"):
        coefficients(ScheduleName("DualPipeV"), 4, 2, 4)
    with pytest.raises(ValueError, match="GPipe on 2 ranks has no few paths"):
        unlike_coefficients(ScheduleName("GPipe"), 2, 1, 4, (1.0, 2.0))
