"""Thirty random plans of the search's own space on four ranks: each trains as one process does, or planning refused it.

``python -m benchmarks.random_plans`` runs many more, on 2, 4 and 8 ranks.
"""

from __future__ import annotations

from itertools import islice
from pathlib import Path

import pytest

from benchmarks.context_parity import TOLERANCE
from benchmarks.random_plans import Draw, Drawn, outcomes

SEED, NUM_PLANS = 2026, 30


@pytest.fixture(scope="module")
def drawn(tmp_path_factory: pytest.TempPathFactory) -> list[Drawn]:
    return list(islice(Draw(tmp_path_factory.mktemp("models") / "models.py", SEED).plans((4,)), NUM_PLANS))


def test_every_plan_equals_one_process_or_was_refused(drawn: list[Drawn], tmp_path: Path) -> None:
    runnable = [each for each in drawn if not each.refusals]
    found = dict(
        zip([each.name for each in runnable], outcomes(4, [each.plan for each in runnable], tmp_path), strict=True)
    )
    assert len(runnable) > NUM_PLANS / 2
    wrong = {
        name: errors for name, errors in found.items() if isinstance(errors, str) or max(errors.values()) > TOLERANCE
    }
    assert not wrong
    assert all(
        errors["loss"] <= TOLERANCE and len(errors) > 20 for errors in found.values() if isinstance(errors, dict)
    )


def test_plans_are_of_every_kind(drawn: list[Drawn]) -> None:
    plans = [each.plan for each in drawn]
    assert {each.model for each in drawn} == {"gpt", "llama", "mixture"}
    assert {plan.zero_stage for plan in plans} == {0, 1, 2, 3}
    assert {plan.mesh.pp for plan in plans} == {1, 2, 4}
    assert len({plan.pipeline.schedule for plan in plans}) >= 4
    assert any(plan.mesh.cp > 1 for plan in plans)
    assert any(plan.mesh.tp > 1 for plan in plans)
    assert any(plan.mesh.ep > 1 for plan in plans)
