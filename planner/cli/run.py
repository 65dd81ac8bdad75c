"""``planner run``: trains what a plan says."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from planner.cli.options import Trust
from planner.cli.process import uncollected
from planner.errors import InputError
from planner.plan.plan_file import read_plan

if TYPE_CHECKING:
    from planner.executor.options import RunOptions
    from planner.executor.run_log import StepReport
    from planner.executor.token_file import TokenDtype
    from planner.plan.schema import Plan

_DATA, _RATE, _CHECKPOINTS, _TALK = "Data", "Optimisation", "Checkpoints", "Log"


def register(app: typer.Typer) -> None:
    """Adds the command to ``app``."""
    app.command("run")(run)


def run(  # over 6 arguments: one for each option of the command line
    plan_file: Annotated[Path, typer.Argument(metavar="PLAN", help="plan.json, from `planner search` or by hand")],
    steps: Annotated[int, typer.Option(min=1, help="Optimiser steps, those of a checkpoint included.")] = 20,
    seed: Annotated[
        int | None,
        typer.Option(min=0, max=2**63 - 1, help="Of the initial weights, the order of samples; default: 0."),
    ] = None,
    timeout: Annotated[float, typer.Option(min=1, max=1e7, help="Seconds without a sign of life of a rank.")] = 300.0,
    trust: Trust = False,
    weights: Annotated[
        Path | None, typer.Option(help="Begin with these: .safetensors, or a folder of them (Hugging Face's names).")
    ] = None,
    offload_dir: Annotated[
        Path | None, typer.Option(help="A folder on each host, for optimiser states of a plan with offload = nvme.")
    ] = None,
    compiled: Annotated[
        bool, typer.Option("--compile", help="Compile each block with torch.compile; plans are priced without.")
    ] = False,
    data: Annotated[
        Path | None,
        typer.Option(
            help="Text as bytes, .npy, raw tokens, or Megatron's .bin with .idx. Default: Python's own source.",
            rich_help_panel=_DATA,
        ),
    ] = None,
    data_dtype: Annotated[
        str | None,
        typer.Option(
            metavar="uint8|uint16|uint32", help="Of tokens without a header. Default: text.", rich_help_panel=_DATA
        ),
    ] = None,
    eval_data: Annotated[Path | None, typer.Option(help="Held-back data.", rich_help_panel=_DATA)] = None,
    eval_every: Annotated[
        int | None, typer.Option(min=1, help="Evaluate after every so many steps.", rich_help_panel=_DATA)
    ] = None,
    eval_batches: Annotated[
        int | None, typer.Option(min=1, help="Global batches of an evaluation. Default: 8.", rich_help_panel=_DATA)
    ] = None,
    learning_rate: Annotated[
        float | None,
        typer.Option(min=0, help="The highest. Default: 3e-4 for Adam, 0.1 for SGD.", rich_help_panel=_RATE),
    ] = None,
    lr_schedule: Annotated[
        str, typer.Option(metavar="constant|linear|cosine|wsd", help="After the warm-up.", rich_help_panel=_RATE)
    ] = "constant",
    warmup: Annotated[
        int, typer.Option(min=0, help="Steps in which the rate grows linearly.", rich_help_panel=_RATE)
    ] = 0,
    schedule_steps: Annotated[
        int | None, typer.Option(min=1, help="Where the schedule ends. Default: --steps.", rich_help_panel=_RATE)
    ] = None,
    decay_steps: Annotated[
        int | None, typer.Option(min=1, help="Of wsd's decay. Default: a tenth.", rich_help_panel=_RATE)
    ] = None,
    final_lr_share: Annotated[
        float, typer.Option(min=0, max=1, help="Of the highest rate, at the end.", rich_help_panel=_RATE)
    ] = 0.0,
    weight_decay: Annotated[
        float | None, typer.Option(min=0, help="Default: torch's, 0.01 for AdamW.", rich_help_panel=_RATE)
    ] = None,
    decay: Annotated[
        str,
        typer.Option(metavar="all|matrices", help="What decays; matrices: no norms, biases.", rich_help_panel=_RATE),
    ] = "all",
    clip_norm: Annotated[
        float | None, typer.Option(min=0, help="Largest norm of all gradients. Default: any.", rich_help_panel=_RATE)
    ] = None,
    checkpoint_dir: Annotated[
        Path | None,
        typer.Option(
            help="Go on from the latest checkpoint there; save one at the end and on SIGTERM.",
            rich_help_panel=_CHECKPOINTS,
        ),
    ] = None,
    checkpoint_every: Annotated[
        int | None, typer.Option(min=1, help="Save after every so many steps, too.", rich_help_panel=_CHECKPOINTS)
    ] = None,
    keep: Annotated[
        int | None, typer.Option(min=1, help="Newest checkpoints to keep. Default: 3.", rich_help_panel=_CHECKPOINTS)
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Fail where there is no checkpoint.", rich_help_panel=_CHECKPOINTS)
    ] = False,
    max_restarts: Annotated[
        int,
        typer.Option(
            min=0,
            help="Start again from the last checkpoint so often, when a rank fails. torchrun has its own.",
            rich_help_panel=_CHECKPOINTS,
        ),
    ] = 0,
    log: Annotated[
        Path | None,
        typer.Option(  # torchrun takes --log for an abbreviation of its own options, even behind the script's name
            "--log", "--log-file", help="Append a line of JSON a step, with the prediction.", rich_help_panel=_TALK
        ),
    ] = None,
    tensorboard: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="The same for TensorBoard, into this folder.", rich_help_panel=_TALK),
    ] = None,
    find_nan: Annotated[
        bool,
        typer.Option(
            "--find-nan", help="Name the module in which a number is first not finite; slower.", rich_help_panel=_TALK
        ),
    ] = False,
    profile_step: Annotated[
        int | None, typer.Option(min=1, help="Profile this step with torch.profiler.", rich_help_panel=_TALK)
    ] = None,
    profile_dir: Annotated[
        Path | None,
        typer.Option(help="Where its traces go, one a rank. Default: profile.", rich_help_panel=_TALK),
    ] = None,
) -> int:
    """Trains a plan's model: starts a process a rank on this machine, or joins the torchrun that started this."""
    plan = read_plan(plan_file, trust=trust)
    _check_together(
        {
            "--resume": resume and "--checkpoint-dir",
            "--checkpoint-every": checkpoint_every and "--checkpoint-dir",
            "--keep": keep and "--checkpoint-dir",
            "--max-restarts": max_restarts and "--checkpoint-dir",
            "--eval-every": eval_every and "--eval-data",
            "--eval-data": eval_data and "--eval-every",
            "--eval-batches": eval_batches and "--eval-every",
            "--profile-dir": profile_dir and "--profile-step",
        },
        {
            "--checkpoint-dir": checkpoint_dir,
            "--eval-data": eval_data,
            "--eval-every": eval_every,
            "--profile-step": profile_step,
        },
    )
    with uncollected():
        from planner.executor.options import (
            EVAL_BATCHES,
            KEPT,
            CheckpointOptions,
            DataOptions,
            Decay,
            LearningRate,
            Optimization,
            RunOptions,
        )
        from planner.executor.run_log import LogOptions

    options = RunOptions(
        steps=steps,
        seed=seed,
        timeout_s=timeout,
        weights=weights,
        is_compiled=compiled,
        offload_dir=offload_dir,
        data=DataOptions(
            data, token_dtype(data_dtype, data, eval_data), eval_data, eval_every, eval_batches or EVAL_BATCHES
        ),
        optimization=Optimization(
            learning_rate=learning_rate,
            schedule=LearningRate(one_of(lr_schedule, LearningRate, "--lr-schedule")),
            warmup_steps=warmup,
            schedule_steps=schedule_steps,
            decay_steps=decay_steps,
            final_share=final_lr_share,
            weight_decay=weight_decay,
            decay=Decay(one_of(decay, Decay, "--decay")),
            clip_norm=clip_norm,
        ),
        checkpoints=CheckpointOptions(checkpoint_dir, checkpoint_every, keep or KEPT, resume),
        log=LogOptions(log, tensorboard),
        finds_nan=find_nan,
        profile=None if profile_step is None else (profile_step, profile_dir or Path("profile")),
    )
    return _train(plan, options, max_restarts)


