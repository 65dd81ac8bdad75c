"""``planner check``: the whole plan at full size, without a device of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from costmodels.vocabulary.terms import Counted, MemoryTerm
from planner.cli.options import Trust
from planner.cli.terminal import data_console, talk_console
from planner.plan.plan_file import read_plan
from planner.plan.schema import Plan
from planner.render import kind_of_rows, rank_name, seconds, size


def register(app: typer.Typer) -> None:
    """Adds ``check`` to ``app``."""
    app.command("check")(check)


def check(
    plan_file: Annotated[Path, typer.Argument(metavar="PLAN", help="plan.json, from `planner search` or by hand")],
    trust: Trust = False,
    as_json: Annotated[bool, typer.Option("--json", help="Rows as JSON on stdout.")] = False,
) -> int:
    """Run every pipeline rank's own code at full size on tensors without values: exit code 0 runnable, 1 not."""
    plan = read_plan(plan_file, trust=trust)
    rows = _checked(plan)
    if as_json:
        problems = _problems_of(plan, rows)
        typer.echo(json.dumps({"runnable": not problems, "ranks": rows}))
        return 1 if problems else 0
    return _show(plan, rows, data_console())


def check_found(plan: Plan) -> int:
    """Checks a plan that was just found, and says on stderr what came of it: the exit code."""
    return _show(plan, _checked(plan), talk_console())


def _checked(plan: Plan) -> list[dict[str, Any]]:
    from planner.executor import check as executor_check

    rows = enumerate(executor_check.check(plan))
    return [{**row, "predicted_bytes": allocated_bytes(plan, index)} for index, row in rows]


def _problems_of(plan: Plan, rows: list[dict[str, Any]]) -> list[str]:
    found = ((rank_name(plan, index, "pipeline rank"), row["problem"]) for index, row in enumerate(rows))
    return [f"{name}: {problem}" for name, problem in found if problem is not None]


def _show(plan: Plan, rows: list[dict[str, Any]], console: Console) -> int:
    table = Table(title="Memory that tensors take at the peak of a step", title_justify="left")
    for name in (kind_of_rows(plan), "predicted", "counted", "counted / predicted", "checked in"):
        table.add_column(name, justify="right")
    for index, row in enumerate(rows):
        predicted, counted = row["predicted_bytes"], row["allocated_bytes"]
        cells = ["" if value is None else size(value) for value in (predicted, counted)]
        ratio = "" if not predicted or counted is None else f"{counted / predicted:.3f}"
        table.add_row(rank_name(plan, index, "").strip(), *cells, ratio, seconds(row["elapsed_s"]))
    console.print(table)
    for note in dict.fromkeys(note for row in rows for note in row["notes"]):
        talk_console().print(f"[yellow]note:[/] {escape(note)}", soft_wrap=True)
    problems = _problems_of(plan, rows)
    said = "\n".join(problems) if problems else f"runnable: all {len(rows)} {kind_of_rows(plan)}s took a step"
    console.print(said, soft_wrap=True, markup=False)
    return 1 if problems else 0


def allocated_bytes(plan: Plan, row: int) -> int | None:
    """What the ledger says that tensors of a row take, without what allocators, libraries and drivers keep besides."""
    if plan.prediction is None or not plan.prediction.memory_breakdown_bytes:
        return None
    ledger = plan.prediction.memory_breakdown_bytes[row]
    return sum(value for term, value in ledger.items() if MemoryTerm(term).counted is Counted.ALLOCATED)
