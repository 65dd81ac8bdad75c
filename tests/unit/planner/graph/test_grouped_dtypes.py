"""A model of one's own with grouped products is traced in every dtype in which torch computes them."""

from pathlib import Path

import pytest
import torch

from costmodels.vocabulary.choices import Precision
from planner.graph.experts import expert_counts
from planner.models.grouped_shapes import know_grouped_shapes
from planner.request import load_graph

pytestmark = pytest.mark.usefixtures("traced_here")

SOURCE = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(256, 64)
        self.up = nn.Parameter(torch.empty(4, 64, 96))
        self.down = nn.Parameter(torch.empty(4, 96, 64))
        self.head = nn.Linear(64, 256)

    def forward(self, input_ids):
        rows = self.embed(input_ids).flatten(0, 1)
        ends = (torch.arange(4, device=rows.device) + 1).to(torch.int32)
        inner = nn.functional.grouped_mm(rows, self.up, offs=ends)
        rows = rows + nn.functional.grouped_mm(inner, self.down, offs=ends)
        return self.head(rows).view(*input_ids.shape, 256)

def build_model():
    return Net()
"""


def test_the_graph_is_the_same_in_every_dtype(tmp_path: Path) -> None:
    """In float32 and float16 it could not be traced: "Expected inputs of BF16 type"."""
    path = tmp_path / "model.py"
    path.write_text(SOURCE)
    graphs = [load_graph(str(path), 64, each) for each in (Precision.BF16, Precision.FP32, Precision.FP16)]
    assert {expert_counts(graph) for graph in graphs} == {(4,)}
    assert {graph.tier for graph in graphs} == {"export"}
    assert len({(graph.forward_flops, graph.backward_flops) for graph in graphs}) == 1


def test_what_torch_refuses_with_values_is_refused_without() -> None:
    know_grouped_shapes()
    ends = torch.zeros(4, dtype=torch.int32, device="meta")
    rows, weights = torch.empty(16, 32, device="meta"), torch.empty(4, 32, 64, dtype=torch.bfloat16, device="meta")
    with pytest.raises(RuntimeError, match="BF16"):
        torch.nn.functional.grouped_mm(rows, weights, offs=ends)
