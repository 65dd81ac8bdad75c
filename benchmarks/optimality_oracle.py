"""Holds the search against trying everything: ``python -m benchmarks.optimality_oracle --num 500 --seed 0``.

Small random instances (models of 3 to 6 blocks on 2 to 8 devices, unlike ones among them, few micro-batches, pins): an
enumeration written from the definition of a plan, which shares no code with the search, has every step simulated and
every rank's memory counted by the real ledger. A plan that says OPTIMAL must be as fast as the best of all to 0.1 %;
the bound of one that says FEASIBLE must not be above it; where nothing is said to fit, nothing may.

Not enumerated: placements of operators on tensor-parallel ranks (the planner's own for each degree), and offloading.

Records are written after each instance, so Ctrl-C loses none and the same command goes on. Exit code 1 where search
and oracle differ.
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

from benchmarks.judging.graphs import Graphs
from benchmarks.judging.oracle import TOLERANCE, Oracle, disagreement, instance_of
from benchmarks.judging.questions import as_data, ask
from benchmarks.judging.records import RESULTS, Record, Records, arguments, run


def main() -> int:
    """Exit code 0; 1 where search and oracle differ; 130 after Ctrl-C."""
    parser = arguments(__doc__, 500, "instances")
    parser.add_argument("--unlike", action="store_true", help="models of a user's own, whose blocks are unlike")
    options = parser.parse_args()
    name = f"optimality_oracle{'_small' * options.small}{'_unlike' * options.unlike}_seed{options.seed}.json"
    asked = {"seed": options.seed, "small": options.small, **({"unlike": True} if options.unlike else {})}
    records = Records(options.output or RESULTS / name, asked)
    console = Console()
    with tempfile.TemporaryDirectory(prefix="optimality-oracle-") as folder:
        graphs = Graphs(Path(folder))

        def judge(index: int) -> Record:
            record = judged(index, options.seed, graphs, is_small=options.small, is_unlike=options.unlike)
            console.print(f"{index:4d} {record['status']:<12} {record['text']} [red]{record['differs']}[/]")
            return record

        is_whole = run(records, range(options.first, options.first + options.num), judge, console)
    found = summary(records.ordered())
    records.write(found)
    console.print(table_of(records.ordered()))
    console.print(found)
    return 130 if not is_whole else int(bool(found["num_different"]))


def judged(index: int, seed: int, graphs: Graphs, *, is_small: bool, is_unlike: bool) -> Record:
    """The record of one instance."""
    began = time.process_time()
    question = instance_of(seed, index, graphs, is_small=is_small, is_unlike=is_unlike)
    reply = ask(question)
    searched = time.process_time()
    best = Oracle.of(question, graphs).best()
    prediction = None if reply.plan is None else reply.plan.prediction
    return {
        "index": index,
        "text": str(question),
        "question": as_data(question),
        "status": reply.status,
        "step_time_s": None if prediction is None else prediction.step_time_s,
        "oracle_s": best.step_time_s,
        "oracle_plan": None if best.choice is None else str(best.choice),
        "num_layouts": best.num_layouts,
        "num_priced": best.num_priced,
        "num_unpriced_layouts": best.num_unpriced,
        "is_whole": best.is_whole,
        "differs": disagreement(reply, best),
        "search_cpu_s": round(searched - began, 2),
        "cpu_s": round(time.process_time() - began, 2),
    }


def summary(records: Sequence[Record]) -> Record:
    """The figures over all instances."""
    different = [record for record in records if record["differs"]]
    optimal = [record for record in records if record["status"] == "OPTIMAL"]
    gains = [1 - r["oracle_s"] / r["step_time_s"] for r in optimal if r["oracle_s"] is not None]
    return {
        "num_instances": len(records),
        "num_whole": sum(record["is_whole"] for record in records),
        "by_status": dict(Counter(record["status"] for record in records)),
        "num_different": len(different),
        "different": {record["index"]: record["differs"] for record in different},
        "num_optimal": len(optimal),
        "num_optimal_refuted": sum(gain > TOLERANCE for gain in gains),
        "largest_gain": max(gains, default=0.0),
        "tolerance": TOLERANCE,
        "cpu_s": round(sum(record["cpu_s"] for record in records), 1),
    }


def table_of(records: Sequence[Record]) -> Table:
    """Every instance on which search and oracle differ."""
    table = Table("instance", "question", "search s", "oracle s", "how", "the oracle's plan", title="Differences")
    for record in records:
        if record["differs"]:
            seconds = (f"{record[key]:.5g}" if record[key] else "-" for key in ("step_time_s", "oracle_s"))
            table.add_row(
                str(record["index"]), record["text"], *seconds, record["differs"], record["oracle_plan"] or "-"
            )
    return table


if __name__ == "__main__":
    sys.exit(main())
