"""``planner replan``: a new plan for the same run after losing or gaining devices."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from planner.cli.options import WRITES_PLAN, AsJson, Hardware, Trust
from planner.cli.search import show_answer
from planner.output_file import check_output
from planner.plan.plan_file import read_plan
from planner.plan.schema import Plan


def register(app: typer.Typer) -> None:
    """Adds ``replan`` to ``app``."""
    app.command("replan")(replan)


def replan(
    plan_file: Annotated[Path, typer.Argument(metavar="PLAN", help="The plan that the run was trained under.")],
    gpus: Annotated[int, typer.Option("--gpus", min=1, help="How many GPUs there are now.")],
    hardware: Hardware = None,
    trust: Trust = False,
    as_json: AsJson = False,
    output: Annotated[Path | None, typer.Option("-o", "--output", help=WRITES_PLAN)] = None,
) -> int:
    """Plan a run again for other devices: the global batch is kept, and any checkpoint of it can be gone on from."""
    check_output(output)
    plan = read_plan(plan_file, trust=trust)
    from planner import api
    from planner.layout.layout import Pins

    answer = api.replan(plan, gpus, hardware)
    if _is_executable(plan) and not _is_executable(answer.plan):  # a run that could be run is to go on
        answer = api.replan(plan, gpus, hardware, Pins(cp=1, ep=1))
    show_answer(answer.plan, answer.notes, as_json=as_json, output=output)
    return 130 if answer.interrupted else 0


def _is_executable(plan: Plan) -> bool:
    from planner.errors import PlanError
    from planner.executor.executable import check_executable

    try:
        check_executable(plan)
    except PlanError:
        return False
    return True
