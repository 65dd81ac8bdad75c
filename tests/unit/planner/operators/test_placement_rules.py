"""Operator rules against DTensor itself: every strategy of every operator of real models, forward and backward.

A fake process group lets one process stand for one rank of two or four: placements are propagated for real, and
collectives, which no strategy may need, would be counted.
"""

import contextlib
from collections.abc import Generator
from functools import cache
from pathlib import Path

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.experimental import implicit_replication
from torch.distributed.tensor.parallel import loss_parallel

from costmodels.vocabulary.choices import Partial, Placement, Replicate, Shard
from planner.executor.sharding_rules import register_sharding_rules
from planner.executor.tensor_parallel import torch_placement
from planner.graph.model_graph import ModelGraph, Node, OpClass
from planner.graph.node_operators import has_placement_rule, is_redistributed, strategies
from planner.graph.tracer import trace_model
from planner.model_file import LoadedModel, load_model, resolve_model
from planner.operators.partial_sums import passing
from planner.operators.placement_rules import OpStrategy, leading_dims
from planner.operators.registry import op_name, operator_of
from tests.fake_world import fake_world
from tests.unit.planner.graph.traced import HF_CONFIGS, loaded, loaded_from_config

SEQ_LEN = 64
MODELS = ("gpt-tiny", "llama-tiny", "moe-tiny", *(f"hf {name}" for name in HF_CONFIGS))


@cache
def graph(name: str, folder: Path) -> ModelGraph:
    return trace_model(loaded_model(name, folder), 2, SEQ_LEN, "bfloat16")


def loaded_model(name: str, folder: Path) -> LoadedModel:
    return loaded_from_config(HF_CONFIGS[name[3:]], folder) if name.startswith("hf ") else loaded(name)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("config")


@contextlib.contextmanager
def fake_mesh(degree: int) -> Generator[DeviceMesh]:
    register_sharding_rules()
    with fake_world(degree):
        yield init_device_mesh("cpu", (degree,))


def shapes_and_dtypes(graph: ModelGraph, node: Node) -> list[tuple[tuple[int, ...], str] | None]:
    parameters = {name: p for p in graph.parameters for name in (p.fqn, *p.aliases)}
    found: list[tuple[tuple[int, ...], str] | None] = []
    for operand in node.operands:
        if isinstance(operand, str):
            found.append((parameters[operand].shape, parameters[operand].dtype))
        else:
            found.append(None if operand is None else (graph.nodes[operand].shape, graph.nodes[operand].dtype))
    return found


def distinct_nodes(graph: ModelGraph) -> list[Node]:
    """One node of each operator, shapes and attributes."""
    found = {
        (n.op, str(shapes_and_dtypes(graph, n)), str(n.attributes)): n for n in graph.nodes if n.op.startswith("aten.")
    }
    return list(found.values())


