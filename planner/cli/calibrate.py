"""``planner calibrate``: a profile corrected by the user's own measured runs, for ``--hardware``."""

from __future__ import annotations

import datetime
import gzip
import tempfile
import zlib
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape

from costmodels.vocabulary.choices import Precision, Recompute
from hardware_profiles.catalog import HardwareProfileError, default_profile_name, load_profile
from hardware_profiles.mixed import is_mixed
from hardware_profiles.sanity import NAME_PATTERN
from hardware_profiles.schema import Calibration, CalibrationRun, ClusterProfile
from planner.calibration.cluster import MeasuredRun, calibration_of
from planner.cli.import_ import config_text, model_of
from planner.cli.options import Hardware, Trust
from planner.cli.terminal import data_console, talk_console
from planner.errors import HardwareError, InputError, PlanError
from planner.json_file import read_content, read_object
from planner.output_file import check_output, is_stdout, write_text
from planner.plan.plan_file import read_plan
from planner.render import seconds, size
from planner.render_calibration import calibration_tables

if TYPE_CHECKING:
    from planner.api.measured import Measured, Measurement
    from planner.formats.completion import Given

MAX_LOG_BYTES = 2**28  # of a log: weeks of steps
GZIP = b"\x1f\x8b"
GIB = 2**30
IMPOSSIBLE = 30.0  # so many times off its price is another unit or another run: milliseconds, tokens/s of all GPUs
WHOLE_DEVICE = 1.05  # of a device's memory: what drivers hide of it lies below


def register(app: typer.Typer) -> None:
    """Adds ``calibrate`` to ``app``."""
    app.command("calibrate")(calibrate)


def calibrate(  # over 6 arguments: one for each option of the command line
    runs: Annotated[
        list[str],
        typer.Argument(
            metavar="RUNS...",
            help="Measured runs: PLAN:SECONDS or PLAN:LOG, where PLAN is a plan.json or a framework's config and LOG "
            "what the framework logged; :GIB behind SECONDS is the peak allocated memory; what `planner verify -o` "
            "wrote; a CSV of runs (docs/calibrate.md).",
        ),
    ],
    output: Annotated[Path, typer.Option("-o", "--output", help="Write the calibrated profile here; - is stdout.")],
    hardware: Hardware = None,
    name: Annotated[str | None, typer.Option(help="Name of the profile. Default: NAME-calibrated.")] = None,
    from_format: Annotated[
        str | None, typer.Option("--from", metavar="FORMAT", help="Of configs, as for `planner import`.")
    ] = None,
    model: Annotated[str | None, typer.Option(metavar="MODEL", help="Of configs, likewise.")] = None,
    gpus: Annotated[int | None, typer.Option("--gpus", min=1, help="Of configs, likewise.")] = None,
    seq_len: Annotated[int | None, typer.Option(min=1, help="Of configs, likewise.")] = None,
    global_batch: Annotated[int | None, typer.Option(min=1, help="Of configs, likewise.")] = None,
    micro_batch: Annotated[int | None, typer.Option(min=1, help="Of configs, likewise.")] = None,
    precision: Annotated[Precision | None, typer.Option(help="Of configs, likewise.")] = None,
    recompute: Annotated[Recompute | None, typer.Option(help="Of configs, likewise.")] = None,
    trust: Trust = False,
) -> None:
    """Correct a profile by measured runs of your own cluster: one helps, ten are near a full fit."""
    named = hardware or default_profile_name()
    known = _profile(named)
    check_output(output, reads=[*runs, model, hardware])
    if name is not None and not NAME_PATTERN.fullmatch(name):
        raise InputError(f"--name {name!r} must consist of lower-case letters, digits, '.', '_' and '-'")
    from planner.formats.completion import Given

    notes = [] if hardware is not None else [f"no --hardware given: calibrating {named}"]
    given = Given(gpus, seq_len, global_batch, micro_batch, precision, None, recompute)
    reader = _Reader(named, given, from_format, model, trust, notes)
    read = [run for text in runs for run in reader.read(text)]
    measured = _possible(list(map(_as_calibrated, read)), known, notes)
    _say(notes)
    if not measured:
        raise InputError("none of the runs can be used", hint="the notes above say why, run by run")
    found = calibration_of(measured, datetime.datetime.now(tz=datetime.UTC).date())
    _say([_unexplained(run) for run in found.runs if not run.is_explained])
    text = _calibrated(known, name, found).model_dump_json(indent=2) + "\n"
    if is_stdout(output):
        typer.echo(text, nl=False)
    else:
        write_text(output, text)
    talk = talk_console()
    console = talk if is_stdout(output) else data_console()
    for table in calibration_tables(found):
        console.print(table)
    talk.print(f"plan with it: planner search MODEL --hardware {escape(str(output))}", soft_wrap=True)


