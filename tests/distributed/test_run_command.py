"""``planner run`` starts the ranks, joins those that run, and tells one error once."""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Generator
from functools import partial
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from safetensors.torch import save_file

from tests.distributed.conftest import REPOSITORY

EXAMPLE = REPOSITORY / "examples" / "plans" / "gpt-tiny-pp2-dp2.json"
COMMAND = (sys.executable, "-c", "from planner.cli.main import main; main()", "run")
FAILING_MODEL = """
import os
from torch import nn

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(256, 8), nn.Linear(8, 256)
        self.calls = 0

    def forward(self, input_ids):
        self.calls += 1
        if os.environ.get("RANK") == "1" and self.calls > 4:
            raise ValueError("an error of one rank")
        return self.head(self.embedding(input_ids))

def build_model():
    return Model()
"""


NO_NUMBER_MODEL = """
from torch import nn

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(256, 8), nn.Linear(8, 256)
        self.calls = 0

    def forward(self, input_ids):
        self.calls += 1
        output = self.head(self.embedding(input_ids))
        return output * float("nan") if self.calls > 8 else output

def build_model():
    return Model()
"""
TWO_LAYER_MODEL = """
from torch import nn

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(256, 8), nn.Linear(8, 256)

    def forward(self, input_ids):
        return self.head(self.embedding(input_ids))

def build_model():
    return Model()
"""
FAILING_BLOCK_MODEL = """
import os
import torch
from torch import nn

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.mix = nn.Linear(8, 8)

    def forward(self, x):
        if not x.is_meta and os.environ.get("RANK") == "1":
            raise ValueError("an error inside a stage")
        return self.mix(x)

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.block, self.head = nn.Embedding(256, 8), Block(), nn.Linear(8, 256)

    def forward(self, input_ids):
        return self.head(self.block(self.embedding(input_ids)))

def build_model():
    return Model()
"""


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, *arguments],
        env={**os.environ, **environment},
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )


def two_rank_plan(folder: Path, model: str = FAILING_MODEL) -> Path:
    (folder / "failing.py").write_text(model)
    plan = json.loads(EXAMPLE.read_text())
    files = {"failing.py": hashlib.sha256(model.encode()).hexdigest()}
    plan["model"] |= {"source": "failing.py", "num_params": 0, "files": files}
    plan["num_devices"] = 2
    plan["mesh"] = {"dp_shard": 2}
    plan["pipeline"] |= {
        "num_microbatches": 4,
        "stages": [{"index": 0, "pp_rank": 0, "modules": ["embedding", "head"]}],
    }
    plan["placements"]["sharded_units"] = ["embedding", "head"]
    path = folder / "plan.json"
    path.write_text(json.dumps(plan))
    return path


def two_stage_plan(folder: Path, model: str) -> Path:
    path = two_rank_plan(folder, model)
    plan = json.loads(path.read_text())
    plan["mesh"], plan["zero_stage"] = {"pp": 2}, 0
    plan["pipeline"] |= {
        "schedule": "1F1B",
        "num_microbatches": 8,
        "stages": [
            {"index": 0, "pp_rank": 0, "modules": ["embedding"]},
            {"index": 1, "pp_rank": 1, "modules": ["block", "head"]},
        ],
    }
    path.write_text(json.dumps(plan))
    return path


@contextlib.contextmanager
def training(folder: Path, *arguments: str, plan: Path = EXAMPLE) -> Generator[tuple[subprocess.Popen[bytes], Path]]:
    """A run of ``plan`` that has finished its first step, and what it says; ended at the end."""
    talk = folder / "talk"
    with talk.open("w") as out:
        command = [*COMMAND, str(plan), "--steps", "100000", *arguments]
        # A shell's job in the background ignores Ctrl-C, and so does whatever it starts.
        hears = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
        process = subprocess.Popen(command, cwd=REPOSITORY, stdout=out, stderr=out, preexec_fn=hears)
    try:
        deadline_s = time.monotonic() + 900
        while "step" not in talk.read_text() and time.monotonic() < deadline_s:
            time.sleep(0.2)
        assert "step" in talk.read_text()
        yield process, talk
    finally:
        ranks = psutil.Process(process.pid).children(recursive=True) if psutil.pid_exists(process.pid) else []
        for rank in [*ranks, process]:
            with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError):
                rank.kill()
        process.wait(timeout=120)


