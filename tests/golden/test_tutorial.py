"""docs/tutorial.md: its commands and its Python are run, and print what stands below them but for measured seconds.

UPDATE_GOLDEN=1 writes the page again.
"""

import os
import re
import shutil
import subprocess
import sys
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

import pytest

from planner.cli.main import main

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "tutorial.md"
COMMANDS = re.compile(r"```console\n(.*?)```", re.DOTALL)
PYTHON = re.compile(r"```python\n(.*?)```\n\n```text\n(.*?)```", re.DOTALL)
# What a clock says, which differs from run to run: the rest has to be equal.
CLOCKS = re.compile(r"(?<=searched in )[\d.]+ m?s|(?<=step time )[\d.]+ s|[\d,]+(?= tokens/s\b(?!/))")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The repository's examples, as the page starts from them."""
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    return tmp_path


def printed_by(command: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> str:
    """What a command prints on stdout; where that is nothing, what it says on stderr besides notes."""
    words, _, pipe = command.partition(" | ")
    if words.startswith("planner "):
        monkeypatch.setattr(sys, "argv", words.split())
        with pytest.raises(SystemExit) as ended:
            main()
        out, err = capfd.readouterr()
        assert ended.value.code == 0, err
        told = [line for line in err.splitlines(keepends=True) if not line.startswith("note:")]
        out = out or "".join(told)
        return out if not pipe else shown(pipe, out)
    return shown(command, "")


def shown(command: str, text: str) -> str:
    """``text`` through a command of the shell."""
    return subprocess.run(command, shell=True, input=text, capture_output=True, text=True, check=True).stdout


def run_again(page: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> str:
    """The page with what its commands print now."""

    def of_commands(found: re.Match[str]) -> str:
        lines: list[str] = []
        for command in re.findall(r"^\$ (.*)$", found[1], re.MULTILINE):
            printed = printed_by(command, capfd, monkeypatch)
            lines += [f"$ {command}", *(line.rstrip() for line in printed.splitlines())]
        return "```console\n" + "\n".join(lines) + "\n```"

    def of_python(found: re.Match[str]) -> str:
        printed = StringIO()
        with redirect_stdout(printed):
            exec(found[1], {})
        return f"```python\n{found[1]}```\n\n```text\n{printed.getvalue()}```"

    return PYTHON.sub(of_python, COMMANDS.sub(of_commands, page))


def test_the_page_shows_what_its_commands_print(
    folder: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert text.count("```console") == len(COMMANDS.findall(text)) >= 5
    found = run_again(text, capfd, monkeypatch)
    if os.environ.get("UPDATE_GOLDEN"):
        PAGE.write_text(found, encoding="utf-8")
    assert CLOCKS.sub("-", found) == CLOCKS.sub("-", PAGE.read_text(encoding="utf-8"))


def test_links_lead_somewhere() -> None:
    """Of all pages, to pages and files of the repository."""
    for page in sorted((ROOT / "docs").glob("*.md")):
        for target in re.findall(r"\]\(([^)#]+?)(?:#[^)]*)?\)", page.read_text(encoding="utf-8")):
            assert target.startswith("https://") or (page.parent / target).exists(), f"{page.name}: {target}"
