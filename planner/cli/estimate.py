"""``planner estimate``: prices an existing plan again, without searching."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from planner.cli.options import AsJson, Hardware, OtherGpus, Trust
from planner.cli.search import show_answer
from planner.output_file import check_output
from planner.plan.plan_file import read_plan


def register(app: typer.Typer) -> None:
    """Adds ``estimate`` to ``app``."""
    app.command("estimate")(estimate)


def estimate(  # over 6 arguments: one for each option of the command
    plan_file: Annotated[Path, typer.Argument(metavar="PLAN", help="plan.json, from `planner search` or by hand")],
    hardware: Hardware = None,
    gpus: OtherGpus = None,
    framework: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Price as this framework runs it; said where it cannot run the plan."),
    ] = None,
    trust: Trust = False,
    as_json: AsJson = False,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="Write the plan with its new prediction here.")
    ] = None,
) -> None:
    """Price an existing plan: step time, memory and where they go."""
    check_output(output)
    plan = read_plan(plan_file, trust=trust)
    from planner.api import price_plan

    answer = price_plan(plan, hardware, gpus, framework)
    show_answer(answer.plan, answer.notes, as_json=as_json, output=output)
