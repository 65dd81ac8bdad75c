"""Every (schedule, p, v, m) that is legal is legal everywhere: in plans, in the space, to bounds and to prices."""

from itertools import product
from types import SimpleNamespace

import pytest
from torch.distributed.pipelining import schedules as of_torch

from costmodels.vocabulary.choices import Optimizer, Precision, Recompute
from costmodels.vocabulary.mesh import Mesh
from costmodels.vocabulary.schedules import SCHEDULES, ScheduleName
from planner.axes.base import Asked
from planner.axes.pipeline import schedules
from planner.evaluation.evaluator import Evaluator
from planner.layout.layout import Layout, Limits, Pins, Training
from planner.pricing.table_builder import build_table
from planner.solver.bounds import bounds
from planner.table.keys import TensorSplit
from tests.planning import problem_of

IN_TORCH = [name for name in ScheduleName if name is not ScheduleName.ZB_2P]
# Every number of micro-batches up to twice the ranks and beyond, and long ones with an odd remainder.
MICRO_BATCHES = (*range(1, 20), 45, 63)
RANKS = (2, 4, 8)
STAGES = range(1, 5)
LIMITS = Limits(8, 8, 48, frozenset(), frozenset(), context_splits=False)


def legal() -> list[tuple[ScheduleName, int, int, int]]:
    cases = product(IN_TORCH, RANKS, STAGES, MICRO_BATCHES)
    return [(name, p, v, m) for name, p, v, m in cases if not SCHEDULES[name].violations(p, v, m)]


def torch_takes(name: ScheduleName, p: int, v: int, m: int) -> bool:
    """What torch's own constructor says, given stages that compute nothing."""

    def stage(index: int) -> SimpleNamespace:
        return SimpleNamespace(
            group_rank=0, group_size=p, num_stages=p * v, stage_index=index, has_backward=True, is_last=False,
            is_first=index == 0, stage_index_to_group_rank={s: SCHEDULES[name].rank_of(s, p) for s in range(p * v)},
            group=None, device="cpu", submod=None,
        )  # fmt: skip

    kind = of_torch.get_schedule_class(name.value)
    mine = [s for s in range(p * v) if SCHEDULES[name].rank_of(s, p) == 0]
    try:
        if issubclass(kind, of_torch.PipelineScheduleSingle):
            kind(stage(0), m, loss_fn=len)._check_inputs([()] * m, [{}] * m)  # type: ignore[arg-type]
        else:
            kind([stage(s) for s in mine], m, loss_fn=len)  # type: ignore[arg-type, list-item]
    except ValueError:
        return False
    return True


@pytest.mark.parametrize("name", [name for name in IN_TORCH if SCHEDULES[name].max_stages != 1])
def test_what_torch_takes_is_legal_and_nothing_else(name: ScheduleName) -> None:
    stages = [v for v in STAGES if v >= SCHEDULES[name].min_stages and v <= (SCHEDULES[name].max_stages or v)]
    for p, v, m in product(RANKS, stages, MICRO_BATCHES):
        is_legal = not SCHEDULES[name].violations(p, v, m)
        assert torch_takes(name, p, v, m) == is_legal, (name, p, v, m)


def test_the_space_has_every_legal_schedule() -> None:
    for p, m in product(RANKS, MICRO_BATCHES):
        asked = Asked(Training(8 * m, 64, Precision.BF16, Optimizer.ADAMW), Pins(), LIMITS)
        found = {(name, v) for name, v in schedules(asked, p, m) if v in STAGES}
        assert found == {(name, v) for name, ranks, v, micro in legal() if (ranks, micro) == (p, m)}, (p, m)


def test_each_has_a_bound_and_a_price_above_it() -> None:
    """Fewer micro-batches than ranks, and numbers that are no multiple of the ranks, too."""
    posed = problem_of("gpt2-1.5b", 8, batch=64)
    layouts = [
        Layout(Mesh(pp=p, dp_replicate=8 // p), 0, 1, m, name, v, Recompute.NONE, False) for name, p, v, m in legal()
    ]
    split = TensorSplit(1, False)
    table = build_table(posed.target, posed.space.training, {split: posed.decisions[split]}, layouts)
    lower = bounds(table, layouts)
    for index, layout in enumerate(layouts):
        evaluator = Evaluator(table, layout)
        exact = evaluator.evaluate(evaluator.even_starts(), exact=layout.num_microbatches < 20)
        assert 0 < lower.step_time_s[index] <= exact.step_time_s * (1 + 1e-9), layout
        assert 0 < lower.memory_bytes[index] <= exact.peak_memory_bytes * (1 + 1e-9), layout


@pytest.mark.parametrize("m", [27, 45, 63])
def test_a_long_schedule_that_is_no_multiple_of_its_ranks_is_extrapolated_rightly(m: int) -> None:
    posed = problem_of("gpt2-1.5b", 8, batch=64)
    split = TensorSplit(1, False)
    for name, p, v in [(ScheduleName.INTERLEAVED_1F1B, 8, 2), (ScheduleName.INTERLEAVED_ZERO_BUBBLE, 4, 3)]:
        if SCHEDULES[name].violations(p, v, m):
            continue
        layout = Layout(Mesh(pp=p, dp_replicate=8 // p), 0, 1, m, name, v, Recompute.NONE, False)
        table = build_table(posed.target, posed.space.training, {split: posed.decisions[split]}, [layout])
        evaluator = Evaluator(table, layout)
        starts = evaluator.even_starts()
        steady, exact = evaluator.evaluate(starts), evaluator.evaluate(starts, exact=True)
        assert steady.step_time_s == pytest.approx(exact.step_time_s, rel=1e-9), layout


@pytest.mark.parametrize("name", [ScheduleName.ZBV_ZERO_BUBBLE, ScheduleName.DUAL_PIPE_V])
def test_a_v_that_is_full_holds_no_more_however_long_it_runs(name: ScheduleName) -> None:
    rules = SCHEDULES[name]
    for p in range(2, 9):
        for m in range(2 * p, 5 * p + 1):
            assert rules.shortened_to_peak(p, m) == 2 * p
            assert rules.in_flight_by_stage(p, 2, m) == rules.in_flight_by_stage(p, 2, 2 * p), (p, m)