def _profile(named: str) -> ClusterProfile:
    """The profile that is calibrated, which is of one kind of node and not calibrated yet."""
    if is_mixed(named):
        raise HardwareError(f"{named} has several kinds of nodes", hint="calibrate the profile of each by itself")
    try:
        known = load_profile(named)
    except HardwareProfileError as error:
        raise HardwareError(error.message, hint=error.hint) from error
    if known.calibration is not None:
        raise HardwareError(
            f"{named} is calibrated already, by {len(known.calibration.runs)} runs",
            hint="give all runs together, old and new, with the profile that it was made of",
        )
    return known


def _calibrated(known: ClusterProfile, name: str | None, found: Calibration) -> ClusterProfile:
    update: dict[str, object] = {"name": name or f"{known.name}-calibrated", "aliases": (), "calibration": found}
    return known.model_copy(update=update)


@dataclass(frozen=True)
class _Reader:
    """Reads what the command line names as runs."""

    hardware: str
    given: Given
    from_format: str | None
    model: str | None
    trust: bool
    notes: list[str]

    def read(self, text: str) -> list[Measured]:
        """The runs of one argument; InputError where it names none."""
        from planner.api.measured import measured_rows

        if text.lower().endswith(".csv"):
            try:
                return measured_rows(Path(text), self.hardware, self.notes)
            except (OSError, ValueError) as error:
                raise InputError(f"{text} cannot be read as a table of runs: {error}") from error
        file, _, measured = text.partition(".json:") if ".json:" in text else text.partition(":")
        path = Path(f"{file}.json" if ".json:" in text else file)
        if not measured:
            return [self._verified(path)]
        return [self._named(path, measured)]

    def _named(self, path: Path, measured: str) -> Measured:
        """``PLAN:MEASURED``, the plan one of ours or a framework's config."""
        from planner.api.measured import measured_config, measured_plan

        if _is_plan(path):
            plan = read_plan(path, trust=self.trust)
            training = plan.training
            job = training.global_batch_size, training.seq_len, plan.num_devices
            found, logged = _measurement(measured, job, self.notes)
            return self._as_logged(measured_plan(path.name, plan, self.hardware, found), logged)
        from planner.cli.import_ import default_seq_len
        from planner.formats.completion import completed
        from planner.formats.registry import read_config

        with tempfile.TemporaryDirectory() as folder:
            target, read = read_config(path.name, config_text(path), self.from_format)
            source, said = model_of(read, self.model, Path(folder) / "config.json")
            layout, assumed = completed(read.settings, self.given, default_seq_len(source))
            self.notes.extend(f"{path.name}: {note}" for note in (*said, *read.notes, *assumed))
            job = layout.global_batch_size, layout.seq_len, layout.num_devices
            found, logged = _measurement(measured, job, self.notes)
            run = measured_config(path.name, source, target.software(read), layout, self.hardware, found)
            return self._as_logged(run, logged)

    def _as_logged(self, run: Measured, logged: str | None) -> Measured:
        """``run``, with a note where its log is another framework's than the one that it is priced as."""
        known = {"megatron-lm": "megatron", "nemo": ("nemo", "megatron")}
        if logged is not None and not run.framework.startswith(known.get(logged, logged)):
            self.notes.append(f"{run.name}: the log is of {logged}, and the plan is priced as {run.framework} runs it")
        return run

    def _verified(self, path: Path) -> Measured:
        """What ``planner verify -o`` wrote of a plan beside it."""
        from planner.api.measured import Measurement, measured_plan

        document = read_object(path, InputError) if path.suffix == ".json" else {}
        plan, step_s, peaks = (document.get(key) for key in ("plan", "step_time_s", "peak_memory_bytes"))
        if not isinstance(plan, str) or not isinstance(step_s, int | float) or not 0 < step_s < 1e9:
            raise InputError(
                f"{path} has no measured step time beside it",
                hint=f"give {path}:SECONDS, or {path}:LOG with the log of the framework",
            )
        known = [float(each) for each in peaks if isinstance(each, int)] if isinstance(peaks, list) else []
        found = Measurement(float(step_s), max(known, default=None))
        return measured_plan(path.name, read_plan(path.parent / plan, trust=self.trust), self.hardware, found)


