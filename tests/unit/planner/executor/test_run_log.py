"""Where a run cannot write what it says, it is told before it begins."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch

from planner.errors import InputError
from planner.executor.options import RunOptions
from planner.executor.run_log import LogOptions, RunLog, StepReport
from planner.plan.plan_file import read_plan
from tests.fake_world import fake_world


def test_a_log_needs_its_folder(tmp_path: Path) -> None:
    LogOptions(tmp_path / "log.jsonl").check()
    with pytest.raises(InputError, match="is no folder"):
        LogOptions(tmp_path / "nowhere" / "log.jsonl").check()
    with pytest.raises(InputError, match="it is a folder"):  # the run went on to its end without a log
        LogOptions(tmp_path).check()


def test_traces_need_a_folder(tmp_path: Path) -> None:
    """The run ended in its step with a FileExistsError."""
    (tmp_path / "file").touch()
    for free in (tmp_path, tmp_path / "new"):
        RunOptions(profile=(1, free)).check_profile()
    with pytest.raises(InputError, match="it is no folder"):
        RunOptions(profile=(1, tmp_path / "file")).check_profile()


@pytest.mark.skipif(importlib.util.find_spec("tensorboard") is not None, reason="TensorBoard is installed")
def test_tensorboard_is_asked_for_by_name(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="tensorboard") as caught:
        LogOptions(board=tmp_path / "board").check()
    assert "pip install 'planner[tensorboard]'" in caught.value.hint


def test_nothing_is_wanted_unless_it_is_named(tmp_path: Path) -> None:
    assert [LogOptions().is_wanted, LogOptions(tmp_path).is_wanted, LogOptions(board=tmp_path).is_wanted] == [
        False, True, True,
    ]  # fmt: skip


def test_training_goes_on_where_the_log_cannot_be_written(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A full disk under the log ended the run, and with it what was being saved elsewhere."""
    plan, device = read_plan(Path("examples/plans/gpt-tiny-pp2-dp2.json")), torch.device("cpu")
    with fake_world(4):
        log = RunLog(LogOptions(tmp_path / "gone" / "log.jsonl"), plan, device, 0)
        for number in (1, 2):
            log.write(StepReport(number, 1.0, 1.0, 1.0, 0.1))
        log.close()
    assert capfd.readouterr().err.count("cannot be written any more") == 1
