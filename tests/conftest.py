"""Settings that every test shares."""

import gc
import os
import subprocess
import threading
from collections.abc import Generator
from types import SimpleNamespace

import pytest
from hypothesis import settings

from planner.graph import tracing
from tests.forked_python import ForkedPython, OnRanks

# The same examples on every run and machine, so that a red test stays red; shared cores make deadlines meaningless.
settings.register_profile("repeatable", deadline=None, derandomize=True)
settings.load_profile("repeatable")

# Configurations are files of ours: a test that reaches for a model hub is wrong, and says so at once.
os.environ.setdefault("HF_HUB_OFFLINE", "1")


def pytest_collection_finish() -> None:
    """What is imported by now stays: no collection of garbage is to look through all of torch.

    Garbage is looked for less often than Python does by itself; planner's commands do not look for it at all.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 50)


@pytest.fixture(scope="session", autouse=True)
def kept_traces(tmp_path_factory: pytest.TempPathFactory) -> Generator[None]:
    """Traces are kept for this session alone: the user's cache is left alone, and no model is traced twice.

    Processes of pytest-xdist share them; each has a folder of its own inside the session's.
    """
    own = tmp_path_factory.getbasetemp()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str((own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / "cache"))
        yield


FORKED = SimpleNamespace(Popen=ForkedPython, DEVNULL=subprocess.DEVNULL, TimeoutExpired=subprocess.TimeoutExpired)


@pytest.fixture
def traced_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """The code of model files is traced in this process: one of its own spends 2 s of CPU on importing torch.

    For harmless files, where a test asks about something else than the trace. What the code read is not recorded.
    """

    def here(request: tracing.TraceRequest, _time_limit_s: float) -> tracing.TracedModel:
        return tracing.TracedModel(graph=tracing._trace_here(request))

    monkeypatch.setattr(tracing, "_trace_in_child", here)


@pytest.fixture
def traced_by_fork(monkeypatch: pytest.MonkeyPatch) -> None:
    """The code of model files is traced in a process of its own that has torch from the start.

    For tests of what that code does or reads, where they do not ask how its process is started.
    """
    monkeypatch.setattr(tracing, "subprocess", FORKED)


@pytest.fixture
def started_by_fork(monkeypatch: pytest.MonkeyPatch, traced_by_fork: None) -> None:
    """So are ranks, and the process that looks at a loss."""
    monkeypatch.setattr("planner.executor.launch.subprocess", FORKED)
    monkeypatch.setattr("planner.executor.loss_note.subprocess", FORKED)


@pytest.fixture
def on_ranks(started_by_fork: None, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> OnRanks:
    """A program's exit code is to be 0 on all ranks."""
    from planner.executor import launch  # imports torch

    def run(size: int, program: str, *arguments: object) -> tuple[str, str]:
        monkeypatch.setattr(launch, "RANK_COMMAND", program)
        try:
            launch._run_ranks(size, [*map(str, arguments)], (), threading.Event(), 0.0)
        except launch.RankError as error:
            pytest.fail(f"{error.message}\n{capfd.readouterr().err[-9000:]}")
        return capfd.readouterr()

    return run