def test_trains_and_prints_a_line_a_step() -> None:
    result = run(str(EXAMPLE), "--steps", "2", "--learning-rate", "0.001", "--seed", "3")
    assert result.returncode == 0, result.stderr
    lines = result.stdout.splitlines()
    assert [line.split()[:2] for line in lines] == [["step", "1"], ["step", "2"]]
    assert all("loss" in line and "tokens/s" in line for line in lines)
    assert "Warning" not in result.stderr


def test_failing_rank_ends_all_with_its_own_message(tmp_path: Path) -> None:
    result = run(str(two_rank_plan(tmp_path)), "--steps", "5")
    assert result.returncode == 1
    assert "rank 1 failed in step 2: ValueError: an error of one rank" in result.stderr
    assert result.stderr.count("error:") == 2  # that one, and the launcher's word that it stopped all
    assert "Traceback" not in result.stderr
    assert result.stdout.startswith("step    1")


def test_wrong_world_size_names_both_numbers() -> None:
    rank = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    result = run(str(EXAMPLE), **rank)
    assert result.returncode == 2
    assert "needs 4 ranks" in result.stderr
    assert "WORLD_SIZE is 1" in result.stderr


def test_nothing_listens_to_other_machines_and_interrupt_ends_all_ranks(tmp_path: Path) -> None:
    with training(tmp_path, plan=two_rank_plan(tmp_path, TWO_LAYER_MODEL)) as (process, talk):
        launcher = psutil.Process(process.pid)
        ranks = launcher.children(recursive=True)
        assert len(ranks) >= 2
        connections = [c for each in (launcher, *ranks) for c in each.net_connections("inet")]
        listening = [c.laddr.ip for c in connections if c.status == psutil.CONN_LISTEN]
        assert len(listening) >= 3  # the launcher's store, and each rank's own
        assert set(listening) <= {"127.0.0.1", "::1"}
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=240) == 130
        _, alive = psutil.wait_procs(ranks, timeout=120)
        assert alive == []
        assert "Traceback" not in talk.read_text()


def test_ranks_die_with_a_launcher_that_is_killed(tmp_path: Path) -> None:
    with training(tmp_path, plan=two_rank_plan(tmp_path, TWO_LAYER_MODEL)) as (process, _):
        ranks = psutil.Process(process.pid).children(recursive=True)
        assert len(ranks) >= 2
        process.kill()
        process.wait(timeout=120)
        _, alive = psutil.wait_procs(ranks, timeout=120)
        assert alive == []


@pytest.mark.quiet
def test_a_stopped_rank_is_named(tmp_path: Path) -> None:
    """Of plain FSDP, where all ranks wait for each other in the group that ``--timeout`` was given to."""
    plan = two_rank_plan(tmp_path, TWO_LAYER_MODEL)
    with training(tmp_path, "--timeout", "10", plan=plan) as (process, talk):
        ranks = psutil.Process(process.pid).children()
        stopped = next(rank for rank in ranks if rank.environ()["RANK"] == "1")
        stopped.suspend()
        assert process.wait(timeout=360) == 1
        words = talk.read_text()
    assert f"rank 1 (process {stopped.pid} on " in words
    assert "does not answer since 10 s" in words


def test_parameters_that_are_no_numbers_are_not_saved(tmp_path: Path) -> None:
    """Gradients of a finite loss may be infinite: the last step was saved, and the run ended well."""
    model = NO_NUMBER_MODEL.replace('output * float("nan") if self.calls > 8 else output', "Ruin.apply(output)")
    model = model.replace(
        "class Model(",
        "import torch\n\nclass Ruin(torch.autograd.Function):\n    @staticmethod\n    def forward(ctx, x):\n"
        "        return x * 1\n    @staticmethod\n    def backward(ctx, g):\n        return g / 0\n\nclass Model(",
    )
    folder = tmp_path / "kept"
    options = ["--steps", "1", "--checkpoint-dir", str(folder), "--max-restarts", "1"]
    result = run(str(two_rank_plan(tmp_path, model)), *options)
    assert result.returncode == 1, result.stderr
    assert "restart" not in result.stderr  # what would diverge again
    assert "after step 1: they are not saved" in result.stderr
    assert not list(folder.glob("step-*"))


