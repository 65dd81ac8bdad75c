"""More of anything never makes the best plan slower: ``python -m benchmarks.never_slower --num 300 --seed 0``.

Pairs of random questions to the search, of which the second has more memory, more bandwidth, one pin fewer or twice
the devices. Its plan may not be slower by more than 0.1 %, or by more than the gap that it states itself. Twice the
devices are asked for where the search may leave some idle, which is tried first; where all must be used, more may well
be slower.

Records are written after each pair, so Ctrl-C loses none and the same command goes on. Exit code 1 where a plan is
slower.
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
from benchmarks.judging.pairs import TOLERANCE, idle_question, leaves_devices_idle, lost, pair_of, without_devices
from benchmarks.judging.questions import Reply, as_data, ask
from benchmarks.judging.records import RESULTS, Record, Records, arguments, run


def main() -> int:
    """Exit code 0; 1 where a second plan is slower; 130 after Ctrl-C."""
    options = arguments(__doc__, 300, "pairs").parse_args()
    name = f"never_slower{'_small' if options.small else ''}_seed{options.seed}.json"
    records = Records(options.output or RESULTS / name, {"seed": options.seed, "small": options.small})
    console = Console()
    indices = range(options.first, options.first + options.num)
    with tempfile.TemporaryDirectory(prefix="never-slower-") as folder:
        graphs = Graphs(Path(folder))

        def judge(index: int) -> Record:
            record = judged(index, options.seed, graphs, Path(folder), is_small=options.small)
            console.print(f"{index:4d} {record['change']:<18} {record['text']} [red]{record['lost']}[/]")
            return record

        may_idle = leaves_devices_idle(ask(idle_question(graphs)))
        if not may_idle:
            console.print("the search uses every device: twice the devices are not asked for")
        is_whole = run(records, indices if may_idle else without_devices(indices), judge, console)
    found = {**summary(records.ordered()), "may_leave_devices_idle": may_idle}
    records.write(found)
    console.print(table_of(records.ordered()))
    console.print(found)
    return 130 if not is_whole else int(bool(found["num_slower"]))


def judged(index: int, seed: int, graphs: Graphs, folder: Path, *, is_small: bool) -> Record:
    """The record of one pair."""
    began = time.process_time()
    pair = pair_of(seed, index, graphs, folder, is_small=is_small)
    before, after = ask(pair.before), ask(pair.after)
    return {
        "index": index,
        "text": str(pair.before),
        "change": pair.change,
        "question": as_data(pair.before),
        "status": [before.status, after.status],
        "step_time_s": [_seconds(before), _seconds(after)],
        "lost": lost(pair, before, after),
        "cpu_s": round(time.process_time() - began, 2),
    }


def _seconds(reply: Reply) -> float | None:
    prediction = None if reply.plan is None else reply.plan.prediction
    return None if prediction is None else prediction.step_time_s


def summary(records: Sequence[Record]) -> Record:
    """The figures over all pairs."""
    slower = [record for record in records if record["lost"]]
    compared = [record for record in records if record["step_time_s"][0] is not None]
    return {
        "num_pairs": len(records),
        "num_compared": len(compared),
        "compared_by_change": dict(Counter(record["change"] for record in compared)),
        "num_slower": len(slower),
        "slower_by_change": dict(Counter(record["change"] for record in slower)),
        "tolerance": TOLERANCE,
        "cpu_s": round(sum(record["cpu_s"] for record in records), 1),
    }


def table_of(records: Sequence[Record]) -> Table:
    """Every pair whose second plan is worse."""
    table = Table("pair", "more of", "question", "before s", "after s", "how", title="Slower with more")
    for record in records:
        if record["lost"]:
            seconds = ("-" if each is None else f"{each:.5g}" for each in record["step_time_s"])
            table.add_row(str(record["index"]), record["change"], record["text"], *seconds, record["lost"][:80])
    return table


if __name__ == "__main__":
    sys.exit(main())
