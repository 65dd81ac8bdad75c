"""Whoever has sizes that tensor cores do not take well is told which, and what would do."""

from pathlib import Path

import pytest

from costmodels.vocabulary.choices import Precision
from planner.api import Question
from planner.graph.alignment import alignment_warnings
from planner.request import Request, load_graph
from tests.unit.planner.graph.grouped_model import model_of_experts

pytestmark = pytest.mark.usefixtures("traced_here")

SOURCE = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding({vocab}, {width})
        self.qkv = nn.Linear({width}, 3 * {width})
        self.out = nn.Linear({width}, {vocab})

    def forward(self, input_ids):
        x = self.embed(input_ids)
        q, k, v = (each.unflatten(-1, ({heads}, -1)).transpose(1, 2) for each in self.qkv(x).chunk(3, -1))
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(2))

def build_model():
    return Net()
"""


def model(folder: Path, **sizes: int) -> str:
    path = folder / "model.py"
    path.write_text(SOURCE.format(**sizes))
    return str(path)


def test_each_size_is_told_once_with_what_would_do(tmp_path: Path) -> None:
    graph = load_graph(model(tmp_path, vocab=1001, width=72, heads=6), 64, Precision.BF16)  # heads of 12
    heads, weights = alignment_warnings(graph)
    assert "heads are 12 wide" in heads
    assert "16 would be quicker" in heads
    assert weights.startswith("out.weight: a side of 1001 is no multiple of 8")  # the embedding is not multiplied
    assert weights.endswith("priced so; pad it to 1008")
    assert alignment_warnings(graph, are_products_priced=False) == (heads,)


def test_sizes_that_tensor_cores_take_are_not_talked_of(tmp_path: Path) -> None:
    assert alignment_warnings(load_graph(model(tmp_path, vocab=1000, width=64, heads=4), 64, Precision.BF16)) == ()


def test_a_number_of_experts_is_no_side_of_a_product(tmp_path: Path) -> None:
    """12 experts were called a side that is no multiple of 8, to be padded to 16."""
    assert alignment_warnings(load_graph(model_of_experts(tmp_path, 12), 64, Precision.BF16)) == ()


@pytest.fixture(scope="module")
def odd(tmp_path_factory: pytest.TempPathFactory) -> str:
    return model(tmp_path_factory.mktemp("odd"), vocab=1001, width=64, heads=4)


@pytest.mark.parametrize(
    ("hardware", "precision", "is_told"),
    [
        ("dgx-a100-80gb", Precision.BF16, True),
        ("dgx-a100-80gb", Precision.FP32, False),
        ("cpu-gloo", Precision.BF16, False),
    ],
)
def test_it_is_told_where_tensor_cores_would_be_used(
    odd: str, hardware: str, precision: Precision, is_told: bool
) -> None:
    request = Request(odd, 2, hardware, seq_len=64, precision=precision)
    assert any("a side of 1001" in note for note in Question.of(request).notes) == is_told


def test_it_is_not_told_where_the_framework_pads(odd: str) -> None:
    for name, is_told in (("fsdp", True), ("megatron-core", False)):
        request = Request(odd, 2, "dgx-a100-80gb", seq_len=64, framework=name)
        assert any("a side of 1001" in note for note in Question.of(request).notes) == is_told
