"""What the page of accuracy says of peak memory: with what probability plans fit, and how far peaks were off."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import pairwise
from math import inf
from statistics import fmean

from benchmarks.published.data import BLIND_RUNS
from benchmarks.published.frameworks import UNKNOWN, recipe_called
from benchmarks.published.pricing import RunPricer
from benchmarks.published.summary import Row, in_figures, price_rows
from costmodels.memory_band import DEFAULT_RISK
from planner.formats.run_table import read_runs

SHARES = (0.0, 0.7, 0.8, 0.85, 0.9, 0.95, 1.0, 1.05, 1.1, inf)  # of a device's memory, the borders of the table's lines


def memory_sections(names: Iterable[str], ran: Sequence[Row], failed: Sequence[Row]) -> str:
    """The sections on memory; ``names``: recipes, ``failed``: runs that ran out of it."""
    return "\n".join(part for part in (_bands(names), who_ran_out(ran, failed), _blind()) if part)


def _bands(names: Iterable[str]) -> str:
    """What the recipes say of measured over predicted peak memory."""
    lines = [
        "## Memory: the probability of fitting\n",
        "The spread of ln(measured / predicted) peak memory, above and below the prediction, and what a device must",
        "have over what is predicted for a plan to fit with 95 % (`python -m benchmarks.memory_band --write`; sources",
        "and their shares within the factor when they are left out stand in",
        "`benchmarks/results/memory_band_published-runs_*.md`). `planner search` takes no more than that part of a",
        "device by prediction (`--memory-risk`).\n",
        "| recipe | spread above | below | factor | runs | sources |",
        "|---|---|---|---|---|---|",
    ]
    for name in ("planner", *sorted({*names} - {"planner"})):
        band = recipe_called(name).memory_band
        if band is not None:
            lines.append(
                f"| {name} | {band.spread_above:.3f} | {band.spread_below:.3f} | {band.factor(DEFAULT_RISK):.3f} | "
                f"{band.num_runs} | {band.num_sources} |"
            )
    return "\n".join(lines) + "\n"


def who_ran_out(ran: Sequence[Row], failed: Sequence[Row]) -> str:
    """How many runs ran out of memory, by the share of a device that they were predicted to take."""
    recipes = {row.recipe for row in failed if row.device_share is not None}
    labelled = (*((row, False) for row in ran), *((row, True) for row in failed))
    found = [
        (row.device_share, is_failed)
        for row, is_failed in labelled
        if row.recipe in recipes and row.device_share is not None
    ]
    if not found:
        return ""
    lines = [
        "What came of it: runs of recipes of which some ran out of memory, by the largest share of a device that is",
        "predicted. No run of this table had a part in the bands by having failed.\n",
        "| predicted share of the device | runs | ran out of memory | share |",
        "|---|---|---|---|",
    ]
    for low, high in pairwise(SHARES):
        inside = [is_failed for share, is_failed in found if low <= share < high]
        if inside:
            bounds = f"above {low:.0%}" if high == inf else f"{low:.0%} to {high:.0%}"
            lines.append(f"| {bounds} | {len(inside)} | {sum(inside)} | {fmean(inside):.0%} |")
    return "\n".join(lines) + "\n"


def _blind() -> str:
    """Peaks of the rows that were priced blind, of frameworks that are known; nothing was fitted to them."""
    if not BLIND_RUNS.is_file():
        return ""
    by_source: dict[tuple[str, str], list[float]] = defaultdict(list)
    for row in price_rows(read_runs(BLIND_RUNS), RunPricer(is_plain=True)):
        if row.memory_error is not None and row.framework != UNKNOWN:
            by_source[row.source, row.memory_kind].append(row.memory_error)
    every = [error for errors in by_source.values() for error in errors]
    lines = [
        "Peaks of blind rows (below), where the framework is known and the kind of memory is said. No memory model",
        "was fitted to them. What the allocator has reserved, and what the driver shows, on a device with room is more",
        "than a run needs: PyTorch keeps freed blocks, and gives them back before it fails. One thing was mended with",
        "them in view: models of Hugging Face under DeepSpeed keep a copy in 32 bits of each norm's input.\n",
        "| source | memory | rows | MAPE | median | bias |",
        "|---|---|---|---|---|---|",
        *(f"| {source} | {kind} | {in_figures(errors)} |" for (source, kind), errors in sorted(by_source.items())),
        f"| all | | {in_figures(every)} |",
    ]
    return "\n".join(lines) + "\n"
