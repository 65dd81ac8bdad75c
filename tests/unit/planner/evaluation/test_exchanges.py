"""Exchanges of experts beside other micro-batches: by hand on short schedules, and in steps of a real model."""

from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from costmodels.overlap import Overlap
from costmodels.recipe import load_recipe
from costmodels.vocabulary.action import BACKWARD, FORWARD, INPUT_GRADIENT, WEIGHT_GRADIENT, Action
from costmodels.vocabulary.choices import Recompute
from costmodels.vocabulary.schedules import ScheduleName
from costmodels.vocabulary.terms import Holding, MemoryTerm, Term
from planner.evaluation.evaluator import Evaluated, Evaluator
from planner.evaluation.exchanges import StageExchanges, unhidden_s, without_pipeline
from planner.layout.layout import Pins
from planner.pricing.target import PricingTarget
from planner.problem import Problem
from planner.solver.bounds import bounds
from tests.planning import cluster_of, graph_of, training_of

PERFECT = Overlap(fraction=1.0, slowdown=0.0)
STAGE = StageExchanges(
    forward_s=3.0, backward_s=5.0, compute_forward_s=4.0, compute_backward_s=8.0, weight_s=6.0, overlap=PERFECT
)


def actions(*written: tuple[str, int]) -> tuple[Action, ...]:
    return tuple(Action(kind, 0, microbatch) for kind, microbatch in written)  # type: ignore[arg-type]


def test_what_stands_alone_is_exposed_and_pairs_hide_behind_each_other() -> None:
    """F 3 s behind the 8 s of B; B 5 s behind the 4 s of F: one is left."""
    schedule = (actions((FORWARD, 0), (FORWARD, 1), (BACKWARD, 0), (BACKWARD, 1)),)
    assert unhidden_s(schedule, [STAGE]) == ((3.0, 0.0, 1.0, 5.0),)


def test_a_backward_pass_does_not_run_beside_the_forward_pass_that_it_needs() -> None:
    assert unhidden_s((actions((FORWARD, 0), (BACKWARD, 0)),), [STAGE]) == ((3.0, 5.0),)


def test_half_a_backward_pass_hides_less_and_weight_gradients_exchange_nothing() -> None:
    """The 3 s of F behind 8 - 6 = 2 s of the input's gradient."""
    schedule = (actions((FORWARD, 1), (INPUT_GRADIENT, 0), (WEIGHT_GRADIENT, 0)),)
    assert unhidden_s(schedule, [STAGE]) == ((1.0, 1.0, 0.0),)


def test_overlap_is_as_imperfect_as_the_profile_says() -> None:
    """Half of 8 s hides 3 s of F at a slowdown of a tenth; half of 4 s hides 2 of the 5 s of B."""
    stage = STAGE._replace(overlap=Overlap(fraction=0.5, slowdown=0.1))
    ((forward, backward),) = unhidden_s((actions((FORWARD, 1), (BACKWARD, 0)),), [stage])
    assert stage.least_s(3.0) + forward == pytest.approx(0.3)
    assert stage.least_s(5.0) + backward == pytest.approx(3.2)


def test_without_a_pipeline_all_but_the_first_and_last_pass_have_another_beside_them() -> None:
    (found,) = unhidden_s(without_pipeline(4), [STAGE])
    assert found == (3.0, 0.0, 1.0, 0.0, 1.0, 0.0, 1.0, 5.0)
    assert without_pipeline(1) == (actions((FORWARD, 0), (BACKWARD, 0)),)


@cache
def problem(*schedules: ScheduleName, without_a_pipeline: bool = False, batch: int = 256, pp: int = 4) -> Problem:
    """Experts over two nodes, hosts that nothing waits for; ``schedules``: under which exchanges hide."""
    known = load_recipe("megatron-core-overlap")
    at_once = known.host_s_per_kernel.model_copy(update={"value": 1e-6})
    facts = {"exchanges_hide_under": schedules, "exchanges_hide_without_pipeline": without_a_pipeline}
    hosts = {"host_s_per_kernel": at_once, "host_s_per_collective": at_once}
    recipe = known.model_copy(update={**facts, **hosts})
    graph = graph_of("mixtral-8x7b", 1024)
    target = replace(PricingTarget(graph, cluster_of("dgx-h100-80gb", 64), "bf16"), recipe=recipe)
    pins = Pins(tp=2, pp=pp, cp=1, ep=8, micro_batch=1, zero=1, recompute=Recompute.NONE, sequence_parallel=False)
    return Problem.build(target, training_of(batch, 1024), pins)


