"""Ctrl-C at random moments of every command, typed into a terminal of its own: what comes of it.

    python -m benchmarks.reliability.ctrl_c [--num 300] [--seed S] [--limit SECONDS] [--output FILE.json]

Each command is run once undisturbed, which says how long it takes. Then it is run again on a pseudo-terminal, and ^C is
written to that after a share of the time that is drawn at random. Good outcomes are: exit code 130 with its file whole,
or with none; and the command's own code with its file, where it ended first. Whether a search had a plan to write is
not asked here, but at moments that are not random in ``tests/unit/planner/cli/test_interruption.py``. Anything else is
listed: a traceback, another code, half a file, a process of the same session that still runs, a file or folder that was
not there before. A traceback without a line of planner's is the interpreter's own start, and counted apart: no program
can answer for that.
"""

from __future__ import annotations

import contextlib
import json
import os
import pty
import random
import select
import signal
import sys
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from benchmarks.reliability.drill import ROOT, commit, options_of, save, working_folder
from benchmarks.reliability.fuzz_targets import GRAPH, HARDWARE, make_small_graph, small_plans
from planner.plan.plan_file import write_plan

# Those that need no second machine. ``OUT`` is what the command writes.
COMMANDS: dict[str, str] = {
    "search": f"search {GRAPH} --gpus 4 --hardware {HARDWARE} --global-batch 8 --precision fp32 -o OUT",
    "search, long": "search gpt2-1.5b --gpus 64 --hardware dgx-a100-80gb --global-batch 128 -o OUT",
    "search of a range": f"search {GRAPH} --gpus 1..4 --hardware {HARDWARE} --global-batch 8 --precision fp32 -o OUT",
    "fit": f"fit {GRAPH} --gpus 4 --hardware {HARDWARE}",
    "estimate": "estimate plan.json -o OUT",
    "explain": "explain plan.json",
    "schedule": "schedule plan.json --trace OUT",
    "report": "report plan.json -o OUT",
    "export": "export plan.json --to deepspeed -o OUT",
    "import": f"import ds.json --from deepspeed --model {GRAPH} --gpus 4 --seq-len 16 --hardware {HARDWARE} -o OUT",
    "replan": "replan plan.json --gpus 2 -o OUT",
    "trace": "trace small.json -o OUT",
    "check": "check torch.json",
    "models": "models",
    "hardware": "hardware list",
}  # fmt: skip
OUT = "out.json"
CTRL_C = b"\x03"


@dataclass(frozen=True)
class Ended:
    """A command that is over: its exit code (below 0: the signal), what it showed, and for how long it went on."""

    code: int
    shown: str
    is_late: bool
    seconds: float


def started(words: list[str]) -> tuple[int, int]:
    """The command on a terminal of its own, which listens to Ctrl-C wherever this process runs; its id and terminal."""
    child, terminal = pty.fork()
    if child == 0:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        variables = {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "200"}
        os.execve(sys.executable, [sys.executable, "-m", "planner", *words], variables)
    return child, terminal


def ended(words: list[str], after_s: float | None, limit_s: float) -> Ended:
    """Runs a command, and types ^C after so many seconds."""
    began_s = time.monotonic()
    child, terminal = started(words)
    typed_s, shown, is_late = None, b"", False
    while True:
        now_s = time.monotonic()
        if after_s is not None and typed_s is None and now_s - began_s >= after_s:
            typed_s = now_s
            with contextlib.suppress(OSError):
                os.write(terminal, CTRL_C)
        if not is_late and now_s - (typed_s or began_s) > limit_s:
            is_late = True
            os.kill(child, signal.SIGKILL)
        if select.select([terminal], [], [], 0.005)[0]:
            try:
                shown += os.read(terminal, 2**16)
            except OSError:  # the other end is closed: EIO
                break
    _, status = os.waitpid(child, 0)
    os.close(terminal)
    code = os.waitstatus_to_exitcode(status)
    return Ended(code, shown.decode("utf-8", "replace"), is_late, time.monotonic() - (typed_s or began_s))


def survivors(before: set[int]) -> list[int]:
    """Processes of planner that were not there before."""
    return [pid for pid in processes() if pid not in before]


