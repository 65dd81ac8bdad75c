"""Controlled pairs: runs of one source that differ in exactly one choice, measured and predicted ratio side by side."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from statistics import median
from typing import NamedTuple

from benchmarks.published.frameworks import attention_name_of, recipe_called, recipe_name_of
from benchmarks.published.summary import Row
from costmodels.vocabulary.choices import Recompute
from planner.formats.run_table import Layout, Run

POINTS = 0.03  # how far apart the two ratios may lie
RECOMPUTE_ORDER = (Recompute.NONE, Recompute.SELECTIVE, Recompute.FULL)


@dataclass(frozen=True)
class Pair:
    """Two runs; a ratio is the second's step time over the first's."""

    kind: str
    first: str
    second: str
    measured_ratio: float
    predicted_ratio: float

    @property
    def is_ordered(self) -> bool:
        """Whether the faster of the two is predicted faster."""
        return (self.measured_ratio - 1) * (self.predicted_ratio - 1) > 0

    @property
    def is_clear(self) -> bool:
        """Whether the measured times differ by more than ``POINTS``: nearer ones are ordered by chance."""
        return abs(self.measured_ratio - 1) > POINTS

    @property
    def is_close(self) -> bool:
        """Whether the ratios agree within ``POINTS``."""
        return abs(self.measured_ratio - self.predicted_ratio) <= POINTS


@dataclass(frozen=True)
class _Kind:
    """One choice: what of a layout it changes, and the value that orders both runs of a pair."""

    name: str
    blank: Callable[[Layout], Layout]
    value: Callable[[Layout], float]
    is_pair: Callable[[float, float], bool] = lambda low, high: low < high


KINDS = (
    _Kind(
        "recomputation",
        lambda layout: replace(layout, recompute=Recompute.NONE),
        lambda layout: RECOMPUTE_ORDER.index(layout.recompute),
    ),
    _Kind(
        "sequence parallelism",
        lambda layout: replace(layout, sequence_parallel=False),
        lambda layout: float(layout.sequence_parallel),
    ),
    _Kind(
        "interleaving",
        lambda layout: replace(layout, virtual_stages=1, schedule=""),
        lambda layout: layout.virtual_stages,
    ),
    _Kind("ZeRO stage", lambda layout: replace(layout, zero_stage=0), lambda layout: layout.zero_stage),
    _Kind(
        "micro-batch doubled",
        lambda layout: replace(layout, micro_batch_size=1),
        lambda layout: layout.micro_batch_size,
        lambda low, high: high == 2 * low,
    ),
)


def pairs_of(runs: Iterable[Run], rows: Mapping[str, Row]) -> list[Pair]:
    """Every pair among the priced runs; runs of the very same layout stand as one, by the median of their times."""
    priced = [run for run in runs if run.id in rows and rows[run.id].error is not None]
    found: list[Pair] = []
    for kind in KINDS:
        groups: dict[tuple[object, ...], dict[float, list[Run]]] = defaultdict(lambda: defaultdict(list))
        for run in priced:
            groups[_identity(run, kind.blank(run.layout))][kind.value(run.layout)].append(run)
        for by_value in groups.values():
            for low, high in combinations(sorted(by_value), 2):
                if kind.is_pair(low, high):
                    found.append(_pair(kind.name, by_value[low], by_value[high], rows))
    return found


def _identity(run: Run, layout: Layout) -> tuple[object, ...]:
    """Everything that two runs of a pair have in common."""
    recipe = recipe_name_of(run)
    kernel = attention_name_of(run, recipe_called(recipe))
    return run.source, run.architecture, run.hardware, run.precision, recipe, kernel, layout


def _pair(kind: str, firsts: Sequence[Run], seconds: Sequence[Run], rows: Mapping[str, Row]) -> Pair:
    def times(runs: Sequence[Run]) -> tuple[float, float]:
        measured = [rows[run.id].measured_step_time_s or 0.0 for run in runs]
        predicted = [rows[run.id].predicted_step_time_s or 0.0 for run in runs]
        return median(measured), median(predicted)

    (measured_first, predicted_first), (measured_second, predicted_second) = times(firsts), times(seconds)
    return Pair(
        kind,
        firsts[0].id,
        seconds[0].id,
        measured_second / measured_first,
        predicted_second / predicted_first,
    )


class Counts(NamedTuple):
    """How many pairs of one kind there are, in the right order, and within ``POINTS``; and of those that are clear."""

    number: int
    ordered: int
    close: int
    clear: int
    clear_ordered: int


def counts_of(pairs: Iterable[Pair]) -> dict[str, Counts]:
    """Of each kind."""
    by_kind: dict[str, list[Pair]] = defaultdict(list)
    for pair in pairs:
        by_kind[pair.kind].append(pair)
    return {
        kind: Counts(
            number=len(found),
            ordered=sum(p.is_ordered for p in found),
            close=sum(p.is_close for p in found),
            clear=sum(p.is_clear for p in found),
            clear_ordered=sum(p.is_clear and p.is_ordered for p in found),
        )
        for kind, found in by_kind.items()
    }
