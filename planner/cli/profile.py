"""``planner profile``: measures this machine or, under torchrun, this cluster, and writes what ``--hardware`` takes."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Annotated

import typer

from hardware_profiles.catalog import HardwareProfileError
from hardware_profiles.sanity import NAME_PATTERN
from planner.errors import HardwareError, InputError


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
    for path in (output, *([timings] if timings else [])):
        if not path.parent.is_dir():
            raise InputError(f"cannot write {path}: {path.parent} is no folder", hint="make it, or choose another file")
    if name is not None and not NAME_PATTERN.fullmatch(name):
        raise InputError(f"--name {name!r} must consist of lower-case letters, digits, '.', '_' and '-'")
    from hardware_profiles.probes.profiler import profile_machine, write_atomically  # imports torch

    start_s = time.monotonic()
    try:
        result = profile_machine(
            lambda text: _say(f"{time.monotonic() - start_s:5.0f} s  {text}"), quick=quick, folder=disk, name=name
        )
    except HardwareProfileError as error:
        raise HardwareError(error.message, hint=error.hint) from error
    except ValueError as error:
        raise HardwareError(str(error)) from error
    if result is None:
        return
    write_atomically(output, result.profile.model_dump_json(indent=2) + "\n")
    if timings is not None:
        write_atomically(timings, result.measurement.model_dump_json() + "\n")
    for tier in result.profile.tiers:
        _say(
            f"tier {tier.name}: {tier.links_per_node} x {tier.bandwidth_bytes_per_s.value * 8 / 1e9:.3g} Gb/s a node, "
            f"{tier.latency_s.value * 1e6:.3g} us, {tier.efficiency.value:.0%} reached"
        )
    for note in result.profile.notes:
        _say(f"! {note}")
    if not result.profile.notes:
        _say("nothing stands out")
    if "RANK" not in os.environ:
        _say(f"the network was not measured: its numbers are those of {result.profile.description.split()[-1]}; "
             "start the command under torchrun to measure it")  # fmt: skip
    _say(f"wrote {output} in {time.monotonic() - start_s:.0f} s")


def _say(text: str) -> None:
    sys.stderr.write(text + "\n")
    sys.stderr.flush()
