"""Ctrl-C at random moments of `planner search`: what comes of it.

    python -m benchmarks.ctrl_c [--moments 20] [--seed 0] [--limit S]

Each search is run once undisturbed, which says how long it takes. Then it is run again and interrupted after a share
of that time that is drawn at random, from the first instant to the last. Good outcomes are: exit code 130 with a plan,
whole and written, or without one and with nothing written; and 0, where the search ended first. Anything else is
listed: a traceback, another code, half a file. What a process does before its first line runs, the interpreter's own
start, is counted apart: no program can answer for that.
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

SEARCHES = {
    "gpt2-1.5b on 8": ("gpt2-1.5b", "--gpus", "8", "--hardware", "dgx-a100-80gb", "--global-batch", "64"),
    "llama3-8b on 64": ("llama3-8b", "--gpus", "64", "--hardware", "dgx-h100-80gb", "--global-batch", "128"),
    "llama3-70b on 512": ("llama3-70b", "--gpus", "512", "--hardware", "dgx-h100-80gb", "--global-batch", "512"),
}


def start(arguments: tuple[str, ...], plan: Path) -> subprocess.Popen[str]:
    """The search as a process that listens to Ctrl-C, wherever this one runs."""
    return subprocess.Popen(
        [sys.executable, "-m", "planner", "search", *arguments, "--json", "-o", str(plan)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )


def outcome(child: subprocess.Popen[str], folder: Path, limit_s: float) -> str:
    """One phrase for what the child did."""
    try:
        out, err = child.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        child.kill()
        child.communicate()
        return f"BAD: still running {limit_s:g} s later"
    files = [path.name for path in folder.iterdir()]
    if "Traceback" in err:
        return "the interpreter's start" if "planner/" not in err else "BAD: traceback"
    if child.returncode == -signal.SIGINT:
        return "the interpreter's start"
    if child.returncode not in (0, 130):
        return f"BAD: exit code {child.returncode}"
    if not files and not out:
        return "interrupted without a plan" if child.returncode == 130 else "BAD: code 0 without a plan"
    try:
        same = json.loads(out) == json.loads((folder / "plan.json").read_text(encoding="utf-8"))
    except (OSError, json.JSONDecodeError):
        same = False
    if files != ["plan.json"] or not same:
        return f"BAD: half a plan ({', '.join(files) or 'no file'})"
    return "interrupted with a plan" if child.returncode == 130 else "ended first"


def run(arguments: tuple[str, ...], after_s: float | None, limit_s: float) -> tuple[str, float]:
    """What a search does that is interrupted after so many seconds, and how many it still takes then."""
    with tempfile.TemporaryDirectory() as name:
        began_s = time.monotonic()
        child = start(arguments, Path(name) / "plan.json")
        if after_s is not None:
            time.sleep(after_s)
            began_s = time.monotonic()
            child.send_signal(signal.SIGINT)
        return outcome(child, Path(name), limit_s), time.monotonic() - began_s


def main() -> int:
    """Runs the searches and prints the outcomes; 1 where one was bad."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--moments", type=int, default=20, help="interruptions of each search")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--limit", type=float, default=600.0, help="seconds after which a process counts as stuck")
    options = parser.parse_args()
    draw, is_bad = random.Random(options.seed), False
    for name, arguments in SEARCHES.items():
        run(arguments, None, options.limit)  # traces the model
        whole, whole_s = run(arguments, None, options.limit)
        found: Counter[str] = Counter()
        longest_s = 0.0
        for _ in range(options.moments):
            phrase, seconds = run(arguments, draw.random() * whole_s, options.limit)
            found[phrase] += 1
            longest_s = max(longest_s, seconds)
        print(f"{name}: {whole} after {whole_s:.1f} s; an answer at most {longest_s:.1f} s after Ctrl-C")
        for phrase, count in found.most_common():
            print(f"    {count:4}  {phrase}")
        is_bad = is_bad or any(phrase.startswith("BAD") for phrase in found)
    return int(is_bad)


if __name__ == "__main__":
    sys.exit(main())
