"""What one unit costs: how it grows with the micro-batch and shrinks with context parallelism, and what is kept."""

from functools import cache

import pytest

from costmodels.recipe import load_recipe
from costmodels.vocabulary.choices import Recompute
from costmodels.vocabulary.terms import Holding, Time
from planner.axes.traced import representatives
from planner.graph.node_operators import mixes_positions_outside_attention
from planner.pricing.rows import element_rows
from planner.pricing.target import PricingTarget
from planner.table.keys import TensorSplit, WorkKey
from tests.planning import A100, cluster_of, graph_of
from tests.unit.planner.pricing.unit_prices import Prices, decision_of, unit_prices

MODELS = [("llama3-8b", 2048), ("gpt2-1.5b", 1024)]
TIMES = (
    Time.COMPUTE_FORWARD,
    Time.COMPUTE_BACKWARD,
    Time.TENSOR_FORWARD,
    Time.TENSOR_BACKWARD,
    Time.CONTEXT_FORWARD,
    Time.CONTEXT_BACKWARD,
)


@cache
def costs(
    model: str,
    seq_len: int,
    recompute: Recompute = Recompute.NONE,
    micro_batch_size: int = 1,
    cp: int = 1,
    tp: int = 1,
    sequence_parallel: bool = False,
) -> tuple[Prices, ...]:
    """Of every kind of unit, in order, as if hooks took no time of the host."""
    recipe = load_recipe().model_copy(update={"hooks": None})
    target = PricingTarget(graph_of(model, seq_len), cluster_of(A100, 64), "bf16", recipe)
    split = TensorSplit(tp, sequence_parallel)
    return unit_prices(target, decision_of(target, split), WorkKey(split, 1, cp, micro_batch_size), recompute)


def states(model: str, seq_len: int, tp: int) -> list[list[float]]:
    """Trainable, frozen, tied and experts' elements of every kind of unit."""
    target = PricingTarget(graph_of(model, seq_len), cluster_of(A100, 64), "bf16")
    split = TensorSplit(tp, False)
    (row,) = element_rows(target.graph, {split: decision_of(target, split)}, [split])
    return row.tolist()


@pytest.mark.parametrize(("model", "seq_len"), MODELS)
@pytest.mark.parametrize("recompute", Recompute)
def test_activations_grow_with_the_micro_batch(model: str, seq_len: int, recompute: Recompute) -> None:
    one, four = (costs(model, seq_len, recompute, micro) for micro in (1, 4))
    for small, large in zip(one, four, strict=True):
        assert large[Holding.KEPT] == pytest.approx(4 * small[Holding.KEPT])
        assert large[Holding.BOUNDARY] == pytest.approx(4 * small[Holding.BOUNDARY])
        assert small[Holding.WORKING] <= large[Holding.WORKING] <= 4 * small[Holding.WORKING] * (1 + 1e-9)


@pytest.mark.parametrize(("model", "seq_len"), MODELS)
def test_time_grows_with_the_micro_batch_but_not_faster(model: str, seq_len: int) -> None:
    one, four = (costs(model, seq_len, micro_batch_size=micro, tp=2) for micro in (1, 4))
    for small, large in zip(one, four, strict=True):
        # Compute and communication together: beside longer collectives less of a slow host's time is left to wait for.
        for names in (
            (Time.COMPUTE_FORWARD, Time.TENSOR_FORWARD),
            (Time.COMPUTE_BACKWARD, Time.TENSOR_BACKWARD),
            (Time.RECOMPUTE,),
        ):
            before, after = (sum(costs_of[name] for name in names) for costs_of in (small, large))
            assert before <= after * (1 + 1e-9)
            assert after <= 4 * before * (1 + 1e-9)
    many, more = (costs(model, seq_len, micro_batch_size=micro, tp=2) for micro in (16, 64))
    block = max(range(len(one)), key=lambda k: one[k][Time.COMPUTE_FORWARD])
    assert (
        more[block][Time.COMPUTE_FORWARD] > 3 * many[block][Time.COMPUTE_FORWARD]
    )  # large operators scale almost with their work


