"""Tries to refute the word OPTIMAL: ``python -m benchmarks.perturbation_audit --num 200 --seed 0``.

Each of many random searches (presets, clusters with odd numbers of devices and with unlike ones, batches, pins) is
answered through the public API. The plan is then changed as a user would change its file: one module over a border of
stages, a prime factor of one degree given to another, twice or half the micro-batch, another stage of ZeRO, schedule,
number of stages a rank, the recomputation of a block, of a stage, of all blocks. Every changed plan is priced as
``planner estimate`` prices it. One that obeys the pins, fits, and is faster by more than 0.1 % refutes the plan; of a
plan that says FEASIBLE, one that is faster than its bound. What ``estimate`` refuses to price is counted by itself: it
says nothing.

Records are written after each search, so Ctrl-C loses none and the same command goes on where it stopped. Exit code 1
where a plan was refuted, where search and estimate name different prices for one plan, or where a search crashed.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.judging.audit import TOLERANCE, Verdict, audited, question_of
from benchmarks.judging.graphs import Graphs
from benchmarks.judging.questions import CRASHED, as_data
from benchmarks.judging.records import RESULTS, Record, Records, arguments, run


def main() -> int:
    """Exit code 0; 1 where something was refuted; 130 after Ctrl-C."""
    options = arguments(__doc__, 200, "searches").parse_args()
    name = f"perturbation_audit{'_small' if options.small else ''}_seed{options.seed}.json"
    records = Records(options.output or RESULTS / name, {"seed": options.seed, "small": options.small})
    console = Console()
    with tempfile.TemporaryDirectory(prefix="perturbation-audit-") as folder:
        graphs = Graphs(Path(folder))

        def judge(index: int) -> Record:
            record = judged(index, options.seed, graphs, is_small=options.small)
            show(record, console)
            return record

        indices = range(options.first, options.first + options.num)
        is_whole = run(records, indices, judge, console)
    found = summary(records.ordered())
    records.write(found)
    console.print(table_of(records.ordered()))
    console.print(found)
    return 130 if not is_whole else int(any(found[key] for key in ("num_refuted", "num_priced_apart", "num_crashed")))


def judged(index: int, seed: int, graphs: Graphs, *, is_small: bool) -> Record:
    """The record of one search."""
    began = time.process_time()
    question = question_of(seed, index, graphs, is_small=is_small)
    with tempfile.TemporaryDirectory(prefix="edited-plans-") as folder:
        status, reason, verdict = audited(question, graphs, Path(folder))
    record: Record = {"index": index, "text": str(question), "question": as_data(question), "status": status}
    if reason:
        record["reason"] = reason
    if verdict is not None:
        record.update(_described(verdict, graphs.folder))
    return {**record, "cpu_s": round(time.process_time() - began, 2)}


def _described(verdict: Verdict, folder: Path) -> Record:
    """``folder``: what reasons leave out of the files that they name, as it is another one each time."""
    return {
        "step_time_s": verdict.plan_s,
        "bound_s": verdict.bound_s,
        "agrees_with_estimate": verdict.agrees,
        "edits": dict(verdict.num_edits),
        "refused": dict(verdict.num_refused),
        "refused_because": {
            reason.replace(f"{folder}/", ""): number for reason, number in verdict.reasons.most_common(5)
        },
        "num_refutations": len(verdict.refutations),
        "gain": verdict.best_gain,
        "improvement": verdict.improvement,
        "refutations": [
            {"kind": edit.kind, "edit": edit.text, "plan": str(edit.choice), "step_time_s": seconds}
            for edit, seconds in verdict.refutations[:5]
        ],
    }


def summary(records: Sequence[Record]) -> Record:
    """The figures over all searches."""
    planned = [record for record in records if "edits" in record]
    refuted = [record for record in planned if record["num_refutations"]]
    feasible = [record for record in planned if record["status"] != "OPTIMAL"]
    edits, refused, kinds = (Counter[str]() for _ in range(3))
    for record in planned:
        edits.update(record["edits"])
        refused.update(record["refused"])
        kinds.update({each["kind"] for each in record["refutations"]})
    return {
        "num_searches": len(records),
        "by_status": dict(Counter(record["status"] for record in records)),
        "num_refuted": len(refuted),
        "largest_gain": max((record["gain"] for record in refuted), default=0.0),
        "refuted": [record["index"] for record in refuted],
        "refuted_by": dict(kinds),
        "num_crashed": sum(record["status"] == CRASHED for record in records),
        "num_feasible_improved": sum(record["improvement"] > 0 for record in feasible),
        "largest_improvement": max((record["improvement"] for record in feasible), default=0.0),
        "num_priced_apart": sum(not record["agrees_with_estimate"] for record in planned),
        "num_edits_priced": sum(edits.values()),
        "num_edits_refused": sum(refused.values()),
        "refused_by_kind": dict(refused),
        "tolerance": TOLERANCE,
        "cpu_s": round(sum(record["cpu_s"] for record in records), 1),
    }


def show(record: Record, console: Console) -> None:
    """One line a search."""
    gain = f"[red]refuted by {record['gain']:.2%}[/]" if record.get("num_refutations") else ""
    console.print(f"{record['index']:4d} {record['status']:<12} {record['text']} {gain}", highlight=False)


def table_of(records: Sequence[Record]) -> Table:
    """Every refutation, the fastest of each plan."""
    table = Table("search", "question", "said s", "changed s", "gain", "change", title="Refuted plans")
    for record in records:
        for each in record.get("refutations", [])[:1]:
            times = f"{record['bound_s']:.5g}", f"{each['step_time_s']:.5g}", f"{record['gain']:.2%}"
            table.add_row(str(record["index"]), record["text"], *times, f"{each['kind']}: {each['edit']}")
    return table


if __name__ == "__main__":
    sys.exit(main())
