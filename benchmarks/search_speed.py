"""CPU seconds of a whole `planner search`, from a traced graph to the plan.

    python -m benchmarks.search_speed bars [NAME ...]     the searches whose seconds are promised
    python -m benchmarks.search_speed curves              against GPUs, layers and divisors
    python -m benchmarks.search_speed limits              what --time-limit 1 answers, and when

The graph is traced before, as it is by the first search of a model; every search then is a process of its own, and what
is counted is what the system says that it computed, user and system time, start-up with it. Placements that were solved
before are read, and so is the byte code of our modules, as it is once they are installed. On a busy machine CPU seconds
are larger than on a quiet one: with ``--runs N`` each search runs N times, and the least counts. How fast the machine
is says a loop of plain Python, timed before and behind.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from costmodels.vocabulary.choices import Precision
from planner.request import load_graph


class Bar(NamedTuple):
    """A search and the CPU seconds that it may take."""

    arguments: tuple[str, ...]
    most_s: float


def asked(
    model: str, gpus: int, hardware: str, batch: int | None = None, seq_len: int | None = None
) -> tuple[str, ...]:
    """The arguments of one search."""
    found = [model, "--gpus", str(gpus), "--hardware", hardware]
    found += [] if batch is None else ["--global-batch", str(batch)]
    return (*found, *(() if seq_len is None else ("--seq-len", str(seq_len))))


PACKAGES = ("planner", "costmodels", "hardware_profiles")
A100, H100, H800 = "dgx-a100-80gb", "dgx-h100-80gb", "h800-sxm"
BARS = {
    "gpt3-175b on 64": Bar(asked("gpt3-175b", 64, A100), 2.5),
    "gpt3-175b on 512": Bar(asked("gpt3-175b", 512, A100), 2.5),
    "gpt3-175b on 3072": Bar(asked("gpt3-175b", 3072, A100, 1536), 2.5),
    "gpt3-175b on 4096": Bar(asked("gpt3-175b", 4096, A100), 2.5),
    "llama3-405b on 16384, 8k": Bar(asked("llama3-405b", 16_384, H100, 2048, 8192), 5.0),
    "llama3-405b on 16384, 131k": Bar(asked("llama3-405b", 16_384, H100, 128, 131_072), 5.0),
    "deepseek-v3 on 2048": Bar(asked("deepseek-v3", 2048, H800, 8192, 4096), 8.0),
    "megatron-1008b on 512": Bar(asked("megatron-1008b", 512, A100), 4.0),
    "llama3-70b on 131072": Bar(asked("llama3-70b", 131_072, H100), 5.0),
}
CURVES = {
    "GPUs": [asked("llama3-70b", 2**k, H100, 2**14) for k in (6, 8, 10, 12)],
    "layers": [asked(model, 512, A100, 1024) for model in ("gpt3-6.7b", "gpt3-13b", "megatron-76.1b", "gpt3-175b")],
    "divisors": [asked("gpt3-175b", gpus, A100, gpus) for gpus in (1016, 1024, 1000, 960, 1008)],
}


class Run(NamedTuple):
    """What one search took and said."""

    cpu_s: float
    wall_s: float
    code: int
    said: str


def searched(arguments: Iterable[str]) -> Run:
    """One search in a process of its own."""
    before, began_s = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    command = [sys.executable, "-m", "planner", "search", *arguments, "--json"]
    done = subprocess.run(command, capture_output=True, check=False, text=True)
    wall_s, after = time.monotonic() - began_s, resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu_s = after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime
    if done.returncode:
        return Run(cpu_s, wall_s, done.returncode, done.stderr.strip().splitlines()[-1])
    search = json.loads(done.stdout)["search"]
    return Run(cpu_s, wall_s, 0, f"{search['status']} of {search['num_candidates']:,}, gap {search['gap']:.1%}")


def _traced(arguments: tuple[str, ...]) -> None:
    """Puts the graph of a search into the cache."""
    named = dict(zip(arguments[1::2], arguments[2::2], strict=True))
    load_graph(arguments[0], int(named["--seq-len"]) if "--seq-len" in named else None, Precision.BF16)


def least(arguments: tuple[str, ...], num_runs: int) -> Run:
    """Of so many runs of one search that of the fewest CPU seconds."""
    _traced(arguments)
    return min((searched(arguments) for _ in range(num_runs)), key=lambda run: run.cpu_s)


def loop_s() -> float:
    """CPU seconds of ten million squares in plain Python."""
    began_s = time.process_time()
    sum(i * i for i in range(10**7))
    return time.process_time() - began_s


def bars(names: list[str], num_runs: int) -> None:
    """Every promised search, and where one took longer."""
    for name in names or BARS:
        bar = BARS[name]
        run = least(bar.arguments, num_runs)
        mark = "" if run.cpu_s <= bar.most_s else "  TOO LONG"
        print(f"{name:28} {run.cpu_s:6.1f} s CPU of {bar.most_s:4.1f}  {run.said}{mark}", flush=True)


def curves(num_runs: int) -> None:
    """Seconds against what makes a search large."""
    for name, searches in CURVES.items():
        print(name)
        for arguments in searches:
            run = least(arguments, num_runs)
            print(f"    {arguments[0]:16} {arguments[2]:>6} GPUs {run.cpu_s:6.1f} s CPU  {run.said}", flush=True)


def _nothing(folder: str) -> Run:
    """A process that only starts up."""
    return searched((str(Path(folder) / "absent.json"), "--gpus", "8"))


def limits() -> None:
    """Wall seconds of searches with a limit of one second, beside those of a process that only starts up."""
    with tempfile.TemporaryDirectory() as folder:
        nothing = _nothing(folder)
    print(f"start-up: {nothing.wall_s:.2f} s")
    for name, bar in BARS.items():
        _traced(bar.arguments)
        run = searched((*bar.arguments, "--time-limit", "1"))
        print(f"{name:28} {run.wall_s:6.2f} s, exit code {run.code}  {run.said}", flush=True)


def main() -> None:
    """Runs what is named."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="?", choices=("bars", "curves", "limits"), default="bars")
    parser.add_argument("--runs", type=int, default=1, metavar="N", help="of each search, but of limits")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of bars: {', '.join(BARS)}")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
        os.environ["PYTHONPYCACHEPREFIX"] = folder
        subprocess.run([sys.executable, "-m", "compileall", "-qq", *PACKAGES], check=True)  # as an installer does
        _nothing(folder)  # compiles the modules of others that all searches import
        before_s = loop_s()
        _run(options)
        print(f"ten million squares in plain Python: {before_s:.2f} s before, {loop_s():.2f} s behind")


def _run(options: argparse.Namespace) -> None:
    if options.what == "bars":
        bars(options.names, options.runs)
    elif options.what == "curves":
        curves(options.runs)
    else:
        limits()


if __name__ == "__main__":
    main()
