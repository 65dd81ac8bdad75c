"""A profile's calibration as tables: its runs, and what they changed."""

from __future__ import annotations

from collections.abc import Iterator
from math import exp

from rich.markup import escape
from rich.table import Table

from hardware_profiles.schema import Calibration
from planner.render import seconds, size


def calibration_tables(found: Calibration) -> Iterator[Table]:
    """The step times and the peaks of memory of the runs, where any were measured, and the factors."""
    if found.num_timed:
        table = _table("Step time of the runs", "run", "measured", "predicted", "calibrated")
        for run in found.runs:
            times = (run.step_time_s, run.predicted_step_time_s, run.calibrated_step_time_s)
            if run.step_time_s is not None:
                table.add_row(escape(run.name), *("" if value is None else seconds(value) for value in times))
        yield table
    if found.num_weighed:
        table = _table("Peak memory of the runs", "run", "measured", "predicted", "calibrated", "of what")
        for run in found.runs:
            peaks = (run.peak_memory_bytes, run.predicted_peak_memory_bytes, run.calibrated_peak_memory_bytes)
            if run.peak_memory_bytes is not None:
                cells = ("" if value is None else size(value) for value in peaks)
                table.add_row(escape(run.name), *cells, run.memory_kind)
        yield table
    yield _factors_table(found)


def _factors_table(found: Calibration) -> Table:
    title = "So many times what the profile or the recipe says, with 80 %"
    table = _table(title, "factor", "most probable", "before", "after")
    for name, factor in found.factors.items():
        before, after = _interval(1.0, factor.prior_spread), _interval(factor.value, factor.spread)
        table.add_row(name, f"{factor.value:.3f}", before, after)
    if found.constant_bytes > 0:
        table.add_row("memory besides", size(found.constant_bytes), "", "")
    return table


def _table(title: str, first: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left")
    table.add_column(first)
    for name in columns:
        table.add_column(name, justify="right")
    return table


def _interval(middle: float, spread: float) -> str:
    """The 10th to the 90th percentile of a log-normal distribution."""
    reach = exp(1.2816 * spread)
    return f"{middle / reach:.2f} to {middle * reach:.2f}"
