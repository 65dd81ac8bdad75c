"""FLOPs of the graph are those that torch.utils.flop_counter counts, forward and backward."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from planner.graph.model_graph import ModelGraph
from planner.graph.tracer import trace_model
from planner.graph.tracer.tiers import Tier
from planner.model_file import LoadedModel
from planner.models.inputs import call_model
from tests.unit.planner.graph.traced import (
    HF_CONFIGS,
    ROOT,
    counted_flops,
    graph_of,
    loaded,
    loaded_from_code,
    loaded_from_config,
)

MODELS = ["gpt-tiny", "llama-tiny", "examples/tiny_gpt.py"]


def assert_counts_agree(graph: ModelGraph, model: LoadedModel) -> None:
    forward, backward = counted_flops(model, graph.batch_size, graph.seq_len)
    assert graph.forward_flops == pytest.approx(forward, rel=1e-3)
    assert graph.backward_flops == pytest.approx(backward, rel=1e-3)


@pytest.mark.parametrize("name", MODELS)
def test_own_models(name: str) -> None:
    name = str(ROOT / name) if name.endswith(".py") else name
    assert_counts_agree(graph_of(name), loaded(name))


@pytest.mark.parametrize("name", sorted(HF_CONFIGS))
def test_huggingface_models(name: str, tmp_path: Path) -> None:
    model = loaded_from_config(HF_CONFIGS[name], tmp_path)
    assert_counts_agree(trace_model(model, 2, 32), model)


def test_by_hand_for_gpt() -> None:
    """Each matrix has 2 FLOPs a token and element; attention 4·s·h a token and layer; backward twice as many."""
    graph = graph_of("gpt-tiny")
    tokens, hidden, layers, vocab, seq_len = 2 * 32, 64, 4, 256, 32
    matrices = layers * (3 + 1 + 4 + 4) * hidden**2 + vocab * hidden
    assert graph.forward_flops == 2 * tokens * matrices + layers * tokens * 4 * seq_len * hidden
    assert graph.backward_flops == 2 * graph.forward_flops
    assert sum(n.weight_gradient_flops for n in graph.nodes) == 2 * tokens * matrices
    assert sum(n.recomputed_flops for n in graph.nodes) == layers * tokens * 2 * seq_len * hidden


def test_flops_grow_with_the_batch() -> None:
    assert graph_of("llama-tiny", 4).forward_flops == 2 * graph_of("llama-tiny", 2).forward_flops


def test_real_sizes_by_hand() -> None:
    """Llama 3 8B: 2 FLOPs a token and matrix element, attention 4·s·heads·width; embedding is a lookup."""
    graph = graph_of("llama3-8b", 1, 1024)
    block = 4096 * (4096 + 1024 + 1024 + 4096) + 3 * 4096 * 14336
    attention = 32 * 4 * 1024 * 1024 * 4096
    assert graph.forward_flops == 2 * 1024 * (32 * block + 4096 * 128256) + attention


HEADER = "import torch\nfrom torch import nn\n"
# Models through which gradients take an unusual way.
UNUSUAL = {
    "a filter of complex parameters": """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(64, 64), nn.Linear(64, 16)
        self.filter = nn.Parameter(torch.randn(33, 64, dtype=torch.complex64))

    def forward(self, x):
        x = self.first(x)
        found = torch.fft.irfft(torch.fft.rfft(x.float(), dim=1) * self.filter, n=64, dim=1)
        return self.last(found.to(x.dtype))

def example_inputs(batch_size, seq_len):
    return {"x": torch.zeros(batch_size, 64, 64)}
""",
    "rotary positions as complex numbers": """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(64, 64), nn.Linear(64, 16)

    def forward(self, x):
        turned = torch.view_as_complex(self.first(x).float().unflatten(-1, (-1, 2)))
        angles = torch.polar(torch.ones(32, device=x.device), torch.arange(32.0, device=x.device))
        return self.last(torch.view_as_real(turned * angles).flatten(-2).to(x.dtype))

def example_inputs(batch_size, seq_len):
    return {"x": torch.zeros(batch_size, 64, 64)}
""",
    "a product with a backward of its own": """
class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return x @ w

    @staticmethod
    def backward(ctx, gradient):
        x, w = ctx.saved_tensors
        return gradient @ w.t(), x.flatten(0, -2).t() @ gradient.flatten(0, -2)

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(64, 64), nn.Linear(64, 16)
        self.weight = nn.Parameter(torch.randn(64, 64))

    def forward(self, x):
        return self.last(Product.apply(self.first(x), self.weight))

def example_inputs(batch_size, seq_len):
    return {"x": torch.zeros(batch_size, 64, 64)}
