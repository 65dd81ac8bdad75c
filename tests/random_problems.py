"""Random small instances of the three programs, the same on every run."""

import random
from itertools import product

from planner.problems import DegreeProblem, PlacementProblem, StageProblem

MIB = 1 << 20  # CP-SAT counts memory in these, so instances in whole MiB have one answer


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
    capacity = rng.choice((10**6, rng.randint(20, 120), rng.randint(30, 160)))
    return StageProblem(
        forward_s=tuple(forward for forward, _ in devices),
        backward_s=tuple(backward for _, backward in devices),
        static_bytes=tuple(float(MIB * rng.randint(0, 20)) for _ in range(num_units)),
        kept_bytes=tuple(float(MIB * rng.randint(0, 5)) for _ in range(num_units)),
        in_flight=tuple(min(m, num_ranks - r) if windowed else m for r in range(num_ranks)),
        room_bytes=tuple(float(MIB * (capacity - rng.randint(0, 10))) for _ in range(num_ranks)),
        num_microbatches=m,
        send_s=tuple(rng.choice((0.0, rng.uniform(0.0, 1.5))) for _ in range(num_ranks - 1)),
        windowed=windowed,
    )


def _random_device(rng: random.Random, num_units: int, *, alike: bool) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Forward and backward seconds of every unit on one kind of device."""
    forward = [1.0 if alike else rng.uniform(0.1, 4.0) for _ in range(num_units)]
    return tuple(forward), tuple(f * (2.0 if alike else rng.uniform(0.5, 3.0)) for f in forward)


def random_degrees(seed: int) -> DegreeProblem:
    rng = random.Random(seed)
    n = rng.choice((1, 2, 6, 8, 12, 16, 24, 30, 36))
    degrees = [d for d in range(1, n + 1) if n % d == 0]
    triples = [(a, b, n // a // b) for a, b in product(degrees, repeat=2) if n % (a * b) == 0]
    kept = [t for t in triples if rng.random() < rng.choice((0.3, 1.0))]
    foreign = [(1, 1, n + 1)] if rng.random() < 0.3 else []  # the wrong number of devices: never an answer
    return DegreeProblem(
        num_devices=n,
        step_time_s={t: rng.uniform(0.1, 10.0) for t in (*kept, *foreign)},
        memory_bytes={t: float(MIB * rng.randint(1, 100)) for t in (*kept, *foreign)},
        capacity_bytes=float(MIB * rng.choice((0, 30, 60, 1000))),
    )
