"""What hooks of sharded parameters add to passes: seconds of the host, as far as this has none to spare."""

from dataclasses import replace

import numpy as np
import pytest

from costmodels.vocabulary.choices import Offload, Precision
from costmodels.vocabulary.terms import PLACE, Pass, Term, Time
from planner.evaluation.unit_times import Hiding, LayoutRows, unit_times
from planner.layout.columns import Columns
from planner.pricing.target import PricingTarget
from planner.problem import Problem
from planner.table.cost_table import CostTable
from planner.table.facts import ShardedHooks
from tests.planning import A100, NO_PINS, cluster_of, graph_of, training_of

# Powers of two, so that a sum tells which of them it has; beside them nothing is spare on the toy's blocks.
HOOKS = ShardedHooks(forward_s=1024.0, backward_s=2048.0, gather_s=4096.0, reduce_s=8192.0)


def toy(precision: Precision) -> Problem:
    target = PricingTarget(graph_of("llama3-8b", 2048), cluster_of(A100, 8), precision.value)
    return Problem.build(target, training_of(32, 2048), NO_PINS)


def with_hooks(table: CostTable, hooks: ShardedHooks | None) -> CostTable:
    return replace(table, framework=replace(table.framework, hooks=hooks))


@pytest.mark.parametrize("precision", [Precision.FP32, Precision.BF16])
def test_each_zero_stage_has_its_own_hooks(precision: Precision) -> None:
    """Parameters that are left whole have none; ZeRO 3 gathers in both passes, ZeRO 2 and 3 reduce."""
    problem = toy(precision)
    layouts = problem.space.layouts
    rows = LayoutRows.of(problem.table, layouts)
    hooked, bare = (unit_times(with_hooks(problem.table, hooks), rows, 0) for hooks in (HOOKS, None))
    time_s = problem.table.time_s[0][rows.work, np.minimum(rows.mode, problem.table.time_s.shape[2] - 1)]
    stages = layouts.numbers("zero_stage").astype(int)
    offloads = [layout.offload is not Offload.NONE for layout in (layouts[i] for i in range(len(layouts)))]
    assert set(stages) == {0, 1, 2, 3}
    forward = {0: 1024.0, 1: 1024.0, 2: 1024.0, 3: 5120.0}
    backward = {0: 2048.0, 1: 2048.0, 2: 10240.0, 3: 14336.0}
    for run, expected, spare in (
        (Pass.FORWARD, forward, Time.SPARE_FORWARD),
        (Pass.BACKWARD, backward, Time.SPARE_BACKWARD),
    ):
        more = hooked.term_s(Term.COMPUTE, run) - bare.term_s(Term.COMPUTE, run)
        for place, (stage, offloaded) in enumerate(zip(stages, offloads, strict=True)):
            whole = precision is Precision.FP32 and stage == 0 and not offloaded
            late = 0.0 if whole else expected[stage] - time_s[place, :, PLACE[spare]]
            assert more[place] == pytest.approx(np.broadcast_to(late, more[place].shape), abs=1e-6)


def test_at_most_so_much_compute_hides_what_happens_once_a_step() -> None:
    """Of hooks that take some of what is spare, all of it and more, under every mode that the layouts have."""
    problem = toy(Precision.BF16)
    layouts: Columns = problem.space.layouts
    rows = LayoutRows.of(problem.table, layouts)
    for factor in (1e-8, 1e-6, 1e-4):
        table = with_hooks(problem.table, ShardedHooks(*(factor * seconds for seconds in HOOKS)))
        times, most = unit_times(table, rows, 0), Hiding(table, 0).of(rows)
        assert (times.compute_forward_s <= most[0] * (1 + 1e-12)).all()
        assert (times.compute_backward_s <= most[1] * (1 + 1e-12)).all()