""",
}


@pytest.mark.parametrize("name", UNUSUAL)
def test_gradients_that_take_an_unusual_way(name: str, tmp_path: Path) -> None:
    code = (
        f"{HEADER}{UNUSUAL[name]}\nbuild_model = Model\ndef loss_fn(output, batch):\n    return output.float().mean()\n"
    )
    model = loaded_from_code(code, tmp_path)
    graph = trace_model(model, 2, 64)
    assert_counts_agree(graph, model)
    assert not any("gradient" in warning for warning in graph.warnings)


RECURRENT = {
    "lstm": "LSTM(16, 24, 2, batch_first=True)",
    "in both directions": "LSTM(16, 12, 2, batch_first=True, bidirectional=True)",
    "with narrow states": "LSTM(16, 32, 2, batch_first=True, proj_size=24)",
    "gru": "GRU(16, 24, 2, batch_first=True, bias=False)",
    "plain, sequences second": "RNN(16, 24)",
}
RECURRENT_MODEL = """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.steps, self.last = nn.Embedding(64, 16), nn.{steps}, nn.Linear(24, 64)

    def forward(self, input_ids):
        return self.last(self.steps(self.first(input_ids))[0])

build_model = Model
"""


@pytest.mark.parametrize("tier", ["export", "modules"])
@pytest.mark.parametrize("name", RECURRENT)
def test_recurrent_layers(name: str, tier: Tier, tmp_path: Path) -> None:
    """Against torch's counter over every step, which its own kernel for processors would hide from it."""
    model = loaded_from_code(HEADER + RECURRENT_MODEL.format(steps=RECURRENT[name]), tmp_path)
    graph = trace_model(model, 3, 10, tiers=(tier,))
    with torch.device("meta"):
        assert_counts_agree(graph, model)
    mixing = [text for text in graph.warnings if text.startswith("rnn_tanh (model.py:10) mixes the samples")]
    assert graph.warnings == tuple(mixing)
    assert bool(mixing) == (name == "plain, sequences second")  # it is given samples where its steps are


def test_recurrent_layers_over_long_sequences_are_traced_at_once(tmp_path: Path) -> None:
    """All steps as one operator, whose work grows with them: those of two lengths tell that of a third."""
    model = loaded_from_code(HEADER + RECURRENT_MODEL.format(steps=RECURRENT["lstm"]), tmp_path)
    short, longer, long = (trace_model(model, 2, length) for length in (16, 32, 2048))
    assert len(long.nodes) == len(short.nodes)
    for work in ("forward_flops", "backward_flops"):
        a_step = (getattr(longer, work) - getattr(short, work)) / 16
        assert getattr(long, work) == pytest.approx(getattr(short, work) + (2048 - 16) * a_step, rel=1e-9)


BILINEAR_MODEL = """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.pairs = nn.Embedding(64, 12), nn.Bilinear({width}, 20, 64)

    def forward(self, input_ids):
        found = self.first(input_ids)
        return self.pairs({left}, found.new_ones(*found.shape[:-1], 20))

build_model = Model
"""


@pytest.mark.parametrize("tier", ["export", "modules"])
@pytest.mark.parametrize(("left", "width", "num_gradients"), [("found", 12, 2), ("found[..., :5].detach()", 5, 1)])
def test_bilinear_forms_are_the_products_that_torch_runs(
    left: str, width: int, num_gradients: int, tier: Tier, tmp_path: Path
) -> None:
    """torch's counter takes the operator whole and knows no rule for it; its profiler sees the products below."""
    model = loaded_from_code(HEADER + BILINEAR_MODEL.format(width=width, left=left), tmp_path)
    graph = trace_model(model, 2, 8, tiers=(tier,))
    (node,) = [node for node in graph.nodes if "bilinear" in node.op]
    module, inputs = model.build(), model.example_inputs(2, 8)
    output, forward = profiled_products(lambda: call_model(module, inputs))
    _, backward = profiled_products(lambda: torch.autograd.backward(output.sum()))
    assert (node.flops, node.num_kernels) == (sum(forward), len(forward) + 64)  # and a sum for each feature
    assert (node.backward_flops, node.num_backward_kernels) == (sum(backward), 3 * len(backward))
    assert len(backward) == 64 * num_gradients
    assert node.weight_gradient_flops == node.backward_flops // num_gradients
    assert (graph.forward_flops, graph.backward_flops) == (node.flops, node.backward_flops)


def profiled_products(run: Callable[[], Any]) -> tuple[Any, list[int]]:
    """What ``run`` returns, and the FLOPs of each product that it runs on the CPU."""
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True, with_flops=True) as found:
        result = run()
    return result, [event.flops for event in found.events() or () if event.name == "aten::bmm"]
