"""Edges, blocks and units: nothing is lost, nothing is twice, and a cut names all that must cross it."""

from collections import Counter
from graphlib import TopologicalSorter
from itertools import pairwise
from pathlib import Path

import pytest

from planner.graph.model_graph import ModelGraph, OpClass
from planner.graph.tracer import trace_model
from tests.unit.planner.graph.traced import HF_CONFIGS, graph_of, loaded_from_code, loaded_from_config

NAMES = ["gpt-tiny", "llama-tiny"]


def producers(graph: ModelGraph) -> dict[int, set[int]]:
    found: dict[int, set[int]] = {node.id: set() for node in graph.nodes}
    for producer, consumer in graph.edges:
        found[consumer].add(producer)
    return found


def all_before(graph: ModelGraph, node_id: int) -> set[int]:
    """Nodes with a path to ``node_id``."""
    of = producers(graph)
    found: set[int] = set()
    while new := {before for node in found | {node_id} for before in of[node]} - found:
        found |= new
    return found


def assert_partitions(graph: ModelGraph) -> None:
    assert sorted(n for unit in graph.units for n in unit.nodes) == list(range(len(graph.nodes)))
    assert sorted(p for unit in graph.units for p in unit.parameters) == sorted(p.fqn for p in graph.parameters)
    modules = [module for unit in graph.units for module in unit.modules]
    assert not [m for m, count in Counter(modules).items() if count > 1]
    inside = Counter(
        parameter.fqn for parameter in graph.parameters for module in modules if parameter.fqn.startswith(module + ".")
    )
    assert inside == Counter({parameter.fqn: 1 for parameter in graph.parameters})


@pytest.mark.parametrize("name", NAMES)
def test_units_partition_the_model(name: str) -> None:
    assert_partitions(graph_of(name))


@pytest.mark.parametrize("name", sorted(HF_CONFIGS))
def test_units_partition_huggingface_models(name: str, tmp_path: Path) -> None:
    graph = trace_model(loaded_from_config(HF_CONFIGS[name], tmp_path), 2, 32)
    assert_partitions(graph)
    assert [block.count for block in graph.blocks] == [3]
    assert graph.warnings == ()


@pytest.mark.parametrize("name", NAMES)
def test_edges_lead_forward_and_join_operands(name: str) -> None:
    graph = graph_of(name)
    order = TopologicalSorter(producers(graph)).static_order()  # raises where there is a cycle
    assert sorted(order) == [node.id for node in graph.nodes]
    operands = {(o, node.id) for node in graph.nodes for o in node.operands if isinstance(o, int)}
    assert operands <= set(graph.edges)
    assert all(a < b for a, b in graph.edges)


@pytest.mark.parametrize("name", NAMES)
def test_blocks_are_the_layers(name: str) -> None:
    graph = graph_of(name)
    assert [(block.modules, block.count) for block in graph.blocks] == [(tuple(f"layers.{i}" for i in range(4)), 4)]
    assert [unit.name for unit in graph.units] == ["pre", *(f"layers.{i}" for i in range(4)), "post"]
    assert [unit.kind for unit in graph.units] == [0, 1, 1, 1, 1, 2]


@pytest.mark.parametrize("name", NAMES)
def test_one_tensor_crosses_each_cut(name: str) -> None:
    graph = graph_of(name)
    for unit in graph.units[:-1]:
        assert [graph.nodes[n].shape for n in unit.boundary] == [(2, 32, 64)]
    assert graph.units[-1].boundary == ()


def test_a_boundary_is_all_that_later_units_read() -> None:
    """Recomputed from the operands alone, but for what derives from no parameter."""
    graph = graph_of("llama-tiny")
    derived: set[int] = set()
    for node in graph.nodes:
        if any(isinstance(o, str) or o in derived for o in node.operands):
            derived.add(node.id)
    for unit in graph.units:
        last = unit.nodes[-1]
        read_later = {o for n in graph.nodes[last + 1 :] for o in n.operands if isinstance(o, int) and o <= last}
        assert set(unit.boundary) == read_later & derived


def test_a_tied_head_is_owned_by_the_embedding() -> None:
    graph = graph_of("gpt-tiny")
    tied = next(p for p in graph.parameters if p.aliases)
    assert (tied.fqn, tied.aliases) == ("token_embedding.weight", ("head.weight",))
    assert graph.units[0].parameters[0] == tied.fqn
    assert graph.units[-1].tied_parameters == (tied.fqn,)
    assert "head" in graph.units[-1].modules


