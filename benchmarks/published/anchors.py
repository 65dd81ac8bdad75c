"""Anchors: of each cluster a few rows calibrate, and only the rest is priced, as a user with a few runs would have it.

Which rows those are is decided by their layouts alone: each is the one that brings all rows nearest to the anchors, the
sum of distances counted (the building phase of k-medoids, Kaufman and Rousseeuw 1990). Nothing of a measurement is
looked at but whether there is one.
"""

from __future__ import annotations

import datetime
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from math import inf, log2, sqrt
from statistics import fmean, median

from benchmarks.published.pricing import RunPricer
from benchmarks.published.summary import Row
from costmodels.vocabulary.choices import Recompute
from hardware_profiles.calibrated import Factors
from hardware_profiles.schema import Calibration
from planner.calibration.cluster import MeasuredRun, MemoryKind, calibration_of
from planner.calibration.priors import PRIOR, Prior
from planner.errors import PlannerError
from planner.evaluation.measured_memory import memory_as_measured
from planner.formats.run_table import Run, UnpriceableRunError

REST = 3  # rows that a cluster must have besides its anchors
ALL_ANCHORED, NOT_ANCHORED = "all clusters with anchors", "clusters of too few rows"
# What differs between two layouts, in doublings or in steps of recomputation and ZeRO.
_RECOMPUTE = {Recompute.NONE: 0.0, Recompute.SELECTIVE: 1.0, Recompute.FULL: 2.0}
_MEMORY_KINDS: Mapping[str, MemoryKind] = {"allocated": "allocated", "reserved": "reserved", "device": "device"}


@dataclass(frozen=True)
class Anchored:
    """The anchors of each cluster that has enough rows, and what they say of it."""

    anchors: Mapping[str, tuple[Run, ...]]
    calibrations: Mapping[str, Calibration]

    @property
    def ids(self) -> frozenset[str]:
        """Rows that calibrate, and are not priced."""
        return frozenset(run.id for runs in self.anchors.values() for run in runs)

    def calibrated(self, pricer: RunPricer) -> RunPricer:
        """``pricer`` with what the anchors say."""
        return replace(pricer, calibrations={**pricer.calibrations, **self.calibrations})


@dataclass(frozen=True)
class Comparison:
    """What was anchored, and the rows that are left as they are priced without it."""

    anchored: Anchored
    cold: tuple[Row, ...]

    def document(self, runs: Mapping[str, Run], rows: Sequence[Row]) -> dict[str, object]:
        """Which rows calibrated what, and errors before and after, for JSON."""
        return {
            "runs": {name: [run.id for run in chosen] for name, chosen in self.anchored.anchors.items()},
            "factors": {name: found.values for name, found in self.anchored.calibrations.items()},
            "errors": [asdict(error) for error in self.errors(runs, rows)],
        }

    def errors(self, runs: Mapping[str, Run], rows: Sequence[Row]) -> list[Errors]:
        """Mean absolute errors of the rest of each anchored cluster, all of them, and what has no anchors."""
        before = {row.id: row for row in self.cold}
        of_cluster: dict[str, list[Row]] = defaultdict(list)
        for row in rows:
            if row.id in runs:
                of_cluster[runs[row.id].software.cluster].append(row)
        names = list(self.anchored.anchors)
        rest = [row for name, own in of_cluster.items() if name not in self.anchored.anchors for row in own]
        every = [row for name in names for row in of_cluster[name]]
        kinds = [*((name, of_cluster[name]) for name in names), (ALL_ANCHORED, every), (NOT_ANCHORED, rest)]
        return [Errors.of(name, [before[row.id] for row in own], own) for name, own in kinds]


@dataclass(frozen=True)
class Errors:
    """Mean absolute errors of the same rows, cold and anchored; None where nothing was measured."""

    rows: str
    num_rows: int
    cold: float | None
    anchored: float | None
    median_cold: float | None
    median_anchored: float | None
    bias_cold: float | None
    bias_anchored: float | None
    memory_cold: float | None
    memory_anchored: float | None

    @staticmethod
    def of(name: str, cold: Sequence[Row], rows: Sequence[Row]) -> Errors:
        """The errors of ``rows``, and of the same rows ``cold``."""
        times = [[row.error for row in each if row.error is not None] for each in (cold, rows)]
        sizes = [[row.memory_error for row in each if row.memory_error is not None] for each in (cold, rows)]
        absolute = [[abs(error) for error in errors] for errors in times]
        figures: list[float | None] = [fmean(errors) if errors else None for errors in absolute]
        figures += [median(errors) if errors else None for errors in absolute]
        figures += [fmean(errors) if errors else None for errors in times]
        figures += [fmean(map(abs, errors)) if errors else None for errors in sizes]
        return Errors(name, len(rows), *figures)


