"""Files and arguments that are almost sound: each is taken, or refused with an error that says so.

    python -m benchmarks.reliability.fuzz [--num N] [--seed S] [--target NAME ...] [--minutes M] [--output FILE.json]

Sound inputs are changed at random (``mutations``), the changed ones again where they were answered with words that no
other was: those led somewhere new. One process calls the readers themselves. Of what a reader takes, one in so many is
used as well: a plan is priced, drawn and exported, a graph is searched for, a search is solved. A defect is any error
that is none of planner's own, 2 seconds of CPU, or 1 GiB of memory beyond what the process had. ``--keep FOLDER`` keeps
the inputs of defects. A run goes on from what the file of results has, until N inputs of each target were tried.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import re
import resource
import signal
import sys
import time
import traceback
from collections import Counter
from collections.abc import Generator
from dataclasses import dataclass, field
from math import inf
from pathlib import Path

from benchmarks.reliability.drill import ROOT, Record, commit, options_of, read_results, save, working_folder
from benchmarks.reliability.fuzz_arguments import arguments_target
from benchmarks.reliability.fuzz_runs import all_run_targets
from benchmarks.reliability.fuzz_targets import Target, all_file_targets, make_small_graph
from planner.errors import PlannerError

MOST_CPU_S = 2.0
STUCK_CPU_S = 20.0  # then it is ended
MOST_BYTES = 2**30
BATCH = 50_000  # inputs of one seed; results are saved after each
MOST_KEPT = 2000  # changed inputs that are changed again
OURS = tuple(str(ROOT / package) for package in ("planner", "costmodels", "hardware_profiles", "benchmarks"))
_VALUES = re.compile(r"'[^']*'|\"[^\"]*\"|\d[\d,.e+-]*|\S*[/\\]\S*|[^\x20-\x7e]+")


class StuckError(BaseException):
    """An input took far too long."""


@dataclass
class Found:
    """What came of the inputs of one target."""

    num_tried: int = 0
    num_taken: int = 0
    num_used: int = 0
    num_use_refused: int = 0
    slowest_cpu_s: float = 0.0
    slowest_use_cpu_s: float = 0.0
    answers: set[str] = field(default_factory=set[str])
    defects: Counter[str] = field(default_factory=Counter[str])
    first: dict[str, bytes] = field(default_factory=dict[str, bytes])

    def defect(self, what: str, content: bytes) -> None:
        """One more of a kind."""
        self.defects[what] += 1
        self.first.setdefault(what, content)


def skeleton(error: BaseException) -> str:
    """The kind of an error and the words of its message that are not the input's."""
    return f"{type(error).__name__}: {_VALUES.sub('~', str(error)[:400])}"


def where(error: BaseException) -> str:
    """An error that should not be, with the last line of ours that it passed."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename.startswith(OURS)]
    place = f"{Path(frames[-1].filename).relative_to(ROOT)}:{frames[-1].lineno}" if frames else "?"
    return f"{type(error).__name__} at {place}: {_VALUES.sub('~', str(error))[:100]}"


def tried(target: Target, content: bytes, found: Found, *, use: bool) -> str:
    """Reads one input, uses it where it was taken and ``use`` says so; what was answered, without the input's words."""
    path = Path(target.file_name)
    path.write_bytes(content)
    found.num_tried += 1
    began_s = time.process_time()
    answer = "taken"
    try:
        value = target.read(path)
    except target.refusals as error:
        answer = skeleton(error)
    except (Exception, StuckError) as error:
        answer = where(error)
        found.defect(answer, content)
    else:
        found.num_taken += 1
        if use:
            answer += _used(target, path, value, found, content)
    spent_s = time.process_time() - began_s
    if not answer.startswith("taken and"):
        found.slowest_cpu_s = max(found.slowest_cpu_s, spent_s)
    if spent_s > MOST_CPU_S:
        found.defect(f"over {MOST_CPU_S:g} CPU s: {answer}", content)
    return answer


def _used(target: Target, path: Path, value: object, found: Found, content: bytes) -> str:
    found.num_used += 1
    began_s = time.process_time()
    try:
        target.use(path, value)
    except PlannerError as error:
        found.num_use_refused += 1
        return f" and {skeleton(error)}"
    except (Exception, StuckError) as error:
        found.defect(f"use: {where(error)}", content)
        return f" and {where(error)}"
    finally:
        found.slowest_use_cpu_s = max(found.slowest_use_cpu_s, time.process_time() - began_s)
    return " and used"


