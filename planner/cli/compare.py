"""``planner compare``: the best plan of each framework, and the user's own set-up."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape

from costmodels.vocabulary.choices import Optimizer, Precision, Recompute
from planner.cli.import_ import config_text
from planner.cli.options import Framework, Hardware, pins_of
from planner.cli.terminal import data_console, talk_console
from planner.errors import InfeasibleError, InputError, TimeLimitError

if TYPE_CHECKING:
    from planner.api.compare import Comparison, Config, Row
    from planner.layout.layout import Pins


def register(app: typer.Typer) -> None:
    """Adds ``compare`` to ``app``."""
    app.command("compare")(compare)


def compare(  # over 6 arguments: one for each option of the command line
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="model.py[:factory], config.json, a preset or graph.json")
    ],
    gpus: Annotated[int | None, typer.Option("--gpus", min=1, help="Number of GPUs, all of which are used.")] = None,
    hardware: Hardware = None,
    mine: Annotated[
        str | None,
        typer.Option(
            "--mine",
            metavar="PINS|CONFIG",
            help="Your own set-up, as tp=8,pp=4 or a framework's config that `planner import` reads.",
        ),
    ] = None,
    framework: Framework = None,
    seq_len: Annotated[int | None, typer.Option(min=1, help="Tokens per sequence; default: the model's.")] = None,
    global_batch: Annotated[int | None, typer.Option(min=1, help="Sequences per optimiser step.")] = None,
    precision: Annotated[
        Precision | None, typer.Option(help="Compute dtype; default: that of --mine CONFIG, or bf16.")
    ] = None,
    optimizer: Annotated[Optimizer | None, typer.Option(help="Optimiser; default: likewise, or adamw.")] = None,
    micro_batch: Annotated[
        int | None, typer.Option(min=1, help="Sequences per micro-batch of --mine CONFIG, where the file does not say.")
    ] = None,
    recompute: Annotated[
        Recompute | None, typer.Option(help="Activation checkpointing of --mine CONFIG, likewise.")
    ] = None,
    memory_risk: Annotated[
        float | None, typer.Option(metavar="SHARE", help="Risk that a plan does not fit after all; default: 0.05.")
    ] = None,
    time_limit: Annotated[
        float | None, typer.Option(min=0, max=1e9, help="Seconds, shared evenly by the frameworks.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="All of it as JSON on stdout, nothing else there.")] = False,
) -> int:
    """Show the best plan that each framework can run, priced as it runs it, and your own beside them."""
    from planner.api.compare import Config
    from planner.api.compare import compare as compared
    from planner.render_compare import show_comparison
    from planner.request import DEFAULT_FRAMEWORK, DEFAULT_RISK, Request

    request = Request(
        model=model, num_devices=gpus, hardware=hardware, seq_len=seq_len, global_batch_size=global_batch,
        precision=precision or Precision.BF16, optimizer=optimizer or Optimizer.ADAMW, time_limit_s=time_limit,
        framework=framework or DEFAULT_FRAMEWORK,
        memory_risk=DEFAULT_RISK if memory_risk is None else memory_risk,
    )  # fmt: skip
    talk = talk_console()
    own = own_of(mine, micro_batch, recompute)
    if isinstance(own, Config):
        own = replace(own, precision=precision, optimizer=optimizer)
    with talk.status("tracing") as status:
        found = compared(request, own, None, lambda name: status.update(f"searching {escape(name)}"))
    for note in found.notes:
        talk.print(f"[yellow]note:[/] {escape(note)}", soft_wrap=True)
    if as_json:
        typer.echo(json.dumps(document(found), indent=2))
    else:
        data_console().print(show_comparison(found))
    if found.interrupted:
        return 130
    if any(row.plan is not None for row in found.rows):
        return 0
    is_late = any(row.is_late for row in found.rows)
    return TimeLimitError.exit_code if is_late else InfeasibleError.exit_code


def own_of(
    mine: str | None, micro_batch: int | None = None, recompute: Recompute | None = None
) -> Pins | Config | None:
    """``tp=8,pp=4`` as pins, anything else as a config file; InputError where it is neither.

    ``micro_batch`` and ``recompute`` are of a config.
    """
    from planner.api.compare import Config, names_file

    is_file = mine is not None and names_file(mine)
    if not is_file and (micro_batch is not None or recompute is not None):
        raise InputError(
            "--micro-batch and --recompute are of a config that --mine names",
            hint="name one, or pin them: --mine micro_batch=2,recompute=full",
        )
    if mine is None:
        return None
    if not is_file:
        return pins_of(mine)
    return Config(Path(mine).name, config_text(Path(mine)), micro_batch, recompute)


def document(found: Comparison) -> dict[str, object]:
    """What ``--json`` prints: seconds, bytes, dollars; ``rows`` by step time, those without a plan last."""
    training, cluster = found.question.training, found.question.target.cluster
    return {
        "model": found.question.request.model,
        "num_devices": cluster.num_devices,
        "hardware": cluster.profile.name,
        "seq_len": training.seq_len,
        "global_batch_size": training.global_batch_size,
        "precision": training.precision,
        "optimizer": training.optimizer,
        "rows": [_row(row) for row in found.rows],
        "mine": None if found.mine is None else _row(found.mine),
        "notes": list(found.notes),
    }


def _row(row: Row) -> dict[str, object]:
    said: dict[str, object] = {
        "framework": row.framework,
        "recipe": row.recipe,
        "source": row.source,
        "borrowed": row.borrowed,
        "lacks": list(row.lacks),
        "reason": row.reason,
        "way_out": row.way_out,
        "plan": None if row.plan is None else row.plan.model_dump(mode="json"),
    }
    if row.plan is None or row.plan.prediction is None:
        return said
    p = row.plan.prediction
    return said | {
        "step_time_s": p.step_time_s,
        "step_time_low_s": p.step_time_low_s,
        "step_time_high_s": p.step_time_high_s,
        "peak_memory_bytes": max(p.peak_memory_bytes),
        "tokens_per_s_per_gpu": p.tokens_per_s_per_gpu,
        "samples_per_s": row.plan.training.global_batch_size / p.step_time_s,
        "usd_per_step": p.usd_per_step,
    }
