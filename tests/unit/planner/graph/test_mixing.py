"""Forward passes that mix the samples of a batch are found and named; those that do not are never called so."""

from pathlib import Path

import pytest

from planner.graph.model_graph import ModelGraph
from planner.graph.tracer import trace_model
from planner.graph.tracer.tiers import TIERS, Tier
from planner.model_file import load_model, resolve_model
from tests.fixtures.kinds_of_models import HEADER, KINDS
from tests.unit.planner.graph.traced import HF_CONFIGS, ROOT, loaded, loaded_from_config

MODEL = """
import torch
from torch import nn
from torch.nn import functional as F

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.up, self.head = nn.Embedding(64, 16), nn.Linear(16, 16), nn.Linear(16, 64)
        self.lstm, self.norm = nn.LSTM(16, 16), nn.BatchNorm1d(16, track_running_stats=False)
        self.attention = nn.MultiheadAttention(16, 2)
    def forward(self, input_ids):
        x = self.up(self.embed(input_ids))
        pooled = x.mean(1)
        {line}
        return self.head(x)

def build_model():
    return Model()
"""
LINE = MODEL[: MODEL.index("{line}")].count("\n") + 1

MIXING = {
    "a mean over the batch": ("x = x - x.mean(0)", "mean"),
    "a mean of everything": ("x = x / x.abs().mean()", "mean"),
    "a mean over merged positions": ("x = x - x.flatten(0, 1).mean(0, keepdim=True)", "mean"),
    "a mean behind a transposition": (
        "y = x.transpose(0, 1); x = (y - y.mean(1, keepdim=True)).transpose(0, 1)",
        "mean",
    ),
    "a standard deviation": ("x = x / (x.std(0, keepdim=True) + 1)", "std"),
    "a sum of squares": ("x = x * torch.rsqrt((x * x).sum((0, 1)) + 1)", "sum"),
    "a maximum": ("x = x - x.max(0, keepdim=True).values", "max"),
    "a norm of everything": ("x = x / x.norm()", "linalg_vector_norm"),
    "a softmax over the batch": ("x = F.softmax(x, dim=0)", "softmax"),
    "a sum so far": ("x = x.cumsum(0)", "cumsum"),
    "similarities of samples": ("x = x + F.softmax(pooled @ pooled.T, -1).sum(-1)[:, None, None]", "matmul"),
    "attention between samples": (
        "y = x.transpose(0, 1); x = F.scaled_dot_product_attention(y, y, y).transpose(0, 1)",
        "scaled_dot_product_attention",
    ),
    "attention that takes the batch for positions": ("x = self.attention(x, x, x, need_weights=False)[0]", ""),
    "einsum between samples": ("x = torch.einsum('bsd,csd->bc', x, x)[..., None, None].mean(1) + x", "einsum"),
    "a covariance": ("x = x @ (pooled.T @ pooled)", "matmul"),
    "moved along the batch": ("x = x + torch.roll(x, 1, 0)", "roll"),
    "turned round": ("x = x + x.flip(0)", "flip"),
    "differences of samples": ("x = x + (pooled[:, None] - pooled[None]).abs().mean(1)[:, None]", "sub"),
    "distances of samples": ("x = x + torch.cdist(pooled, pooled).sum(1)[:, None, None]", "cdist"),
    "a mean beside each": ("x = x + torch.cat([x, x.mean(0, keepdim=True).expand_as(x)], -1)[..., 8:24]", "mean"),
    "an LSTM that takes the batch for steps": ("x = self.lstm(x)[0]", "lstm"),
    "statistics that nobody keeps": ("x = self.norm(x.transpose(1, 2)).transpose(1, 2)", "batch_norm"),
    "layer norm over the batch": ("x = F.layer_norm(x.permute(1, 2, 0), (len(x),)).permute(2, 0, 1)", "layer_norm"),
}

