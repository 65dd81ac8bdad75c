"""Fits the few physical parameters of each framework recipe to published runs: ``python -m benchmarks.calibrate``.

For every recipe, least over its parameters p of

    sum of min(|log(predicted / measured)|, CAP)  +  PULL · sum |log(p / start)|

by coordinate descent with shrinking factors: absolute errors and a cap, so that a sick run does not bend the fit, and a
pull towards neutral values, so that a parameter moves only where several rows ask for it. Beside the error in sample it
prints the error with one source left out: the fit then starts from what the other recipes have on average, and stays
there where no other source used the recipe. ``--write`` puts the values into costmodels/recipes with their provenance.
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path
from statistics import fmean, geometric_mean, median

from benchmarks.published.data import RUNS, shipped
from benchmarks.published.frameworks import recipe_name_of
from benchmarks.published.pricing import RunPricer
from benchmarks.published.runs import Rejected, Run, UnpriceableRunError, read_runs
from benchmarks.published.summary import MIN_GROUP_ROWS
from costmodels.recipe import Recipe, list_recipes, load_recipe
from planner.errors import PlannerError

RECIPES = Path(__file__).resolve().parents[1] / "costmodels" / "recipes"
CAP = 0.5  # of one row's absolute log error
PULL = 0.4  # total log error that moving a parameter by a factor of e must save
FACTORS = (
    5.0,
    2.5,
    1.5,
    1.25,
    1.1,
    1.05,
    1.02,
)  # the first are large, to leave plateaus such as a host that never binds
MAX_ROWS = 120  # of one family and fit; evenly spaced rows beyond that
# Recipes that are one software and differ in a kernel alone have their parameters together.
FAMILIES = (("megatron-layouts-2023", "megatron-layouts-2023-fused-norm"), ("nanotron", "nanotron-2025"))
# Name, neutral value, least and largest value that is physical.
PARAMETERS: dict[str, tuple[float, float, float]] = {
    "product_rate": (1.0, 0.6, 1.3),
    "memory_traffic": (1.3, 0.3, 5.0),
    "host_s_per_kernel": (8e-6, 2e-6, 1e-4),
    "tensor_parallel_rate": (1.0, 0.2, 1.2),
    "data_parallel_rate": (1.0, 0.05, 1.2),
    "host_s_per_collective_rank": (2e-4, 1e-5, 1e-2),  # of recipes that have it at all
}
# A collective goes through Python, autograd and the communication library: about so many kernel launches.
KERNELS_PER_COLLECTIVE = 2.0
TELLING = 1.3  # rows that get no worse when a parameter changes by this factor, up or down, do not tell it
COVERAGE = 0.8  # of the error band: from the 10th to the 90th percentile of held-out residuals
SPREAD = 101  # quantiles that stand for one source
Values = Mapping[str, float]
HeldOut = Mapping[str, Sequence[tuple[Run, float]]]  # of each source: its runs and log(predicted / measured)


@dataclass(frozen=True)
class Fit:
    """Parameters of one family of recipes and how well they do on the rows they were fitted to."""

    names: tuple[str, ...]
    values: Values
    num_rows: int
    sources: tuple[str, ...]
    free: tuple[str, ...]
    told: tuple[str, ...]  # of the free ones, those without which the rows would be priced worse


def main() -> int:
    """Exit code 0; 2 where there is no table of runs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path, help="table of runs to fit to")
    parser.add_argument("--write", action="store_true", help="put the values into costmodels/recipes")
    parser.add_argument("--held-out", action="store_true", help="also fit with each source left out")
    options = parser.parse_args()
    path = options.runs or shipped(RUNS)
    if path is None:
        print(f"no {RUNS} beside this checkout: name a table with --runs FILE.csv", file=sys.stderr)
        return 0
    pricer = RunPricer()
    runs = priceable(path, pricer)
    families = by_family(runs)
    fits = {names: fit(names, rows, pricer) for names, rows in families.items()}
    recipes = {name: with_values(load_recipe(name), f.values) for names, f in fits.items() for name in names}
    report(fits, recipes, families, pricer)
    held_out = report_held_out(fits, families, pricer) if options.held_out else {}
    if options.write:
        for names, found in fits.items():
            for name in names:
                write(name, found)
        if held_out:
            write_bands(fits, held_out)
    return 0


def priceable(path: Path, pricer: RunPricer) -> list[Run]:
    """The rows of ``path`` that have a price and a measured time."""
    found: list[Run] = []
    for run in read_runs(path):
        if isinstance(run, Rejected) or run.step_time_s is None:
            continue
        try:
            pricer.price(run)
        except (UnpriceableRunError, ValueError, PlannerError):
            continue
        found.append(run)
    return found


