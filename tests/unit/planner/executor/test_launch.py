"""Ranks are started again, named when they are killed, and die with whoever started them."""

from __future__ import annotations

import gc
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil
import pytest

from planner.errors import PlannerError
from planner.executor import launch as launching
from planner.executor import ranks
from planner.executor.launch import RankError, StoppedError, die_with_launcher, launch
from planner.executor.ranks import _met, process_group
from planner.plan.plan_file import read_plan

EXAMPLE = Path(__file__).resolve().parents[4] / "examples" / "plans" / "gpt-tiny-pp2-dp2.json"
PLAN = read_plan(EXAMPLE)
# What a rank does: arguments are a file that grows by a byte a start of rank 3, and its fates, one a start.
RANK = """
import os, sys, time
if os.environ["RANK"] == "3":
    with open(sys.argv[1], "a") as file:
        file.write("x")
    fate = sys.argv[1 + os.path.getsize(sys.argv[1])]
    os.kill(os.getpid(), 9) if fate == "killed" else sys.exit(int(fate))
"""


@pytest.mark.parametrize(("words", "code"), [(["models"], 0), (["search"], 2)])
def test_a_rank_does_not_wait_for_the_interpreter_to_be_taken_down(words: list[str], code: int) -> None:
    """There a thread of torch's may end it with SIGABRT; what it has said is not lost."""
    falls = "import atexit, os; atexit.register(os.abort); "
    done = subprocess.run(
        [sys.executable, "-c", falls + launching.RANK_COMMAND, *words], capture_output=True, text=True
    )
    assert done.returncode == code
    assert ("llama3-8b" in done.stdout) if code == 0 else ("hint:" in done.stderr)


@pytest.fixture
def starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(launching, "RANK_COMMAND", RANK)
    return tmp_path / "starts"


def test_failed_ranks_are_started_again(starts: Path, capsys: pytest.CaptureFixture[str]) -> None:
    launch(PLAN, [str(starts), "killed", "1", "0"], max_restarts=2)
    assert starts.read_text() == "xxx"
    said = capsys.readouterr().err.splitlines()
    assert said == [
        "warning: rank 3 was killed by SIGKILL; all ranks were stopped; restart 1 of 2 from the last checkpoint",
        "warning: rank 3 ended with exit code 1; all ranks were stopped; restart 2 of 2 from the last checkpoint",
    ]


def test_restarts_come_to_an_end_and_wrong_input_is_not_tried_again(starts: Path) -> None:
    with pytest.raises(RankError, match="rank 3 was killed by SIGKILL"):
        launch(PLAN, [str(starts), "1", "killed"], max_restarts=1)
    starts.unlink()
    with pytest.raises(RankError, match="rank 3 ended with exit code 2") as error:
        launch(PLAN, [str(starts), "2", "0"], max_restarts=1)
    assert (error.value.exit_code, starts.read_text()) == (2, "x")


def test_training_that_diverged_would_again(starts: Path) -> None:
    with pytest.raises(RankError, match="rank 3 cannot go on training") as error:
        launch(PLAN, [str(starts), "5", "0"], max_restarts=1)
    assert (error.value.exit_code, starts.read_text()) == (1, "x")


def test_a_rank_that_was_told_to_stop_has_not_failed(starts: Path) -> None:
    with pytest.raises(StoppedError, match="stopped by SIGTERM, after a checkpoint") as error:
        launch(PLAN, [str(starts), "143"], max_restarts=1)
    assert (error.value.exit_code, starts.read_text()) == (143, "x")


def test_a_cut_file_of_data_is_thought_of() -> None:
    error = RankError(1, -signal.SIGBUS)
    assert (error.message, error.exit_code) == ("rank 1 was killed by SIGBUS; all ranks were stopped", 1)
    assert "--data" in error.hint


