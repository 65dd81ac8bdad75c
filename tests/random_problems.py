"""Random small instances of the two programs, the same on every run."""

import random

import numpy as np

from planner.problems import PlacementProblem, StageProblem


def random_placement(seed: int) -> PlacementProblem:
    rng = random.Random(seed)
    sizes = [rng.randint(1, 4) for _ in range(rng.randint(2, 6))]
    impossible = rng.choice((0.0, 0.2, 0.6))

    def matrix(rows: int, columns: int) -> tuple[tuple[int | None, ...], ...]:
        return tuple(
            tuple(None if rng.random() < impossible else rng.choice((0, rng.randint(1, 9))) for _ in range(columns))
            for _ in range(rows)
        )

    edges = [
        (i, j, matrix(sizes[i], sizes[j])) for j in range(1, len(sizes)) for i in range(j) if rng.random() < 2 / (j - i)
    ]
    edges += edges[:1] if rng.random() < 0.2 else []  # an operand that is used twice
    return PlacementProblem(tuple(tuple(rng.randint(0, 9) for _ in range(n)) for n in sizes), tuple(edges))


def random_stages(seed: int) -> StageProblem:
    rng = random.Random(seed)
    num_units = rng.randint(2, 10)
    num_ranks = rng.randint(1, min(4, num_units))
    windowed = rng.random() < 0.6
    m = rng.randint(1, num_ranks) if rng.random() < 0.4 else rng.randint(num_ranks, 12)
    m = max(m, num_ranks) if windowed else m  # torch's 1F1B needs a micro-batch for every stage
    alike = rng.random() < 0.3
    kinds = [_random_device(rng, num_units, alike=alike) for _ in range(rng.choice((1, 1, 2, 3)))]
    borders = sorted(rng.randint(1, num_ranks) for _ in kinds[1:])
    devices = [kinds[sum(border <= rank for border in borders)] for rank in range(num_ranks)]
    on_demand, ways = rng.random() < 0.4, tuple(rng.choice((0.0, rng.uniform(0.0, 1.5))) for _ in range(num_ranks - 1))
    return StageProblem(
        forward_s=tuple(forward for forward, _ in devices),
        backward_s=tuple(backward for _, backward in devices),
        extra_s=_random_extra_s(rng, num_ranks, num_units),
        once_s=np.array(
            [[[rng.choice((0.0, 0.2 * (b - a))) for b in range(num_units + 1)] for a in range(num_units)]] * num_ranks
        ),
        num_microbatches=m,
        send_s=(0.0,) * len(ways) if on_demand else ways,
        windowed=windowed,
        receive_s=tuple(zip((0.0, *ways), (*ways, 0.0), strict=True)) if on_demand else ((0.0, 0.0),) * num_ranks,
    )


def _random_extra_s(rng: random.Random, num_ranks: int, num_units: int) -> np.ndarray:
    """Stages of up to so many units fit each rank; those of one or two more do where they recompute."""
    found = np.zeros((num_ranks, num_units, num_units + 1))
    recomputes = rng.random() < 0.4
    for rank in range(num_ranks):
        fits = rng.choice((num_units, rng.randint(1, num_units)))
        for start in range(num_units):
            for end in range(start + fits + 1, num_units + 1):
                more = end - start - fits
                found[rank, start, end] = 0.3 * more if recomputes and more <= 2 else np.inf
    return found


def _random_device(rng: random.Random, num_units: int, *, alike: bool) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Forward and backward seconds of every unit on one kind of device."""
    forward = [1.0 if alike else rng.uniform(0.1, 4.0) for _ in range(num_units)]
    return tuple(forward), tuple(f * (2.0 if alike else rng.uniform(0.5, 3.0)) for f in forward)