def processes() -> set[int]:
    """Ids of all processes that run planner in this folder."""
    here, found = os.getcwd(), set[int]()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            with contextlib.suppress(OSError):
                if os.readlink(entry / "cwd") == here and b"planner" in (entry / "cmdline").read_bytes():
                    found.add(int(entry.name))
    return found


def outcome(of: Ended, own_code: int, new: set[str], writes: bool) -> str:
    """One phrase for what the command did. ``new``: files and folders that were not there before."""
    if of.is_late:
        return "BAD: it went on"
    if "Traceback" in of.shown or of.code == -signal.SIGINT:
        is_own = "planner/" in of.shown.partition("Traceback")[2]
        return "BAD: traceback" if is_own else "the interpreter's start"
    if of.code not in (own_code, 130):
        return f"BAD: exit code {of.code}"
    if new - {OUT}:
        return f"BAD: left {', '.join(sorted(new - {OUT}))}"
    if OUT in new and not _is_whole(Path(OUT)):
        return "BAD: half a file"
    if of.code == own_code:
        return "ended first" if (OUT in new) == writes else "BAD: ended without its file"
    return "130, with its file" if OUT in new else "130, with no file"


def _is_whole(path: Path) -> bool:
    content = path.read_bytes()
    try:
        return content.endswith(b"</html>") or bool(json.loads(content))
    except ValueError:
        return False


def _names() -> set[str]:
    """Of all in this folder and in that for temporary files; the cache of traces may grow."""
    return {path.name for path in Path(".").iterdir()} | {f"tmp/{path.name}" for path in Path("tmp").iterdir()}


def drilled(name: str, moments: int, draw: random.Random, limit_s: float) -> Counter[str]:
    """Interrupts one command at so many moments."""
    words = [OUT if word == "OUT" else word for word in COMMANDS[name].split()]
    writes = OUT in words
    ended(words, None, limit_s)  # traces the model, where there is one
    Path(OUT).unlink(missing_ok=True)
    before = _names()
    whole = ended(words, None, limit_s)
    assert writes == Path(OUT).exists(), whole
    found = Counter[str]()
    for _ in range(moments):
        Path(OUT).unlink(missing_ok=True)
        of = ended(words, draw.random() * whole.seconds, limit_s)
        time.sleep(0.05)  # for what the kernel still takes apart
        phrase = outcome(of, whole.code, _names() - before, writes)
        if survivors(set()):
            phrase = "BAD: a process is left"
        if phrase.startswith("BAD"):
            print(f"{name}: {phrase}\n{of.shown[-2000:]}", file=sys.stderr)
        found[phrase] += 1
    return found


def prepare() -> None:
    """The files that the commands read, in the current folder."""
    make_small_graph()
    write_plan(small_plans()[2], Path("plan.json"))
    ended(["export", "plan.json", "--to", "deepspeed", "-o", "ds.json"], None, 600.0)
    words = ["search", "small.json", "--gpus", "2", "--hardware", HARDWARE, "--pp", "1", "--tp", "1"]
    ended([*words, "--global-batch", "4", "--precision", "fp32", "-o", "torch.json"], None, 600.0)


def main() -> int:
    """Interrupts the commands and prints the outcomes; 1 where one was bad."""
    parser = options_of(__doc__, 300, "interruptions in all", "ctrl_c")
    parser.add_argument("--limit", type=float, default=60.0, help="seconds after which a process counts as stuck")
    parser.add_argument("--command", nargs="+", default=list(COMMANDS), choices=list(COMMANDS))
    options = parser.parse_args()
    output, draw, is_bad = options.output.absolute(), random.Random(options.seed), False
    outcomes: dict[str, Counter[str]] = {}
    with working_folder() as folder:
        (folder / "tmp").mkdir()
        os.environ["TMPDIR"] = str(folder / "tmp")
        prepare()
        for place, name in enumerate(options.command):
            moments = options.num // len(options.command) + (place < options.num % len(options.command))
            outcomes[name] = drilled(name, moments, draw, options.limit)
            print(f"{name}: {dict(outcomes[name])}", flush=True)
            is_bad |= any(phrase.startswith("BAD") for phrase in outcomes[name])
            num = sum(map(Counter.total, outcomes.values()))
            save(output, {"ctrl_c": {"commit": commit(), "seed": options.seed, "num": num, "commands": outcomes}})
    return int(is_bad)


if __name__ == "__main__":
    sys.exit(main())
