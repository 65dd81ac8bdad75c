"""``planner explain``: why a plan is as it is, and what would change it."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape

from costmodels.vocabulary.choices import Searches
from planner.cli.options import Hardware, TokenCount, Trust, pins_of
from planner.cli.terminal import data_console, talk_console
from planner.plan.plan_file import read_plan

if TYPE_CHECKING:
    from planner.api.explain import Explanation


def register(app: typer.Typer) -> None:
    """Adds ``explain`` to ``app``."""
    app.command("explain")(explain)


def explain(  # over 6 arguments: one for each option of the command line
    plan_file: Annotated[Path, typer.Argument(metavar="PLAN", help="plan.json, from `planner search` or by hand")],
    hardware: Hardware = None,
    why_not: Annotated[
        str | None,
        typer.Option("--why-not", metavar="PINS", help="What you would have fixed, as tp=4,pp=2: why not that?"),
    ] = None,
    tokens: TokenCount = None,
    searches: Annotated[
        Searches, typer.Option("--search", help="For which changes to search for the best plan, too.")
    ] = Searches.MEMORY,
    time_limit: Annotated[
        float | None, typer.Option(min=0, help="Seconds of each search; default: 20 of those not asked for.")
    ] = None,
    trust: Trust = False,
    as_json: Annotated[bool, typer.Option("--json", help="All of it as JSON on stdout, nothing else there.")] = False,
) -> None:
    """Say why a plan takes its time and memory, what others lose, and what would change that."""
    plan = read_plan(plan_file, trust=trust)
    pins = None if why_not is None else pins_of(why_not)
    from planner.api.explain import Wishes
    from planner.api.explain import explain as explained
    from planner.render_explain import show_explanation

    talk = talk_console()
    with talk.status("pricing and searching"):
        found = explained(plan, hardware, Wishes(pins, tokens, searches, time_limit))
    for note in found.notes:
        talk.print(f"[yellow]note:[/] {escape(note)}", soft_wrap=True)
    if as_json:
        typer.echo(json.dumps(document(found), indent=2))
    else:
        out = data_console()
        out.print(show_explanation(found, "#" if out.options.ascii_only else "█"))


def document(found: Explanation) -> dict[str, object]:
    """What ``--json`` prints: times in seconds, memory in bytes; of plans only the one that ``--why-not`` found."""
    alternatives = [*found.runners_up, *([] if found.why_not is None else [found.why_not])]
    shown = [
        {
            **asdict(each),
            "candidate": None if each.candidate is None else each.candidate.model_dump(mode="json"),
            "plan": None if each.plan is None else each.plan.model_dump(mode="json"),
        }
        for each in alternatives
    ]
    prediction = found.plan.prediction
    assert prediction is not None
    return {
        "step_time_s": prediction.step_time_s,
        "binding": asdict(found.binding),
        "time_s": dict(found.time_s),
        "memory": asdict(found.memory),
        "compute": asdict(found.compute),
        "runners_up": shown[: len(found.runners_up)],
        "why_not": None if found.why_not is None else shown[-1],
        "what_if": [
            {**asdict(each), "mesh": None if each.mesh is None else each.mesh.model_dump()} for each in found.what_if
        ],
        "prices": {**asdict(found.prices), "run": None if found.prices.run is None else found.prices.run.model_dump()},
        "notes": list(found.notes),
    }
