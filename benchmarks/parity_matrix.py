"""Every pipeline schedule that a plan may name, held against one process: gradient by gradient, in float32.

``python -m benchmarks.parity_matrix`` starts ranks of gloo on this machine, runs one step of each (schedule, pp, v, M)
that the rules of schedules and the checks of plans accept with pp <= 4, v <= 3 and M <= 8, alone and beside data
parallelism, and compares with plain autograd over the whole batch, which shares no code with the executor.
Samples have unequal numbers of labels, and some have none.
"""

from __future__ import annotations

import argparse
import datetime
import functools
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn import functional as F  # noqa: N812

from costmodels.vocabulary.choices import Optimizer, Precision
from costmodels.vocabulary.schedules import SCHEDULES, ScheduleName
from planner.executor.mesh import build_mesh, place_of
from planner.executor.parallelize import ParallelModel, parallelize
from planner.executor.ranks import process_group, quiet_torch
from planner.models.loss import NEXT_TOKEN, Batch, Reduction, TrainingLoss
from planner.plan.checks import contradictions
from planner.plan.schema import (
    MeshSection,
    ModelSection,
    PipelineSection,
    PlacementSection,
    Plan,
    StageSection,
    TrainingSection,
)

MAX_PP, MAX_VIRTUAL_STAGES, MAX_MICROBATCHES = 4, 3, 8
NUM_BLOCKS, HIDDEN, VOCAB, SEQ_LEN = 12, 8, 32, 4  # a block for each of 4 x 3 stages
TOLERANCE = 1e-5  # of a gradient's norm; float32 has 1.2e-7, and sums differ in order
LAYOUTS_A_WORLD = 60  # a tie makes a process group, and a process group of gloo has threads
RESULTS = Path(__file__).parent / "results"


