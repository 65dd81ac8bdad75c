"""Experts under tensor parallelism: columns and rows emerge, work and memory are divided, sums are reduced once."""

from collections import Counter
from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from costmodels.vocabulary.choices import Partial, Replicate, Shard
from costmodels.vocabulary.terms import Pass, Term
from costmodels.vocabulary.workload import CollectiveKind, OpClass
from planner.axes.expert import EXPERT, ExpertKey
from planner.axes.lowered import RankUnit, StateKind
from planner.axes.placement import UnitPlacement
from planner.axes.tensor import TENSOR
from planner.axes.traced import representatives, whole_states, whole_work
from planner.pricing.kernels import kernel_times
from planner.pricing.target import PricingTarget
from planner.table.keys import TensorSplit
from tests.planning import A100, BATCH_SIZE, cluster_of, graph_of
from tests.unit.planner.pricing.unit_prices import decision_of

SEQ_LEN, BF16 = 1024, 2
MODELS = {"mixtral-8x7b": (8, 2, 4096, 14336), "deepseek-v3": (256, 8, 7168, 2048)}  # experts, top_k, hidden, width


def target(model: str) -> PricingTarget:
    return PricingTarget(graph_of(model, SEQ_LEN), cluster_of(A100, 8), "bf16")


@cache
def placed(model: str, tp: int, sequence_parallel: bool = False) -> tuple[int, UnitPlacement]:
    """The place of the block with experts among the kinds of units, and how it is split."""
    units = representatives(graph_of(model, SEQ_LEN))
    (place,) = (i for i, unit in enumerate(units) if any(".experts." in fqn for fqn in unit.parameters))
    return place, decision_of(target(model), TensorSplit(tp, sequence_parallel))[place]


@cache
def on_one_rank(model: str, tp: int) -> RankUnit:
    place, placement = placed(model, tp)
    graph = graph_of(model, SEQ_LEN)
    whole = whole_work(graph, representatives(graph)[place])
    return TENSOR.work(whole, placement.split, placement, target(model).framework).unit


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize(("tp", "sequence_parallel"), [(2, False), (8, True)])
def test_columns_and_rows_emerge(model: str, tp: int, sequence_parallel: bool) -> None:
    _, placement = placed(model, tp, sequence_parallel)
    found = {fqn.split(".mlp.")[-1]: each for fqn, each in placement.parameters.items() if ".mlp." in fqn}
    assert found["experts.up"] == found["experts.gate"] == Shard(2)
    assert found["experts.down"] == Shard(1)
    if "shared.up.weight" in found:
        assert found["shared.up.weight"] == found["shared.gate.weight"] == Shard(0)
        assert found["shared.down.weight"] == Shard(1)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("tp", [2, 4])
def test_work_and_weights_are_divided(model: str, tp: int) -> None:
    """By hand: three matrices an expert, each token's row through top_k of them, in a micro-batch of one sequence."""
    experts, top_k, hidden, width = MODELS[model]
    products = [kernel for kernel in on_one_rank(model, tp).kernels if kernel.op_class is OpClass.GROUPED_GEMM]
    flops = 3 * 2 * SEQ_LEN * top_k * hidden * width / tp
    assert sum(kernel.forward.flops for kernel in products) == pytest.approx(flops)
    assert sum(kernel.backward.flops for kernel in products) == pytest.approx(2 * flops)
    place, placement = placed(model, tp)
    states = TENSOR.states(whole_states(graph_of(model, SEQ_LEN))[place], placement.split, placement)
    assert states.elements(StateKind.EXPERT) == 3 * experts * hidden * width / tp


@pytest.mark.parametrize("tp", [2, 4])
def test_what_is_kept_between_the_products_is_divided(tp: int) -> None:
    """Up, gate, its activation and their product are kept: four tensors as wide as an expert."""
    _, top_k, _, width = MODELS["mixtral-8x7b"]
    unit, graph = on_one_rank("mixtral-8x7b", tp), graph_of("mixtral-8x7b", SEQ_LEN)
    wide = [i for i in unit.saved if graph.nodes[i].shape == (BATCH_SIZE * SEQ_LEN * top_k, width)]
    assert sum(unit.tensors[i].kept_bytes for i in wide) == 4 * SEQ_LEN * top_k * width * BF16 / tp


