"""``planner export``: a plan as another framework's config, or as a launcher's job that runs it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape

from planner.cli.options import Trust
from planner.cli.terminal import talk_console
from planner.output_file import check_output, is_stdout, write_text
from planner.plan.plan_file import read_plan

if TYPE_CHECKING:
    from planner.formats.settings import Job
    from planner.formats.target import Target, Written
    from planner.plan.schema import Plan


def register(app: typer.Typer) -> None:
    """Adds ``export`` to ``app``."""
    app.command("export")(export)


def export(  # over 6 arguments: one for each option of the command line
    plan_file: Annotated[Path, typer.Argument(metavar="PLAN", help="plan.json, from `planner search` or by hand")],
    to: Annotated[
        str,
        typer.Option(
            "--to",
            metavar="FORMAT",
            help="megatron, nemo, torchtitan, deepspeed, accelerate, nanotron, maxtext; or what starts `planner run`: "
            "torchrun, slurm, kubernetes (TrainJob), kubernetes-pytorchjob, skypilot.",
        ),
    ],
    output: Annotated[Path | None, typer.Option("-o", "--output", help="Write it here; - is stdout.")] = None,
    gpus_per_node: Annotated[
        int | None, typer.Option(min=1, help="GPUs of a node; default: those of the plan's hardware profile.")
    ] = None,
    trust: Trust = False,
) -> None:
    """Write a plan in the format of a framework or of a launcher. What it cannot express is refused."""
    from planner.formats.registry import target_called

    target = target_called(to)
    check_output(output, reads=[plan_file])
    plan = read_plan(plan_file, trust=trust)
    found = exported(target, job_of(plan, plan_file, gpus_per_node))
    talk = talk_console()
    for note in found.notes:
        talk.print(f"[yellow]note:[/] {escape(note)}", soft_wrap=True)
    if output is not None and not is_stdout(output):
        write_text(output, found.text)
        talk.print(f"wrote {escape(str(output))} for {escape(target.version)}", soft_wrap=True)
    else:
        typer.echo(found.text, nl=False)


def exported(target: Target, job: Job) -> Written:
    """The config of ``job``; InputError with every reason where ``target``, or what it starts, cannot run it."""
    from planner.formats.target import written

    if target.abilities is None:
        from costmodels.vocabulary.choices import Offload
        from planner.errors import PlanError
        from planner.executor.executable import check_executable
        from planner.model_file import check_in_a_file

        check_in_a_file(job.plan.model)
        check_executable(job.plan)  # a launcher runs what `planner run` can
        if job.plan.offload is Offload.NVME:
            raise PlanError(
                "a launcher's script does not say which folder of a host is for states that the plan keeps on NVMe",
                hint="start `planner run PLAN --offload-dir DIR` with a script of your own, or search with "
                "--offload cpu",
            )
    return written(target, job)


def job_of(plan: Plan, plan_file: Path, gpus_per_node: int | None) -> Job:
    """The plan with what its profile and its model say of themselves, where they can be found."""
    from hardware_profiles.catalog import HardwareProfileError
    from hardware_profiles.mixed import cluster_for, is_mixed
    from planner.errors import InputError
    from planner.formats.settings import Job, layout_of
    from planner.model_file import family_config_of
    from planner.models.catalog import find_preset

    try:
        own = plan.made_on
        counts = is_mixed(own) if isinstance(own, str) else "groups" in own
        profile = cluster_for(None if counts else plan.num_devices, own).profile
    except HardwareProfileError as error:
        if gpus_per_node is None:
            raise InputError(
                f"the plan's hardware profile {plan.hardware!r} cannot be found: {error.message}",
                hint="say how many GPUs a node has: --gpus-per-node N",
            ) from error
        profile = None
    preset = find_preset(plan.model.source)
    return Job(
        plan=plan,
        layout=layout_of(plan),
        shape=family_config_of(plan.model.source),
        preset=None if preset is None else preset.name,
        plan_path=str(plan_file),
        devices_per_node=gpus_per_node or (1 if profile is None else profile.node.num_devices),
        device=None if profile is None else profile.device.name,
    )
