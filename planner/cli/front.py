"""``planner search --gpus A..B``: plans over several numbers of GPUs, side by side."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import typer
from rich.markup import escape

from planner.cli.terminal import data_console, talk_console
from planner.layout.deadline import Deadline
from planner.output_file import is_stdout
from planner.plan.plan_file import plan_json, write_plan
from planner.plan.schema import Plan
from planner.render import seconds
from planner.render_front import show_front

if TYPE_CHECKING:
    from planner.api.front import Front
    from planner.request import Request


class Shown(NamedTuple):
    """What is chosen from the front, and how it is shown."""

    by_cost: bool
    as_json: bool
    output: Path | None


def range_progress() -> Callable[[int, Plan | None], None]:
    """A line on stderr for each number of GPUs when its plan is found."""
    talk = talk_console()

    def progress(count: int, plan: Plan | None) -> None:
        if plan is not None and plan.prediction is not None:
            talk.print(f"{count} GPUs: {seconds(plan.prediction.step_time_s)} a step", soft_wrap=True)

    return progress


def show_range(request: Request, first: int, deadline: Deadline, shown: Shown) -> int:
    """The front on stdout, the chosen plan in the file that is named; the exit code."""
    from planner.api.front import find_front

    front = find_front(request, first, by_cost=shown.by_cost, progress=range_progress(), deadline=deadline)
    talk = talk_console()
    for note in front.notes:
        talk.print(f"[yellow]note:[/] {escape(note)}", soft_wrap=True)
    if front.dominated:
        counts = ", ".join(map(str, front.dominated))
        talk.print(f"[yellow]note:[/] no better in anything than another: {counts} GPUs", soft_wrap=True)
    for count, why in front.refused:
        talk.print(f"[yellow]note:[/] {count} GPUs: {escape(why)}", soft_wrap=True)
    if is_stdout(shown.output):
        typer.echo(plan_json(front.chosen), nl=False)
        return 130 if front.interrupted or deadline.is_cut else 0
    if shown.output is not None:
        write_plan(front.chosen, shown.output)
        talk.print(f"wrote {escape(str(shown.output))}", soft_wrap=True)
    if shown.as_json:
        typer.echo(json.dumps(_document(front, by_cost=shown.by_cost), indent=2))
    else:
        data_console().print(show_front(front.plans, front.chosen, by_cost=shown.by_cost))
    return 130 if front.interrupted or deadline.is_cut else 0


def _document(front: Front, *, by_cost: bool) -> dict[str, object]:
    """``chosen`` is the place in ``front`` of the plan that ``-o`` writes."""
    return {
        "objective": "cost" if by_cost else "time",
        "chosen": front.plans.index(front.chosen),
        "front": [_row(plan) for plan in front.plans],
        "dominated": list(front.dominated),
        "refused": [{"num_devices": count, "why": why} for count, why in front.refused],
    }


def _row(plan: Plan) -> dict[str, object]:
    assert plan.prediction is not None
    return {
        "num_devices": plan.num_devices,
        "step_time_s": plan.prediction.step_time_s,
        "tokens_per_s_per_gpu": plan.prediction.tokens_per_s_per_gpu,
        "peak_memory_bytes": max(plan.prediction.peak_memory_bytes),
        "usd_per_step": plan.prediction.usd_per_step,
        "plan": plan.model_dump(mode="json"),
    }
