"""Fits the band of peak memory of each recipe to published runs: ``python -m benchmarks.memory_band``.

Every run with a measured peak is priced with its layout pinned, and its memory compared as it was measured: allocated
as tensors, reserved by the allocator, or seen by the driver. The memory model has few fitted parameters, and most of
these runs had no part in them (``planner/README.md``, Memory): their residuals are those of unseen runs.

A recipe has a band of its own where ``MIN_RUNS`` of its runs took at least ``TELLING_SHARE`` of their device; otherwise
the band is that of all runs, each source alike. What holds 95 % of the sources that it was made of holds less of the
next one: the spread above the prediction is as large as it takes for 95 % of a source that was left out, each in turn.
``--write`` puts the bands into the recipes' files; ``--page`` writes what is printed as a page.

What says whether runs fit, and had no part in these bands, are the runs that ran out of memory: of them and of the runs
that ran, the page of accuracy says how many ran out by the share of the device that was predicted. Peaks of runs that
were priced blind (``benchmarks/data/blind``) have no part either: most are what the allocator or the driver showed on
devices with room, where the allocator keeps what it need not hold.
"""

from __future__ import annotations

import argparse
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median

from benchmarks.calibrate import FAMILIES, put
from benchmarks.published.data import RUNS, shipped
from benchmarks.published.frameworks import study_recipe_names
from benchmarks.published.machines import cluster_of
from benchmarks.published.pricing import RunPricer
from benchmarks.published.summary import price_rows
from costmodels.memory_band import DEFAULT_RISK, MemoryBand, share_within, spreads
from costmodels.recipe import list_recipes
from planner.formats.run_table import Run, read_runs

MEMORY_RUNS = "memory_runs.csv"
MIN_RUNS = 20
MIN_SOURCES = 5  # of fewer, what one that is left out says of the rest is chance
TELLING_SHARE = 0.25  # of the device's memory: a run of a few per cent of it says little about plans that fill it
WIDER = tuple(round(1 + step / 20, 2) for step in range(21))  # a band is than the runs that it is made of
RISKS = (0.5, 0.25, 0.1, DEFAULT_RISK, 0.01)


@dataclass(frozen=True)
class Peak:
    """One run's peak: measured over predicted, and of its device's memory the share that was measured."""

    recipe: str
    source: str
    kind: str
    ratio: float
    share: float


Peaks = Sequence[Peak]