def test_a_loss_that_is_no_number_ends_the_run(tmp_path: Path) -> None:
    result = run(str(two_rank_plan(tmp_path, NO_NUMBER_MODEL)), "--steps", "50")
    assert result.returncode == 1
    assert (
        "error: the loss is nan in step 3: nothing can be learned from it any more; it is so in every" in result.stderr
    )
    assert "--find-nan names the module" in result.stderr
    assert result.stderr.count("error:") == 2  # that one, and the launcher's
    assert len(result.stdout.splitlines()) == 3


def test_where_a_number_was_first_none_is_told(tmp_path: Path) -> None:
    """Rank, micro-batch, samples and module: nothing of it was said."""
    ruined = "self.head(self.embedding(input_ids) + 0 * (input_ids != 70).float().log().unsqueeze(-1))"
    plan = two_rank_plan(tmp_path, TWO_LAYER_MODEL.replace("self.head(self.embedding(input_ids))", ruined))
    tokens = np.ones(20 * 64 + 1, dtype=np.uint16)
    tokens[3 * 64 + 6] = 70  # in the fourth sample of 64 tokens alone
    tokens.tofile(tmp_path / "tokens")
    options = ("--data", str(tmp_path / "tokens"), "--data-dtype", "uint16", "--steps", "50", "--find-nan")
    result = run(str(plan), *options)
    assert result.returncode == 1, result.stderr
    found = re.search(
        r"in micro-batch (\d)[\d, ]* of 4 on rank (\d) \(data-parallel rank \2\), "
        r"which has sample (\d+), (\d+) of the data; "
        r"the first number that is not finite was before head, micro-batch \1 on rank \2 ",
        result.stderr,
    )
    assert found is not None, result.stderr
    assert "3" in found.groups()[2:]


def test_error_inside_a_stage_is_told_with_its_line(tmp_path: Path) -> None:
    result = run(str(two_stage_plan(tmp_path, FAILING_BLOCK_MODEL)), "--steps", "2")
    assert result.returncode == 1
    assert "rank 1 failed in step 1: ValueError: an error inside a stage (at failing.py:13 in forward)" in result.stderr


def test_sigterm_saves_and_the_next_run_goes_on_as_if_nothing_had_happened(tmp_path: Path) -> None:
    folder, plan = tmp_path / "checkpoints", two_rank_plan(tmp_path, TWO_LAYER_MODEL)
    with training(tmp_path, "--checkpoint-dir", str(folder), plan=plan) as (process, talk):
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=360) == 128 + signal.SIGTERM
        words = talk.read_text()
    assert "stopped by SIGTERM, after a checkpoint" in words
    before = [line for line in words.splitlines() if line.startswith("step")]
    (saved,) = folder.glob("step-*")
    assert saved.name == f"step-{len(before)}"
    total = len(before) + 2
    resumed = run(str(plan), "--steps", str(total), "--checkpoint-dir", str(folder))
    assert resumed.returncode == 0, resumed.stderr
    assert "goes on with other" not in resumed.stderr
    whole = run(str(plan), "--steps", str(total))
    assert losses(whole.stdout.splitlines())[-2:] == losses(resumed.stdout.splitlines())
    assert losses(whole.stdout.splitlines())[:-2] == losses(before)


def test_going_on_otherwise_is_said(tmp_path: Path) -> None:
    """Other data and another rate, as where an option is forgotten, or another model went on without a word."""
    plan, folder = str(two_rank_plan(tmp_path, TWO_LAYER_MODEL)), tmp_path / "checkpoints"
    (tmp_path / "one.txt").write_bytes(b"one text, and another " * 200)
    begun = ("--data", str(tmp_path / "one.txt"), "--lr-schedule", "cosine", "--schedule-steps", "9")
    first = run(plan, "--steps", "1", "--checkpoint-dir", str(folder), *begun)
    assert first.returncode == 0, first.stderr
    other = run(plan, "--steps", "2", "--checkpoint-dir", str(folder), "--resume")
    assert other.returncode == 0, other.stderr
    assert "warning: the run goes on with other data: before 4,400 tokens of uint8 (" in other.stderr
    assert ("warning: the run goes on with other optimisation: before cosine learning rate 0.0003, to 0 of it after "
            "step 9; now constant learning rate 0.0003") in other.stderr  # fmt: skip
    assert "with another model" not in other.stderr
    two_rank_plan(tmp_path, TWO_LAYER_MODEL.replace("self.embedding(input_ids)", "self.embedding(input_ids).relu()"))
    changed = run(plan, "--steps", "3", "--checkpoint-dir", str(folder), "--resume")
    assert "warning: the run goes on with another model: before code or config (" in changed.stderr


