"""Predicted against measured on a cluster of this machine: ``python -m benchmarks.measured_plans --hosts 2``.

What a user would do, on a virtual cluster (``benchmarks/virtual_cluster.py``) whose links are shaped: profile it,
search a plan, and train with it. The best plan, the four runners-up and ten plans drawn at random from the search's
space run for a few steps each, as ``planner verify`` runs them. One measured plan, a random one, then calibrates the
profile, and the others are priced again. Time on the machine counts: nothing else should run on it.

Targets: predicted within 15 % (median), Kendall's tau of all plans at least 0.9, and the plan that was chosen at most
3 % slower than the fastest measured.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import random
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from statistics import median

import torch

from benchmarks.random_plans import Drawn, random_plan
from benchmarks.virtual_cluster import virtual_cluster, why_unavailable
from costmodels.vocabulary.choices import Optimizer, Precision
from planner.api import Question, described, price_plan
from planner.api.runners_up import unlike_runners
from planner.executor.options import DataOptions, RunOptions
from planner.executor.ranks import process_group, quiet_torch
from planner.executor.verify import measured
from planner.layout.deadline import Deadline
from planner.layout.layout import NO_PINS
from planner.plan.schema import Plan
from planner.problem import Problem
from planner.request import Request
from planner.solver.search import search

RESULTS = Path(__file__).parent / "results"
STEPS = 3  # measured of each plan in one round, behind two to warm up
ROUNDS = 3  # all plans in turn, so many times: a machine that is slower for a minute is slower for all of them
TIMEOUT_S = 300.0  # that a rank waits for another
SEARCH_S = 60.0
NEAR = 0.01  # of two plans measured nearer to each other none is the faster one
SOURCE = """
from planner.models.config import FamilyConfig
from planner.models.family import build_family

def gpt():
    return build_family(FamilyConfig(family="gpt", layers={layers}, hidden={hidden}, heads=8, ffn={ffn}, vocab=8192,
                                     seq_len={seq_len}, tied=False))
"""
SIZES = {"layers": 8, "hidden": 256, "ffn": 1024, "seq_len": 256}
GLOBAL_BATCH_SIZE = 16


@dataclass
class Row:
    """A plan, how it was come by, and seconds of a step."""

    kind: str  # best, runner-up or random
    plan: Plan
    measured_s: float = 0.0  # median of the rounds' medians
    calibrated_s: float | None = None  # predicted by the calibrated profile; None: it calibrates

    @property
    def predicted_s(self) -> float:
        """By the profile as it was measured."""
        assert self.plan.prediction is not None
        return self.plan.prediction.step_time_s


def run_rank(task: Path, out: Path) -> None:
    """One rank of the cluster: every plan of ``task`` in turn, ``ROUNDS`` times."""
    torch.set_num_threads(1)
    options = RunOptions(steps=STEPS, seed=0, timeout_s=TIMEOUT_S, data=DataOptions())
    with quiet_torch(), process_group(TIMEOUT_S) as device:
        for each in json.loads(task.read_text()) * ROUNDS:
            found = measured(Plan.model_validate(each), options, device)
            if os.environ["RANK"] == "0":
                with out.open("a") as file:
                    file.write(json.dumps(found) + "\n")


def rows_of(problem: Problem, num_random: int, seed: int) -> list[Row]:
    """The best plan, four unlike it, and random ones that can be run."""
    deadline = Deadline.answering_within(SEARCH_S)
    outcome = search(problem.table, problem.space.layouts, problem.solver, deadline=deadline)
    if outcome.best is None:
        raise SystemExit("the search found no plan")
    others = unlike_runners(problem, outcome, 4, deadline)
    rows = [Row("best", described(problem, outcome.best))]
    rows += [Row("runner-up", described(problem, each)) for each in others]
    chance, known = random.Random(seed), {Drawn("gpt", row.plan).name for row in rows}
    while sum(row.kind == "random" for row in rows) < num_random:
        drawn = Drawn("gpt", random_plan(problem, chance))
        if not drawn.refusals and drawn.name not in known:
            known.add(drawn.name)
            rows.append(Row("random", drawn.plan))
    return rows


def tau(rows: Sequence[Row]) -> float:
    """Kendall's tau of predicted and measured times, over the pairs that were measured apart by more than ``NEAR``."""
    signs = [
        1 if (a.predicted_s < b.predicted_s) == (a.measured_s < b.measured_s) else -1
        for a, b in combinations(rows, 2)
        if abs(a.measured_s / b.measured_s - 1) > NEAR
    ]
    return sum(signs) / len(signs) if signs else 1.0


def calibrate(rows: Sequence[Row], folder: Path, profile: Path) -> None:
    """Prices all rows but one again, with a profile that this one, a random plan, calibrates."""
    told = next((row for row in rows if row.kind == "random"), rows[-1])
    plan, output = folder / "told.json", folder / "calibrated.json"
    plan.write_text(told.plan.model_dump_json())
    run = f"{plan}:{told.measured_s}"
    command = [sys.executable, "-m", "planner", "calibrate", run, "--hardware", str(profile), "-o", str(output)]
    subprocess.run([*command, "--trust"], check=True)
    for row in rows:
        if row is not told:
            prediction = price_plan(row.plan, str(output)).plan.prediction
            assert prediction is not None
            row.calibrated_s = prediction.step_time_s


