"""Expert layers are found by their grouped products, whatever the modules are called."""

import pytest

from planner.graph.experts import expert_parameters, expert_work, num_experts, used_otherwise
from planner.graph.model_graph import ModelGraph, OpClass, Unit
from planner.operators.registry import op_name
from tests.planning import graph_of

SEQ_LEN, TOP_K, HIDDEN, WIDTH, EXPERTS, SPARSE = 64, 2, 64, 64, 8, 3  # moe-tiny: the first of its four layers is dense


def sparse_units(graph: ModelGraph) -> list[Unit]:
    return [unit for unit in graph.units if expert_work(graph, unit) is not None]


def test_the_matrices_of_experts_are_found() -> None:
    graph = graph_of("moe-tiny", SEQ_LEN)
    found = expert_parameters(graph)
    assert set(found.values()) == {EXPERTS} == {num_experts(graph)}
    shapes = sorted(p.shape for p in graph.parameters if p.fqn in found)
    assert shapes == [(EXPERTS, HIDDEN, WIDTH)] * 3 * SPARSE


def test_rows_travel_to_the_first_products_and_back_behind_the_last() -> None:
    graph = graph_of("moe-tiny", SEQ_LEN)
    units = sparse_units(graph)
    assert len(units) == SPARSE
    for unit in units:
        work = expert_work(graph, unit)
        assert work is not None
        rows = graph.batch_size * SEQ_LEN * TOP_K
        for ids in (work.dispatched, work.combined):  # gate and up share what enters
            assert [graph.nodes[i].shape for i in ids] == [(rows, HIDDEN)]
        names = sorted(op_name(graph.nodes[i].op) for i in work.inside)
        assert names == ["_grouped_mm", "_grouped_mm", "_grouped_mm", "mul", "silu"]
        assert set(work.combined) <= set(work.inside)


def test_layers_of_one_unit_stay_apart() -> None:
    """What lies between two layers of experts, attention among it, is no expert's work."""
    graph = graph_of("moe-tiny", SEQ_LEN)
    whole = graph.units[0].model_copy(update={"nodes": tuple(range(len(graph.nodes)))})
    together = expert_work(graph, whole)
    apart = [expert_work(graph, unit) for unit in sparse_units(graph)]
    assert together is not None
    assert together.inside == tuple(i for work in apart if work for i in work.inside)
    assert together.dispatched == tuple(i for work in apart if work for i in work.dispatched)
    assert together.combined == tuple(i for work in apart if work for i in work.combined)


def test_other_uses_of_experts_are_found_through_views() -> None:
    graph = graph_of("moe-tiny", SEQ_LEN)
    assert used_otherwise(graph) == {}
    fqn = next(iter(expert_parameters(graph)))
    last = graph.nodes[-1]
    view = last.model_copy(
        update={"id": last.id + 1, "op": "aten.transpose.int", "op_class": OpClass.VIEW, "operands": (fqn,)}
    )
    product = view.model_copy(
        update={"id": last.id + 2, "op": "aten.bmm.default", "op_class": OpClass.GEMM, "operands": (last.id, view.id)}
    )
    more = graph.model_copy(update={"nodes": (*graph.nodes, view, product)})
    assert used_otherwise(more) == {fqn: "aten.bmm.default"}


@pytest.mark.parametrize("model", ["llama-tiny", "gpt-tiny"])
def test_dense_models_have_none(model: str) -> None:
    graph = graph_of(model, SEQ_LEN)
    assert num_experts(graph) == 1
    assert expert_parameters(graph) == {}
    assert sparse_units(graph) == []