def step(posed: Problem, schedule: ScheduleName, stages: int) -> Evaluated:
    layouts = [x for x in posed.space.layouts if x.schedule is schedule and x.virtual_stages == stages]
    point = Evaluator(posed.table, layouts[0])
    return point.evaluate(point.even_starts(), exact=True)


@pytest.mark.parametrize(("schedule", "stages"), [(ScheduleName.INTERLEAVED_1F1B, 4), (ScheduleName.DUAL_PIPE_V, 2)])
def test_a_step_is_faster_by_what_is_hidden_and_the_ends_of_it_are_not(schedule: ScheduleName, stages: int) -> None:
    exposed, hidden = step(problem(), schedule, stages), step(problem(schedule), schedule, stages)
    assert hidden.step_time_s < exposed.step_time_s
    least_s = cluster_of("dgx-h100-80gb", 64).profile.software.overlap_slowdown.value * exposed.breakdown[Term.EXPERT]
    assert least_s < hidden.breakdown[Term.EXPERT] < exposed.breakdown[Term.EXPERT]
    assert hidden.breakdown[Term.COMPUTE] == exposed.breakdown[Term.COMPUTE]
    assert sum(hidden.breakdown.values()) == pytest.approx(hidden.step_time_s)


def test_more_micro_batches_hide_a_greater_share() -> None:
    schedule = ScheduleName.INTERLEAVED_1F1B
    shares = [
        step(problem(schedule, batch=batch), schedule, 4).breakdown[Term.EXPERT]
        / step(problem(batch=batch), schedule, 4).breakdown[Term.EXPERT]
        for batch in (64, 256)
    ]
    assert shares[1] < shares[0]


def test_other_schedules_expose_them() -> None:
    one, other = problem(), problem(ScheduleName.DUAL_PIPE_V)
    assert step(one, ScheduleName.ONE_F_ONE_B, 1) == step(other, ScheduleName.ONE_F_ONE_B, 1)


def test_without_a_pipeline_one_pass_fills_what_another_empties() -> None:
    """Unit by unit: the next micro-batch goes forward through one more unit, then the last one back through one."""
    posed = [problem(without_a_pipeline=flag, pp=1) for flag in (False, True)]
    exposed, hidden = (Evaluator(each.table, each.space.layouts[0]) for each in posed)
    units = range(len(exposed.table.units.kinds))
    kept = [exposed.memory_model.held(unit, Holding.KEPT) for unit in units]
    now = most = sum(kept)
    for filled, emptied in zip(units, reversed(units), strict=True):
        now += kept[filled]
        most = max(most, now)
        now -= kept[emptied]
    steps = [each.evaluate((0,)) for each in (exposed, hidden)]
    held = [each.ledgers[0].bytes_of(MemoryTerm.ACTIVATIONS) for each in steps]
    assert steps[1].step_time_s < steps[0].step_time_s
    assert held == pytest.approx([sum(kept), most])
    assert held[0] < held[1] < 1.2 * held[0]


def test_bounds_hold_where_exchanges_hide() -> None:
    posed = problem(ScheduleName.INTERLEAVED_1F1B, ScheduleName.DUAL_PIPE_V)
    layouts = list(posed.space.layouts)
    lower = bounds(posed.table, layouts).step_time_s
    points = [Evaluator(posed.table, layout) for layout in layouts]
    prices = np.array([point.evaluate(point.even_starts()).step_time_s for point in points])
    assert {layout.schedule for layout in layouts} >= {ScheduleName.INTERLEAVED_1F1B, ScheduleName.DUAL_PIPE_V}
    assert (lower <= prices * (1 + 1e-9)).all()
