"""What one unit costs: how it grows with the micro-batch and shrinks with context parallelism, and what is kept."""

from functools import cache

import pytest
from planner.pricing.sharded_unit import PricingTarget
from planner.pricing.unit_costs import (
    UnitCosts,
    UnitStates,
    UnitWork,
    batch_scale,
    unit_states,
)

from planner.graph.node_operators import mixes_positions_outside_attention
from planner.parallelism import Recompute
from planner.pricing.table_builder import representatives, shard_units
from planner.solver.cp_sat import CpSatSolver
from tests.planning import A100, cluster_of, graph_of

MODELS = [("llama3-8b", 2048), ("gpt2-1.5b", 1024)]
TIMES = ("forward_s", "backward_s", "tensor_forward_s", "tensor_backward_s", "context_forward_s", "context_backward_s")


@cache
def costs(
    model: str,
    seq_len: int,
    recompute: Recompute = Recompute.NONE,
    micro_batch_size: int = 1,
    cp: int = 1,
    tp: int = 1,
    sequence_parallel: bool = False,
) -> tuple[UnitCosts, ...]:
    """Of every kind of unit, in order."""
    graph = graph_of(model, seq_len)
    target = PricingTarget(graph, cluster_of(A100, 64), "bf16")
    sharding = shard_units(target, (tp, sequence_parallel), {}, CpSatSolver().solve_placement)
    assert sharding is not None
    return tuple(
        UnitWork(target, unit, sharded, batch_scale(graph, micro_batch_size, cp)).costs(recompute, cp)
        for unit, sharded in zip(representatives(graph), sharding, strict=True)
    )


def states(model: str, seq_len: int, tp: int) -> tuple[UnitStates, ...]:
    graph = graph_of(model, seq_len)
    target = PricingTarget(graph, cluster_of(A100, 64), "bf16")
    sharding = shard_units(target, (tp, False), {}, CpSatSolver().solve_placement)
    assert sharding is not None
    pairs = zip(representatives(graph), sharding, strict=True)
    return tuple(unit_states(graph, unit, sharded) for unit, sharded in pairs)


@pytest.mark.parametrize(("model", "seq_len"), MODELS)
@pytest.mark.parametrize("recompute", Recompute)
def test_activations_grow_with_the_micro_batch(model: str, seq_len: int, recompute: Recompute) -> None:
    one, four = (costs(model, seq_len, recompute, micro) for micro in (1, 4))
    for small, large in zip(one, four, strict=True):
        assert large.kept_bytes == pytest.approx(4 * small.kept_bytes)
        assert large.boundary_bytes == pytest.approx(4 * small.boundary_bytes)
        assert small.working_bytes <= large.working_bytes <= 4 * small.working_bytes * (1 + 1e-9)


@pytest.mark.parametrize(("model", "seq_len"), MODELS)
def test_time_grows_with_the_micro_batch_but_not_faster(model: str, seq_len: int) -> None:
    one, four = (costs(model, seq_len, micro_batch_size=micro, tp=2) for micro in (1, 4))
    for small, large in zip(one, four, strict=True):
        # Compute and communication together: beside longer collectives less of a slow host's time is left to wait for.
        for names in (("forward_s", "tensor_forward_s"), ("backward_s", "tensor_backward_s"), ("recompute_s",)):
            before, after = (sum(getattr(costs_of, name) for name in names) for costs_of in (small, large))
            assert before <= after * (1 + 1e-9)
            assert after <= 4 * before * (1 + 1e-9)
    many, more = (costs(model, seq_len, micro_batch_size=micro, tp=2) for micro in (16, 64))
    block = max(range(len(one)), key=lambda k: one[k].forward_s)
    assert more[block].forward_s > 3 * many[block].forward_s  # large operators scale almost with their work


