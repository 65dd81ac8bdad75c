"""Expert parallelism against closed forms: weights, exchanges, groups of gradients, imbalance; and what it leaves."""

from dataclasses import astuple, replace
from functools import cache
from typing import NamedTuple, TypeVar

import numpy as np
import pytest

from costmodels.communication import collective_time_s, dispatch_parts
from costmodels.compute import roofline
from costmodels.recipe import load_recipe
from costmodels.vocabulary.choices import Recompute
from costmodels.vocabulary.mesh import Mesh
from costmodels.vocabulary.schedules import ScheduleName
from costmodels.vocabulary.terms import Data, Element, Holding, Term, Time
from costmodels.vocabulary.workload import Collective, CollectiveKind, GroupPlacement, OpClass
from hardware_profiles.schema import Quantity
from planner.axes.expert import EXPERT, ExpertKey
from planner.axes.framework import Framework
from planner.axes.traced import representatives, whole_work
from planner.evaluation.evaluator import Evaluator
from planner.evaluation.states import state_bytes
from planner.layout.columns import Array, Columns
from planner.layout.layout import Layout, Pins
from planner.pricing.table_builder import unit_row
from planner.pricing.target import PricingTarget
from planner.problem import Problem
from planner.solver.search import search
from planner.table.keys import DataKey, StateKey, WorkKey
from tests.planning import A100, cluster_of, graph_of, problem_of
from tests.unit.planner.pricing.unit_prices import WHOLE, Prices, decision_of, unit_prices

MODEL, SEQ_LEN, NUM_DEVICES = "mixtral-8x7b", 1024, 32
HIDDEN, WIDTH, TOP_K, EXPERTS, LAYERS, BF16 = 4096, 14336, 2, 8, 32, 2
EXPERT_ELEMENTS = 3 * EXPERTS * HIDDEN * WIDTH  # of one layer
KeyT = TypeVar("KeyT", bound=NamedTuple)
BLOCK = 1  # column of the blocks: embedding, blocks, head


def target_of(imbalance: float | None = None) -> PricingTarget:
    target = PricingTarget(graph_of(MODEL, SEQ_LEN), cluster_of(A100, NUM_DEVICES), "bf16")
    if imbalance is None:
        return target
    quantity = Quantity(value=imbalance, tag="published", source="this test")
    return replace(target, recipe=target.recipe.model_copy(update={"expert_imbalance": quantity}))


@cache
def block(
    ep: int,
    imbalance: float | None = None,
    micro_batch_size: int = 1,
    recompute: Recompute = Recompute.NONE,
    once_a_node: bool = False,
) -> Prices:
    target = replace(target_of(imbalance), dispatches_once_a_node=once_a_node)
    return unit_prices(target, decision_of(target), WorkKey(WHOLE, ep, 1, micro_batch_size), recompute)[BLOCK]


@cache
def problem() -> Problem:
    pins = Pins(tp=1, pp=1, cp=1, dp_replicate=1, micro_batch=1, recompute=Recompute.NONE)
    return problem_of(MODEL, NUM_DEVICES, batch=64, seq_len=SEQ_LEN, pins=pins)


