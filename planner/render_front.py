"""Plans over several numbers of GPUs as one table."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table

from planner.plan.schema import Plan
from planner.render import count, degrees, items, seconds, size


def show_front(plans: Sequence[Plan], chosen: Plan, *, by_cost: bool) -> Table:
    """A row for each plan, by GPUs ascending; the chosen one is marked. Of a whole run, its days and dollars."""
    has_price = all(plan.prediction is not None and plan.prediction.usd_per_step is not None for plan in plans)
    table = Table(title="Pareto front of step time, GPUs, memory and dollars", title_justify="left")
    table.add_column("GPUs", no_wrap=True)
    whole = [] if chosen.run is None else ["days", *(["$ in all"] if has_price else [])]
    prices = ["$ a step"] if has_price else []
    for name in ("step", f"{items(chosen.training.seq_len)}/s/GPU", "memory", *prices, *whole):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("layout")
    for plan in plans:
        p = plan.prediction
        assert p is not None
        cost = [] if p.usd_per_step is None or not has_price else [f"{p.usd_per_step:.3g}"]
        mark = "" if plan is not chosen else ", cheapest" if by_cost else ", fastest"
        table.add_row(
            f"{plan.num_devices}{mark}",
            seconds(p.step_time_s),
            f"{p.tokens_per_s_per_gpu:,.0f}",
            size(max(p.peak_memory_bytes)),
            *cost,
            *_whole_run(plan)[: len(whole)],
            f"{degrees(plan.mesh)}, ZeRO {plan.zero_stage}",
            style="bold" if mark else None,
        )
    if chosen.run is not None:
        table.caption = f"{count(chosen.run.num_tokens)} {items(chosen.training.seq_len)}, without interruptions"
        table.caption_justify = "left"
    return table


def _whole_run(plan: Plan) -> tuple[str, ...]:
    """Days and dollars; () where no run was asked about."""
    if plan.run is None:
        return ()
    days = f"{plan.run.days:,.1f}" if plan.run.days >= 1 else f"{plan.run.days:.3g}"
    return days, "" if plan.run.usd is None else count(plan.run.usd)
