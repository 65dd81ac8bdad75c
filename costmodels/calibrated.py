"""A framework's recipe on a cluster whose calibration says how long its hosts take."""

from __future__ import annotations

from collections.abc import Mapping

from costmodels.recipe import Recipe
from hardware_profiles.schema import Calibration, FactorName, Quantity

# The recipe's times of the host, all of which one factor corrects: hosts differ in speed.
HOST_TIMES = (
    "host_s_per_kernel",
    "host_s_per_sharded_kernel",
    "host_s_per_collective",
    "host_s_per_collective_rank",
)


def scaled_recipe(recipe: Recipe, factors: Mapping[FactorName, float]) -> Recipe:
    """``recipe`` where its hosts take ``factors['host_time']`` times as long; what it does not have stays so."""
    factor = factors.get("host_time", 1.0)
    known: dict[str, Quantity] = {name: of for name in HOST_TIMES if (of := getattr(recipe, name)) is not None}
    times = {name: of.model_copy(update={"value": of.value * factor}) for name, of in known.items()}
    return recipe.model_copy(update=times)


def calibrated_recipe(recipe: Recipe, calibration: Calibration | None) -> Recipe:
    """``recipe`` on a cluster with this calibration; itself where there is none."""
    return recipe if calibration is None else scaled_recipe(recipe, calibration.values)
