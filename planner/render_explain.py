"""Why a plan is as it is, as tables that a terminal of 80 columns shows whole."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from planner.api.alternatives import Alternative, Verdict
from planner.api.explain import Explanation, Prices, fastest_s
from planner.api.operators import ComputeShares, Reached
from planner.api.what_if import Resource, WhatIf
from planner.glossary import OF_MEMORY, SHORT
from planner.render import (
    GIB,
    MIB,
    adding_up,
    degrees,
    dollars,
    items,
    layout_line,
    loss,
    rank_name,
    run_text,
    seconds,
    size,
)

# Operators that are shown one by one; the rest are one row.
MOST_OPERATORS = 10
BAR_WIDTH = 14
LEAST_DIFFERENCE_S = 1e-9
WORTH_SAYING = 0.005  # of a step: a search calls plans within a thousandth or so equal
LIMITS = {"arithmetic": "FLOP/s", "memory": "memory", "launch": "launches"}


def show_explanation(found: Explanation, block: str = "█") -> RenderableType:
    """Everything that is said of the plan; bars are made of ``block``."""
    parts: list[RenderableType] = [_headline(found), _time(found, block), _memory(found)]
    parts += [_operators(found.compute), _units(found.compute)]
    parts.append(_runners_up(found))
    if found.why_not is not None:
        parts += _why_not(found, found.why_not)
    parts += [_what_if(found), Text("\n".join(price_lines(found.prices, found.plan.training.seq_len)))]
    return Group(*parts)


def _headline(found: Explanation) -> Text:
    plan = found.plan
    prediction = plan.prediction
    assert prediction is not None
    text = Text()
    text.append(plan.model.source, style="bold")
    text.append(f" on {plan.num_devices} GPUs of {plan.hardware}: {degrees(plan.mesh)}, ZeRO {plan.zero_stage}\n")
    text.append(f"{seconds(prediction.step_time_s)} a step", style="bold green")
    text.append(f", MFU {prediction.mfu:.1%}\n")
    for line in binding_lines(found):
        text.append(line + "\n")
    return text


def binding_lines(found: Explanation) -> list[str]:
    """What holds the plan back, and how full its memory is."""
    binding, memory = found.binding, found.memory
    lines: list[str] = []
    asked_memory = any(each.resource is Resource.MEMORY and each.searched_s is not None for each in found.what_if)
    unasked = "" if asked_memory else " Memory was not judged: that takes a search."
    if binding.resource is not None and binding.saves < WORTH_SAYING:
        lines.append(
            "What binds: nothing that the devices and the network have. Twice as much of any of it would save less "
            f"than {WORTH_SAYING:.1%} of a step; what the compute waits for stands below.{unasked}"
        )
    elif binding.resource is not None:
        label = binding.resource.label
        how = "searched again" if binding.resource is Resource.MEMORY else "the same plan"
        lines.append(
            f"What binds: {binding.resource.value}. {label[0].upper()}{label[1:]} would save "
            f"{binding.saves:.1%} of a step ({how}); of nothing else would twice as much save more.{unasked}"
        )
    prediction = found.plan.prediction
    if prediction is not None:
        less = 1 - fastest_s(found.runners_up, prediction.step_time_s) / prediction.step_time_s
        if less >= WORTH_SAYING:
            lines.append(f"A search finds a plan for the same GPUs that takes {less:.1%} less: see the runners-up.")
    room = f"of the {size(memory.room_bytes)} that a plan may take of its {size(memory.device_bytes)}"
    full = " Memory is nearly full." if memory.is_nearly_full else ""
    if memory.peak_bytes > memory.room_bytes:
        full = " The plan does not fit."
    lines.append(f"The fullest GPU, of {_rank(found)}, takes {size(memory.peak_bytes)} {room}.{full}")
    return lines


def _time(found: Explanation, block: str) -> Table:
    """Each bar begins where the one before it ended."""
    table = _table("Where the time of a step goes", "part", "time>", "share>", "")
    total = sum(found.time_s.values())
    rows = [(term, value) for term, value in found.time_s.items() if value > 0]
    shown, unit = adding_up([value for _, value in rows])
    table.columns[1].header = unit
    before = 0.0
    for (term, value), text in zip(rows, shown, strict=False):
        start, end = (round(BAR_WIDTH * part / total) for part in (before, before + value))
        table.add_row(term.label, text, f"{value / total:.1%}", " " * start + block * max(0, end - start))
        before += value
    table.add_section()
    table.add_row("step", shown[-1], "100.0%", block * BAR_WIDTH)
    return table


def _rank(found: Explanation) -> str:
    """The fullest one."""
    return rank_name(found.plan, found.memory.rank, "pipeline rank")


def _memory(found: Explanation) -> Table:
    memory = found.memory
    table = _table(f"Memory of the fullest GPU, {_rank(found)}, at its peak", "part", "", "share>", "what")
    scale, unit = (GIB, "GiB") if memory.peak_bytes >= GIB else (MIB, "MiB")
    table.columns[1].header, table.columns[1].justify = unit, "right"
    ends, before = [0.0], 0
    for num_bytes in memory.terms_bytes.values():
        before += num_bytes
        ends.append(round(before / scale, 2))
    for (term, num_bytes), start, end in zip(memory.terms_bytes.items(), ends[:-1], ends[1:], strict=True):
        share = f"{num_bytes / memory.peak_bytes:.1%}"
        table.add_row(term.replace("_", " "), f"{end - start:.2f}", share, OF_MEMORY[term])
    table.add_section()
    table.add_row("peak", f"{ends[-1]:.2f}", "100.0%")
    return table


def _operators(compute: ComputeShares) -> Table:
    title = "Operators that take most of the compute (one GPU of every pipeline rank)"
    table = _table(title, "operator", "share>", "waits for", "rate>", "of roofline>")
    for row in compute.operators[:MOST_OPERATORS]:
        name = f"{row.operator} in {row.module}" if row.module else row.operator
        table.add_row(escape(name), *_reached_cells(row.reached))
    rest = compute.operators[MOST_OPERATORS:]
    if rest:
        table.add_row(f"{len(rest)} others", f"{sum(row.reached.share for row in rest):.1%}", "", "", "")
    if compute.other_s / compute.seconds >= 5e-4:
        table.add_row("waiting for the host, adding gradients", f"{compute.other_s / compute.seconds:.1%}", "", "", "")
    return table


def _units(compute: ComputeShares) -> RenderableType:
    table = _table("Units of the model", "unit", "number>", "share>", "waits for", "of roofline>", "host>")
    for row in compute.units:
        share, limit, _, roofline = _reached_cells(row.reached)
        host = f"{row.other_s / row.reached.seconds:.1%}" if row.other_s > 0 else "0.0%"
        table.add_row(escape(row.name), str(row.count), share, limit, roofline, host)
    parts = [f"{value / compute.seconds:.0%} for {LIMITS[limit]}" for limit, value in compute.limits.items()]
    peak = f"{compute.peak_flops_per_s / 1e12:,.0f} TFLOP/s and {compute.peak_bytes_per_s / 1e12:.3g} TB/s"
    peak += ", on average of unlike ones" if compute.peaks_are_means else ""
    return Group(
        table,
        Text(
            f"Of all compute {', '.join(parts)}, {max(0.0, compute.other_s) / compute.seconds:.0%} for the host and "
            f"for gradients that are added up. Roofline: the least time for the same FLOPs and bytes at the peaks of "
            f"the GPU, {peak}. Rates count attention without its mask; where it is causal, its least time is that "
            f"of a kernel that skips half.\n"
        ),
    )


def _reached_cells(reached: Reached) -> tuple[str, str, str, str]:
    is_arithmetic = reached.limit == "arithmetic"
    rate = f"{reached.flops_per_s / 1e12:.3g} TFLOP/s" if is_arithmetic else f"{reached.bytes_per_s / 1e12:.2f} TB/s"
    return f"{reached.share:.1%}", LIMITS[reached.limit], rate, f"{reached.roofline:.0%}"


def _runners_up(found: Explanation) -> RenderableType:
    if not found.runners_up:
        return Text("No other plan was found.\n")
    table = _table("Runners-up", "", "layout", "step>", "loses>", "where")
    for row in found.runners_up:
        candidate = row.candidate
        if candidate is not None:
            cells = layout_line(candidate), seconds(candidate.step_time_s), loses(found, row), where_text(row)
            table.add_row(escape(row.label), *map(escape, cells))
    return table


def loses(found: Explanation, row: Alternative) -> str:
    """``+1.4%``, or that it does not fit."""
    prediction = found.plan.prediction
    if row.verdict is Verdict.DOES_NOT_FIT:
        return "no fit"
    if row.candidate is None or prediction is None:
        return ""
    return loss(row.candidate.step_time_s, prediction.step_time_s)


def where_text(row: Alternative) -> str:
    """The terms in which an alternative loses most, and in which it gains most."""
    if row.differences_s is None:
        return ""
    step_s = 0.0 if row.candidate is None else row.candidate.step_time_s
    ranked = sorted(row.differences_s.items(), key=lambda pair: -abs(pair[1]))
    told = [(term, value) for term, value in ranked if abs(value) > 1e-3 * step_s][:2]
    return ", ".join(f"{SHORT[term]} {signed(value)}" for term, value in told) or "nothing"


def signed(value: float) -> str:
    """A difference of times; what sums in floating point leave is none."""
    value = 0.0 if abs(value) < LEAST_DIFFERENCE_S else value
    return ("+" if value >= 0 else "-") + seconds(abs(value))


def _why_not(found: Explanation, row: Alternative) -> list[RenderableType]:
    parts: list[RenderableType] = [Text(why_not_text(found, row))]
    if row.differences_s is not None and row.candidate is not None:
        table = _table(f"Term by term, with {escape(row.label)}", "part", "this plan>", "instead>", "difference>")
        for term, difference in row.differences_s.items():
            own = found.time_s[term]
            if own > 0 or difference != 0:
                table.add_row(term.label, seconds(own), seconds(own + difference), signed(difference))
        table.add_section()
        step_s = sum(found.time_s.values())
        other_s = row.candidate.step_time_s
        table.add_row("step", seconds(step_s), seconds(other_s), signed(other_s - step_s))
        parts.append(table)
    return parts


def why_not_text(found: Explanation, row: Alternative) -> str:
    """The verdict in a few sentences."""
    start = f"Why not {row.label}? "
    if row.verdict is Verdict.DOES_NOT_FIT:
        lacks = "" if row.lacks_bytes is None else f": it lacks {size(row.lacks_bytes)}"
        return f"{start}It does not fit{lacks}. {row.reason}. Way out: {row.way_out}."
    if row.candidate is None:
        way_out = f" Way out: {row.way_out}." if row.way_out else ""
        return (
            f"{start}It {row.verdict.value}: {row.reason}.{way_out}"
            if row.verdict is Verdict.BREAKS_A_RULE
            else (f"{start}{row.reason}.{way_out}")
        )
    best = f"The best such plan is {layout_line(row.candidate)}"
    if row.plan is not None and row.plan.num_devices != found.plan.num_devices:
        best += f" on {row.plan.num_devices} GPUs"
    own_warnings = () if row.plan is None else (each for each in row.plan.warnings if each not in found.plan.warnings)
    besides = "".join(f" But {warning}." for warning in own_warnings)
    if row.verdict is Verdict.EQUAL:
        return f"{start}{best}: as fast as this one within a thousandth.{besides}"
    return (
        f"{start}{best}: {row.verdict.value} by {loses(found, row).lstrip('+-')} "
        f"({seconds(row.candidate.step_time_s)} a step, {size(row.candidate.peak_memory_bytes)} on the fullest GPU)."
        f"{besides}"
    )


def _what_if(found: Explanation) -> RenderableType:
    table = _table("What would change it", "", "this plan>", "best plan there>")
    prediction = found.plan.prediction
    assert prediction is not None
    says: list[str] = []
    for row in found.what_if:
        table.add_row(escape(row.change), *what_if_cells(row, prediction.step_time_s))
        if row.says:
            says.append(f"{row.change}: {row.says}")
    lines = ["This plan: priced again with nothing else changed. Best plan there: searched again.", *says]
    return Group(table, Text("\n".join(lines) + "\n"))


def what_if_cells(row: WhatIf, step_s: float) -> tuple[str, str]:
    """The step of the same plan and of the best plan under a change."""

    def cell(value: float | None) -> str:
        return "" if value is None else f"{seconds(value)} ({loss(value, step_s)})"

    own = "does not fit" if row.fits is False else cell(row.priced_s)
    return own, cell(row.searched_s)


def price_lines(prices: Prices, seq_len: int) -> list[str]:
    """Dollars and energy, of 10^9 tokens or samples and of the run that is asked for."""
    parts: list[str] = []
    if prices.usd_per_billion_tokens is not None:
        parts.append(dollars(prices.usd_per_billion_tokens))
    if prices.kwh_per_billion_tokens is not None:
        parts.append(energy(prices.kwh_per_billion_tokens))
    lines = ["The hardware profile has neither price nor power."]
    if parts:
        lines = [f"10^9 {items(seq_len)}: {', '.join(parts)}"]
    if prices.run is not None:
        used = "" if prices.run_kwh is None else f", {energy(prices.run_kwh)}"
        lines.append(run_text(prices.run, seq_len) + used)
    if prices.watts_source:
        lines.append(
            f"Energy is that of the GPUs alone, at the full power of their data sheet ({prices.watts_source}): without "
            "hosts, network and cooling."
        )
    return lines


def energy(kwh: float) -> str:
    """kWh up to a thousand, then MWh."""
    return f"{kwh:.3g} kWh" if kwh < 1e3 else f"{kwh / 1e3:,.4g} MWh"


def _table(title: str, *columns: str) -> Table:
    """``>`` at the end of a column's name: numbers."""
    table = Table(title=title, title_justify="left")
    for name in columns:
        is_number = name.endswith(">")
        table.add_column(name.rstrip(">"), justify="right" if is_number else "left", no_wrap=is_number, overflow="fold")
    return table
