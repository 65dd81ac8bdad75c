"""A folded trace is the whole trace, node by node; what does not repeat is not folded."""

from pathlib import Path

import pytest
from torch import nn
from torch.nn.modules.module import register_module_forward_hook

from planner.graph.tracer import trace_model
from planner.graph.tracer.folding import Fold, find_folds
from planner.graph.tracer.stand_ins import Sizes, on_meta
from planner.graph.tracer.tiers import trace_whole
from planner.model_file import LoadedModel
from tests.unit.planner.graph.traced import HF_CONFIGS, loaded, loaded_from_code, loaded_from_config

MODEL = """
import torch
from torch import nn

class Layer(nn.Module):
    def __init__(self, index):
        super().__init__()
        {init}
        self.up = nn.Linear(16, {width})
        self.down = nn.Linear({width}, 16)
    def forward(self, x, extra=0.0):
        {body}

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(32, 16)
        self.layers = nn.ModuleList(Layer(i) for i in range({count}))
        self.head = nn.Linear(16, 32, bias=False)
    def forward(self, ids):
        x = self.embedding(ids)
        {loop}
        return {result}

def build_model():
    return Model()
"""

PLAIN_BODY = "return x + self.down(torch.relu(self.up(x)))"
PLAIN_LOOP = "for layer in self.layers: x = layer(x)"


def toy(
    folder: Path, *, init: str = "", width: str = "32", body: str = PLAIN_BODY, loop: str = PLAIN_LOOP, count: int = 12
) -> LoadedModel:
    result = "x" if "return" in loop else "self.head(x)"
    code = MODEL.format(init=init, width=width, body=body, loop=loop, count=count, result=result)
    return loaded_from_code(code, folder)


def folds_of(model: LoadedModel) -> tuple[Fold, ...]:
    return find_folds(on_meta(model, Sizes(2, 16, "float32")).model)


def assert_equals_whole_trace(model: LoadedModel) -> None:
    assert trace_model(model, 2, 16, "float32") == trace_whole(model, 2, 16, "float32")


@pytest.mark.parametrize(
    ("parts", "period"),
    [
        ({}, 1),
        ({"count": 5}, 1),
        ({"init": "self.index = index"}, 1),
        ({"width": "(32 if index % 2 else 48)"}, 2),
        ({"width": "(64 if index < 2 else 32)"}, 1),
        ({"init": "self.gain = float(index % 3)", "body": "return x + self.gain * self.down(self.up(x))"}, 3),
        ({"loop": "for layer in self.layers: x = x + layer(x)"}, 1),
        ({"loop": "first = x\n        for layer in self.layers: x = layer(x, first)", "body": "return extra + x"}, 1),
        ({"loop": "for layer in self.layers: x = layer(x)\n        x = x.relu_()"}, 1),
    ],
    ids=["plain", "short", "index kept", "two kinds", "odd beginning", "three gains", "outer sum", "skip", "in place"],
)
def test_folds_to_the_whole_trace(parts: dict[str, object], period: int, tmp_path: Path) -> None:
    parts = {"count": 15, **parts}
    model = toy(tmp_path, **parts)  # pyright: ignore[reportArgumentType]
    assert [fold.period for fold in folds_of(model)] == [period]
    assert_equals_whole_trace(model)


@pytest.mark.parametrize(
    "parts",
    [
        {"count": 4},
        {"init": "self.index = index", "body": "return x if self.index % 4 else x + self.down(self.up(x))"},
        {"init": "self.gain = float(index)", "body": "return x + self.gain * self.down(self.up(x))"},
    ],
    ids=["few", "index read", "all differ"],
)
def test_what_may_differ_is_not_folded(parts: dict[str, object], tmp_path: Path) -> None:
    model = toy(tmp_path, **parts)  # pyright: ignore[reportArgumentType]
    assert folds_of(model) == ()
    assert_equals_whole_trace(model)


U_SHAPE = """kept = []
        for i, layer in enumerate(self.layers):
            x = layer(x) if i < len(self.layers) // 2 else layer(x + kept.pop())
            kept.append(x)"""


@pytest.mark.parametrize(
    "loop",
    [
        "outs = []\n        for layer in self.layers: x = layer(x); outs.append(x)\n        x = sum(outs)",
        "sums = [0]\n        for layer in self.layers: x = layer(x + sums[-1]); sums.append(sums[0] + x)",
    ],
    ids=["all outputs read", "first output read"],
)
def test_what_does_not_repeat_is_traced_whole(loop: str, tmp_path: Path) -> None:
    model = toy(tmp_path, loop=loop)
    assert len(folds_of(model)) == 1  # the modules are equal, the way they are called is not
    assert_equals_whole_trace(model)


@pytest.mark.parametrize(
    "loop",
    [
        U_SHAPE,
        "for i in range(12): x = self.layers[i](x)",
        "for i, layer in enumerate(self.layers): x = layer(x) if i % 5 else layer(x.relu())",
        "return self.head(self.run(x))\n    def run(self, x):\n"
        "        for layer, kind in zip(self.layers, 4 * 'abc'): x = layer(x.relu() if kind == 'c' else x)",
    ],
    ids=["U shape", "counted", "index in the loop", "counted in a method"],
)
def test_blocks_that_are_counted_are_not_folded(loop: str, tmp_path: Path) -> None:
    model = toy(tmp_path, loop=loop)
    assert folds_of(model) == ()
    assert_equals_whole_trace(model)


def test_shared_parameters_are_not_folded(tmp_path: Path) -> None:
    toy(tmp_path)
    with (tmp_path / "model.py").open("a") as file:
        file.write(
            "\ndef tied():\n    model = Model()\n"
            "    for layer in model.layers:\n        layer.down.weight = model.layers[0].down.weight\n"
            "    return model\n"
        )
    model = loaded(f"{tmp_path / 'model.py'}:tied")
    assert folds_of(model) == ()
    assert_equals_whole_trace(model)


@pytest.mark.parametrize("name", sorted(HF_CONFIGS))
def test_huggingface_models_fold(name: str, tmp_path: Path) -> None:
    layers = "n_layer" if name == "gpt2" else "num_hidden_layers"
    model = loaded_from_config({**HF_CONFIGS[name], layers: 9}, tmp_path)
    assert [fold.periods for fold in folds_of(model)] == [9]
    assert_equals_whole_trace(model)


def test_of_a_thousand_layers_no_more_are_run_than_of_ten(tmp_path: Path) -> None:
    num_run: list[int] = []
    for count in (10, 1000):
        (folder := tmp_path / str(count)).mkdir()
        ran: list[nn.Module] = []
        hook = register_module_forward_hook(lambda module, _inputs, _output, ran=ran: ran.append(module))
        try:
            graph = trace_model(toy(folder, count=count), 2, 16)
        finally:
            hook.remove()
        assert graph.blocks[0].count == count
        num_run.append(len(ran))
    assert 0 < num_run[0] == num_run[1] < 100