@dataclass(frozen=True)
class Layout:
    """One cell of the matrix: a sequence a micro-batch, ``dp`` pipelines side by side."""

    schedule: str
    pp: int
    virtual_stages: int
    num_microbatches: int
    dp: int = 1
    zero_stage: int = 0
    model: str = "plain"
    loss: str = "default"

    @property
    def name(self) -> str:
        """In one word, for tables and tests."""
        parts = (f"pp{self.pp}", f"v{self.virtual_stages}", f"m{self.num_microbatches}")
        beside = () if self.dp == 1 else (f"dp{self.dp}", f"zero{self.zero_stage}")
        loss = () if self.loss == "default" else (self.loss,)
        return "-".join((self.schedule, *parts, *beside, self.model, *loss))

    def plan(self) -> Plan:
        """The plan of it, stages of blocks as equal as they come."""
        schedule, count = ScheduleName(self.schedule), self.pp * self.virtual_stages
        cuts = [NUM_BLOCKS * index // count for index in range(count + 1)]
        modules = [[f"layers.{layer}" for layer in range(*cuts[index : index + 2])] for index in range(count)]
        modules[0].insert(0, "embedding")
        modules[-1] += ["norm", "head"]
        prefix = "" if self.model == "plain" else "body."
        named = [tuple(name if name == "head" else prefix + name for name in names) for names in modules]
        shards = self.dp if self.zero_stage else 1
        return Plan(
            model=ModelSection(source=self.model, digest="", num_params=0),
            hardware="cpu-gloo",
            num_devices=self.pp * self.dp,
            training=TrainingSection(
                global_batch_size=self.num_microbatches * self.dp,
                seq_len=SEQ_LEN,
                precision=Precision.FP32,
                optimizer=Optimizer.SGD,
            ),
            mesh=MeshSection(pp=self.pp, dp_replicate=self.dp // shards, dp_shard=shards),
            zero_stage=self.zero_stage,
            pipeline=PipelineSection(
                schedule=schedule,
                num_microbatches=self.num_microbatches,
                micro_batch_size=1,
                virtual_stages=self.virtual_stages,
                stages=tuple(
                    StageSection(index=index, pp_rank=schedule.rules.rank_of(index, self.pp), modules=names)
                    for index, names in enumerate(named)
                ),
            ),
            placements=PlacementSection(sharded_units=tuple(name for names in named for name in names)),
        )


class Block(nn.Module):
    """A residual layer, the smallest that is none of its neighbours."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mix = nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``x``: (batch, sequence, hidden); the same shape comes back."""
        return x + torch.tanh(self.mix(self.norm(x)))


class Body(nn.Module):
    """Embedding and blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.norm = nn.Embedding(VOCAB, HIDDEN), nn.LayerNorm(HIDDEN)
        self.layers = nn.ModuleList(Block() for _ in range(NUM_BLOCKS))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """``tokens``: int64 (batch, sequence)."""
        return self.run_layers(self.embedding(tokens))

    def run_layers(self, x: torch.Tensor) -> torch.Tensor:
        """``x``: (batch, sequence, hidden); the same shape comes back."""
        for layer in self.layers:
            x = layer(x)
        return self.norm(x)


class Plain(Body):
    """Logits of a head beside the blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(HIDDEN, VOCAB)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Logits (batch, sequence, vocab)."""
        return self.head(super().forward(tokens))


class PositionedBody(Body):
    """With positions that belong to the body itself."""

    def __init__(self) -> None:
        super().__init__()
        self.positions = nn.Parameter(torch.randn(SEQ_LEN, HIDDEN))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """``tokens``: int64 (batch, sequence)."""
        return self.run_layers(self.embedding(tokens) + self.positions[: tokens.shape[1]])


class Tied(nn.Module):
    """A body inside, as Hugging Face's are built, and a head tied to the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = PositionedBody(), nn.Linear(HIDDEN, VOCAB, bias=False)
        self.head.weight = self.body.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Logits (batch, sequence, vocab)."""
        return self.head(self.body(tokens))


MODELS = {"plain": Plain, "tied": Tied}


def _cross_entropy(output: object, batch: Batch, reduction: str) -> torch.Tensor:
    assert isinstance(output, torch.Tensor)
    assert isinstance(batch, dict)
    return F.cross_entropy(output.flatten(0, 1), batch["labels"].flatten(), reduction=reduction)


def _num_labels(batch: Batch) -> torch.Tensor:
    assert isinstance(batch, dict)
    return (batch["labels"] >= 0).sum()


def _counted(output: object, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    return _cross_entropy(output, batch, "sum"), _num_labels(batch)


_mean, _sum = functools.partial(_cross_entropy, reduction="mean"), functools.partial(_cross_entropy, reduction="sum")
LOSSES = {
    "default": (NEXT_TOKEN, F.cross_entropy),
    "weighted": (TrainingLoss(_mean, Reduction.MEAN, _num_labels), F.cross_entropy),
    "counted": (TrainingLoss(_counted, Reduction.COUNTED), F.cross_entropy),
    "sum": (TrainingLoss(_sum, Reduction.SUM), functools.partial(F.cross_entropy, reduction="sum")),
}
"""Losses as the executor puts them together of parts, and as one process computes them of the whole batch."""


def accepted(num_ranks: int, models: Sequence[str] = ("plain", "tied")) -> list[Layout]:
    """All of the matrix that fill ``num_ranks``: pp <= 4 of them, and the rest data parallel under ZeRO 0 and 1."""
    found: list[Layout] = []
    for pp in range(2, min(num_ranks, MAX_PP) + 1):
        dp, rest = divmod(num_ranks, pp)
        for schedule in [name for name, rules in SCHEDULES.items() if rules.in_torch and not rest]:
            for v in range(1, MAX_VIRTUAL_STAGES + 1):
                for m in range(1, MAX_MICROBATCHES + 1):
                    if schedule.rules.violations(pp, v, m):
                        continue
                    of_shape = [
                        Layout(schedule, pp, v, m, dp, zero, model)
                        for zero in ((0, 1) if dp > 1 else (0,))
                        for model in models
                    ]
                    found += [layout for layout in of_shape if not contradictions(layout.plan())]
    return found


def representative() -> list[Layout]:
    """Of those for four ranks, the ones that CI runs: one micro-batch, and fewer than 2 pp; models in turn."""
    found = [
        layout
        for layout in accepted(4, ("plain",))
        if layout.zero_stage == (layout.dp > 1)
        and layout.num_microbatches in (1, {2: 2, 4: 6}[layout.pp], 8)
        and (layout.num_microbatches < 2 * layout.pp or layout.schedule == "DualPipeV")
    ]
    return [replace(layout, model=("plain", "tied")[index % 2]) for index, layout in enumerate(found)]


def with_every_loss() -> list[Layout]:
    """Layouts for four ranks: each loss under data parallelism, accumulation and pipelines."""
    return [
        Layout(schedule, pp, v, m, 4 // pp, zero, "tied", loss)
        for loss in LOSSES
        for schedule, pp, v, m, zero in (("1F1B", 1, 1, 2, 1), ("1F1B", 1, 1, 3, 3), ("ZBVZeroBubble", 2, 2, 3, 0))
    ]


def errors_of(layout: Layout) -> dict[str, float]:
    """On rank 0: each gradient's distance from one process, relative to its norm, and the loss's under ``loss``.

    Collective over a world of the layout's size; other ranks get nothing.
    """
    plan = layout.plan()
    mesh = _mesh_of(layout.pp, layout.dp, layout.zero_stage)
    place = place_of(mesh)
    tokens, labels = _batch(plan.training.global_batch_size)
    loss_of_parts, loss_of_whole = LOSSES[layout.loss]
    inputs = {"tokens": torch.zeros(1, SEQ_LEN, dtype=torch.int64)}
    model = parallelize(_build(layout.model), inputs, loss_of_parts, plan, mesh)
    mine = slice(place.dp_rank, None, place.dp_degree)
    loss = model.forward_backward({"tokens": tokens[mine], "labels": labels[mine]}) / place.dp_degree
    dist.all_reduce(loss)
    parts: list[dict[str, torch.Tensor] | None] = [None] * dist.get_world_size()
    dist.all_gather_object(parts, _gradients(model))
    if dist.get_rank() != 0:
        return {}
    module = _build(layout.model)
    expected_loss = loss_of_whole(module(tokens).flatten(0, 1), labels.flatten())
    expected_loss.backward()
    errors = {"loss": abs(float(loss / expected_loss.detach()) - 1.0)}
    for fqn, parameter in module.named_parameters(remove_duplicate=False):
        expected = parameter.grad
        assert expected is not None
        copies = [part[fqn] for part in parts if part and fqn in part]
        distances = [float((copy - expected).norm() / expected.norm()) for copy in copies]
        errors[fqn] = max(distances, default=float("inf"))  # a parameter that no rank has is infinitely wrong
    return errors


@functools.cache
def _mesh_of(pp: int, dp: int, zero_stage: int) -> DeviceMesh:
    """One mesh for all layouts of a shape: each of gloo's process groups has threads of its own."""
    return build_mesh(Layout("1F1B", pp, 1, MAX_MICROBATCHES, dp, zero_stage).plan(), "cpu")


def _batch(size: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(size)
    whole = torch.randint(VOCAB, (size, SEQ_LEN + 1), generator=generator)
    tokens, labels = whole[:, :-1], whole[:, 1:].clone()
    for sample in range(size):  # every fifth sample has nothing to learn
        labels[sample, : (sample + 1) % (SEQ_LEN + 1)] = -100
    return tokens, labels


def _build(model: str) -> nn.Module:
    torch.manual_seed(0)
    return MODELS[model]()


def _gradients(model: ParallelModel) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for root in model.roots:
        for fqn, parameter in root.named_parameters(remove_duplicate=False):
            gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            found[fqn] = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
    return found


def run_rank(layouts: Sequence[Layout], out: Path) -> None:
    """One rank of a world that ``layouts`` fill; rank 0 writes what came out."""
    torch.set_num_threads(1)
    with quiet_torch(), process_group():
        rows = [{"layout": asdict(layout), "errors": errors_of(layout)} for layout in layouts]
    if os.environ["RANK"] == "0":
        out.write_text(json.dumps(rows))


def _run_world(num_ranks: int, layouts: Sequence[Layout]) -> list[tuple[Layout, dict[str, float]]]:
    """Outcomes of ``layouts`` on ``num_ranks`` ranks."""
    with tempfile.TemporaryDirectory() as folder:
        task, out = Path(folder) / "layouts.json", Path(folder) / "rows.json"
        task.write_text(json.dumps([asdict(layout) for layout in layouts]))
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1"]
        program = ["--module", "benchmarks.parity_matrix", "--rank", str(task), str(out)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        subprocess.run([*launcher, "--nproc-per-node", str(num_ranks), *program], env=environment, check=True)
        return [(Layout(**row["layout"]), row["errors"]) for row in json.loads(out.read_text())]


def table(rows: Sequence[tuple[Layout, dict[str, float]]]) -> str:
    """A line for each schedule, pp, v and dp: the micro-batches tried, and the worst gradient with its layout."""
    groups: dict[tuple[object, ...], list[tuple[Layout, dict[str, float]]]] = {}
    for layout, errors in rows:
        key = (layout.schedule, layout.pp, layout.virtual_stages, layout.dp, layout.zero_stage, layout.model)
        groups.setdefault(key, []).append((layout, errors))
    lines = [
        "| schedule | pp | v | dp | ZeRO | model | micro-batches | wrong | worst gradient | worst loss |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for key, members in groups.items():
        counts = " ".join(str(layout.num_microbatches) for layout, _ in members)
        wrong = [str(layout.num_microbatches) for layout, errors in members if max(errors.values()) > TOLERANCE]
        gradient = max(error for _, errors in members for name, error in errors.items() if name != "loss")
        loss = max(errors["loss"] for _, errors in members)
        cells = (*key, counts, f"M = {' '.join(wrong)}" if wrong else "none", f"{gradient:.1e}", f"{loss:.1e}")
        lines.append("| " + " | ".join(str(cell) for cell in cells) + " |")
    return "\n".join(lines)


def main() -> int:
    """Runs all worlds, prints the table and writes it to ``--output``; 1 where any layout is wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, help="a Markdown file, by default one of today under results/")
    parser.add_argument("--only", default="", help="a regular expression: the layouts whose names have it")
    parser.add_argument("--rank", type=Path, nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank is not None:
        task, out = options.rank
        run_rank([Layout(**fields) for fields in json.loads(task.read_text())], out)
        return 0
    rows: list[tuple[Layout, dict[str, float]]] = []
    start_s = time.perf_counter()
    for num_ranks in range(2, MAX_PP + 1):
        layouts = [layout for layout in accepted(num_ranks) if re.search(options.only, layout.name)]
        for first in range(0, len(layouts), LAYOUTS_A_WORLD):
            rows += _run_world(num_ranks, layouts[first : first + LAYOUTS_A_WORLD])
    took_s = time.perf_counter() - start_s
    wrong = [layout.name for layout, errors in rows if max(errors.values()) > TOLERANCE]
    text = (
        "# Schedules against one process\n\n"
        f"`python -m benchmarks.parity_matrix`, torch {torch.__version__}, gloo on {os.cpu_count()} cores, "
        f"{took_s:.0f} s: {len(rows)} layouts, of which {len(wrong)} are off by more than {TOLERANCE:g} of a "
        "gradient's norm. One step in float32, every gradient by its name; the other side is plain autograd over the "
        f"whole batch in one process.\n\n{table(rows)}\n"
    )
    print(text)
    output = options.output or RESULTS / f"parity_matrix_cpu_{datetime.date.today()}.md"
    output.write_text(text)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
