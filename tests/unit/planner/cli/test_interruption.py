"""Ctrl-C at moments of a search that do not depend on the machine's speed: when a function is entered."""

import gc
import json
import os
import signal
import subprocess
import sys
import time
import weakref
from collections.abc import Callable
from pathlib import Path

import pytest
from pydantic import BaseModel, field_serializer

from planner.cli.process import interruptible
from planner.errors import ModelError
from planner.graph.graph_file import write_graph
from planner.layout.deadline import Deadline, OutOfTimeError
from planner.models.python_file import time_limit
from tests.planning import graph_of

# Interrupts itself when NAME of MODULE is called for the TIMES-th time, then is the command line.
PROGRAM = """
import importlib, os, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # tests in the background ignore it
module, name, times, *arguments = sys.argv[1:]
calls, home = 0, importlib.import_module(module)
function = getattr(home, name)
def interrupted(*args, **options):
    global calls
    calls += 1
    if calls == int(times):
        os.kill(os.getpid(), signal.SIGINT)
    return function(*args, **options)
setattr(home, name, interrupted)
sys.argv[1:] = arguments
from planner.__main__ import main
main()
"""


@pytest.fixture(scope="module")
def graph_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("graph") / "graph.json"
    write_graph(graph_of("llama-tiny", 64), path)
    return path


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", PROGRAM, *arguments], capture_output=True, check=False, text=True)


@pytest.mark.parametrize(
    ("module", "name", "times", "has_plan"),
    [
        ("planner.cli.main", "app", "1", False),
        ("planner.api", "graph_of", "1", False),
        ("planner.problem", "build_table", "1", False),  # of the typical layouts
        ("planner.problem", "build_table", "2", True),  # of all
        ("planner.solver.walk", "best_cut", "1", True),
        ("planner.api", "plan_of", "1", True),
        ("planner.cli.search", "write_plan", "1", True),
        ("planner.cli.search", "plan_json", "1", True),
    ],
)
def test_ctrl_c_gives_the_best_so_far(
    module: str, name: str, times: str, *, has_plan: bool, graph_file: Path, tmp_path: Path
) -> None:
    plan = tmp_path / "plan.json"
    options = ("--gpus", "8", "--hardware", "dgx-a100-80gb", "--global-batch", "16", "--json", "-o", str(plan))
    done = run(module, name, times, "search", str(graph_file), *options)
    assert done.returncode == 130, done.stderr
    assert "Traceback" not in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == (["plan.json"] if has_plan else [])
    if has_plan:
        assert json.loads(done.stdout) == json.loads(plan.read_text())
    else:
        assert done.stdout == ""
        assert "interrupted" in done.stderr


@pytest.mark.parametrize(
    ("module", "name"),
    [("planner.solver.walk", "best_cut"), ("planner.solver.walk", "probe"), ("planner.api.fit", "something_fits")],
)
def test_ctrl_c_never_says_that_nothing_fits(module: str, name: str, graph_file: Path) -> None:
    options = ("--gpus", "8", "--hardware", "dgx-a100-80gb", "--global-batch", "16", "--json")
    done = run(module, name, "1", "fit", str(graph_file), *options)
    assert (done.returncode, done.stdout) == (130, "")


def test_ctrl_c_while_modules_are_imported() -> None:
    """The first module of the command line that is imported sends the signal."""
    program = (
        "import os, signal, sys\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "class Finder:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'planner.cli.main':\n"
        "            os.kill(os.getpid(), signal.SIGINT)\n"
        "sys.meta_path.insert(0, Finder())\n"
        "from planner.__main__ import main\n"
        "main()\n"
    )
    done = subprocess.run([sys.executable, "-c", program, "models"], capture_output=True, check=False, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "interrupted\n")


LIBRARY = """
import os, signal
os.kill(os.getpid(), signal.SIGINT)
for number in range(1000):
    pass
print("whole", flush=True)
"""


