"""Fits how unlike devices are to runs that differ in their number alone: ``python -m benchmarks.straggler_fit``.

Two runs of one source, model and layout but for the number of data-parallel ranks should be predicted equally well. By
what measured over predicted grows from the smaller to the larger, over e(n') - e(n) of ``costmodels.stragglers``, is
the spread that would explain it; predictions are made without stragglers. Beside published runs stand weak-scaling
measurements that give utilisation alone (``benchmarks/data/scaling``): there all of the loss is counted, since nothing
else of the step changes.

Each source gives the median over its pairs, and the spread is the median over sources, at least 0: sources whose
networks slow down with scale, or whose slow hosts were taken out, do not move it. Held out: the same with each source
left out, and the error that remains of its pairs.
"""

from __future__ import annotations

import argparse
import csv
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from math import exp, log
from pathlib import Path
from statistics import fmean, median

from benchmarks.published.data import RUNS, shipped
from benchmarks.published.pricing import RunPricer
from benchmarks.published.summary import Row, price_rows
from costmodels.stragglers import expected_largest
from hardware_profiles.catalog import list_profiles
from hardware_profiles.schema import DeviceProfile
from planner.formats.run_table import Run, read_runs

WEAK_SCALING = Path(__file__).resolve().parent / "data" / "scaling" / "weak_scaling.csv"
LEAST_FACTOR = 2.0  # between the numbers of devices of a pair
REFERENCES = (64, 128, 256, 512, 1024)


@dataclass(frozen=True)
class Pair:
    """Two runs that differ in scale: the growth of ln(measured / predicted), and that of e(n)."""

    source: str
    num_devices: tuple[int, int]
    growth: float
    reach: float

    @property
    def spread(self) -> float:
        """The spread that explains the growth."""
        return self.growth / self.reach


Pairs = Sequence[Pair]


