"""kill -9 while files are written: the file is the old one or the new one, whole.

    python -m benchmarks.reliability.kill_files [--num 1000] [--commands 20] [--seed S] [--output FILE.json]

A process writes two unlike files in turn to one place, by the writer of each kind: a plan, a graph, a page, a profile,
a saved search, an entry of the cache. It is killed after some milliseconds, drawn at random. Then what lies there is
one of the two to the last byte. Temporary files are counted: a writer of the same file removes those of an hour ago,
which is tried too. ``--commands`` whole commands are killed at random moments of their run, with the same question.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.reliability.drill import ROOT, commit, options_of, save, working_folder
from benchmarks.reliability.fuzz_targets import GRAPH, HARDWARE, make_small_graph, small_plans, write_small_search
from planner.graph.disk_cache import DiskCache
from planner.graph.graph_file import read_graph, write_graph
from planner.output_file import STALE_S, SUFFIX, write_text
from planner.plan.plan_file import write_plan

MOST_WAIT_S = 0.03  # a child that has begun writes some hundred files in that time
Write = Callable[[Path, bool], None]  # the second is written where it is True


def writers(folder: Path) -> dict[str, Write]:
    """For each kind of file what writes one of two."""
    plans, graph = small_plans(), read_graph(folder / GRAPH)
    graphs = (graph, graph.model_copy(update={"source": "another" * 50}))
    profiles = [
        (ROOT / "hardware_profiles" / "data" / f"{name}.json").read_text() for name in ("cpu-gloo", "dgx-h100-80gb")
    ]
    pages = ("<html>" + "a" * 10**6 + "</html>\n", "<html>" + "b" * 10**4 + "</html>\n")
    cache = DiskCache(folder / "cached", ".entry", 10)
    return {
        "plan": lambda path, second: write_plan(plans[second], path),
        "graph": lambda path, second: write_graph(graphs[second], path),
        "profile": lambda path, second: write_text(path, profiles[second]),
        "page of a megabyte": lambda path, second: write_text(path, pages[second]),
        "saved search": write_small_search,
        "entry of the cache": lambda path, second: cache.write(path.name, pages[second]),
    }


def place_of(kind: str, folder: Path) -> Path:
    """Where a kind is written."""
    inner = folder / ("cached" if kind == "entry of the cache" else kind)
    inner.mkdir(exist_ok=True)
    return inner / ("out.entry" if kind == "entry of the cache" else "out")


def _argument(kind: str, place: Path) -> Path:
    return Path("out") if kind == "entry of the cache" else place


def killed_after(write: Write, argument: Path, wait_s: float) -> None:
    """A child writes both files in turn until it is killed."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.write(writing, b"x")
            number = 0
            while True:
                number += 1
                write(argument, number % 2 == 1)
        finally:
            os._exit(1)
    os.close(writing)
    os.read(reading, 1)
    os.close(reading)
    time.sleep(wait_s)
    os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status), status  # or the writer failed by itself


def drilled(num: int, seed: int, folder: Path) -> dict[str, Counter[str]]:
    """``num`` kills, each kind of file in turn; what lay there, and temporary files."""
    draw, outcomes = random.Random(seed), dict[str, Counter[str]]()
    every = writers(folder)
    for number in range(num):
        kind = list(every)[number % len(every)]
        write, place, found = every[kind], place_of(kind, folder), outcomes.setdefault(kind, Counter())
        argument = _argument(kind, place)
        whole: list[bytes] = []
        for second in (True, False):
            write(argument, second)
            whole.append(place.read_bytes())
        killed_after(write, argument, draw.random() * MOST_WAIT_S)
        content = place.read_bytes() if place.exists() else None
        found["whole" if content in whole else "BROKEN"] += 1
        _count_litter(place, found)
        write(argument, False)
        found["litter behind the next write"] += len(_litter(place))
        for path in place.parent.iterdir():
            path.unlink()
    return outcomes


def _litter(place: Path) -> list[Path]:
    return [path for path in place.parent.iterdir() if path != place]


def _count_litter(place: Path, found: Counter[str]) -> None:
    """Temporary files that a kill left, which are made an hour old."""
    for path in _litter(place):
        found["temporary files left" if path.name.endswith(SUFFIX) else "OTHER LITTER"] += 1
        before_s = time.time() - STALE_S - 1
        os.utime(path, (before_s, before_s))


COMMANDS = (
    f"search {GRAPH} --gpus 4 --hardware {HARDWARE} --global-batch 8 --precision fp32 -o out.json",
    "estimate plan.json -o out.json",
    "schedule plan.json --trace out.json",
    "report plan.json --search none -o out.json",
    "export plan.json --to deepspeed -o out.json",
)


def commands_drilled(num: int, seed: int) -> Counter[str]:
    """Whole commands, killed at random moments; there is an old file, or the same as an undisturbed run writes."""
    draw, outcomes = random.Random(seed), Counter[str]()
    write_plan(small_plans()[2], Path("plan.json"))
    for number in range(num + len(COMMANDS)):
        words = COMMANDS[number % len(COMMANDS)].split()
        Path("out.json").write_text("old")
        began_s = time.monotonic()
        child = subprocess.Popen([sys.executable, "-m", "planner", *words], env=_environment(), **_SILENT)
        if number < len(COMMANDS):
            child.communicate()
            assert child.returncode == 0, words
            assert _is_whole(Path("out.json").read_bytes()), words
            _DURATIONS[words[0]] = time.monotonic() - began_s
            continue
        time.sleep(_DURATIONS[words[0]] * (0.5 + 0.5 * draw.random()))
        child.kill()
        child.communicate()
        content = Path("out.json").read_bytes()
        outcomes["old" if content == b"old" else "new, whole" if _is_whole(content) else "BROKEN"] += 1
        outcomes["temporary files left"] += sum(path.name.endswith(SUFFIX) for path in Path(".").iterdir())
        for path in Path(".").glob(f".*{SUFFIX}"):
            path.unlink()
    return outcomes


_DURATIONS: dict[str, float] = {}
_SILENT: Any = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}


def _is_whole(content: bytes) -> bool:
    """Whether it is all of a page, or all of a JSON document."""
    try:
        return content.rstrip().endswith(b"</html>") or bool(json.loads(content))
    except ValueError:
        return False


def _environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT)}


def main() -> int:
    """Kills writers and prints what came of it; 1 where a file was broken."""
    parser = options_of(__doc__, 1000, "kills of a writer", "kill_files")
    parser.add_argument("--commands", type=int, default=20, help="kills of whole commands")
    options = parser.parse_args()
    output = options.output.absolute()
    with working_folder() as folder:
        make_small_graph()
        outcomes = drilled(options.num, options.seed, folder)
        of_commands = commands_drilled(options.commands, options.seed)
    record = {"commit": commit(), "seed": options.seed, "num": options.num, "kinds": outcomes,
              "num_commands": options.commands, "commands": of_commands}  # fmt: skip
    save(output, {"kill_files": record})
    print(json.dumps(record, indent=1))
    bad = ("BROKEN", "OTHER LITTER", "litter behind the next write")
    return int(any(found[name] for found in (*outcomes.values(), of_commands) for name in bad))


if __name__ == "__main__":
    sys.exit(main())
