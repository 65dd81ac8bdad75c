"""Random plans of the search's own space, each run on ranks of gloo and held against one process.

``python -m benchmarks.random_plans --num 1000`` lists the space that a search has for small models on 2, 4 and 8
devices, draws layouts from it, borders of stages and recomputation block by block, and runs one step of each in
float32. The other side is plain autograd over the whole batch, which shares no code with the executor. A plan either
gives the gradients and the loss of one process, or carries a warning from planning that says why it cannot be run.
The rows are kept, one a line, and a run goes on where an earlier one stopped.
"""

from __future__ import annotations

import argparse
import collections
import datetime
import json
import os
import platform
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from benchmarks.context_parity import GLOBAL_BATCH_SIZE, SEQ_LEN, TOLERANCE, VOCAB, errors_of
from costmodels.vocabulary.choices import Optimizer, Precision, Recompute
from costmodels.vocabulary.mesh import Mesh
from planner.api import Question, described
from planner.evaluation.evaluator import Evaluator
from planner.executor.ranks import process_group, quiet_torch
from planner.layout.columns import Columns
from planner.layout.layout import NO_PINS, Layout
from planner.plan.checks import contradictions, degrees_text
from planner.plan.schema import Plan
from planner.problem import Problem
from planner.request import Request

SIZES_OF_WORLDS = (2, 4, 4, 8)  # drawn alike: half of the plans are for four
PLANS_A_WORLD = 40  # process groups of gloo have threads, and every mesh has groups
TIMEOUT_S = 120.0  # that a rank waits for another
RESULTS = Path(__file__).parent / "results"
FIELDS = ("mesh", "schedule", "zero_stage", "sequence_parallel", "cp_method", "virtual_stages", "recompute",
          "micro_batch_size")  # fmt: skip
"""What is drawn one after the other, so that rare values are drawn as often as common ones."""

SOURCE = """
from planner.models.config import FamilyConfig
from planner.models.family import build_family

SIZES = dict(layers=6, hidden=32, heads=8, ffn=64, vocab={vocab}, seq_len={seq_len})

def gpt():
    return build_family(FamilyConfig(family="gpt", tied=True, **SIZES))

def llama():
    return build_family(FamilyConfig(family="llama", kv_heads=4, mlp="swiglu", **SIZES))

def mixture():
    experts = dict(experts=8, top_k=2, expert_ffn=32)
    return build_family(FamilyConfig(family="moe", kv_heads=4, mlp="swiglu", **experts, **SIZES))
"""
MODELS = ("gpt", "llama", "mixture")


class _Meshes(NamedTuple):
    mesh: Mesh


class Drawn(NamedTuple):
    """A plan, and what planning says against running it."""

    model: str
    plan: Plan

    @property
    def refusals(self) -> list[str]:
        """Warnings that say that the plan cannot be run, and rules that it breaks."""
        told = [each for each in self.plan.warnings if each.startswith("planner run ")]
        return told + list(contradictions(self.plan))

    @property
    def name(self) -> str:
        """In a line."""
        plan, pipeline = self.plan, self.plan.pipeline
        modes = collections.Counter(mode.mode.value for mode in plan.recompute for _ in mode.modules)
        parts = (
            self.model,
            degrees_text(plan),
            f"etp={plan.mesh.etp}" if plan.mesh.etp is not None else "",
            f"ep={plan.mesh.ep}" if plan.mesh.ep > 1 else "",
            f"ZeRO {plan.zero_stage}",
            f"{pipeline.schedule.value} x{pipeline.virtual_stages}" if plan.mesh.pp > 1 else "",
            f"{pipeline.num_microbatches} x {pipeline.micro_batch_size}",
            "SP" if plan.placements.sequence_parallel else "",
            plan.cp_method.value if plan.mesh.cp > 1 else "",
            " ".join(f"{count} {mode}" for mode, count in sorted(modes.items())),
            "cut " + "/".join(str(len(stage.modules)) for stage in pipeline.stages) if plan.mesh.pp > 1 else "",
        )
        return ", ".join(part for part in parts if part)


