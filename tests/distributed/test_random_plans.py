"""Thirty random plans of the search's own space on four ranks: each trains as one process does, or planning refused it.

``python -m benchmarks.random_plans`` runs many more, on 2, 4 and 8 ranks.
"""

from __future__ import annotations

from benchmarks.context_parity import TOLERANCE
from benchmarks.random_plans import Drawn
from tests.distributed.conftest import NUM_PLANS, Outcome


def test_every_plan_equals_one_process_or_was_refused(drawn: list[Drawn], outcomes: dict[str, Outcome]) -> None:
    runnable = [index for index, each in enumerate(drawn) if not each.refusals]
    assert len(runnable) > NUM_PLANS / 2
    found = {drawn[index].name: outcomes[f"random-{index}"] for index in runnable}
    wrong: dict[str, Outcome] = {}
    for name, errors in found.items():
        if not all(isinstance(error, float) and error <= TOLERANCE for error in errors.values()):
            wrong[name] = errors
    assert not wrong
    assert all("loss" in errors and len(errors) > 20 for errors in found.values())


def test_plans_are_of_every_kind(drawn: list[Drawn]) -> None:
    plans = [each.plan for each in drawn]
    assert {each.model for each in drawn} == {"gpt", "llama", "mixture"}
    assert {plan.zero_stage for plan in plans} == {0, 1, 2, 3}
    assert {plan.mesh.pp for plan in plans} == {1, 2, 4}
    assert len({plan.pipeline.schedule for plan in plans}) >= 4
    assert any(plan.mesh.cp > 1 for plan in plans)
    assert any(plan.mesh.tp > 1 for plan in plans)
    assert any(plan.mesh.ep > 1 for plan in plans)
