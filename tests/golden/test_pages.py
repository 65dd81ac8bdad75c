"""README.md and docs/tutorial.md: their commands and their Python are run, and print what stands below them, but for
measured seconds, and losses on another Python than they were written with. The list of commands in README.md is run
too, with a small model.

UPDATE_GOLDEN=1 writes the pages again.
"""

import json
import os
import platform
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
README = ROOT / "README.md"
PAGES = (README, ROOT / "docs" / "tutorial.md")
COMMANDS = re.compile(r"```console\n(.*?)```", re.DOTALL)
PYTHON = re.compile(r"```python\n(.*?)```\n\n```text\n(.*?)```", re.DOTALL)
# What a clock says, which differs from run to run: the rest has to be equal.
CLOCKS = re.compile(r"(?<=searched in )[\d.]+ m?s|(?<=step time )[\d.]+ s|[\d,]+(?= tokens/s\b(?!/))")
# The text that a model is trained on unless another is named is that of Python's library: other versions have another.
WRITTEN_WITH = "3.11.7"
LOSSES = re.compile(r"(?<=loss )[\d.]+")
EXIT_CODE = ' || echo "exit code $?"'

LLAMA_OF_TWO_LAYERS = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "vocab_size": 1024,
    "max_position_embeddings": 256,
}
# What plan.json is from a command on: one that this machine can train with, and one that `import --better` improves on.
TRAINS_HERE = "planner search small --gpus 1 --hardware cpu-gloo --global-batch 8 --precision fp32 -o plan.json"
CAN_BE_BETTER = "planner search small --gpus 64 --tp 8 -o plan.json"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, started_by_fork: None) -> Path:
    """The repository's examples, as the pages start from them, in a terminal of 100 columns."""
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    return tmp_path


def run(words: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> tuple[int, str, str]:
    """A command of ``planner``: exit code, stdout and stderr."""
    monkeypatch.setattr(sys, "argv", words.split())
    with pytest.raises(SystemExit) as ended:
        main()
    out, err = capfd.readouterr()
    return int(ended.value.code or 0), out, err


def printed_by(command: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> str:
    """What a command prints on stdout; where that is nothing, what it says on stderr besides notes."""
    if command == "make demo":
        made = shown("make --no-print-directory --dry-run --assume-old=.venv/.installed demo", "", ROOT)
        command = made.splitlines()[-1].removeprefix(".venv/bin/")
    words, _, pipe = command.removesuffix(EXIT_CODE).partition(" | ")
    if not words.startswith("planner "):
        return shown(command, "")
    code, out, err = run(words, capfd, monkeypatch)
    out = out or "".join(line for line in err.splitlines(keepends=True) if not line.startswith("note:"))
    if command.endswith(EXIT_CODE):
        return f"{out}exit code {code}\n"
    assert code == 0, err
    return out if not pipe else shown(pipe, out)


def shown(command: str, text: str, folder: Path | None = None) -> str:
    """``text`` through a command of the shell."""
    done = subprocess.run(command, shell=True, input=text, capture_output=True, text=True, check=True, cwd=folder)
    return done.stdout


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


def comparable(page: str) -> str:
    """Without what differs from run to run, and from one Python to another."""
    timeless = CLOCKS.sub("-", page)
    return timeless if platform.python_version() == WRITTEN_WITH else LOSSES.sub("-", timeless)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_page_shows_what_its_commands_print(
    page: Path, folder: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    text = page.read_text(encoding="utf-8")
    assert text.count("```console") == len(COMMANDS.findall(text)) >= 5
    assert text.count("$ ") == sum(len(re.findall(r"^\$ ", block, re.MULTILINE)) for block in COMMANDS.findall(text))
    found = run_again(text, capfd, monkeypatch)
    if os.environ.get("UPDATE_GOLDEN"):
        page.write_text(found, encoding="utf-8")
    assert comparable(found) == comparable(page.read_text(encoding="utf-8"))


def test_every_command_of_the_list_runs(
    folder: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In their order, as one who tries them one after another; each writes the files that it names."""
    (folder / "small").mkdir()
    (folder / "small" / "config.json").write_text(json.dumps(LLAMA_OF_TWO_LAYERS))
    commands = re.findall(r"^(planner .*?) *(?:#.*)?$", README.read_text(encoding="utf-8"), re.MULTILINE)
    assert len(commands) >= 20
    for command in commands:
        words = command.replace("MODEL", "small").replace("--steps 50", "--steps 2")
        if words.startswith("planner run "):
            assert run(TRAINS_HERE, capfd, monkeypatch)[0] == 0
        if words.startswith("planner replan "):
            assert run(CAN_BE_BETTER, capfd, monkeypatch)[0] == 0
        code, out, err = run(words, capfd, monkeypatch)
        assert code == 0, f"{command}: {err}"
        assert "Traceback" not in err
        written = re.findall(r"(?:-o|--trace|--keep|--better) (\S+)", words)
        assert out or written
        assert all((folder / name).stat().st_size for name in written), command


def test_links_lead_somewhere() -> None:
    """Of all pages, to pages and files of the repository."""
    for page in sorted((ROOT / "docs").glob("*.md")):
        for target in re.findall(r"\]\(([^)#]+?)(?:#[^)]*)?\)", page.read_text(encoding="utf-8")):
            assert target.startswith("https://") or (page.parent / target).exists(), f"{page.name}: {target}"
