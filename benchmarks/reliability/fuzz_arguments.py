"""Command lines that are almost sound, as the process gets them: ``main`` itself answers.

Models and plans that would take long to work on are not there, so that all checks of arguments run and the work does
not begin. Commands that measure the machine are left out. What a command prints must hold nothing that a terminal
obeys.
"""

from __future__ import annotations

import contextlib
import io
import os
import random
import sys
from pathlib import Path
from unittest import mock

from typer.main import get_command

from benchmarks.reliability.fuzz_targets import FORMATS, GRAPH, HARDWARE, Target
from benchmarks.reliability.hostile_text import PIECES
from benchmarks.reliability.mutations import NUMBERS, OTHERS, changed_text
from planner.cli import main as command_line
from planner.errors import PlannerError

# In a file of arguments: a NUL ends each, as in /proc/PID/cmdline.
SEEDS = (
    "search gone.graph.json --gpus 8 --hardware dgx-h100-80gb --seq-len 64 --global-batch 16 --precision bf16 --json",
    "search gone.py:build --gpus 2..8 --tp 2 --pp 2 --dp 2 --zero 1 --schedule 1F1B --recompute full --top 3",
    "search gone.json --hardware cpu-gloo:4,dgx-h100-80gb:8 --memory-risk 0.1 --time-limit 3 --tokens 15T -o out.json",
    "search gone --gpus 4 --cp 2 --cp-method ring --ep 2 --micro-batch 1 --virtual-stages 2 --offload cpu",
    "fit gone.json --gpus 8 --tp 2 --offload none --framework deepspeed --optimizer adam",
    "estimate plan0.json --hardware dgx-h100-80gb --gpus 8 --json",
    "estimate plan0.json --framework megatron-core -o out.json",
    "export plan2.json --to deepspeed -o out.json",
    "export plan0.json --to slurm --gpus-per-node 2",
    "schedule plan0.json --trace trace.json --gpus 4",
    "explain gone.json --why-not tp=4,pp=2 --tokens 300B --search memory",
    "replan gone.json --gpus 8",
    "report gone.json -o page.html --gpus 2..4",
    "hardware show dgx-h100-80gb --json",
    "hardware show a100-80gb:8,h100:8",
    "hardware list",
    "models --json",
    "trace gone.json --check --seq-len 64 --batch-size 2 -o out.json",
    f"import config.yaml --from accelerate --model {GRAPH} --hardware {HARDWARE} --precision fp32 --global-batch 8",
    "check gone.json", "run gone.json --steps 3", "verify gone.json --top 2", "parity gone.json",
)  # fmt: skip
_WORDS = tuple(dict.fromkeys(word for seed in SEEDS for word in seed.split()))
_LEFT_OUT = ("profile", "detect")  # measure the machine
GOOD_CODES = (0, 2, 3, 4)
# What `app` makes of itself in every call, made once: that is most of what an answer takes.
APP = get_command(command_line.app)


class ArgumentsError(Exception):
    """A command line was answered as none may be."""


def arguments_target() -> Target:
    """Files of arguments, in the current folder."""
    config = Path(FORMATS["accelerate"])
    config.write_text("distributed_type: FSDP\nnum_processes: 4\nmixed_precision: 'no'\n")
    seeds = tuple(b"\0".join(word.encode() for word in seed.split()) for seed in SEEDS)
    return Target("arguments", seeds, changed_arguments, answered, lambda _path, _code: None, file_name="arguments")


def changed_arguments(content: bytes, draw: random.Random) -> bytes:
    """A word is another, is there twice, is gone or has other letters."""
    words = [os.fsdecode(word) for word in content.split(b"\0")]
    for _ in range(draw.choice((1, 1, 2, 3))):
        place = draw.randrange(len(words)) if words else 0
        match draw.randrange(7):
            case 0:
                words[place : place + 1] = []
            case 1:
                words.insert(place, draw.choice(_WORDS))
            case 2:
                words[place:place] = words[place : place + 2]
            case 3 if words:
                words[place] = changed_text(words[place], draw)
            case 4:
                words.insert(place, draw.choice(PIECES))
            case _:
                words[place : place + 1] = [draw.choice((*NUMBERS, *OTHERS, *PIECES, *_WORDS))]
    passable = [word.encode("utf-8", "replace").replace(b"\0", b"") for word in words]
    return b"\0".join(passable[:200])


def answered(path: Path) -> int:
    """The exit code; PlannerError with what was said where it is not 0, ArgumentsError where an answer is a defect."""
    words = [os.fsdecode(word) for word in path.read_bytes().split(b"\0")]
    if any(word in words for word in _LEFT_OUT):
        return 0
    code, out, err = said(words)
    if code not in GOOD_CODES or "internal error" in err:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            APP(args=[word for word in words if word != "--debug"], standalone_mode=False)  # for its traceback
        raise ArgumentsError(f"exit code {code}: {err[:200]}")
    if not is_harmless(out + err):
        raise ArgumentsError("prints what a terminal obeys")
    if code:
        raise PlannerError(err)
    return code


def is_harmless(text: str) -> bool:
    """Whether a terminal obeys nothing of it but the ends of lines."""
    return all(each.isprintable() or each == "\n" for each in text)


def said(words: list[str]) -> tuple[object, str, str]:
    """The exit code of the command, and what it writes to stdout and stderr."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = _code(words)
    return code, out.getvalue(), err.getvalue()


def _code(words: list[str]) -> object:
    try:
        with mock.patch.object(sys, "argv", ["planner", *words]), mock.patch.object(command_line, "app", APP):
            command_line.main()
    except SystemExit as ended:
        return ended.code
    return None