@pytest.mark.parametrize(("model", "seq_len"), MODELS)
def test_context_parallelism_divides_activations_and_adds_communication(model: str, seq_len: int) -> None:
    whole, halved = (costs(model, seq_len, cp=cp) for cp in (1, 2))
    assert all(unit.context_forward_s == unit.context_backward_s == 0.0 for unit in whole)
    for before, after in zip(whole, halved, strict=True):
        assert after.kept_bytes == pytest.approx(before.kept_bytes / 2)
        assert after.boundary_bytes == pytest.approx(before.boundary_bytes / 2)
        assert before.forward_s / 2 * (1 - 1e-9) <= after.forward_s <= before.forward_s
    assert any(unit.context_forward_s > 0 for unit in halved)
    for unit in halved:
        # Keys and values are gathered, gathered again, and their gradients scattered.
        assert unit.context_backward_s >= unit.context_forward_s
        assert (unit.context_forward_s > 0) == (unit.context_backward_s > 0)


@pytest.mark.parametrize(("model", "seq_len"), MODELS)
@pytest.mark.parametrize("tp", [1, 2])
def test_recomputation_keeps_less_and_repeats_more(model: str, seq_len: int, tp: int) -> None:
    none, selective, full = (costs(model, seq_len, mode, 2, 2, tp) for mode in Recompute)
    for a, b, c in zip(none, selective, full, strict=True):
        assert a.kept_bytes >= b.kept_bytes >= c.kept_bytes > 0
        assert 0.0 == a.recompute_s <= b.recompute_s <= c.recompute_s
        # What is not kept is made again, and held while this unit's backward runs.
        assert a.kept_bytes + a.working_bytes == pytest.approx(b.kept_bytes + b.working_bytes)
        assert a.kept_bytes + a.working_bytes == pytest.approx(c.kept_bytes + c.working_bytes)
        for name in TIMES:
            assert getattr(a, name) == getattr(b, name) == getattr(c, name), name
    graph = graph_of(model, seq_len)
    for unit, a, c in zip(representatives(graph), none, full, strict=True):
        if unit.is_block:
            assert a.kept_bytes > 4 * c.kept_bytes
            assert c.recompute_s >= c.tensor_forward_s + c.context_forward_s
        else:
            assert a.kept_bytes == c.kept_bytes  # what lies outside the blocks is kept


def test_full_recomputation_keeps_a_blocks_input_alone() -> None:
    graph = graph_of("llama3-8b", 2048)
    index = next(k for k, unit in enumerate(representatives(graph)) if unit.is_block)
    for micro, cp in ((1, 1), (4, 2)):
        kept = costs("llama3-8b", 2048, Recompute.FULL, micro, cp)[index].kept_bytes
        assert kept == micro * 2048 * 4096 * 2 / cp


def test_sequence_parallelism_divides_what_tensor_parallelism_leaves_whole() -> None:
    graph = graph_of("llama3-8b", 2048)
    index = next(k for k, unit in enumerate(representatives(graph)) if unit.is_block)
    whole, plain, sequence = (
        costs("llama3-8b", 2048, tp=tp, sequence_parallel=is_sequence)[index].kept_bytes
        for tp, is_sequence in ((1, False), (8, False), (8, True))
    )
    assert whole > plain > sequence >= whole / 8


@pytest.mark.parametrize("tp", [2, 8])
def test_tensor_parallelism_divides_the_weights(tp: int) -> None:
    whole, split = states("llama3-8b", 2048, 1), states("llama3-8b", 2048, tp)
    for before, after in zip(whole, split, strict=True):
        assert before.trainable / tp <= after.trainable <= before.trainable / tp * 1.01  # norms stay whole
        assert before.frozen == after.frozen == 0


def test_every_parameter_belongs_to_one_unit() -> None:
    for model, seq_len in (*MODELS, ("tests/fixtures/hf/gpt2", 1024)):
        graph = graph_of(model, seq_len)
        kinds = {
            unit.kind: elements
            for unit, elements in zip(representatives(graph), states(model, seq_len, 1), strict=True)
        }
        assert sum(kinds[unit.kind].total for unit in graph.units) == graph.num_params
        tied = sum(kinds[unit.kind].tied for unit in graph.units)
        assert tied == sum(p.num_elements * len(p.aliases) for p in graph.parameters)


def test_only_attention_mixes_positions_in_transformers() -> None:
    for model, seq_len in (*MODELS, ("tests/fixtures/hf/qwen3", 2048)):
        assert not mixes_positions_outside_attention(graph_of(model, seq_len))
