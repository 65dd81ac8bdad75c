"""A forward pass that changes buffers is told of when planning, where running would refuse it."""

from pathlib import Path

import pytest
import torch

from costmodels.vocabulary.mesh import Mesh
from planner.axes.base import Executed
from planner.axes.registry import execution_warnings
from planner.errors import ModelError
from planner.executor.requirements import check_buffers
from planner.graph.tracer import trace_model
from planner.layout.layout import Pins
from planner.plan.schema import MeshSection
from tests.planning import A100, cluster_of, problem_of, training_of
from tests.unit.planner.executor.test_requirements import plan_of
from tests.unit.planner.graph.traced import loaded_from_code

MODEL = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(64, 32), nn.Linear(32, 64)
        self.norm = {norm}
        self.register_buffer("average", torch.zeros(()))

    def forward(self, tokens):
        x = self.embedding(tokens)
        {changes}
        return self.head(self.norm(x.transpose(1, 2)).transpose(1, 2))

def build_model():
    return Net()
"""
KINDS = {
    "batch norm": ("nn.BatchNorm1d(32)", "pass", "norm"),
    "batch norm that keeps nothing": ("nn.BatchNorm1d(32, track_running_stats=False)", "pass", ""),
    "group norm": ("nn.GroupNorm(4, 32)", "pass", ""),
    "a mean": ("nn.Identity()", "self.average.mul_(0.9).add_(x.detach().mean())", "the model"),
    "an activation": ("nn.Identity()", "x = x.mul(2).relu_().add_(self.average)", ""),
}


@pytest.mark.parametrize("kind", KINDS)
def test_told_where_running_refuses(kind: str, tmp_path: Path) -> None:
    norm, changes, module = KINDS[kind]
    model = loaded_from_code(MODEL.format(norm=norm, changes=changes), tmp_path)
    graph, training = trace_model(model, 2, 16), training_of(8, 16)
    layout = problem_of("gpt-tiny", 4, batch=8, seq_len=16, pins=Pins(dp=4, zero=0)).space.layouts[0]
    said = execution_warnings(Executed(layout, graph, cluster_of(A100, 4)), training)
    assert [f"changes buffers in {module}, and each rank would keep its own" in text for text in said] == [True] * (
        module != ""
    )
    assert all("with dp=4:" in text and "pin --pp 4" in text for text in said)
    ids = {"tokens": torch.zeros(2, 16, dtype=torch.int64)}
    try:
        check_buffers(model.build(), ids, plan_of(MeshSection(dp_replicate=4)))
    except ModelError:
        assert module
    else:
        assert not module
    for number in (1, 8):  # one rank changes them, but a micro-batch at a time
        alone = layout._replace(mesh=Mesh(pp=4), num_microbatches=number)
        said = execution_warnings(Executed(alone, graph, cluster_of(A100, 4)), training)
        assert [f"changes buffers in {module} once for each of 8 micro-batches" in text for text in said] == [True] * (
            module != "" and number == 8
        )
