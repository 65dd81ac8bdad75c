"""What all drills share: their options, a folder to work in, and their results in a file."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import tempfile
from collections.abc import Generator
from pathlib import Path
from typing import Any

from planner.output_file import write_text

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results"
Record = dict[str, Any]


def options_of(description: str | None, num: int, what: str, name: str) -> argparse.ArgumentParser:
    """The options of the drill ``name``, which tries ``num`` of ``what`` by default."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num", type=int, default=num, help=what)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=RESULTS / f"reliability_{name}.json", help="file of results")
    return parser


def commit() -> str:
    """The commit that is tried, with ``+`` where planner, costmodels or hardware_profiles are not as it has them."""
    git = ["git", "-C", str(ROOT)]
    name = subprocess.run([*git, "rev-parse", "--short=10", "HEAD"], capture_output=True, text=True, check=True)
    packages = ("planner", "costmodels", "hardware_profiles")
    changes = subprocess.run([*git, "status", "--porcelain", "--", *packages], capture_output=True, check=True)
    return name.stdout.strip() + ("+" if changes.stdout.strip() else "")


def read_results(path: Path) -> dict[str, Record]:
    """The records of a file of results, by name; none where there is no file."""
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def save(path: Path, records: dict[str, Record]) -> None:
    """Puts ``records`` into the file of results, by name; records of other names stay."""
    write_text(path, json.dumps(read_results(path) | records, indent=1, sort_keys=True) + "\n")


@contextlib.contextmanager
def working_folder() -> Generator[Path]:
    """A new folder, which is the current one meanwhile; the cache of traces is kept in it."""
    before, cache = os.getcwd(), os.environ.get("XDG_CACHE_HOME")
    with tempfile.TemporaryDirectory(prefix="planner-drill-") as name:
        os.chdir(name)
        os.environ["XDG_CACHE_HOME"] = f"{name}/cache"
        try:
            yield Path(name)
        finally:
            os.chdir(before)
            os.environ.pop("XDG_CACHE_HOME")
            if cache is not None:
                os.environ["XDG_CACHE_HOME"] = cache
