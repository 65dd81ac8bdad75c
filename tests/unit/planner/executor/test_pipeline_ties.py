"""Ranks that hold copies of one parameter add their gradients up in a process group, one for all such parameters."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import nn

from planner.errors import PlannerError
from planner.executor.pipeline import TiedGradient, tied_gradients
from planner.executor.stage_split import TiedParameter
from planner.plan.schema import Plan
from tests.fake_world import fake_world

NUM_STAGES, NUM_PIPELINES = 3, 2


def ties_of_rank_0(*stages: tuple[int, ...]) -> tuple[TiedGradient, ...]:
    """Of parameters ``tie0``, ``tie1`` ... that lie on ``stages``; ranks of three stages are two apart."""
    ties = [TiedParameter(dict.fromkeys(each, f"tie{number}")) for number, each in enumerate(stages)]
    root = nn.Module()
    for number in range(len(stages)):
        root.register_parameter(f"tie{number}", nn.Parameter())
    stages_of_plan = [SimpleNamespace(index=stage, pp_rank=stage) for stage in range(NUM_STAGES)]
    plan = SimpleNamespace(pipeline=SimpleNamespace(stages=stages_of_plan), mesh=SimpleNamespace(pp=NUM_STAGES))
    mesh = SimpleNamespace(size=lambda: NUM_STAGES * NUM_PIPELINES)
    with fake_world(NUM_STAGES * NUM_PIPELINES):
        return tied_gradients(ties, {0: root}, cast(Plan, plan), cast(Any, mesh))


def test_ties_of_the_same_stages_share_a_group() -> None:
    first, other, second = ties_of_rank_0((0, 2), (0, 1), (0, 2))
    assert first.group is not None
    assert other.group is not None
    assert first.group is second.group
    assert first.group is not other.group
    assert [tie.num_copies for tie in (first, other, second)] == [2, 2, 2]


def test_a_tie_inside_one_stage_needs_no_group_and_another_rank_is_in_none() -> None:
    (inside,) = ties_of_rank_0((0,))
    assert inside.group is None
    assert ties_of_rank_0((1, 2)) == ()


def test_what_is_frozen_gets_no_gradient_and_what_is_trained_the_sum() -> None:
    """Zeros were given, with which weight decay moved a frozen embedding that is tied to the head."""
    frozen = tuple(nn.Parameter(torch.ones(3), requires_grad=False) for _ in range(2))
    TiedGradient(frozen, None, 2).reduce()
    assert all(parameter.grad is None for parameter in frozen)
    trained = tuple(nn.Parameter(torch.ones(3)) for _ in range(2))
    trained[0].grad = torch.full((3,), 2.0)
    TiedGradient(trained, None, 2).reduce()
    assert all(parameter.grad is not None and parameter.grad.tolist() == [2.0] * 3 for parameter in trained)


def test_what_is_frozen_under_one_name_gets_no_gradient_under_another() -> None:
    """It is one tensor in one process; here the ranks of one copy waited for those of the other."""
    copies = nn.Parameter(torch.ones(3), requires_grad=False), nn.Parameter(torch.ones(3))
    copies[1].grad = torch.ones(3)
    TiedGradient(copies, None, 2).reduce()
    assert all(parameter.grad is None for parameter in copies)


def test_copies_that_were_updated_otherwise_are_told_of() -> None:
    """An optimiser that decayed the head and not the embedding, which one process has as one tensor, trained on."""
    copies = tuple(nn.Parameter(torch.full((3,), value)) for value in (1.0, 0.99))
    with pytest.raises(PlannerError, match="embedding.weight and head.weight are one tensor.* different ways"):
        TiedGradient(copies, None, 2, ("embedding.weight", "head.weight")).reduce()