def page(rows: Sequence[Row], options: argparse.Namespace) -> str:
    """What came out, in Markdown."""
    cold = [abs(row.predicted_s / row.measured_s - 1) for row in rows]
    warm = [abs(row.calibrated_s / row.measured_s - 1) for row in rows if row.calibrated_s is not None]
    ratios = [row.predicted_s / row.measured_s for row in rows]
    best, fastest = rows[0].measured_s, min(row.measured_s for row in rows)
    lines = [
        "# Plans predicted and measured",
        "",
        f"`python -m benchmarks.measured_plans --hosts {options.hosts} --processes {options.processes} "
        f"--link-mbit {options.link_mbit:g} --seed {options.seed}`, torch {torch.__version__}, Python "
        f"{platform.python_version()}, {os.cpu_count()} cores. A GPT of {SIZES['layers']} blocks of width "
        f"{SIZES['hidden']}, {GLOBAL_BATCH_SIZE} sequences of {SIZES['seq_len']} tokens in float32; medians of "
        f"{ROUNDS} rounds of {STEPS} steps, all plans in each round.",
        "",
        "| figure | value |",
        "|---|---|",
        f"| predicted by the profile alone: median error, worst | {median(cold):.1%}, {max(cold):.1%} |",
        f"| the same, median of predicted over measured | {median(ratios):.2f} |",
        f"| with one measured run: median error of the others, worst | {median(warm):.1%}, {max(warm):.1%} |",
        f"| Kendall's tau of {len(rows)} plans | {tau(rows):.2f} |",
        f"| the chosen plan over the fastest measured | {best / fastest - 1:+.1%} |",
        "",
        "| plan | kind | measured | predicted | calibrated |",
        "|---|---|---|---|---|",
    ]
    for row in sorted(rows, key=lambda row: row.measured_s):
        calibrated = "calibrates" if row.calibrated_s is None else f"{row.calibrated_s * 1e3:.0f} ms"
        times = f"{row.measured_s * 1e3:.0f} ms | {row.predicted_s * 1e3:.0f} ms | {calibrated}"
        lines.append(f"| {Drawn('gpt', row.plan).name} | {row.kind} | {times} |")
    return "\n".join(lines) + "\n"


def main() -> int:
    """Exit code 0; 2 where no virtual cluster can be made, which is said."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--processes", type=int, default=1, help="ranks on every host")
    parser.add_argument("--link-mbit", type=float, default=500.0, help="rate of every host's link, Mbit/s")
    parser.add_argument("--random", type=int, default=10, help="plans drawn at random")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", type=Path, help="a folder for the profile, the plans and what was measured of each")
    parser.add_argument("--output", type=Path, help="a Markdown file, by default one of today under results/")
    parser.add_argument("--rank", type=Path, nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank is not None:
        run_rank(*options.rank)
        return 0
    reason = why_unavailable()
    if reason is not None:
        print(f"nothing was run: {reason}", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as name:
        folder = options.keep or Path(name)
        folder.mkdir(parents=True, exist_ok=True)
        rows = measure(options, folder)
        text = page(rows, options)
    today = datetime.datetime.now(datetime.UTC).date()
    output = options.output or RESULTS / f"measured_plans_{options.hosts}x{options.processes}_{today}.md"
    output.write_text(text)
    print(text)
    return 0


def measure(options: argparse.Namespace, folder: Path) -> list[Row]:
    """Profiles the cluster, plans for it, runs the plans, and calibrates."""
    profile, task, out = folder / "profile.json", folder / "plans.json", folder / "measured"
    model = folder / "model.py"
    model.write_text(SOURCE.format(**SIZES))
    with virtual_cluster(options.hosts, options.link_mbit * 1e6) as cluster:
        module = ["--module", "planner", "profile", "-o", str(profile), "--disk", str(folder)]
        print(cluster.torchrun(options.processes, module, timeout_s=1500.0)[0].stderr, flush=True)
        ranks = options.hosts * options.processes
        question = Question.of(
            Request(f"{model}:gpt", ranks, str(profile), seq_len=SIZES["seq_len"], global_batch_size=GLOBAL_BATCH_SIZE,
                    precision=Precision.FP32, optimizer=Optimizer.ADAMW)
        )  # fmt: skip
        rows = rows_of(Problem.build(question.target, question.training, NO_PINS), options.random, options.seed)
        task.write_text(json.dumps([row.plan.model_dump(mode="json") for row in rows]))
        program = ["--module", "benchmarks.measured_plans", "--rank", str(task), str(out)]
        cluster.torchrun(options.processes, program, timeout_s=3000.0)
    times = [json.loads(line)["step_time_s"] for line in out.read_text().splitlines()]
    assert len(times) == len(rows) * ROUNDS, times
    for index, row in enumerate(rows):
        row.measured_s = median(times[index :: len(rows)])
    calibrate(rows, folder, profile)
    return rows


if __name__ == "__main__":
    sys.exit(main())
