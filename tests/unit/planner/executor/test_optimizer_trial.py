"""Optimisers of a script's own that make of parts of a model something else than of all of it."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.optim import LBFGS, SGD, Adafactor, Adagrad, Adam, AdamW, NAdam, Optimizer, RMSprop, Rprop

from planner.errors import PlanError
from planner.executor.mesh import build_mesh
from planner.executor.optimizer_trial import looks_at_all, problem_with_division, try_optimizers
from planner.executor.parallelize import parallelize
from planner.executor.sharding_rules import register_sharding_rules
from planner.models.loss import NEXT_TOKEN
from tests.distributed.cases import CASES
from tests.distributed.toy_models import MODELS, SEQ_LEN
from tests.fake_world import fake_world


class NormOfAll(Optimizer):
    """Scales the gradients to a norm of one, that of all parameters that it has, as some do for a step's length."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        for group in self.param_groups:
            norm = torch.stack([parameter.grad.norm() for parameter in group["params"]]).norm()
            for parameter in group["params"]:
                parameter.sub_(parameter.grad / norm, alpha=group["lr"])


class TakesMore(SGD):
    """One that nobody else can make."""

    def __init__(self, parameters: Any, model: nn.Module) -> None:
        super().__init__(parameters, lr=0.1)


def made(kind: type[Optimizer], **options: Any) -> Optimizer:
    return kind([nn.Parameter(torch.ones(3, 3))], **options)


@pytest.mark.parametrize(
    ("optimizer", "is_told"),
    [
        (made(LBFGS, max_iter=3), True),
        (made(NormOfAll, lr=0.0), True),  # as in the first step of a warm-up
        (made(SGD, lr=0.1, momentum=0.9), False),
        (made(AdamW, lr=0.1, fused=True), False),
        (made(Adafactor), False),
        (made(Rprop), False),
        (made(NAdam), False),
        (made(TakesMore, model=nn.Linear(1, 1)), False),
    ],
)
def test_one_that_looks_at_all_parameters_is_found(optimizer: Optimizer, is_told: bool) -> None:
    """LBFGS trained pipelines with another step length on each stage, without a word."""
    before = torch.get_rng_state()
    assert looks_at_all(optimizer) == is_told
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize(
    ("optimizer", "said"),
    [
        (made(Adafactor), "RuntimeError: aten"),
        (made(Rprop), None),
        (made(AdamW, lr=0.1, fused=True), None),
        (made(Adam, lr=0.0), None),
        (made(SGD, lr=0.1), None),
        (made(Adagrad), None),
        (made(RMSprop), None),
        (made(LBFGS), None),
    ],
)
def test_one_that_cannot_update_divided_parameters_is_found(optimizer: Optimizer, said: str | None) -> None:
    """It ended in the middle of a script, in an error about placements."""
    register_sharding_rules()  # as whoever divides parameters does
    with fake_world(1):
        mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("dp_replicate", "dp_shard"))
        problem = problem_with_division(optimizer, (mesh, (Replicate(), Shard(0))))
    assert (problem is None) == (said is None), problem
    assert problem is None or problem.startswith(said or "")


def test_a_script_is_told_before_its_first_step() -> None:
    """Each optimiser of the model's parameters is tried once; others, and those of models that are gone, are not."""
    plan = CASES["dp4-zero3"].plan()
    toy = MODELS["gpt"]
    with fake_world(4):
        mesh = build_mesh(plan, "cpu")
        inputs = {"input_ids": torch.zeros(1, SEQ_LEN, dtype=torch.int64)}
        model = parallelize(toy.build(), inputs, NEXT_TOKEN, plan, mesh)
        try_optimizers(model)
        parameters = model.parameters()
        for parameter in parameters:
            parameter.grad = torch.zeros_like(parameter)
        with pytest.raises(PlanError, match="Adafactor does not update parameters that are divided: Runtime"):
            Adafactor(parameters).step()
        SGD(parameters, lr=0.1).step()
        Adafactor([nn.Parameter(torch.ones(3, 3))]).step()
