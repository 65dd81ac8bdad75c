"""What one process makes of a step, which every plan is held against: its own gradients, or why there are none."""

from pathlib import Path

import pytest
import torch

from costmodels.vocabulary.choices import Precision
from planner.api import find_plan
from planner.errors import ModelError, PlannerError
from planner.executor.build import build_model, example_batch
from planner.executor.data import TokenData
from planner.executor.parity import LEARNING_RATE, State, _one_process, _reference
from planner.layout.layout import Pins
from planner.request import Request
from tests.unit.planner.graph.traced import loaded_from_code

Update = dict[str, dict[str, object]]

CODE = """
import torch
from torch import nn

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(256, 16), nn.Linear(16, 256)
    def forward(self, input_ids):
        x = self.embedding(input_ids)
        {line}
        return self.head(x)

def build_model():
    return Model()
"""

pytestmark = pytest.mark.usefixtures("traced_here")
OWN_LOSS = """
import torch
from torch import nn

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(256, 16), nn.Linear(16, 256)
    def forward(self, input_ids, labels=None):
        logits = self.head(self.embedding(input_ids))
        loss = None
        if labels is not None:
            loss = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return {"loss": loss, "logits": logits}

build_model = Model

def example_inputs(batch_size, seq_len):
    ids = torch.zeros(batch_size, seq_len, dtype=torch.int64)
    return {"labels": ids, "input_ids": ids}

def loss_fn(output, batch):
    return output["loss"]
"""


def test_labels_go_to_a_forward_that_takes_them(tmp_path: Path) -> None:
    """They are traced there. What ran the model left them out: loss_fn was given None."""
    loaded = loaded_from_code(OWN_LOSS, tmp_path)
    plan = find_plan(Request(str(tmp_path / "model.py"), 1, "cpu-gloo", seq_len=8, global_batch_size=2)).plan
    module = build_model(loaded, 0)
    batch = example_batch(loaded, plan, module)
    assert {"input_ids", "labels"} == set(batch)
    data = TokenData(torch.arange(200, dtype=torch.uint8), 8, 0)
    tokens, labels = data.global_batch(0, 2)
    expected = module(tokens, labels)["loss"]
    expected.backward()
    loss, gradients, _ = _one_process(build_model(loaded, 0).eval(), loaded, plan, data)
    assert loss == pytest.approx(float(expected.detach()))
    torch.testing.assert_close(gradients["head.weight"], module.get_parameter("head.weight").grad)


BATCH_NORM = "self.norm = nn.BatchNorm1d(16)", "x = self.norm(x.transpose(1, 2)).transpose(1, 2)"
HOOK = "self.norm = nn.LayerNorm(16); self.norm.weight.register_hook(lambda g: 2 * g)", "x = self.norm(x)"


@pytest.mark.parametrize(
    ("made", "line", "update", "says"),
    [
        (*BATCH_NORM, {"mesh": {"pp": 1, "tp": 1, "dp_replicate": 2, "dp_shard": 1}}, "changes its buffers"),
        (*HOOK, {"training": {"precision": Precision.BF16}}, "hooks on the gradients"),
    ],
)
def test_what_a_run_refuses_has_no_parity(made: str, line: str, update: Update, says: str, tmp_path: Path) -> None:
    """Both are well in evaluation mode and float32, in which the step is compared: parity said that all was equal."""
    code = CODE.format(line=line).replace("        self.embedding,", f"        {made}\n        self.embedding,")
    loaded = loaded_from_code(code, tmp_path)
    pins = Pins(zero=0)
    request = Request(str(tmp_path / "model.py"), 1, "cpu-gloo", 8, 2, Precision.FP32, pins=pins)
    plan = find_plan(request).plan
    assert not _reference(loaded, 0, plan).training
    changed = {key: getattr(plan, key).model_copy(update=fields) for key, fields in update.items()}
    with pytest.raises(PlannerError, match=says):
        _reference(loaded, 0, plan.model_copy(update=changed))


IMAGES = """
import torch
from torch import nn

def build_model():
    return nn.Sequential(nn.Flatten(), nn.Linear(12, 4))

def example_inputs(batch_size, seq_len):
    return {"input": torch.zeros(batch_size, 3, 4), "labels": torch.zeros(batch_size, dtype=torch.int64)}
"""


def test_a_model_of_images_is_sent_where_it_can_be_trained(tmp_path: Path) -> None:
    """It was told to give defaults to its other inputs, and has none."""
    loaded = loaded_from_code(IMAGES, tmp_path)
    plan = find_plan(Request(str(tmp_path / "model.py"), 1, "cpu-gloo", global_batch_size=2)).plan
    with pytest.raises(ModelError, match="takes input: only models whose one input is token ids") as error:
        example_batch(loaded, plan, build_model(loaded, 0))
    assert "planner.parallelize" in error.value.hint
    assert "defaults" not in error.value.hint


def one_process(line: str, folder: Path) -> tuple[float, State, State]:
    loaded = loaded_from_code(CODE.format(line=line), folder)
    plan = find_plan(Request(str(folder / "model.py"), 1, "cpu-gloo", seq_len=8, global_batch_size=2)).plan
    data = TokenData(torch.arange(200, dtype=torch.uint8), 8, 0)
    return _one_process(build_model(loaded, 0).eval(), loaded, plan, data)


def test_parameters_move_against_their_gradients(tmp_path: Path) -> None:
    loss, gradients, parameters = one_process("x = nn.functional.dropout(x, 0.5, self.training)", tmp_path)
    before = build_model(loaded_from_code(CODE.format(line=""), tmp_path), 0).state_dict()
    assert 0 < loss < 10
    assert all(bool(gradient.any()) for gradient in gradients.values())
    for fqn, value in parameters.items():
        torch.testing.assert_close(value, before[fqn] - LEARNING_RATE * gradients[fqn])


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("x = x + torch.randn_like(x)", "draws random numbers in evaluation mode too"),  # all gradients were "wrong"
        ("x = x.view(7, 7)", "does not train in one process: RuntimeError: shape '.7, 7.' is invalid"),
    ],
)
def test_a_model_without_two_equal_steps_is_refused(tmp_path: Path, line: str, says: str) -> None:
    with pytest.raises(ModelError, match=says):
        one_process(f"if not torch.compiler.is_exporting():\n            {line}", tmp_path)
