"""Predictions of published runs that nobody had priced before: ``python -m benchmarks.blind_runs``.

``benchmarks/data/blind/runs.csv`` holds them, in the columns of the table of published runs. They were gathered by
readers who saw neither this code nor its predictions, from sources that no recipe was fitted to. The first price of
each row is kept (``first_prices.csv``) and is never written again, so that two figures stand side by side: what was
said before anybody knew a row, and what is said today. Later changes of the models were made with these rows in view,
and a few recipes are fitted to theirs (``benchmarks/calibrate.py``); the first figure is the honest one.

    --record    prices the rows that have no first price yet, those that could not be priced included, and keeps it
"""

from __future__ import annotations

import argparse
import sys

from benchmarks.published.blind import Said, first_prices, lines_by, said_of, write_first_prices
from benchmarks.published.data import BLIND_RUNS
from planner.formats.run_table import Run, read_runs


def main() -> int:
    """Exit code 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--record", action="store_true", help="keep the first price of rows that have none")
    options = parser.parse_args()
    runs = list(read_runs(BLIND_RUNS))
    first = first_prices()
    if options.record:
        new = [run for run in runs if run.id not in first or first[run.id].predicted_s is None]
        first |= {said.run: said for said in said_of(new)}
        write_first_prices(first.values())
    today = {said.run: said for said in said_of(runs)}
    for title, said in (("first price", first), ("today", today)):
        print(f"\n{title}")
        print("\n".join(lines_by(runs, said, lambda run: run.source)))
    print("\nrow by row: measured s, first price, today")
    for run in runs:
        if isinstance(run, Run) and run.step_time_s is not None:
            errors = (_error(said.get(run.id), run.step_time_s) for said in (first, today))
            print(f"  {run.id[:60]:<60} {run.step_time_s:9.4g} {'  '.join(errors)}")
    return 0


def _error(said: Said | None, measured_s: float) -> str:
    if said is None:
        return "      -"
    return f"{said.error(measured_s):+7.1%}" if said.predicted_s is not None else f"skipped: {said.skipped}"


if __name__ == "__main__":
    sys.exit(main())
