"""What was said of runs before anybody knew them, and what is said today (``benchmarks/blind_runs.py``)."""

from __future__ import annotations

import csv
import io
import subprocess
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from statistics import fmean, median

from benchmarks.published.data import BLIND_PRICES, ROOT
from benchmarks.published.frameworks import recipe_called
from benchmarks.published.machines import cluster_of
from benchmarks.published.pricing import RunPricer
from benchmarks.published.summary import Row, price_rows
from costmodels.bands import time_tier, with_bands
from planner.formats.run_table import Rejected, Run
from planner.output_file import write_text


@dataclass(frozen=True)
class Said:
    """What the planner said of one run: seconds, its band as measured over predicted, and what was known."""

    run: str
    predicted_s: float | None
    low: float | None
    high: float | None
    known: str
    recipe: str
    fits: str
    skipped: str
    commit: str

    def error(self, measured_s: float) -> float:
        """Predicted over measured, less one."""
        return (self.predicted_s or 0.0) / measured_s - 1

    def holds(self, measured_s: float) -> bool:
        """Whether the band holds what was measured."""
        ratio = measured_s / (self.predicted_s or 1.0)
        return (self.low or 0.0) <= ratio <= (self.high or 0.0)


def said_of(runs: Iterable[Run | Rejected]) -> list[Said]:
    """What is said of each today, on the plain profiles that users have."""
    listed, commit = list(runs), _commit()
    by_id = {run.id: run for run in listed if isinstance(run, Run)}
    return [_said(row, by_id.get(row.id), commit) for row in price_rows(listed, RunPricer(is_plain=True))]


def _said(row: Row, run: Run | None, commit: str) -> Said:
    if run is None or row.predicted_step_time_s is None:
        return Said(row.id, None, None, None, "", "", "", row.skipped or "no price", commit)
    recipe, device = recipe_called(row.recipe), cluster_of(run).profile.device.name
    band = with_bands(recipe, device, None, row.framework).error_band
    low, high = (None, None) if band is None else (band.low, band.high)
    tier = time_tier(recipe, device, None, row.framework).name.lower()
    return Said(row.id, row.predicted_step_time_s, low, high, tier, row.recipe, str(row.fits), "", commit)


def lines_by(
    runs: Sequence[Run | Rejected], said: Mapping[str, Said], key: Callable[[Run], str], separator: str = "  "
) -> list[str]:
    """A line for each group of rows: number, errors, and the share that the 80 % band holds; then all rows."""
    groups: dict[str, list[tuple[Said, float]]] = defaultdict(list)
    for run in runs:
        found = said.get(run.id)
        if isinstance(run, Run) and run.step_time_s and found is not None and found.predicted_s is not None:
            groups[key(run)].append((found, run.step_time_s))
    every = [pair for pairs in groups.values() for pair in pairs]
    lines: list[str] = []
    for name, pairs in (*sorted(groups.items()), *([("all", every)] if every else [])):
        errors = [found.error(measured) for found, measured in pairs]
        absolute = list(map(abs, errors))
        held = fmean(found.holds(measured) for found, measured in pairs)
        cells = (name, len(errors), f"{fmean(absolute):.1%}", f"{median(absolute):.1%}", f"{fmean(errors):+.1%}")
        lines.append(separator.join((*map(str, cells), f"{held:.0%}")))
    return lines


def first_prices() -> dict[str, Said]:
    """By run; empty where nothing is kept yet."""
    if not BLIND_PRICES.is_file():
        return {}
    with BLIND_PRICES.open(newline="", encoding="utf-8") as file:
        return {row["run"]: _read(row) for row in csv.DictReader(file)}


def _read(row: Mapping[str, str]) -> Said:
    predicted, low, high = (float(row[name]) if row[name] else None for name in ("predicted_s", "low", "high"))
    return Said(
        row["run"], predicted, low, high, row["known"], row["recipe"], row["fits"], row["skipped"], row["commit"]
    )


def write_first_prices(every: Iterable[Said]) -> None:
    """The file, whole or not at all."""
    lines = io.StringIO()
    table = csv.DictWriter(lines, [field.name for field in fields(Said)], lineterminator="\n")
    table.writeheader()
    for said in every:
        values: dict[str, str | float | None] = asdict(said)
        table.writerow({k: f"{value:.6g}" if isinstance(value, float) else value for k, value in values.items()})
    write_text(BLIND_PRICES, lines.getvalue())


def _commit() -> str:
    found = subprocess.run(
        ("git", "rev-parse", "--short", "HEAD"), cwd=ROOT, capture_output=True, text=True, check=False
    )
    return found.stdout.strip()
