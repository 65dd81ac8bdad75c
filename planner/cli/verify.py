"""``planner verify``: a few real steps, predicted beside measured."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from costmodels.vocabulary.terms import Counted, MemoryTerm, Term
from planner.cli.options import Trust
from planner.cli.process import uncollected
from planner.cli.run import token_dtype
from planner.cli.terminal import data_console
from planner.errors import InputError, PlanError
from planner.output_file import check_output, write_text
from planner.plan.checks import degrees_text
from planner.plan.plan_file import read_plan, write_plan
from planner.plan.schema import Plan, PredictionSection
from planner.render import kind_of_rows, rank_name, seconds, size, sizes_text

if TYPE_CHECKING:
    from planner.executor.options import RunOptions

SEARCH_S = 60.0  # for other plans


def register(app: typer.Typer) -> None:
    """Adds ``verify`` to ``app``."""
    app.command("verify")(verify)


def verify(  # over 6 arguments: one for each option of the command
    plan_file: Annotated[Path, typer.Argument(metavar="PLAN", help="plan.json, from `planner search`")],
    steps: Annotated[int, typer.Option(min=1, help="Steps measured, after two to warm up.")] = 5,
    data: Annotated[Path | None, typer.Option(help="As for `planner run`.")] = None,
    data_dtype: Annotated[str | None, typer.Option(metavar="uint8|uint16|uint32", help="As for `planner run`.")] = None,
    top: Annotated[
        int, typer.Option(min=1, help="Measure as many plans: this one, and the best others of another search.")
    ] = 1,
    keep: Annotated[Path | None, typer.Option(help="With --top: write the fastest plan here.")] = None,
    hardware: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="With --top: the profile of your own that the plan was made with."),
    ] = None,
    offload_dir: Annotated[Path | None, typer.Option(help="As for `planner run`.")] = None,
    timeout: Annotated[float, typer.Option(min=1, max=1e7, help="Seconds that a rank may wait for another.")] = 300.0,
    trust: Trust = False,
    as_json: Annotated[bool, typer.Option("--json", help="Rows as JSON on stdout.")] = False,
    output: Annotated[
        Path | None,
        typer.Option("-o", "--output", help="Write what was measured of PLAN here, for `planner calibrate`."),
    ] = None,
) -> int:
    """Run a few steps of a plan for real and print predicted beside measured: time by part, memory by rank."""
    check_output(output, reads=[plan_file])
    check_output(keep)
    for option, value in {"--keep": keep, "--hardware": hardware}.items():
        if value is not None and top == 1:
            raise InputError(f"{option} is of several plans", hint=f"add --top K, or leave {option} out")
    plan = read_plan(plan_file, trust=trust)
    prediction = _prediction(plan) if top == 1 else None
    if top > 1:
        _check_profile(plan, hardware)
    with uncollected():
        from planner.executor.options import DataOptions, RunOptions
        from planner.executor.outcome import on_all_ranks

    read = DataOptions(data, token_dtype(data_dtype, data))
    options = RunOptions(steps=steps, seed=0, timeout_s=timeout, data=read, offload_dir=offload_dir)
    options.check_offload(plan.offload)
    each = partial(_measured_each, plan, lambda: _others(plan, top - 1, hardware, timeout), options)
    found = on_all_ranks(plan, each if top > 1 else lambda: _measured(plan, options))
    if found is None:
        return 0
    measured = found if top == 1 else found["found"][0]
    if output is not None:
        write_text(output, measured_text(plan_file, output, measured))
    if prediction is None:
        return _show_each(plan, found, keep, as_json=as_json)
    times, memory = time_rows(prediction, measured), memory_rows(plan, prediction, measured)
    if as_json:
        typer.echo(json.dumps({"time": times, "memory": memory, "measured": measured}))
        return 0
    console = data_console()
    spread = f"{seconds(min(measured['step_times_s']))} to {seconds(max(measured['step_times_s']))}"
    console.print(_table(f"Time of a step: {steps} measured, {spread}; the median counts", times, seconds))
    console.print(_table(f"Peak memory by {kind_of_rows(plan)}: {measured['memory_is']}", memory, size))
    return 0


def _measured(plan: Plan, options: RunOptions) -> dict[str, Any]:
    """Called on every rank, as what follows: a launcher does without importing the executor."""
    with uncollected():
        from planner.executor.verify import measure
    return measure(plan, options)


def _measured_each(plan: Plan, others: Callable[[], list[Plan]], options: RunOptions) -> dict[str, Any]:
    with uncollected():
        from planner.executor.verify import measure_each
    return measure_each(plan, others, options)


def _others(plan: Plan, number: int, hardware: str | None, timeout_s: float) -> list[Plan]:
    """Called on rank 0, for which the other ranks wait."""
    from planner.api.candidates import other_plans

    return other_plans(plan, number, hardware, min(SEARCH_S, timeout_s / 2))


def _check_profile(plan: Plan, hardware: str | None) -> None:
    """Before ranks start: HardwareError without the plan's profile, InputError where ``hardware`` is another."""
    from planner.request import load_cluster

    named = load_cluster(hardware or plan.hardware, plan.num_devices, []).profile.name
    if named != plan.hardware:
        raise InputError(
            f"the plan was priced on {plan.hardware}, and {hardware} is {named}: other plans would not compare",
            hint=f"price it there first: planner estimate PLAN --hardware {hardware} -o NEW",
        )


