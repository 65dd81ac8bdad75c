"""Predictions held against measurements: errors row by row, by source, the order inside groups, and feasibility."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import combinations
from math import ceil, sqrt
from statistics import fmean, median

from benchmarks.published.frameworks import FALLBACK_FRAMEWORK, UNKNOWN
from benchmarks.published.pricing import Prediction, RunPricer
from planner.errors import PlannerError
from planner.evaluation.evaluator import Evaluated
from planner.evaluation.measured_memory import memory_as_measured
from planner.formats.run_table import Rejected, Run, UnpriceableRunError

MIN_GROUP_ROWS = 4


@dataclass(frozen=True)
class Row:
    """One run, measured and predicted; errors are predicted over measured, less one."""

    id: str
    source: str
    group: str
    measured_step_time_s: float | None
    predicted_step_time_s: float | None = None
    error: float | None = None
    measured_peak_memory_bytes: float | None = None
    predicted_peak_memory_bytes: float | None = None
    memory_error: float | None = None
    memory_kind: str = ""
    fits: bool | None = None
    device_share: float | None = None  # of its device's memory, the predicted peak of the rank that fills most of it
    recipe: str = ""
    framework: str = ""
    assumptions: tuple[str, ...] = ()
    skipped: str | None = None


@dataclass(frozen=True)
class Summary:
    """Accuracy over all priced rows; None where nothing was measured."""

    num_rows: int
    num_skipped: int
    mape: float | None
    median_ape: float | None
    p90_ape: float | None
    bias: float | None
    mape_by_source: dict[str, float]
    memory_mape: float | None
    kendall_tau_within_groups: float | None
    mean_regret: float | None
    max_regret: float | None
    oom_precision: float | None
    oom_recall: float | None
    memory_mape_by_kind: dict[str, float]
    num_groups: int
    num_ran_called_infeasible: int
    num_ran_priced: int
    num_oom_called_infeasible: int
    num_oom_priced: int
    num_unknown_framework: int


def row_of(run: Run, prediction: Prediction) -> Row:
    """The row of a priced run. Memory is compared as it was measured: allocated, reserved, or seen by the driver."""
    predicted = prediction.priced.step_time_s
    measured = run.step_time_s
    memory = memory_as_measured(prediction.priced, run.peak_memory_kind, run.memory_of)
    seen = run.peak_memory_bytes
    return Row(
        id=run.id,
        source=run.source,
        group=run.group,
        measured_step_time_s=measured,
        predicted_step_time_s=predicted,
        error=None if measured is None else predicted / measured - 1,
        measured_peak_memory_bytes=seen,
        predicted_peak_memory_bytes=memory,
        memory_error=None if seen is None else memory / seen - 1,
        memory_kind=run.peak_memory_kind,
        fits=prediction.priced.fits,
        device_share=_device_share(prediction.priced),
        recipe=prediction.recipe_name,
        framework=prediction.framework,
        assumptions=run.assumptions + _assumed_framework(run, prediction),
    )


def _device_share(priced: Evaluated) -> float:
    return max(rank.peak.total_bytes / room for rank, room in zip(priced.memory, priced.capacity_bytes, strict=True))


def _assumed_framework(run: Run, prediction: Prediction) -> tuple[str, ...]:
    if prediction.framework != UNKNOWN:
        return ()
    named = run.software.framework or "not said"
    return (f"framework: {named}, priced as {FALLBACK_FRAMEWORK} by the recipe {prediction.recipe_name}",)


def skipped_row(run: Run | Rejected, reason: str) -> Row:
    """The row of a run without a price."""
    return Row(run.id, run.source, getattr(run, "group", ""), run.step_time_s, skipped=reason)


def price_rows(runs: Iterable[Run | Rejected], pricer: RunPricer) -> list[Row]:
    """Every run priced, or skipped with the reason."""
    rows: list[Row] = []
    for run in runs:
        if isinstance(run, Rejected):
            rows.append(skipped_row(run, run.reason))
            continue
        try:
            rows.append(row_of(run, pricer.price(run)))
        except UnpriceableRunError as error:
            rows.append(skipped_row(run, str(error)))
        except (ValueError, PlannerError) as error:  # the models' own rules: a dim that a degree does not divide
            rows.append(skipped_row(run, f"{type(error).__name__}: {error}"))
    return rows


def summarise(rows: Sequence[Row], out_of_memory: Sequence[Row]) -> Summary:
    """All figures of INTERFACE.md section 6."""
    errors = [row.error for row in rows if row.error is not None]
    absolute = sorted(map(abs, errors))
    memory: dict[str, list[float]] = defaultdict(list)
    for row in rows:
        if row.memory_error is not None:
            memory[row.memory_kind].append(abs(row.memory_error))
    orders = [order_in_group(pairs) for pairs in groups_of(rows)]
    taus, regrets = [tau for tau, _ in orders], [regret for _, regret in orders]
    ran = [row for row in rows if row.fits is not None]
    failed = [row for row in out_of_memory if row.fits is not None]
    wrongly, rightly = sum(not r.fits for r in ran), sum(not r.fits for r in failed)
    return Summary(
        num_rows=len(rows),
        num_skipped=sum(row.skipped is not None for row in rows),
        mape=_mean(absolute),
        median_ape=median(absolute) if absolute else None,
        p90_ape=absolute[ceil(0.9 * len(absolute)) - 1] if absolute else None,
        bias=_mean(errors),
        mape_by_source=_by_source(rows),
        memory_mape=_mean([error for errors in memory.values() for error in errors]),
        kendall_tau_within_groups=_mean(taus),
        mean_regret=_mean(regrets),
        max_regret=max(regrets, default=None),
        oom_precision=rightly / (rightly + wrongly) if failed and rightly + wrongly else None,
        oom_recall=rightly / len(failed) if failed else None,
        memory_mape_by_kind={kind: fmean(errors) for kind, errors in sorted(memory.items())},
        num_groups=len(taus),
        num_ran_called_infeasible=wrongly,
        num_ran_priced=len(ran),
        num_oom_called_infeasible=rightly,
        num_oom_priced=len(failed),
        num_unknown_framework=sum(row.framework == UNKNOWN for row in rows),
    )


def groups_of(rows: Iterable[Row]) -> list[list[tuple[float, float]]]:
    """(measured, predicted) of every group with enough priced rows."""
    groups: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for row in rows:
        if row.group and row.measured_step_time_s is not None and row.predicted_step_time_s is not None:
            groups[row.group].append((row.measured_step_time_s, row.predicted_step_time_s))
    return [pairs for pairs in groups.values() if len(pairs) >= MIN_GROUP_ROWS]


def order_in_group(pairs: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Kendall's tau-b of one group, and the regret of the row predicted fastest."""
    best = min(measured for measured, _ in pairs)
    picked = min(pairs, key=lambda pair: pair[1])[0]
    return kendall_tau(pairs), picked / best - 1