@pytest.mark.parametrize(("model", "seq_len"), MODELS)
def test_context_parallelism_divides_activations_and_adds_communication(model: str, seq_len: int) -> None:
    whole, halved = (costs(model, seq_len, cp=cp) for cp in (1, 2))
    assert all(unit[Time.CONTEXT_FORWARD] == unit[Time.CONTEXT_BACKWARD] == 0.0 for unit in whole)
    for before, after in zip(whole, halved, strict=True):
        assert after[Holding.KEPT] == pytest.approx(before[Holding.KEPT] / 2)
        assert after[Holding.BOUNDARY] == pytest.approx(before[Holding.BOUNDARY] / 2)
        assert (
            before[Time.COMPUTE_FORWARD] / 2 * (1 - 1e-9) <= after[Time.COMPUTE_FORWARD] <= before[Time.COMPUTE_FORWARD]
        )
    assert any(unit[Time.CONTEXT_FORWARD] > 0 for unit in halved)
    for unit in halved:
        # Keys and values are gathered, gathered again, and their gradients scattered.
        assert unit[Time.CONTEXT_BACKWARD] >= unit[Time.CONTEXT_FORWARD]
        assert (unit[Time.CONTEXT_FORWARD] > 0) == (unit[Time.CONTEXT_BACKWARD] > 0)


@pytest.mark.parametrize(("model", "seq_len"), MODELS)
@pytest.mark.parametrize("tp", [1, 2])
def test_recomputation_keeps_less_and_repeats_more(model: str, seq_len: int, tp: int) -> None:
    none, selective, full = (costs(model, seq_len, mode, 2, 2, tp) for mode in Recompute)
    for a, b, c in zip(none, selective, full, strict=True):
        assert b[Holding.KEPT] >= c[Holding.KEPT] > 0
        assert a[Holding.KEPT] >= b[Holding.KEPT] or tp > 1  # results of collectives are kept, and sums before them
        assert 0.0 == a[Time.RECOMPUTE] <= b[Time.RECOMPUTE] <= c[Time.RECOMPUTE]
        # What is not kept is made again, and held while this unit's backward runs.
        assert a[Holding.KEPT] + a[Holding.WORKING] <= (b[Holding.KEPT] + b[Holding.WORKING]) * (1 + 1e-9)
        assert a[Holding.KEPT] + a[Holding.WORKING] == pytest.approx(c[Holding.KEPT] + c[Holding.WORKING])
        for name in TIMES:
            assert a[name] == b[name] == c[name], name
    graph = graph_of(model, seq_len)
    for unit, a, c in zip(representatives(graph), none, full, strict=True):
        if unit.is_block:
            assert a[Holding.KEPT] > 4 * c[Holding.KEPT]
            assert c[Time.RECOMPUTE] >= c[Time.TENSOR_FORWARD] + c[Time.CONTEXT_FORWARD]
        else:
            assert a[Holding.KEPT] == c[Holding.KEPT]  # what lies outside the blocks is kept


def test_full_recomputation_keeps_a_blocks_input_alone() -> None:
    graph = graph_of("llama3-8b", 2048)
    index = next(k for k, unit in enumerate(representatives(graph)) if unit.is_block)
    for micro, cp in ((1, 1), (4, 2)):
        kept = costs("llama3-8b", 2048, Recompute.FULL, micro, cp)[index][Holding.KEPT]
        assert kept == micro * 2048 * 4096 * 2 / cp


def test_sequence_parallelism_divides_what_tensor_parallelism_leaves_whole() -> None:
    graph = graph_of("llama3-8b", 2048)
    index = next(k for k, unit in enumerate(representatives(graph)) if unit.is_block)
    whole, plain, sequence = (
        costs("llama3-8b", 2048, tp=tp, sequence_parallel=is_sequence)[index][Holding.KEPT]
        for tp, is_sequence in ((1, False), (8, False), (8, True))
    )
    assert whole > plain > sequence >= whole / 8


@pytest.mark.parametrize("tp", [2, 8])
def test_tensor_parallelism_divides_the_weights(tp: int) -> None:
    whole, split = states("llama3-8b", 2048, 1), states("llama3-8b", 2048, tp)
    for before, after in zip(whole, split, strict=True):
        assert before[0] / tp <= after[0] <= before[0] / tp * 1.01  # norms stay whole
        assert before[1] == after[1] == 0


def test_every_parameter_belongs_to_one_unit() -> None:
    for model, seq_len in (*MODELS, ("tests/fixtures/hf/gpt2", 1024)):
        graph = graph_of(model, seq_len)
        kinds = {
            unit.kind: elements
            for unit, elements in zip(representatives(graph), states(model, seq_len, 1), strict=True)
        }
        assert sum(sum(kinds[unit.kind][:2]) for unit in graph.units) == graph.num_params
        tied = sum(kinds[unit.kind][2] for unit in graph.units)
        assert tied == sum(p.num_elements * len(p.aliases) for p in graph.parameters)


def test_only_attention_mixes_positions_in_transformers() -> None:
    for model, seq_len in (*MODELS, ("tests/fixtures/hf/qwen3", 2048)):
        assert not mixes_positions_outside_attention(graph_of(model, seq_len))