def choice_of(ep: int, zero: int) -> Layout:
    mesh = Mesh(dp_shard=NUM_DEVICES, ep=ep)
    return Layout(mesh, zero, 1, 64 // NUM_DEVICES, ScheduleName.ONE_F_ONE_B, 1, Recompute.NONE, False)


def keys_of(kind: type[KeyT], choice: Layout) -> list[KeyT]:
    return Columns.of(Layout, [choice]).by(kind)[0]


def elements() -> tuple[float, float, float]:
    """Of one block: trainable ones, frozen ones, and of the trainable those of experts."""
    table = problem().table
    (row,) = table.split_rows([WHOLE])
    counts = dict(zip(Element, table.elements[row, BLOCK].tolist(), strict=True))
    return counts[Element.TRAINABLE], counts[Element.FROZEN], counts[Element.EXPERT]


def state_row(choice: Layout) -> Array:
    table = problem().table
    (row,) = table.state_rows(keys_of(StateKey, choice))
    return table.state_bytes[row]


def test_without_expert_parallelism_nothing_changes() -> None:
    cost = block(1, 2.0)
    assert cost == block(1)
    assert cost[Time.EXPERT_FORWARD] == cost[Time.EXPERT_BACKWARD] == 0


def test_rows_of_every_chosen_expert_travel_both_ways() -> None:
    """Tokens · top_k · hidden · bytes to the experts and as much back, forward and again backward."""
    cluster, ep = cluster_of(A100, NUM_DEVICES), 8
    num_bytes = SEQ_LEN * TOP_K * HIDDEN * BF16
    way_s = collective_time_s(Collective(CollectiveKind.ALL_TO_ALL, num_bytes, GroupPlacement(ep, 1)), cluster)
    cost = block(ep)
    assert cost[Time.EXPERT_FORWARD] == cost[Time.EXPERT_BACKWARD] == pytest.approx(2 * way_s)
    assert cost[Holding.WORKING] == pytest.approx(block(1)[Holding.WORKING] + num_bytes)
    assert block(ep, micro_batch_size=2)[Time.EXPERT_FORWARD] < 2 * cost[Time.EXPERT_FORWARD]  # one latency


def test_products_of_one_expert_are_as_fast_as_others() -> None:
    """NVIDIA's Grok-1 runs, one of 8 experts a rank: 9 % too slow in bf16 before, 4 % since (benchmarks/data/blind)."""
    of_two, of_one = (block(ep)[Time.COMPUTE_FORWARD] for ep in (4, 8))
    device = cluster_of(A100, NUM_DEVICES).profile.device
    grouped, plain = (roofline(device, each, "bf16") for each in (OpClass.GROUPED_GEMM, OpClass.GEMM))
    flops = 2 * SEQ_LEN * TOP_K * HIDDEN * WIDTH  # of each of three products, which arithmetic bounds
    saved_s = 3 * (grouped.time_s(flops, 0) - plain.time_s(flops, 0))
    assert saved_s > 0.02 * of_two
    assert of_two - of_one == pytest.approx(saved_s, rel=0.01)


def test_exchange_over_nodes_is_slower() -> None:
    """Of 16 ranks on two nodes half of the rows leave the node."""
    inside, across = (block(ep)[Time.EXPERT_FORWARD] for ep in (8, 16))
    assert across > 2 * inside


def test_a_router_may_keep_a_token_to_few_nodes() -> None:
    """Of 8 nodes 8 random experts lie on 8 (1 - (7/8)^8) = 5.25; a limit of 4 leaves 4 of 8 rows, of 6 nothing new."""
    cluster, group = cluster_of(A100, 64), GroupPlacement(64, 1)
    shares = [dispatch_parts(group, (8.0, most), cluster)[1][1] for most in (None, 4.0, 6.0)]
    assert shares == pytest.approx([1 - (7 / 8) ** 8, 0.5, 1 - (7 / 8) ** 8])


@pytest.mark.parametrize(("precision", "share"), [("fp8", 0.75), ("bf16", 1.0)])
def test_rows_may_travel_to_products_in_eight_bits(precision: str, share: float) -> None:
    """Half of what is sent, in either pass, goes to products that take 8 bits; what they make comes back in 16."""
    recipe = load_recipe("dualpipe").model_copy(update={"dispatches_once_a_node": False})
    plain = recipe.model_copy(update={"eight_bit_dispatch": False})
    target = target_of()
    unit = whole_work(target.graph, representatives(target.graph)[BLOCK])
    sent = [
        sum(
            each.num_bytes(unit.unit.tensors)
            for each in EXPERT.work(unit, ExpertKey(8, 1), decision_of(target)[BLOCK], framework).collectives
        )
        for framework in (Framework.of(recipe, precision), Framework.of(plain, precision))
    ]
    assert sent[0] == pytest.approx(share * sent[1])


def test_a_token_may_go_once_to_each_node_of_its_experts() -> None:
    """Each of k experts is on the other of two nodes by half: a token leaves in 1 - 1/2^k of cases, not k / 2 times.

    Over NVLink it goes to each of n ranks once, n · (1 - (1 - 1/n)^k) of them.
    """
    plain, merged = ([block(ep, once_a_node=once)[Time.EXPERT_FORWARD] for ep in (8, 16)] for once in (False, True))
    rows_bytes = SEQ_LEN * TOP_K * HIDDEN * BF16
    share = (1 - 0.5**TOP_K) / (TOP_K / 2)
    of_8, of_16 = (n * (1 - (1 - 1 / n) ** TOP_K) / TOP_K for n in (8, 16))

    def way_s(num_bytes: float, num_ranks: int) -> float:
        group = GroupPlacement(num_ranks, 1)
        collective = Collective(CollectiveKind.ALL_TO_ALL, num_bytes, group)
        return collective_time_s(collective, cluster_of(A100, NUM_DEVICES))

    assert merged[0] == pytest.approx(2 * way_s(of_8 * rows_bytes, 8))
    assert merged[1] == pytest.approx(2 * max(way_s(share * rows_bytes, 16), way_s(of_16 * rows_bytes, 8)))
    assert merged[0] < plain[0]
    assert merged[1] < plain[1]


def test_recomputation_sends_again() -> None:
    whole = replace(target_of(), recipe=target_of().recipe.model_copy(update={"stops_recomputation_early": False}))
    full, none = (
        unit_prices(whole, decision_of(whole), WorkKey(WHOLE, 8, 1, 1), mode)[BLOCK]
        for mode in (Recompute.FULL, Recompute.NONE)
    )
    assert full[Time.RECOMPUTE] == pytest.approx(none[Time.COMPUTE_FORWARD] + none[Time.EXPERT_FORWARD])
    selective = (
        block(8, recompute=Recompute.SELECTIVE)[Time.RECOMPUTE]
        - block(1, recompute=Recompute.SELECTIVE)[Time.RECOMPUTE]
    )
    assert selective == 0  # our selective recomputation keeps what was sent


def test_the_busiest_rank_has_more_rows() -> None:
    even, uneven = block(8), block(8, 1.5)
    assert block(8, 1.0) == even
    assert even[Time.EXPERT_FORWARD] < uneven[Time.EXPERT_FORWARD] < 1.5 * even[Time.EXPERT_FORWARD]
    assert even[Time.COMPUTE_FORWARD] < uneven[Time.COMPUTE_FORWARD] < 1.5 * even[Time.COMPUTE_FORWARD]
    assert even[Holding.KEPT] < uneven[Holding.KEPT] < 1.5 * even[Holding.KEPT]


def test_a_rank_reads_its_own_experts_alone() -> None:
    """Products of as many rows with fewer weights: never slower, and as much arithmetic."""
    target = target_of()
    work = whole_work(target.graph, representatives(target.graph)[BLOCK])
    divided = EXPERT.work(work, ExpertKey(4, 1), decision_of(target)[BLOCK], target.framework)
    for whole, part in zip(work.unit.kernels, divided.unit.kernels, strict=True):
        assert (part.forward.flops, part.backward.flops) == (whole.forward.flops, whole.backward.flops)
        if whole.op_class is OpClass.GROUPED_GEMM:
            away = EXPERTS * HIDDEN * WIDTH * BF16 * 3 / 4
            assert whole.forward.weight_bytes - part.forward.weight_bytes == away
            assert whole.backward.weight_bytes - part.backward.weight_bytes == 2 * away
            assert whole.forward.moved_bytes == part.forward.moved_bytes
        else:
            assert part == whole
    assert block(4)[Time.COMPUTE_FORWARD] <= block(1)[Time.COMPUTE_FORWARD]


@pytest.mark.parametrize("ep", [2, 4, 8])
def test_memory_of_experts_is_divided(ep: int) -> None:
    """ZeRO 1: the copy for compute and the gradients are divided by ep; optimiser states are so by ZeRO anyway."""
    trainable, frozen, experts = elements()
    assert experts == EXPERT_ELEMENTS
    whole, part = (state_bytes(state_row(choice_of(degree, 1)), trainable, frozen, experts) for degree in (1, ep))
    away = EXPERT_ELEMENTS * (1 - 1 / ep)
    assert whole.parameters - part.parameters == pytest.approx(away * BF16)
    assert whole.gradients - part.gradients == pytest.approx(away * target_of().recipe.state.gradient_bytes.value)
    assert part.optimizer == pytest.approx(whole.optimizer)
    sharded, divided = (state_bytes(state_row(choice_of(degree, 3)), trainable, 0.0, experts) for degree in (1, ep))
    assert astuple(divided) == pytest.approx(astuple(sharded))


def test_gradients_of_experts_are_reduced_over_fewer_ranks() -> None:
    table, recipe, cluster = problem().table, target_of().recipe, cluster_of(A100, NUM_DEVICES)
    ep, (trainable, _, _) = 8, elements()
    (row,) = table.data_rows(keys_of(DataKey, choice_of(ep, 1)))
    times = dict(zip(Data, table.data_s[0, row, BLOCK].tolist(), strict=True))

    def reduced_s(elements: float, group: GroupPlacement) -> float:
        num_bytes = elements * recipe.state.reduction_bytes.value / recipe.data_parallel_rate.value
        return collective_time_s(Collective(CollectiveKind.REDUCE_SCATTER, num_bytes, group), cluster)

    dense = reduced_s(trainable - EXPERT_ELEMENTS, GroupPlacement(NUM_DEVICES, 1))
    own = reduced_s(EXPERT_ELEMENTS / ep, GroupPlacement(NUM_DEVICES // ep, ep))
    assert times[Data.REDUCE] == pytest.approx(dense + own)


def test_all_layouts_price_their_parts() -> None:
    """The breakdown holds the exchange, and the step grows by it where nothing else can."""
    whole, part = (Evaluator(problem().table, choice_of(ep, 1)).evaluate((0,)) for ep in (1, 8))
    assert whole.breakdown[Term.EXPERT] == 0
    assert part.breakdown[Term.EXPERT] == pytest.approx(2 * LAYERS * 2 * block(8)[Time.EXPERT_FORWARD])
    assert part.peak_memory_bytes < whole.peak_memory_bytes
    assert sum(part.breakdown.values()) == pytest.approx(part.step_time_s)


def test_the_search_is_exact_over_degrees_of_experts() -> None:
    """Best-first finds what pricing every layout finds, and divides experts where whole ones do not fit."""
    found = search(problem().table, problem().space.layouts, problem().solver)
    assert {c.mesh.ep for c in problem().space.layouts} == {1, 2, 4, 8}
    priced = [Evaluator(problem().table, choice).evaluate((0,)) for choice in problem().space.layouts]
    times = [each.step_time_s for each in priced if each.fits]
    assert found.best is not None
    assert found.is_exhausted
    assert found.best.step_time_s == pytest.approx(min(times), rel=1e-6)
    assert np.isfinite(times).all()
    assert unit_row(graph_of(MODEL, SEQ_LEN)).kinds.count(BLOCK) == LAYERS
