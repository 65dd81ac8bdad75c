"""A command's file is imported when the command is asked for, and ``--help`` lists all that there are."""

from __future__ import annotations

import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest
from typer.testing import CliRunner

import planner.cli
from planner.cli.main import COMMANDS, app

FOLDER = Path(planner.cli.__file__).parent
FILES = sorted(path.stem for path in FOLDER.glob("*.py") if "\ndef register(" in path.read_text())


def test_every_file_with_a_command_is_listed() -> None:
    assert sorted(name.removesuffix("_") for name in FILES) == sorted(COMMANDS)
    said = CliRunner().invoke(app, ["--help"]).output
    assert all(f" {name} " in said for name in COMMANDS)


@pytest.mark.parametrize("command", COMMANDS)
def test_each_command_answers_to_its_name(command: str) -> None:
    assert CliRunner().invoke(app, [command, "--help"]).exit_code == 0


def test_a_search_imports_no_other_command() -> None:
    program = (
        "import sys\n"
        "from planner.cli.main import main\n"
        "sys.argv = ['planner', 'search', 'absent.json', '--gpus', '8']\n"
        "try:\n    main()\nexcept SystemExit:\n    pass\n"
        "print(*sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True, text=True)
    loaded = {name.rpartition(".")[2] for name in done.stdout.split() if name.startswith("planner.cli.")}
    assert loaded & set(FILES) == {"search"}
    assert hasattr(import_module("planner.cli.search"), "register")


def test_an_unknown_command_is_told_its_likely_name() -> None:
    result = CliRunner().invoke(app, ["serach"])
    assert result.exit_code == 2
    assert "search" in result.output


def test_the_version_is_that_of_the_package() -> None:
    result = CliRunner().invoke(app, ["--version"])
    assert (result.exit_code, result.output.strip()) == (0, planner.__version__)
