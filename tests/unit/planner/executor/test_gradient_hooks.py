"""Hooks on gradients: what scales or masks may stay, and what would be lost or makes another thing of parts is told."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from planner.errors import PlanError
from planner.executor.data_parallel import DataParallel, ShardingUnits
from planner.executor.gradient_hooks import check_hooks, check_later_hooks
from planner.executor.mesh import build_mesh
from planner.executor.sharded_parameters import ShardedParameters
from planner.executor.whole_parameters import WholeParameters
from planner.plan.schema import MeshSection, Plan
from tests.fake_world import fake_world
from tests.unit.planner.executor.test_requirements import plan_of

Hook = Callable[[torch.Tensor], torch.Tensor | None]
HOOKS: dict[str, Hook] = {
    "looks": lambda gradient: None,
    "scales": lambda gradient: gradient * 0.5,
    "masks": lambda gradient: gradient * (torch.arange(gradient.numel()).view_as(gradient) % 2),
    "scales in place": lambda gradient: gradient.mul_(0.5),
    "clips": lambda gradient: gradient.clamp(-0.1, 0.1),
    "normalises": lambda gradient: gradient / gradient.norm(),
    "adds": lambda gradient: gradient + 1,
}
MAY_STAY = {"looks", "scales", "masks", "scales in place"}
DP2, ALONE = (
    plan_of(mesh).model_copy(update={"zero_stage": 0}) for mesh in (MeshSection(dp_replicate=2), MeshSection())
)
SEEN_IN_PARTS = r"gradients of weight: a step has 2 parts"


@pytest.mark.parametrize("name", HOOKS)
def test_what_makes_of_parts_what_it_makes_of_the_whole_may_stay(name: str) -> None:
    """Gradients that a hook clips were clipped micro-batch by micro-batch, and added up."""
    parts = torch.randn(2, 3, 4)
    of_each = [found if (found := HOOKS[name](part.clone())) is not None else part for part in parts]
    of_all = HOOKS[name](parts.sum(0))
    is_alike = torch.allclose(sum(of_each, torch.zeros(())), parts.sum(0) if of_all is None else of_all)
    assert is_alike == (name in MAY_STAY)
    module = nn.Linear(4, 3)
    module.weight.register_hook(HOOKS[name])
    check_hooks(module, ALONE)
    if is_alike:
        check_hooks(module, DP2)
        return
    with pytest.raises(PlanError, match=SEEN_IN_PARTS):
        check_hooks(module, DP2)


def test_what_waits_for_the_gradient_sees_each_part_of_it() -> None:
    """One that halves it halved what had come before again; one that was set later ran beside the all-reduce."""
    module = nn.Linear(4, 3)
    module.weight.register_post_accumulate_grad_hook(lambda parameter: None)
    check_hooks(module, ALONE)
    with pytest.raises(PlanError, match=SEEN_IN_PARTS):
        check_hooks(module, DP2)


def whole_of(module: nn.Module, plan: Plan) -> DataParallel:
    group = dist.new_group([0, 1])
    assert isinstance(group, dist.ProcessGroup)
    return WholeParameters(module, (), torch.device("cpu"), lambda _: group)


def sharded_of(module: nn.Module, plan: Plan) -> DataParallel:
    return ShardedParameters(module, ShardingUnits((), frozenset()), build_mesh(plan, "cpu"), plan)


@pytest.mark.parametrize(
    ("made", "name", "words"),
    [
        (whole_of, "scales", ""),
        (whole_of, "clips", SEEN_IN_PARTS),
        (sharded_of, "scales", "gradients of weight: FSDP, which divides these, never calls them"),
    ],
)
def test_hooks_that_are_set_after_the_split_are_looked_at(made: Any, name: str, words: str) -> None:
    module = nn.Linear(4, 3)
    plan = DP2 if made is whole_of else plan_of(MeshSection(dp_shard=2))
    with fake_world(2):
        data = made(module, plan)
        check_later_hooks([data], plan)  # the executor's own are none of the user's
        module.weight.register_hook(HOOKS[name])
        if not words:
            check_later_hooks([data], plan)
            return
        with pytest.raises(PlanError, match=words):
            check_later_hooks([data], plan)
