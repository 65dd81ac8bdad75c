"""Where ``-o`` may point: what is replaced, what is written into, what is refused, and when that is known."""

import json
import os
import shlex
import stat
import subprocess
import sys
import tty
from pathlib import Path

import pytest
from typer.testing import CliRunner

from planner.cli.main import app
from planner.errors import InputError, PlanError
from planner.output_file import SUFFIX, check_output, write_text


def write(path: Path) -> None:
    check_output(path)
    write_text(path, "new")


def test_a_file_is_replaced_and_keeps_its_mode(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text("old")
    path.chmod(0o640)
    write(path)
    assert path.read_text() == "new"
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    assert os.listdir(tmp_path) == ["plan.json"]


@pytest.mark.parametrize("is_there", [True, False])
def test_a_link_is_followed(is_there: bool, tmp_path: Path) -> None:
    target, link = tmp_path / "store" / "plan.json", tmp_path / "link.json"
    target.parent.mkdir()
    if is_there:
        target.write_text("old")
    link.symlink_to(target)
    write(link)
    assert link.is_symlink()
    assert target.read_text() == "new"


def test_a_device_is_written_into() -> None:
    """A terminal: its folder takes no files, so nothing can come to harm here."""
    master, slave = os.openpty()
    tty.setraw(slave)
    path = Path(os.ttyname(slave))
    write(path)
    assert os.read(master, 10) == b"new"
    assert stat.S_ISCHR(path.stat().st_mode)
    os.close(master)
    os.close(slave)


def test_a_pipe_that_is_open_is_written_into() -> None:
    reading, writing = os.pipe()
    write(Path(f"/dev/fd/{writing}"))
    assert os.read(reading, 10) == b"new"
    os.close(reading)
    os.close(writing)


def test_standard_output(capsysbinary: pytest.CaptureFixture[bytes], tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path)
        write(Path("-"))
    assert capsysbinary.readouterr().out == b"new"
    assert not list(tmp_path.iterdir())


def refused(tmp_path: Path) -> dict[str, tuple[Path, str]]:
    """Paths that cannot be written, and what is said of each. Nobody writes to /proc, not even root."""
    pipe, loop = tmp_path / "pipe", tmp_path / "loop"
    os.mkfifo(pipe)
    loop.symlink_to(loop)
    return {
        "folder": (tmp_path, "it is a folder"),
        "pipe": (pipe, "it is a named pipe"),
        "loop": (loop, "symbolic links"),
        "missing": (tmp_path / "none" / "plan.json", "is no folder"),
        "unwritable": (Path("/proc/plan.json"), "cannot write /proc/plan.json"),
        "long": (tmp_path / ("x" * 300), "too long"),
        "nul": (tmp_path / "a\0b", "null byte"),
    }


KINDS = ("folder", "pipe", "loop", "missing", "unwritable", "long", "nul")
COMMANDS = (
    ("search", "no-model", "--gpus", "1", "-o"), ("search", "no-model", "--gpus", "1..2", "-o"),
    ("estimate", "no-plan", "-o"), ("replan", "no-plan", "--gpus", "1", "-o"), ("trace", "no-model", "-o"),
    ("schedule", "no-plan", "--trace"), ("profile", "-o"), ("profile", "--timings"),
)  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_the_rest_is_refused_and_left_alone(kind: str, tmp_path: Path) -> None:
    path, message = refused(tmp_path)[kind]
    before = sorted(os.listdir(tmp_path))
    for attempt in (check_output, lambda path: write_text(path, "new")):
        with pytest.raises(InputError, match=message):
            attempt(path)
    assert sorted(os.listdir(tmp_path)) == before


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: " ".join(command))
@pytest.mark.parametrize("kind", ["folder", "pipe", "unwritable"])
def test_every_command_knows_before_it_begins(kind: str, command: tuple[str, ...], tmp_path: Path) -> None:
    """What these commands are to work on is not there, which they would say if they had begun."""
    path, message = refused(tmp_path)[kind]
    result = CliRunner().invoke(app, [*command, str(path)], standalone_mode=False)
    assert isinstance(result.exception, InputError)
    assert message in result.exception.message
    assert result.exception.exit_code == 2


