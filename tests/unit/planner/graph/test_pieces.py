"""Models without repeated blocks: divided by work into modules, cut where few tensors cross."""

from itertools import pairwise
from math import prod
from pathlib import Path

import pytest

from planner.graph.model_graph import ModelGraph
from planner.graph.pieces import COARSE_SHARE
from planner.graph.tracer import trace_model
from planner.operators.call import ITEM_BYTES
from tests.unit.planner.graph.test_structure import assert_partitions
from tests.unit.planner.graph.traced import graph_of, loaded_from_code

HEAD = "import torch\nfrom torch import nn\n"
IMAGES = (
    "\ndef example_inputs(batch_size, seq_len):\n    return (torch.zeros(batch_size, 3, 32, 32),)\n"
    "def loss_fn(output, batch):\n    return output.float().square().mean()\n"
)
MLP = (
    HEAD
    + """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(64, 64)
        widths = [64, 512, 384, 256, 640, 128, 192]
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in zip(widths, widths[1:]))
        self.norm = nn.LayerNorm(192)
    def forward(self, ids):
        x = self.embedding(ids)
        for layer in self.layers:
            x = layer(x).relu()
        return self.norm(x)
def build_model():
    return Net()
"""
)
U_NET = (
    HEAD
    + """
class Double(nn.Sequential):
    def __init__(self, a, b):
        super().__init__(nn.Conv2d(a, b, 3, padding=1), nn.ReLU(), nn.Conv2d(b, b, 3, padding=1), nn.ReLU())
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.down = nn.ModuleList([Double(3, 16), Double(16, 32), Double(32, 64)])
        self.pool = nn.MaxPool2d(2)
        self.middle = Double(64, 128)
        self.up = nn.ModuleList(nn.ConvTranspose2d(2 * w, w, 2, stride=2) for w in (64, 32, 16))
        self.merge = nn.ModuleList(Double(2 * w, w) for w in (64, 32, 16))
    def forward(self, x):
        skips = []
        for down in self.down:
            skips.append(down(x))
            x = self.pool(skips[-1])
        x = self.middle(x)
        for up, merge in zip(self.up, self.merge):
            x = merge(torch.cat([skips.pop(), up(x)], 1))
        return x
class Wrapped(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = Net()
    def forward(self, x):
        return self.net(x)
def build_model():
    return Net()
"""
    + IMAGES
)
RESIDUAL = (
    HEAD
    + """
class Layer(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.up, self.down = nn.Linear(32, width), nn.Linear(width, 32)
    def forward(self, x):
        return x + self.down(self.up(x).relu())
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(64, 32)
        self.layers = nn.Sequential(*(Layer(width) for width in (36, 40, 48, 56, 64, 72, 80, 88)))
        self.head = nn.Linear(32, 8)
    def forward(self, ids):
        return self.head(self.layers(self.embedding(ids)))
def build_model():
    return Net()
"""
)
# Two equal layers in the middle of much else are blocks, and not all there is to cut.
MOSTLY_UNLIKE = RESIDUAL.replace(
    "*(Layer(width) for width in (36, 40, 48, 56, 64, 72, 80, 88))",
    "Layer(300), nn.Sequential(Layer(40), Layer(40)), Layer(400), Layer(500)",
)


def traced(code: str, folder: Path) -> ModelGraph:
    graph = trace_model(loaded_from_code(code, folder), 2, 16)
    assert_partitions(graph)
    assert all(unit.parameters for unit in graph.units), "a stage without parameters cannot be trained"
    return graph


def pieces_of(graph: ModelGraph) -> list[str]:
    return [unit.name for unit in graph.units if unit.is_block]


def test_a_plain_mlp_is_cut_between_its_layers(tmp_path: Path) -> None:
    graph = traced(MLP, tmp_path)
    assert graph.blocks == ()
    assert [unit.name for unit in graph.units] == ["pre", *(f"layers.{i}" for i in range(6)), "post"]
    widths = (512, 384, 256, 640, 128, 192)
    assert [[graph.nodes[i].shape for i in cut.tensors] for cut in graph.cut_points[1:]] == [
        [(2, 16, width)] for width in widths
    ]
    assert [cut.num_bytes for cut in graph.cut_points[1:]] == [2 * 16 * width * 2 for width in widths]


@pytest.mark.parametrize("factory", ["", ":Wrapped"])
def test_a_u_net_sends_its_skips_along(factory: str, tmp_path: Path) -> None:
    graph = traced(U_NET.replace("return Net()", f"return {factory[1:] or 'Net'}()"), tmp_path)
    prefix = "net." if factory else ""
    alive = {cut.after.removeprefix(prefix): len(cut.tensors) for cut in graph.cut_points}
    assert alive["middle.2"] == 4  # the middle's output and three skips, one for each size
    assert alive["merge.1.2"] == 2
    assert "down" not in alive  # lists are not called, and pool runs between their entries
    total = graph.forward_flops
    assert all(sum(graph.nodes[i].flops for i in unit.nodes) <= COARSE_SHARE * total for unit in graph.units)


def test_residual_layers_that_all_differ_stay_whole(tmp_path: Path) -> None:
    """Inside a layer two tensors cross, behind it one."""
    graph = traced(RESIDUAL, tmp_path)
    assert graph.blocks == ()
    assert [name for name in pieces_of(graph) if name != "head"] == [f"layers.{i}" for i in range(8)]
    assert {len(cut.tensors) for cut in graph.cut_points} == {1}


def test_few_blocks_in_much_else(tmp_path: Path) -> None:
    graph = traced(MOSTLY_UNLIKE, tmp_path)
    assert [block.modules for block in graph.blocks] == [("layers.1.0", "layers.1.1")]
    assert {"layers.1.0", "layers.1.1"} < set(pieces_of(graph))
    kinds = {unit.name: unit.kind for unit in graph.units}
    assert kinds["layers.1.0"] == kinds["layers.1.1"]


def test_what_has_no_weights_is_no_unit(tmp_path: Path) -> None:
    code = (
        HEAD
        + "def build_model():\n"
        + "    return nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(6)))\n"
        + "def example_inputs(batch_size, seq_len):\n    return (torch.zeros(batch_size, 8),)\n"
        + "def loss_fn(output, batch):\n    return output.float().mean()\n"
    )
    graph = traced(code, tmp_path)
    assert [unit.name for unit in graph.units] == [str(i) for i in range(6)]
    assert [block.count for block in graph.blocks] == [1, 5]  # the first gives no gradient to the model's input


@pytest.mark.parametrize("name", ["gpt-tiny", "llama-tiny", "moe-tiny"])
def test_cut_points_say_what_the_units_say(name: str) -> None:
    graph = graph_of(name)
    assert [cut.after for cut in graph.cut_points] == [unit.name for unit in graph.units[:-1]]
    for unit, cut in zip(graph.units, graph.cut_points, strict=False):
        assert (cut.node, cut.tensors) == (unit.nodes[-1], unit.boundary)
        nodes = [graph.nodes[i] for i in cut.tensors]
        assert cut.num_bytes == sum(prod(n.shape) * ITEM_BYTES[n.dtype] for n in nodes)
    assert all(a.node < b.node for a, b in pairwise(graph.cut_points))
