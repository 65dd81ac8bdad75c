"""A search that is cut short: what it answers, and what it claims."""

from typing import Any

import pytest

from planner import problem as stages
from planner.api import find_plan
from planner.errors import TimeLimitError
from planner.evaluation.evaluator import Evaluated
from planner.graph.model_graph import ModelGraph
from planner.layout.deadline import Deadline, OutOfTimeError
from planner.layout.layout import NO_PINS, Layout, Pins
from planner.pricing import decisions
from planner.pricing.ideal import ideal_step_s
from planner.problem import solved_by
from planner.request import Request
from planner.solver import search as by_estimates
from planner.solver.base import StageSolver
from planner.solver.bounds import bounds
from planner.solver.cutting import Pricer
from planner.table.keys import TensorSplit
from tests.planning import A100, problem_of, training_of

BATCH, SEQ_LEN = 64, 1024


class UntilThereIsAPlan(Deadline):
    """Over with the first plan, however fast the machine is."""

    def is_over(self) -> bool:
        return self.has_answer


def made() -> UntilThereIsAPlan:
    return UntilThereIsAPlan(float("inf"), 0.0)


@pytest.mark.parametrize(
    "pins", [Pins(micro_batch=1, cp=1), Pins(tp=2, zero=3), Pins(pp=4, micro_batch=2), Pins(cp=2, pp=1)]
)
def test_the_first_plan_is_an_honest_answer(pins: Pins) -> None:
    whole = problem_of("gpt3-1.3b", 16, batch=BATCH, seq_len=SEQ_LEN, pins=pins)
    best = whole.solved().best
    first = solved_by(made(), whole.target, training_of(BATCH, SEQ_LEN), pins).outcome
    assert best is not None
    assert first.best is not None
    assert first.best.fits
    assert not first.is_exhausted
    assert 0 < first.bound_s <= best.step_time_s <= first.best.step_time_s
    assert first.best.layout in set(whole.space.layouts)  # it obeys the pins


@pytest.mark.parametrize("num_too_large", [0, by_estimates.NUM_TYPICAL])
def test_the_first_layout_that_fits_is_an_answer_at_once(num_too_large: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a limit of a second there was no plan.

    DeepSeek-V3 on 2,048 GPUs: one was known in time, and seven more were looked at. GPT-3 on 64 A100: none of the first
    eight fitted, and the ninth was not looked at.
    """
    target = problem_of("gpt3-1.3b", 16, batch=BATCH, seq_len=SEQ_LEN).target
    tried: list[Layout] = []
    probe = by_estimates.probe

    def late(pricer: Pricer, solver: StageSolver, best_s: float | None = None) -> Evaluated | None:
        tried.append(pricer.evaluator.layout)
        return None if len(tried) <= num_too_large else probe(pricer, solver, best_s)

    monkeypatch.setattr(by_estimates, "probe", late)
    first = solved_by(made(), target, training_of(BATCH, SEQ_LEN), NO_PINS).outcome
    assert first.best is not None
    assert tried[num_too_large:] == [first.best.layout]


def test_before_the_first_plan_only_typical_placements_are_decided(monkeypatch: pytest.MonkeyPatch) -> None:
    """They took most of the time before it."""
    target = problem_of("moe-tiny", 8, batch=16, seq_len=64).target
    asked: list[TensorSplit] = []
    decide = decisions.decide

    def counted(graph: ModelGraph, split: TensorSplit, *rest: Any) -> object:
        asked.append(split)
        return decide(graph, split, *rest)

    monkeypatch.setattr(decisions, "decide", counted)
    first = solved_by(made(), target, training_of(16, 64), NO_PINS).outcome
    assert first.best is not None
    assert asked == [TensorSplit(1, False), TensorSplit(8, True)]


@pytest.mark.parametrize("pins", [NO_PINS, Pins(tp=8), Pins(tp=8, sequence_parallel=False)])
def test_there_is_a_first_plan_though_the_sequence_cannot_be_split(pins: Pins) -> None:
    """1,020 tokens over 8 ranks: what is placed for a first plan has its layouts, or none."""
    target = problem_of("gpt3-1.3b", 16, batch=BATCH, seq_len=1020, pins=Pins(tp=1)).target
    first = solved_by(made(), target, training_of(BATCH, 1020), pins).outcome
    assert first.best is not None
    assert first.best.layout.mesh.tp == (pins.tp or 1)


@pytest.mark.parametrize(("model", "batch"), [("gpt3-1.3b", 64), ("moe-tiny", 16)])
def test_the_ideal_step_is_below_every_bound(model: str, batch: int) -> None:
    problem = problem_of(model, 8, batch=batch, seq_len=SEQ_LEN if model != "moe-tiny" else 64)
    ideal_s = ideal_step_s(problem.target, problem.space.training)
    least_s = bounds(problem.table, problem.space.layouts).step_time_s.min()
    assert 0 < ideal_s <= least_s


@pytest.mark.parametrize("phase", ["build_table", "build_space", "search"])
def test_whatever_phase_is_interrupted_there_is_the_first_plan(phase: str, monkeypatch: pytest.MonkeyPatch) -> None:
    target = problem_of("gpt3-1.3b", 16, batch=BATCH, seq_len=SEQ_LEN).target
    deadline = Deadline.never()
    function = getattr(stages, phase)

    def interrupted(*args: object, **options: object) -> object:
        if deadline.has_answer:
            raise KeyboardInterrupt
        return function(*args, **options)

    monkeypatch.setattr(stages, phase, interrupted)
    pins = Pins(micro_batch=1)
    outcome = solved_by(deadline, target, training_of(BATCH, SEQ_LEN), pins).outcome
    assert outcome.best is not None
    assert (outcome.interrupted, outcome.is_exhausted) == (True, False)


def test_an_interrupt_before_any_plan_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    target = problem_of("gpt3-1.3b", 16, batch=BATCH, seq_len=SEQ_LEN).target

    def interrupted(*_args: object, **_options: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(stages, "build_table", interrupted)
    with pytest.raises(KeyboardInterrupt):
        solved_by(Deadline.never(), target, training_of(BATCH, SEQ_LEN), NO_PINS)


def test_no_time_at_all_is_an_error_and_no_plan() -> None:
    target = problem_of("gpt3-1.3b", 16, batch=BATCH, seq_len=SEQ_LEN).target
    with pytest.raises(OutOfTimeError):
        solved_by(Deadline.within(0.0), target, training_of(BATCH, SEQ_LEN), NO_PINS)
    request = Request("llama-tiny", 4, hardware=A100, global_batch_size=8, seq_len=32, time_limit_s=0.0)
    with pytest.raises(TimeLimitError, match="no plan was found in time") as error:
        find_plan(request)
    assert error.value.exit_code == 4


def test_the_plan_says_how_far_it_may_be_from_the_best() -> None:
    request = Request("llama-tiny", 4, hardware=A100, global_batch_size=8, seq_len=32)
    section = find_plan(request, None, made()).plan.search
    assert section is not None
    assert section.status == "FEASIBLE"
    assert 0 < section.gap < 1
    assert section.elapsed_s > 0
