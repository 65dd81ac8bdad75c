"""Modules held in Python: their plans are those of a model file with the same module, for a script of one's own."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import cast

import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import cross_entropy
from torch.utils.flop_counter import FlopCounterMode

import planner
from costmodels.vocabulary.choices import Precision
from planner.errors import ModelError, PlanError
from planner.graph.model_graph import ModelGraph
from planner.model_file import HELD, held_model
from planner.plan.plan_file import write_plan
from planner.request import Request, graph_of, traced_anew

pytestmark = pytest.mark.usefixtures("traced_here")

Batch = dict[str, torch.Tensor]

SOURCE = """
import torch
from torch import nn
from torch.nn import functional as F


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norm, self.qkv, self.out = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        up, down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.mlp = nn.Sequential(nn.LayerNorm(width), up, nn.GELU(), down)

    def forward(self, x):
        q, k, v = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(self.norm(x)).chunk(3, dim=-1)
        )
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.mlp(x)


class PlainGPT(nn.Module):
    block_size = 32

    def __init__(self, layers=4, width=64):
        super().__init__()
        self.embed, self.places = nn.Embedding(256, width), nn.Embedding(32, width)
        self.blocks = nn.ModuleList(Block(width, 4) for _ in range(layers))
        self.head = nn.Linear(width, 256, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.tensor(0.5))

    def forward(self, input_ids):
        x = self.embed(input_ids) * self.scale + self.places(torch.arange(input_ids.shape[1], device=input_ids.device))
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class ViT(nn.Module):
    def __init__(self):
        super().__init__()
        self.patches = nn.Conv2d(3, 64, 8, stride=8)
        self.blocks = nn.ModuleList(Block(64, 4) for _ in range(3))
        self.head = nn.Linear(64, 10)

    def forward(self, pixel_values):
        x = self.patches(pixel_values).flatten(2).transpose(1, 2)
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(1))


