"""Where the tables of published runs lie beside a checkout; they are no part of it."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DATA_FOLDERS = (ROOT / "shared" / "data", ROOT.parent / "shared" / "data")
RUNS, OUT_OF_MEMORY = "published_runs.csv", "out_of_memory_runs.csv"
UNSEEN = "published_runs_moe_fp8.csv"  # 8-bit precisions and experts: no parameter is fitted to these


def shipped(name: str) -> Path | None:
    """The table called ``name``, where it is at hand."""
    return next((folder / name for folder in DATA_FOLDERS if (folder / name).is_file()), None)


# Runs that nobody had priced when they were gathered, and what was said of each first.
BLIND_RUNS = ROOT / "benchmarks" / "data" / "blind" / "runs.csv"
BLIND_PRICES = ROOT / "benchmarks" / "data" / "blind" / "first_prices.csv"
