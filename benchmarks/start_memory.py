"""Host memory while ranks start: ``python -m benchmarks.start_memory`` starts ranks of gloo on this machine.

Each rank makes its part of one model in both ways, each in a process of its own: built whole and then split, as where
the model's code cannot be recorded, and by parts. What counts is the most that the process had in memory
(``ru_maxrss``) over what it had once everything was imported; what torch loads while it splits a model counts too.
Beside it stands the memory of the rank's own parameters, which stays.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from costmodels.vocabulary.choices import Precision
from planner.api import find_plan
from planner.executor.build import build_model, example_batch, loaded_model
from planner.executor.mesh import build_mesh
from planner.executor.parallelize import parallelize
from planner.executor.ranks import process_group, quiet_torch
from planner.executor.start import Start, started
from planner.layout.layout import Pins
from planner.plan.plan_file import plan_json, read_plan
from planner.request import Request

REPOSITORY = Path(__file__).resolve().parents[1]
RESULTS = REPOSITORY / "benchmarks" / "results"
WAYS = ("whole", "by parts")
SOURCE = """
from planner.models.config import FamilyConfig
from planner.models.family import build_family

def build_model():
    return build_family(FamilyConfig(family="llama", layers=8, hidden=1024, heads=16, ffn=2816, vocab=32768,
                                     mlp="swiglu", seq_len=128))
"""
LAYOUTS = {
    "dp2, ZeRO 3": (2, Pins(dp=2, zero=3)),
    "dp4, ZeRO 3": (4, Pins(dp=4, zero=3)),
    "tp4": (4, Pins(tp=4)),
    "pp4": (4, Pins(pp=4)),
    "pp2 tp2": (4, Pins(pp=2, tp=2)),
}


def run_rank(plan_file: Path, way: str, out: Path) -> None:
    """One rank: rank 0 writes what the fullest took."""
    torch.set_num_threads(1)
    plan = read_plan(plan_file, trust=True)
    with quiet_torch(), process_group() as device:
        loaded, mesh = loaded_model(plan), build_mesh(plan, device.type)
        before, start_s = psutil.Process().memory_info().rss, time.perf_counter()
        if way == "whole":
            module = build_model(loaded, 0)
            model = parallelize(module, example_batch(loaded, plan, module), loaded.training_loss, plan, mesh)
            del module
        else:
            model = started(loaded, plan, mesh, Start(seed=0))
        took_s = time.perf_counter() - start_s
        taken = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before
        local = (p.to_local() if isinstance(p, DTensor) else p for p in model.parameters())
        found = torch.tensor([taken, sum(p.nbytes for p in local), took_s], dtype=torch.float64)
        dist.all_reduce(found, dist.ReduceOp.MAX)
    if os.environ["RANK"] == "0":
        out.write_text(json.dumps(found.tolist()))


def measure(num_ranks: int, pins: Pins, way: str, folder: Path) -> list[float]:
    """Bytes at the start's peak, bytes of the parameters, seconds: each of the rank that has most."""
    model, plan_file, out = folder / "model.py", folder / "plan.json", folder / "out.json"
    model.write_text(SOURCE)
    request = Request(str(model), num_ranks, "cpu-gloo", seq_len=128, global_batch_size=8, precision=Precision.FP32,
                      pins=pins)  # fmt: skip
    plan_file.write_text(plan_json(find_plan(request).plan))
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1"]
    program = ["--module", "benchmarks.start_memory", "--rank", str(plan_file), way, str(out)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [*launcher, "--nproc-per-node", str(num_ranks), *program]
    subprocess.run(command, cwd=REPOSITORY, env=environment, check=True)
    return json.loads(out.read_text())


def main() -> int:
    """Prints the table and writes it to ``--output``."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="a Markdown file, by default one of today under results/")
    parser.add_argument("--rank", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank is not None:
        plan_file, way, out = options.rank
        run_rank(Path(plan_file), way, Path(out))
        return 0
    rows: list[str] = []
    for name, (num_ranks, pins) in LAYOUTS.items():
        with tempfile.TemporaryDirectory() as folder:
            found = [measure(num_ranks, pins, way, Path(folder)) for way in WAYS]
        sizes = " | ".join(f"{each / 2**20:,.0f}" for each in (found[0][1], found[0][0], found[1][0]))
        rows.append(f"| {name} | {sizes} | {found[0][2]:.1f} | {found[1][2]:.1f} |")
    text = (
        "# Host memory while ranks start\n\n"
        f"`python -m benchmarks.start_memory`, torch {torch.__version__}, gloo on {os.cpu_count()} cores. A Llama of "
        "8 blocks of width 1024 and 32,768 tokens: 648 MiB in float32, of which its largest parameter has 128 MiB. "
        "MiB of the rank that took most, over what it had after its imports; seconds of the slowest.\n\n"
        "| layout | own parameters | built whole | by parts | s, whole | s, by parts |\n|---|---|---|---|---|---|\n"
        + "\n".join(rows)
        + "\n"
    )
    print(text)
    (options.output or RESULTS / f"start_memory_cpu_{datetime.datetime.now(datetime.UTC).date()}.md").write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
