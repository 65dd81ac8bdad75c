"""What users write in their models: traced, or refused with the operator and the line."""

import logging.handlers
from pathlib import Path

import pytest
import torch

from planner.errors import ModelError
from planner.graph.model_graph import ModelGraph
from planner.graph.tracer import trace_model
from tests.unit.planner.graph.traced import assert_equal_work, counted_flops, loaded_from_code

MODEL = """
import math, torch
import numpy as np
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x
    @staticmethod
    def backward(ctx, gradient):
        return 2 * ctx.saved_tensors[0] * gradient

class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(32, 32)
        {init}
    def inner(self, x):
        return x + self.a(x).relu()
    def forward(self, x):
        {body}

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(64, 32)
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.head = nn.Linear(32, 64)
    def forward(self, ids):
        x = self.embedding(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)

class Careful(Square):
    @staticmethod
    def forward(ctx, x):
        with torch.no_grad():
            ctx.save_for_backward(x)
        return x * x

def build_model():
    return Model()
"""

TRACED = {
    "checkpoint": ("", "return checkpoint(self.inner, x, use_reentrant=False)"),
    "reentrant checkpoint": ("", "return checkpoint(self.inner, x, use_reentrant=True)"),
    "autograd function in a checkpoint": (
        "self.squared = lambda x: x + Square.apply(self.a(x))",
        "return checkpoint(self.squared, x, use_reentrant=False)",
    ),
    "gradients off in an autograd function": ("", "return x + Careful.apply(self.a(x))"),
    "autograd function": ("", "return x + Square.apply(self.a(x))"),
    "compiled": ("", "return torch.compile(self.inner)(x)"),
    "autocast": ("", "with torch.autocast('cuda', dtype=torch.bfloat16):\n            return x + self.a(x)"),
    "autocast by device": ("", "with torch.autocast(x.device.type, enabled=False):\n            return x + self.a(x)"),
    "numpy table": (
        "self.register_buffer('t', torch.from_numpy(np.ones(32)))",
        "return x + (self.a(x) * self.t).to(x)",
    ),
    "value in init": ("self.p = torch.linspace(0, 0.1, 3)[1].item()", "return x + F.dropout(self.a(x), self.p)"),
    "tensor on the CPU": ("", "return x + self.a(x) * torch.ones(32, device='cpu', dtype=x.dtype)"),
    "state that changes": ("self.n = 0", "self.n += 1; self.last = x; return x + self.a(x)"),
    "weight norm": (
        "self.b = nn.utils.parametrizations.weight_norm(nn.Linear(32, 32))",
        "return x + self.b(self.a(x))",
    ),
    "loop in time": (
        "self.decay = nn.Parameter(torch.zeros(32))",
        "u, h, out = self.a(x), 0, []\n"
        "        for t in range(u.shape[1]):\n"
        "            h = self.decay.sigmoid() * h + u[:, t]; out.append(h)\n"
        "        return x + torch.stack(out, dim=1)",
    ),
    "manual attention": (
        "self.register_buffer('mask', torch.tril(torch.ones(64, 64)).view(1, 1, 64, 64))",
        "q = self.a(x).view(*x.shape[:2], 4, 8).transpose(1, 2)\n"
        "        hidden = self.mask[..., : x.shape[1], : x.shape[1]] == 0\n"
        "        s = (q @ q.transpose(-2, -1) / math.sqrt(8)).masked_fill(hidden, -9e9)\n"
        "        return x + (F.dropout(s.softmax(-1), 0.1) @ q).transpose(1, 2).reshape(x.shape)",
    ),
    "attention module": (
        "self.b = nn.MultiheadAttention(32, 4, batch_first=True)",
        "return x + self.b(x, x, self.a(x), need_weights=False)[0]",
    ),
    "einsum": (
        "self.w = nn.Parameter(torch.zeros(4, 32, 8))",
        "return x + self.a(torch.einsum('btd,hde->bthe', x, self.w).flatten(2))",
    ),
    "complex rotation": (
        "self.register_buffer('turn', torch.polar(torch.ones(64, 16), torch.ones(64, 16)), persistent=False)",
        "y = torch.view_as_complex(self.a(x).float().unflatten(-1, (16, 2)))\n"
        "        return x + torch.view_as_real(y * self.turn[: x.shape[1]]).flatten(-2).to(x)",
    ),
}


UNKNOWN = (
    "self.b, self.c = nn.Parameter(torch.zeros(32, 32)), nn.Parameter(torch.zeros(32, 32))",
    "return x + torch.linalg.multi_dot([self.a(x).flatten(0, 1), self.b, self.c]).view_as(x)",
)

# One linear layer a block, counted by hand: the first two do not run here without warnings or a
# compiler, and of the others the counter sees the forward pass twice.
BY_HAND = ("autocast", "compiled", "checkpoint", "reentrant checkpoint", "autograd function in a checkpoint")


