"""Makes the bands of predicted step times: ``python -m benchmarks.bands --write``, in 11 minutes on two cores.

A band holds 80 % of what was measured, over what had been predicted by a planner that did not know the source. Of a run
that was priced blind (``benchmarks/data/blind``) that is its first price, kept as it was said. Of the shared table's
runs it is a price with their source left out: recipes that others' runs tell, too, are fitted without it, all others
have what other recipes have on average (``benchmarks/calibrate.py``), and clusters have the plain profiles of their
GPUs. Every source counts alike, whoever plans is a new one (``costmodels/bands.py``):

    unseen       all sources
    seen         the sources of a recipe, whose framework is its own, and all others as one more: its file's
                 ``error_band``; a recipe that no source used has the band of all
    calibrated   so many rows of each cluster of a source calibrate it, and what counts are its other rows, priced today

What holds 80 % of the sources that it was made of holds less of the next one: of each kind the ends are as far apart as
it takes for 80 % of a source that was left out, each in turn. Recipes start from the shipped values and are fitted to
at most ``MAX_ROWS`` rows each. The errors with each source left out go to standard error.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import combinations
from math import log
from pathlib import Path
from statistics import fmean, median
from typing import Any, NamedTuple

from benchmarks import calibrate
from benchmarks.published.anchors import anchored
from benchmarks.published.blind import first_prices
from benchmarks.published.data import BLIND_RUNS, RUNS
from benchmarks.published.frameworks import (
    LAYOUT_STUDY_FRAMEWORK,
    framework_name_of,
    recipe_called,
    recipe_name_of,
    study_recipe_names,
)
from benchmarks.published.machines import cluster_of
from benchmarks.published.pricing import RunPricer
from benchmarks.published.summary import MIN_GROUP_ROWS
from costmodels.recipe import ErrorBand, list_recipes
from planner.calibration.recipe_fit import (
    COVERAGE,
    PARAMETERS,
    RecipeFit,
    error_band,
    told_by,
    what_others_say,
    with_values,
)
from planner.formats.run_table import Run, read_runs
from planner.frameworks.registry import FRAMEWORKS

BANDS = calibrate.RECIPES / "bands.json"
NUMBERS = (1, 3, 10)  # of anchors
MAX_ROWS = 40
SHARES = tuple(round(COVERAGE + step / 100, 2) for step in range(16))  # of its own runs that a band may hold
TOOL = "python -m benchmarks.bands --write"
Ratios = Mapping[str, Sequence[float]]  # of each source or cluster: measured over predicted step time
# Frameworks that were calibrated themselves, by all their names: no other's recipe prices them.
OWN_FRAMEWORKS = (LAYOUT_STUDY_FRAMEWORK, *(name for each in FRAMEWORKS if not each.borrows for name in each.names))


@dataclass(frozen=True)
class Priced:
    """A run, and its measured over its predicted step time by a planner that did not know its source."""

    run: Run
    ratio: float

    @cached_property
    def kind(self) -> tuple[str, str] | None:
        """The recipe and the GPU that a prediction says to know; None where the framework has another's recipe."""
        is_own = framework_name_of(self.run) in OWN_FRAMEWORKS
        return (recipe_name_of(self.run), gpu_of(self.run)) if is_own else None


Evidence = Mapping[str, Sequence[Priced]]  # by source


def main() -> int:
    """Exit code 0; also where there is no table of runs, which is said."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path, help="table of runs")
    parser.add_argument("--write", action="store_true", help="put the bands into costmodels/recipes")
    options = parser.parse_args()
    table, blind = calibrate.runs_of(options.runs, RunPricer())
    if not table:
        print(f"no {RUNS} beside this checkout: name a table with --runs FILE.csv", file=sys.stderr)
        return 0
    without = Without.each(calibrate.fitted_to(table, blind))
    runs = [*table, *blind]

    def of_source(source: str) -> tuple[list[Priced], dict[int, dict[str, list[float]]]]:
        own, pricer = [run for run in runs if run.source == source], without.pricer(source)
        warm: dict[int, dict[str, list[float]]] = {number: {} for number in NUMBERS}
        for number in NUMBERS:
            found = anchored(own, number, pricer)
            rest = [run for run in own if run.software.cluster in found.anchors and run.id not in found.ids]
            for name in found.anchors:
                of_cluster = [run for run in rest if run.software.cluster == name]
                warm[number][f"{name}, {source}"] = ratios(of_cluster, found.calibrated(pricer))
        told = [run for run in table if run.source == source]
        return [Priced(*pair) for pair in zip(told, ratios(told, pricer), strict=True)], warm

    sources = sorted({run.source for run in runs})
    evidence: dict[str, list[Priced]] = first_said()
    warm: dict[int, dict[str, list[float]]] = {number: {} for number in NUMBERS}
    for source, (of_own, of_clusters) in zip(sources, calibrate.side_by_side(of_source, sources), strict=True):
        evidence[source] = [*evidence.get(source, ()), *of_own]
        for number in NUMBERS:
            warm[number] |= of_clusters[number]
    evidence = {source: found for source, found in sorted(evidence.items()) if found}
    report(evidence)
    shares = shares_of(evidence)
    document = document_of(evidence, warm, shares)
    print(json.dumps(document, indent=1))
    if options.write:
        BANDS.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
        write_recipes(evidence, shares)
    return 0


def first_said() -> dict[str, list[Priced]]:
    """The runs that were priced blind, by source, with what was said of them first."""
    found: dict[str, list[Priced]] = defaultdict(list)
    said = first_prices()
    for run in read_runs(BLIND_RUNS):
        first = said.get(run.id)
        if isinstance(run, Run) and run.step_time_s and first is not None and first.predicted_s is not None:
            found[run.source].append(Priced(run, run.step_time_s / first.predicted_s))
    return found


def report(evidence: Evidence) -> None:
    """Prints, beside the document, how far predictions were off that never saw a run's source or its cluster."""
    errors = {source: [1 / each.ratio - 1 for each in found] for source, found in evidence.items()}
    every = [error for found in errors.values() for error in found]
    for source, found in (*errors.items(), ("all sources", every)):
        mape, middle, bias = fmean(map(abs, found)), median(map(abs, found)), fmean(found)
        print(f"MAPE {mape:6.1%}  median {middle:6.1%}  bias {bias:+6.1%}  {source}", file=sys.stderr, flush=True)


