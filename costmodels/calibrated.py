"""A framework's recipe on a cluster whose profile, or whose calibration, says how long its hosts take."""

from __future__ import annotations

from collections.abc import Mapping

from costmodels.recipe import Recipe
from hardware_profiles.schema import ClusterProfile, FactorName, Quantity

# The recipe's times of the host, all of which one factor corrects: hosts differ in speed.
HOST_TIMES = (
    "host_s_per_kernel",
    "host_s_per_sharded_kernel",
    "host_s_per_launch",
    "host_s_per_collective",
    "host_s_per_collective_rank",
)
# The facts that say how late hosts come to a collective. A recipe has one of them or none; being a difference between
# hosts, it is 0 for most: what a factor multiplies is the delay and this much more, by the rank.
DELAYS = ("collective_delay_s", "host_s_per_collective_rank")
USUAL_DELAY_S = 2e-5


def scaled_recipe(recipe: Recipe, factors: Mapping[FactorName, float]) -> Recipe:
    """``recipe`` where hosts take ``host_time`` times as long, and come ``collective_delay`` times as late.

    A delay d becomes factor * (d + USUAL_DELAY_S) - USUAL_DELAY_S, at least 0. A recipe that knows of none gets it by
    the rank of a collective's group.
    """
    factor, late = factors.get("host_time", 1.0), factors.get("collective_delay", 1.0)
    known: dict[str, Quantity] = {name: of for name in HOST_TIMES if (of := getattr(recipe, name)) is not None}
    times = {name: of.model_copy(update={"value": of.value * factor}) for name, of in known.items()}
    name = next((name for name in DELAYS if getattr(recipe, name) is not None), DELAYS[-1])
    fact = times.get(name, getattr(recipe, name))
    delay_s = 0.0 if fact is None else fact.value
    delayed_s = max(0.0, late * (delay_s + USUAL_DELAY_S) - USUAL_DELAY_S)
    if delayed_s != delay_s:
        times[name] = Quantity(value=delayed_s, tag="measured", source="runs that the profile is calibrated by")
    hooks = None if recipe.hooks is None else recipe.hooks.scaled(factor)
    return recipe.model_copy(update={**times, "hooks": hooks})


def recipe_on(recipe: Recipe, profile: ClusterProfile) -> Recipe:
    """``recipe`` on the hosts of ``profile``; itself where nothing is known of them."""
    factors: dict[FactorName, float] = dict(profile.calibration.values) if profile.calibration else {}
    factors["host_time"] = factors.get("host_time", 1.0) * host_factor(recipe, profile)
    return recipe if set(factors.values()) == {1.0} else scaled_recipe(recipe, factors)


def host_factor(recipe: Recipe, profile: ClusterProfile) -> float:
    """How many times as long hosts take as the one that the recipe's times hold for; 1 where that is not known."""
    reading, known, launch = profile.node.host_s_per_kernel, recipe.host_reading_s, recipe.host_s_per_launch
    if reading is None or known is None:
        return 1.0
    return reading.value / (known.value + (launch.value if launch is not None and profile.is_launched_on else 0.0))
