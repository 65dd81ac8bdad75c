"""Facts of a recipe in prices: each changes what it says, by how much it says, and nothing besides."""

from dataclasses import replace
from functools import cache

import pytest

from costmodels.communication import collective_time_s
from costmodels.recipe import Recipe, attention_kernel, load_recipe
from costmodels.vocabulary.action import Transfer
from costmodels.vocabulary.choices import Recompute
from costmodels.vocabulary.mesh import Mesh
from costmodels.vocabulary.schedules import ScheduleName
from costmodels.vocabulary.terms import Holding, Term, Time
from costmodels.vocabulary.workload import Collective, CollectiveKind, GroupPlacement
from planner.axes.traced import representatives
from planner.evaluation.evaluator import Evaluated, Evaluator
from planner.layout.layout import Layout
from planner.pricing.placements import Decision
from planner.pricing.table_builder import build_table
from planner.pricing.target import PricingTarget
from planner.table.keys import TensorSplit, WorkKey
from tests.planning import A100, cluster_of, graph_of, problem_of
from tests.recipes import STUDY_RECIPES
from tests.unit.planner.pricing.unit_prices import Prices, decision_of, unit_prices

MODEL, SEQ_LEN, HIDDEN = "llama3-8b", 2048, 4096
OURS = load_recipe()
H100 = cluster_of("dgx-h100-80gb", 16)
ACTIVATIONS = SEQ_LEN * HIDDEN * 2  # bytes of one sequence between blocks


def target_of(recipe: Recipe) -> PricingTarget:
    return PricingTarget(graph_of(MODEL, SEQ_LEN), cluster_of(A100, 16), "bf16", recipe)


@cache
def split_decision(tp: int, sequence_parallel: bool = False) -> Decision:
    return decision_of(target_of(OURS), TensorSplit(tp, sequence_parallel))


def block(target: PricingTarget, decision: Decision) -> Prices:
    prices = unit_prices(target, decision, WorkKey(decision[0].split, 1, 1, 1))
    units = zip(representatives(target.graph), prices, strict=True)
    return next(each for unit, each in units if unit.is_block)


def price(recipe: Recipe, choice: Layout) -> Evaluated:
    problem = problem_of(MODEL, 16, batch=64, seq_len=SEQ_LEN)
    split = TensorSplit(choice.mesh.tp, choice.sequence_parallel)
    target = replace(problem.target, recipe=recipe)
    table = build_table(
        target, problem.space.training, {split: split_decision(split.tp, split.sequence_parallel)}, (choice,)
    )
    point = Evaluator(table, choice)
    return point.evaluate(point.even_starts(), exact=True)


def choice_of(pp: int = 1, dp: int = 1, tp: int = 1, zero_stage: int = 0) -> Layout:
    mesh = Mesh(pp, dp if zero_stage == 0 else 1, dp if zero_stage else 1, 1, tp, 1)
    return Layout(
        mesh=mesh,
        zero_stage=zero_stage,
        micro_batch_size=1,
        num_microbatches=64 // dp,
        schedule=ScheduleName.ONE_F_ONE_B,
        virtual_stages=1,
        recompute=Recompute.NONE,
        sequence_parallel=False,
    )


def test_products_that_reduce_apart_add_an_all_reduce_a_block() -> None:
    again = load_recipe(STUDY_RECIPES["megatron-layouts-2023"]).separate_reductions
    assert again is not None
    apart = OURS.model_copy(update={"separate_reductions": again})
    all_reduce = Collective(CollectiveKind.ALL_REDUCE, ACTIVATIONS, GroupPlacement(4, 1))
    before, after = (block(target_of(recipe), split_decision(4)) for recipe in (OURS, apart))
    added = collective_time_s(all_reduce, cluster_of(A100, 16))
    assert after[Time.TENSOR_BACKWARD] - before[Time.TENSOR_BACKWARD] == pytest.approx(again.value * added)
    assert after[Time.TENSOR_FORWARD] == before[Time.TENSOR_FORWARD]
    for decision in (split_decision(1), split_decision(4, sequence_parallel=True)):
        assert block(target_of(apart), decision) == block(target_of(OURS), decision)