def main() -> int:
    """Exit code 0; also where there is no table of runs, which is said."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path, help="table of runs to fit to")
    parser.add_argument("--page", type=Path, help="write what is printed here, as Markdown")
    options = parser.parse_args()
    path = options.runs or shipped(RUNS)
    if path is None:
        print(f"no {RUNS} beside this checkout: name a table with --runs FILE.csv", file=sys.stderr)
        return 0
    runs = [run for run in read_runs(path) if isinstance(run, Run) and run.step_time_s is not None]
    rows = price_rows(runs, RunPricer(devices=without_stragglers()))
    text = "\n".join(page([*pairs_of(runs, rows), *weak_scaling(WEAK_SCALING)], runs, rows))
    print(text)
    if options.page:
        options.page.write_text(text + "\n", encoding="utf-8")
    return 0


def without_stragglers() -> dict[str, DeviceProfile]:
    """Every shipped device as if all of its kind were alike."""
    alike = {"slowdown_spread": None, "slowdown_beyond_devices": None}
    return {profile.device.name: profile.device.model_copy(update=alike) for profile in list_profiles()}


def pairs_of(runs: Sequence[Run], rows: Sequence[Row]) -> list[Pair]:
    """Every two priced runs that differ in data-parallel ranks, and so in devices and sequences, alone."""
    groups: dict[tuple[object, ...], list[tuple[int, float]]] = defaultdict(list)
    for run, row in zip(runs, rows, strict=True):
        if row.error is None:
            continue
        hardware, layout = run.hardware, run.layout
        alike = (
            run.source,
            run.architecture,
            replace(hardware, num_devices=1),
            replace(layout, dp=1, global_batch_size=1),
            run.software,
        )
        groups[alike].append((hardware.num_devices, -log(1 + row.error)))
    return [
        pair
        for alike, found in groups.items()
        for one, other in combinations(sorted(found), 2)
        if (pair := pair_between(str(alike[0]), one, other)) is not None
    ]


def pair_between(source: str, one: tuple[int, float], other: tuple[int, float]) -> Pair | None:
    """Of (devices, ln(measured / predicted)) of two runs, the smaller first; None where they are too near."""
    (few, error), (many, error_of_many) = one, other
    if many < LEAST_FACTOR * few:
        return None
    return Pair(source, (few, many), error_of_many - error, expected_largest(many) - expected_largest(few))


def weak_scaling(path: Path) -> list[Pair]:
    """Pairs of measurements of utilisation; the time of a step goes with its inverse."""
    groups: dict[tuple[str, str], list[tuple[int, float]]] = defaultdict(list)
    with path.open(encoding="utf-8", newline="") as file:
        for line in csv.DictReader(file):
            name = f"{line['source'].split(',')[0]}, {line['system']}"
            groups[name, line["model"]].append((int(line["num_devices"]), -log(float(line["mfu"]))))
    return [
        pair
        for (name, _), found in groups.items()
        for one, other in combinations(sorted(found), 2)
        if (pair := pair_between(name, one, other)) is not None
    ]


def by_source(pairs: Iterable[Pair]) -> dict[str, list[Pair]]:
    """Pairs of each source."""
    found: dict[str, list[Pair]] = defaultdict(list)
    for pair in pairs:
        found[pair.source].append(pair)
    return dict(sorted(found.items()))


def fitted_spread(sources: Mapping[str, Pairs]) -> float:
    """The median over sources of the median over pairs; never below 0."""
    return max(0.0, median(median(pair.spread for pair in pairs) for pairs in sources.values()))


def remaining(pairs: Pairs, spread: float) -> float:
    """Mean absolute growth of ln(measured / predicted) that the spread leaves."""
    return fmean(abs(pair.growth - spread * pair.reach) for pair in pairs)


def page(pairs: Pairs, runs: Sequence[Run], rows: Sequence[Row]) -> list[str]:
    """The lines of the report."""
    sources = by_source(pairs)
    spread = fitted_spread(sources)
    lines = [
        "# How unlike devices are: runs that differ in their number alone",
        "",
        f"Spread {spread:.4f}, the median over {len(sources)} sources ({len(pairs)} pairs). Error: mean absolute "
        "growth of ln(measured / predicted) between the two runs of a pair, without stragglers, and with the spread "
        "of the other sources.",
        "",
        "| source | pairs | devices | median spread | others' spread | error without | error with |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, own in sources.items():
        others = fitted_spread({other: found for other, found in sources.items() if other != name})
        devices = [number for pair in own for number in pair.num_devices]
        lines.append(
            f"| {name} | {len(own)} | {min(devices)} to {max(devices)} | {median(pair.spread for pair in own):.4f} | "
            f"{others:.4f} | {remaining(own, 0.0):.4f} | {remaining(own, others):.4f} |"
        )
    lines += [
        "",
        "The recipes were fitted to these runs without stragglers, so their rates hold those of jobs of usual size. "
        "Step time of all runs, if stragglers count beyond so many devices:",
        "",
        "| beyond | MAPE without | MAPE with | larger runs | their MAPE without | with |",
        "|---|---|---|---|---|---|",
    ]
    errors = [
        (run.hardware.num_devices, row.error) for run, row in zip(runs, rows, strict=True) if row.error is not None
    ]
    for reference in REFERENCES:
        grown = [(n, error, grown_error(error, n, reference, spread)) for n, error in errors]
        larger = [(before, after) for n, before, after in grown if n > reference]
        lines.append(
            f"| {reference} | {fmean(abs(before) for _, before, _ in grown):.3%} | "
            f"{fmean(abs(after) for *_, after in grown):.3%} | {len(larger)} | "
            f"{fmean(abs(before) for before, _ in larger):.2%} | {fmean(abs(after) for _, after in larger):.2%} |"
        )
    return lines


def grown_error(error: float, num_devices: int, reference: int, spread: float) -> float:
    """The error of a prediction once the whole step is slower by the slowest of so many devices."""
    reach = expected_largest(max(num_devices, reference)) - expected_largest(reference)
    return (1 + error) * exp(spread * reach) - 1


if __name__ == "__main__":
    sys.exit(main())
