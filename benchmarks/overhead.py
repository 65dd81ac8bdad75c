"""What our executor's step takes over the step of a script written by hand for the same layout.

``python -m benchmarks.overhead`` starts as many ranks of gloo as this machine has cores, two of them, and lets each
layout be trained by both in turn, step by step, in the same processes: what slows one down slows the other. The hand's
side is torch alone, written as its tutorials write it: ``DistributedDataParallel``, ``fully_shard``,
``parallelize_module`` and ``PipelineStage``. Both begin with the same values, and their last losses must be equal.
"""

from __future__ import annotations

import argparse
import copy
import datetime
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module
from torch.nn import functional as F  # noqa: N812

from costmodels.vocabulary.choices import Optimizer, Precision, Recompute
from costmodels.vocabulary.schedules import ScheduleName
from planner.api import find_plan
from planner.executor.build import build_model, loaded_model
from planner.executor.mesh import build_mesh
from planner.executor.ranks import process_group, quiet_torch
from planner.executor.start import Start, started
from planner.executor.step import train_step
from planner.layout.layout import Pins
from planner.plan.plan_file import plan_json, read_plan
from planner.plan.schema import Plan
from planner.request import Request

REPOSITORY = Path(__file__).resolve().parents[1]
RESULTS = REPOSITORY / "benchmarks" / "results"
NUM_RANKS, SEQ_LEN, VOCAB, GLOBAL_BATCH_SIZE, NUM_BLOCKS = 2, 256, 4096, 8, 6
NUM_WARM_UP, NUM_PAIRS = 2, 12
TOLERANCE = 1e-4  # of the loss after all steps, in float32
LEARNING_RATE = 1e-4
SOURCE = f"""
from planner.models.config import FamilyConfig
from planner.models.family import build_family

def build_model():
    return build_family(FamilyConfig(family="gpt", layers={NUM_BLOCKS}, hidden=512, heads=8, ffn=2048, vocab={VOCAB},
                                     seq_len={SEQ_LEN}))
"""
Step = Callable[[torch.Tensor, torch.Tensor], float | None]


class Comparison(NamedTuple):
    """A layout as pins of ours, and what does the same by hand, given a whole model and the plan."""

    pins: Pins
    by_hand: Callable[[nn.Module, Plan], Step]


