"""``planner schedule``: the predicted step as a Gantt chart in the terminal, and as a trace for Perfetto."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from planner.cli.options import Hardware, OtherGpus, Trust
from planner.cli.terminal import data_console, talk_console
from planner.output_file import check_output, is_stdout, write_text
from planner.plan.plan_file import read_plan


def register(app: typer.Typer) -> None:
    """Adds the command to ``app``."""
    app.command("schedule")(schedule)


def schedule(
    plan_file: Annotated[Path, typer.Argument(metavar="PLAN", help="plan.json, from `planner search` or by hand")],
    hardware: Hardware = None,
    gpus: OtherGpus = None,
    trust: Trust = False,
    trace: Annotated[
        Path | None,
        typer.Option(help="Write the step here, - for stdout: Chrome trace events, for ui.perfetto.dev."),
    ] = None,
) -> None:
    """Draw the predicted step of a plan: what every pipeline rank does when, action by action."""
    check_output(trace, reads=[plan_file, hardware])
    plan = read_plan(plan_file, trust=trust)
    from planner.api import schedule_plan
    from planner.render_schedule import show_timeline
    from planner.report.trace_events import trace_json

    timeline, notes = schedule_plan(plan, hardware, gpus)
    talk = talk_console()
    for note in notes:
        talk.print(f"[yellow]note:[/] {escape(note)}", soft_wrap=True)
    if trace is not None:
        write_text(trace, trace_json(timeline))
    if is_stdout(trace):
        return
    if trace is not None:
        talk.print(f"wrote {escape(str(trace))}", soft_wrap=True)
    out = data_console()
    out.print(show_timeline(timeline, out.width))