def local_tensor(shape: tuple[int, ...], dtype: str, placement: Placement, mesh: DeviceMesh) -> DTensor:
    sizes = [s // mesh.size() if placement == Shard(d) else s for d, s in enumerate(shape)]
    local = torch.ones(sizes, dtype=getattr(torch, dtype))
    tensor = DTensor.from_local(local, mesh, [torch_placement(str(placement))], run_check=False)
    tensor.requires_grad_(local.is_floating_point())
    return tensor


def torch_value(value: object) -> object:
    if isinstance(value, str) and value.startswith("torch."):
        return getattr(torch, value.removeprefix("torch."))
    return list(value) if isinstance(value, tuple) else value


def call(node: Node, tensors: list[DTensor | None]) -> list[DTensor]:
    """Runs the node's operator on ``tensors`` as the graph recorded it."""
    _, name, overload = node.op.split(".")
    op = getattr(getattr(torch.ops.aten, name), overload)
    left = list(tensors)
    arguments: dict[str, object] = {}
    for argument in op._schema.arguments:
        kind = str(argument.type)
        if argument.name in node.attributes:
            arguments[argument.name] = torch_value(node.attributes[argument.name])
        elif kind.startswith("List") and "Tensor" in kind:
            arguments[argument.name], left = left, []
        elif "Tensor" in kind and left:
            arguments[argument.name] = left.pop(0)
    positional = [arguments.pop(a.name) for a in op._schema.arguments if a.name in arguments and not a.kwarg_only]
    in_parallel = loss_parallel() if name == "cross_entropy_loss" else contextlib.nullcontext()
    with implicit_replication(), in_parallel:
        result = op(*positional, **arguments)
    return list(result) if isinstance(result, list | tuple) else [result]


def is_placed(tensor: DTensor, placement: Placement) -> bool:
    (found,) = tensor.placements
    return found.is_partial() if isinstance(placement, Partial) else found == torch_placement(str(placement))


def check_forward(node: Node, strategy: OpStrategy, outputs: list[DTensor], counter: CommDebugMode) -> None:
    assert all(is_placed(output, strategy.output) for output in outputs), [o.placements for o in outputs]
    # The loss sums over the classes: it needs the sums of all ranks, whatever holds them.
    assert counter.get_total_counts() == 0 or op_name(node.op) == "cross_entropy_loss", counter.get_comm_counts()


def check_backward(
    node: Node, strategy: OpStrategy, tensors: list[DTensor | None], output: DTensor, mesh: DeviceMesh
) -> None:
    whole = isinstance(strategy.output, Partial)  # the gradient of a sum is the same for every summand
    placement = torch_placement("replicate" if whole else str(strategy.output))
    gradient = DTensor.from_local(torch.ones_like(output.to_local()), mesh, [placement], run_check=False)
    counter = CommDebugMode()
    in_parallel = loss_parallel() if op_name(node.op) == "cross_entropy_loss" else contextlib.nullcontext()
    with implicit_replication(), in_parallel, counter:
        output.backward(gradient)
    for tensor, placed, is_partial in zip(tensors, strategy.operands, strategy.partial_gradients, strict=True):
        if tensor is None or tensor.grad is None:
            continue
        expected = Partial() if is_partial else Replicate() if isinstance(placed, Partial) else placed
        if op_name(node.op) == "embedding" and placed == Shard(0):
            expected = Replicate()  # DTensor computes the whole table's gradient on every rank; the update slices it
        assert isinstance(tensor.grad, DTensor)
        assert is_placed(tensor.grad, expected), tensor.grad.placements
    assert counter.get_total_counts() == 0, counter.get_comm_counts()


@pytest.mark.filterwarnings("ignore:DTensor random operators")  # dropout's masks differ by rank, as they should
@pytest.mark.parametrize(("model", "degree"), [*((model, 2) for model in MODELS), ("hf qwen3", 4)])
def test_every_strategy_is_what_dtensor_does(model: str, degree: int, folder: Path) -> None:
    traced = graph(model, folder)
    num_checked = 0
    with fake_mesh(degree) as mesh:
        for node in distinct_nodes(traced):
            for strategy in strategies(node, traced, degree)[1:]:
                known = shapes_and_dtypes(traced, node)
                tensors = [
                    None if spec is None else local_tensor(*spec, placement, mesh)
                    for spec, placement in zip(known, strategy.operands, strict=True)
                ]
                counter = CommDebugMode()
                try:
                    with counter:
                        outputs = call(node, tensors)
                    check_forward(node, strategy, outputs, counter)
                    if outputs[0].requires_grad:
                        check_backward(node, strategy, tensors, outputs[0], mesh)
                except Exception as error:
                    raise AssertionError(f"{node.op} {known} {dict(node.attributes)} by {strategy}") from error
                num_checked += 1
    assert num_checked > 40


PACKED = """
import torch
from torch import nn

class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.kv = nn.Linear(64, 64), nn.Linear(64, 64)

    def rotated(self, x):
        turned = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
        return torch.view_as_real(turned * turned.detach()).flatten(-2).type_as(x)

    def forward(self, x):
        b, t, d = x.shape
        q = self.q(x).view(b, t, 4, -1)
        k, v = self.kv(x).view(b, t, 2, 2, -1).unbind(2)
        later, earlier = self.kv(x).view(b, t, 2, 2, -1).permute(3, 0, 2, 1, 4).unbind(0)
        k, v = self.rotated(k).repeat_interleave(2, 2), v.repeat_interleave(2, 2)
        scores = torch.einsum("bihd,bjhd->bhij", q, k).softmax(-1)
        mixed = torch.einsum("bhij,bjhd->bihd", scores, v).reshape(b, t, d)
        return mixed + torch.cat((later, earlier), -1).transpose(1, 2).reshape(b, t, d)

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(256, 64), nn.Linear(64, 256)
        self.layers = nn.ModuleList(Attention() for _ in range(2))

    def forward(self, input_ids):
        x = self.embed(input_ids)
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x)

build_model = Model
"""


def packed(folder: Path) -> ModelGraph:
    path = folder / "packed.py"
    path.write_text(PACKED)
    return trace_model(load_model(resolve_model(str(path))), 2, SEQ_LEN, "bfloat16")


def test_pieces_that_lack_a_dim_lie_as_dtensor_has_them(folder: Path) -> None:
    """What lay behind the dim that ``unbind`` takes away was taken to lie one place further back."""
    traced, checked = packed(folder), 0
    with fake_mesh(2) as mesh:
        for node in [node for node in distinct_nodes(traced) if op_name(node.op) == "unbind"]:
            ((shape, dtype),) = [spec for spec in shapes_and_dtypes(traced, node) if spec is not None]
            for strategy in strategies(node, traced, 2)[1:]:
                pieces = call(node, [local_tensor(shape, dtype, strategy.operands[0], mesh)])
                assert all(is_placed(piece, strategy.output) for piece in pieces), strategy
                checked += 1
    assert checked > 4


@pytest.mark.parametrize("model", [*MODELS, "packed"])
def test_views_are_fed_by_dtensor_where_it_is_said(model: str, folder: Path) -> None:
    """Of a tensor that is split otherwise: a plan left one split along the dim that ``unbind`` takes away."""
    traced = packed(folder) if model == "packed" else graph(model, folder)
    with fake_mesh(2) as mesh:
        for node in distinct_nodes(traced):
            if node.op_class is not OpClass.VIEW or not is_redistributed(node):
                continue
            ((shape, dtype),) = [spec for spec in shapes_and_dtypes(traced, node) if spec is not None]
            for dim in [dim for dim, size in enumerate(shape) if dim and size % 2 == 0]:
                assert call(node, [local_tensor(shape, dtype, Shard(dim), mesh)])


def test_partial_sums_pass_where_dtensor_lets_them(folder: Path) -> None:
    traced = graph("moe-tiny", folder)
    checked: set[str] = set()
    with fake_mesh(2) as mesh:
        for node in distinct_nodes(traced):
            known = shapes_and_dtypes(traced, node)
            floating = [spec is not None and "float" in spec[1] for spec in known]
            for strategy in passing(operator_of(node.op), floating) if any(floating) else []:
                pairs = zip(known, strategy.operands, strict=True)
                tensors = [None if spec is None else local_tensor(*spec, placement, mesh) for spec, placement in pairs]
                counter = CommDebugMode()
                with counter:
                    outputs = call(node, tensors)
                check_forward(node, strategy, outputs, counter)
                check_backward(node, strategy, tensors, outputs[0], mesh)
                checked.add(op_name(node.op))
    assert {"mul", "div", "to", "index", "index_select", "sum", "add"} <= checked


@pytest.mark.parametrize("model", MODELS)
def test_strategies_are_sound(model: str, folder: Path) -> None:
    traced = graph(model, folder)
    for node in distinct_nodes(traced):
        found = strategies(node, traced, 2)
        assert found[0].is_replicated
        assert isinstance(found[0].output, Replicate)
        assert len(set(found)) == len(found)
        for strategy in found:
            assert len(strategy.operands) == len(strategy.partial_gradients) == len(node.operands)
            assert strategy.compute_fraction in (1.0, 0.5)
            assert (
                strategy.output != Shard(0) or not node.batch_dependent or node.shape[0] != 2
            )  # the batch stays whole


def test_no_strategy_where_the_degree_does_not_divide(folder: Path) -> None:
    traced = graph("gpt-tiny", folder)  # 4 heads, hidden 64, vocabulary 256
    for node in distinct_nodes(traced):
        assert all(s.compute_fraction == 1.0 for s in strategies(node, traced, 7)), node.op


@pytest.mark.parametrize("model", MODELS)
def test_every_heavy_operator_has_a_rule(model: str, folder: Path) -> None:
    traced = graph(model, folder)
    heavy = [n for n in traced.nodes if n.op_class in (OpClass.GEMM, OpClass.ATTENTION)]
    assert heavy
    assert all(has_placement_rule(n) for n in heavy)
    assert all(any(s.compute_fraction == 0.5 for s in strategies(n, traced, 2)) for n in heavy)


@pytest.mark.parametrize("model", MODELS)
def test_a_batch_of_one_has_the_rules_of_any_batch(model: str, folder: Path) -> None:
    one = trace_model(loaded_model(model, folder), 1, SEQ_LEN, "bfloat16")
    two = graph(model, folder)
    assert [n.op for n in one.nodes] == [n.op for n in two.nodes]
    for single, double in zip(one.nodes, two.nodes, strict=True):
        if single.op.startswith("aten."):
            assert strategies(single, one, 2) == strategies(double, two, 2), single


def node(op: str, shape: tuple[int, ...], operands: tuple[int | str | None, ...] = (), **attributes: object) -> Node:
    return Node.model_validate(
        {
            "id": 9, "op": op, "op_class": "memory_bound", "module": "", "shape": shape, "dtype": "bfloat16",
            "operands": operands, "storage": 9, "attributes": attributes,
        }
    )  # fmt: skip


def test_an_operator_without_a_rule_is_replicated(folder: Path) -> None:
    unknown = node("aten.fft_rfft.default", (2, 8, 8), (0,))
    assert not has_placement_rule(unknown)
    (only,) = strategies(unknown, graph("gpt-tiny", folder), 2)
    assert only.is_replicated


@pytest.mark.parametrize(
    ("before", "after", "pairs"),
    [
        ((2, 16, 64), (2, 16, 4, 16), [(0, 0), (1, 1), (2, 2)]),
        ((2, 4, 3, 8), (2, 12, 8), [(0, 0), (1, 1), (3, 2)]),
        ((2, 16, 64), (32, 64), [(0, 0), (2, 1)]),
        ((32, 64), (2, 16, 64), [(0, 0), (1, 2)]),
        ((2, 16, 4, 16), (2, 16, 64), [(0, 0), (1, 1), (2, 2)]),
        ((2, 64, 4, 1, 16), (2, 64, 4, 16), [(0, 0), (1, 1), (2, 2), (4, 3)]),
        ((4, 16), (1, 4, 16), [(0, 1), (1, 2)]),
        ((8,), (8,), [(0, 0)]),
        ((2, 3), (3, 2), [(0, 0)]),
    ],
)
def test_leading_dims(before: tuple[int, ...], after: tuple[int, ...], pairs: list[tuple[int, int]]) -> None:
    found = [(i, j) for i, j in leading_dims(before, after) if before[i] > 1 or after[j] > 1]
    assert found == pairs


@pytest.mark.parametrize(
    ("before", "after"), [((2, 16, 64), (2, 16, 4, 16)), ((2, 4, 3, 8), (2, 12, 8)), ((6, 4), (2, 3, 2, 2))]
)
@pytest.mark.parametrize("degree", [2, 3])
def test_leading_dims_keep_every_ranks_part_together(
    before: tuple[int, ...], after: tuple[int, ...], degree: int
) -> None:
    values = torch.arange(torch.Size(before).numel()).reshape(before)
    for i, j in leading_dims(before, after):
        if before[i] % degree == 0 and after[j] % degree == 0:
            parts = zip(values.chunk(degree, i), values.reshape(after).chunk(degree, j), strict=True)
            assert all(torch.equal(old.reshape(new.shape), new) for old, new in parts)