@dataclass(frozen=True)
class Without:
    """What prices the runs of a source without having seen it, on plain profiles."""

    families: Mapping[tuple[str, ...], Sequence[Run]]  # that recipes are fitted to
    shipped: Mapping[tuple[str, ...], calibrate.FamilyFit]
    plain: RunPricer

    @classmethod
    def each(cls, fitted: Sequence[Run]) -> Without:
        """Of each source, from the runs that recipes are fitted to."""
        families, plain = calibrate.by_family(fitted), RunPricer(is_plain=True)
        return cls(families, {names: _shipped_fit(names, rows, plain) for names, rows in families.items()}, plain)

    def pricer(self, source: str) -> RunPricer:
        """The shipped recipes, and others in place of those that this source's runs are part of."""
        others = [each.fit for each in self.shipped.values() if set(each.sources) != {source}]
        middle = {name: what_others_say(name, others) for name in PARAMETERS}
        recipes = dict(self.plain.recipes)
        for names, rows in self.families.items():
            rest = [run for run in rows if run.source != source]
            if len(rest) < len(rows):
                few = calibrate.thinned(rest, MAX_ROWS)
                values = calibrate.fit(names, few, self.plain, middle).fit.values if rest else middle
                recipes |= {name: with_values(recipe_called(name), values) for name in names}
        return replace(self.plain, recipes=recipes)


def _shipped_fit(names: tuple[str, ...], rows: Sequence[Run], pricer: RunPricer) -> calibrate.FamilyFit:
    recipe = recipe_called(names[0])
    values = calibrate.values_of(recipe)
    had = tuple(name for name in PARAMETERS if getattr(recipe, name) is not None)
    few = calibrate.thinned(rows, MAX_ROWS)
    told = told_by(had, calibrate.residuals_of(names, few, pricer), values)
    sources = tuple(sorted({run.source for run in rows}))
    return calibrate.FamilyFit(names, RecipeFit(values, had, told, values), len(rows), sources)


def ratios(runs: Sequence[Run], pricer: RunPricer) -> list[float]:
    """Measured over predicted step time of each."""
    return [(run.step_time_s or 1.0) / pricer.price(run).priced.step_time_s for run in runs]


def document_of(evidence: Evidence, warm: Mapping[int, Ratios], shares: Shares) -> dict[str, Any]:
    """The content of ``bands.json``."""
    between = layout_error(evidence)
    calibrated: list[dict[str, Any]] = []
    for number, of_cluster in warm.items():
        if not of_cluster:  # no cluster of a table that was asked for has so many rows
            continue
        said = f"{TOOL}, clusters of sources left out, calibrated by {number} of their runs: {'; '.join(of_cluster)}"
        within, held = enough(lambda share, found=of_cluster: held_without(found, share))
        band = error_band(list(of_cluster.values()), said, None, within=within)
        calibrated.append({"num_runs": number, "error_band": _json(band), "held": held})
    seen: dict[str, list[str]] = defaultdict(list)
    for name, gpu in sorted(kinds_of(evidence)):
        seen[name].append(gpu)
    held = held_by_tier(evidence, shares)
    return {
        "calibrated": calibrated,
        "unseen": {"error_band": _json(band_of_all(evidence, between, shares.unseen)), "held": held["unseen"]},
        "seen": seen,
        "seen_held": held["seen"],
        "frameworks": sorted(set(OWN_FRAMEWORKS) - {LAYOUT_STUDY_FRAMEWORK}),
    }


