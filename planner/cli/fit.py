"""``planner fit``: whether a model fits, and how far from the edge."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Annotated

import typer
from rich.markup import escape

from costmodels.vocabulary.choices import Offload, Optimizer, Precision, Recompute
from planner.cli.options import Framework, Hardware
from planner.cli.terminal import data_console, talk_console

NO_FIT = 3


def register(app: typer.Typer) -> None:
    """Adds ``fit`` to ``app``."""
    app.command("fit")(fit)


def fit(  # over 6 arguments: one for each option of the command line
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="model.py[:factory], config.json, a preset or graph.json")
    ],
    hardware: Hardware = None,
    gpus: Annotated[
        int | None, typer.Option("--gpus", min=1, help="Number of GPUs; default: what --hardware counts, or one node.")
    ] = None,
    seq_len: Annotated[int | None, typer.Option(min=1, help="Tokens per sequence; default: the model's.")] = None,
    global_batch: Annotated[int | None, typer.Option(min=1, help="Sequences per optimiser step.")] = None,
    precision: Annotated[Precision, typer.Option(help="Compute dtype.")] = Precision.BF16,
    optimizer: Annotated[Optimizer, typer.Option(help="Optimiser.")] = Optimizer.ADAMW,
    framework: Framework = None,
    memory_risk: Annotated[
        float | None, typer.Option(metavar="SHARE", help="Risk that it does not fit after all; default: 0.05.")
    ] = None,
    tp: Annotated[int | None, typer.Option(help="Pin: tensor-parallel degree.")] = None,
    pp: Annotated[int | None, typer.Option(help="Pin: pipeline-parallel degree.")] = None,
    dp: Annotated[int | None, typer.Option(help="Pin: data-parallel degree.")] = None,
    cp: Annotated[int | None, typer.Option(help="Pin: context-parallel degree.")] = None,
    zero: Annotated[int | None, typer.Option(min=0, max=3, help="Pin: ZeRO stage.")] = None,
    micro_batch: Annotated[int | None, typer.Option(min=1, help="Pin: sequences per micro-batch.")] = None,
    recompute: Annotated[Recompute | None, typer.Option(help="Pin: activation checkpointing.")] = None,
    offload: Annotated[Offload | None, typer.Option(help="Pin: where optimiser states live.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="The answer as JSON on stdout, nothing else there.")] = False,
) -> int:
    """Say whether MODEL fits (exit code 0, else 3), the memory of the worst rank, and what else fits."""
    from planner.api.fit import find_fit
    from planner.layout.layout import Pins
    from planner.render_fit import show_fit
    from planner.request import DEFAULT_FRAMEWORK, DEFAULT_RISK, Request

    pins = Pins(tp=tp, pp=pp, dp=dp, cp=cp, zero=zero, micro_batch=micro_batch, recompute=recompute, offload=offload)
    request = Request(
        model=model, num_devices=gpus, hardware=hardware, seq_len=seq_len, global_batch_size=global_batch,
        precision=precision, optimizer=optimizer, pins=pins, framework=framework or DEFAULT_FRAMEWORK,
        memory_risk=DEFAULT_RISK if memory_risk is None else memory_risk,
    )  # fmt: skip
    talk = talk_console()
    with talk.status("tracing") as status:
        found = find_fit(request, status.update)
    for note in found.notes:
        talk.print(f"[yellow]note:[/] {escape(note)}", soft_wrap=True)
    if as_json:
        typer.echo(json.dumps(asdict(found), indent=2))
    else:
        data_console().print(show_fit(found, model))
    if not found.fits:
        talk.print(f"{escape(found.reason)}", soft_wrap=True)
        talk.print(f"[bold]hint:[/] {escape(found.change)}", soft_wrap=True)
    return 0 if found.fits else NO_FIT
