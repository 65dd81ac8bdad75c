"""A model of one's own with grouped products is traced in every dtype in which torch computes them."""

from pathlib import Path

import pytest
import torch

from costmodels.vocabulary.choices import Precision
from planner.graph.experts import expert_counts
from planner.models.grouped_shapes import know_grouped_shapes
from planner.request import load_graph
from tests.unit.planner.graph.grouped_model import model_of_experts

pytestmark = pytest.mark.usefixtures("traced_here")


def test_the_graph_is_the_same_in_every_dtype(tmp_path: Path) -> None:
    """In float32 and float16 it could not be traced: "Expected inputs of BF16 type"."""
    path = model_of_experts(tmp_path, 4)
    graphs = [load_graph(path, 64, each) for each in (Precision.BF16, Precision.FP32, Precision.FP16)]
    assert {expert_counts(graph) for graph in graphs} == {(4,)}
    assert {graph.tier for graph in graphs} == {"export"}
    assert len({(graph.forward_flops, graph.backward_flops) for graph in graphs}) == 1


def test_what_torch_refuses_with_values_is_refused_without() -> None:
    know_grouped_shapes()
    ends = torch.zeros(4, dtype=torch.int32, device="meta")
    rows, weights = torch.empty(16, 32, device="meta"), torch.empty(4, 32, 64, dtype=torch.bfloat16, device="meta")
    with pytest.raises(RuntimeError, match="BF16"):
        torch.nn.functional.grouped_mm(rows, weights, offs=ends)
