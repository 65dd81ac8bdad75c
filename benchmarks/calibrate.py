"""Fits the few physical parameters of each framework recipe to published runs: ``python -m benchmarks.calibrate``.

The fit is the product's (``planner.calibration.recipe_fit``); here stand the runs, which of them belong to a recipe,
and the report. The runs are those of the shared table; of a recipe that it has next to no row of, those that were
priced blind once (``benchmarks/data/blind``) join them. The other blind rows stay a test. Beside the error in sample it
prints the error with one source left out: the fit then starts from what the other recipes have on average, and stays
there where no other source used the recipe. ``--write`` puts the values into the recipes' files with their provenance.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from statistics import fmean, median
from typing import Any, TypeVar, cast

from benchmarks.published.data import BLIND_RUNS, RUNS, shipped
from benchmarks.published.frameworks import (
    STUDY_RECIPES,
    UNKNOWN,
    framework_name_of,
    recipe_called,
    recipe_name_of,
)
from benchmarks.published.pricing import RunPricer
from costmodels.recipe import OWN_FACTS, Recipe, resolved_content, stated_content
from hardware_profiles.schema import Fit
from planner.calibration.recipe_fit import (
    OWN_PARAMETERS,
    PARAMETERS,
    RecipeFit,
    Residuals,
    Values,
    facts_of,
    fit_recipe,
    neutral_values,
    what_others_say,
    with_values,
)
from planner.errors import PlannerError
from planner.formats.run_table import Rejected, Run, UnpriceableRunError, read_runs

RECIPES = Path(__file__).resolve().parents[1] / "costmodels" / "recipes"
MAX_ROWS = 120  # of one family and fit; evenly spaced rows beyond that
FEW_ROWS = 3  # of a recipe that has fewer, rows that were priced blind are taken too
# Recipes that are one software and differ in a kernel or an option alone have their parameters together.
FAMILIES = (
    ("megatron-layouts-2023", "megatron-layouts-2023-fused-norm"),
    ("nanotron", "nanotron-2025"),
    ("megatron-core", "megatron-core-overlap"),
    ("megatron-deepspeed-2022", "megatron-deepspeed-2021"),
)
# Rates of products on Hopper were found by NeMo's runs (``benchmarks/hopper_fit.py``): a rate of its own would say the
# same again. DeepSpeed's blind runs of 2021 are of Hugging Face's GPT-2, whose many small operators no column tells: a
# rate of products at its bound would stand for them.
NOT_FITTED = ("nemo", "deepspeed-2021")
TOOL = "python -m benchmarks.calibrate --write"
HOST_TIME = "host_s_per_kernel"
Key = TypeVar("Key")
Found = TypeVar("Found")
HeldOut = Mapping[str, Sequence[tuple[Run, float]]]  # of each source: its runs and log(predicted / measured)


@dataclass(frozen=True)
class FamilyFit:
    """Parameters of one family of recipes, and the rows that they were fitted to."""

    names: tuple[str, ...]
    fit: RecipeFit
    num_rows: int
    sources: tuple[str, ...]


def main() -> int:
    """Exit code 0; 2 where there is no table of runs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path, help="table of runs to fit to")
    parser.add_argument("--write", action="store_true", help="put the values into costmodels/recipes")
    parser.add_argument("--held-out", action="store_true", help="also fit with each source left out")
    options = parser.parse_args()
    pricer = RunPricer()
    runs = fitted_to(*runs_of(options.runs, pricer))
    if not runs:
        print(f"no {RUNS} beside this checkout: name a table with --runs FILE.csv", file=sys.stderr)
        return 0
    families = by_family(runs)
    fits = fit_all(families, pricer)
    report(fits, families, pricer)
    held_out = report_held_out(fits, families, pricer) if options.held_out else {}
    if options.write:
        of_names = {name: found for found in fits.values() for name in found.names}
        for name in extended_first(of_names):
            write(name, of_names[name], held_out)
    return 0


def runs_of(asked: Path | None, pricer: RunPricer) -> tuple[list[Run], list[Run]]:
    """The runs of the table that is asked for, else of the shared one; and those that were priced blind once.

    None of either where no table is asked for and there is no shared one.
    """
    if asked is not None:
        return priceable(asked, pricer), []
    shared = shipped(RUNS)
    return ([], []) if shared is None else (priceable(shared, pricer), priceable(BLIND_RUNS, pricer))


def fitted_to(runs: Sequence[Run], blind: Sequence[Run]) -> list[Run]:
    """What recipes are fitted to: all ``runs``, and of the blind ones those of recipes that have next to none."""
    known = Counter(map(recipe_name_of, runs))
    return [*runs, *(run for run in blind if is_fitted_to(run, known))]