class Draw:
    """Draws plans for every model and number of devices; the space of each is listed once."""

    def __init__(self, models: Path, seed: int) -> None:
        models.write_text(SOURCE.format(vocab=VOCAB, seq_len=SEQ_LEN))
        self._models, self._random, self._problems = models, random.Random(seed), dict[tuple[str, int], Problem]()

    def plans(self, sizes: Sequence[int] = SIZES_OF_WORLDS) -> Iterator[Drawn]:
        """For ever."""
        while True:
            model, num_ranks = self._random.choice(MODELS), self._random.choice(sizes)
            yield Drawn(model, random_plan(self._problem(model, num_ranks), self._random))

    def _problem(self, model: str, num_ranks: int) -> Problem:
        if (model, num_ranks) not in self._problems:
            question = Question.of(
                Request(
                    f"{self._models}:{model}",
                    num_ranks,
                    "cpu-gloo",
                    seq_len=SEQ_LEN,
                    global_batch_size=GLOBAL_BATCH_SIZE,
                    precision=Precision.FP32,
                    optimizer=Optimizer.SGD,
                )
            )
            self._problems[model, num_ranks] = Problem.build(question.target, question.training, NO_PINS)
        return self._problems[model, num_ranks]


def random_plan(problem: Problem, chance: random.Random) -> Plan:
    """A plan of the problem's space: a layout, borders of stages, recomputation block by block."""
    layout = _layout(problem.space.layouts, chance)
    modes = [
        chance.choice(list(Recompute)) if layout.recompute is None and is_block else Recompute.NONE
        for is_block in problem.table.units.is_block
    ]
    evaluator = Evaluator(problem.table, layout, modes)
    starts = _starts(evaluator.even_starts(), len(problem.table.units.kinds), chance)
    return described(problem, evaluator.evaluate(starts))


def _layout(layouts: Columns[Layout], chance: random.Random) -> Layout:
    meshes = layouts.values_of("mesh")
    depth = chance.choice(sorted({mesh.pp for mesh in meshes if isinstance(mesh, Mesh)}))
    layouts = layouts.where(_Meshes, lambda key: key.mesh.pp == depth)
    for field in FIELDS:
        codes = layouts.codes_of(field)
        layouts = layouts.take(np.flatnonzero(codes == chance.choice(np.unique(codes).tolist())))
    return layouts[chance.randrange(len(layouts))]


def _starts(even: tuple[int, ...], num_units: int, chance: random.Random) -> tuple[int, ...]:
    """Borders moved by a unit at random; every stage keeps a unit."""
    starts = list(even)
    for border in range(1, len(starts)):
        moved = starts[border] + chance.choice((-1, 0, 0, 1))
        behind = starts[border + 1] if border + 1 < len(starts) else num_units
        if starts[border - 1] < moved < behind:
            starts[border] = moved
    return tuple(starts)


def run_rank(task: Path, out: Path) -> None:
    """One rank of a world: every plan of ``task`` in turn; what fails on any rank ends the world."""
    torch.set_num_threads(1)
    rank = int(os.environ["RANK"])
    with quiet_torch(), process_group(TIMEOUT_S):
        for each in json.loads(task.read_text()):
            try:
                errors = errors_of(Plan.model_validate(each))
                dist.barrier()
            except BaseException as error:
                out.with_suffix(f".{rank}").write_text(f"{time.time()} {type(error).__name__}: {error}")
                os._exit(1)  # the others wait for this rank: the launcher ends them
            if rank == 0:
                with out.open("a") as file:
                    file.write(json.dumps(errors) + "\n")