def _train(plan: Plan, options: RunOptions, max_restarts: int) -> int:
    from planner.executor.executable import check_executable
    from planner.executor.launch import (
        SAVING_S,
        STOPPED,
        check_machine,
        die_with_launcher,
        is_rank,
        launch,
        only_the_cause,
    )
    from planner.executor.ranks import device_type

    check_executable(plan)
    if options.is_compiled:
        from planner.executor.compiled import INDUCTOR, check_compilable

        check_compilable(plan, INDUCTOR, device_type())
    options.optimization.check(options.steps)
    options.log.check()
    options.check_profile()
    options.check_watch()
    options.check_offload(plan.offload)
    if not is_rank():
        check_machine(plan)
        grace_s = 0.0 if options.checkpoints.folder is None else SAVING_S
        launch(plan, sys.argv[1:], grace_s=grace_s, max_restarts=max_restarts)
        return 0
    die_with_launcher()
    with uncollected():
        from planner.executor.train import train
    with only_the_cause():
        return 0 if train(plan, options, _show) else STOPPED


def _show(report: StepReport) -> None:
    if os.environ["RANK"] != "0":
        return
    norm = "" if report.gradient_norm is None else f"  norm {report.gradient_norm:.4f}"
    evaluated = "" if report.eval_loss is None else f"  eval loss {report.eval_loss:.4f}"
    typer.echo(
        f"step {report.step:>4}  loss {report.loss:.4f}  "
        f"step time {report.step_time_s:.3f} s  {report.tokens_per_s:,.0f} tokens/s{norm}{evaluated}"
    )


def _check_together(needs: dict[str, object], given: dict[str, object]) -> None:
    """InputError where an option is given without the one it makes sense with."""
    for option, other in needs.items():
        if isinstance(other, str) and given[other] is None:
            raise InputError(f"{option} does nothing without {other}", hint=f"add {other}, or leave {option} out")


def one_of(value: str, choices: type, option: str) -> str:
    """``value``, or InputError where ``option`` knows no such choice."""
    known = [str(choice) for choice in choices]  # pyright: ignore[reportGeneralTypeIssues]
    if value not in known:
        raise InputError(f"{option} is one of {', '.join(known)}, not {value!r}", hint=f"give {option} {known[0]}")
    return value


def token_dtype(value: str | None, *files: Path | None) -> TokenDtype | None:
    """What --data-dtype says of ``files``; InputError where there is no such dtype, or no file."""
    from planner.executor.token_file import TokenDtype

    _check_together({"--data-dtype": value and "--data"}, {"--data": next(filter(None, files), None)})
    return None if value is None else TokenDtype(one_of(value, TokenDtype, "--data-dtype"))