def test_a_block_of_experts_is_nearly_as_much_faster_as_it_has_ranks() -> None:
    """Four ranks, four sequences: norms, the router, and moving rows to their order and back stay whole."""
    own = target("mixtral-8x7b")
    device_s = {
        tp: sum(
            float(each.sum())
            for each in kernel_times(
                on_one_rank("mixtral-8x7b", tp).kernels, np.array([4.0]), own.machine, own.framework
            )
        )
        for tp in (1, 4)
    }
    assert 3 < device_s[1] / device_s[4] < 4


@pytest.mark.parametrize("model", MODELS)
def test_partial_sums_are_reduced_once_for_each_token(model: str) -> None:
    """Weighed, brought back into order and added up first: a row for each token, not for each of its experts.

    The shared expert's sums are added to them before, so both are reduced together.
    """
    _, _, hidden, _ = MODELS[model]
    graph = graph_of(model, SEQ_LEN)
    place, placement = placed(model, 4)
    name = representatives(graph)[place].name
    moved = [
        (each, graph.nodes[i])
        for each in placement.collectives
        for i in each.of
        if graph.nodes[i].module.startswith(f"{name}.mlp") and each.runs_in is Pass.FORWARD
    ]
    reduced = [node for each, node in moved if each.kind is CollectiveKind.ALL_REDUCE]
    assert [node.shape for node in reduced] == [(BATCH_SIZE, SEQ_LEN, hidden)]
    combined = [
        node for node in graph.nodes if node.module == f"{name}.mlp" and "sum" in node.op and node.requires_grad
    ]
    assert [placement.placements[node.id] for node in combined] == [Partial()]


def test_weights_of_rows_have_their_gradient_reduced_where_the_router_ends() -> None:
    """Made of partial sums, it is one: a hook at the router's output, where it is two numbers a token."""
    _, placement = placed("mixtral-8x7b", 4)
    (router,) = (fqn for fqn in placement.module_outputs if fqn.endswith(".router"))
    assert placement.module_outputs[router] == Replicate()


def test_models_without_experts_have_the_placements_that_they_had() -> None:
    graph = graph_of("llama3-8b", 2048)
    units = representatives(graph)
    (block,) = (i for i, unit in enumerate(units) if unit.is_block)
    placement = decision_of(PricingTarget(graph, cluster_of(A100, 8), "bf16"), TensorSplit(8, False))[block]
    assert not any(isinstance(each, Partial) for each in placement.placements.values())


@pytest.mark.parametrize("splits", [False, True])
def test_ranks_that_hold_the_same_rows_may_exchange_a_part_each(splits: bool) -> None:
    """Then rows are gathered at the experts and summed behind them, forward and backward, inside a node."""
    place, placement = placed("mixtral-8x7b", 4)
    graph, own = graph_of("mixtral-8x7b", SEQ_LEN), target("mixtral-8x7b")
    recipe = own.recipe.model_copy(update={"splits_exchanges": splits})
    framework = replace(own, recipe=recipe).framework
    whole = whole_work(graph, representatives(graph)[place])
    split = TENSOR.work(whole, placement.split, placement, framework)
    exchanged = EXPERT.work(split, ExpertKey(2, 4), placement, framework)
    found = [each for each in exchanged.collectives if each.term is Term.EXPERT]
    rows_bytes = SEQ_LEN * MODELS["mixtral-8x7b"][1] * MODELS["mixtral-8x7b"][2] * BF16
    sizes = Counter((each.kind, each.num_bytes(exchanged.unit.tensors)) for each in found)
    expected = {(CollectiveKind.ALL_TO_ALL, rows_bytes / (4 if splits else 1)): 4}
    if splits:
        expected |= {(CollectiveKind.ALL_GATHER, rows_bytes): 2, (CollectiveKind.REDUCE_SCATTER, rows_bytes): 2}
    assert sizes == expected
    assert {each.group.stride for each in found if each.kind is not CollectiveKind.ALL_TO_ALL} <= {1}
