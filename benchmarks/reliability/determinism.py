"""The same search again and again, with other hash seeds and numbers of threads: plans are the same to the last byte.

    python -m benchmarks.reliability.determinism [--num 20] [--seed S] [--output FILE.json]

Each run is a process of its own that searches and writes a plan. The seconds that a search took are left out.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path

from benchmarks.reliability.drill import ROOT, commit, options_of, save, working_folder
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
    command = [sys.executable, "-m", "planner", "search", *words, "-o", "plan.json"]
    subprocess.run(command, env=os.environ | variables, check=True, capture_output=True)
    content, count = _ELAPSED.subn(b"", Path("plan.json").read_bytes())
    assert count == 1, count
    return hashlib.sha256(content).hexdigest()


def main() -> int:
    """Searches and prints how many different plans there were; 1 where there were several."""
    parser = options_of(__doc__, 20, "runs of each search", "determinism")
    parser.add_argument("--search", nargs="+", default=list(SEARCHES), choices=list(SEARCHES))
    options = parser.parse_args()
    output, found = options.output.absolute(), dict[str, dict[str, int]]()
    with working_folder():
        make_small_graph()
        for name in options.search:
            digests = [plan_digest(SEARCHES[name].split(), options.seed + run) for run in range(options.num)]
            found[name] = {"num_runs": len(digests), "num_different": len(set(digests))}
            save(output, {"determinism": {"commit": commit(), "seed": options.seed, "searches": found}})
            print(json.dumps({name: found[name]}), flush=True)
    return int(any(each["num_different"] > 1 for each in found.values()))


if __name__ == "__main__":
    sys.exit(main())
