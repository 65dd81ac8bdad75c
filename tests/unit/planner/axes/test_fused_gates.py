"""Experts of Hugging Face, whose gate and up projection are one parameter: each is split for itself, as torch does."""

from functools import cache

import pytest
import torch

from costmodels.recipe import load_recipe
from costmodels.vocabulary.choices import Partial, Placement, Replicate, Shard, parse_placement
from costmodels.vocabulary.terms import Pass
from costmodels.vocabulary.workload import CollectiveKind
from planner.axes.placement import UnitPlacement
from planner.axes.tensor import TENSOR
from planner.axes.traced import representatives, whole_work
from planner.pricing.target import PricingTarget
from planner.table.keys import TensorSplit
from tests.planning import A100, cluster_of, graph_of
from tests.unit.planner.pricing.unit_prices import decision_of

transformers = pytest.importorskip("transformers", reason="the extra hf is not installed")

MODEL, SEQ_LEN, BLOCK = "tests/fixtures/hf/mixtral", 1024, 1
HIDDEN, WIDTH, BF16 = 4096, 14336, 2


def target(recipe: str) -> PricingTarget:
    return PricingTarget(graph_of(MODEL, SEQ_LEN), cluster_of(A100, 8), "bf16", load_recipe(recipe))


@cache
def placed(tp: int, recipe: str = "megatron-core") -> UnitPlacement:
    return decision_of(target(recipe), TensorSplit(tp, sequence_parallel=True))[BLOCK]


def of_experts(placement: UnitPlacement) -> dict[str, Placement]:
    return {fqn.rpartition(".")[2]: each for fqn, each in placement.parameters.items() if ".experts." in fqn}


@pytest.mark.parametrize("tp", [2, 8])
def test_columns_of_both_halves_and_rows_emerge(tp: int) -> None:
    placement = placed(tp)
    assert of_experts(placement) == {"gate_up_proj": Shard(1, pieces=2), "down_proj": Shard(2)}
    graph = graph_of(MODEL, SEQ_LEN)
    unit = representatives(graph)[BLOCK]
    part = TENSOR.work(whole_work(graph, unit), placement.split, placement, target("megatron-core").framework).unit
    grouped = [each for each in part.kernels if each.op_class.value == "grouped_gemm"]
    flops = [2 * SEQ_LEN * 2 * HIDDEN * width / tp for width in (2 * WIDTH, WIDTH)]  # two experts a token
    assert [each.forward.flops for each in grouped] == pytest.approx(flops)
    # A row for each token is reduced, not one for each of its experts.
    (last,) = (
        each
        for each in placement.collectives
        if each.kind is CollectiveKind.REDUCE_SCATTER and each.runs_in is Pass.FORWARD and each.of[0] > grouped[-1].id
    )
    assert last.num_bytes(part.tensors) == SEQ_LEN * HIDDEN * BF16


def test_what_torch_does_not_execute_is_not_planned_for_our_executor() -> None:
    """DTensor has no placement that splits each of two halves: halves are gathered before they are told apart."""
    assert all(getattr(each, "pieces", 1) == 1 for each in placed(2, "planner").parameters.values())


def test_text() -> None:
    assert str(Shard(1, pieces=2)) == "shard(1, pieces=2)"
    for placement in (Shard(0), Shard(2, pieces=2), Replicate(), Partial()):
        assert parse_placement(str(placement)) == placement
    for wrong in ("shard(1, pieces=1)", "shard(1,pieces=2)", "shard(1, pieces=20)"):
        with pytest.raises(ValueError, match="pieces=N"):
            parse_placement(wrong)


def local(whole: torch.Tensor, placement: Placement, rank: int, tp: int) -> torch.Tensor:
    """A rank's part, by hand."""
    assert isinstance(placement, Shard)
    pieces = whole.chunk(placement.pieces, dim=placement.dim)
    return torch.cat([piece.chunk(tp, dim=placement.dim)[rank] for piece in pieces], dim=placement.dim)


@pytest.mark.parametrize("tp", [2, 4])
def test_the_sum_over_ranks_is_the_whole_layer(tp: int) -> None:
    """Hugging Face's own module of a rank's width with a rank's parts of the parameters: forward and gradients."""
    from transformers.models.mixtral.modeling_mixtral import MixtralExperts

    def experts(width: int) -> torch.nn.Module:
        config = transformers.MixtralConfig(hidden_size=8, intermediate_size=width, num_local_experts=4)
        return MixtralExperts(config)

    torch.manual_seed(0)
    whole = experts(16)
    for parameter in whole.parameters():
        torch.nn.init.normal_(parameter)
    x, weights = torch.randn(6, 8, requires_grad=True), torch.rand(6, 2)
    chosen = torch.stack([torch.randperm(4)[:2] for _ in range(6)])
    y = whole(x, chosen, weights)
    (gradient,) = torch.autograd.grad(y.square().sum(), x)
    outputs, placements = [], of_experts(placed(2))
    for rank in range(tp):
        part = experts(16 // tp)
        for name, parameter in part.named_parameters():
            parameter.data = local(whole.get_parameter(name).data, placements[name], rank, tp)
        outputs.append(part(x, chosen, weights))
    summed = torch.stack(outputs).sum(dim=0)
    assert torch.allclose(summed, y, atol=1e-4)
    assert torch.allclose(torch.autograd.grad(summed.square().sum(), x)[0], gradient, atol=1e-2, rtol=1e-4)
