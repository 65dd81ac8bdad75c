"""``planner search``: the main job."""

from __future__ import annotations

import shlex
import time
from enum import StrEnum
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.live import Live
from rich.markup import escape
from rich.spinner import Spinner

from costmodels.vocabulary.choices import ContextMethod, Offload, Optimizer, Precision, Preference, Recompute
from costmodels.vocabulary.schedules import ScheduleName
from planner.cli.front import Shown, range_progress, show_range
from planner.cli.options import WRITES_PLAN, AsJson, Framework, GpuRange, Hardware, TokenCount, gpu_range
from planner.cli.process import interruptible, process_began_s, uncollected
from planner.cli.terminal import data_console, talk_console
from planner.errors import InputError, TimeLimitError
from planner.layout.deadline import Deadline, OutOfTimeError
from planner.output_file import check_output, is_stdout
from planner.plan.plan_file import plan_json, write_plan
from planner.plan.schema import Plan
from planner.render import seconds, show_plan

if TYPE_CHECKING:
    from planner.api import Answer
    from planner.request import Request


class Objective(StrEnum):
    """What is minimised. Of plans over the same equal GPUs the cheapest step is the fastest one."""

    TIME = "time"
    COST = "cost"


_PINS = "Pins (each fixes one choice)"


def register(app: typer.Typer) -> None:
    """Adds ``search`` to ``app``."""
    app.command("search")(search)


def search(  # over 6 arguments: one for each option of the command line
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="model.py[:factory], config.json, a preset or graph.json")
    ],
    gpus: Annotated[
        GpuRange | None,
        typer.Option(
            "--gpus",
            parser=gpu_range,
            metavar="N|A..B",
            help="Number of GPUs, of which some may stay idle, or a range: a Pareto front of time, GPUs, memory and "
            "dollars; default: what --hardware counts.",
        ),
    ] = None,
    hardware: Hardware = None,
    seq_len: Annotated[int | None, typer.Option(min=1, help="Tokens per sequence; default: the model's.")] = None,
    global_batch: Annotated[
        int | None,
        typer.Option(min=1, help="Sequences per optimiser step; default: 0.5 to 16 Mi tokens, by the model's size."),
    ] = None,
    precision: Annotated[Precision, typer.Option(help="Compute dtype.")] = Precision.BF16,
    optimizer: Annotated[Optimizer, typer.Option(help="Optimiser.")] = Optimizer.ADAMW,
    objective: Annotated[
        Objective, typer.Option(help="What to minimise: time, or dollars a step, for which GPUs may stay idle.")
    ] = Objective.TIME,
    prefer: Annotated[
        Preference, typer.Option(help="Of plans that are predicted alike (within 0.1 %): the simplest, or the fastest.")
    ] = Preference.SIMPLE,
    framework: Framework = None,
    idle: Annotated[
        bool, typer.Option("--idle/--no-idle", help="Whether GPUs may stay idle where fewer are faster.")
    ] = True,
    robust: Annotated[
        bool, typer.Option("--robust", help="Best where links or a host are slow: the worst of a few cases decides.")
    ] = False,
    tokens: TokenCount = None,
    top: Annotated[
        int | None,
        typer.Option(
            "--top", min=1, help="Rows of the comparison, unlike in mesh, ZeRO or schedule; default: 5 at most."
        ),
    ] = None,
    memory_risk: Annotated[
        float | None,
        typer.Option(metavar="SHARE", help="Risk that the plan does not fit after all, 0.5 at most; default: 0.05."),
    ] = None,
    time_limit: Annotated[
        float | None, typer.Option(min=0, max=1e9, help="Seconds after start-up; the best plan so far is kept.")
    ] = None,
    tp: Annotated[int | None, typer.Option(help="Tensor-parallel degree.", rich_help_panel=_PINS)] = None,
    pp: Annotated[int | None, typer.Option(help="Pipeline-parallel degree.", rich_help_panel=_PINS)] = None,
    dp: Annotated[
        int | None, typer.Option(help="Data-parallel degree, sharded and replicated together.", rich_help_panel=_PINS)
    ] = None,
    cp: Annotated[int | None, typer.Option(help="Context-parallel degree.", rich_help_panel=_PINS)] = None,
    cp_method: Annotated[
        ContextMethod | None,
        typer.Option(help="How attention reaches other ranks' positions.", rich_help_panel=_PINS),
    ] = None,
    ep: Annotated[
        int | None, typer.Option(help="Expert-parallel degree, inside dp * cp (1: not split).", rich_help_panel=_PINS)
    ] = None,
    etp: Annotated[
        int | None,
        typer.Option(
            help="Tensor-parallel degree of experts: tp, or 1 (ep then lies inside dp * cp * tp).",
            rich_help_panel=_PINS,
        ),
    ] = None,
    zero: Annotated[int | None, typer.Option(min=0, max=3, help="ZeRO stage.", rich_help_panel=_PINS)] = None,
    micro_batch: Annotated[
        int | None, typer.Option(min=1, help="Sequences per micro-batch.", rich_help_panel=_PINS)
    ] = None,
    schedule: Annotated[ScheduleName | None, typer.Option(help="Pipeline schedule.", rich_help_panel=_PINS)] = None,
    virtual_stages: Annotated[
        int | None, typer.Option(min=1, help="Pipeline stages per rank.", rich_help_panel=_PINS)
    ] = None,
    recompute: Annotated[
        Recompute | None, typer.Option(help="Activation checkpointing.", rich_help_panel=_PINS)
    ] = None,
    offload: Annotated[
        Offload | None,
        typer.Option(help="Where optimiser states live (default: none, on the GPUs).", rich_help_panel=_PINS),
    ] = None,
    offload_activations: Annotated[
        bool | None,
        typer.Option(
            "--offload-activations/--no-offload-activations",
            help="Blocks may keep activations in host memory (default: no).",
            rich_help_panel=_PINS,
        ),
    ] = None,
    sequence_parallel: Annotated[
        bool | None,
        typer.Option(
            "--sequence-parallel/--no-sequence-parallel",
            help="Split activations between blocks.",
            rich_help_panel=_PINS,
        ),
    ] = None,
    check: Annotated[
        bool,
        typer.Option(
            "--check", help="Run every pipeline rank's own code at full size, as `planner check`, afterwards."
        ),
    ] = False,
    as_json: AsJson = False,
    output: Annotated[Path | None, typer.Option("-o", "--output", help=WRITES_PLAN)] = None,
) -> int:
    """Find the fastest way to split the training of MODEL over a cluster, with proof."""
    from planner.layout.layout import Pins
    from planner.request import DEFAULT_FRAMEWORK, DEFAULT_RISK, Request

    pins = Pins(
        tp=tp, pp=pp, dp=dp, cp=cp, ep=ep, etp=etp, zero=zero, micro_batch=micro_batch, schedule=schedule,
        virtual_stages=virtual_stages, recompute=recompute, sequence_parallel=sequence_parallel, offload=offload,
        cp_method=cp_method, offload_activations=offload_activations,
    )  # fmt: skip
    request = Request(
        model=model, num_devices=None if gpus is None else gpus.last, hardware=hardware, seq_len=seq_len,
        global_batch_size=global_batch,
        precision=precision, optimizer=optimizer, pins=pins, time_limit_s=time_limit, num_runners_up=top,
        prefer=prefer, framework=framework or DEFAULT_FRAMEWORK,
        memory_risk=DEFAULT_RISK if memory_risk is None else memory_risk, may_idle=idle, robust=robust,
        num_tokens=tokens,
    )  # fmt: skip
    check_output(output, reads=[model, hardware])
    if check and (framework or not (gpus is None or gpus.is_one)):
        raise InputError(
            "--check runs one plan by planner's own executor, not those of --framework NAME or --gpus A..B",
            hint="leave --check out, or search for one number of GPUs without --framework",
        )
    import_module("planner.api.front")  # a part of the start-up, for which no limit counts
    deadline = Deadline.answering_within(time_limit, began_s=process_began_s())
    try:
        with interruptible(deadline), uncollected():
            if gpus is not None and not gpus.is_one:
                return show_range(request, gpus.first, deadline, Shown(objective is Objective.COST, as_json, output))
            answer = _find(request, deadline, by_cost=objective is Objective.COST)
            notes = answer.notes if framework else (*answer.notes, _others(request))
            show_answer(answer.plan, notes, as_json=as_json, output=output)
        if answer.interrupted or deadline.is_cut:
            return 130
        if framework is None:
            _say_of_loss(answer.plan, deadline)
        return _check(answer.plan) if check else 0
    except KeyboardInterrupt:  # there was no plan yet
        talk_console().print("interrupted")
        return 130
    except OutOfTimeError:  # nor is there one now
        raise TimeLimitError from None