def is_fitted_to(blind: Run, known: Mapping[str, int]) -> bool:
    """Whether a run that was priced blind is one of the few of its recipe; ``known``: rows of the shared table."""
    name = recipe_name_of(blind)
    return known.get(name, 0) < FEW_ROWS and name not in NOT_FITTED


def priceable(path: Path, pricer: RunPricer) -> list[Run]:
    """The rows of ``path`` that have a price, a measured time, and a framework that is known."""
    found: list[Run] = []
    for run in read_runs(path):
        if isinstance(run, Rejected) or run.step_time_s is None or framework_name_of(run) == UNKNOWN:
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


def fit_all(families: Mapping[tuple[str, ...], Sequence[Run]], pricer: RunPricer) -> dict[tuple[str, ...], FamilyFit]:
    """The parameters of every family, twice: the second fit starts from the host time that the others tell.

    Rates have a neutral value, 1: what hardware sustains. The time that a host takes for a kernel has none.
    """
    longest_first = sorted(families, key=lambda names: -len(families[names]))
    alone = dict(
        zip(longest_first, side_by_side(lambda names: fit(names, families[names], pricer), longest_first), strict=True)
    )

    def again(names: tuple[str, ...]) -> FamilyFit:
        others = [other.fit for key, other in alone.items() if key != names]
        start = {**neutral_values(), HOST_TIME: what_others_say(HOST_TIME, others)}
        return fit(names, families[names], pricer, start)

    found = dict(zip(longest_first, side_by_side(again, longest_first), strict=True))
    return {names: found[names] for names in families}


def side_by_side(work: Callable[[Key], Found], keys: Sequence[Key]) -> Iterator[Found]:
    """What ``work`` finds of each, in their order; one process a core, which have all that this one has."""
    _AT_WORK[:] = [work]
    with get_context("fork").Pool() as pool:
        for found in pool.imap(_do, keys):
            yield cast("Found", found)


_AT_WORK: list[Callable[[Any], Any]] = []


def _do(key: object) -> object:
    return _AT_WORK[0](key)


def fit(names: tuple[str, ...], rows: Sequence[Run], pricer: RunPricer, start: Values | None = None) -> FamilyFit:
    """The parameters of one family; only those that its rows can tell are moved."""
    chosen = thinned(rows, MAX_ROWS)
    free = [name for name in PARAMETERS if _acts_on(name, names, chosen)]
    if start is not None:  # what nobody expects of a framework starts where it does when its own runs tell it
        start = {name: value or PARAMETERS[name].neutral * (name in free) for name, value in start.items()}
    found = fit_recipe(free, residuals_of(names, chosen, pricer), start)
    return FamilyFit(names, found, len(rows), tuple(sorted({run.source for run in rows})))


def values_of(recipe: Recipe) -> dict[str, float]:
    """The parameters of ``recipe``; neutral ones of what its framework does not have."""
    facts = {name: getattr(recipe, name) for name in PARAMETERS}
    return {name: PARAMETERS[name].neutral if fact is None else fact.value for name, fact in facts.items()}