def _is_plan(path: Path) -> bool:
    if path.suffix != ".json":
        return False
    content = read_object(path, PlanError)
    return "mesh" in content and "model" in content


def _measurement(text: str, job: tuple[int, int, int], notes: list[str]) -> tuple[Measurement, str | None]:
    """Of ``SECONDS``, ``SECONDS:GIB`` or the name of a log, and whose log it is."""
    from planner.api.measured import Measurement
    from planner.formats.run_log import Job, read_log

    try:
        numbers = [float(part) for part in text.split(":")]
    except ValueError:
        found = read_log(_log(Path(text)), Job(*job), text)
        if found.is_unsteady:
            low, high = map(seconds, found.middle_s)
            notes.append(f"the steps in {text} vary, {low} to {high} is their middle half: is it one job, by itself?")
        return Measurement(found.step_time_s, found.peak_memory_bytes, found.memory_kind), found.framework
    if len(numbers) > 2 or not all(0 < number < 1e9 for number in numbers):
        raise InputError(
            f"{text!r} is not SECONDS or SECONDS:GIB, each above 0 and below 1e9", hint="as in plan.json:12.3:61.5"
        )
    return Measurement(numbers[0], numbers[1] * GIB if len(numbers) == 2 else None), None


def _log(path: Path) -> str:
    """The text of a log, which may be packed by gzip."""
    content = read_content(path, InputError, MAX_LOG_BYTES)
    if content.startswith(GZIP):
        try:
            with gzip.open(BytesIO(content)) as file:
                content = file.read(MAX_LOG_BYTES)
        except (OSError, EOFError, zlib.error) as error:
            raise InputError(f"{path} cannot be unpacked: {error}", hint="is it whole?") from error
    return content.decode("utf-8", errors="replace")


def _as_calibrated(run: Measured) -> MeasuredRun:
    found = run.found
    times = (found.step_time_s, found.peak_memory_bytes, found.memory_kind)
    return MeasuredRun(run.name, run.framework, run.price, *times, run.target.is_seen)


def _say(notes: list[str]) -> None:
    """Each of ``notes`` once."""
    talk = talk_console()
    for note in dict.fromkeys(notes):
        talk.print(f"[yellow]note:[/] {escape(note)}", soft_wrap=True)


def _possible(runs: list[MeasuredRun], on: ClusterProfile, notes: list[str]) -> list[MeasuredRun]:
    """Those of ``runs`` that can be what they are said to be; what speaks against the others is said in ``notes``."""
    doubts = [(run, _doubt(run, on)) for run in runs]
    notes.extend(f"{run.name}: left out, {doubt}" for run, doubt in doubts if doubt)
    return [run for run, doubt in doubts if not doubt]


def _doubt(run: MeasuredRun, on: ClusterProfile) -> str:
    """Why ``run`` cannot have been measured as it is said; empty where nothing speaks against it."""
    measured_s, peak_bytes, device_bytes = run.step_time_s, run.peak_memory_bytes, on.device.memory_bytes.value
    if measured_s is not None:
        predicted_s = run.predicted_s({})
        if not 1 / IMPOSSIBLE <= measured_s / predicted_s <= IMPOSSIBLE:
            return (
                f"a step of {seconds(measured_s)} is more than {IMPOSSIBLE:.0f} times off the {seconds(predicted_s)} "
                "that are predicted: give seconds of one step, of the whole global batch, or tokens/s of one GPU"
            )
    if peak_bytes is not None and on.backend == "nccl" and peak_bytes > WHOLE_DEVICE * device_bytes:
        return f"a peak of {size(peak_bytes)} is above the {size(device_bytes)} of one GPU of {on.name}: give GiB of it"
    return ""


def _unexplained(run: CalibrationRun) -> str:
    measured, found = seconds(run.step_time_s or 0.0), seconds(run.calibrated_step_time_s or 0.0)
    return (
        f"{run.name} took {measured} a step, and even as calibrated {found} is predicted: no likely factor explains "
        "it, so it moves little, and no plan's band rests on it. Was it one step, of this plan, on this hardware alone?"
    )
