"""Prices cases, and tells two sets of results apart."""

from __future__ import annotations

import gzip
import hashlib
import json
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.frozen_prices import adapter, cases
from benchmarks.frozen_prices.adapter import Json, Table

SHIPPED = Path(__file__).parent / "frozen_prices.json.gz"
TOLERANCE = 1e-12
# What is smaller than this share of its total counts by the total: rounding of large numbers that cancel.
SMALL = 1e-9
# What is left of the makespan when the work is taken from it: differences of large numbers, which count by the step.
REMAINDERS = ("bubble", "pipeline_communication")
PROGRAMS_IN_FULL = 12  # of the others the digest alone is kept


class Difference(NamedTuple):
    """A number that is not what it was. ``of_total``: the difference over the step time, or the fullest rank."""

    where: str
    term: str
    before: Any
    now: Any
    relative: float
    of_total: float


def draw() -> Json:
    """Every case."""
    prices = [_said(cases.draw_prices(setting), "draw") for setting in cases.settings()]
    return {"prices": prices, "placements": list(cases.draw_placements()), "searches": list(cases.draw_searches())}


def _said(case: Json, what: str, seconds: float | None = None) -> Json:
    setting = case["setting"]
    words = [str(setting[name]) for name in ("model", "hardware", "num_devices", "precision", "recipe")]
    print(what, *words, "" if seconds is None else f"{seconds:.1f} s", flush=True)
    return case


def results_of(drawn: Json) -> Json:
    """What every case costs with the code as it is."""
    found = {
        "prices": [_timed(case, "price", _priced) for case in drawn["prices"]],
        "placements": [
            _timed(case, "place", _placed, i < PROGRAMS_IN_FULL) for i, case in enumerate(drawn["placements"])
        ],
        "searches": [
            _timed(case, "search", lambda case: adapter.searched(case["setting"], case["pins"]))
            for case in drawn["searches"]
        ],
    }
    return json.loads(json.dumps(found))  # as it is read again: lists and plain text


def _timed(case: Json, what: str, function: Any, *arguments: object) -> Any:
    began = time.monotonic()
    found = function(case, *arguments)
    _said(case, what, time.monotonic() - began)
    return found


def _priced(case: Json) -> list[Json]:
    table = Table(case["setting"], case["layouts"])
    return [
        {"bounds": lower, "cuts": table.cuts(i), "prices": [table.price(i, starts) for starts in case["cuts"][i]]}
        for i, lower in enumerate(table.bounds())
    ]


def _placed(case: Json, in_full: bool) -> list[Json]:
    found = adapter.placements(case["setting"], case["tp"], case["sequence_parallel"])
    for program in found:
        problem = program.pop("problem")
        text = json.dumps(problem, sort_keys=True, separators=(",", ":"))
        program["digest"] = hashlib.sha256(text.encode()).hexdigest()
        if in_full:
            program["problem"] = json.loads(text)
    return found


def read(path: Path) -> Json:
    """A record: cases and results."""
    return json.loads(gzip.decompress(path.read_bytes()))


def write(path: Path, record: Json) -> None:
    """The same bytes for the same record."""
    text = json.dumps(record, separators=(",", ":"))
    path.write_bytes(gzip.compress(text.encode(), compresslevel=9, mtime=0))


def leaves(tree: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Every number, text and None of a tree, by its path."""
    if isinstance(tree, dict):
        for name, value in tree.items():
            yield from leaves(value, (*path, str(name)))
    elif isinstance(tree, list):
        for place, value in enumerate(tree):
            yield from leaves(value, (*path, str(place)))
    else:
        yield path, tree


def differences(before: Any, now: Any, where: str, totals: dict[str, float] | None = None) -> Iterator[Difference]:
    """Every leaf that differs by more than rounding; ``totals`` by the first word of a path."""
    old, new = dict(leaves(before)), dict(leaves(now))
    for path in [*old, *(path for path in new if path not in old)]:
        a, b = old.get(path, "absent"), new.get(path, "absent")
        if a == b or path[-1] == "cpu_s":
            continue
        term = ".".join(word for word in path if not word.isdigit())
        relative, of_total = _relative(a, b, path[-1], (totals or {}).get(path[0], 0.0))
        if relative > 0:
            yield Difference(f"{where} {'.'.join(path)}", term, a, b, relative, of_total)


def _relative(a: Any, b: Any, name: str, total: float) -> tuple[float, float]:
    if not (isinstance(a, float) and isinstance(b, float)):
        return float("inf"), float("inf")  # a decision, or a row that only one has
    scale, of_total = max(abs(a), abs(b)), abs(a - b) / total if total else float("inf")
    if name in REMAINDERS and total:
        return of_total, of_total
    if a * b == 0:
        return float("inf"), of_total
    return (of_total if scale < SMALL * total else abs(a - b) / scale), of_total


def all_price_differences(drawn: Json, before: Json, now: Json) -> list[Difference]:
    """Of all settings."""
    settings = zip(drawn["prices"], before["prices"], now["prices"], strict=True)
    return [found for case, old, new in settings for found in price_differences(case, old, new)]


def sample(kept: Json, places: Sequence[int], step: int) -> Json:
    """A smaller record: of the settings at these places every ``step``-th layout, and no programs or searches."""
    settings = [(kept["cases"]["prices"][i], kept["results"]["prices"][i], n % step) for n, i in enumerate(places)]
    drawn = [
        {**case, "layouts": case["layouts"][first::step], "cuts": case["cuts"][first::step]}
        for case, _, first in settings
    ]
    nothing: Json = {"placements": [], "searches": []}
    results = [result[first::step] for _, result, first in settings]
    return {"cases": {"prices": drawn, **nothing}, "results": {"prices": results, **nothing}}


def totals_of(price: Json) -> dict[str, float]:
    """By which the smallest numbers of a price count: the step time, and the memory of the fullest rank."""
    peak = max(sum(held) for rows in price["memory"].values() for held in zip(*rows.values(), strict=True))
    host = max([0.0, *(value for _, value in leaves(price["host"]) if isinstance(value, float))])
    return {
        "steady": price["steady"]["step_time_s"], "exact": price["exact"]["step_time_s"], "memory": peak, "host": host,
    }  # fmt: skip


def price_differences(case: Json, before: list[Json], now: list[Json]) -> Iterator[Difference]:
    """Of all layouts of one setting."""
    name = " ".join(str(value) for value in case["setting"].values())
    for i, (old, new) in enumerate(zip(before, now, strict=True)):
        where = f"{name} | layout {i} {_short(case['layouts'][i])}"
        yield from differences(old["bounds"], new["bounds"], f"{where} | bounds")
        yield from differences(old["cuts"], new["cuts"], f"{where} | cuts")
        for starts, a, b in zip(case["cuts"][i], old["prices"], new["prices"], strict=True):
            yield from differences(a, b, f"{where} | {starts} |", totals_of(a))


def _short(layout: Json) -> str:
    return " ".join(f"{name}={value}" for name, value in layout.items() if value not in (None, []))
