"""ZeRO by FSDP: what parameters it is given."""

# pyright: reportPrivateUsage=false
# FSDP has no public name for what its hooks do.

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from costmodels.vocabulary.choices import Precision
from planner.executor.data_parallel import ShardingUnits
from planner.executor.mesh import build_mesh
from planner.executor.sharded_parameters import ShardedParameters
from planner.plan.plan_file import read_plan
from planner.plan.schema import MeshSection, Plan
from tests.fake_world import fake_world

EXAMPLE = Path("examples/plans/gpt-tiny-pp2-dp2.json")


def test_transposed_parameters_are_divided_by_their_rows() -> None:
    """FSDP takes none that do not lie in memory in their order."""
    module = nn.Linear(6, 4)
    module.weight = nn.Parameter(torch.arange(24.0).view(6, 4).t())
    expected = module.weight.detach().clone()
    plan = read_plan(EXAMPLE).model_copy(update={"mesh": MeshSection(dp_shard=2), "zero_stage": 3, "num_devices": 2})
    with fake_world(2):
        ShardedParameters(module, ShardingUnits((), frozenset()), build_mesh(plan, "cpu"), plan)
        (weight, _) = module.parameters()
        assert isinstance(weight, DTensor)
        assert weight.shape == (4, 6)
        torch.testing.assert_close(weight.to_local(), expected[:2])


class Empty(nn.Linear):
    """Beside its own parameters two without dimensions and one without numbers, as of no adapters."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.scale, self.shift = nn.Parameter(torch.tensor(2.0)), nn.Parameter(torch.tensor(3.0))
        self.none = nn.Parameter(torch.empty(0, 4))

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input) * self.scale + self.shift + self.none.sum()


def test_a_parameter_without_numbers_is_left_whole() -> None:
    """The first backward pass ended in an error of torch: _chunk_cat expects non-empty tensor."""
    module, x = Empty(), torch.randn(2, 4)
    plan = read_plan(EXAMPLE).model_copy(update={"mesh": MeshSection(dp_shard=2), "zero_stage": 3, "num_devices": 2})
    with fake_world(2):  # whose sums over ranks are this rank's own, of which the average is half
        data = ShardedParameters(module, ShardingUnits((), frozenset()), build_mesh(plan, "cpu"), plan)
        data.prepare_backward(last=True)
        module(x).sum().backward()
        data.finish_step()
    assert module.none.grad is not None
    assert module.none.grad.shape == (0, 4)
    assert module.shift.grad is not None
    assert float(module.shift.grad) == 8 / 2


class Experts(nn.Module):
    """Some of which no sample reaches."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(4, 4, bias=False) for _ in range(3))

    def forward(self, x: torch.Tensor, *reached: int) -> torch.Tensor:
        return torch.stack([self.experts[index](x) for index in reached]).sum()


def in_bfloat16(zero_stage: int) -> Plan:
    """For one rank."""
    plan = read_plan(EXAMPLE)
    training = plan.training.model_copy(update={"precision": Precision.BF16})
    layout = {"mesh": MeshSection(dp_shard=1), "zero_stage": zero_stage, "num_devices": 1, "training": training}
    return plan.model_copy(update=layout)


@pytest.mark.parametrize("zero_stage", [0, 1, 2, 3])
def test_experts_that_the_last_micro_batch_reaches_first_or_none_does(zero_stage: int) -> None:
    """In bfloat16 the step ended in an error of torch: FSDP reduce-scatter expects uniform gradient dtype."""
    module, x = Experts(), torch.ones(2, 4)
    plan = in_bfloat16(zero_stage)
    with fake_world(1):
        data = ShardedParameters(module, ShardingUnits((), frozenset()), build_mesh(plan, "cpu"), plan)
        for reached in ((0,), (0, 1)):
            value = module(x, *reached)
            data.prepare_backward(last=len(reached) == 2)
            value.backward()
        data.finish_step()
        gradients = [expert.weight.grad for expert in module.experts]
        assert data.unreached == {module.experts[2].weight}
    for gradient, times in zip(gradients, (2, 1, 0), strict=True):
        assert isinstance(gradient, DTensor)
        assert gradient.dtype is torch.float32
        torch.testing.assert_close(gradient.to_local(), torch.full((4, 4), 2.0 * times))


@pytest.mark.parametrize("zero_stage", [0, 1])
def test_gradients_that_fsdp_set_aside_are_kept_after_a_split_backward_pass(zero_stage: int) -> None:
    """In bfloat16 they were taken for none, and whole blocks were not trained under ZBV."""
    module, x, plan = nn.Linear(4, 4, bias=False), torch.ones(2, 4), in_bfloat16(zero_stage)
    with fake_world(1):
        data = ShardedParameters(module, ShardingUnits((), frozenset()), build_mesh(plan, "cpu"), plan)
        for last in (False, True):
            value = module(x).sum()
            data.prepare_backward(last=False)
            (gradient,) = torch.autograd.grad(value, [module.weight])  # which no hook on the weight sees
            module.weight.grad = gradient
            for group in data._groups():  # as a hook of FSDP's on the block's inputs does
                group.post_backward()
            data.finish_weights(last=last)
        data.finish_step()
        assert data.unreached == frozenset()
        assert isinstance(module.weight.grad, DTensor)
        torch.testing.assert_close(module.weight.grad.to_local(), torch.full((4, 4), 4.0))


def test_a_frozen_stage_keeps_no_copy_in_the_compute_dtype_after_a_step() -> None:
    """Without a backward pass nobody freed it, and parameters() gave numbers rounded to bfloat16."""
    module, plan = nn.Linear(4, 4).requires_grad_(False), in_bfloat16(1)
    with fake_world(1):
        data = ShardedParameters(module, ShardingUnits((), frozenset()), build_mesh(plan, "cpu"), plan)
        data.prepare_backward(last=False)
        module(torch.ones(2, 4))
        data.finish_step()
        assert {parameter.dtype for parameter in module.parameters()} == {torch.float32}
        assert all(isinstance(parameter, DTensor) for parameter in module.parameters())