READERS = (
    ("search", "mine.py", "--gpus", "1", "-o", "mine.py"), ("search", "mine.py:factory", "--gpus", "1", "-o", "link"),
    ("search", "folder", "--gpus", "1", "-o", "folder/config.json"), ("trace", "mine.py", "-o", "./mine.py"),
    ("search", "no-model", "--gpus", "1", "--hardware", "mine.py", "-o", "mine.py"),
    ("report", "mine.py", "-o", "mine.py"), ("schedule", "mine.py", "--trace", "mine.py"),
    ("export", "mine.py", "--to", "torchrun", "-o", "mine.py"), ("import", "mine.py", "-o", "mine.py"),
    ("verify", "mine.py", "-o", "mine.py"), ("calibrate", "plan.json:mine.py", "-o", "mine.py"),
)  # fmt: skip


@pytest.mark.parametrize("command", READERS, ids=lambda command: " ".join(command))
def test_no_command_writes_over_what_it_reads(
    command: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model's source was replaced by its plan, a plan by its page, each with exit code 0."""
    (tmp_path / "folder").mkdir()
    for name in ("mine.py", "folder/config.json"):
        (tmp_path / name).write_text("precious")
    (tmp_path / "link").symlink_to("mine.py")
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, command, standalone_mode=False)
    assert isinstance(result.exception, InputError)
    assert "which is read" in result.exception.message
    assert result.exception.exit_code == 2
    assert {(tmp_path / name).read_text() for name in ("mine.py", "folder/config.json")} == {"precious"}


def test_a_plan_may_be_priced_again_in_its_place(tmp_path: Path) -> None:
    for command in ("estimate", "replan"):
        plan = tmp_path / "plan.json"
        plan.write_text("{}")
        result = CliRunner().invoke(app, [command, str(plan), "--gpus", "1", "-o", str(plan)], standalone_mode=False)
        assert isinstance(result.exception, PlanError)  # of what it holds: it was read
        assert plan.read_text() == "{}"


def test_what_a_killed_writer_left_goes_with_the_next_write(tmp_path: Path) -> None:
    old, new, foreign = (tmp_path / name for name in (f".plan.json.a{SUFFIX}", f".plan.json.b{SUFFIX}", ".plan.json.c"))
    for path in (old, new, foreign):
        path.write_text("half")
    for path in (old, foreign):
        os.utime(path, (0, 0))
    write(tmp_path / "plan.json")
    assert sorted(os.listdir(tmp_path)) == sorted([new.name, foreign.name, "plan.json"])


def test_a_plan_on_standard_output_is_alone_there() -> None:
    plan = Path(__file__).resolve().parents[3] / "examples" / "plans" / "gpt-tiny-pp2-dp2.json"
    result = CliRunner().invoke(app, ["estimate", str(plan), "-o", "-"], standalone_mode=False)
    assert result.exception is None
    assert json.loads(result.stdout)["prediction"]["step_time_s"] > 0


@pytest.mark.parametrize(
    ("target", "code", "said"),
    [
        (">/dev/full", 1, "error: cannot write standard output, or another file: No space left on device"),
        (">&-", 2, "error: cannot write standard output: it is closed"),
    ],
)
def test_a_standard_output_that_takes_nothing_is_no_defect_of_ours(target: str, code: int, said: str) -> None:
    """Both were internal errors, "a defect of planner"; the closed one of some commands, others lost the plan."""
    plan = Path(__file__).resolve().parents[3] / "examples" / "plans" / "gpt-tiny-pp2-dp2.json"
    command = shlex.join([sys.executable, "-m", "planner", "estimate", str(plan), "-o", "-"])
    done = subprocess.run(f"{command} {target}", shell=True, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == code
    assert said in done.stderr
    assert "internal" not in done.stderr
