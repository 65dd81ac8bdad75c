"""Where a run cannot write what it says, it is told before it begins."""

from __future__ import annotations

import importlib.util
import json
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


def test_a_run_that_goes_on_has_each_step_once(tmp_path: Path) -> None:
    """What a run wrote behind its last checkpoint stood there twice, and a line that it tore broke the next."""
    plan, device, file = read_plan(Path("examples/plans/gpt-tiny-pp2-dp2.json")), torch.device("cpu"), tmp_path / "log"

    def run(first: int, last: int) -> None:
        log = RunLog(LogOptions(file), plan, device, first)
        for number in range(first + 1, last + 1):
            log.write(StepReport(number, 1.0 + first, 1.0, 1.0, 0.1))
        log.close()

    def steps() -> list[tuple[int, float]]:
        return [(line["step"], line["loss"]) for line in map(json.loads, file.read_text().splitlines())]

    with fake_world(4):
        run(0, 3)  # another run's, which stays
        run(0, 4)
        with file.open("a") as torn:
            torn.write('{"step": 5, "lo')
        run(2, 5)
        assert steps() == [(s, 1.0) for s in (1, 2, 3, 1, 2)] + [(s, 3.0) for s in (3, 4, 5)]
        run(5, 6)
        assert steps()[-2:] == [(5, 3.0), (6, 6.0)]
    with fake_world(4, rank=1):
        run(0, 1)
        assert steps()[-1] == (6, 6.0)


def test_training_goes_on_where_the_log_cannot_be_written(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A full disk under the log ended the run, and with it what was being saved elsewhere."""
    plan, device = read_plan(Path("examples/plans/gpt-tiny-pp2-dp2.json")), torch.device("cpu")
    with fake_world(4):
        log = RunLog(LogOptions(tmp_path / "gone" / "log.jsonl"), plan, device, 0)
        for number in (1, 2):
            log.write(StepReport(number, 1.0, 1.0, 1.0, 0.1))
        log.close()
    assert capfd.readouterr().err.count("cannot be written any more") == 1
