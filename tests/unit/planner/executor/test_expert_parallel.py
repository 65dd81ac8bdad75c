"""Which parameters of experts can be divided, which uses of them are refused, and where their ranks are."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

from costmodels.vocabulary.mesh import Group
from planner.errors import ModelError, PlanError
from planner.executor.executable import check_executable
from planner.executor.expert_parallel import Experts, experts_of
from planner.executor.mesh import EP, EXPERT_SHARD, build_mesh, expert_mesh
from planner.plan.schema import MeshSection, Plan
from tests.distributed.cases import Case
from tests.distributed.toy_models import MODELS
from tests.fake_world import fake_world

MESH = MeshSection(dp_shard=4, ep=2)


def plan_of(mesh: MeshSection = MESH, names: tuple[str, ...] | None = None, zero_stage: int = 1) -> Plan:
    plan = Case("mixture", mesh, zero_stage).plan()
    if names is None:
        return plan
    return plan.model_copy(update={"placements": plan.placements.model_copy(update={"experts": names})})


def experts(plan: Plan, module: nn.Module) -> Experts:
    found = experts_of(plan, module, build_mesh(plan, "cpu"))
    assert found is not None
    return found


class Layer(nn.Module):
    """Four experts of odd sizes; ``tied`` shares one parameter."""

    def __init__(self, *shape: int, tied: bool = False) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.ones(shape))
        if tied:
            self.down = self.up


@pytest.mark.parametrize(
    ("layer", "names", "words"),
    [
        (Layer(4, 4, 4), ("down",), "no parameter matches 'down'"),
        (Layer(4, 4), ("up",), r"up of shape \(4, 4\) does not hold a matrix"),
        (Layer(3, 4, 4), ("up",), "multiple of 2 experts"),
        (Layer(2, 3, 5), ("up",), "no dim that 2 ranks of the same experts divide"),
        (Layer(4, 4, 4, tied=True), ("up",), "tied"),
    ],
)
def test_parameters_that_cannot_be_divided_are_named(layer: Layer, names: tuple[str, ...], words: str) -> None:
    with fake_world(4), pytest.raises(PlanError, match=words):
        experts(plan_of(names=names), layer)


def test_a_rank_keeps_its_experts_alone() -> None:
    module = MODELS["mixture"].build()
    whole = dict(module.state_dict())
    with fake_world(4, rank=3):
        experts(plan_of(), module).shard(module, {})
        own = module.get_parameter("layers.1.mlp.experts.up").to_local()  # type: ignore[operator]
        torch.testing.assert_close(own, whole["layers.1.mlp.experts.up"][2:])
        assert type(module.get_parameter("layers.1.mlp.router.gate.weight")) is nn.Parameter


@pytest.mark.parametrize("rank", range(8))
@pytest.mark.parametrize(
    "mesh",
    [
        MeshSection(dp_shard=8, ep=4),
        MeshSection(pp=2, dp_shard=4, ep=2),
        MeshSection(dp_replicate=2, dp_shard=4, ep=2),
        MeshSection(dp_shard=4, cp=2, ep=4),
    ],
)
def test_groups_are_those_that_are_priced(mesh: MeshSection, rank: int) -> None:
    plan = plan_of(mesh)
    with fake_world(8, rank):
        ranks = expert_mesh(plan, "cpu")
        for axis, group in ((EP, Group.EXPERT), (EXPERT_SHARD, Group.EXPERT_SHARD)):
            placed, members = mesh.shape().group(group), ranks[axis].mesh.tolist()
            assert len(members) == placed.num_ranks
            assert rank in members
            assert {b - a for a, b in pairwise(members)} <= {placed.stride}


def test_without_sharding_ranks_of_the_same_experts_are_replicas() -> None:
    with fake_world(8):
        ranks = expert_mesh(plan_of(MeshSection(dp_replicate=2, cp=4, ep=2), zero_stage=0), "cpu")
        assert (ranks["dp_replicate"].size(), ranks[EXPERT_SHARD].size(), ranks[EP].size()) == (4, 1, 2)


def test_other_uses_of_experts_are_refused() -> None:
    layer = Layer(4, 4, 4)
    with fake_world(4):
        divided = experts(plan_of(names=("up",)), layer)
        divided.shard(layer, {})
        rows = torch.ones(2, 4)
        with divided.mode():
            assert tuple(layer.up.transpose(1, 2).shape) == (4, 4, 4)
            with pytest.raises(ModelError, match="uses experts' parameters in bmm"):
                torch.bmm(rows.expand(4, 2, 4), layer.up)
            with pytest.raises(ModelError, match="uses experts' parameters in linear"):
                F.linear(rows, layer.up[0])
            with pytest.raises(ModelError, match="uses experts' parameters in _grouped_mm"):
                F.grouped_mm(rows.expand(4, 2, 4), layer.up)


def test_the_starved_mixture_leaves_half_of_its_experts_without_rows() -> None:
    model, chosen = MODELS["mixture-starved"].build(), list[torch.Tensor]()
    for name, module in model.named_modules():
        if name.endswith("mlp.router"):
            module.register_forward_hook(lambda _, __, output: chosen.append(output[1]))
    model(torch.arange(16).view(1, 16))
    assert [int(each.max()) < 8 for each in chosen] == [True] * 4


def test_what_is_not_executed_is_told_before_ranks_start() -> None:
    with pytest.raises(PlanError, match=r"whole beside tensor parallelism \(etp = 1\) are not executed yet"):
        check_executable(plan_of(MeshSection(dp_shard=2, tp=2, ep=2, etp=1)))
    with pytest.raises(PlanError, match=r"placements.experts names, and it names none"):
        check_executable(plan_of(names=()))