def write_recipes(evidence: Evidence, shares: Shares) -> None:
    """Puts its band into each recipe's file."""
    between = layout_error(evidence)
    for name in (*list_recipes(), *study_recipe_names()):
        calibrate.put(name, {"error_band": _json(band_of_recipe(name, evidence, between, shares))})


class Shares(NamedTuple):
    """Of the runs that a band is made of, how many lie between its ends, by what is known."""

    seen: float
    unseen: float


def shares_of(evidence: Evidence) -> Shares:
    """As large as it takes for bands of each kind to hold ``COVERAGE`` of a source that was left out."""

    def of(tier: str) -> float:
        return enough(lambda share: held_by_tier(evidence, Shares(share, share)).get(tier))[0]

    return Shares(of("seen"), of("unseen"))


def enough(held: Callable[[float], float | None]) -> tuple[float, float | None]:
    """The least share of its own runs with which a band holds ``COVERAGE`` of others', and what it holds of them.

    The first where no source can be left out, the last where none is enough.
    """
    share, found = COVERAGE, None
    for share in SHARES:
        found = held(share)
        if found is None or found >= COVERAGE:
            break
    return share, found


def band_of_all(evidence: Evidence, between: float | None, within: float) -> ErrorBand:
    """The band of whoever knows neither a framework on a GPU nor a cluster."""
    ratios_of = [[each.ratio for each in found] for found in evidence.values()]
    text = f"{TOOL}, runs of sources that were not known when they were priced: {'; '.join(evidence)}"
    return error_band(ratios_of, text, between, within=within)


def band_of_recipe(name: str, evidence: Evidence, between: float | None, shares: Shares) -> ErrorBand:
    """The band of a recipe on GPUs of which it was told."""
    own: dict[str, list[float]] = defaultdict(list)
    others: dict[str, list[float]] = defaultdict(list)
    for source, found in evidence.items():
        for each in found:
            is_own = each.kind is not None and each.kind[0] == name
            (own if is_own else others)[source].append(each.ratio)
    if not own:
        return band_of_all(evidence, between, shares.unseen)
    text = (
        f"{TOOL}, runs of sources that were not known when they were priced: {'; '.join(own)}; all others as one more"
    )
    return error_band(list(own.values()), text, between, list(others.values()), shares.seen)


def kinds_of(evidence: Evidence) -> set[tuple[str, str]]:
    """Recipes and the GPUs that runs of them were on."""
    return {kind for found in evidence.values() for each in found if (kind := each.kind) is not None}


def held_by_tier(evidence: Evidence, of_own: Shares) -> dict[str, float]:
    """Which share of runs the bands made without their source hold, by what was known then; each source alike."""
    shares: dict[str, dict[str, list[bool]]] = {"seen": defaultdict(list), "unseen": defaultdict(list)}
    for source, found in evidence.items():
        rest = {name: other for name, other in evidence.items() if name != source}
        known, of_all = kinds_of(rest), band_of_all(rest, None, of_own.unseen)
        of_recipe = {name: band_of_recipe(name, rest, None, of_own) for name, _ in known}
        for each in found:
            tier = "seen" if each.kind in known else "unseen"
            band = of_all if each.kind is None or tier == "unseen" else of_recipe[each.kind[0]]
            shares[tier][source].append(band.low <= each.ratio <= band.high)
    return {tier: round(fmean(map(fmean, of.values())), 3) for tier, of in shares.items() if of}


def held_without(of_cluster: Ratios, within: float) -> float | None:
    """Which share of calibrated clusters' runs a band made without their source holds; each source alike.

    None where there is one source alone.
    """
    sources: dict[str, list[str]] = defaultdict(list)
    for name in of_cluster:
        sources[name.partition(", ")[2]].append(name)
    if len(sources) < 2:
        return None
    shares: list[float] = []
    for own in sources.values():
        others = [found for name, found in of_cluster.items() if name not in own]
        band = error_band(others, "without one source", None, within=within)
        shares.append(fmean(fmean(band.low <= ratio <= band.high for ratio in of_cluster[name]) for name in own))
    return round(fmean(shares), 3)


def layout_error(evidence: Evidence) -> float | None:
    """How far two layouts' measured ratio lies from the predicted one; None where no group of runs tells it.

    Of each group of runs that differ in layout alone the median over its pairs is taken; each group counts alike.
    """
    groups: dict[str, list[float]] = defaultdict(list)
    for each in (each for found in evidence.values() for each in found):
        groups[each.run.group].append(log(each.ratio))
    large = [found for name, found in groups.items() if name and len(found) >= MIN_GROUP_ROWS]
    return median(median(abs(a - b) for a, b in combinations(found, 2)) for found in large) if large else None


def gpu_of(run: Run) -> str:
    """``A100`` of A100-SXM4-80GB: the family of the GPU that prices the run."""
    return cluster_of(run).profile.device.name.partition("-")[0]


def _json(band: ErrorBand) -> dict[str, Any]:
    return band.model_dump(mode="json")


if __name__ == "__main__":
    sys.exit(main())
