"""Checkpoints across layouts: saved under each, resumed under each, held against one process that never stopped.

``python -m benchmarks.checkpoint_matrix`` plans six layouts of a tiny GPT for four ranks of gloo, trains each for
``BEFORE`` steps of AdamW, saves, and lets every layout go on from every checkpoint for ``AFTER`` more. The other side
is a plain loop over the same samples in one process, with nothing of the executor but the samples.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from costmodels.vocabulary.choices import Precision
from costmodels.vocabulary.schedules import ScheduleName
from planner.api import find_plan
from planner.executor.checkpoint import Checkpointer
from planner.executor.data import TokenData, load_tokens
from planner.executor.mesh import build_mesh
from planner.executor.optimizer import build_optimizer
from planner.executor.parallelize import ParallelModel, parallelize
from planner.executor.ranks import process_group, quiet_torch
from planner.executor.step import local_batch, train_step
from planner.layout.layout import Pins
from planner.models.loss import NEXT_TOKEN, next_token_loss
from planner.plan.manifest import Progress
from planner.plan.plan_file import read_plan, write_plan
from planner.plan.schema import Plan
from planner.request import Request

NUM_RANKS, SEQ_LEN, GLOBAL_BATCH_SIZE = 4, 16, 16
BEFORE, AFTER = 3, 3
TOLERANCE = 1e-5  # of a loss
RESULTS = Path(__file__).parent / "results"
LAYOUTS: dict[str, Pins] = {
    "dp4 ZeRO 3": Pins(dp=4, zero=3),
    "dp4 ZeRO 0": Pins(dp=4, zero=0),
    "tp2 dp2 ZeRO 2": Pins(tp=2, dp=2, zero=2, micro_batch=2, sequence_parallel=True),
    "pp2 dp2 ZeRO 1": Pins(pp=2, dp=2, zero=1, micro_batch=2, schedule=ScheduleName.ONE_F_ONE_B),
    "pp2 tp2": Pins(pp=2, tp=2, zero=0, micro_batch=4, schedule=ScheduleName.ONE_F_ONE_B),
    "pp2 v2 dp2 ZBV": Pins(pp=2, dp=2, zero=1, micro_batch=2, schedule=ScheduleName.ZBV_ZERO_BUBBLE, virtual_stages=2),
}
Build = Callable[[], nn.Module]


def losses_through(
    build: Build, plans: tuple[Plan, Plan], mesh_of: Callable[[Plan], DeviceMesh], folder: Path, *, save: bool
) -> list[float]:
    """Losses of ``BEFORE`` steps under the first plan, where ``save``, and of ``AFTER`` under the second one."""
    losses: list[float] = []
    first, second = plans
    if save:
        model, optimizer = started(build, first, mesh_of(first))
        losses += _steps(model, optimizer, mesh_of(first), range(BEFORE))
        progress = Progress(step=BEFORE, sequences=BEFORE * GLOBAL_BATCH_SIZE, seed=0, seq_len=SEQ_LEN,
                            optimizer=first.training.optimizer, layout="")  # fmt: skip
        checkpointer = Checkpointer(folder, keep=1)
        checkpointer.save(model, optimizer, progress)
        checkpointer.close()
    model, optimizer = started(build, second, mesh_of(second))
    checkpointer = Checkpointer(folder, keep=1)
    found = checkpointer.find()
    assert found is not None
    checkpointer.load(found, model, optimizer, second.training.optimizer)
    return losses + _steps(model, optimizer, mesh_of(second), range(BEFORE, BEFORE + AFTER))


def started(build: Build, plan: Plan, mesh: DeviceMesh) -> tuple[ParallelModel, torch.optim.Optimizer]:
    """A model under ``plan`` with other weights than those of the run: what is right was loaded."""
    torch.manual_seed(0)
    inputs = {"input_ids": torch.zeros(plan.pipeline.micro_batch_size, SEQ_LEN, dtype=torch.int64)}
    model = parallelize(build(), inputs, NEXT_TOKEN, plan, mesh)
    return model, build_optimizer(model.parameters(), plan.training.optimizer, None)


def uninterrupted(build: Build, plan: Plan) -> list[float]:
    """Losses of all steps in one process, on the whole batch at once."""
    torch.manual_seed(0)
    module, data = build(), _data()
    optimizer = torch.optim.AdamW(module.parameters(), lr=3e-4)
    losses: list[float] = []
    for step in range(BEFORE + AFTER):
        tokens, labels = data.global_batch(step, plan.training.global_batch_size)
        loss = next_token_loss(module(tokens), {"input_ids": tokens, "labels": labels})
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def _steps(model: ParallelModel, optimizer: torch.optim.Optimizer, mesh: DeviceMesh, steps: range) -> list[float]:
    data = _data()
    return [float(train_step(model, optimizer, local_batch(model, data, step, mesh), mesh)) for step in steps]


def _data() -> TokenData:
    return TokenData(load_tokens(None), SEQ_LEN, seed=0)


def planned() -> dict[str, Plan]:
    """The plans of ``LAYOUTS``, as the search makes them."""
    return {
        name: find_plan(
            Request(model="gpt-tiny", num_devices=NUM_RANKS, hardware="cpu-gloo", seq_len=SEQ_LEN,
                    global_batch_size=GLOBAL_BATCH_SIZE, precision=Precision.FP32, pins=pins)
        ).plan
        for name, pins in LAYOUTS.items()
    }  # fmt: skip


def run_rank(folder: Path, out: Path) -> None:
    """One rank: every checkpoint of every layout under every layout; rank 0 writes the losses."""
    from planner.model_file import load_model, resolve_model

    torch.set_num_threads(1)
    plans = [read_plan(path) for path in sorted(folder.glob("*.json"))]
    build = load_model(resolve_model("gpt-tiny")).build
    meshes: dict[object, DeviceMesh] = {}

    def mesh_of(plan: Plan) -> DeviceMesh:
        key = (plan.mesh, plan.zero_stage == 0)
        if key not in meshes:
            meshes[key] = build_mesh(plan, "cpu")
        return meshes[key]

    rows: list[list[list[float]]] = []
    with quiet_torch(), process_group():
        for index, first in enumerate(plans):
            rows.append([])
            for number, second in enumerate(plans):
                checkpoints = folder / f"checkpoints-{index}"
                rows[-1].append(losses_through(build, (first, second), mesh_of, checkpoints, save=number == 0))
        if dist.get_rank() == 0:
            out.write_text(json.dumps({"rows": rows, "expected": uninterrupted(build, plans[0])}))


def worst(losses: Sequence[float], expected: Sequence[float]) -> float:
    """The largest relative distance of ``losses`` from the last of ``expected``."""
    pairs = zip(losses, expected[-len(losses) :], strict=True)
    return max(abs(loss / wanted - 1.0) for loss, wanted in pairs)


def table(names: Sequence[str], rows: Mapping[str, Sequence[float]]) -> str:
    """A row for each layout that saved, a column for each that went on: the worst loss."""
    lines = ["| saved under | " + " | ".join(names) + " |", "|---" * (len(names) + 1) + "|"]
    lines += [f"| {name} | " + " | ".join(f"{error:.1e}" for error in errors) + " |" for name, errors in rows.items()]
    return "\n".join(lines)


def main() -> int:
    """Runs the world, prints the table and writes it to ``--output``; 1 where any loss is off."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, help="a Markdown file, by default one of today under results/")
    parser.add_argument("--rank", type=Path, nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank is not None:
        run_rank(*options.rank)
        return 0
    start_s = time.perf_counter()
    with tempfile.TemporaryDirectory() as name:
        folder, out = Path(name), Path(name) / "outcome"
        for index, plan in enumerate(planned().values()):
            write_plan(plan, folder / f"{index}.json")
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1"]
        program = ["--module", "benchmarks.checkpoint_matrix", "--rank", str(folder), str(out)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        subprocess.run([*launcher, "--nproc-per-node", str(NUM_RANKS), *program], env=environment, check=True)
        outcome = json.loads(out.read_text())
    names, expected = list(LAYOUTS), outcome["expected"]
    errors = {name: [worst(losses, expected) for losses in row]
              for name, row in zip(names, outcome["rows"], strict=True)}  # fmt: skip
    wrong = sum(error > TOLERANCE for row in errors.values() for error in row)
    text = (
        "# Checkpoints across layouts\n\n"
        f"`python -m benchmarks.checkpoint_matrix`, torch {torch.__version__}, {NUM_RANKS} ranks of gloo on "
        f"{os.cpu_count()} cores, {time.perf_counter() - start_s:.0f} s: {BEFORE} steps of AdamW on gpt-tiny (tied "
        f"embedding) in float32 under the layout of the row, a checkpoint, and {AFTER} more under that of the column. "
        "The numbers are the largest relative distance of any loss from those of one process that never stopped: "
        f"{wrong} of {len(names) ** 2} are above {TOLERANCE:g}. The loss falls from {expected[0]:.4f} to "
        f"{expected[-1]:.4f}.\n\n{table(names, errors)}\n"
    )
    print(text)
    output = options.output or RESULTS / f"checkpoint_matrix_cpu_{datetime.date.today()}.md"
    output.write_text(text)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
