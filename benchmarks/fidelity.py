"""Predictions against published, measured runs: ``python -m benchmarks.fidelity --runs FILE.csv [--oom FILE.csv]``.

Every row is priced by the planner's own cost models with everything pinned. Prints measured, predicted and error row by
row, then the summary; ``--json`` writes both. With ``--anchors N`` N rows of each cluster calibrate it, by the code of
``planner calibrate``, and only the rest is priced; the same rows without calibration are summed up beside them.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from benchmarks.published.anchors import Comparison, anchored, print_comparison
from benchmarks.published.data import OUT_OF_MEMORY, RUNS, UNSEEN, shipped
from benchmarks.published.page import Sections, write_page
from benchmarks.published.pairs import POINTS, Pair, counts_of, pairs_of
from benchmarks.published.pricing import RunPricer
from benchmarks.published.summary import Row, Summary, document, price_rows, summarise
from hardware_profiles.catalog import load_profile
from hardware_profiles.schema import ClusterProfile
from planner.errors import InputError, PlannerError
from planner.formats.run_table import Run, read_out_of_memory, read_runs
from planner.output_file import check_output, write_text


def main() -> int:
    """Exit code 0; 2 where a file is missing, is no table of runs, or cannot be written."""
    options = _parser().parse_args()
    runs_file = options.runs or shipped(RUNS)
    if runs_file is None:
        print(f"no {RUNS} beside this checkout: name a table with --runs FILE.csv", file=sys.stderr)
        return 0
    failed_file = options.oom or (shipped(OUT_OF_MEMORY) if options.runs is None else None)
    comparison: Comparison | None = None
    try:
        check_output(options.json, reads=[runs_file, failed_file])
        pricer = RunPricer(profiles=dict(map(named_profile, options.profile)))
        runs = list(read_runs(runs_file))
        if options.anchors:
            found = anchored((run for run in runs if isinstance(run, Run)), options.anchors, pricer)
            runs = [run for run in runs if run.id not in found.ids]
            comparison = Comparison(found, tuple(price_rows(runs, pricer)))
            pricer = found.calibrated(pricer)
        rows = price_rows(runs, pricer)
        failed = [] if failed_file is None else price_rows(read_out_of_memory(failed_file), pricer)
    except (OSError, ValueError, PlannerError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    summary = summarise(rows, failed)
    priced = {run.id: run for run in runs if isinstance(run, Run)}
    pairs = pairs_of(priced.values(), {row.id: row for row in rows})
    if options.page:
        unseen_file = shipped(UNSEEN)
        unseen = [] if unseen_file is None else price_rows(read_runs(unseen_file), pricer)
        write_page(options.page, priced, rows, Sections(summary, tuple(pairs), tuple(failed), tuple(unseen)))
    if not options.quiet:
        print_rows(rows)
    print_summary(summary)
    print_pairs(pairs)
    if comparison is not None:
        print_comparison(comparison, priced, rows)
    if options.json:
        written = {**document(rows, failed, summary), "pairs": [asdict(pair) for pair in pairs]}
        if comparison is not None:
            written["anchors"] = comparison.document(priced, rows)
        try:
            write_text(options.json, json.dumps(written, indent=1) + "\n")
        except InputError as error:
            print(f"error: {error}", file=sys.stderr)
            return 2
    return 0


def named_profile(text: str) -> tuple[str, ClusterProfile]:
    """``CLUSTER=FILE``; ValueError where it is not, or the file holds no profile."""
    cluster, _, file = text.partition("=")
    if not cluster or not file:
        raise ValueError(f"--profile {text!r} is not CLUSTER=FILE")
    return cluster, load_profile(file)


def print_rows(rows: Sequence[Row]) -> None:
    """One line a run."""
    print(f"{'run':<58} {'measured s':>11} {'predicted s':>11} {'error':>7} {'GiB':>7} {'pred.':>7} {'error':>7}")
    for row in rows:
        if row.skipped is not None:
            print(f"{row.id[:58]:<58} skipped: {row.skipped}")
            continue
        seen = row.measured_peak_memory_bytes
        memory = (
            f"{seen / 2**30:7.2f} {(row.predicted_peak_memory_bytes or 0) / 2**30:7.2f} {row.memory_error or 0:+7.1%}"
            if seen is not None
            else ""
        )
        measured = f"{row.measured_step_time_s:11.4f}" if row.measured_step_time_s is not None else f"{'':11}"
        error = f"{row.error:+7.1%}" if row.error is not None else f"{'':7}"
        print(f"{row.id[:58]:<58} {measured} {row.predicted_step_time_s:11.4f} {error} {memory}")


def print_summary(summary: Summary) -> None:
    """The figures of the summary, and the confusion table of feasibility."""
    unknown = f", of an unknown framework {summary.num_unknown_framework}" if summary.num_unknown_framework else ""
    print(f"\nrows {summary.num_rows}, skipped {summary.num_skipped}{unknown}")
    print(
        f"step time: MAPE {_percent(summary.mape)}, median {_percent(summary.median_ape)}, "
        f"90th percentile {_percent(summary.p90_ape)}, bias {_percent(summary.bias)}"
    )
    for source, error in summary.mape_by_source.items():
        print(f"  {error:6.1%}  {source}")
    print(f"peak memory: MAPE {_percent(summary.memory_mape)} {summary.memory_mape_by_kind or ''}")
    tau = summary.kendall_tau_within_groups
    print(
        f"{summary.num_groups} groups: Kendall's tau {'-' if tau is None else f'{tau:.3f}'}, "
        f"regret mean {_percent(summary.mean_regret)}, max {_percent(summary.max_regret)}"
    )
    print("feasibility      called infeasible   called feasible")
    wrong, ran = summary.num_ran_called_infeasible, summary.num_ran_priced
    right, failed = summary.num_oom_called_infeasible, summary.num_oom_priced
    print(f"  ran            {wrong:17d} {ran - wrong:17d}")
    print(f"  out of memory  {right:17d} {failed - right:17d}")
    print(f"  precision {_percent(summary.oom_precision)}, recall {_percent(summary.oom_recall)}")


def print_pairs(pairs: Sequence[Pair]) -> None:
    """How many controlled pairs come out right, kind by kind."""
    points = f"{POINTS * 100:.0f}"
    for kind, found in counts_of(pairs).items():
        clear = f"of {found.clear} more than {points} % apart {found.clear_ordered}"
        print(
            f"pairs, {kind}: {found.number}, in order {found.ordered} ({clear}), within {points} points {found.close}"
        )


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path, help="table of runs, columns as in shared/data/published_runs.csv")
    parser.add_argument("--oom", type=Path, help="table of configurations that ran out of memory")
    parser.add_argument("--json", type=Path, help="write rows and summary here")
    parser.add_argument("--page", type=Path, help="write the accuracy page and its chart here")
    parser.add_argument("--anchors", type=int, default=0, metavar="N", help="rows of each cluster that calibrate it")
    parser.add_argument(
        "--profile", action="append", default=[], metavar="CLUSTER=FILE", help="profile of a cluster's rows"
    )
    parser.add_argument("--quiet", action="store_true", help="print the summary alone")
    return parser


if __name__ == "__main__":
    sys.exit(main())
