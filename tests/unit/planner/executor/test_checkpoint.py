"""Saves that fail, and folders in which nothing is whole: on one rank, which needs no other process."""

from __future__ import annotations

import resource
import shutil
import time
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from costmodels.vocabulary.choices import Optimizer, Precision
from costmodels.vocabulary.schedules import ScheduleName
from planner.errors import DivergedError, InputError, ModelError, PlannerError
from planner.executor.checkpoint import Checkpointer, check_kept
from planner.executor.checkpoint_storage import ManifestWriter
from planner.executor.mesh import build_mesh
from planner.executor.optimizer import build_optimizer
from planner.executor.parallelize import ParallelModel, parallelize
from planner.executor.ranks import quiet_torch
from planner.executor.train import written_before_diverging
from planner.models.loss import NEXT_TOKEN
from planner.plan.manifest import Progress, read_manifest
from planner.plan.schema import (
    MeshSection,
    ModelSection,
    PipelineSection,
    PlacementSection,
    Plan,
    StageSection,
    TrainingSection,
)

Started = tuple[ParallelModel, torch.optim.Optimizer]
PLAN = Plan(
    model=ModelSection(source="toy", digest="", num_params=0),
    hardware="cpu-gloo",
    num_devices=1,
    training=TrainingSection(
        global_batch_size=1, seq_len=4, precision=Precision.FP32, optimizer=Optimizer.ADAMW
    ),
    mesh=MeshSection(),
    zero_stage=1,
    pipeline=PipelineSection(
        schedule=ScheduleName.ONE_F_ONE_B,
        num_microbatches=1,
        micro_batch_size=1,
        stages=(StageSection(index=0, pp_rank=0, modules=("0", "1")),),
    ),
    placements=PlacementSection(sharded_units=("0", "1")),
)  # fmt: skip


@pytest.fixture(scope="module")
def started() -> Generator[Started]:
    with quiet_torch():
        dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
        try:
            module = torch.nn.Sequential(torch.nn.Embedding(8, 4), torch.nn.Linear(4, 8))
            inputs = {"input": torch.zeros(1, 4, dtype=torch.int64)}
            model = parallelize(module, inputs, NEXT_TOKEN, PLAN, build_mesh(PLAN, "cpu"))
            yield model, build_optimizer(model.parameters(), Optimizer.ADAMW, None)
        finally:
            dist.destroy_process_group()


def progress(step: int) -> Progress:
    return Progress(step=step, sequences=step, seed=0, seq_len=4, optimizer=Optimizer.ADAMW, layout="")


def save(checkpointer: Checkpointer, started: Started, *steps: int) -> None:
    for step in steps:
        checkpointer.save(*started, progress(step))


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name != ".lock")


def test_a_save_does_not_see_what_is_trained_meanwhile(started: Started, tmp_path: Path) -> None:
    model, optimizer = started
    parameter = model.parameters()[0].detach()
    before = parameter.clone()
    checkpointer = Checkpointer(tmp_path, keep=2)
    save(checkpointer, started, 1)
    parameter.add_(1.0)
    checkpointer.close()
    found = checkpointer.find()
    assert found is not None
    checkpointer.load(found, model, optimizer, Optimizer.ADAMW)
    assert torch.equal(model.parameters()[0].detach(), before)


def test_the_newest_stay_and_what_was_interrupted_goes(started: Started, tmp_path: Path) -> None:
    (tmp_path / ".step-9.partial").mkdir()
    checkpointer = Checkpointer(tmp_path, keep=2)
    save(checkpointer, started, 2, 9, 10)
    checkpointer.close()
    assert names(tmp_path) == ["step-10", "step-9"]


def test_a_save_that_fails_is_told_and_tried_again(
    started: Started, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpointer = Checkpointer(tmp_path, keep=2)
    save(checkpointer, started, 1)
    (tmp_path / ".step-2.partial").write_text("in the way")
    save(checkpointer, started, 2, 3)
    checkpointer.close()
    assert "warning: checkpoint step-2 was not written: rank 0: NotADirectoryError" in capsys.readouterr().err
    assert names(tmp_path) == [".step-2.partial", "step-1", "step-3"]
    (tmp_path / ".step-4.partial").write_text("in the way")
    save(checkpointer, started, 4)
    with pytest.raises(PlannerError, match="step-4 was not written") as failed:
        checkpointer.close()
    assert "step-3 is still there" in str(failed.value.hint)


def test_where_the_first_save_fails_nothing_is_said_to_be_there(started: Started, tmp_path: Path) -> None:
    checkpointer = Checkpointer(tmp_path, keep=2)
    (tmp_path / ".step-1.partial").write_text("in the way")
    save(checkpointer, started, 1)
    with pytest.raises(PlannerError) as failed:
        checkpointer.close()
    assert "there is none from before" in str(failed.value.hint)


def test_a_save_that_found_no_room_leaves_it_to_the_next(started: Started, tmp_path: Path) -> None:
    checkpointer, limits = Checkpointer(tmp_path, keep=2), resource.getrlimit(resource.RLIMIT_FSIZE)
    save(checkpointer, started, 1)
    checkpointer.close()
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))  # as a full disk: a file begins, and cannot end
    try:
        save(checkpointer, started, 2)
        with pytest.raises(PlannerError, match="step-2 was not written"):
            checkpointer.close()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert names(tmp_path) == ["step-1"]


def test_a_folder_that_cannot_be_written_is_found_before_the_first_step(started: Started, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="no checkpoint can be written to .*file: (File exists|Not a directory)"):
        Checkpointer(tmp_path / "file", keep=2)