def main() -> int:
    """Exit code 0; also where there is no table of runs, which is said."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path, action="append", help="table of runs to fit to; may stand several times")
    parser.add_argument("--write", action="store_true", help="put the bands into the recipes' files")
    parser.add_argument("--page", type=Path, help="write what is printed here, as Markdown")
    options = parser.parse_args()
    files = options.runs or [path for path in map(shipped, (RUNS, MEMORY_RUNS)) if path is not None]
    if not files:
        print(f"no {RUNS} beside this checkout: name a table with --runs FILE.csv", file=sys.stderr)
        return 0
    peaks = peaks_of(files)
    bands = bands_of(peaks)
    text = "\n".join(page(peaks, bands))
    print(text)
    if options.page:
        options.page.write_text(text + "\n", encoding="utf-8")
    if options.write:
        for name in (*list_recipes(), *study_recipe_names()):
            put(name, {"memory_band": bands.get(name, bands[""]).model_dump(mode="json")})
    return 0


def peaks_of(files: Iterable[Path]) -> list[Peak]:
    """Every priced run with a measured peak."""
    pricer = RunPricer()
    measured = [
        run for path in files for run in read_runs(path) if isinstance(run, Run) and run.peak_memory_bytes is not None
    ]
    found: list[Peak] = []
    for run, row in zip(measured, price_rows(measured, pricer), strict=True):
        seen, predicted = row.measured_peak_memory_bytes, row.predicted_peak_memory_bytes
        if seen is not None and predicted is not None:
            whole = cluster_of(run).profile.device.memory_bytes.value
            found.append(
                Peak(row.recipe, run.source, run.peak_memory_kind or "unknown", seen / predicted, seen / whole)
            )
    return found


def by_source(peaks: Peaks) -> dict[str, list[float]]:
    """Ratios of each source."""
    found: dict[str, list[float]] = defaultdict(list)
    for peak in peaks:
        found[peak.source].append(peak.ratio)
    return dict(sorted(found.items()))


def band_of(peaks: Peaks) -> MemoryBand:
    """The band of these runs, each source alike."""
    sources = by_source(peaks)
    above, below = spreads(list(sources.values()))
    wider, held_out = enough(peaks)
    return MemoryBand(
        spread_above=round(above * wider, 4),
        spread_below=round(below, 4),
        num_runs=len(peaks),
        num_sources=len(sources),
        held_out_share=None if held_out is None else round(held_out, 3),
        source=f"benchmarks/memory_band.py, measured over predicted peak memory: {'; '.join(sources)}",
    )


def enough(peaks: Peaks) -> tuple[float, float | None]:
    """How many times as wide a band of these runs has to be to hold those of a source left out, and what it holds then.

    As wide as they are where they are of fewer than ``MIN_SOURCES``, the last of ``WIDER`` where none is enough.
    """
    wider, found = WIDER[0], None
    for wider in WIDER:
        shares = held_out_shares(peaks, wider)
        found = fmean(shares.values()) if shares else None
        if len(shares) < MIN_SOURCES or found is None or found >= 1 - DEFAULT_RISK:
            break
    return wider, found


def held_out_shares(peaks: Peaks, wider: float = 1.0) -> dict[str, float]:
    """Of each source's runs, the share within the factor at the default risk of a band fitted to the other sources.

    ``wider``: how many times as wide as those sources' own spread.
    """
    sources = by_source(peaks)
    found: dict[str, float] = {}
    for source, ratios in sources.items():
        others = [each for name, each in sources.items() if name != source]
        if others:
            above, below = spreads(others)
            band = MemoryBand(
                spread_above=above * wider, spread_below=below, num_runs=1, num_sources=1, source="held out"
            )
            found[source] = share_within(ratios, band.factor(DEFAULT_RISK))
    return found


def bands_of(peaks: Peaks) -> dict[str, MemoryBand]:
    """The band of each recipe that has its own, and under the empty name that of all runs."""
    found = {"": band_of(peaks)}
    for family in families_of(peaks):
        own = [peak for peak in peaks if peak.recipe in family]
        if sum(peak.share >= TELLING_SHARE for peak in own) >= MIN_RUNS:
            found |= dict.fromkeys(family, band_of(own))
    return found


def families_of(peaks: Peaks) -> list[tuple[str, ...]]:
    """Recipes of the runs; those that are fitted together stand together."""
    alone = {peak.recipe for peak in peaks} - {name for family in FAMILIES for name in family}
    return [*FAMILIES, *((name,) for name in sorted(alone))]


def page(peaks: Peaks, bands: Mapping[str, MemoryBand]) -> list[str]:
    """The lines of the report."""
    every = bands[""]
    factors = ", ".join(f"{every.factor(risk):.3f} at {risk:g}" for risk in RISKS)
    lines = [
        "# Peak memory: measured over predicted",
        "",
        f"{every.num_runs} runs of {every.num_sources} sources, each source alike: spread of ln(measured / predicted) "
        f"{every.spread_above:.3f} above the prediction and {every.spread_below:.3f} below. A device must have so many "
        f"times the predicted memory for a plan to fit but for a risk: {factors}.",
        "",
        f"| source | memory | runs | of them at least {TELLING_SHARE:.0%} of the device | median | largest | left out: "
        f"share within the factor at {DEFAULT_RISK:g} |",
        "|---|---|---|---|---|---|---|",
    ]
    held_out = held_out_shares(peaks, enough(peaks)[0])
    for source, ratios in by_source(peaks).items():
        own = [peak for peak in peaks if peak.source == source]
        kinds = ", ".join(sorted({peak.kind for peak in own}))
        telling = sum(peak.share >= TELLING_SHARE for peak in own)
        lines.append(
            f"| {source} | {kinds} | {len(own)} | {telling} | {median(ratios):.3f} | {max(ratios):.3f} | "
            f"{held_out[source]:.0%} |"
        )
    lines += ["", "| recipe | runs | spread above | below | factor at 0.05 |", "|---|---|---|---|---|"]
    for name, band in bands.items():
        lines.append(
            f"| {name or 'all others'} | {band.num_runs} | {band.spread_above:.3f} | {band.spread_below:.3f} | "
            f"{band.factor(DEFAULT_RISK):.3f} |"
        )
    return lines


if __name__ == "__main__":
    sys.exit(main())