def test_ranks_die_with_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "any")
    monkeypatch.delenv(launching.LAUNCHER_PID, raising=False)
    reading, writing = os.pipe()
    torchrun = os.fork()
    if torchrun == 0:
        rank = os.fork()
        if rank == 0:
            die_with_launcher()
            os.write(writing, str(os.getpid()).encode())
        time.sleep(60)
        os._exit(0)
    rank = psutil.Process(int(os.read(reading, 20)))
    os.kill(torchrun, signal.SIGKILL)
    os.waitpid(torchrun, 0)
    try:
        deadline_s = time.monotonic() + 30
        while rank.is_running() and rank.status() != psutil.STATUS_ZOMBIE and time.monotonic() < deadline_s:
            time.sleep(0.01)
    except psutil.NoSuchProcess:
        return
    assert not rank.is_running() or rank.status() == psutil.STATUS_ZOMBIE


@pytest.fixture
def meeting(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(port))
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)


@pytest.mark.usefixtures("meeting")
def test_ranks_that_do_not_come_are_named() -> None:
    with pytest.raises(PlannerError, match="ranks 1, 2 of 3 did not come within 1 s"):
        _met(0, 3, timedelta(seconds=1), "")
    with pytest.raises(PlannerError, match=r"rank 1 finds no rank 0 at 127\.0\.0\.1:\d+"):
        _met(1, 3, timedelta(seconds=1), "")


@pytest.mark.usefixtures("meeting")
def test_a_network_that_does_not_connect_is_no_defect_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "GLOO_SOCKET_IFNAME": "no-such-interface"}.items():
        monkeypatch.setenv(name, value)
    said = "rank 0 cannot connect to the others: .*no-such-interface"
    with pytest.raises(PlannerError, match=said), process_group(10.0):
        pass


@pytest.mark.usefixtures("meeting")
def test_no_collection_looks_through_what_was_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's modules are hundreds of thousands of objects: a rank's collections took a tenth of a short run."""
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "GLOO_SOCKET_IFNAME": "lo"}.items():
        monkeypatch.setenv(name, value)
    imported = [[number] for number in range(1000)]
    assert any(each is imported[0] for each in gc.get_objects())
    with process_group(10.0):
        assert not any(each is imported[0] for each in gc.get_objects())


LAUNCHING = """
import sys
from planner.cli.main import main
from planner.executor import launch, outcome

launch.launch = outcome.launch = lambda *_, **__: sys.exit(0)
for command in ("run", "verify", "parity"):
    sys.argv[1] = command
    try:
        main()
    except SystemExit:
        print(command, *{"torch", "torch._dynamo", "torch.distributed.tensor"} & set(sys.modules))
"""


def test_a_launcher_does_not_import_the_executor() -> None:
    """It would wait for that before its ranks begin, which import the same."""
    command = [sys.executable, "-c", LAUNCHING, "command", str(EXAMPLE)]
    found = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)
    assert found.stdout.splitlines() == ["run torch", "verify torch", "parity torch"]


def _said_by_each(works: dict[int, str], size: int, timeout_s: float) -> dict[int, str]:
    """What each rank of ``works`` ends with; the first of them serves the others."""
    said: dict[int, str] = {}

    def meet(rank: int, work: str) -> None:
        try:
            _met(rank, size, timedelta(seconds=timeout_s), work)
            said[rank] = "met"
        except PlannerError as error:
            said[rank] = error.message

    threads = [threading.Thread(target=meet, args=each) for each in works.items()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return said


@pytest.mark.usefixtures("meeting")
def test_a_rank_with_another_plan_is_named_on_every_rank() -> None:
    said = "rank 2 was started with another plan or other options than rank 0"
    assert _said_by_each({0: "a", 1: "a", 2: "b"}, 3, 60) == dict.fromkeys(range(3), said)


@pytest.mark.usefixtures("meeting")
def test_rank_0_stays_until_slow_ranks_know_why_it_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    def heard_late(*asked: Any) -> tuple[list[int], list[int]]:
        time.sleep(1.0)
        return heard(*asked)

    heard = ranks._heard
    monkeypatch.setattr(ranks, "_heard", heard_late)
    said = "rank 1 was started with another plan or other options than rank 0"
    assert _said_by_each({0: "a", 1: "b"}, 2, 60) == dict.fromkeys(range(2), said)


@pytest.mark.usefixtures("meeting")
def test_ranks_that_came_are_told_who_did_not() -> None:
    assert _said_by_each({0: "", 2: ""}, 3, 1) == dict.fromkeys((0, 2), "rank 1 of 3 did not come within 1 s")