def print_comparison(comparison: Comparison, runs: Mapping[str, Run], rows: Sequence[Row]) -> None:
    """One line a cluster: errors of the same rows, cold and anchored."""
    print(f"\n{'anchored':<42} {'rows':>5} {'time: cold':>10} {'anchored':>9} {'median':>17} {'memory':>17}")
    for each in comparison.errors(runs, rows):
        pairs = [(each.cold, each.anchored), (each.median_cold, each.median_anchored)]
        pairs.append((each.memory_cold, each.memory_anchored))
        cells = [f"{'-' if value is None else f'{value:.1%}':>8}" for pair in pairs for value in pair]
        print(f"{each.rows:<42} {each.num_rows:5d}   {' '.join(cells)}")


def anchored(runs: Iterable[Run], number: int, pricer: RunPricer, prior: Prior = PRIOR) -> Anchored:
    """``number`` anchors of each cluster with at least ``REST`` rows more, and its calibration by them."""
    of_cluster: dict[str, list[Run]] = defaultdict(list)
    for run in runs:
        if run.software.cluster and run.step_time_s is not None and _has_price(run, pricer):
            of_cluster[run.software.cluster].append(run)
    anchors = {
        name: tuple(spread_over(rows, number)) for name, rows in of_cluster.items() if len(rows) >= number + REST
    }
    today = datetime.datetime.now(tz=datetime.UTC).date()
    calibrations = {
        name: calibration_of([measured(run, pricer) for run in chosen], today, prior)
        for name, chosen in anchors.items()
    }
    return Anchored(anchors, calibrations)


def measured(run: Run, pricer: RunPricer) -> MeasuredRun:
    """A row as what a calibration takes."""
    return MeasuredRun(
        name=run.id,
        framework=run.software.framework or "unknown",
        price=partial(_price, run, pricer),
        step_time_s=run.step_time_s,
        peak_memory_bytes=run.peak_memory_bytes,
        memory_kind=_MEMORY_KINDS.get(run.peak_memory_kind, "allocated"),
    )


def _price(run: Run, pricer: RunPricer, factors: Factors) -> tuple[float, float]:
    priced = pricer.price(run, factors).priced
    memory = memory_as_measured(priced, run.peak_memory_kind, run.memory_of)
    return priced.step_time_s, memory


def _has_price(run: Run, pricer: RunPricer) -> bool:
    try:
        pricer.price(run, {})
    except (UnpriceableRunError, ValueError, PlannerError):
        return False
    return True


def spread_over(rows: Sequence[Run], number: int) -> list[Run]:
    """So many of ``rows``, spread over what differs between them; of equals the first."""
    places = {run.id: features(run) for run in rows}
    ends = [(min(column), max(column)) for column in zip(*places.values(), strict=True)]

    def distance(one: Run, other: Run) -> float:
        pairs = zip(places[one.id], places[other.id], ends, strict=True)
        return sqrt(sum(((a - b) / (high - low)) ** 2 for a, b, (low, high) in pairs if high > low))

    between = [[distance(one, other) for other in rows] for one in rows]
    nearest, chosen = [inf] * len(rows), list[int]()
    while len(chosen) < number:
        left = (place for place in range(len(rows)) if place not in chosen)
        chosen.append(min(left, key=lambda place: sum(map(min, between[place], nearest))))
        nearest = list(map(min, between[chosen[-1]], nearest))
    return [rows[place] for place in chosen]


def features(run: Run) -> tuple[float, ...]:
    """Where a run lies among others of its cluster: its model, its size and its layout."""
    layout, shape = run.layout, run.architecture
    microbatches = max(1, layout.global_batch_size // (layout.dp * layout.micro_batch_size))
    counts = (
        shape.layers, shape.hidden, shape.seq_len, shape.vocab, run.hardware.num_devices, layout.dp, layout.tp,
        layout.pp, layout.virtual_stages, layout.cp, layout.ep, layout.micro_batch_size, microbatches,
    )  # fmt: skip
    choices = (float(layout.zero_stage), _RECOMPUTE[layout.recompute], float(layout.sequence_parallel))
    return (*map(log2, counts), *choices)
