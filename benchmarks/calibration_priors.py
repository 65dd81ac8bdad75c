"""Fits the prior of ``planner calibrate`` to published runs: ``python -m benchmarks.calibration_priors``.

How far do clusters lie from their profiles? Every run is priced with the plain profile of its GPU and a recipe that
never saw its source (``benchmarks/bands.py``), and with each factor a little larger and smaller. To first order the
logarithm of measured over predicted is then

    r = sum over factors of slope * x + noise,    x ~ N(0, s) one a cluster, noise ~ Student's t (4) of one run

and expectation-maximisation gives the deviations s of the factors between clusters, and that of the noise (A. Gelman
et al., Bayesian Data Analysis, chapters 5 and 13). Every cluster counts alike. One that asks for more than a factor of
e^CAP counts as if it asked for that: what is farther off is not known of its machine, but wrong in the model.

Printed beside it: errors of the rest of each cluster by one, three and ten anchors, to first order, under a prior that
was fitted to the other clusters, and under the one that is shipped. Its spreads are smaller than the fitted ones: a run
that says little of most factors is then not explained by them.
"""

from __future__ import annotations

import argparse
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import exp, log
from pathlib import Path
from statistics import fmean

import numpy as np
import numpy.typing as npt

from benchmarks.bands import Without, ratios
from benchmarks.calibrate import priceable
from benchmarks.published.anchors import REST, spread_over
from benchmarks.published.data import RUNS, shipped
from benchmarks.published.pricing import RunPricer
from hardware_profiles.schema import FactorName
from planner.calibration.posterior import STEP
from planner.calibration.priors import PRIOR, TIME_FACTORS
from planner.formats.run_table import Run

Array = npt.NDArray[np.float64]
DEGREES_OF_FREEDOM = 4.0
ROUNDS = 200
CAP = 0.5
LEAST_SPREAD = 0.05  # a factor that no cluster asks for is not known to be exact
MIN_ROWS = 4  # of a cluster that has a part in the fit


@dataclass(frozen=True)
class Cluster:
    """The runs of a cluster, what is left of each, and how each factor moves it."""

    runs: tuple[Run, ...]
    residuals: Array  # log(measured / predicted)
    slopes: Array  # [run, factor]


def fitted(clusters: Sequence[Cluster]) -> tuple[Array, float]:
    """Deviation of every factor between clusters, and of a run's noise."""
    spreads, noise = np.full(len(TIME_FACTORS), 0.2), 0.05
    for _ in range(ROUNDS):
        squares, left = np.zeros_like(spreads), 0.0
        for cluster in clusters:
            mean, covariance, weights = _posterior(cluster, spreads, noise)
            squares += np.minimum(CAP**2, mean**2 + np.diag(covariance))
            rest = cluster.residuals - cluster.slopes @ mean
            explained = np.einsum("ij,jk,ik->i", cluster.slopes, covariance, cluster.slopes)
            left += float(np.mean(weights * (rest**2 + explained)))
        spreads = np.maximum(LEAST_SPREAD, np.sqrt(squares / len(clusters)))
        noise = float(np.sqrt(left / len(clusters)))
    return spreads, noise


def _posterior(cluster: Cluster, spreads: Array, noise: float) -> tuple[Array, Array, Array]:
    """Mean and covariance of a cluster's factors, and the weight of each run."""
    weights = np.ones_like(cluster.residuals)
    mean, covariance = np.zeros_like(spreads), np.diag(spreads**2)
    for _ in range(20):
        scaled = cluster.slopes * (weights / noise**2)[:, None]
        covariance = np.linalg.inv(cluster.slopes.T @ scaled + np.diag(1 / spreads**2)).astype(np.float64)
        mean = covariance @ (scaled.T @ cluster.residuals)
        rest = (cluster.residuals - cluster.slopes @ mean) / noise
        weights = (DEGREES_OF_FREEDOM + 1) / (DEGREES_OF_FREEDOM + rest**2)
    return mean, covariance, weights


def anchored_errors(
    clusters: Mapping[str, Cluster], number: int, prior: tuple[Array, float] | None = None
) -> dict[str, tuple[float, float]]:
    """Mean absolute error of the rest of each cluster, cold and anchored.

    ``prior``: deviations of factors, and of noise; None: those fitted to the other clusters.
    """
    found: dict[str, tuple[float, float]] = {}
    for name, cluster in clusters.items():
        if len(cluster.runs) < number + REST:
            continue
        spreads, noise = prior or fitted([other for key, other in clusters.items() if key != name])
        chosen = {run.id for run in spread_over(cluster.runs, number)}
        is_anchor = np.array([run.id in chosen for run in cluster.runs])
        part = Cluster((), cluster.residuals[is_anchor], cluster.slopes[is_anchor])
        mean, _, _ = _posterior(part, spreads, noise)
        rest = ~is_anchor
        cold = cluster.residuals[rest]
        warm = cold - cluster.slopes[rest] @ mean
        found[name] = (_error(cold), _error(warm))
    return found


def _error(residuals: Array) -> float:
    return float(np.mean(np.abs(np.exp(-residuals) - 1)))


def clusters_of(path: Path) -> dict[str, Cluster]:
    """Every cluster with enough rows, priced by plain profiles."""
    runs = priceable(path, RunPricer(is_plain=True))
    without = Without.each(runs)
    pricers = {source: without.pricer(source) for source in sorted({run.source for run in runs})}
    rows: dict[str, list[tuple[Run, float, list[float]]]] = defaultdict(list)
    for run in runs:
        pricer = pricers[run.source]
        slopes = [_slope(run, pricer, name) for name in TIME_FACTORS]
        rows[run.software.cluster].append((run, log(ratios([run], pricer)[0]), slopes))
    return {
        name: Cluster(tuple(run for run, _, _ in own), np.array([r for _, r, _ in own]), np.array([s for *_, s in own]))
        for name, own in rows.items()
        if len(own) >= MIN_ROWS
    }


def _slope(run: Run, pricer: RunPricer, name: FactorName) -> float:
    more, less = (pricer.price(run, {name: exp(side * STEP)}).priced.step_time_s for side in (1, -1))
    return log(more / less) / (2 * STEP)


def main() -> int:
    """Exit code 0; also where there is no table of runs, which is said."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path, help="table of runs")
    path = parser.parse_args().runs or shipped(RUNS)
    if path is None:
        print(f"no {RUNS} beside this checkout: name a table with --runs FILE.csv", file=sys.stderr)
        return 0
    clusters = clusters_of(path)
    spreads, noise = fitted(list(clusters.values()))
    for name, spread in zip(TIME_FACTORS, spreads, strict=True):
        print(f"{name:<20} {spread:.3f}")
    print(f"{'noise':<20} {noise:.3f}, of {len(clusters)} clusters")
    shipped_prior = np.array([PRIOR.spreads[name] for name in TIME_FACTORS]), PRIOR.time_noise
    for number in (1, 3, 10):
        for said, prior in (("fitted", None), ("shipped", shipped_prior)):
            errors = anchored_errors(clusters, number, prior)
            cold, warm = (fmean(pair[side] for pair in errors.values()) for side in (0, 1))
            print(f"{number} anchors, {said}: mean over {len(errors)} clusters cold {cold:.1%}, anchored {warm:.1%}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
