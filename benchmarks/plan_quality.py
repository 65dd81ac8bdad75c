"""Our plans against other ways to a plan, and our picks against what was measured.

``python -m benchmarks.plan_quality [--cases N] [--evaluations N]`` prints tables and writes
``benchmarks/results/plan_quality.json``.

For each of some searches: plain FSDP, the rule of hand of Megatron-LM, simulated annealing and an evolutionary search
over the same choices (degrees, sizes, schedules, cuts, recomputation) by the same price, each with a fixed number of
evaluations, and everything where that is few. ``judging/rivals.py`` has their sources. What a method finds is shown
as its step over ours: above 1 it is slower, below 1 the search was beaten.

For each group of published runs, which differ in layout alone: the run that we predict to be the fastest, its measured
time over the least measured one, less one (its regret).
"""

from __future__ import annotations

import argparse
import io
import json
import math
import random
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

from rich.console import Console
from rich.table import Table

from benchmarks.judging.choice import Choice
from benchmarks.judging.evaluated import Evaluations
from benchmarks.judging.graphs import Graphs
from benchmarks.judging.oracle import Oracle
from benchmarks.judging.questions import Question, Shape, ask
from benchmarks.judging.records import RESULTS, code_digest
from benchmarks.judging.rivals import (
    Budget,
    annealing,
    best_of,
    evolution,
    first_of,
    megatron_rule,
    plain_fsdp,
)
from benchmarks.published.data import RUNS, shipped
from benchmarks.published.pricing import RunPricer
from benchmarks.published.summary import MIN_GROUP_ROWS, Row, price_rows
from costmodels.vocabulary.choices import Precision
from planner.formats.run_table import Rejected, Run, read_runs
from planner.output_file import write_text

Found = tuple[float, Choice | None]


class Case(NamedTuple):
    """One search; a model by its preset or its shape."""

    model: str | Shape
    num_devices: int
    hardware: str
    global_batch_size: int
    seq_len: int | None = None


# From what everything can be tried for to what a cluster is rented for.
CASES = (
    Case(Shape("llama", 4, 2048, 128_000, 2048), 4, "rtx-4090-x8", 8),
    Case(Shape("gpt", 5, 2048, 32_000, 2048), 3, "a100-pcie-40gb-x8", 12),
    Case("gpt3-1.3b", 16, "rtx-4090-x8", 32),
    Case("llama2-7b", 24, "a100-pcie-40gb-x8", 96),
    Case("llama3-8b", 16, "rtx-4090-x8", 32),
    Case("gpt3-13b", 64, "dgx-a100-80gb", 256),
    Case("mixtral-8x7b", 64, "dgx-h100-80gb", 128),
    Case("llama3-70b", 128, "dgx-h100-80gb", 256),
)
PAGE_WIDTH = 150
ABOUT = (
    "Made by `python -m benchmarks.plan_quality`. Above: what each way to a plan finds, as its step over that of our "
    "plan (above 1 it is slower; - nothing fits). Below: of published runs that differ in layout alone, the one "
    "predicted to be fastest against the one measured to be; recipes were fitted to nearly all of these runs."
)
NUM_EXHAUSTIVE = 2  # of the first cases everything is tried


def main() -> int:
    """Exit code 0; 1 where another way found a plan that is faster by more than 0.1 % than one that says OPTIMAL."""
    options = _parser().parse_args()
    console = Console()
    settings = {"evaluations": options.evaluations, "seed": options.seed, "code": code_digest()}
    with tempfile.TemporaryDirectory(prefix="plan-quality-") as folder:
        graphs = Graphs(Path(folder))
        rows: list[dict[str, Any]] = []
        for index, case in enumerate(CASES[: options.cases]):
            rows.append(compared(question_of(case, graphs), graphs, index, options.evaluations, options.seed))
            console.print(f"{rows[-1]['text']}: {rows[-1]['status']} {rows[-1]['step_time_s']}", highlight=False)
    output = options.output or RESULTS / "plan_quality.json"
    kept = json.loads(output.read_text(encoding="utf-8")) if output.exists() else {}
    if options.cases == 0:
        rows = kept.get("searches", [])
        settings = kept.get("settings", settings)
    groups = kept.get("groups", [])
    runs_file = None if options.no_runs else options.runs or shipped(RUNS)
    if runs_file is not None:
        groups = picks(price_rows(_in_groups(read_runs(runs_file)), RunPricer()))
    tables = [table_of(rows), *([table_of_groups(groups)] if groups else [])]
    page = Console(file=io.StringIO(), width=PAGE_WIDTH)
    for table in tables:
        console.print(table)
        page.print(table)
    document = {
        "settings": settings,
        "summary": summary(rows, groups),
        "searches": rows,
        "groups": groups,
    }
    console.print(document["summary"])
    write_text(output, json.dumps(document, indent=1) + "\n")
    written = "".join(f"{line.rstrip()}\n" for line in cast("io.StringIO", page.file).getvalue().splitlines())
    write_text(output.with_suffix(".md"), f"# Plan quality\n\n{ABOUT}\n\n```text\n{written}```\n")
    return int(any(row["status"] == "OPTIMAL" and row["least_ratio"] < 1 - 1e-3 for row in rows))


def _in_groups(runs: Iterable[Run | Rejected]) -> list[Run | Rejected]:
    """Those of ``runs`` that differ from others in layout alone."""
    return [run for run in runs if isinstance(run, Run) and run.group]


def question_of(case: Case, graphs: Graphs) -> Question:
    """``case`` as a question to the search."""
    if isinstance(case.model, Shape):
        name, model = case.model.name, graphs.shape(case.model, Precision.BF16)
    else:
        name, model = case.model, graphs.preset(case.model, case.seq_len, Precision.BF16)
    seq_len = graphs.read(model).seq_len
    return Question(name, str(model), case.num_devices, case.hardware, seq_len, case.global_batch_size)