APART = {
    "a mean over positions": "x = x - x.mean(1, keepdim=True)",
    "a mean over another dim": "x = x.transpose(0, 1); x = (x - x.mean(0)).transpose(0, 1)",
    "a mean of choices": "x = x / (input_ids != 0).float().mean() ",
    "the longest": "x = x + torch.arange(64)[:, None][: x.shape[1]] / (input_ids.max() + 1)",
    "similarities of positions": "x = F.softmax(x @ x.mT, -1) @ x",
    "einsum of positions": "x = torch.einsum('bst,btd->bsd', torch.einsum('bsd,btd->bst', x, x), x)",
    "windows": "x = (w := x.view(len(x) * 2, -1, 16)).sub(w.mean(1, keepdim=True)).reshape(x.shape)",
    "heads in front": "h = x.unflatten(-1, (2, 8)).permute(2, 0, 1, 3).flatten(0, 1); "
    "x = F.softmax(h @ h.mT, -1).matmul(h).unflatten(0, (2, -1)).permute(1, 2, 0, 3).flatten(2)",
    "steps first": "x = self.lstm(x.transpose(0, 1))[0].transpose(0, 1)",
    "positions first": "y = x.transpose(0, 1); x = self.attention(y, y, y, need_weights=False)[0].transpose(0, 1)",
    "written step by step": "y = torch.zeros_like(x.transpose(0, 1)); y[0] = pooled; x = x + y.mean(0)[:, None]",
    "a balance loss": "gates = F.softmax(x.flatten(0, 1), -1); self.aux = (gates.mean(0) ** 2).sum()",
    "the last layer's states": "x = x + self.lstm(x.transpose(0, 1))[1][0].mean(0)[:, None]",
    "capacity": "g = F.softmax(x.flatten(0, 1), -1); m = F.one_hot(g.argmax(-1), 16); "
    "d = F.one_hot(((m.cumsum(0) - 1) * m).sum(-1).clamp(0, 7), 8)[:, None] * m[..., None] * g[..., None]; "
    "e = torch.einsum('sec,sm->ecm', (d != 0).to(x.dtype), x.flatten(0, 1)); "
    "x = torch.einsum('sec,ecm->sm', d, self.up(e)).view(x.shape)",
    "the largest of all, that cancels out": "e = (x - x.max()).exp(); x = e / e.sum(-1, keepdim=True)",
    "routing balanced over all tokens": "g = self.up(x).exp(); g = g / g.sum((0, 1)); i = (g / g.sum(-1, keepdim=True))"
    ".topk(2, -1)[1]; x = x + self.up.weight[i].sum(-2)",
    "what is only looked at": "self.seen = pooled @ pooled.T",
    "groups of shifted windows": "w = torch.roll(x, 1, 1).view(len(x), 2, -1, 16).flatten(0, 1); "
    "a = (w @ w.mT).view(-1, 2, w.shape[1], w.shape[1]) + torch.zeros(2, 1, 1); "
    "x = torch.roll((F.softmax(a.flatten(0, 1), -1) @ w).view(x.shape), -1, 1)",
    "padding": "m = (input_ids != 0).to(x.dtype)[..., None]; x = x * m; x = x - (x.sum(1) / m.sum(1))[:, None]",
    "samples one by one": "x = torch.stack([s - s.mean(0) for s in x])",
    "a prompt that all share": "x = torch.cat([self.up.weight[None].expand(len(x), -1, -1), x], 1)[:, 16:]",
    "a clamp where something is infinite": "x = x.clamp(max=torch.where(x.isinf().any(), 10.0, 20.0))",
}


HUGGINGFACE = """
import torch, transformers

def build_model():
    return transformers.{name}Model(transformers.{name}Config({sizes}))

def example_inputs(batch_size, seq_len):
    ids, image, sound = torch.ones(batch_size, seq_len, dtype=torch.int64), (3, 224, 224), (4000,)
    return {inputs}

def loss_fn(output, batch):
    return output[0].float().square().mean()
"""
IDS, BOTH = "dict(input_ids=ids)", "dict(input_ids=ids, decoder_input_ids=ids)"
IMAGE, SOUND = (
    "dict(pixel_values=torch.randn(batch_size, *image))",
    "dict(input_values=torch.randn(batch_size, *sound))",
)
LAYERS, TWICE = "num_hidden_layers=2", "encoder_layers=2, decoder_layers=2"
OF_TRANSFORMERS = {
    "Swin": ("", IMAGE),
    "Swinv2": ("", IMAGE),
    "ConvNextV2": ("", IMAGE),
    "Segformer": ("", IMAGE),
    "Hiera": ("", IMAGE),
    "Wav2Vec2": (LAYERS, SOUND),
    "XLNet": ("n_layer=2", IDS),
    "Funnel": ("block_sizes=[1, 1, 1], num_decoder_layers=1", IDS),
    "Longformer": (f"{LAYERS}, attention_window=8", IDS),
    "Nystromformer": (LAYERS, IDS),
    "Phimoe": (LAYERS, IDS),
    "Olmoe": (LAYERS, IDS),
    "Llama4Text": (LAYERS, IDS),
    "NllbMoe": (f"{TWICE}, num_experts=4, encoder_sparse_step=1, decoder_sparse_step=1", BOTH),
    "Bart": (TWICE, BOTH),
}


