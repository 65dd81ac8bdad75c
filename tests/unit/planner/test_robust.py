"""Plans for slow links and hosts: each case is held against a search on a cluster that is so slow."""

import numpy as np
import pytest

from planner.api.robust import CASES, most_robust
from planner.evaluation.evaluator import Evaluator
from planner.pricing.table_builder import slowed
from tests.planning import problem_of


def test_the_worst_case_of_what_is_chosen_is_the_least() -> None:
    problem = problem_of("llama-tiny", 8, batch=16, seq_len=64)
    outcome = problem.solved()
    assert outcome.best is not None
    robust = most_robust(problem, outcome)
    assert robust.outcome.best is not None
    assert [case.case for case in robust.cases] == list(CASES)
    own, fastest = ([getattr(case, name) for case in robust.cases] for name in ("step_time_s", "fastest_step_time_s"))
    assert max(own) <= max(fastest)
    assert fastest[0] <= own[0]
    assert own[0] == pytest.approx(robust.outcome.best.step_time_s, rel=1e-3)
    assert all(seconds >= own[0] * (1 - 1e-9) for seconds in own)


def test_a_host_that_is_slow_slows_every_rank_that_waits_for_it() -> None:
    problem = problem_of("llama-tiny", 8, batch=16, seq_len=64)
    host = slowed(problem.table, 1.1)
    assert np.nanmax(host.time_s / np.where(problem.table.time_s == 0, np.nan, problem.table.time_s)) == (
        pytest.approx(1.1)
    )
    for found in problem.solved().ranking[:8]:
        nominal = Evaluator(problem.table, found.layout, found.modes)
        slow = Evaluator(host, found.layout, found.modes)
        whole_s = slow.evaluate(found.starts).step_time_s
        each = [nominal.with_rank_of(slow, rank) for rank in range(found.layout.mesh.pp)]
        times = [one.evaluate(found.starts).step_time_s for one in each]
        assert found.step_time_s * (1 - 1e-3) <= max(times) <= whole_s * (1 + 1e-3)
        if found.layout.mesh.pp == 1:
            assert times == pytest.approx([whole_s])
