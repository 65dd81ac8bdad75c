"""Which band a prediction has, by what is known of the cluster that it is of.

    calibrated   runs of the same framework on this cluster are part of its profile's calibration, which explains their
                 step times: the band is that of the other runs of clusters that as many of their runs calibrated
    seen         runs of this framework, by a recipe of its own, were compared on this GPU: the recipe's own band
    unseen       neither: the band of all sources, none of which was known when its runs were priced

The numbers stand in ``recipes/bands.json``, with their sources and what they hold of sources that had no part in them;
``python -m benchmarks.bands`` makes them.
"""

from __future__ import annotations

import json
from enum import StrEnum
from functools import cache
from importlib.resources import files

from pydantic import BaseModel, ConfigDict

from costmodels.memory_band import MemoryBand
from costmodels.recipe import ErrorBand, Recipe
from costmodels.vocabulary.software import named
from hardware_profiles.schema import Calibration


class Tier(StrEnum):
    """What is known of a cluster; the value is how a plan says it."""

    CALIBRATED = "this cluster, calibrated by runs of its own"
    SEEN = "this framework and this GPU, on other clusters"
    UNSEEN = "neither this framework on this GPU, nor this cluster"


class _Value(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Bands(_Value):
    """Two bands; None: not known."""

    error_band: ErrorBand | None = None
    memory_band: MemoryBand | None = None
    held: float | None = None  # share of runs in ``error_band`` made without their source, each source alike


class _Anchored(Bands):
    num_runs: int  # that calibrated each cluster


class _Known(_Value):
    calibrated: tuple[_Anchored, ...]
    unseen: Bands
    seen: dict[str, tuple[str, ...]]  # of a recipe: the GPUs that runs of it were on, as device names begin
    seen_held: float  # as ``held``, of recipes' own bands
    frameworks: tuple[str, ...]  # that no other's recipe prices


@cache
def _known() -> _Known:
    text = (files("costmodels") / "recipes" / "bands.json").read_text(encoding="utf-8")
    return _Known.model_validate(json.loads(text))


def time_tier(recipe: Recipe, device: str, calibration: Calibration | None, framework: str) -> Tier:
    """What is known of step times of ``framework``, priced by ``recipe``, on devices of that name."""
    number = _num_runs(calibration, framework, of_memory=False)
    return Tier.CALIBRATED if _anchored(number, "error_band") is not None else _seen(recipe, device, framework)


def with_bands(recipe: Recipe, device: str, calibration: Calibration | None, framework: str) -> Recipe:
    """``recipe`` with the bands of what is known; those of ``Tier.SEEN`` are its own."""
    apart = _known().unseen if _seen(recipe, device, framework) is Tier.UNSEEN else Bands()
    of_time = _anchored(_num_runs(calibration, framework, of_memory=False), "error_band") or apart
    of_memory = _anchored(_num_runs(calibration, framework, of_memory=True), "memory_band") or apart
    update: dict[str, object] = {}
    if of_time.error_band is not None:
        between = None if recipe.error_band is None else recipe.error_band.between_layouts
        update["error_band"] = of_time.error_band.model_copy(update={"between_layouts": between})
    if of_memory.memory_band is not None:
        update["memory_band"] = of_memory.memory_band
    return recipe.model_copy(update=update) if update else recipe


def held_shares() -> dict[str, float]:
    """What bands of each kind hold of runs whose sources had no part in them: of ``Tier.CALIBRATED`` by runs."""
    known = _known()
    found = {"unseen": known.unseen.held, "seen": known.seen_held}
    found |= {f"calibrated by {each.num_runs}": each.held for each in known.calibrated}
    return {kind: share for kind, share in found.items() if share is not None}


def _seen(recipe: Recipe, device: str, framework: str) -> Tier:
    is_own = named(framework).name.lower() in _known().frameworks
    return Tier.SEEN if is_own and device.upper().startswith(_known().seen.get(recipe.name, ())) else Tier.UNSEEN


def _num_runs(calibration: Calibration | None, framework: str, *, of_memory: bool) -> int:
    """Runs of this framework that calibrate the cluster; of time, those that its calibration explains."""
    runs = () if calibration is None else calibration.runs
    of_it = [run for run in runs if named(run.framework).name == named(framework).name]  # whichever kernels
    if of_memory:
        return sum(run.peak_memory_bytes is not None for run in of_it)
    return sum(run.step_time_s is not None and run.is_explained for run in of_it)


def _anchored(number: int, band: str) -> Bands | None:
    """The bands of the most runs up to ``number``; None where none are known of so few."""
    found = [each for each in _known().calibrated if each.num_runs <= number and getattr(each, band) is not None]
    return max(found, key=lambda each: each.num_runs, default=None)