def test_views_and_inputs_move_nothing() -> None:
    for node in graph_of("llama-tiny").nodes:
        if node.op_class is OpClass.VIEW:
            assert (node.flops, node.bytes_read, node.bytes_written, node.num_kernels) == (0, 0, 0, 0)


def test_rotary_tables_do_not_depend_on_the_batch() -> None:
    graph = graph_of("llama-tiny")
    tables = [node for node in graph.nodes if node.op in ("aten.cos.default", "aten.sin.default")]
    assert len(tables) == 2
    assert not any(node.batch_dependent for node in tables)


def test_every_operator_names_its_module_and_line() -> None:
    graph = graph_of("gpt-tiny")
    linear = [node for node in graph.nodes if node.op == "aten.linear.default" and node.module.startswith("layers.1")]
    assert [node.module for node in linear] == [
        "layers.1.attention.qkv",
        "layers.1.attention.output",
        "layers.1.mlp.up",
        "layers.1.mlp.down",
    ]
    assert linear[0].source.startswith("gpt.py:")


IN_PLACE = """
import torch
from torch import nn

class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(16, 16)
    def forward(self, x):
        y = torch.zeros_like(x)
        y[:, :8] = self.linear(x)[:, :8]
        return x + y.relu_()

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(32, 16)
        self.first = Layer()
        self.second = Layer()
        self.frozen = nn.Linear(16, 16)
        for p in self.frozen.parameters():
            p.requires_grad_(False)
        self.head = nn.Linear(16, 32, bias=False)
    def forward(self, ids):
        return self.head(self.frozen(self.second(self.first(self.embedding(ids)))))

def build_model():
    return Model()
"""


def test_in_place_writes_carry_gradients_and_edges(tmp_path: Path) -> None:
    graph = trace_model(loaded_from_code(IN_PLACE, tmp_path), 2, 16)
    relu = [node for node in graph.nodes if node.op == "aten.relu_.default"]
    assert len(relu) == 2
    assert all(node.requires_grad and node.output_bytes == 0 and node.storage != node.id for node in relu)
    linear = [node.id for node in graph.nodes if node.op == "aten.linear.default"]
    assert all(a in all_before(graph, b) for a, b in pairwise(linear))


def test_frozen_parameters_have_no_gradient_work(tmp_path: Path) -> None:
    graph = trace_model(loaded_from_code(IN_PLACE, tmp_path), 2, 16)
    frozen = next(node for node in graph.nodes if "frozen.weight" in node.operands)
    assert frozen.weight_gradient_flops == 0
    assert frozen.backward_flops == frozen.flops  # the input's gradient alone
    assert frozen.saves == ()
    assert graph.num_params - graph.num_trainable_params == 16 * 16 + 16


def test_blocks_need_no_list(tmp_path: Path) -> None:
    graph = trace_model(loaded_from_code(IN_PLACE, tmp_path), 2, 16)
    assert [block.modules for block in graph.blocks] == [("first", "second")]
    assert_partitions(graph)


SCALED = """
from torch import nn

class Layer(nn.Module):
    def __init__(self, number):
        super().__init__()
        self.number = number
        self.linear = nn.Linear(16, 16)
    def forward(self, x):
        return x + {scaled}

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(32, 16)
        self.layers = nn.ModuleList(Layer(number) for number in range(4))
        self.head = nn.Linear(16, 32, bias=False)
    def forward(self, ids):
        x = self.embedding(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)

def build_model():
    return Model()
"""


@pytest.mark.parametrize(
    ("scaled", "count"),
    [
        ("self.linear(x) / (self.number + 1)", 4),
        ("self.linear(x) * 0.5 ** (self.number + 1)", 4),
        ("nn.functional.dropout(self.linear(x), 0.1 * (self.number + 1))", 4),
        ("nn.functional.dropout(self.linear(x), 0.1 * (self.number % 3))", 2),  # 0, 0.1, 0.2, 0: two drop nothing
        ("self.linear(x).sum(-1 if self.number < 2 else 1, keepdim=True)", 2),  # another dimension
    ],
)
def test_blocks_that_scale_by_their_number_are_of_one_kind(scaled: str, count: int, tmp_path: Path) -> None:
    graph = trace_model(loaded_from_code(SCALED.format(scaled=scaled), tmp_path), 2, 16)
    kinds = Counter(unit.kind for unit in graph.units if "layers" in unit.name)
    assert max(kinds.values()) == count
