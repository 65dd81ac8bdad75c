"""Bounds of paths against what judges them: the simulation, and the actions' own order."""

import random

import numpy as np
import pytest

from costmodels.pipeline import Timeline, simulate
from costmodels.pipeline_paths import coefficients, rank_coefficients
from costmodels.vocabulary.schedules import SCHEDULES, ScheduleName

SHAPES = [
    (name, p, v, m)
    for name in SCHEDULES
    for p in (1, 2, 3, 4, 6)
    for v in (1, 2, 3, 5)
    for m in (1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 13, 16, 18, 24, 27, 30)
    if not name.rules.violations(p, v, m)
]


def run(shape: tuple[ScheduleName, int, int, int], times: np.ndarray, send_s: float) -> float:
    """Seconds of the simulated step; ``times`` [stages, 3]."""
    name, p, v, m = shape
    forward, inputs, weights = times.T.tolist()
    whole = (times[:, 1] + times[:, 2]).tolist()
    timeline: Timeline = simulate(name.rules.actions(p, v, m), forward, whole, send_s, (inputs, weights))
    return timeline.longest_rank_s if name.rules.overlaps_steps else timeline.makespan_s


def random_times(rng: random.Random, num_stages: int) -> np.ndarray:
    """Far from even, nearly even, some stages of nothing, or one stage alone."""
    kind = rng.randrange(4)
    times = np.array([[rng.random() for _ in range(3)] for _ in range(num_stages)])
    if kind == 0:
        times = times**5
    elif kind == 1:
        times = 1 + 0.1 * times
    elif kind == 2:
        times *= np.array([[rng.random() < 0.6] for _ in range(num_stages)])
    else:
        times *= np.eye(num_stages)[rng.randrange(num_stages)][:, None] + 0.02
    return times


@pytest.mark.parametrize("name", list(SCHEDULES))
def test_no_stage_times_take_less_than_the_bounds(name: ScheduleName) -> None:
    rng = random.Random(7)
    for shape in (shape for shape in SHAPES if shape[0] == name):
        bound = coefficients(*shape)
        counts, sends = rank_coefficients(*shape)
        for _ in range(4):
            times, send_s = random_times(rng, shape[1] * shape[2]), rng.choice([0.0, rng.random()])
            step = run(shape, times, send_s) * (1 + 1e-9)
            assert bound.least(*times.T).sum() + bound.sends * send_s <= step, shape
            sums = bound.forward * times[:, 0].sum() + bound.input_gradient * times[:, 1].sum()
            assert sums + bound.weight_gradient * times[:, 2].sum() + bound.sends * send_s <= step, shape
            assert ((counts * times).sum(axis=(1, 2)) + sends * send_s).max() <= step, shape
