"""``planner run`` starts the ranks, joins those that run, and tells one error once."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil

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


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, *arguments],
        env={**os.environ, **environment},
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def two_rank_plan(folder: Path) -> Path:
    (folder / "failing.py").write_text(FAILING_MODEL)
    plan = json.loads(EXAMPLE.read_text())
    plan["model"]["source"] = str(folder / "failing.py")
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


def test_interrupt_ends_all_ranks(tmp_path: Path) -> None:
    talk = tmp_path / "talk"
    with talk.open("w") as out:
        command = [*COMMAND, str(EXAMPLE), "--steps", "100000"]
        process = subprocess.Popen(command, cwd=REPOSITORY, stdout=out, stderr=out)
    deadline_s = time.monotonic() + 100
    while "step" not in talk.read_text() and time.monotonic() < deadline_s:
        time.sleep(0.2)
    ranks = psutil.Process(process.pid).children(recursive=True)
    assert len(ranks) >= 4
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=40) == 130
    _, alive = psutil.wait_procs(ranks, timeout=10)
    assert alive == []
    assert "Traceback" not in talk.read_text()