def thinned(rows: Sequence[Run], most: int) -> Sequence[Run]:
    """At most ``most`` rows, evenly spaced; all where they are no more."""
    return rows[:: max(1, -(-len(rows) // most))]


def _acts_on(name: str, recipes: Sequence[str], rows: Sequence[Run]) -> bool:
    """Whether ``name`` acts on the rows, and they vary in what it acts on."""
    match name:
        case _ if name in OWN_PARAMETERS:
            return any(getattr(recipe_called(recipe), name) is not None for recipe in recipes)
        case "tensor_parallel_rate":
            return len({run.layout.tp for run in rows}) > 1
        case "data_parallel_rate":
            return len({(run.layout.dp, run.hardware.num_devices) for run in rows if run.layout.dp > 1}) > 1
        case _:
            return True


def residuals_of(names: tuple[str, ...], rows: Sequence[Run], pricer: RunPricer) -> Residuals:
    """log(predicted / measured) of every row, as a function of the parameters."""

    def residuals(values: Values) -> list[float]:
        recipes: dict[str, Recipe] = {name: with_values(recipe_called(name), values) for name in names}
        priced = replace(pricer, recipes=recipes)
        return [math.log(priced.price(run).priced.step_time_s / (run.step_time_s or 1.0)) for run in rows]

    return residuals


def report(
    fits: Mapping[tuple[str, ...], FamilyFit],
    families: Mapping[tuple[str, ...], Sequence[Run]],
    pricer: RunPricer,
) -> None:
    """In-sample errors and all parameters."""
    total, number = list[float](), 0
    for names, found in fits.items():
        residuals = residuals_of(names, families[names], pricer)(found.fit.values)
        relative = [math.exp(e) - 1 for e in residuals]
        total += relative
        number += len(found.fit.free)
        values = ", ".join(f"{name} {found.fit.values[name]:.3g}" for name in found.fit.free)
        accuracy = f"{found.num_rows:4d} rows  MAPE {_mape(relative):6.1%}  bias {fmean(relative):+6.1%}"
        print(f"{names[0]:<24} {accuracy}  {values}", flush=True)
    print(f"{number} fitted parameters, {len(total)} rows; in sample MAPE {_mape(total):.1%}, bias {fmean(total):+.1%}")


def report_held_out(
    fits: Mapping[tuple[str, ...], FamilyFit], families: Mapping[tuple[str, ...], Sequence[Run]], pricer: RunPricer
) -> HeldOut:
    """The errors of each source's runs under parameters that never saw that source."""

    def without(source: str) -> list[tuple[Run, float]]:
        others = [f.fit for f in fits.values() if set(f.sources) != {source}]
        middle = {name: what_others_say(name, others) for name in PARAMETERS}
        errors: list[tuple[Run, float]] = []
        for names, rows in families.items():
            held = [run for run in rows if run.source == source]
            rest = [run for run in rows if run.source != source]
            if held:
                values = fit(names, rest, pricer, middle).fit.values if rest else middle
                errors += zip(held, residuals_of(names, held, pricer)(values), strict=True)
        return errors

    found: dict[str, list[tuple[Run, float]]] = {}
    sources = sorted({run.source for rows in families.values() for run in rows})
    for source, errors in zip(sources, side_by_side(without, sources), strict=True):
        found[source] = errors
        relative = [math.exp(e) - 1 for _, e in found[source]]
        print(f"  left out {_mape(relative):6.1%}  bias {fmean(relative):+6.1%}  {source}", flush=True)
        for cluster, own in _by_cluster(found[source]).items():
            print(f"           {_mape(own):6.1%}  bias {fmean(own):+6.1%}  {len(own)} rows on {cluster}", flush=True)
    every = [math.exp(e) - 1 for errors_of in found.values() for _, e in errors_of]
    print(
        f"leave one source out: MAPE {_mape(every):.1%}, median {median(map(abs, every)):.1%}, bias {fmean(every):+.1%}"
    )
    return found


def _by_cluster(errors: Sequence[tuple[Run, float]]) -> dict[str, list[float]]:
    """Relative errors of the runs on each cluster of a source that ran on several."""
    found: dict[str, list[float]] = defaultdict(list)
    for run, error in errors:
        found[run.software.cluster].append(math.exp(error) - 1)
    return dict(found) if len(found) > 1 else {}


def write(name: str, found: FamilyFit, held_out: HeldOut) -> None:
    """Puts the values of ``found`` into the recipe's file, each with what it was fitted to."""
    errors = [abs(math.exp(e) - 1) for source in found.sources for _, e in held_out.get(source, ())]
    fitted_to = Fit(
        to=f"step times of published runs: {'; '.join(found.sources)}",
        num_rows=found.num_rows,
        held_out_error=round(fmean(errors), 3) if errors else None,
    )
    facts = facts_of(found.fit, recipe_called(name), fitted_to, TOOL)
    put(name, {key: fact.model_dump(mode="json", exclude_none=True) for key, fact in facts.items()})


def put(name: str, facts: Mapping[str, object]) -> None:
    """States ``facts`` in a recipe's file, except those that it takes over from the recipe that it extends."""
    path = path_of(name)
    content = stated_content(str(path))
    extended = content.get("extends")
    base = {} if extended is None else resolved_content(str(path_of(str(extended))))
    for key, fact in facts.items():
        if key not in OWN_FACTS and base.get(key) == fact:
            content.pop(key, None)
        else:
            content[key] = fact
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def path_of(name: str) -> Path:
    """The file of a recipe, of a study or shipped."""
    of_study = STUDY_RECIPES / f"{name}.json"
    return of_study if of_study.is_file() else RECIPES / f"{name}.json"


def extended_first(names: Iterable[str]) -> list[str]:
    """``names`` in an order in which a recipe stands behind the one that it extends."""

    def depth(name: str) -> int:
        extended = stated_content(str(path_of(name))).get("extends")
        return 0 if extended is None else 1 + depth(str(extended))

    return sorted(names, key=lambda name: (depth(name), name))


def _mape(relative: Sequence[float]) -> float:
    return fmean(map(abs, relative))


if __name__ == "__main__":
    sys.exit(main())
