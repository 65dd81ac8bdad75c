"""``python -m benchmarks.frozen_prices record FILE`` draws cases, prices them and keeps both.

``compare [FILE]`` prices the cases of FILE (without one: those of the repository) with the code as it is, and says what
differs; it ends with 1 where anything does.

Times and bytes may differ by 1e-12 of themselves. What is below 1e-9 of its total (the step time, or the memory of the
fullest rank) may differ by 1e-12 of that, and so may the bubble and the time of sending, which are what is left of a
makespan without its work. Zero equals only zero otherwise. Decisions and placement programs are equal or not.
"""

from __future__ import annotations

import sys
import time
from collections import defaultdict
from pathlib import Path

from benchmarks.frozen_prices import frozen
from benchmarks.frozen_prices.adapter import Json
from benchmarks.frozen_prices.frozen import TOLERANCE, Difference

MOST_LINES = 20


def record(path: Path) -> int:
    """Writes the file."""
    drawn = frozen.draw()
    frozen.write(path, {"cases": drawn, "results": frozen.results_of(drawn)})
    print(f"{path}: {path.stat().st_size / 1e6:.2f} MB, {_counts(frozen.read(path))}")
    return 0


def compare(path: Path) -> int:
    """Prints what differs."""
    began, kept = time.monotonic(), frozen.read(path)
    drawn, before = kept["cases"], kept["results"]
    now = frozen.results_of(drawn)
    found = frozen.all_price_differences(drawn, before, now)
    numbers = [each for each in found if isinstance(each.before, float) and isinstance(each.now, float)]
    decided = [each for each in found if not (isinstance(each.before, float) and isinstance(each.now, float))]
    programs = _differences("program", drawn["placements"], before["placements"], now["placements"])
    searches = _differences("search", drawn["searches"], before["searches"], now["searches"])
    print(_counts(kept), f"in {time.monotonic() - began:.0f} s")
    wrong = _report("numbers of prices and bounds", numbers)
    wrong += _report("decisions and rows of prices", decided)
    wrong += _report("placement programs and solutions", programs)
    wrong += _report("searches", searches)
    for case, a, b in zip(drawn["searches"], before["searches"], now["searches"], strict=True):
        setting = case["setting"]
        print(
            f"CPU s {a['cpu_s']:6.1f} -> {b['cpu_s']:6.1f} {setting['model']} {setting['num_devices']} {case['pins']}"
        )
    return 1 if wrong else 0


def _differences(name: str, drawn: list[Json], before: list[Json], now: list[Json]) -> list[Difference]:
    pairs = zip(drawn, before, now, strict=True)
    return [found for case, a, b in pairs for found in frozen.differences(a, b, f"{name} {case}")]


def _report(what: str, found: list[Difference]) -> int:
    """How many differ by more than the tolerance; prints the worst, by term."""
    wrong = sorted((each for each in found if each.relative > TOLERANCE), key=lambda each: -each.relative)
    rounding = max((each.relative for each in found if each.relative <= TOLERANCE), default=0.0)
    print(f"{what}: {len(wrong)} differ; {len(found) - len(wrong)} more by rounding, at most {rounding:.1e}")
    by_term: dict[str, list[Difference]] = defaultdict(list)
    for each in wrong:
        by_term[each.term].append(each)
    for term, each in list(by_term.items())[:MOST_LINES]:
        slight = sum(one.of_total <= TOLERANCE for one in each)
        print(
            f"  {term}: {len(each)} ({slight} of them within {TOLERANCE:g} of the total), worst {each[0].relative:.1e}"
        )
        print(f"    {str(each[0].before)[:80]} -> {str(each[0].now)[:80]} in {each[0].where}")
    return len(wrong)


def _counts(kept: Json) -> str:
    layouts = [layout for case in kept["results"]["prices"] for layout in case]
    prices = [price for layout in layouts for price in layout["prices"]]
    numbers = sum(1 for price in prices for _, value in frozen.leaves(price) if isinstance(value, float))
    programs = sum(len(programs) for programs in kept["results"]["placements"])
    settings, searches = len(kept["cases"]["prices"]), len(kept["results"]["searches"])
    return (
        f"{len(prices)} prices of {len(layouts)} layouts in {settings} settings ({numbers} numbers), "
        f"{programs} placement programs, {searches} searches"
    )


def main() -> int:
    """The exit status."""
    if sys.argv[1:2] == ["record"] and len(sys.argv) == 3:
        return record(Path(sys.argv[2]))
    if sys.argv[1:2] == ["compare"] and len(sys.argv) <= 3:
        return compare(Path(sys.argv[2]) if len(sys.argv) == 3 else frozen.SHIPPED)
    print(__doc__, file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
