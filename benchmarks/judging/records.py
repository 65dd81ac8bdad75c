"""Records of a judge in a file of results: written after each case, so that a run may end at any time and go on later.

Records of other code than today's are not counted: the file names a digest of the packages that plan and price.
"""

from __future__ import annotations

import argparse
import hashlib
import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from planner.output_file import write_text

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results"
PACKAGES = ("planner", "costmodels", "hardware_profiles", "benchmarks/judging")

Record = dict[str, Any]


def code_digest() -> str:
    """Of all code and data that search, price and judge."""
    digest = hashlib.sha256()
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*")):
            if path.suffix in (".py", ".json"):
                digest.update(path.relative_to(ROOT).as_posix().encode())
                digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


class Records:
    """Records of the cases 0, 1, ... of one seed."""

    def __init__(self, path: Path, settings: Mapping[str, Any]) -> None:
        self.path, self.settings = path, {**settings, "code": code_digest()}
        self.by_index: dict[int, Record] = {}
        if path.exists():
            known = json.loads(path.read_text(encoding="utf-8"))
            if known["settings"] == self.settings:
                self.by_index = {record["index"]: record for record in known["records"]}

    def put(self, record: Record) -> None:
        """Adds ``record`` and writes the file."""
        self.by_index[record["index"]] = record
        self.write({})

    def write(self, summary: Mapping[str, Any]) -> None:
        """The file, whole or not at all."""
        document = {"settings": self.settings, "summary": summary, "records": self.ordered()}
        write_text(self.path, json.dumps(document, indent=1) + "\n")

    def ordered(self) -> list[Record]:
        """By index."""
        return [self.by_index[index] for index in sorted(self.by_index)]


def arguments(description: str | None, num: int, of: str) -> argparse.ArgumentParser:
    """The options of a judge that looks at ``num`` cases by default; ``of``: what they are called."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num", type=int, default=num, help=of)
    parser.add_argument("--first", type=int, default=0, help="index of the first one")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--small", action="store_true", help="small models and clusters, as in the tests")
    parser.add_argument("--output", type=Path, help="file of records; default: benchmarks/results/")
    return parser


def run(records: Records, indices: Iterable[int], judge: Callable[[int], Record], console: Console) -> bool:
    """Judges the cases that have no record yet. False where Ctrl-C ended it: all records are kept."""
    todo = [index for index in indices if index not in records.by_index]
    if records.by_index:
        console.print(f"{len(records.by_index)} cases are known already: {records.path.name}")
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("starting", total=len(todo))
        try:
            for index in todo:
                progress.update(task, description=f"case {index}")
                records.put(judge(index))
                progress.advance(task)
        except KeyboardInterrupt:
            console.print(f"stopped; {len(records.by_index)} cases are in {records.path}: the same command goes on")
            return False
    return True
