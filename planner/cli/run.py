"""``planner run``: trains what a plan says."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from planner.plan.plan_file import read_plan

if TYPE_CHECKING:
    from planner.executor.train import RunOptions


def register(app: typer.Typer) -> None:
    """Adds the command to ``app``."""
    app.command("run")(run)


def run(  # over 6 arguments: one for each option of the command line
    plan_file: Annotated[Path, typer.Argument(metavar="PLAN", help="plan.json, from `planner search` or by hand")],
    steps: Annotated[int, typer.Option(min=1, help="Optimiser steps.")] = 20,
    data: Annotated[Path | None, typer.Option(help="Text to train on, as bytes. Default: Python's own source.")] = None,
    learning_rate: Annotated[float | None, typer.Option(min=0, help="Default: 3e-4 for Adam, 0.1 for SGD.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of the initial weights and the order of samples.")] = 0,
    timeout: Annotated[float, typer.Option(min=1, help="Seconds that a rank may give no sign of life.")] = 300.0,
    checkpoint_dir: Annotated[
        Path | None, typer.Option(help="Go on from the latest checkpoint there; save one at the end and on SIGTERM.")
    ] = None,
) -> None:
    """Trains a plan's model: starts a process a rank on this machine, or joins the torchrun that started this."""
    plan = read_plan(plan_file)
    from planner.executor.launch import SAVING_S, check_machine, die_with_launcher, is_rank, launch, only_the_cause
    from planner.executor.mesh import check_executable
    from planner.executor.train import RunOptions, StepReport, train

    check_executable(plan)
    options = RunOptions(steps, data, learning_rate, seed, timeout, checkpoint_dir)
    if not is_rank():
        check_machine(plan)
        launch(plan, _arguments(plan_file, options), grace_s=0.0 if checkpoint_dir is None else SAVING_S)
        return
    die_with_launcher()

    def show(report: StepReport) -> None:
        if os.environ["RANK"] == "0":
            typer.echo(
                f"step {report.step:>4}  loss {report.loss:.4f}  "
                f"step time {report.step_time_s:.3f} s  {report.tokens_per_s:,.0f} tokens/s"
            )

    with only_the_cause():
        train(plan, options, show)


def _arguments(plan_file: Path, run: RunOptions) -> list[str]:
    """The same command for a rank."""
    options = ["run", str(plan_file), "--steps", str(run.steps), "--seed", str(run.seed)]
    options += ["--timeout", repr(run.timeout_s)]
    options += ["--debug"] if "--debug" in sys.argv else []  # a global option, read before the command's own
    options += [] if run.checkpoints is None else ["--checkpoint-dir", str(run.checkpoints)]
    options += [] if run.data is None else ["--data", str(run.data)]
    return options + ([] if run.learning_rate is None else ["--learning-rate", repr(run.learning_rate)])