def fuzzed(target: Target, num: int, seed: int, *, use_every: int = 50, minutes: float | None = None) -> Found:
    """``num`` inputs, fewer where the minutes of CPU are over. The same seed tries the same inputs."""
    draw, found, pool = random.Random(f"{seed} {target.name}"), Found(), list(target.seeds)
    for content in target.seeds:  # what is imported when it is first needed is imported now
        tried(target, content, found, use=True)
    assert found.num_taken, target.name  # or the seeds are none
    found = Found(defects=found.defects, first=found.first)
    end_s = None if minutes is None else time.process_time() + 60 * minutes
    while found.num_tried < num and (end_s is None or time.process_time() < end_s):
        source = draw.choice(pool) if draw.random() < 0.5 else draw.choice(target.seeds)
        content = target.mutate(source, draw)
        with _not_stuck():
            answer = tried(target, content, found, use=found.num_taken % use_every == 0)
        if answer not in found.answers:
            found.answers.add(answer)
            if len(pool) < MOST_KEPT and len(content) < 2**17:
                pool.append(content)
    return found


@contextlib.contextmanager
def _not_stuck() -> Generator[None]:
    """StuckError within it after some seconds of CPU."""
    signal.setitimer(signal.ITIMER_PROF, STUCK_CPU_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def _stuck(_signal: int, _frame: object) -> None:
    raise StuckError(f"over {STUCK_CPU_S:g} CPU s")


def limit_memory() -> None:
    """From now on more than ``MOST_BYTES`` beyond what the process has is a MemoryError."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + MOST_BYTES, resource.RLIM_INFINITY))


def record_of(found: Found, spent_s: float, seed: int) -> Record:
    """What is written of a target."""
    return {
        "commit": commit(), "seed": seed, "num_tried": found.num_tried, "num_taken": found.num_taken,
        "num_used": found.num_used, "num_use_refused": found.num_use_refused, "num_answers": len(found.answers),
        "defects": dict(found.defects.most_common()), "cpu_s": round(spent_s, 1),
        "inputs_per_cpu_s": round(found.num_tried / spent_s, 1) if spent_s else None,
        "slowest_cpu_s": round(found.slowest_cpu_s, 3), "slowest_use_cpu_s": round(found.slowest_use_cpu_s, 3),
    }  # fmt: skip


def added(before: Record | None, new: Record) -> Record:
    """Of two runs of one target, the second with another seed."""
    if before is None:
        return new
    sums = {key: before[key] + new[key] for key in ("num_tried", "num_taken", "num_used", "num_use_refused", "cpu_s")}
    largest = {key: max(before[key], new[key]) for key in ("num_answers", "slowest_cpu_s", "slowest_use_cpu_s")}
    commits = before["commit"] if new["commit"] in before["commit"] else f"{before['commit']}, {new['commit']}"
    return {
        **new, **sums, **largest, "commit": commits, "cpu_s": round(sums["cpu_s"], 1),
        "defects": dict((Counter(before["defects"]) + Counter(new["defects"])).most_common()),
        "inputs_per_cpu_s": round(sums["num_tried"] / sums["cpu_s"], 1),
    }  # fmt: skip


def _all_batches(target: Target, options: argparse.Namespace, output: Path, keep: Path | None) -> bool:
    """Fuzzes one target, saving what came of it after each batch; whether there are defects."""
    record = read_results(output).get(target.name)
    left_s = inf if options.minutes is None else 60 * options.minutes
    while (tried := record["num_tried"] if record else 0) < options.num and left_s > 0:
        began_s = time.process_time()
        num, seed = min(BATCH, options.num - tried), record["seed"] + 1 if record else options.seed
        found = fuzzed(target, num, seed, use_every=options.use_every, minutes=None if left_s == inf else left_s / 60)
        spent_s = time.process_time() - began_s
        left_s -= spent_s
        record = added(record, record_of(found, spent_s, seed))
        save(output, {target.name: record})
        print(f"{target.name}: {record}", flush=True)
        for number, content in enumerate(found.first.values()):
            if keep is not None:
                keep.mkdir(exist_ok=True)
                (keep / f"{target.name}-{seed}-{number}".replace(" ", "_")).write_bytes(content)
    return bool(record and record["defects"])


def main() -> int:
    """Fuzzes the targets and prints what came of them; 1 where there were defects."""
    parser = options_of(__doc__, 10**6, "inputs of each target", "fuzz")
    parser.add_argument("--target", nargs="+", help="some targets alone")
    parser.add_argument("--minutes", type=float, help="of CPU, for each target at most")
    parser.add_argument("--use-every", type=int, default=50, help="of inputs that are taken, one in so many is used")
    parser.add_argument("--keep", type=Path, help="folder for inputs of defects")
    options = parser.parse_args()
    output, keep = options.output.absolute(), options.keep and options.keep.absolute()
    is_bad = False
    with working_folder():
        make_small_graph()
        targets = [*all_file_targets(), *all_run_targets(), arguments_target()]
        signal.signal(signal.SIGPROF, _stuck)
        limit_memory()
        for target in targets:
            if options.target and target.name not in options.target:
                continue
            is_bad |= _all_batches(target, options, output, keep)
    return int(is_bad)


if __name__ == "__main__":
    sys.exit(main())