class DLRM(nn.Module):
    def __init__(self):
        super().__init__()
        self.tables = nn.ModuleList(nn.EmbeddingBag(1000, 16, mode="sum") for _ in range(4))
        self.bottom = nn.Sequential(nn.Linear(13, 32), nn.ReLU(), nn.Linear(32, 16))
        self.top = nn.Sequential(nn.Linear(16 + 10, 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, dense, sparse):
        x = self.bottom(dense)
        rows = torch.stack([x, *(table(sparse[:, i]) for i, table in enumerate(self.tables))], dim=1)
        pairs = torch.bmm(rows, rows.transpose(1, 2))
        i, j = torch.tril_indices(5, 5, -1)
        return self.top(torch.cat([x, pairs[:, i, j]], dim=1)).squeeze(1)
"""
GPT_FILE = SOURCE + "build_model = PlainGPT\n"
VIT_FILE = (
    SOURCE
    + """
build_model = ViT
def example_inputs(batch_size, seq_len):
    return {"pixel_values": torch.zeros(batch_size, 3, 32, 32)}
def loss_fn(output, batch):
    return F.cross_entropy(output, torch.zeros(output.shape[0], dtype=torch.int64, device=output.device))
"""
)
DLRM_FILE = (
    SOURCE
    + """
build_model = DLRM
def example_inputs(batch_size, seq_len):
    return {"dense": torch.zeros(batch_size, 13), "sparse": torch.zeros(batch_size, 4, 3, dtype=torch.int64)}
def loss_fn(output, batch):
    return F.binary_cross_entropy_with_logits(output, torch.zeros_like(output))
"""
)
FILES = {"gpt": GPT_FILE, "vit": VIT_FILE, "dlrm": DLRM_FILE}


def parts(kind: str) -> tuple[Callable[[], nn.Module], dict[str, object]]:
    """What the file of this kind defines: the factory, and what is passed beside the module."""
    names: dict[str, object] = {}
    exec(FILES[kind], names)
    given = {name: names[name] for name in ("example_inputs", "loss_fn") if name in names}
    return cast("Callable[[], nn.Module]", names["build_model"]), given


def content(graph: ModelGraph) -> object:
    """All but names of the source: its files and lines."""
    found = json.loads(graph.model_dump_json(exclude={"source", "digest", "files", "warnings"}))
    for node in found["nodes"]:
        node.pop("source")
    return found


def held_graph(kind: str, module: nn.Module, seq_len: int | None = None) -> ModelGraph:
    return traced_anew(held_model(module, **parts(kind)[1]), seq_len, Precision.BF16)  # type: ignore[arg-type]


@pytest.mark.parametrize("on", ["meta", "cpu"])
@pytest.mark.parametrize("kind", FILES)
def test_its_graph_is_that_of_a_file_with_the_same_module(kind: str, on: str, tmp_path: Path) -> None:
    path = tmp_path / "model.py"
    path.write_text(FILES[kind])
    with torch.device(on):
        module = parts(kind)[0]()
    of_file = graph_of(Request(str(path), 1), [])
    found = held_graph(kind, module)
    assert content(found) == content(of_file)
    assert found.source == f"{HELD}{type(module).__name__}"
    assert found.seq_len == {"gpt": 32, "vit": 1, "dlrm": 1}[kind]


@pytest.mark.parametrize("kind", FILES)
def test_its_work_is_what_torch_counts(kind: str) -> None:
    make, given = parts(kind)
    module = make()
    graph = held_graph(kind, module)
    example = cast("Callable[[int, int], Batch] | None", given.get("example_inputs"))
    inputs = example(2, 32) if example else {"input_ids": torch.zeros(2, 32, dtype=torch.int64)}
    loss = cast("Callable[[torch.Tensor, Batch], torch.Tensor] | None", given.get("loss_fn"))
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        output = module(**inputs)
        (
            loss(output, inputs) if loss else cross_entropy(output.flatten(0, 1), inputs["input_ids"].flatten())
        ).backward()
    assert graph.forward_flops + graph.backward_flops == counter.get_total_flops() > 0
    assert graph.num_params == sum(parameter.numel() for parameter in module.parameters())


def test_a_hugging_face_model_is_traced_as_it_is() -> None:
    """Tied embeddings, dropout and a loss over shifted labels; against torch's own counter."""
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_layer=3, n_embd=64, n_head=4, vocab_size=128, n_positions=48, use_cache=False)
    module = transformers.GPT2LMHeadModel(config)
    plan = planner.search(module, gpus=2, hardware="dgx-a100-80gb", global_batch_size=8, tp=1, pp=1)
    assert (plan.model.source, plan.training.seq_len) == ("module:GPT2LMHeadModel", 48)
    assert plan.model.num_params == module.num_parameters()
    graph = traced_anew(held_model(module), None, Precision.BF16)
    tokens = torch.zeros(2, 48, dtype=torch.int64)
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        logits = module(input_ids=tokens).logits
        cross_entropy(logits.flatten(0, 1), tokens.flatten()).backward()
    assert graph.forward_flops + graph.backward_flops == counter.get_total_flops()


def test_a_hugging_face_model_is_traced_without_keys_for_later_tokens() -> None:
    """transformers keeps them unless told; the trace had a copy of all keys and values, which no training makes."""
    transformers = pytest.importorskip("transformers")
    sizes = {"n_layer": 3, "n_embd": 64, "n_head": 4, "vocab_size": 128, "n_positions": 48}
    modules = [transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, use_cache=each)) for each in (True, False)]
    graphs = [traced_anew(held_model(module), None, Precision.BF16) for module in modules]
    assert [node.op for node in graphs[0].nodes] == [node.op for node in graphs[1].nodes]
    assert modules[0].config.use_cache  # the user's own is left as it is until it is trained


def test_the_module_is_not_changed() -> None:
    module = parts("gpt")[0]().eval().half()
    before = {name: (id(value), value.clone()) for name, value in module.state_dict(keep_vars=True).items()}
    held_graph("gpt", module)
    after = module.state_dict(keep_vars=True)
    assert not module.training
    assert after.keys() == before.keys()
    for name, (identity, value) in before.items():
        assert id(after[name]) == identity
        assert torch.equal(after[name], value)


def test_an_example_micro_batch_says_the_sequence_and_any_batch_is_made_of_it() -> None:
    make, _ = parts("gpt")
    ids = torch.zeros(5, 24, dtype=torch.int64)
    plans = [
        planner.search(make(), gpus=2, hardware="dgx-a100-80gb", global_batch_size=8, tp=1, pp=1, example_inputs=each)
        for each in (ids, (ids,), {"input_ids": ids})
    ]
    assert {plan.training.seq_len for plan in plans} == {24}
    assert len({plan.prediction.step_time_s for plan in plans if plan.prediction is not None}) == 1
    with pytest.raises(ModelError, match="have sequences of 24 tokens, not 16"):
        planner.search(make(), gpus=2, hardware="dgx-a100-80gb", example_inputs=ids, seq_len=16)
    with pytest.raises(ModelError, match="do not all begin with the number of samples"):
        planner.search(make(), gpus=2, hardware="dgx-a100-80gb", example_inputs=(ids, torch.zeros(3)))


