"""What blocks recompute so that a rank fits, against every way in which they could."""

from dataclasses import replace
from itertools import product

import pytest

from costmodels.vocabulary.choices import Recompute
from planner.evaluation.evaluator import Evaluator
from planner.evaluation.least_recompute import LeastRecompute
from planner.layout.layout import Pins
from planner.problem import Problem
from tests.planning import problem_of


def scaled(problem: Problem, memory_bytes: float) -> Problem:
    """The same on devices of so much memory."""
    devices = tuple(replace(device, memory_bytes=memory_bytes) for device in problem.table.cluster.devices)
    table = replace(problem.table, cluster=replace(problem.table.cluster, devices=devices))
    return replace(problem, table=table)


@pytest.mark.parametrize("pins", [Pins(pp=1, zero=0, micro_batch=4), Pins(pp=2, micro_batch=2)])
@pytest.mark.parametrize("share", [0.05, 0.3, 0.6, 0.9, 1.0])
def test_no_other_choice_that_fits_takes_less(pins: Pins, share: float) -> None:
    whole = problem_of("llama-tiny", 2, batch=16, seq_len=512, pins=pins)
    layout = next(c for c in whole.space.layouts if c.schedule.rules.has_one_stage and c.recompute is None)
    evaluator = Evaluator(whole.table, layout)
    starts = evaluator.even_starts()
    blocks = [unit for unit, is_block in enumerate(whole.table.units.is_block) if is_block]
    every = [
        evaluator.with_modes([of_blocks.get(unit, Recompute.NONE) for unit in range(len(evaluator.modes))])
        for modes in product(Recompute, repeat=len(blocks))
        for of_blocks in [dict(zip(blocks, modes, strict=True))]
    ]
    needs = sorted(max(ledger.total_bytes for ledger in each.ledgers(starts)) for each in every)
    capacity = needs[0] + share * (needs[-1] - needs[0])
    problem = scaled(whole, capacity)
    found = LeastRecompute(Evaluator(problem.table, layout)).modes(starts)
    fitting = [each for each in every if max(ledger.total_bytes for ledger in each.ledgers(starts)) <= capacity]
    assert 0 < len(fitting) <= len(every)
    assert found is not None
    chosen = Evaluator(problem.table, layout, found).evaluate(starts)
    assert chosen.fits
    best_s = min(each.evaluate(starts).step_time_s for each in fitting)
    assert chosen.step_time_s == pytest.approx(best_s, rel=1e-9)


def test_where_nothing_fits_there_is_no_choice() -> None:
    problem = scaled(problem_of("llama-tiny", 2, batch=16, seq_len=512, pins=Pins(pp=1, zero=0)), 1e6)
    layout = problem.space.layouts[0]
    assert LeastRecompute(Evaluator(problem.table, layout)).modes((0,)) is None
