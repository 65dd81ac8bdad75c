"""``planner profile``: measures this machine or, under torchrun, this cluster, and writes what ``--hardware`` takes."""

from __future__ import annotations

import os
import shlex
import sys
import time
from pathlib import Path
from typing import Annotated

import typer

from costmodels.vocabulary.shown import shown
from hardware_profiles.catalog import HardwareProfileError
from hardware_profiles.sanity import NAME_PATTERN
from hardware_profiles.schema import ClusterProfile
from planner.calibration.profile import profile_of
from planner.calibration.unlike_hosts import UnlikeHosts, unlike_hosts
from planner.errors import HardwareError, InputError
from planner.output_file import check_output, write_text


def register(app: typer.Typer) -> None:
    """Adds the command to ``app``."""
    app.command("profile")(profile)


def profile(
    output: Annotated[Path, typer.Option("-o", "--output", help="Write the profile here.")] = Path("profile.json"),
    quick: Annotated[bool, typer.Option("--quick", help="Fewer sizes and samples: less than a minute.")] = False,
    timings: Annotated[Path | None, typer.Option(help="Write every timing here, as JSON.")] = None,
    name: Annotated[str | None, typer.Option(help="Name of the profile. Default: after device and hosts.")] = None,
    disk: Annotated[Path, typer.Option(help="Folder on the disk that is timed.")] = Path("."),
) -> None:
    """Measure this machine or, under torchrun, this cluster; the profile is for --hardware FILE."""
    check_output(output, timings)
    _check(name)
    from hardware_profiles.probes.detect import detect, nearest_profile
    from hardware_profiles.probes.profiler import measure_machine  # imports torch
    from planner.executor.host_allocator import keep_freed_memory

    keep_freed_memory()  # what is timed on a processor has memory as what trains there
    start_s = time.monotonic()
    try:
        measurement = measure_machine(
            lambda text: _say(f"{time.monotonic() - start_s:5.0f} s  {text}"), quick=quick, folder=disk
        )
        if measurement is None:
            return
        nearest = nearest_profile(detect())[0]
        found = profile_of(measurement, nearest, name)
        unlike = unlike_hosts(measurement, nearest, found)
        found = found if unlike is None else unlike.together
    except HardwareProfileError as error:
        raise HardwareError(error.message, hint=error.hint) from error
    except ValueError as error:
        raise HardwareError(str(error)) from error
    write_text(output, found.model_dump_json(indent=2) + "\n")
    if timings is not None:
        write_text(timings, measurement.model_dump_json() + "\n")
    _say_what_was_found(found)
    if unlike is not None:
        write_kinds(unlike, output)
    _say(f"wrote {output} in {time.monotonic() - start_s:.0f} s")


def _check(name: str | None) -> None:
    """InputError before the work begins, where its result would have no name."""
    if name is not None and not NAME_PATTERN.fullmatch(name):
        raise InputError(f"--name {name!r} must consist of lower-case letters, digits, '.', '_' and '-'")


def _say_what_was_found(found: ClusterProfile) -> None:
    for tier in found.tiers:
        _say(
            f"tier {tier.name}: {tier.links_per_node} x {tier.bandwidth_bytes_per_s.value * 8 / 1e9:.3g} Gb/s a node, "
            f"{tier.latency_s.value * 1e6:.3g} us, {tier.efficiency.value:.0%} reached"
        )
    for note in found.notes:
        _say(f"! {note}")
    if not found.notes:
        _say("nothing stands out")
    if "RANK" not in os.environ:
        _say(f"the network was not measured: its numbers are those of {found.description.split()[-1]}; "
             "start the command under torchrun to measure it")  # fmt: skip


def write_kinds(unlike: UnlikeHosts, output: Path) -> None:
    """A file of each kind of host beside ``output``, and how to search with them."""
    files = {kind.name: output.with_stem(f"{output.stem}-{kind.name}") for kind in (unlike.usual, unlike.slow)}
    for kind in (unlike.usual, unlike.slow):
        write_text(files[kind.name], kind.profile.model_dump_json(indent=2) + "\n")
    hardware = ",".join(f"{files[name]}:{count}" for name, count in unlike.runs)
    labels = unlike.slow.labels
    _say(
        f"! slow to compute, {unlike.slow.rate:.0%} of what the others reach: {', '.join(labels)}. "
        f"wrote {files['usual']} and {files['slow']}: planner search --hardware "
        f"{shlex.quote(hardware)} gives slow hosts less work"
        + ("" if len(unlike.runs) == 2 else "; start torchrun with the slow hosts last, so that there are two groups")
    )


def _say(text: str) -> None:
    sys.stderr.write(shown(text) + "\n")
    sys.stderr.flush()
