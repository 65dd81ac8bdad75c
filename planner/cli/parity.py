"""``planner parity``: one step under a plan against one process, gradient by gradient."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from planner.cli.options import Trust
from planner.cli.process import uncollected
from planner.cli.run import token_dtype
from planner.cli.terminal import data_console
from planner.plan.plan_file import read_plan

if TYPE_CHECKING:
    from planner.executor.options import ParityOptions
    from planner.plan.schema import Plan


def register(app: typer.Typer) -> None:
    """Adds ``parity`` to ``app``."""
    app.command("parity")(parity)


def parity(  # over 6 arguments: one for each option of the command line
    plan_file: Annotated[Path, typer.Argument(metavar="PLAN", help="plan.json, from `planner search` or by hand")],
    tolerance: Annotated[float, typer.Option(min=0, help="Of a gradient's norm, and of a parameter's.")] = 1e-5,
    top: Annotated[int, typer.Option("--top", min=1, help="Rows shown, the worst first.")] = 10,
    seed: Annotated[int, typer.Option(min=0, help="Of the weights and the samples.")] = 0,
    data: Annotated[Path | None, typer.Option(help="As for `planner run`.")] = None,
    data_dtype: Annotated[str | None, typer.Option(metavar="uint8|uint16|uint32", help="As for `planner run`.")] = None,
    timeout: Annotated[float, typer.Option(min=1, max=1e7, help="Seconds that a rank may wait for another.")] = 300.0,
    trust: Trust = False,
    as_json: Annotated[bool, typer.Option("--json", help="All rows as JSON on stdout.")] = False,
) -> int:
    """One SGD step in float32 under the plan and in one process: exit code 0 where they are equal, 1 where not."""
    plan = read_plan(plan_file, trust=trust)
    with uncollected():
        from planner.executor.options import ParityOptions
        from planner.executor.outcome import on_all_ranks

    options = ParityOptions(seed, data, token_dtype(data_dtype, data), timeout)
    outcome = on_all_ranks(plan, lambda: _compared(plan, options))
    if outcome is None:
        return 0
    rows: list[dict[str, Any]] = outcome["rows"]
    wrong = [row["fqn"] for row in rows if not _worst(row) <= tolerance]
    loss_error = abs(outcome["loss"] / outcome["expected_loss"] - 1.0)
    is_equal = not wrong and loss_error <= tolerance
    if as_json:
        typer.echo(json.dumps({**outcome, "tolerance": tolerance, "equal": is_equal}))
    else:
        data_console().print(_table(rows, tolerance, top))
        verdict = "equal" if is_equal else f"NOT equal: {len(wrong)} parameters are off"
        typer.echo(
            f"{verdict}: {len(rows)} parameters to {tolerance:g}, "
            f"loss {outcome['loss']:.6f} against {outcome['expected_loss']:.6f} in one process"
        )
    return 0 if is_equal else 1


def _compared(plan: Plan, options: ParityOptions) -> dict[str, Any]:
    """Called on every rank: a launcher does without importing the executor."""
    with uncollected():
        from planner.executor.parity import compare
    return compare(plan, options)


def _worst(row: dict[str, Any]) -> float:
    """The larger error; a parameter that no rank has is infinitely wrong."""
    return max(row["gradient_error"], row["parameter_error"]) if row["num_copies"] else float("inf")


def _table(rows: list[dict[str, Any]], tolerance: float, top: int) -> Table:
    table = Table(title=f"The {min(top, len(rows))} worst of {len(rows)} parameters", title_justify="left")
    for name in ("parameter", "gradient", "its error", "error after", "ranks", ""):
        table.add_column(name, justify="left" if name in ("parameter", "") else "right", overflow="fold")
    for row in sorted(rows, key=_worst, reverse=True)[:top]:
        table.add_row(
            row["fqn"],
            f"{row['gradient_norm']:.3g}",
            f"{row['gradient_error']:.1e}",
            f"{row['parameter_error']:.1e}",
            str(row["num_copies"]),
            "" if _worst(row) <= tolerance else "wrong",
        )
    return table
