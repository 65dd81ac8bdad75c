"""How near the bounds of paths come to the even cut: ``python -m benchmarks.pipeline_paths``.

All units take equally long forward, for the gradient of their input and for that of their weights; sends are free. A
bound and the even cut's simulated step are told in steps of an average rank without a bubble, so both are m and a part
of the bubble. Prints Markdown: the few paths in closed form, the many, and the processor time either takes the first
time. The even cut is not the best one in fractions of units: less on the last ranks is better where stages interleave.
"""

from __future__ import annotations

import time

import numpy as np

from costmodels.pipeline import simulate
from costmodels.pipeline_paths import coefficients
from costmodels.vocabulary.schedules import ScheduleName

# (schedule, ranks, stages a rank, micro-batches)
SHAPES = [
    ("1F1B", 4, 1, 4),
    ("1F1B", 8, 1, 32),
    ("GPipe", 8, 1, 16),
    ("Interleaved1F1B", 2, 2, 8),
    ("Interleaved1F1B", 4, 2, 4),
    ("Interleaved1F1B", 4, 2, 8),
    ("Interleaved1F1B", 4, 2, 32),
    ("Interleaved1F1B", 4, 5, 16),
    ("Interleaved1F1B", 8, 2, 16),
    ("Interleaved1F1B", 8, 2, 64),
    ("Interleaved1F1B", 8, 3, 20),
    ("Interleaved1F1B", 8, 4, 64),
    ("Interleaved1F1B", 16, 2, 32),
    ("Interleaved1F1B", 16, 4, 64),
    ("Interleaved1F1B", 32, 2, 128),
    ("InterleavedZeroBubble", 8, 1, 16),
    ("InterleavedZeroBubble", 8, 2, 16),
    ("InterleavedZeroBubble", 8, 4, 32),
    ("ZBVZeroBubble", 4, 2, 8),
    ("ZBVZeroBubble", 8, 2, 32),
    ("ZBVZeroBubble", 16, 2, 64),
    ("DualPipeV", 4, 2, 8),
    ("DualPipeV", 8, 2, 32),
    ("DualPipeV", 16, 2, 64),
]


def main() -> None:
    """Prints a line for each shape."""
    print("| schedule | p | v | m | even cut | few paths | of even | ms | many paths | of even | ms |")
    print("| --- |" + " ---: |" * 10)
    for name, p, v, m in SHAPES:
        schedule = ScheduleName(name)
        even = even_steps(schedule, p, v, m)
        cells = [name, str(p), str(v), str(m), f"{even:.3f}"]
        for thorough in (False, True):
            began = time.process_time()
            bound = coefficients(schedule, p, v, m, thorough=thorough)
            took_s = time.process_time() - began
            steps = float(bound.least(*np.ones((3, 1)))[0]) * p / 3
            cells += [f"{steps:.3f}", f"{steps / even:.1%}", f"{took_s * 1e3:.1f}"]
        print("| " + " | ".join(cells) + " |")


def even_steps(schedule: ScheduleName, p: int, v: int, m: int) -> float:
    """The even cut's step, simulated, over what an average rank works on one micro-batch."""
    ones = [1.0] * (p * v)
    timeline = simulate(schedule.rules.actions(p, v, m), ones, [2.0] * (p * v), 0.0, (ones, ones))
    return timeline.makespan_s / (3 * v)


if __name__ == "__main__":
    main()
