"""A plan is run at full size on tensors without values: what fits is counted, what does not is told."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

from planner.executor.build import loaded_model
from planner.executor.check import _check_rank
from planner.plan.plan_file import read_plan

EXAMPLE = Path(__file__).resolve().parents[4] / "examples" / "plans" / "gpt-tiny-pp2-dp2.json"


class Another(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(256, 8), nn.Linear(8, 256)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.embedding(input_ids))


def test_a_rank_takes_a_step_and_its_memory_is_counted() -> None:
    plan = read_plan(EXAMPLE)
    found = _check_rank(plan, loaded_model(plan), 1)
    assert found.problem is None
    assert found.allocated_bytes is not None
    held = 110_000 / 2 * 4 * 3  # about: a half of a stage's parameters, with both moments
    assert 2 * held < found.allocated_bytes < 20 * held


def test_what_does_not_fit_is_told_with_its_reason() -> None:
    plan = read_plan(EXAMPLE)
    found = _check_rank(plan, replace(loaded_model(plan), build=Another), 0)
    assert found.allocated_bytes is None
    assert found.problem is not None
    assert "layers.0" in found.problem  # the plan names modules that this model has not
