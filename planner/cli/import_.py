"""``planner import``: another framework's config as a fully pinned plan, priced."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape
from rich.text import Text

from costmodels.vocabulary.choices import Optimizer, Precision, Recompute
from planner.cli.export import exported, job_of
from planner.cli.options import AsJson, Hardware
from planner.cli.search import show_answer
from planner.cli.terminal import data_console, talk_console
from planner.errors import InputError
from planner.json_file import read_content
from planner.output_file import check_output, is_stdout, put_back_on_error, write_text
from planner.render import seconds

if TYPE_CHECKING:
    from planner.api.pinned import PricedRun
    from planner.formats.target import Read, Target

# Of a config: those of frameworks have some kilobytes. PyYAML and shlex read about a megabyte in ten CPU seconds, and
# megabytes of brackets or dashes in minutes.
MAX_BYTES = 2**17


def register(app: typer.Typer) -> None:
    """Adds ``import`` to ``app``."""
    app.command("import")(import_config)


def import_config(  # over 6 arguments: one for each option of the command line
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A framework's config, or a script with its command")],
    from_format: Annotated[
        str | None,
        typer.Option(
            "--from",
            metavar="FORMAT",
            help="megatron, deepspeed, accelerate, torchtitan or nanotron; default: what the file looks like.",
        ),
    ] = None,
    model: Annotated[
        str | None, typer.Option(metavar="MODEL", help="The model, where the file does not tell its sizes.")
    ] = None,
    hardware: Hardware = None,
    framework: Annotated[
        str | None,
        typer.Option(
            metavar="NAME[@VERSION][+KERNEL]",
            help="The software that ran it, by which it is priced: megatron-lm@2022, deepspeed@2021, "
            "accelerate+compile; default: today's version of the format's own.",
        ),
    ] = None,
    gpus: Annotated[int | None, typer.Option("--gpus", min=1, help="GPUs, where the file does not say.")] = None,
    seq_len: Annotated[int | None, typer.Option(min=1, help="Tokens per sequence, likewise.")] = None,
    global_batch: Annotated[int | None, typer.Option(min=1, help="Sequences per optimiser step, likewise.")] = None,
    micro_batch: Annotated[int | None, typer.Option(min=1, help="Sequences per micro-batch, likewise.")] = None,
    precision: Annotated[Precision | None, typer.Option(help="Compute dtype, likewise.")] = None,
    optimizer: Annotated[Optimizer | None, typer.Option(help="Optimiser, likewise.")] = None,
    recompute: Annotated[Recompute | None, typer.Option(help="Activation checkpointing, likewise.")] = None,
    better: Annotated[
        Path | None,
        typer.Option("--better", metavar="FILE", help="Search for a better set-up, and write it in the same format."),
    ] = None,
    time_limit: Annotated[float | None, typer.Option(min=0, max=1e9, help="Seconds of that search.")] = None,
    as_json: AsJson = False,
    output: Annotated[Path | None, typer.Option("-o", "--output", help="Write the plan here; - is stdout.")] = None,
) -> None:
    """Read a framework's own config as a plan, price it, say what is wrong with it, and write a better one."""
    from planner.api.diagnose import findings
    from planner.api.pinned import pinned_run, price_run
    from planner.formats.completion import Given, completed
    from planner.formats.registry import read_config

    check_output(output, better, reads=[file, model])
    target, read = read_config(file.name, config_text(file), from_format)
    given = Given(gpus, seq_len, global_batch, micro_batch, precision, optimizer, recompute)
    beside = None if output is None or is_stdout(output) else model_file_beside(output)
    with nullcontext() if beside is None else put_back_on_error(beside):
        source, model_notes = model_of(read, model, output)
        layout, assumed = completed(read.settings, given, default_seq_len(source))
        priced = price_run(pinned_run(source, framework or target.software(read), layout), hardware)
        notes = (f"read as {target.name} ({target.version})", *model_notes, *read.notes, *assumed, *priced.notes)
        show_answer(priced.plan, notes, as_json=as_json, output=output)
    # With --json, or with the plan on stdout, nothing else is there.
    console = talk_console() if as_json or is_stdout(output) or is_stdout(better) else data_console()
    wrong = findings(priced)
    console.print("What is wrong:" if wrong else "Nothing is wrong by the rules of `planner import`.")
    for each in wrong:
        console.print(Text(f"  {each.rule}: {each.says}"), soft_wrap=True)
    if better is not None:
        _write_better(priced, target, better, time_limit)


