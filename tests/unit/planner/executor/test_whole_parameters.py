"""ZeRO 0 in float32: parameters stay as they are, and reductions hide behind the backward pass."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from costmodels.vocabulary.choices import Offload, Precision
from planner.errors import ModelError
from planner.executor.build import build_model, example_batch, loaded_model
from planner.executor.mesh import build_mesh
from planner.executor.parallelize import parallelize
from planner.executor.whole_parameters import WholeParameters
from planner.plan.plan_file import read_plan
from planner.plan.schema import MeshSection
from tests.fake_world import fake_world

EXAMPLE = Path("examples/plans/gpt-tiny-pp2-dp2.json")


class Chain(nn.Module):
    """Layers in a row, of which the last shares its weight with the first; one is never used."""

    def __init__(self, *, is_reentrant: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList([first := nn.Linear(4, 4, bias=False), nn.Linear(4, 4), nn.Linear(4, 4)])
        self.unused = nn.Linear(4, 4)
        self.end = nn.Linear(4, 4, bias=False)
        self.end.weight = first.weight
        self._is_reentrant = is_reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        if self._is_reentrant:
            found = checkpoint(self.end, x, use_reentrant=True)
            assert isinstance(found, torch.Tensor)
            return found
        return self.end(x)


class Seen(TorchDispatchMode):
    """Names of operators in the order in which they ran."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.names.append(str(func).partition(".")[2].rpartition(".")[0])
        return func(*args, **(kwargs or {}))


def whole(module: nn.Module, units: tuple[str, ...] = ("layers.0", "layers.1", "layers.2")) -> WholeParameters:
    group = dist.group.WORLD
    assert group is not None
    return WholeParameters(module, units, torch.device("cpu"), lambda _: group)


def step(data: WholeParameters, num_microbatches: int = 1) -> None:
    for index in range(num_microbatches):
        loss = data.root(torch.ones(2, 4)).sum()
        data.prepare_backward(last=index == num_microbatches - 1)
        loss.backward()
    data.finish_step()


def test_gradients_are_the_mean_of_what_all_ranks_sum_and_of_what_nothing_used_zero() -> None:
    torch.manual_seed(0)
    module = Chain()
    for _ in range(3):
        module(torch.ones(2, 4)).sum().backward()
    expected = {fqn: p.grad for fqn, p in module.named_parameters()}
    module.zero_grad()
    with fake_world(4):  # whose sums are one rank's own
        step(whole(module), 3)
    for fqn, parameter in module.named_parameters():
        gradient = expected[fqn]
        assert parameter.grad is not None
        assert torch.equal(parameter.grad, torch.zeros_like(parameter) if gradient is None else gradient / 4)


def test_what_is_frozen_midway_has_no_gradient() -> None:
    """It got zeros, which an optimiser moves by its momentum."""
    with fake_world(4):
        data = whole(module := Chain())
        step(data)
        frozen = module.layers[1]
        frozen.requires_grad_(False)
        module.zero_grad()
        step(data)
    assert all(parameter.grad is None for parameter in frozen.parameters())
    assert module.layers[2].weight.grad is not None
    assert module.end.weight.grad is not None


def test_what_is_trained_only_later_is_reduced_too() -> None:
    """Every rank kept the gradient of its own data, and ranks went apart."""
    with fake_world(4):
        module = Chain()
        module.codes = nn.Parameter(torch.zeros(4, dtype=torch.int8), requires_grad=False)  # which nobody can train
        module.layers[1].requires_grad_(False)
        data = whole(module)
        step(data)
        module.zero_grad()
        module.layers[1].requires_grad_(True)
        module(torch.ones(2, 4)).sum().backward()
        expected = {fqn: p.grad / 4 for fqn, p in module.named_parameters() if p.grad is not None}
        module.zero_grad()
        step(data)
    for fqn, gradient in expected.items():
        assert torch.equal(module.get_parameter(fqn).grad, gradient)  # type: ignore[arg-type]


def test_a_unit_is_reduced_as_soon_as_its_gradients_are_there() -> None:
    with fake_world(4):
        data = whole(Chain())
        with Seen() as seen:
            step(data, 2)
    reductions = [place for place, name in enumerate(seen.names) if name == "all_reduce_coalesced_"]
    products = [place for place, name in enumerate(seen.names) if name == "mm"]
    assert len(reductions) == 4  # three units and the rest, once for both micro-batches
    assert sum(place < products[-1] for place in reductions) == 2
    assert reductions[0] > products[len(products) // 2]


def test_the_first_of_several_parts_of_a_gradient_is_not_taken_for_all_of_it() -> None:
    with fake_world(4):
        data = whole(Chain(is_reentrant=True))
        with pytest.raises(ModelError, match="in several parts"):
            step(data)


def test_parameters_without_values_become_zeros_and_stay_tied() -> None:
    with torch.device("meta"):
        module = Chain()
    with fake_world(4):
        data = whole(module)
        step(data)
    assert module.end.weight is module.get_parameter("layers.0.weight")
    assert all(not parameter.is_meta for parameter in module.parameters())


@pytest.mark.parametrize(
    ("zero_stage", "precision", "offload", "is_left"),
    [
        (0, Precision.FP32, Offload.NONE, True),
        (1, Precision.FP32, Offload.NONE, False),
        (0, Precision.BF16, Offload.NONE, False),
        (0, Precision.FP32, Offload.CPU, False),
    ],
)
def test_fsdp_is_left_out_where_nothing_is_sharded_cast_or_moved(
    zero_stage: int, precision: Precision, offload: Offload, is_left: bool
) -> None:
    plan = read_plan(EXAMPLE)
    mesh = MeshSection(pp=2, dp_replicate=1 if zero_stage else 2, dp_shard=2 if zero_stage else 1)
    training = plan.training.model_copy(update={"precision": precision})
    changed = {"zero_stage": zero_stage, "training": training, "offload": offload, "mesh": mesh}
    plan = plan.model_copy(update=changed)
    with fake_world(4):
        loaded = loaded_model(plan)
        device_mesh = build_mesh(plan, "cpu")
        whole = build_model(loaded, 0)
        model = parallelize(whole, example_batch(loaded, plan, whole), loaded.training_loss, plan, device_mesh)
        is_fsdp = [isinstance(unit, FSDPModule) for root in model.roots for unit in root.modules()]
    assert any(is_fsdp) is not is_left
