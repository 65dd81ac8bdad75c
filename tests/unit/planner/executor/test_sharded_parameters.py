"""ZeRO by FSDP: what parameters it is given."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from planner.executor.data_parallel import ShardingUnits
from planner.executor.mesh import build_mesh
from planner.executor.sharded_parameters import ShardedParameters
from planner.plan.plan_file import read_plan
from planner.plan.schema import MeshSection
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
