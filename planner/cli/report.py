"""``planner report``: a plan as one HTML page that needs no network."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from costmodels.vocabulary.choices import Searches
from planner.cli.options import GpuRange, Hardware, TokenCount, Trust, gpu_range
from planner.cli.terminal import talk_console
from planner.output_file import check_output, write_text
from planner.plan.plan_file import read_plan


def register(app: typer.Typer) -> None:
    """Adds ``report`` to ``app``."""
    app.command("report")(report)


def report(  # over 6 arguments: one for each option of the command line
    plan_file: Annotated[Path, typer.Argument(metavar="PLAN", help="plan.json, from `planner search` or by hand")],
    output: Annotated[Path, typer.Option("-o", "--output", help="The page.")],
    hardware: Hardware = None,
    gpus: Annotated[
        GpuRange | None,
        typer.Option("--gpus", parser=gpu_range, metavar="A..B", help="Search these numbers of GPUs, too: a chart."),
    ] = None,
    tokens: TokenCount = None,
    searches: Annotated[
        Searches, typer.Option("--search", help="For which changes to search for the best plan, too.")
    ] = Searches.MEMORY,
    time_limit: Annotated[
        float | None, typer.Option(min=0, help="Seconds of each search; default: 20 of those not asked for.")
    ] = None,
    trust: Trust = False,
) -> None:
    """Write a page about a plan: where time and memory go, which GPU does what, its timeline, other plans."""
    check_output(output, reads=[plan_file, hardware])
    plan = read_plan(plan_file, trust=trust)
    from planner.api import same_run, schedule_plan
    from planner.api.explain import Wishes
    from planner.api.explain import explain as explained
    from planner.api.front import find_front
    from planner.layout.deadline import Deadline
    from planner.render_report.page import Report, page

    talk = talk_console()
    with talk.status("pricing and searching"):
        found = explained(plan, hardware, Wishes(None, tokens, searches, time_limit))
        timeline, _ = schedule_plan(plan, hardware)
        front = ()
        if gpus is not None:
            request = same_run(plan, gpus.last, hardware, {} if plan.search is None else plan.search.pins)
            limited = replace(request, memory_risk=found.memory_risk, time_limit_s=time_limit)
            front = find_front(limited, gpus.first, deadline=Deadline.answering_within(time_limit)).plans
    for note in found.notes:
        talk.print(f"[yellow]note:[/] {escape(note)}", soft_wrap=True)
    write_text(output, page(Report(found, timeline, plan_file, front)))
    talk.print(f"wrote {escape(str(output))}", soft_wrap=True)
