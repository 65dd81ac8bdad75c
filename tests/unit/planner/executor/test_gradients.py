"""The norm of gradients beside torch's own, on one rank."""

from __future__ import annotations

from collections.abc import Generator

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from planner.executor.gradients import norm_of_all, scale_down
from planner.executor.mesh import build_mesh
from planner.executor.ranks import quiet_torch
from tests.unit.planner.executor.test_checkpoint import PLAN


@pytest.fixture(scope="module")
def mesh() -> Generator[DeviceMesh]:
    with quiet_torch():
        dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
        try:
            yield build_mesh(PLAN, "cpu")
        finally:
            dist.destroy_process_group()


def trained(*gradients: torch.Tensor) -> list[nn.Parameter]:
    parameters = [nn.Parameter(torch.zeros_like(gradient)) for gradient in gradients]
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient.clone()
    return parameters


def test_complex_gradients_are_clipped_as_torch_clips_them(mesh: DeviceMesh) -> None:
    """--clip-norm and --log ended the run: a norm in float64 is none of complex numbers for torch."""
    gradients = torch.tensor([3.0, -1.0]), torch.tensor([1 + 2j, -4j])
    mine, theirs = trained(*gradients), trained(*gradients)
    norm = norm_of_all(mine, (), mesh)
    assert float(norm) == pytest.approx(float(nn.utils.clip_grad_norm_(theirs, 0.5)), rel=1e-6)
    scale_down(mine, norm, 0.5)
    for one, other in zip(mine, theirs, strict=True):
        torch.testing.assert_close(one.grad, other.grad)