def loss_of(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Mean cross entropy of (batch, sequence, vocabulary) and (batch, sequence)."""
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def ddp(model: nn.Module, plan: Plan) -> Step:
    """Data parallelism, all states on each rank."""
    return _accumulating(nn.parallel.DistributedDataParallel(model), plan)


def fsdp(model: nn.Module, plan: Plan) -> Step:
    """Each block and each layer outside them sharded."""
    for unit in (*model.get_submodule("layers").children(), *model.children()):
        if not isinstance(unit, nn.ModuleList):
            fully_shard(unit)
    fully_shard(model)
    return _accumulating(model, plan)


def tensor_parallel(model: nn.Module, plan: Plan) -> Step:
    """Columns, then rows, of each pair of layers; heads divided; the vocabulary's logits gathered."""
    mesh = init_device_mesh("cpu", (NUM_RANKS,))
    styles: dict[str, ParallelStyle] = {"token_embedding": RowwiseParallel(input_layouts=Replicate()),
            "head": ColwiseParallel(output_layouts=Replicate())}  # fmt: skip
    for index, block in enumerate(model.get_submodule("layers").children()):
        attention = block.get_submodule("attention")
        vars(attention)["kv_heads"] //= NUM_RANKS
        for name, style in (("attention.qkv", ColwiseParallel()), ("attention.output", RowwiseParallel()),
                            ("mlp.up", ColwiseParallel()), ("mlp.down", RowwiseParallel())):  # fmt: skip
            styles[f"layers.{index}.{name}"] = style
    parallelize_module(model, mesh, styles)
    return _accumulating(model, plan)


class _Stage(nn.Module):
    """The first or the last part of a GPT."""

    def __init__(self, model: nn.Module, rank: int, num_blocks: int) -> None:
        super().__init__()
        self.rank, blocks = rank, list(model.get_submodule("layers").children())
        self.layers = nn.ModuleList(blocks[-num_blocks:] if rank else blocks[:num_blocks])
        for name in ("norm", "head") if rank else ("token_embedding", "position_embedding"):
            self.add_module(name, model.get_submodule(name))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.rank == 0:
            x = self.get_submodule("token_embedding")(x) + self.get_submodule("position_embedding")(
                torch.arange(x.shape[1])
            )
        for layer in self.layers:
            x = layer(x)
        return self.get_submodule("head")(self.get_submodule("norm")(x)) if self.rank else x


def pipeline(model: nn.Module, plan: Plan) -> Step:
    """One stage a rank, cut where the plan does."""
    rank = dist.get_rank()
    module = _Stage(model, rank, sum(name.startswith("layers.") for name in plan.pipeline.stages[rank].modules))
    optimizer = torch.optim.AdamW(module.parameters(), lr=LEARNING_RATE)
    stage = PipelineStage(module, rank, NUM_RANKS, torch.device("cpu"))
    schedule = Schedule1F1B(stage, plan.pipeline.num_microbatches, loss_fn=loss_of)

    def step(tokens: torch.Tensor, labels: torch.Tensor) -> float | None:
        optimizer.zero_grad()
        losses: list[torch.Tensor] = []
        if rank == 0:
            schedule.step(tokens)
        else:
            schedule.step(target=labels, losses=losses)
        optimizer.step()
        return float(torch.stack(losses).detach().mean()) if losses else None

    return step


def _accumulating(model: nn.Module, plan: Plan) -> Step:
    """A step over the plan's micro-batches; gradients are reduced after each, as where nobody says otherwise."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    size = plan.pipeline.micro_batch_size

    def step(tokens: torch.Tensor, labels: torch.Tensor) -> float:
        optimizer.zero_grad()
        total = 0.0
        for part, wanted in zip(tokens.split(size), labels.split(size), strict=True):
            loss = loss_of(model(part), wanted) * (size / len(tokens))
            loss.backward()
            total += float(loss.detach())
        optimizer.step()
        return total

    return step


COMPARISONS = {
    "dp2, ZeRO 0, against DDP": Comparison(Pins(dp=2, zero=0, micro_batch=4, recompute=Recompute.NONE), ddp),
    "dp2, ZeRO 3, against fully_shard": Comparison(Pins(dp=2, zero=3, micro_batch=4, recompute=Recompute.NONE), fsdp),
    "tp2, against parallelize_module": Comparison(
        Pins(tp=2, micro_batch=8, sequence_parallel=False, recompute=Recompute.NONE), tensor_parallel
    ),
    "pp2 1F1B, against PipelineStage": Comparison(
        Pins(pp=2, micro_batch=2, schedule=ScheduleName.ONE_F_ONE_B, recompute=Recompute.NONE), pipeline
    ),
}


def run_rank(name: str, plan_file: Path, out: Path) -> None:
    """One rank: rank 0 writes the seconds of each pair of steps, ours first, and the last losses."""
    torch.set_num_threads(1)
    plan = read_plan(plan_file, trust=True)
    with quiet_torch(), process_group() as device:
        loaded, mesh = loaded_model(plan), build_mesh(plan, device.type)
        by_hand = COMPARISONS[name].by_hand(copy.deepcopy(build_model(loaded, 0)), plan)
        model = started(loaded, plan, mesh, Start(seed=0))
        optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)

        def ours(tokens: torch.Tensor, labels: torch.Tensor) -> float:
            return float(train_step(model, optimizer, {model.input_name: tokens, "labels": labels}, mesh))

        found = _pairs(ours, by_hand, plan.mesh.dp_replicate * plan.mesh.dp_shard, mesh)
    if os.environ["RANK"] == "0":
        out.write_text(json.dumps(found))


def _pairs(ours: Step, by_hand: Step, dp: int, mesh: DeviceMesh) -> list[tuple[float, float]]:
    chance = torch.Generator().manual_seed(1)
    rows: list[tuple[float, float]] = []
    part = slice(dist.get_rank(), None, dp) if dp > 1 else slice(None)
    for number in range(NUM_WARM_UP + NUM_PAIRS):
        tokens = torch.randint(VOCAB, (GLOBAL_BATCH_SIZE, SEQ_LEN + 1), generator=chance)
        took: dict[Step, float] = {}
        losses: dict[Step, float | None] = {}
        for step in (ours, by_hand) if number % 2 else (by_hand, ours):
            dist.barrier()
            start_s = time.perf_counter()
            losses[step] = step(tokens[part, :-1], tokens[part, 1:])
            dist.barrier()
            took[step] = time.perf_counter() - start_s
        if number >= NUM_WARM_UP:
            rows.append((took[ours], took[by_hand]))
    _check_equal(losses[ours], losses[by_hand], dp)  # pyright: ignore[reportPossiblyUnboundVariable]
    return rows


def _check_equal(ours: float | None, hand: float | None, dp: int) -> None:
    """The last losses: that of ours is of the global batch, that by hand of this rank's part."""
    assert ours is not None
    whole = torch.tensor([0.0 if hand is None else hand, float(hand is not None)])
    dist.all_reduce(whole)
    mean = float(whole[0] / whole[1])
    if abs(ours - mean) > TOLERANCE * abs(mean):
        raise RuntimeError(f"the two do not train alike: our loss is {ours}, that by hand {mean}")


def measure(name: str, folder: Path) -> list[tuple[float, float]]:
    """Seconds of each pair of steps, ours first."""
    model, plan_file, out = folder / "model.py", folder / "plan.json", folder / "out.json"
    model.write_text(SOURCE)
    request = Request(str(model), NUM_RANKS, "cpu-gloo", seq_len=SEQ_LEN, global_batch_size=GLOBAL_BATCH_SIZE,
                      precision=Precision.FP32, optimizer=Optimizer.ADAMW, pins=COMPARISONS[name].pins)  # fmt: skip
    plan_file.write_text(plan_json(find_plan(request).plan))
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1"]
    program = ["--module", "benchmarks.overhead", "--rank", name, str(plan_file), str(out)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [*launcher, "--nproc-per-node", str(NUM_RANKS), *program]
    subprocess.run(command, cwd=REPOSITORY, env=environment, check=True)
    return json.loads(out.read_text())


def main() -> int:
    """Prints the table and writes it to ``--output``."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="a Markdown file, by default one of today under results/")
    parser.add_argument("--only", help="layouts whose name contains this")
    parser.add_argument("--rank", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank is not None:
        name, plan_file, out = options.rank
        run_rank(name, Path(plan_file), Path(out))
        return 0
    rows: list[str] = []
    for name in COMPARISONS:
        if options.only and options.only not in name:
            continue
        with tempfile.TemporaryDirectory() as folder:
            pairs = measure(name, Path(folder))
        ratios = sorted(ours / hand for ours, hand in pairs)
        seconds = [statistics.median(column) for column in zip(*pairs, strict=True)]
        over, low, high = (f"{ratio - 1:+.1%}" for ratio in (statistics.median(ratios), ratios[2], ratios[-3]))
        rows.append(f"| {name} | {seconds[1]:.2f} | {seconds[0]:.2f} | {over} | {low} to {high} |")
        print(rows[-1], flush=True)
    text = (
        "# Our step over that of a script written by hand\n\n"
        f"`python -m benchmarks.overhead`, torch {torch.__version__}, {NUM_RANKS} ranks of gloo of one thread each on "
        f"{os.cpu_count()} cores. A GPT of {NUM_BLOCKS} blocks of width 512 in float32, {GLOBAL_BATCH_SIZE} sequences "
        f"of {SEQ_LEN} tokens, AdamW. {NUM_PAIRS} pairs of steps in turn in the same processes, after {NUM_WARM_UP} "
        "pairs to warm up: medians, and of the ratios of pairs the range without two at each end.\n\n"
        "| layout | s by hand | s ours | over | range |\n|---|---|---|---|---|\n" + "\n".join(rows) + "\n"
    )
    (options.output or RESULTS / f"overhead_cpu_{datetime.datetime.now(datetime.UTC).date()}.md").write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
