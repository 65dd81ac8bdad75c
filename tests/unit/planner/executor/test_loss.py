"""The loss of a part, as the ranks of a step add it up."""

from __future__ import annotations

from typing import cast

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

from planner.executor.loss import SCALE_KEY, LossOfParts
from planner.models.loss import Batch, Reduction, TrainingLoss


def mean(output: object, batch: Batch) -> torch.Tensor:
    assert isinstance(output, torch.Tensor)
    return output.mean()


def counted(output: object, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    assert isinstance(output, torch.Tensor)
    return output.sum(), torch.tensor(output.numel())


def counted_plainly(output: object, batch: Batch) -> tuple[torch.Tensor, int]:
    """As ``planner.parallelize`` is given one, which ended in an AttributeError."""
    assert isinstance(output, torch.Tensor)
    return output.sum(), output.numel()


@pytest.mark.parametrize(
    "loss",
    [
        TrainingLoss(mean, Reduction.MEAN),
        TrainingLoss(counted, Reduction.COUNTED),
        TrainingLoss(counted_plainly, Reduction.COUNTED),
    ],
)
def test_a_loss_in_half_precision_is_added_up_in_float32(loss: TrainingLoss) -> None:
    """Ranks without a loss have zero in float32, and a pipeline's sum of both was garbage, or ended in gloo's error."""
    output = torch.full((2, 3), 0.5, dtype=torch.bfloat16, requires_grad=True)
    parts = LossOfParts(loss, cast(DeviceMesh, None), 1)  # of one part no other rank is asked
    found = parts.of_part(output, {SCALE_KEY: torch.tensor([2.0])})
    assert found.dtype is torch.float32
    assert float(found.detach()) == (1.0 if loss.reduction is Reduction.MEAN else 6.0)
    found.backward()
    assert output.grad is not None
    assert output.grad.dtype is torch.bfloat16