def test_everything_around_a_step(tmp_path: Path) -> None:
    """Token files, weights, schedule, clipping, evaluation, log, profile, checkpoints: one run with all of them."""
    plan = str(two_rank_plan(tmp_path, TWO_LAYER_MODEL))
    (np.arange(4000, dtype=np.uint16) % 256).tofile(tmp_path / "tokens.bin")
    np.save(tmp_path / "held.npy", np.arange(4000, dtype=np.uint16) % 256)
    weights = {
        "embedding.weight": torch.zeros(256, 8),
        "head.weight": torch.zeros(256, 8),
        "head.bias": torch.zeros(256),
    }
    save_file(weights, tmp_path / "weights.safetensors")
    result = run(
        plan, "--steps", "2", "--data", str(tmp_path / "tokens.bin"), "--data-dtype", "uint16",
        "--eval-data", str(tmp_path / "held.npy"), "--eval-every", "2", "--eval-batches", "1",
        "--weights", str(tmp_path / "weights.safetensors"), "--lr-schedule", "cosine", "--warmup", "1",
        "--learning-rate", "0.5", "--clip-norm", "0.001", "--decay", "matrices", "--log", str(tmp_path / "log.jsonl"),
        "--profile-step", "1", "--profile-dir", str(tmp_path / "profile"),
        "--checkpoint-dir", str(tmp_path / "checkpoints"), "--checkpoint-every", "1", "--keep", "1",
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    first, second = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert first["loss"] == pytest.approx(math.log(256))  # of logits that are all zero
    assert first["gradient_norm"] > 0.001
    assert (first["learning_rate"], second["learning_rate"]) == (0.5, 0.5)
    assert (first["eval_loss"], second["eval_loss"] < math.log(256)) == (None, True)
    assert first["peak_memory_bytes"] > 2**20
    assert sorted(path.name for path in (tmp_path / "profile").iterdir()) == [
        "step-1-rank-0.json",
        "step-1-rank-1.json",
    ]
    assert [path.name for path in (tmp_path / "checkpoints").glob("step-*")] == ["step-2"]


def test_tensorboard_gets_what_the_log_has(tmp_path: Path) -> None:
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    plan = json.loads(two_rank_plan(tmp_path, TWO_LAYER_MODEL).read_text())
    plan["prediction"] = {"step_time_s": 1.0, "tokens_per_s_per_gpu": 1.0, "model_flops_per_gpu_per_s": 1.0, "mfu": 0.5,
                          "peak_memory_bytes": [2**20], "memory_capacity_bytes": 2**30, "breakdown_s": {}}  # fmt: skip
    (tmp_path / "priced.json").write_text(json.dumps(plan))
    log, board = tmp_path / "log.jsonl", tmp_path / "board"
    arguments = (str(tmp_path / "priced.json"), "--steps", "3", "--log", str(log), "--tensorboard", str(board))
    result = run(*arguments)
    assert result.returncode == 0, result.stderr
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    shown = events.EventAccumulator(str(board)).Reload()
    for tag, name in (
        ("loss", "loss"), ("learning_rate", "learning_rate"), ("gradient_norm", "gradient_norm"),
        ("mfu/measured", "mfu"), ("mfu/predicted", "predicted_mfu"), ("step_time_s/measured", "step_time_s"),
        ("peak_memory_bytes/measured", "peak_memory_bytes"),
        ("peak_memory_bytes/predicted", "predicted_peak_memory_bytes"),
    ):  # fmt: skip
        found = [(event.step, event.value) for event in shown.Scalars(tag)]
        assert found == [(line["step"], pytest.approx(line[name])) for line in lines], tag


def losses(lines: list[str]) -> list[tuple[str, str]]:
    return [(line.split()[1], line.split()[3]) for line in lines]
