"""The best plans of several frameworks as one table that a terminal of 80 columns shows whole."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from planner.api.compare import Comparison, Row
from planner.render import degrees, items, seconds, sequences, size, sizes_text

# Reasons are cut to so many letters in the table; `--json` has them whole.
LONGEST_REASON = 400


def show_comparison(found: Comparison) -> RenderableType:
    """Numbers of every framework with a plan, the plans, and the reasons of those without."""
    rows = [row for row in found.rows if row.plan is not None]
    if found.mine is not None and found.mine.plan is not None:
        rows.append(found.mine)
    parts: list[RenderableType] = [_numbers(found, rows), _plans(rows)] if rows else []
    lines = [f"{', '.join(names)}: no plan. {reason}" for reason, names in _without(found).items()]
    if found.mine is not None and found.mine.reason:
        lines.append(f"your own set-up: {_cut(found.mine.reason)}{_way_out(found.mine)}")
    for reason, names in _lacking(found).items():
        lines.append(f"The fastest plan is beyond {', '.join(names)}: {reason}.")
    for reason, names in _borrowed(found).items():
        lines.append(f"Recipe not of {', '.join(names)} itself: {reason}.")
    lines.append("Band: of held-out published runs of that framework's recipe; none where too few are known.")
    return Group(*parts, Text("\n".join(lines)))


def _without(found: Comparison) -> dict[str, list[str]]:
    """Frameworks that have no plan, by the reason."""
    names: dict[str, list[str]] = {}
    for row in found.rows:
        if row.plan is None:
            names.setdefault(_cut(row.reason) + _way_out(row), []).append(row.framework)
    return names


def _lacking(found: Comparison) -> dict[str, list[str]]:
    """Frameworks by what they lack."""
    names: dict[str, list[str]] = {}
    for row in found.rows:
        if row.lacks:
            names.setdefault("; ".join(row.lacks), []).append(row.framework)
    return names


def _borrowed(found: Comparison) -> dict[str, list[str]]:
    """Frameworks by why they are priced by another's recipe."""
    names: dict[str, list[str]] = {}
    for row in found.rows:
        if row.borrowed:
            names.setdefault(row.borrowed, []).append(row.framework)
    return names


def _numbers(found: Comparison, rows: list[Row]) -> Table:
    training, cluster = found.question.training, found.question.target.cluster
    title = (
        f"{found.question.request.model} on {cluster.num_devices} GPUs of {cluster.profile.name}: "
        f"{sequences(training.global_batch_size, training.seq_len)} a step, {training.precision}"
    )
    table = Table(title=escape(title), title_justify="left")
    has_price = any(_usd(row) is not None for row in rows)
    table.add_column("", no_wrap=True)
    unit = items(training.seq_len)
    for name in ("step", "band", f"{unit}/s/GPU", "memory", *(["$ a step"] if has_price else [])):
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        style = "bold" if row is found.mine else None
        table.add_row(row.framework, *_cells(row, has_price=has_price), style=style)
    return table


def _cells(row: Row, *, has_price: bool) -> list[str]:
    assert row.plan is not None
    assert row.plan.prediction is not None
    p, training = row.plan.prediction, row.plan.training
    rate = p.tokens_per_s_per_gpu
    if training.seq_len == 1:
        rate = training.global_batch_size / p.step_time_s / row.plan.num_devices
    usd = _usd(row)
    cost = [("" if usd is None else f"{usd:.3g}")] if has_price else []
    return [seconds(p.step_time_s), _band(row), f"{rate:,.0f}", size(max(p.peak_memory_bytes)), *cost]


def _band(row: Row) -> str:
    """``19 to 24.1 s``."""
    p = None if row.plan is None else row.plan.prediction
    if p is None or p.step_time_low_s is None or p.step_time_high_s is None:
        return ""
    low, high = seconds(p.step_time_low_s), seconds(p.step_time_high_s)
    unit = high.rpartition(" ")[2]
    return f"{low.removesuffix(f' {unit}')} to {high}"


def _plans(rows: list[Row]) -> Table:
    """What each would run; frameworks whose plans are the same share a row."""
    names: dict[str, list[str]] = {}
    for row in rows:
        names.setdefault(_layout(row), []).append(row.framework)
    table = Table(title="Plans", title_justify="left")
    table.add_column("", ratio=2, overflow="fold")
    table.add_column("plan", ratio=5, overflow="fold")
    for layout, frameworks in names.items():
        table.add_row(", ".join(frameworks), escape(layout))
    return table


def _layout(row: Row) -> str:
    assert row.plan is not None
    plan, pipeline = row.plan, row.plan.pipeline
    text = f"{degrees(plan.mesh)}, ZeRO {plan.zero_stage}, micro-batch {sizes_text(pipeline)}"
    if plan.mesh.pp > 1:
        text += f", {pipeline.schedule}" + (f" x{pipeline.virtual_stages}" if pipeline.virtual_stages > 1 else "")
    modes = sorted({rule.mode for rule in plan.recompute})
    text += f", recompute {' and '.join(modes)}" if modes else ""
    return text if plan.offload == "none" else f"{text}, offload {plan.offload}"


def _usd(row: Row) -> float | None:
    return None if row.plan is None or row.plan.prediction is None else row.plan.prediction.usd_per_step


def _cut(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= LONGEST_REASON else line[:LONGEST_REASON] + "..."


def _way_out(row: Row) -> str:
    end = "" if _cut(row.reason).endswith((".", "!", "?")) else "."
    return f"{end} Way out: {_cut(row.way_out)}" if row.way_out else ""
