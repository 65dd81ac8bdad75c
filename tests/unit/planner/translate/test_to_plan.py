"""Names in a plan: a pattern matches the blocks that it stands for and nothing beside them."""

from pathlib import Path

from planner.api import find_plan
from planner.layout.layout import Pins
from planner.request import Request

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