def test_a_model_without_tokens_is_planned_in_samples(capsys: pytest.CaptureFixture[str]) -> None:
    from rich.console import Console

    from planner.render import show_plan

    make, given = parts("dlrm")
    options = {"gpus": 2, "hardware": "dgx-a100-80gb", "tp": 1, "pp": 1, **given}
    plan = planner.search(make(), **options)  # type: ignore[arg-type]
    assert plan.training.seq_len == 1
    assert plan.training.global_batch_size == 4096
    Console(width=100).print(show_plan(plan))
    out = " ".join(capsys.readouterr().out.split())
    assert "4096 samples; each" in out
    assert "samples/s/GPU" in out
    assert "tokens" not in out
    assert planner.fit(make(), **options).longest_seq_len is None  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("module", "said"),
    [
        (nn.LazyLinear(4), "the parameter weight has no shape yet"),
        (nn.Module(), "cannot be traced"),
    ],
)
def test_what_cannot_be_traced_is_said(module: nn.Module, said: str) -> None:
    with pytest.raises(ModelError, match=said):
        planner.search(module, gpus=2, hardware="dgx-a100-80gb")


def commanded(*arguments: object, cache: Path | None = None) -> subprocess.CompletedProcess[str]:
    """What a process of its own answers, which shares nothing but the cache."""
    import os

    env = {**os.environ, "PYTHONPATH": str(Path(planner.__file__).parents[1])}
    env |= {} if cache is None else {"XDG_CACHE_HOME": str(cache)}
    words = [sys.executable, "-m", "planner", *map(str, arguments)]
    return subprocess.run(words, capture_output=True, text=True, check=False, env=env)


def test_a_plan_of_it_is_priced_again_and_refused_by_run(tmp_path: Path) -> None:
    make, _ = parts("gpt")
    path = tmp_path / "plan.json"
    plan = planner.search(make(), gpus=2, hardware="cpu-gloo", global_batch_size=8, precision="fp32", tp=1, pp=1)
    write_plan(plan, path)
    assert planner.load_plan(path) == plan
    again = commanded("estimate", path, "--json")
    assert again.returncode == 0, again.stderr
    assert plan.prediction is not None
    assert json.loads(again.stdout)["prediction"]["step_time_s"] == pytest.approx(plan.prediction.step_time_s)
    for command in (("run", path), ("export", path, "--to", "torchrun")):
        done = commanded(*command)
        assert done.returncode == 2, done.stderr
        assert "module:PlainGPT is a module that was held in Python" in done.stderr
        assert "planner.parallelize(model, plan)" in done.stderr


def test_where_its_graph_is_not_known_the_module_is_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from planner.graph import graph_cache

    make, _ = parts("gpt")
    path = tmp_path / "plan.json"
    plan = planner.search(make(), gpus=2, hardware="dgx-a100-80gb", global_batch_size=8, tp=1, pp=1)
    write_plan(plan, path)
    elsewhere = commanded("estimate", path, cache=tmp_path / "empty")
    assert elsewhere.returncode == 2
    assert "planner.load_plan(path, model=module" in elsewhere.stderr
    monkeypatch.setenv("PLANNER_CACHE", "off")
    monkeypatch.setattr(graph_cache, "_HELD", {})
    with pytest.raises(ModelError, match="not in the cache"):
        planner.estimate(path)
    with pytest.raises(PlanError, match="not the module that the plan was made for"):
        planner.load_plan(path, model=parts("vit")[0](), **parts("vit")[1])  # type: ignore[arg-type]
    loaded = planner.load_plan(path, model=make())
    again = planner.estimate(loaded)
    assert again.prediction is not None
    assert plan.prediction is not None
    assert again.prediction.step_time_s == pytest.approx(plan.prediction.step_time_s)
    found = planner.explain(loaded, why_not="tp=2", searches="none")
    assert found.why_not is not None