@pytest.mark.parametrize(("package", "shown"), [("torch", "whole\n"), ("another", "")])
def test_ctrl_c_waits_while_a_library_in_c_is_imported(package: str, shown: str, tmp_path: Path) -> None:
    (tmp_path / f"{package}.py").write_text(LIBRARY)
    program = (
        "import signal, sys\n"
        "from planner.cli.ctrl_c import import_whole, interrupt\n"
        f"sys.path.insert(0, {str(tmp_path)!r})\n"
        "import_whole('torch', 'ortools')\n"
        "signal.signal(signal.SIGINT, interrupt)\n"
        "try:\n"
        f"    import {package}\n"
        "except KeyboardInterrupt:\n"
        "    sys.exit(130)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, check=False, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (130, shown, "")


@pytest.mark.parametrize(("is_idle", "shown"), [("True", ""), ("False", "whole\n")])
def test_ctrl_c_waits_no_longer_than_a_moment_where_nothing_is_lost(is_idle: str, shown: str, tmp_path: Path) -> None:
    """It waited for all of torch, one to three seconds: now only a search that has a plan does."""
    (tmp_path / "torch.py").write_text(
        "import os, signal, time\nos.kill(os.getpid(), signal.SIGINT)\ntime.sleep(1.5)\nprint('whole', flush=True)\n"
    )
    program = (
        "import signal, sys\n"
        "from planner.cli.ctrl_c import idle_while, import_whole, interrupt\n"
        f"sys.path.insert(0, {str(tmp_path)!r})\n"
        "import_whole('torch')\n"
        "signal.signal(signal.SIGINT, interrupt)\n"
        "try:\n"
        f"    with idle_while(lambda: {is_idle}):\n"
        "        import torch\n"
        "except KeyboardInterrupt:\n"
        "    sys.stderr.write('interrupted\\n')\n"
        "    sys.exit(130)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, check=False, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (130, shown, "interrupted\n")


def test_every_command_says_that_it_was_interrupted(graph_file: Path) -> None:
    """fit, check, calibrate and explain ended without a word."""
    done = run("planner.api.fit", "something_fits", "1", "fit", str(graph_file), "--gpus", "8")
    assert (done.returncode, done.stdout) == (130, "")
    assert done.stderr.endswith("interrupted\n")


def test_an_error_that_python_made_of_ctrl_c_is_told_as_such() -> None:
    """An exception in ``__set_name__`` is raised as a RuntimeError (Python 3.11)."""
    program = (
        "import os, signal, sys\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)  # tests in the background ignore it\n"
        "from planner.__main__ import main\n"
        "from planner.cli import main as commands\n"
        "class Field:\n"
        "    def __set_name__(self, owner, name):\n"
        "        os.kill(os.getpid(), signal.SIGINT)\n"
        "        for number in range(1000):\n"
        "            pass\n"
        "        raise AssertionError('no signal')\n"
        "commands.app = lambda **options: type('Made', (), {'field': Field()})\n"
        "main()\n"
    )
    done = subprocess.run([sys.executable, "-c", program, "models"], capture_output=True, check=False, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "interrupted\n")


def test_a_job_in_the_background_stays_deaf(graph_file: Path) -> None:
    program = PROGRAM.replace("signal.default_int_handler", "signal.SIG_IGN")
    options = ("--gpus", "8", "--hardware", "dgx-a100-80gb", "--global-batch", "16", "--json")
    command = [sys.executable, "-c", program, "planner.api", "plan_of", "1", "search", str(graph_file), *options]
    done = subprocess.run(command, capture_output=True, check=False, text=True)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["search"]["status"] in ("OPTIMAL", "FEASIBLE")


class Signalled:
    """Is sent a signal where Python only prints what is raised: in its destructor."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __del__(self) -> None:
        os.kill(os.getpid(), self.number)


def in_a_destructor(number: int) -> None:
    Signalled(number)


def in_a_weak_reference(number: int) -> None:
    watched = set[int]()
    reference = weakref.ref(watched, lambda _: os.kill(os.getpid(), number))
    del watched
    assert reference() is None


def in_the_collector(number: int) -> None:
    def callback(phase: str, _info: dict[str, int]) -> None:
        if phase == "start":
            os.kill(os.getpid(), number)

    gc.callbacks.append(callback)
    try:
        gc.collect()
    finally:
        gc.callbacks.remove(callback)


def sent_and_waited(sent: Callable[[int], None], number: int) -> None:
    sent(number)
    time.sleep(10)


@pytest.mark.parametrize("sent", [in_the_collector, in_a_destructor, in_a_weak_reference])
@pytest.mark.parametrize(("number", "error"), [(signal.SIGALRM, OutOfTimeError), (signal.SIGINT, KeyboardInterrupt)])
def test_a_signal_is_not_lost_where_nothing_can_be_raised(
    number: int, error: type[BaseException], sent: Callable[[int], None]
) -> None:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(error), interruptible(Deadline.never()):
            sent_and_waited(sent, number)
    finally:
        signal.signal(signal.SIGINT, before)


def test_without_a_plan_the_clock_rings_when_nothing_is_left_for_the_answer() -> None:
    began_s = time.monotonic()
    with pytest.raises(OutOfTimeError), interruptible(Deadline.answering_within(0.3)):
        time.sleep(10)
    assert 0.3 <= time.monotonic() - began_s < 5


def test_with_a_plan_the_clock_rings_when_the_answer_is_due() -> None:
    deadline, began_s = Deadline.answering_within(60), time.monotonic()
    deadline.promise()
    with interruptible(deadline):
        left_s, _ = signal.getitimer(signal.ITIMER_REAL)
    assert 59 - (time.monotonic() - began_s) <= left_s <= 59


def test_a_search_that_does_not_end_when_the_answer_is_due_is_ended_soon() -> None:
    deadline, began_s = Deadline.answering_within(0.3), time.monotonic()
    deadline.promise()
    with pytest.raises(OutOfTimeError), interruptible(deadline):
        time.sleep(10)
    assert 0.2 + 0.025 <= time.monotonic() - began_s < 5


@pytest.mark.parametrize(("limit_s", "grace_s"), [(None, 0.25), (60, 0.25), (0.3, 0.025)])
def test_what_a_search_has_to_end_by_itself(
    limit_s: float | None, grace_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a limit nothing is kept back for the answer: after Ctrl-C the second alarm came within a millisecond."""
    deadline, waits = Deadline.answering_within(limit_s), list[float]()
    deadline.promise()
    monkeypatch.setattr("signal.setitimer", lambda _which, seconds, _again=0.0: waits.append(seconds))
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with interruptible(deadline):
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGALRM)
            assert waits[-2:] == pytest.approx([0.25, grace_s])
    finally:
        signal.signal(signal.SIGINT, before)


class _Told(BaseModel):
    """Something whose JSON takes until the clock rings; pydantic makes an error of its own of what is raised."""

    value: int = 0

    @field_serializer("value")
    def _late(self, value: int) -> int:
        signal.raise_signal(signal.SIGALRM)
        return value


def test_an_error_that_a_library_made_of_the_clock_is_told_as_such() -> None:
    with pytest.raises(OutOfTimeError), interruptible(Deadline.never()):
        _Told().model_dump_json()


def test_errors_that_are_not_the_clock_s_stay() -> None:
    with pytest.raises(ZeroDivisionError), interruptible(Deadline.never()):
        _ = 1 / 0


def test_the_limit_of_a_model_file_is_not_lost_there() -> None:
    with pytest.raises(ModelError, match="did not end within"), time_limit(60, "the file"):
        sent_and_waited(in_a_destructor, signal.SIGALRM)