def trace(init: str, body: str, folder: Path) -> ModelGraph:
    return trace_model(loaded_from_code(MODEL.format(init=init or "pass", body=body), folder), 2, 16)


@pytest.mark.parametrize("name", TRACED)
def test_traced_and_counted(name: str, tmp_path: Path) -> None:
    graph = trace(*TRACED[name], tmp_path)
    assert [block.count for block in graph.blocks] == [2]
    model = loaded_from_code(MODEL.format(init=TRACED[name][0] or "pass", body=TRACED[name][1]), tmp_path)
    assert graph.num_params == sum(p.numel() for p in model.build().parameters())
    if name in BY_HAND:
        forward = 2 * (2 * 2 * 16 * 32 * 32) + 2 * 2 * 16 * 32 * 64
        backward = 2 * forward
    else:
        forward, backward = counted_flops(model, 2, 16)
    assert (graph.forward_flops, graph.backward_flops) == (forward, backward)


@pytest.mark.parametrize(
    ("body", "hint"),
    [
        ("return self.inner(x) + torch.ones(32, device='cuda')", "device=x.device"),
        ("return self.inner(x) + torch.ones(32).cuda()", "device=x.device"),
        ("return self.inner(torch.fft.rfft(x, dim=1).abs())", "--precision fp32"),
    ],
)
@pytest.mark.skipif(torch.cuda.is_available(), reason="there torch finds the GPU that the line asks for")
def test_refused_with_the_way_out(body: str, hint: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"model\.py:25") as error:
        trace("", body, tmp_path)
    assert hint in error.value.hint


def test_an_input_that_forward_does_not_take_is_named(tmp_path: Path) -> None:
    """One for the loss function alone: forward was given all of them as its one argument."""
    inputs = (
        "def example_inputs(batch_size, seq_len):\n"
        "    ids = torch.zeros(batch_size, seq_len, dtype=torch.int64)\n"
        "    return {'ids': ids, 'labels': ids, 'cls': ids[:, 0]}\n"
    )
    loaded = loaded_from_code(MODEL.format(init="pass", body="return self.inner(x)") + inputs, tmp_path)
    with pytest.raises(ModelError, match=r"hold cls, which forward\(ids\) does not take") as error:
        trace_model(loaded, 2, 16)
    assert "cls=None" in error.value.hint


def test_a_model_that_asks_for_values_and_cannot_be_built_with_them_is_told_where_it_asks(tmp_path: Path) -> None:
    """LongCat-Flash: its experts need more memory than there is, and that alone was told, with a wrong way out."""
    init = "assert torch.empty(1).is_meta, 'no memory'"
    with pytest.raises(ModelError, match=r"model\.py:25 `if x\.sum.*depends on the values"):
        trace(init, "if x.sum() > 0: return self.inner(x)\n        return x", tmp_path)


def test_joined_under_any_of_its_names(tmp_path: Path) -> None:
    """Zamba2 calls torch.concatenate."""
    bodies = [f"return x + self.a(torch.{name}([x[..., :16], x[..., 16:]], -1))" for name in ("cat", "concatenate")]
    one, other = (trace("", body, tmp_path) for body in bodies)
    assert other.warnings == one.warnings == ()
    assert (other.forward_flops, other.saved_activation_bytes) == (one.forward_flops, one.saved_activation_bytes)


def test_refused_with_the_line(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"aten\.\S+ failed at model\.py:25 `return x \+ self.a\(x\).view\(3, -1\)`"):
        trace("", "return x + self.a(x).view(3, -1)", tmp_path)


def test_only_the_error_tells_of_unlike_shapes(tmp_path: Path) -> None:
    """torch logged the traceback of the failed operator besides, at each way of tracing that was tried."""
    listener = logging.handlers.BufferingHandler(100)
    log = logging.getLogger("torch._subclasses.fake_tensor")
    log.addHandler(listener)
    try:
        with pytest.raises(ModelError, match=r"aten\.mm\.default failed at model\.py:25 .* same reduction dim"):
            trace("", "return self.a(x[..., :7])", tmp_path)
    finally:
        log.removeHandler(listener)
    assert not listener.buffer


@pytest.mark.parametrize("name", TRACED)
def test_running_the_modules_finds_what_export_finds(name: str, tmp_path: Path) -> None:
    init, body = TRACED[name]
    model = loaded_from_code(MODEL.format(init=init or "pass", body=body), tmp_path)
    assert_equal_work(trace_model(model, 2, 16, tiers=("export",)), trace_model(model, 2, 16, tiers=("modules",)))


