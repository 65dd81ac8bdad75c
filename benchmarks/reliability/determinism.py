"""The same search again and again, with other hash seeds and numbers of threads: plans are the same to the last byte.

    python -m benchmarks.reliability.determinism [--num 20] [--at-once 1] [--seed S] [--output FILE.json]

Each run is a process of its own that searches and writes a plan; ``--at-once 50`` runs so many beside each other on one
cache. The seconds that a search took are left out.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from benchmarks.reliability.drill import ROOT, commit, options_of, read_results, save, working_folder
from benchmarks.reliability.fuzz_targets import GRAPH, HARDWARE, make_small_graph

SEARCHES = {
    "two small blocks": f"{GRAPH} --gpus 4 --hardware {HARDWARE} --global-batch 8 --precision fp32",
    "moe-tiny": "moe-tiny --gpus 8 --hardware dgx-a100-80gb --global-batch 32",
    "gpt2-1.5b": "gpt2-1.5b --gpus 8 --hardware dgx-a100-80gb --global-batch 64",
}
_ELAPSED = re.compile(rb'"elapsed_s": [\d.e+-]+')


def plan_digest(words: list[str], run: int) -> str:
    """Of the plan that run number ``run`` writes."""
    variables = {"PYTHONHASHSEED": str(run), "OMP_NUM_THREADS": str(1 + run % 2), "PYTHONPATH": str(ROOT)}
    plan = Path(f"plan{run}.json")
    command = [sys.executable, "-m", "planner", "search", *words, "-o", str(plan)]
    subprocess.run(command, env=os.environ | variables, check=True, capture_output=True)
    content, count = _ELAPSED.subn(b"", plan.read_bytes())
    assert count == 1, count
    return hashlib.sha256(content).hexdigest()


def main() -> int:
    """Searches and prints how many different plans there were; 1 where there were several."""
    parser = options_of(__doc__, 20, "runs of each search", "determinism")
    parser.add_argument("--search", nargs="+", default=list(SEARCHES), choices=list(SEARCHES))
    parser.add_argument("--at-once", type=int, default=1, help="processes beside each other")
    options = parser.parse_args()
    output, num, beside = options.output.absolute(), options.num, options.at_once
    found: dict[str, dict[str, int]] = read_results(output).get("determinism", {"searches": {}})["searches"]
    with working_folder(), ThreadPoolExecutor(beside) as pool:
        make_small_graph()
        for name in options.search:
            each = partial(plan_digest, SEARCHES[name].split())
            digests = list(pool.map(each, range(options.seed, options.seed + num)))
            shown = name if beside == 1 else f"{name}, {beside} at once"
            found[shown] = {"num_runs": len(digests), "num_different": len(set(digests)), "num_at_once": beside}
            save(output, {"determinism": {"commit": commit(), "seed": options.seed, "searches": found}})
            print(json.dumps({shown: found[shown]}), flush=True)
    return int(any(each["num_different"] > 1 for each in found.values()))


if __name__ == "__main__":
    sys.exit(main())