def kendall_tau(pairs: Sequence[tuple[float, float]]) -> float:
    """Kendall's tau-b (1945); 0 where all values of one side are equal."""
    agreeing, untied_measured, untied_predicted = 0, 0, 0
    for (m1, p1), (m2, p2) in combinations(pairs, 2):
        agreeing += ((m1 > m2) - (m1 < m2)) * ((p1 > p2) - (p1 < p2))
        untied_measured += m1 != m2
        untied_predicted += p1 != p2
    scale = sqrt(untied_measured * untied_predicted)
    return agreeing / scale if scale else 0.0


def in_figures(errors: Sequence[float]) -> str:
    """How many errors there are, their mean and median size, and their mean, as cells of a table."""
    sizes = [abs(error) for error in errors]
    return f"{len(errors)} | {fmean(sizes):.1%} | {median(sizes):.1%} | {fmean(errors):+.1%}"


def document(rows: Sequence[Row], out_of_memory: Sequence[Row], summary: Summary) -> Mapping[str, object]:
    """The JSON that ``--json`` writes."""
    return {
        "rows": [asdict(row) for row in rows],
        "out_of_memory_rows": [asdict(row) for row in out_of_memory],
        "summary": asdict(summary),
    }


def _by_source(rows: Iterable[Row]) -> dict[str, float]:
    found: dict[str, list[float]] = defaultdict(list)
    for row in rows:
        if row.error is not None:
            found[row.source].append(abs(row.error))
    return {source: fmean(errors) for source, errors in sorted(found.items())}


def _mean(values: Sequence[float]) -> float | None:
    return fmean(values) if values else None