def show_answer(plan: Plan, notes: tuple[str, ...], *, as_json: bool, output: Path | None) -> None:
    """Notes on stderr, the plan as a table or JSON on stdout, and in a file where one is named: ``-`` is stdout."""
    talk = talk_console()
    for note in (*notes, *plan.warnings):
        talk.print(f"[yellow]note:[/] {escape(note)}", soft_wrap=True)
    if output is not None and not is_stdout(output):
        write_plan(plan, output)
        talk.print(f"wrote {escape(str(output))}", soft_wrap=True)
    if as_json or is_stdout(output):
        typer.echo(plan_json(plan), nl=False)
    else:
        data_console().print(show_plan(plan))


def _say_of_loss(plan: Plan, deadline: Deadline) -> None:
    """Said last: to find it out takes some seconds, and the plan is there already."""
    from planner.executor.loss_note import loss_note

    note = loss_note(plan, deadline.left_s)
    if note is not None:
        talk_console().print(f"[yellow]note:[/] {escape(note)}", soft_wrap=True)


def _check(plan: Plan) -> int:
    """What `planner check` says of the plan, on stderr; its exit code."""
    from planner.cli.check import check_found  # no search needs it that is not asked

    return check_found(plan)


def _others(request: Request) -> str:
    """Where the best plans of other frameworks are to be had: all of them take many times this search."""
    counted = [] if request.num_devices is None else ["--gpus", str(request.num_devices)]
    named = ["--hardware", request.hardware] if isinstance(request.hardware, str) else []
    words = ["planner", "compare", request.model, *counted, *named]
    return f"planned as our own executor trains; the best plan of each other framework: {shlex.join(words)}"


def _find(request: Request, deadline: Deadline, *, by_cost: bool) -> Answer:
    """The search, with its progress on a terminal's stderr."""
    from planner.api import find_plan

    talk = talk_console()
    if by_cost:
        from planner.api.front import cheapest_plan

        return cheapest_plan(request, range_progress(), deadline)
    if not talk.is_terminal:
        return find_plan(request, None, deadline)
    spinner = Spinner("dots", f"tracing {escape(request.model)}")
    shown = 0.0
    with Live(spinner, console=talk, transient=True, refresh_per_second=10):

        def progress(visited: int, bound_s: float, best_s: float | None) -> None:
            nonlocal shown
            if time.monotonic() - shown > 0.1:
                shown = time.monotonic()
                best = "none yet" if best_s is None else seconds(best_s)
                spinner.update(text=f"visited {visited} layouts, best {best}, none left below {seconds(bound_s)}")

        return find_plan(request, progress, deadline)