def test_a_folder_is_one_runs_at_a_time(started: Started, tmp_path: Path) -> None:
    """Two runs each pruned what the other had saved, and went on from each other's steps."""
    checkpointer = Checkpointer(tmp_path, keep=2)
    with pytest.raises(InputError, match="no checkpoint can be written to .*: another run writes to it"):
        Checkpointer(tmp_path, keep=2)
    save(checkpointer, started, 1)
    checkpointer.close()
    assert Checkpointer(tmp_path, keep=2).find() is not None


def test_nothing_whole_is_an_error_not_a_new_beginning(started: Started, tmp_path: Path) -> None:
    checkpointer = Checkpointer(tmp_path, keep=3)
    save(checkpointer, started, 1, 2)
    checkpointer.close()
    for step in (1, 2):
        (tmp_path / f"step-{step}" / "rank-0.bin").unlink()
    with pytest.raises(InputError, match=r"no checkpoint in .* is whole; it holds step-2, step-1"):
        checkpointer.find()
    assert names(tmp_path) == ["step-1.damaged", "step-2.damaged"]


def test_a_pickled_checkpoint_of_torch_is_not_opened(started: Started, tmp_path: Path) -> None:
    (tmp_path / "step-7").mkdir()
    (tmp_path / "step-7" / ".metadata").write_bytes(b"cos\nsystem\n(S'touch /tmp/no'\ntR.")
    with pytest.raises(InputError, match="no checkpoint in"):
        Checkpointer(tmp_path, keep=3).find()


def test_another_optimiser_is_refused(started: Started, tmp_path: Path) -> None:
    checkpointer = Checkpointer(tmp_path, keep=3)
    save(checkpointer, started, 1)
    checkpointer.close()
    found = checkpointer.find()
    assert found is not None
    with pytest.raises(InputError, match="is of adamw, the plan trains with sgd"):
        checkpointer.load(found, *started, Optimizer.SGD)


def test_two_saves_of_one_state_are_alike(started: Started, tmp_path: Path) -> None:
    for name in ("one", "other"):
        checkpointer = Checkpointer(tmp_path / name, keep=1)
        save(checkpointer, started, 1)
        checkpointer.close()
    one, other = (read_manifest(tmp_path / name / "step-1") for name in ("one", "other"))
    assert one == other
    shutil.rmtree(tmp_path / "one")


def test_tensors_of_any_kind_come_back(started: Started, tmp_path: Path) -> None:
    model, optimizer = started
    kinds = {"angle": torch.tensor([1j, 2 - 1j]).conj(), "map": torch.tensor([3, 65535], dtype=torch.uint16)}
    for name, value in kinds.items():
        model.roots[0].register_buffer(name, value.clone())
    checkpointer = Checkpointer(tmp_path, keep=1)
    save(checkpointer, started, 1)
    checkpointer.close()
    buffers = {name: model.roots[0].get_buffer(name) for name in kinds}
    for buffer in buffers.values():
        buffer.zero_()
    found = checkpointer.find()
    assert found is not None
    checkpointer.load(found, model, optimizer, Optimizer.ADAMW)
    for name, value in kinds.items():
        assert torch.equal(buffers[name], value)
        del model.roots[0]._buffers[name]


def test_what_is_being_written_is_kept_where_training_diverges(
    started: Started, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run ended first: all steps since the checkpoint before were lost."""
    finish = ManifestWriter.finish

    def slowly(self: ManifestWriter, **given: Any) -> None:
        time.sleep(0.3)
        finish(self, **given)

    monkeypatch.setattr(ManifestWriter, "finish", slowly)
    checkpointer = Checkpointer(tmp_path, keep=1)
    save(checkpointer, started, 1)
    assert names(tmp_path) != ["step-1"]
    with pytest.raises(DivergedError), written_before_diverging(checkpointer):
        raise DivergedError("the loss is nan")
    assert names(tmp_path) == ["step-1"]
    checkpointer.close()


class Counting(torch.nn.Linear):
    def get_extra_state(self) -> dict[str, int]:
        return {"calls": 1}


def test_what_is_no_tensor_is_refused_before_the_first_step(started: Started) -> None:
    """The first save ended the run with an error of Python's, and what was trained until then was lost."""
    model, _ = started
    check_kept(model)
    model.roots[0].add_module("counting", Counting(1, 1))
    with pytest.raises(ModelError, match="counting._extra_state"):
        check_kept(model)
    del model.roots[0]._modules["counting"]


def test_a_run_goes_on_with_parameters_that_were_frozen_since(
    started: Started, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It ended: the checkpoint had moments that the model did not have."""
    model, optimizer = started
    optimizer.state.clear()
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    checkpointer = Checkpointer(tmp_path, keep=1)
    save(checkpointer, started, 1)
    checkpointer.close()
    weight, *others = model.parameters()
    kept = optimizer.state[others[0]]["exp_avg"].clone()
    weight.requires_grad_(False)
    fresh = build_optimizer(model.parameters(), Optimizer.ADAMW, None)
    found = checkpointer.find()
    assert found is not None
    checkpointer.load(found, model, fresh, Optimizer.ADAMW)
    weight.requires_grad_(True)
    optimizer.zero_grad()
    assert weight not in fresh.state
    assert torch.equal(fresh.state[others[0]]["exp_avg"], kept)
    assert "kept of parameters that are frozen now is left behind: 0.weight\n" in capsys.readouterr().err
