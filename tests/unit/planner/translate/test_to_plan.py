"""Names in a plan: a pattern matches the blocks that it stands for and nothing beside them."""

from pathlib import Path

import pytest

from hardware_profiles.catalog import profile_for
from planner.api import find_plan
from planner.layout.layout import Pins
from planner.plan.schema import PredictionSection
from planner.request import Request
from planner.translate import to_plan

# Two equal layers that are neighbours of the embedding and the head: `*` would match all four.
MODEL = """
from torch import nn
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(256, 512)
        self.first = nn.Linear(512, 512)
        self.second = nn.Linear(512, 512)
        self.head = nn.Linear(512, 256)
    def forward(self, input_ids):
        return self.head(self.second(self.first(self.embedding(input_ids)).relu()).relu())
def build_model():
    return Net()
"""
TWO_WAYS = Pins(tp=2, pp=1, cp=1, dp=1)


def modules_in_plan(model: str) -> list[str]:
    request = Request(model, 2, "dgx-a100-80gb", seq_len=64, global_batch_size=2, pins=TWO_WAYS)
    return [entry.module for entry in find_plan(request).plan.placements.tp]


def test_blocks_beside_other_modules_keep_their_names(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text(MODEL)
    modules = modules_in_plan(str(tmp_path / "model.py"))
    assert {"first", "second"} <= set(modules)
    assert not [module for module in modules if "*" in module]


def test_blocks_of_one_kind_in_a_list_share_a_pattern() -> None:
    modules = modules_in_plan("llama-tiny")
    assert [module for module in modules if "layers" in module]
    assert all(module.startswith("layers.*.") for module in modules if "layers" in module)


def test_host_memory_of_the_start_is_the_largest_parameter_of_each_process() -> None:
    """llama3-8b's is its embedding, 128,256 x 4,096. Context parallelism, too, tries the model in as much."""
    for cp in (1, 2):
        request = Request("llama3-8b", 16, "dgx-h100-80gb", global_batch_size=32, pins=Pins(cp=cp, tp=8))
        prediction = find_plan(request).plan.prediction
        assert prediction is not None
        assert prediction.host_memory_bytes == {"initial_values": 128256 * 4096 * 4 * 8}


@pytest.mark.parametrize(("model", "num_params", "is_warned"), [("8B", 8 * 10**9, False), ("70B", 706 * 10**8, True)])
def test_host_memory_that_no_node_has_is_said(model: str, num_params: int, is_warned: bool) -> None:
    """Eight processes with 4 bytes a parameter: 0.26 and 2.26 TB, of the 2 TB of a DGX H100."""
    prediction = PredictionSection(
        step_time_s=1.0, tokens_per_s_per_gpu=1.0, model_flops_per_gpu_per_s=1.0, mfu=0.5, peak_memory_bytes=(1,),
        memory_capacity_bytes=1, breakdown_s={}, host_memory_bytes={"initial_values": num_params * 4 * 8},
    )  # fmt: skip
    found = to_plan.host_warnings(prediction, profile_for(64, "dgx-h100-80gb"))
    assert len(found) == is_warned, model
    assert all("2,104 GiB, and a node of dgx-h100-80gb has 1,863 GiB" in text for text in found)
