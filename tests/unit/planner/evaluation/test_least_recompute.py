"""What blocks recompute so that a rank fits, against every way in which they could."""

from dataclasses import replace
from itertools import product

import pytest

from costmodels.vocabulary.choices import Recompute
from costmodels.vocabulary.schedules import ScheduleName
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


@pytest.mark.parametrize("name", ["Interleaved1F1B", "GPipe", "1F1B"])
def test_ranks_that_share_an_answer_would_find_it_alone(name: str) -> None:
    """Where ranks hold as much, what is found for the first is right for each by itself, with nothing known."""
    pins = Pins(pp=4, schedule=ScheduleName(name), micro_batch=1)
    whole = problem_of("gpt2-1.5b", 4, batch=4, seq_len=512, pins=pins)
    layout = next(c for c in whole.space.layouts if c.recompute is None)
    evaluator = Evaluator(whole.table, layout)
    starts = evaluator.even_starts()
    least = evaluator.with_modes([Recompute.FULL] * len(evaluator.modes))
    most, fewest = (max(ledger.total_bytes for ledger in each.ledgers(starts)) for each in (evaluator, least))
    problem = scaled(whole, (most + fewest) / 2)
    together = LeastRecompute(Evaluator(problem.table, layout))
    recomputing = 0
    for rank, stages in enumerate(evaluator.stages_of_ranks(starts)):
        alone = LeastRecompute(Evaluator(problem.table, layout)).of_rank(rank, stages)
        assert together.of_rank(rank, stages) == alone, rank
        recomputing += alone is not None and any(mode != Recompute.NONE for mode in alone.modes.values())
    assert recomputing


def test_ranks_are_alike_only_if_they_hold_as_much() -> None:
    problem = problem_of("gpt2-1.5b", 4, batch=8, seq_len=512, pins=Pins(pp=4))
    for layout in {(c.schedule, c.virtual_stages, c.num_microbatches): c for c in problem.space.layouts}.values():
        evaluator = Evaluator(problem.table, layout)
        first: dict[object, list[float]] = {}
        for rank, stages in enumerate(evaluator.stages_of_ranks(evaluator.even_starts())):
            kept = {stage: float(1 + place) for place, stage in enumerate(stages)}
            held = list(evaluator.in_flight.most_bytes(rank, kept, kept).numbers)
            assert first.setdefault(evaluator.in_flight.like(rank), held) == held, (layout, rank)