def outcomes(num_ranks: int, plans: Sequence[Plan], folder: Path) -> Iterator[dict[str, float] | str]:
    """Errors of each plan, or in words why it was not run to its end."""
    done = 0
    while done < len(plans):
        task, out = folder / f"plans-{done}.json", folder / f"errors-{done}"
        task.write_text(json.dumps([plan.model_dump(mode="json") for plan in plans[done : done + PLANS_A_WORLD]]))
        said = _world(num_ranks, task, out)
        found = [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else []
        yield from found
        done += len(found)
        if said is not None:
            yield said
            done += 1


def _world(num_ranks: int, task: Path, out: Path) -> str | None:
    """What the first rank that failed said; None where none did."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1"]
    program = ["--module", "benchmarks.random_plans", "--rank", str(task), str(out)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [*launcher, "--nproc-per-node", str(num_ranks), *program]
    result = subprocess.run(command, env=environment, check=False, capture_output=True, text=True)
    if result.returncode == 0:
        return None
    words = [path.read_text() for path in sorted(out.parent.glob(f"{out.name}.*"))]
    return min(words, default=result.stderr[-2000:]).partition(" ")[2]


def verdict(found: dict[str, float] | str) -> str:
    """``equal``, ``WRONG`` or ``FAILED``, with what is worst."""
    if isinstance(found, str):
        return f"FAILED: {found}"
    name, worst = max(found.items(), key=lambda item: item[1])
    return f"equal ({worst:.1e})" if worst <= TOLERANCE else f"WRONG: {name} is off by {worst:.1e}"


def main() -> int:
    """Draws, runs and writes; exit code 1 where a plan failed or is wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--num", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no more plans after these")
    parser.add_argument("--rows", type=Path, default=Path("random_plans.jsonl"), help="kept rows; a run goes on there")
    parser.add_argument("--output", type=Path, help="a Markdown file, by default one of today under results/")
    parser.add_argument("--rank", type=Path, nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank is not None:
        run_rank(*options.rank)
        return 0
    rows = [json.loads(line) for line in options.rows.read_text().splitlines()] if options.rows.exists() else []
    rows = rows if rows and rows[0]["seed"] == options.seed else []
    start_s = time.perf_counter()
    with tempfile.TemporaryDirectory() as name, options.rows.open("a" if rows else "w") as file:
        plans = Draw(Path(name) / "models.py", options.seed).plans()
        drawn = [next(plans) for _ in range(options.num)]
        left = [(place, each) for place, each in enumerate(drawn) if place >= len(rows)]
        for found in _run(left, Path(name), start_s + options.seconds):
            row = {"seed": options.seed, **found}
            rows.append(row)
            file.write(json.dumps(row) + "\n")
            file.flush()
            print(f"{row['place']:4d} {row['verdict']}  {row['plan']}", flush=True)
    output = options.output or RESULTS / f"random_plans_cpu_{datetime.datetime.now(datetime.UTC).date()}.md"
    output.write_text(page(rows, options.seed))
    return int(any(row["verdict"].startswith(("WRONG", "FAILED")) for row in rows))


def _run(left: Sequence[tuple[int, Drawn]], folder: Path, end_s: float) -> Iterator[dict[str, object]]:
    """Rows of plans in batches, those of each number of ranks together."""
    for first in range(0, len(left), PLANS_A_WORLD):
        if time.perf_counter() > end_s:
            return
        batch, rows = left[first : first + PLANS_A_WORLD], list[dict[str, object]]()
        for num_ranks in sorted({each.plan.num_devices for _, each in batch}):
            of_size = [(place, each) for place, each in batch if each.plan.num_devices == num_ranks]
            runnable = [(place, each) for place, each in of_size if not each.refusals]
            rows += [_row(place, each, f"refused: {each.refusals[0]}") for place, each in of_size if each.refusals]
            with tempfile.TemporaryDirectory(dir=folder) as own:
                found = outcomes(num_ranks, [each.plan for _, each in runnable], Path(own))
                rows += [
                    _row(place, each, verdict(errors)) for (place, each), errors in zip(runnable, found, strict=True)
                ]
        yield from sorted(rows, key=lambda row: int(str(row["place"])))


def _row(place: int, drawn: Drawn, said: str) -> dict[str, object]:
    return {"place": place, "plan": drawn.name, "verdict": said}


def page(rows: Sequence[dict[str, str]], seed: int) -> str:
    """What came out, in Markdown: counts, and a line for each plan that did not simply match."""
    counts = collections.Counter(row["verdict"].partition(":")[0].partition(" ")[0] for row in rows)
    reasons = collections.Counter(row["verdict"] for row in rows if row["verdict"].startswith("refused"))
    others = [row for row in rows if row["verdict"].startswith(("WRONG", "FAILED"))]
    told = ", ".join(f"{count} {word}" for word, count in counts.most_common())
    lines = [
        "# Random plans against one process",
        "",
        f"`python -m benchmarks.random_plans --num {len(rows)} --seed {seed}`, torch {torch.__version__}, Python "
        f"{platform.python_version()}, gloo: of {len(rows)} plans {told}. Equal: every gradient to {TOLERANCE:g} of "
        "its norm, and the loss.",
        "",
        "| reason of a refusal | plans |",
        "|---|---|",
        *(f"| {reason.partition(': ')[2]} | {count} |" for reason, count in reasons.most_common()),
        "",
        "| plan that failed or is wrong | what |",
        "|---|---|",
        *(f"| {row['place']}: {row['plan']} | {row['verdict']} |" for row in others),
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