def test_scattered_sends_are_a_rank_s_part() -> None:
    scattered = OURS.model_copy(update={"scatters_sends": True})
    whole = split_decision(4)
    assert block(target_of(OURS), whole)[Holding.BOUNDARY] == pytest.approx(ACTIVATIONS)
    assert block(target_of(scattered), whole)[Holding.BOUNDARY] == pytest.approx(ACTIVATIONS / 4)
    split = split_decision(4, sequence_parallel=True)
    parts = [block(target_of(recipe), split)[Holding.BOUNDARY] for recipe in (OURS, scattered)]
    assert parts == pytest.approx([ACTIVATIONS / 4] * 2)


def test_sends_that_nothing_hides_lengthen_pipelines_alone() -> None:
    ahead, *others = (OURS.model_copy(update={"transfers": each}) for each in Transfer)
    deep, flat = choice_of(pp=4), choice_of(dp=4)
    for other in others:
        assert price(other, deep).step_time_s > price(ahead, deep).step_time_s
        assert price(other, flat) == price(ahead, flat)


def test_nothing_is_on_demand_with_several_stages_a_rank() -> None:
    """torch.distributed.pipelining's loop of several stages posts receives when their senders' turns come."""
    ahead, on_demand = (OURS.model_copy(update={"transfers": each}) for each in (Transfer.AHEAD, Transfer.ON_DEMAND))
    in_turn = choice_of(pp=4)._replace(schedule=ScheduleName.INTERLEAVED_1F1B, virtual_stages=2)
    split = choice_of(pp=4)._replace(schedule=ScheduleName.INTERLEAVED_ZERO_BUBBLE)
    for layout in (in_turn, split):
        assert price(on_demand, layout) == price(ahead, layout)


def test_an_optimiser_alone_may_be_sharded_behind_an_all_reduce() -> None:
    everywhere = OURS.model_copy(
        update={"state": OURS.state.model_copy(update={"reduces_to_all": True}), "overlaps_reduction": False}
    )
    apart = OURS.model_copy(update={"overlaps_reduction": False})
    scattered, summed = (price(recipe, choice_of(dp=16, zero_stage=1)) for recipe in (apart, everywhere))
    assert summed.breakdown[Term.DATA] > scattered.breakdown[Term.DATA]
    for zero_stage in (0, 2, 3):
        choice = choice_of(dp=16, zero_stage=zero_stage)
        assert price(everywhere, choice) == price(apart, choice)


def test_gradients_of_scores_are_held_in_backward() -> None:
    graph = graph_of(MODEL, SEQ_LEN)
    fused = replace(target_of(OURS), attention=attention_kernel("flash2"))
    eager = replace(target_of(OURS), attention=attention_kernel("eager"))
    no_gradients = attention_kernel("eager").gradient_score_bytes.model_copy(update={"value": 0.0})
    without = replace(
        eager, attention=attention_kernel("eager").model_copy(update={"gradient_score_bytes": no_gradients})
    )
    scores = 32 * SEQ_LEN**2  # of one sequence
    decision = split_decision(1)
    assert block(eager, decision)[Holding.WORKING] == pytest.approx(6 * scores)
    assert block(without, decision)[Holding.WORKING] == block(fused, decision)[Holding.WORKING] < 6 * scores
    assert graph.batch_size > 1  # so that the traced batch is not mistaken for one sequence


def test_products_in_eight_bits_keep_their_inputs_so() -> None:
    cast = OURS.model_copy(update={"eight_bit_inputs": True})
    in_bf16, in_fp8 = (
        [
            block(replace(target_of(recipe), precision=precision, cluster=H100), split_decision(1))[Holding.KEPT]
            for recipe in (OURS, cast)
        ]
        for precision in ("bf16", "fp8")
    )
    assert in_bf16[0] == in_bf16[1] == in_fp8[0]
    # Norms' outputs and what the down projection takes are halved; attention's output, which attention needs
    # itself, is kept in both.
    ffn = 14336
    saved = 2 * HIDDEN + ffn - HIDDEN
    assert in_fp8[0] - in_fp8[1] == pytest.approx(SEQ_LEN * saved)
