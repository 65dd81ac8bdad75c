"""Makes the bands by what is known of a cluster: ``python -m benchmarks.bands --write`` (``costmodels/bands.py``).

Every source is left out in turn: recipes that others' runs tell, too, are fitted without it, all others have what
other recipes have on average (``benchmarks/calibrate.py``), and clusters have the plain profiles of their GPUs. Runs
that were priced blind once (``benchmarks/data/blind``) count like others. The residuals of sources whose recipe or
GPU family no other source has are those of a user about whom nothing is known. Then so many rows of each cluster of
the source calibrate it, and the residuals of the others are those of a calibrated cluster.

Recipes start from the shipped values and are fitted to at most ``MAX_ROWS`` rows each, so that this takes minutes. The
errors with each source left out go to standard error.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, median
from typing import Any

from benchmarks import calibrate
from benchmarks.published.anchors import anchored
from benchmarks.published.data import RUNS
from benchmarks.published.frameworks import recipe_called, recipe_name_of
from benchmarks.published.machines import cluster_of
from benchmarks.published.pricing import RunPricer
from planner.calibration.recipe_fit import PARAMETERS, RecipeFit, error_band, told_by, what_others_say, with_values
from planner.formats.run_table import Run

BANDS = calibrate.RECIPES / "bands.json"
NUMBERS = (1, 3, 10)  # of anchors
MAX_ROWS = 40
TOOL = "python -m benchmarks.bands --write"
Ratios = Mapping[str, Sequence[float]]  # of each source or cluster: measured over predicted step time


def main() -> int:
    """Exit code 0; also where there is no table of runs, which is said."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path, help="table of runs")
    parser.add_argument("--write", action="store_true", help="put the bands into costmodels/recipes/bands.json")
    options = parser.parse_args()
    table, blind = calibrate.runs_of(options.runs, RunPricer())
    runs = [*table, *blind]
    if not runs:
        print(f"no {RUNS} beside this checkout: name a table with --runs FILE.csv", file=sys.stderr)
        return 0
    without = Without.each(calibrate.fitted_to(table, blind))

    def of_source(source: str) -> tuple[list[float], dict[int, dict[str, list[float]]]]:
        own, pricer = [run for run in runs if run.source == source], without.pricer(source)
        warm: dict[int, dict[str, list[float]]] = {number: {} for number in NUMBERS}
        for number in NUMBERS:
            found = anchored(own, number, pricer)
            rest = [run for run in own if run.software.cluster in found.anchors and run.id not in found.ids]
            for name in found.anchors:
                of_cluster = [run for run in rest if run.software.cluster == name]
                warm[number][f"{name}, {source}"] = ratios(of_cluster, found.calibrated(pricer))
        return ratios(own, pricer), warm

    sources = sorted({run.source for run in runs})
    cold: dict[str, list[float]] = {}
    warm: dict[int, dict[str, list[float]]] = {number: {} for number in NUMBERS}
    for source, (of_own, of_clusters) in zip(sources, calibrate.side_by_side(of_source, sources), strict=True):
        cold[source] = of_own
        for number in NUMBERS:
            warm[number] |= of_clusters[number]
    report(cold)
    document = bands_of(runs, cold, warm)
    print(json.dumps(document, indent=1))
    if options.write:
        BANDS.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    return 0


def report(cold: Ratios) -> None:
    """Prints, beside the document, how far predictions are off that never saw a run's source or its cluster."""
    errors = {source: [1 / ratio - 1 for ratio in found] for source, found in cold.items()}
    every = [error for found in errors.values() for error in found]
    for source, found in (*errors.items(), ("all sources, each left out in turn", every)):
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


def bands_of(runs: Sequence[Run], cold: Ratios, warm: Mapping[int, Ratios]) -> dict[str, Any]:
    """The content of ``bands.json``."""
    on: dict[tuple[str, str], set[str]] = defaultdict(set)
    for run in runs:
        on[recipe_name_of(run), gpu_of(run)].add(run.source)
    alone = {source for sources in on.values() if len(sources) == 1 for source in sources}
    unseen = [cold[source] for source in sorted(alone) if source in cold]
    text = f"{TOOL}, sources of whose recipe or GPU no other tells, left out: {'; '.join(sorted(alone))}"
    found: dict[str, Any] = {"calibrated": []}
    for number, of_cluster in warm.items():
        said = f"{TOOL}, clusters of sources left out, calibrated by {number} of their runs: {'; '.join(of_cluster)}"
        band = error_band(list(of_cluster.values()), said, None)
        found["calibrated"].append({"num_runs": number, "error_band": band.model_dump(mode="json")})
    found["unseen"] = {"error_band": error_band(unseen, text, None).model_dump(mode="json")}
    seen: dict[str, list[str]] = defaultdict(list)
    for name, gpu in sorted(on):
        seen[name].append(gpu)
    found["seen"] = seen
    return found


def gpu_of(run: Run) -> str:
    """``A100`` of A100-SXM4-80GB: the family of the GPU that prices the run."""
    return cluster_of(run).profile.device.name.partition("-")[0]


if __name__ == "__main__":
    sys.exit(main())
