"""Fits the few physical parameters of a framework's recipe to measured step times.

Whatever prices runs under given parameters, the same that predicts, is handed in as ``residuals``: the logarithm of
predicted over measured of every run. Least over the parameters p is

    sum of min(|residual|, CAP)  +  PULL · sum |log(p / start)|

by coordinate descent with shrinking factors: absolute errors and a cap, so that a sick run does not bend the fit, and a
pull towards where it starts, so that a parameter moves only where several runs ask for it.
"""

from __future__ import annotations

import datetime
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import geometric_mean

from costmodels.memory_band import evenly_many
from costmodels.recipe import ErrorBand, Recipe
from hardware_profiles.schema import Fit, Quantity

CAP = 0.5  # of one run's absolute log error
PULL = 0.4  # total log error that moving a parameter by a factor of e must save
# The first are large, to leave plateaus such as a host that never binds.
FACTORS = (5.0, 2.5, 1.5, 1.25, 1.1, 1.05, 1.02)
TELLING = 1.3  # runs that get no worse when a parameter changes by this factor, up or down, do not tell it
COVERAGE = 0.8  # of the error band: from the 10th to the 90th percentile of held-out residuals
SIGNIFICANT_DIGITS = 4
# Where a number comes from that no run of the recipe tells.
NEUTRAL = "neutral value: no published run of this recipe tells it"
OF_OTHERS = (
    "geometric mean of what published runs of other recipes tell (planner/calibration/recipe_fit.py); none of this "
    "recipe tells it"
)
# A collective goes through Python, autograd and the communication library: the host is taken to need as long for it as
# for two kernels, since step times do not tell the two apart.
KERNELS_PER_COLLECTIVE = 2.0

Values = Mapping[str, float]
Residuals = Callable[[Values], Sequence[float]]


@dataclass(frozen=True)
class Parameter:
    """A number of a recipe that runs may tell: where a fit starts, and what is physical."""

    neutral: float
    least: float
    most: float


PARAMETERS: dict[str, Parameter] = {
    "product_rate": Parameter(1.0, 0.6, 1.0),
    "memory_traffic": Parameter(1.3, 0.3, 5.0),
    "host_s_per_kernel": Parameter(8e-6, 2e-6, 1e-4),
    "tensor_parallel_rate": Parameter(1.0, 0.2, 1.0),
    "data_parallel_rate": Parameter(1.0, 0.05, 1.0),
    # Of recipes that have them at all:
    "host_s_per_collective_rank": Parameter(2e-4, 1e-5, 1e-2),
    "collective_delay_s": Parameter(1e-3, 1e-5, 1e-2),
}
# What some frameworks do not have at all: a fit never gives it to them, and nobody expects it of a framework unseen.
OWN_PARAMETERS = ("host_s_per_collective_rank", "collective_delay_s")
# Every number of a recipe that a fit writes.
FITTED_FACTS = (*PARAMETERS, "host_s_per_collective")


@dataclass(frozen=True)
class RecipeFit:
    """The parameters found, those that were free to move, of these the ones that the runs tell, and the start."""

    values: Values
    free: tuple[str, ...]
    told: tuple[str, ...]
    start: Values


def neutral_values() -> dict[str, float]:
    """Where a fit starts that knows nothing."""
    return {name: parameter.neutral for name, parameter in PARAMETERS.items()}


def fit_recipe(free: Sequence[str], residuals: Residuals, start: Values | None = None) -> RecipeFit:
    """The parameters under which ``residuals`` are least; only those named in ``free`` move from ``start``."""
    start = start or neutral_values()
    values = dict(start)

    def cost(candidate: Values) -> float:
        return _misfit(residuals, candidate) + PULL * sum(abs(math.log(candidate[name] / start[name])) for name in free)

    best = cost(values)
    for factor in FACTORS:
        moved = True
        while moved:
            moved = False
            for name in free:
                for step in (factor, 1 / factor):
                    bounds = PARAMETERS[name]
                    candidate = {**values, name: min(bounds.most, max(bounds.least, values[name] * step))}
                    found = cost(candidate) if candidate != values else best
                    if found < best - 1e-4:
                        best, values, moved = found, candidate, True
                        break
    return RecipeFit(values, tuple(free), told_by(free, residuals, values), start)