def by_family(runs: Sequence[Run]) -> dict[tuple[str, ...], list[Run]]:
    """Runs by the recipes that are fitted together."""
    found: dict[tuple[str, ...], list[Run]] = defaultdict(list)
    for run in runs:
        name = recipe_name_of(run)
        found[next((family for family in FAMILIES if name in family), (name,))].append(run)
    return dict(found)


def fit(names: tuple[str, ...], rows: Sequence[Run], pricer: RunPricer, start: Values | None = None) -> Fit:
    """The parameters of one family; only those that its rows can tell are moved."""
    start = start or {name: neutral for name, (neutral, _, _) in PARAMETERS.items()}
    chosen = rows[:: -(-len(rows) // MAX_ROWS)]
    free = [name for name in PARAMETERS if _acts_on(name, names, chosen)]
    values = dict(start)

    def misfit(candidate: Values) -> float:
        return sum(min(abs(e), CAP) for e in errors(names, chosen, candidate, pricer))

    def cost(candidate: Values) -> float:
        return misfit(candidate) + PULL * sum(abs(math.log(candidate[name] / start[name])) for name in free)

    best = cost(values)
    for factor in FACTORS:
        moved = True
        while moved:
            moved = False
            for name in free:
                for step in (factor, 1 / factor):
                    _, low, high = PARAMETERS[name]
                    candidate = {**values, name: min(high, max(low, values[name] * step))}
                    found = cost(candidate) if candidate != values else best
                    if found < best - 1e-4:
                        best, values, moved = found, candidate, True
                        break
    reached = misfit(values)
    told = [
        name
        for name in free
        if min(misfit({**values, name: values[name] * step}) for step in (TELLING, 1 / TELLING)) > reached + 1e-3
    ]
    return Fit(names, values, len(rows), tuple(sorted({run.source for run in rows})), tuple(free), tuple(told))


def _acts_on(name: str, recipes: Sequence[str], rows: Sequence[Run]) -> bool:
    """Whether ``name`` acts on the rows, and they vary in what it acts on."""
    match name:
        case "host_s_per_collective_rank":
            return any(load_recipe(recipe).host_s_per_collective_rank is not None for recipe in recipes)
        case "tensor_parallel_rate":
            return len({run.layout.tp for run in rows}) > 1
        case "data_parallel_rate":
            return len({(run.layout.dp, run.hardware.num_devices) for run in rows if run.layout.dp > 1}) > 1
        case _:
            return True


def errors(names: tuple[str, ...], rows: Sequence[Run], values: Values, pricer: RunPricer) -> list[float]:
    """log(predicted / measured) of every row under ``values``."""
    priced = replace(pricer, recipes={name: with_values(load_recipe(name), values) for name in names})
    return [math.log(priced.price(run).priced.step_time_s / (run.step_time_s or 1.0)) for run in rows]


def with_values(recipe: Recipe, values: Values) -> Recipe:
    """``recipe`` with fitted parameters."""
    quantities = {name: quantity for name in values if (quantity := getattr(recipe, name)) is not None}
    update = {name: quantity.model_copy(update={"value": values[name]}) for name, quantity in quantities.items()}
    per_collective = KERNELS_PER_COLLECTIVE * values["host_s_per_kernel"]
    update["host_s_per_collective"] = recipe.host_s_per_collective.model_copy(update={"value": per_collective})
    return recipe.model_copy(update=update)


def report(
    fits: Mapping[tuple[str, ...], Fit],
    recipes: Mapping[str, Recipe],
    families: Mapping[tuple[str, ...], Sequence[Run]],
    pricer: RunPricer,
) -> None:
    """In-sample errors and all parameters."""
    total, number = list[float](), 0
    for names, found in fits.items():
        relative = [math.exp(e) - 1 for e in errors(names, families[names], found.values, pricer)]
        total += relative
        number += len(found.free)
        values = ", ".join(f"{name} {found.values[name]:.3g}" for name in found.free)
        accuracy = f"{found.num_rows:4d} rows  MAPE {_mape(relative):6.1%}  bias {fmean(relative):+6.1%}"
        print(f"{names[0]:<24} {accuracy}  {values}", flush=True)
    print(f"{number} fitted parameters, {len(total)} rows; in sample MAPE {_mape(total):.1%}, bias {fmean(total):+.1%}")


def report_held_out(
    fits: Mapping[tuple[str, ...], Fit], families: Mapping[tuple[str, ...], Sequence[Run]], pricer: RunPricer
) -> HeldOut:
    """The errors of each source's runs under parameters that never saw that source."""
    found: dict[str, list[tuple[Run, float]]] = {}
    for source in sorted({run.source for rows in families.values() for run in rows}):
        others = [f for f in fits.values() if set(f.sources) != {source}]
        middle = {name: _middle(name, others) for name in PARAMETERS}
        found[source] = []
        for names, rows in families.items():
            held = [run for run in rows if run.source == source]
            rest = [run for run in rows if run.source != source]
            if held:
                values = fit(names, rest, pricer, middle).values if rest else middle
                found[source] += zip(held, errors(names, held, values, pricer), strict=True)
        relative = [math.exp(e) - 1 for _, e in found[source]]
        print(f"  left out {_mape(relative):6.1%}  bias {fmean(relative):+6.1%}  {source}", flush=True)
    every = [math.exp(e) - 1 for errors_of in found.values() for _, e in errors_of]
    print(
        f"leave one source out: MAPE {_mape(every):.1%}, median {median(map(abs, every)):.1%}, bias {fmean(every):+.1%}"
    )
    spread, groups = layout_error(found)
    print(f"between two layouts: {spread:.1%} (median over {groups} groups of runs that differ in layout alone)")
    return found


def _middle(name: str, fits: Sequence[Fit]) -> float:
    """What other recipes say of a parameter: the geometric mean of those whose rows tell it, else the neutral value.

    Nothing, of what is one framework's own: whoever never saw its runs would not expect it.
    """
    neutral = 0.0 if name == "host_s_per_collective_rank" else PARAMETERS[name][0]
    told = [found.values[name] for found in fits if name in found.told]
    return geometric_mean(told) if told else neutral


def layout_error(held_out: HeldOut) -> tuple[float, int]:
    """How far two layouts' measured ratio lies from the predicted one, and the number of groups this is the median of.

    Of each group of runs that differ in layout alone the median over its pairs, each group counting alike.
    """
    groups: dict[str, list[float]] = defaultdict(list)
    for run, error in (pair for pairs in held_out.values() for pair in pairs):
        groups[run.group].append(error)
    large = [found for found in groups.values() if len(found) >= MIN_GROUP_ROWS]
    return median(median(abs(a - b) for a, b in combinations(found, 2)) for found in large), len(large)


def write_bands(fits: Mapping[tuple[str, ...], Fit], held_out: HeldOut) -> None:
    """The band of each recipe from the held-out residuals of its sources; of recipes without runs from all of them.

    Every source counts alike, however many runs it has: whoever plans for a new cluster is a new source.
    """
    of_names = {name: found.sources for found in fits.values() for name in found.names}
    between_layouts, _ = layout_error(held_out)
    for name in list_recipes():
        sources = of_names.get(name, tuple(held_out))
        ratios = sorted(ratio for source in sources for ratio in _spread([math.exp(-e) for _, e in held_out[source]]))
        tail = (1 - COVERAGE) / 2
        low, high = (ratios[round(share * (len(ratios) - 1))] for share in (tail, 1 - tail))
        path = RECIPES / f"{name}.json"
        content = json.loads(path.read_text(encoding="utf-8"))
        content["error_band"] = {
            "low": round(min(low, 1.0), 3),
            "high": round(max(high, 1.0), 3),
            "coverage": COVERAGE,
            "num_runs": sum(len(held_out[source]) for source in sources),
            "source": f"benchmarks/calibrate.py, each source left out of the fit in turn: {'; '.join(sources)}",
            "between_layouts": round(between_layouts, 3),
        }
        path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _spread(values: Sequence[float]) -> list[float]:
    """As many values of each source: its quantiles in even steps."""
    ordered = sorted(values)
    return [ordered[round(k / (SPREAD - 1) * (len(ordered) - 1))] for k in range(SPREAD)]


def write(name: str, found: Fit) -> None:
    """Puts the values of ``found`` into the recipe's file, each with where it comes from."""
    path = RECIPES / f"{name}.json"
    content = json.loads(path.read_text(encoding="utf-8"))
    today = datetime.datetime.now(tz=datetime.UTC).date().isoformat()
    runs = f"{found.num_rows} published runs: {'; '.join(found.sources)}"
    source = f"fitted by benchmarks/calibrate.py to step times of {runs}"
    quantities = {key: found.values[key] for key in found.free if content.get(key) is not None}
    quantities["host_s_per_collective"] = KERNELS_PER_COLLECTIVE * found.values["host_s_per_kernel"]
    for key, value in quantities.items():
        content[key] = {"value": float(f"{value:.4g}"), "tag": "published", "source": source, "date": today}
    for key in content.keys() & PARAMETERS.keys() - set(found.free):
        neutral = "neutral value: no published run of this recipe tells it"
        content[key] = {"value": found.values[key], "tag": "published", "source": neutral}
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _mape(relative: Sequence[float]) -> float:
    return fmean(map(abs, relative))


if __name__ == "__main__":
    sys.exit(main())