def test_an_operator_without_a_rule_is_named_once(tmp_path: Path) -> None:
    graph = trace(*UNKNOWN, tmp_path)
    (warning,) = graph.warnings
    assert "aten.linalg_multi_dot.default (model.py:25)" in warning
    chain = next(node for node in graph.nodes if node.op == "aten.linalg_multi_dot.default")
    assert chain.flops == 2 * 2 * 32 * 32 * 32  # two products of matrices of 32 times 32
    assert chain.backward_flops == 2 * chain.flops


def test_parameters_without_gradient_are_named(tmp_path: Path) -> None:
    graph = trace("self.b = nn.Linear(32, 32)", "return self.inner(x)", tmp_path)
    (warning,) = graph.warnings
    assert "4 trainable parameters get no gradient, the first is layers.0.b.weight" in warning


def test_a_reentrant_checkpoint_of_what_has_no_gradient_gives_none(tmp_path: Path) -> None:
    """As torch has it: of the first block's ids, none of its parameters are reached."""
    graph = trace("", "return self.inner(x) + checkpoint(self.inner, x.detach(), use_reentrant=True)", tmp_path)
    without = trace("", "return self.inner(x)", tmp_path)
    assert graph.forward_flops > without.forward_flops
    assert graph.backward_flops == without.backward_flops


def test_lora_has_no_weight_gradient_for_frozen_matrices(tmp_path: Path) -> None:
    init = (
        "self.a.requires_grad_(False); self.down = nn.Parameter(torch.zeros(4, 32)); "
        "self.up = nn.Parameter(torch.zeros(32, 4))"
    )
    graph = trace(init, "return x + self.a(x) + F.linear(F.linear(x, self.down), self.up)", tmp_path)
    frozen = [node for node in graph.nodes if "layers.0.a.weight" in node.operands]
    assert [(node.weight_gradient_flops, node.saves) for node in frozen] == [(0, ())]
    adapters = [node for node in graph.nodes if set(node.operands) & {"layers.0.down", "layers.0.up"}]
    assert [node.weight_gradient_flops for node in adapters] == [node.flops for node in adapters]
    assert graph.num_params - graph.num_trainable_params == 2 * (32 * 32 + 32)


def test_without_weights_whatever_the_factory_makes(tmp_path: Path) -> None:
    """Half a billion parameters of a factory that also needs values: nothing of that size is ever filled."""
    init = "self.p = torch.linspace(0, 0.1, 3)[1].item(); self.big = nn.Linear(32, 2**23)"
    graph = trace(init, "return x + self.a(x) + self.big(x).mean(-1, keepdim=True)", tmp_path)
    assert graph.num_params > 2 * 32 * 2**23


def test_a_parameter_without_a_shape_is_named(tmp_path: Path) -> None:
    code = (
        "from torch import nn\n"
        "class Net(nn.Module):\n"
        "    def __init__(self):\n        super().__init__()\n"
        "        self.used, self.other = nn.Embedding(8, 8), nn.LazyLinear(8)\n"
        "    def forward(self, ids):\n        return self.used(ids)\n"
        "def build_model():\n    return Net()\n"
    )
    with pytest.raises(ModelError, match=r"Net: the parameter other.weight has no shape yet"):
        loaded_from_code(code, tmp_path)


@pytest.mark.parametrize("name", ["a" * 5000, "\udcff"])
def test_a_name_that_no_file_takes_is_refused(name: str, tmp_path: Path) -> None:
    code = """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(256, 16)
        self.add_module(NAME, nn.Linear(16, 256))
    def forward(self, input_ids):
        return getattr(self, NAME)(self.embed(input_ids))
def build_model():
    return Model()
"""
    loaded = loaded_from_code(f"from torch import nn\nNAME = {name!r}\n{code}", tmp_path)
    with pytest.raises(ModelError, match=f"is called .*, {len(name):,} characters"):
        trace_model(loaded, 1, 16)


@pytest.mark.parametrize(
    ("forward", "reason", "way_out"),
    [
        ("(self, input_ids, mask): return self.lookup(input_ids)", "missing 1 required", "define example_inputs"),
        ("(self, input_ids): return self.lookup(input_ids).mean()", r"a tensor of shape \(\)", "define loss_fn"),
        ("(self, input_ids): return self.lookup.forward()", "missing 1 required", "correct the line"),
    ],
)
def test_what_a_model_file_lacks_is_named(forward: str, reason: str, way_out: str, tmp_path: Path) -> None:
    """Whatever it was, the hint was to correct the line; what is wrong inside it still is."""
    code = f"""
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.lookup = nn.Embedding(8, 8)
    def forward{forward}

def build_model():
    return Net()
"""
    with pytest.raises(ModelError, match=reason) as error:
        trace_model(loaded_from_code(code, tmp_path), 2, 16)
    assert way_out in error.value.hint