def told_by(names: Sequence[str], residuals: Residuals, values: Values) -> tuple[str, ...]:
    """Which of the parameters named the runs tell: ``residuals`` grow whether it is made larger or smaller."""
    reached = _misfit(residuals, values)

    def is_told(name: str) -> bool:
        changed = ({**values, name: values[name] * step} for step in (TELLING, 1 / TELLING))
        return min(_misfit(residuals, each) for each in changed) > reached + 1e-3

    return tuple(name for name in names if is_told(name))


def _misfit(residuals: Residuals, values: Values) -> float:
    return sum(min(abs(residual), CAP) for residual in residuals(values))


def with_values(recipe: Recipe, values: Values) -> Recipe:
    """``recipe`` with these parameters; what its framework does not have at all it still does not have."""
    quantities = {name: quantity for name in values if (quantity := getattr(recipe, name)) is not None}
    update = {name: quantity.model_copy(update={"value": values[name]}) for name, quantity in quantities.items()}
    per_collective = KERNELS_PER_COLLECTIVE * values["host_s_per_kernel"]
    update["host_s_per_collective"] = recipe.host_s_per_collective.model_copy(update={"value": per_collective})
    return recipe.model_copy(update=update)


def what_others_say(name: str, fits: Sequence[RecipeFit]) -> float:
    """What other recipes say of a parameter: the geometric mean of those whose runs tell it, else the neutral value.

    Nothing, of what is one framework's own: whoever never saw its runs would not expect it.
    """
    neutral = 0.0 if name in OWN_PARAMETERS else PARAMETERS[name].neutral
    told = [found.values[name] for found in fits if name in found.told]
    return geometric_mean(told) if told else neutral


def facts_of(found: RecipeFit, recipe: Recipe, fit: Fit, tool: str) -> dict[str, Quantity]:
    """The numbers of ``recipe`` that the fit gives, each with its provenance.

    What no run of the recipe tells, and the fit did not move, keeps its start.
    """
    today = datetime.datetime.now(tz=datetime.UTC).date()

    def fitted(value: float, source: str) -> Quantity:
        return Quantity(value=_rounded(value), tag="fitted", source=source, date=today, fit=fit)

    facts: dict[str, Quantity] = {}
    for name, value in found.values.items():
        if getattr(recipe, name) is None:
            continue
        if name in found.told or value != found.start[name]:
            facts[name] = fitted(value, tool)
        else:
            source = NEUTRAL if value == PARAMETERS[name].neutral else OF_OTHERS
            facts[name] = Quantity(value=_rounded(value), tag="specified", source=source)
    per_collective = KERNELS_PER_COLLECTIVE * found.values["host_s_per_kernel"]
    twice = f"{tool}: as long as two kernels (planner/calibration/recipe_fit.py)"
    return {**facts, "host_s_per_collective": fitted(per_collective, twice)}


def _rounded(value: float) -> float:
    return float(f"{value:.{SIGNIFICANT_DIGITS}g}")


def error_band(
    ratios: Sequence[Sequence[float]],
    source: str,
    between_layouts: float | None,
    others: Sequence[Sequence[float]] = (),
    within: float = COVERAGE,
) -> ErrorBand:
    """The band of measured over predicted step times of held-out runs, one sequence a source.

    ``within``: the share of these runs between its ends, as large as it takes to hold ``COVERAGE`` of another source's.

    Every source counts alike, however many runs it has: whoever plans for a new cluster is a new source. A recipe has
    one to three sources, which are more like each other than the next one is like them: ``others``, the sources of
    other recipes, count as one source more together.
    """
    sources = [*ratios, [ratio for of_source in others for ratio in evenly_many(of_source)]] if others else ratios
    every = sorted(ratio for of_source in sources for ratio in evenly_many(of_source))
    tail = (1 - within) / 2
    low, high = (every[round(share * (len(every) - 1))] for share in (tail, 1 - tail))
    return ErrorBand(
        low=round(min(low, 1.0), 3),
        high=round(max(high, 1.0), 3),
        coverage=COVERAGE,
        num_runs=sum(map(len, ratios)),
        source=source,
        between_layouts=None if between_layouts is None else round(between_layouts, 3),
    )
