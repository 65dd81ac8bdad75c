"""Operators without a rule are counted by running them, calls that are alike once."""

import pytest
import torch
from torch import fx, nn

from planner.graph.tracer import measured
from planner.graph.tracer.measured import Measurements
from planner.operators.call import TensorValue


def cell_node(hidden: int) -> tuple[fx.Node, dict[str, TensorValue]]:
    """A call of torch's LSTM cell, and its tensors by the names of its schema."""
    graph, cell = fx.Graph(), nn.LSTMCell(8, hidden, device="meta")
    shapes = {"input": (2, 8), "hx.0": (2, hidden), "hx.1": (2, hidden)}
    weights = {f"{name[:1]}_{name[-2:]}": tuple(value.shape) for name, value in cell.named_parameters()}
    given = {name: graph.placeholder(name.replace(".", "_")) for name in (*shapes, *weights)}
    x, hx, cx, *others = given.values()
    node = graph.call_function(torch.ops.aten.lstm_cell.default, (x, [hx, cx], *others))
    names = ("w_ih", "w_hh", "b_ih", "b_hh")
    tensors = {name: TensorValue(shape, "float32", requires_grad=True) for name, shape in shapes.items()}
    for name in names:
        tensors[name] = TensorValue(weights[name], "float32", requires_grad=True, is_weight=True)
    return node, tensors


def test_calls_that_are_alike_run_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A loop over 64 steps of four LSTM cells ran 256 of them, which was half of a trace."""
    runs: list[fx.Node] = []
    run = measured._run
    monkeypatch.setattr(measured, "_run", lambda node, *others: (runs.append(node), run(node, *others))[1])
    measurements = Measurements()
    first, again, wider = (measurements.of(*cell_node(hidden)) for hidden in (4, 4, 6))
    assert len(runs) == 2
    assert first == again
    assert first is not None
    assert wider is not None
    assert first.products.flops == 2 * 2 * 16 * (8 + 4)
    assert wider.products.flops == 2 * 2 * 24 * (8 + 6)


def test_other_arguments_and_other_gradients_make_another_call() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    node, transposed = (graph.call_function(torch.ops.aten.cumprod.default, (x, dim)) for dim in (0, 1))
    learned, frozen = (TensorValue((3, 4), "float32", requires_grad=needs) for needs in (True, False))
    measurements = Measurements()
    for each in (node, transposed):
        for tensor in (learned, frozen):
            found = measurements.of(each, {"self": tensor})
            assert found is not None
            assert bool(found.saved.tensors) is tensor.requires_grad
    assert len(measurements._known) == 4