def mixing(graph: ModelGraph) -> list[str]:
    return [warning for warning in graph.warnings if "the samples of a batch" in warning]


def warnings_of(text: str, folder: Path, tiers: tuple[Tier, ...] = TIERS, seq_len: int = 12) -> list[str]:
    (folder / "model.py").write_text(text)
    model = load_model(resolve_model(str(folder / "model.py")))
    return mixing(trace_model(model, 2, seq_len, "float32", tiers))


@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("form", MIXING)
def test_what_mixes_samples_is_named(form: str, tier: Tier, tmp_path: Path) -> None:
    line, name = MIXING[form]
    [warning] = warnings_of(MODEL.replace("{line}", line), tmp_path, (tier,))
    assert f"{name} (model.py:{LINE})" in warning or not name


@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("form", APART)
def test_what_keeps_samples_apart_is_not(form: str, tier: Tier, tmp_path: Path) -> None:
    assert not warnings_of(MODEL.replace("{line}", APART[form]), tmp_path, (tier,))


def test_a_loss_that_mixes_is_not_the_model(tmp_path: Path) -> None:
    loss = "def loss_fn(output, batch):\n    return (output - output.mean(0)).square().mean()\n"
    assert not warnings_of(MODEL.replace("{line}", "pass") + loss, tmp_path)


def test_a_batch_of_one_says_nothing() -> None:
    coupled = loaded(str(ROOT / "tests" / "fixtures" / "coupled.py"))
    assert mixing(trace_model(coupled, 2, 16))[0].startswith("mean (coupled.py:14) mixes the samples of a batch: ")
    assert not mixing(trace_model(coupled, 1, 16))


@pytest.mark.parametrize("name", ["gpt2-1.5b", "llama3-8b", "mixtral-8x7b", "qwen3-30b-a3b", "deepseek-v3", "moe-10t"])
def test_no_preset_mixes(name: str) -> None:
    assert not mixing(trace_model(loaded(name), 2, 32))


@pytest.mark.parametrize("kind", KINDS)
def test_no_kind_of_model_mixes(kind: str, tmp_path: Path) -> None:
    fixed = {"fixed sequence of tokens": 128, "fixed sequence": 1}
    assert not warnings_of(HEADER + KINDS[kind], tmp_path, seq_len=fixed.get(kind, 12))


@pytest.mark.parametrize("name", sorted(HF_CONFIGS))
def test_no_config_mixes(name: str, tmp_path: Path) -> None:
    assert not mixing(trace_model(loaded_from_config(HF_CONFIGS[name], tmp_path), 2, 32))


@pytest.mark.parametrize("name", OF_TRANSFORMERS)
def test_no_model_of_transformers_mixes(name: str, tmp_path: Path) -> None:
    sizes, inputs = OF_TRANSFORMERS[name]
    assert not warnings_of(HUGGINGFACE.format(name=name, sizes=sizes, inputs=inputs), tmp_path, seq_len=32)


@pytest.mark.parametrize(
    "name",
    ["examples/model.py", "examples/tiny_gpt.py", *(f"tests/fixtures/{n}.py" for n in ("encoder", "routed", "vision"))],
)
def test_no_own_example_mixes(name: str) -> None:
    assert not mixing(trace_model(loaded(str(ROOT / name)), 2, 16))