def compared(question: Question, graphs: Graphs, index: int, most: int, seed: int) -> dict[str, Any]:
    """One row: our plan and what each other way found."""
    began = time.process_time()
    reply = ask(question)
    searched = time.process_time()
    ours = math.inf if reply.plan is None or reply.plan.prediction is None else reply.plan.prediction.step_time_s
    everything = Evaluations.of(question, graphs)
    facts, price = everything.facts, everything.price
    ways: dict[str, Callable[[], Found]] = {
        "plain FSDP": lambda: best_of(plain_fsdp(facts), facts, price),
        "Megatron, tp a node": lambda: first_of(megatron_rule(facts, whole_node=True), facts, price),
        "Megatron, least tp*pp": lambda: first_of(megatron_rule(facts, whole_node=False), facts, price),
        "annealing": lambda: annealing(facts, Budget(price, most), random.Random(f"annealing-{seed}-{index}")),
        "evolution": lambda: evolution(facts, Budget(price, most), random.Random(f"evolution-{seed}-{index}")),
    }
    if index < NUM_EXHAUSTIVE:
        ways["everything"] = lambda: _everything(everything)
    found: dict[str, dict[str, Any]] = {}
    for name, way in ways.items():
        start = time.process_time()
        seconds, choice = way()
        fits = seconds < math.inf
        found[name] = {
            "step_time_s": seconds if fits else None,
            "ratio": seconds / ours if fits else None,
            "plan": str(choice) if choice else None,
            "cpu_s": round(time.process_time() - start, 2),
        }
    ratios = [each["ratio"] for each in found.values() if each["ratio"] is not None]
    return {
        "text": str(question),
        "status": reply.status,
        "step_time_s": ours if ours < math.inf else None,
        "gap": None if reply.plan is None or reply.plan.search is None else reply.plan.search.gap,
        "search_cpu_s": round(searched - began, 2),
        "ways": found,
        "least_ratio": min(ratios, default=1.0),
    }


def _everything(evaluations: Evaluations) -> Found:
    best = Oracle(evaluations).best()
    return (math.inf, None) if best.step_time_s is None else (best.step_time_s, best.choice)


def picks(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Of each group of published runs: which we pick, and what that costs against the best that was measured."""
    groups: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        if row.group and row.measured_step_time_s is not None and row.predicted_step_time_s is not None:
            groups[row.group].append(row)
    found: list[dict[str, Any]] = []
    for name, members in sorted(groups.items()):
        if len(members) < MIN_GROUP_ROWS:
            continue
        picked = min(members, key=lambda row: row.predicted_step_time_s or math.inf)
        best = min(members, key=lambda row: row.measured_step_time_s or math.inf)
        assert picked.measured_step_time_s is not None
        assert best.measured_step_time_s is not None
        found.append(
            {
                "group": name,
                "num_runs": len(members),
                "picked": picked.id,
                "picked_s": picked.measured_step_time_s,
                "best": best.id,
                "best_s": best.measured_step_time_s,
                "regret": picked.measured_step_time_s / best.measured_step_time_s - 1,
            }
        )
    return found


def summary(rows: Sequence[dict[str, Any]], groups: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Ratios of each way over ours (geometric mean where it fits), and regret."""
    ratios: dict[str, list[float]] = defaultdict(list)
    for row in rows:
        for name, each in row["ways"].items():
            if each["ratio"] is not None:
                ratios[name].append(each["ratio"])
    regrets = sorted(group["regret"] for group in groups)
    return {
        "ways": {
            name: {
                "num_fit": len(found),
                "mean_ratio": math.exp(sum(map(math.log, found)) / len(found)),
                "least_ratio": min(found),
            }
            for name, found in ratios.items()
        },
        "num_groups": len(groups),
        "groups_where_the_best_is_picked": sum(regret == 0 for regret in regrets),
        "mean_regret": sum(regrets) / len(regrets) if regrets else None,
        "median_regret": regrets[len(regrets) // 2] if regrets else None,
        "max_regret": max(regrets, default=None),
    }


def table_of(rows: Sequence[dict[str, Any]]) -> Table:
    """Each way's step over ours."""
    names = list(dict.fromkeys(name for row in rows for name in row["ways"]))
    table = Table("search", "ours s", "says", *names, title="Step time over that of our plan")
    for row in rows:
        ratios = (row["ways"].get(name, {"ratio": None})["ratio"] for name in names)
        ours = "-" if row["step_time_s"] is None else f"{row['step_time_s']:.4g}"
        table.add_row(row["text"], ours, row["status"], *("-" if r is None else f"{r:.3f}" for r in ratios))
    return table


def table_of_groups(groups: Sequence[dict[str, Any]]) -> Table:
    """Regret, the largest first."""
    table = Table("group", "runs", "picked s", "best s", "regret", title="Our picks among published runs")
    for group in sorted(groups, key=lambda each: -each["regret"]):
        name = " ".join(group["group"].split("|")[:2])[-50:]
        times = f"{group['picked_s']:.3f}", f"{group['best_s']:.3f}"
        table.add_row(name, str(group["num_runs"]), *times, f"{group['regret']:.1%}")
    return table


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=len(CASES), help="the first so many searches; 0: those known")
    parser.add_argument("--no-runs", action="store_true", help="leave the published runs as they are known")
    parser.add_argument("--evaluations", type=int, default=300, help="of annealing, and of evolution, a search")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--runs", type=Path, help="table of published runs, columns as in shared/data")
    parser.add_argument("--output", type=Path, help="file of results; default: benchmarks/results/")
    return parser


if __name__ == "__main__":
    sys.exit(main())
