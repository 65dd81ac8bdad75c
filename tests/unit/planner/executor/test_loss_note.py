"""Whoever plans is told of a loss that `planner run` cannot compute in parts."""

import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import planner
from planner.api import find_plan
from planner.executor.loss_note import loss_note
from planner.layout.layout import Pins
from planner.request import Request

CODE = """
import torch
from torch import nn

print("talk")

def build_model():
    return nn.Sequential(nn.Embedding(256, 32), nn.Linear(32, 64))

def loss_fn(output, batch):
    one, other = output.mean(1).chunk(2, -1)
"""
CONTRASTIVE = "    return nn.functional.cross_entropy(one @ other.T, torch.arange(len(one)))"
MEAN = "    return (one - other).square().mean()"


@pytest.mark.usefixtures("started_by_fork")
@pytest.mark.parametrize(
    ("line", "pins", "is_told"),
    [
        (CONTRASTIVE, Pins(dp=2), True),
        (CONTRASTIVE, Pins(pp=1, micro_batch=2), True),
        (CONTRASTIVE, Pins(dp=1, pp=1, micro_batch=8), False),  # in one part
        (MEAN, Pins(dp=2), False),
    ],
)
def test_a_loss_that_cannot_be_computed_in_parts_is_told(line: str, pins: Pins, is_told: bool, tmp_path: Path) -> None:
    """Nobody was told before the plan was run, or checked."""
    file = tmp_path / "model.py"
    file.write_text(CODE + line)
    num_devices = 2 if pins.dp == 2 else 1
    plan = find_plan(Request(str(file), num_devices, "cpu-gloo", seq_len=16, global_batch_size=8, pins=pins)).plan
    note = loss_note(plan)
    assert (note is not None) == is_told
    if note is not None:
        parts = plan.mesh.shape().dp * plan.pipeline.num_microbatches
        assert f"planner run refuses this plan: a step computes the loss in {parts} parts" in note
        assert "--dp 1 --cp 1 --pp 1 --micro-batch 8" in note


def test_a_loss_that_nobody_had_time_for_is_told(tmp_path: Path) -> None:
    """A short --time-limit cut the look off, which read as if the loss were fine."""
    file = tmp_path / "model.py"
    file.write_text(CODE + MEAN)
    request = Request(str(file), 2, "cpu-gloo", seq_len=16, global_batch_size=8, pins=Pins(dp=2, micro_batch=4))
    plan = find_plan(request).plan
    note = loss_note(plan, 0.0)
    assert note is not None
    assert "can be computed in 2 parts was not found out in the 0.0 s that were left" in note
    assert loss_note(plan, math.inf) is None


@pytest.mark.parametrize(("dp", "is_told"), [(2, True), (1, False)])
def test_a_module_that_is_held_is_told_too(dp: int, is_told: bool) -> None:
    """In Python nobody was told before planner.parallelize refused the plan."""

    def contrastive(output: object, batch: object) -> torch.Tensor:
        assert isinstance(output, torch.Tensor)
        one, other = output.mean(1).chunk(2, -1)
        return nn.functional.cross_entropy(one @ other.T, torch.arange(len(one)))

    def mean(output: object, batch: object) -> torch.Tensor:
        assert isinstance(output, torch.Tensor)
        return output.square().mean()

    module = nn.Sequential(nn.Embedding(256, 32), nn.Linear(32, 64))
    options: dict[str, Any] = {"seq_len": 16, "global_batch_size": 8, "dp": dp, "pp": 1, "micro_batch": 8 // dp}
    plan = planner.search(module, dp, hardware="cpu-gloo", loss_fn=contrastive, **options)
    told = [each for each in plan.warnings if "planner.parallelize refuses this plan: a step computes" in each]
    assert len(told) == is_told
    assert all("in 2 parts" in each and "pin dp=1, cp=1, pp=1, micro_batch=8" in each for each in told)
    assert not planner.search(module, dp, hardware="cpu-gloo", loss_fn=mean, **options).warnings


def test_whoever_searches_for_a_file_in_python_is_told(tmp_path: Path) -> None:
    """Only the command said it. The script is a plain one, which asks for no ``__main__``: nothing runs it twice."""
    (tmp_path / "model.py").write_text(CODE + CONTRASTIVE)
    script = tmp_path / "script.py"
    script.write_text(
        "import planner\nprint('begun')\n"
        "options = dict(hardware='cpu-gloo', seq_len=16, global_batch_size=8, dp=2)\n"
        "print(*planner.search('model.py', 2, **options).warnings)\n"
    )
    done = subprocess.run([sys.executable, str(script)], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout.startswith("begun\nplanner run refuses this plan: a step computes the loss in 2 parts")
    assert done.stdout.count("\n") == 2
    assert "talk" in done.stderr  # what the file prints
    assert "Traceback" not in done.stderr
