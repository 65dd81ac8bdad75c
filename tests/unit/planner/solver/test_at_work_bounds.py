"""Bounds of memory while a unit is at work: never above the ledger of any cut, whatever its blocks recompute."""

import random
from typing import NamedTuple

import numpy as np
import pytest

from costmodels.vocabulary.choices import ContextMethod, Precision
from costmodels.vocabulary.schedules import ScheduleName
from planner.evaluation.cuts import is_allowed
from planner.evaluation.evaluator import Evaluator
from planner.layout.layout import Pins
from planner.problem import Problem
from planner.request import load_cluster, target_of
from planner.solver.bounds import bounds
from tests.planning import A100, graph_of, problem_of, training_of

ROUNDING = 1 + 1e-9
NUM_LAYOUTS, NUM_CUTS = 40, 3
MIXED = "dgx-a100-40gb:8,dgx-h100-80gb:8"


class _Passes(NamedTuple):
    schedule: ScheduleName


def problem_under(framework: str, model: str, num_devices: int, batch: int, seq_len: int, pins: Pins) -> Problem:
    hardware, number = (A100, num_devices) if num_devices else (MIXED, None)
    target = target_of(graph_of(model, seq_len), load_cluster(hardware, number, []), Precision.BF16, framework, [])
    return Problem.build(target, training_of(batch, seq_len), pins)


def drawn_cut(rng: random.Random, evaluator: Evaluator) -> tuple[int, ...] | None:
    """Any cut that the layout allows; None where none was drawn."""
    units, layout = evaluator.table.units, evaluator.layout
    for _ in range(200):
        starts = (0, *sorted(rng.sample(range(1, len(units.kinds)), evaluator.num_stages - 1)))
        if layout.schedule.rules.has_one_stage or is_allowed(starts, units, are_alike=layout.has_alike_stages):
            return starts
    return None


INTERLEAVED = Pins(schedule=ScheduleName.INTERLEAVED_1F1B)
CASES = [
    ("planner", "moe-tiny", 8, 32, 64, Pins()),
    ("planner", "moe-tiny", 8, 8, 64, Pins()),  # a single micro-batch, often
    ("planner", "moe-tiny", 8, 32, 64, Pins(offload_activations=True)),
    ("planner", "gpt2-1.5b", 8, 16, 1024, Pins()),  # tied
    ("planner", "gpt2-1.5b", 16, 64, 1024, INTERLEAVED),
    ("planner", "deepseek-v3", 64, 64, 4096, Pins(zero=3)),
    ("planner", "deepseek-v3", 64, 64, 4096, Pins(zero=1)),
    ("megatron-core", "deepseek-v3", 64, 64, 4096, Pins(cp_method=ContextMethod.RING)),
    ("megatron-core", "moe-tiny", 8, 32, 64, Pins()),
    ("planner", "moe-tiny", 0, 32, 64, Pins()),  # of unlike devices
    ("planner", "gpt2-1.5b", 0, 32, 1024, Pins(pp=4)),
    ("deepspeed", "moe-tiny", 8, 32, 64, Pins()),
    ("nanotron", "llama-tiny", 8, 32, 64, Pins()),
]


@pytest.mark.parametrize(("framework", "model", "num_devices", "batch", "seq_len", "pins"), CASES)
def test_no_cut_needs_less_than_the_bound(
    framework: str, model: str, num_devices: int, batch: int, seq_len: int, pins: Pins
) -> None:
    problem, rng = problem_under(framework, model, num_devices, batch, seq_len, pins), random.Random(7)
    table, layouts = problem.table, problem.space.layouts
    places = rng.sample(range(len(layouts)), min(NUM_LAYOUTS, len(layouts)))
    lower = bounds(table, layouts.take(np.array(places))).memory_bytes
    for layout, bound in zip(layouts.at(np.array(places)), lower.tolist(), strict=True):
        plain = Evaluator(table, layout)
        for number in range(NUM_CUTS):
            starts = drawn_cut(rng, plain)
            if starts is None:
                break
            free = plain.free_modes[-1:] if number == 0 else plain.free_modes
            evaluator = plain.with_modes(
                [rng.choice(free) if each else plain.modes[0] for each in table.units.is_block]
            )
            needed = [ledger.total_bytes for ledger in evaluator.ledgers(starts)]
            shares = [each / room for each, room in zip(needed, evaluator.capacity_bytes, strict=True)]
            assert bound <= max(shares) * table.cluster.devices[0].memory_bytes * ROUNDING, (layout, starts)


def test_gradients_of_a_block_of_experts_count() -> None:
    """256 experts of three matrices, whole on a rank: 2 bytes each as they are made, 4 in the buffer they leave by."""
    pins = Pins(zero=3, tp=1, ep=1)
    problem = problem_of("deepseek-v3", 256, batch=512, seq_len=4096, pins=pins)
    layouts = problem.space.layouts.where(_Passes, lambda key: not key.schedule.rules.splits_backward)
    assert len(layouts) > 100
    assert (bounds(problem.table, layouts).memory_bytes > (2 + 4) * 256 * 3 * 7168 * 2048).all()