def _show_each(plan: Plan, each: dict[str, Any], keep: Path | None, *, as_json: bool) -> int:
    """All plans that were measured, the fastest first, which is written to ``keep``."""
    plans = [plan, *(Plan.model_validate(text).model_copy(update={"model": plan.model}) for text in each["plans"][1:])]
    rows = [plan_row(*pair) for pair in zip(plans, each["found"], strict=True)]
    order = sorted(range(len(rows)), key=lambda i: (rows[i]["measured_s"] is None, rows[i]["measured_s"]))
    if keep is not None:
        write_plan(plans[order[0]], keep)
    if as_json:
        typer.echo(json.dumps({"plans": [{**rows[index], "is_given": index == 0} for index in order]}))
        return 0
    table = Table(title="Measured, the fastest first: the median step", title_justify="left")
    for name in ("layout", "predicted", "measured", "from", "to", ""):
        table.add_column(name, justify="left" if name in ("layout", "") else "right")
    for index in order:
        row, word = rows[index], "" if index else "the given plan"
        times = (row["predicted_s"], row["measured_s"], row["fastest_s"], row["slowest_s"])
        table.add_row(row["layout"], *("" if time is None else seconds(time) for time in times), row["refused"] or word)
    data_console().print(table)
    return 0


def plan_row(plan: Plan, found: dict[str, Any]) -> dict[str, Any]:
    """A plan in words, and its step predicted and measured: seconds. ``refused`` says why it was not measured."""
    pipeline, prediction = plan.pipeline, plan.prediction
    schedule = (str(pipeline.schedule),) if plan.mesh.pp > 1 else ()
    degrees = [text for text in degrees_text(plan).split() if not text.endswith("=1")] or ["one process"]
    words = (*degrees, f"ZeRO {plan.zero_stage}", *schedule, f"micro-batch {sizes_text(pipeline)}")
    times = found.get("step_times_s")
    return {
        "layout": ", ".join(words),
        "predicted_s": None if prediction is None else prediction.step_time_s,
        "measured_s": found.get("step_time_s"),
        "fastest_s": min(times) if times else None,
        "slowest_s": max(times) if times else None,
        "refused": found.get("refused", ""),
    }


def measured_text(plan_file: Path, output: Path, measured: dict[str, Any]) -> str:
    """What `planner calibrate` reads: the plan, named from the folder of the file, its step time and its memory."""
    plan = os.path.relpath(plan_file.resolve(), output.resolve().parent)
    found = {"plan": plan, "step_time_s": measured["step_time_s"], "peak_memory_bytes": measured["memory_bytes"]}
    return json.dumps(found, indent=1) + "\n"


def time_rows(prediction: PredictionSection, measured: dict[str, Any]) -> list[dict[str, Any]]:
    """The step, what can be measured by itself, and what only one side knows: seconds."""
    step_s, optimizer_s = prediction.step_time_s, prediction.breakdown_s.get(Term.OPTIMIZER, 0.0)
    rows = [
        _row("step", step_s, measured["step_time_s"]),
        _row(Term.OPTIMIZER.label, optimizer_s, measured["optimizer_s"]),
        _row("all but the optimiser", step_s - optimizer_s, measured["step_time_s"] - measured["optimizer_s"]),
    ]
    others = [term for term in Term if term is not Term.OPTIMIZER and prediction.breakdown_s.get(term, 0.0) > 0]
    rows += [_row(f"  of it {term.label}", prediction.breakdown_s[term], None) for term in others]
    kinds: dict[str, float] = measured["collectives_s"]
    return rows + [_row(f"  {kind} in flight, waiting included", None, value) for kind, value in kinds.items()]


def memory_rows(plan: Plan, prediction: PredictionSection, measured: dict[str, Any]) -> list[dict[str, Any]]:
    """What tensors hold at the peak of each pipeline rank or group of replicas: bytes; without what drivers keep."""
    rows: list[dict[str, Any]] = []
    for rank, found in enumerate(measured["memory_bytes"]):
        ledger = prediction.memory_breakdown_bytes[rank] if prediction.memory_breakdown_bytes else {}
        held = sum(v for term, v in ledger.items() if MemoryTerm(term).counted is Counted.ALLOCATED)
        rows.append(_row(rank_name(plan, rank), held or None, found))
    return rows


def _row(part: str, predicted: float | None, measured: float | None) -> dict[str, Any]:
    ratio = measured / predicted if predicted and measured is not None else None
    return {"part": part, "predicted": predicted, "measured": measured, "ratio": ratio}


def _prediction(plan: Plan) -> PredictionSection:
    if plan.prediction is None:
        raise PlanError("this plan has no prediction to hold a run against",
                        hint="let it be priced first: planner estimate PLAN -o plan.json")  # fmt: skip
    return plan.prediction


def _table(title: str, rows: list[dict[str, Any]], text: Any) -> Table:
    table = Table(title=title, title_justify="left")
    table.add_column("part")
    for name in ("predicted", "measured", "measured / predicted"):
        table.add_column(name, justify="right")
    for row in rows:
        cells = ["" if row[key] is None else text(row[key]) for key in ("predicted", "measured")]
        table.add_row(row["part"], *cells, "" if row["ratio"] is None else f"{row['ratio']:.2f}")
    return table
