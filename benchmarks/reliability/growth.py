"""Many searches in one process: its memory does not grow.

    python -m benchmarks.reliability.growth [--num 1000] [--output FILE.json]

Searches of four unlike kinds take turns. Resident memory is read after each tenth of them; growth is counted from the
end of the first tenth, the warm-up, to the end of the last.
"""

from __future__ import annotations

import json
import resource
import sys
from pathlib import Path

from benchmarks.reliability.drill import commit, options_of, save, working_folder
from benchmarks.reliability.fuzz_targets import make_small_graph, small_request
from planner.api import find_plan
from planner.layout.layout import Pins

MOST_GROWTH = 0.05
PINS = (Pins(pp=2), Pins(tp=2), Pins(dp=4, zero=3), Pins(pp=2, tp=2))


def resident_bytes() -> int:
    """Memory of this process that lies in RAM."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def measured(num: int) -> list[int]:
    """Resident memory after each tenth of ``num`` searches."""
    found: list[int] = []
    for number in range(num):
        find_plan(small_request(pins=PINS[number % len(PINS)]))
        if (number + 1) * 10 % num < 10:
            found.append(resident_bytes())
    return found


def main() -> int:
    """Searches and prints the growth; 1 where it is above the bar."""
    options = options_of(__doc__, 1000, "searches", "growth").parse_args()
    output = options.output.absolute()
    with working_folder():
        make_small_graph()
        found = measured(options.num)
    growth = found[-1] / found[0] - 1
    save(output, {"growth": {"commit": commit(), "num": options.num, "resident_bytes": found, "growth": growth}})
    print(json.dumps({"resident_mib": [round(each / 2**20, 1) for each in found], "growth": growth}))
    return int(growth > MOST_GROWTH)


if __name__ == "__main__":
    sys.exit(main())
