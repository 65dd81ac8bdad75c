"""Whether the search answers today what it answered when it was judged: what the judges found then holds today.

    python -m benchmarks.same_answers                        all questions of the three judges
    python -m benchmarks.same_answers audit --first 100      some of one judge's

The judges (``perturbation_audit``, ``optimality_oracle``, ``never_slower``) take two hours of CPU, most of it to try
other plans. After a change that is to make the search quicker and nothing else, it is enough that every question in
their records gets the same status, step time and bound, to the last digits but one. Where one does not, the judge has
to look again.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from math import isclose
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.progress import track

from benchmarks.judging.audit import question_of
from benchmarks.judging.graphs import Graphs
from benchmarks.judging.oracle import instance_of
from benchmarks.judging.pairs import Pair, pair_of
from benchmarks.judging.questions import Question, Reply, ask
from benchmarks.judging.records import RESULTS, Record

SAME = 1e-12
Questions = Callable[[int, int, Graphs, Path], Sequence[Question]]


class Said(NamedTuple):
    """Of the questions of one record."""

    status: list[str]
    step_time_s: list[float | None]
    bound_s: float | None = None  # as the audit counts it: of an OPTIMAL plan its step

    def is_like(self, other: Said) -> bool:
        """Whether it is the same answer."""
        pairs = [*zip(self.step_time_s, other.step_time_s, strict=True), (self.bound_s, other.bound_s)]
        return self.status == other.status and all(
            one == another if one is None or another is None else isclose(one, another, rel_tol=SAME)
            for one, another in pairs
        )


JUDGES: dict[str, tuple[str, Questions]] = {
    "audit": ("perturbation_audit", lambda seed, index, graphs, _: [question_of(seed, index, graphs)]),
    "oracle": ("optimality_oracle", lambda seed, index, graphs, _: [instance_of(seed, index, graphs)]),
    "pairs": ("never_slower", lambda seed, index, graphs, folder: _both(pair_of(seed, index, graphs, folder))),
}


def main() -> int:
    """Exit code 0; 1 where an answer is another one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("judge", nargs="?", choices=JUDGES, help="default: all")
    parser.add_argument("--first", type=int, default=0, help="index of the first question")
    parser.add_argument("--num", type=int, help="so many questions; default: all")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    console, num_different = Console(), 0
    for judge in JUDGES if options.judge is None else [options.judge]:
        path = RESULTS / f"{JUDGES[judge][0]}_seed{options.seed}.json"
        records: list[Record] = json.loads(path.read_text(encoding="utf-8"))["records"]
        stop = None if options.num is None else options.first + options.num
        asked, began, known = records[options.first : stop], time.process_time(), num_different
        for record, then, now in differences(judge, options.seed, track(asked, judge, console=console, transient=True)):
            console.print(f"{judge} {record['index']}: {record['text']}: {then} then, {now} now")
            num_different += 1
        taken_s = time.process_time() - began
        console.print(f"{judge}: {num_different - known} of {len(asked)} answers differ, {taken_s:.0f} s of CPU")
    return int(num_different > 0)


def differences(judge: str, seed: int, records: Iterable[Record]) -> Iterator[tuple[Record, Said, Said]]:
    """The records whose answers are others today, with both answers."""
    questions = JUDGES[judge][1]
    with tempfile.TemporaryDirectory(prefix="same-answers-") as folder:
        graphs = Graphs(Path(folder))
        for record in records:
            before = said_then(record)
            now = said_now([ask(each) for each in questions(seed, record["index"], graphs, Path(folder))])
            if not before.is_like(now if before.bound_s is not None else now._replace(bound_s=None)):
                yield record, before, now


def said_then(record: Record) -> Said:
    """By a record of any judge."""
    status, seconds = record["status"], record.get("step_time_s")
    if isinstance(status, list):
        return Said(status, record["step_time_s"])
    return Said([status], [seconds], record.get("bound_s"))


def said_now(replies: Sequence[Reply]) -> Said:
    """By the search."""
    plans = [reply.plan for reply in replies]
    seconds = [None if plan is None or plan.prediction is None else plan.prediction.step_time_s for plan in plans]
    search = None if plans[0] is None else plans[0].search
    bound_s = seconds[0] if search is None or search.status == "OPTIMAL" else search.bound_step_time_s
    return Said([reply.status for reply in replies], seconds, bound_s)


def _both(pair: Pair) -> list[Question]:
    return [pair.before, pair.after]


if __name__ == "__main__":
    sys.exit(main())