def _write_better(priced: PricedRun, target: Target, file: Path, time_limit: float | None) -> None:
    """Writes the best set-up of the same framework; nothing where the file's own is as good."""
    from planner.api.diagnose import better_plan
    from planner.layout.deadline import Deadline

    node = priced.target.cluster.devices_per_node
    plan = better_plan(priced, Deadline.answering_within(time_limit))
    talk = talk_console()
    if plan is None or plan.prediction is None:
        talk.print("no better set-up was found: nothing is written")
        return
    found = exported(target, job_of(plan, file, node))
    if is_stdout(file):
        typer.echo(found.text, nl=False)
    else:
        write_text(file, found.text)
    for note in found.notes:
        talk.print(f"[yellow]note:[/] {escape(note)}", soft_wrap=True)
    talk.print(
        f"{escape(str(file))}: {seconds(plan.prediction.step_time_s)} a step in place of "
        f"{seconds(priced.found.step_time_s)}{'' if priced.found.fits else ', which does not fit'}",
        soft_wrap=True,
    )


def config_text(file: Path) -> str:
    """The content of a config; InputError where it is no text, or too long to be one."""
    content = read_content(file, InputError, MAX_BYTES)
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InputError(f"{file} is no text: {error}", hint="is it damaged, or another kind of file?") from error


def model_of(read: Read, named: str | None, output: Path | None) -> tuple[str, tuple[str, ...]]:
    """MODEL: what the user names, the preset that the file names or is, or a config written beside the plan."""
    from pydantic import ValidationError

    from planner.json_file import listed, violations_of
    from planner.models.catalog import preset_of_shape
    from planner.models.config import FamilyConfig

    if named is not None or read.preset is not None:
        return named or read.preset or "", ()
    if read.shape is None:
        raise InputError("the file does not say what model it trains", hint="name it: --model MODEL")
    preset = preset_of_shape(read.shape)
    if preset is not None:
        unsaid = [] if "vocab" in read.shape else ["its vocabulary is that of the preset"]
        return preset.name, (f"the sizes are those of the preset {preset.name}", *unsaid)
    if "vocab" not in read.shape:
        raise InputError(
            "the file does not say the size of the vocabulary, and its model is no preset",
            hint="name it: --model MODEL",
        )
    try:
        shape = FamilyConfig.model_validate(read.shape)
    except ValidationError as error:
        raise InputError(
            f"the file's model cannot be built: {listed(violations_of(error))}", hint="name another: --model MODEL"
        ) from error
    if output is None or is_stdout(output) or (output.exists() and not output.is_file()):
        raise InputError("the file's model is no preset, so it is written beside the plan", hint="give -o plan.json")
    path = model_file_beside(output)
    write_text(path, shape.model_dump_json(indent=2, exclude_none=True) + "\n")
    return str(path), (f"the sizes of the model are in {path}",)


def model_file_beside(plan_file: Path) -> Path:
    """Where the config of an imported model goes whose plan is ``plan_file``: neither is there without the other."""
    return plan_file.with_suffix(".model.json")


def default_seq_len(source: str) -> int | None:
    """Tokens a sequence where nobody says: the model's own, up to what is pre-trained on; None: not known."""
    from planner.model_file import family_config_of

    shape = family_config_of(source)
    return None if shape is None else shape.usual_seq_len
