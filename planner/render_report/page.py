"""The report of a plan as one HTML page that needs no network: its values, escaped, in ``page.html.j2``.

The page runs one script, ``script.js``, which draws the timeline and changes the theme. Its hash stands in the page's
Content-Security-Policy, so nothing else in the page can run, whatever a model or a profile is called.
"""

from __future__ import annotations

import base64
import hashlib
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

from jinja2 import Environment, StrictUndefined

from planner.api.explain import Explanation
from planner.plan.schema import Plan
from planner.render import (
    count,
    degrees,
    dollars,
    fullest_text,
    items,
    layout_line,
    plan_rows,
    probability,
    proof_words,
    seconds,
    size,
)
from planner.render_explain import LIMITS, binding_lines, loses, price_lines, what_if_cells, where_text
from planner.render_report.charts import COLOURS, devices, front_chart, memory_chart, timeline_rows, waterfall
from planner.report.timeline import StepTimeline, Work

# Operators and runners-up beyond these say little more.
MOST_OPERATORS = 15


@dataclass(frozen=True)
class Report:
    """What a page shows. ``front``: the best plans of several numbers of GPUs, where they were asked for."""

    explanation: Explanation
    timeline: StepTimeline
    plan_path: Path
    front: Sequence[Plan] = ()


def page(report: Report) -> str:
    """The whole page."""
    folder = files(__package__ or "")
    script = folder.joinpath("script.js").read_text(encoding="utf-8")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    template = environment.from_string(folder.joinpath("page.html.j2").read_text(encoding="utf-8"))
    style = folder.joinpath("style.css").read_text(encoding="utf-8")
    return template.render(style=style, script=script, script_hash=digest, **_values(report))


def _values(report: Report) -> dict[str, object]:
    found = report.explanation
    plan = found.plan
    prediction = plan.prediction
    assert prediction is not None
    front = front_chart(report.front, plan)
    return {
        "title": f"{plan.model.source} on {plan.num_devices} GPUs",
        "subtitle": f"{count(plan.model.num_params)} parameters, {plan.hardware}, {degrees(plan.mesh)}, "
        f"ZeRO {plan.zero_stage}",
        "cards": _cards(plan),
        "binding": binding_lines(found),
        "plan_rows": plan_rows(plan),
        "status": _status(plan),
        "waterfall": waterfall(found.time_s),
        "memory": memory_chart(plan, prediction),
        "devices": devices(plan, found.node_sizes),
        "fullest_rows": [
            *((name.replace("_", " "), size(num_bytes)) for name, num_bytes in found.memory.terms_bytes.items()),
            ("peak", size(found.memory.peak_bytes)),
        ],
        "kinds": _kinds(report.timeline),
        "timeline": timeline_rows(report.timeline),
        "operators": _operators(found),
        "units": _units(found),
        "runners_up": _runners_up(found),
        "what_if": [(row.change, *what_if_cells(row, prediction.step_time_s), row.says) for row in found.what_if],
        "prices": price_lines(found.prices, found.plan.training.seq_len),
        "front": front,
        "front_rows": [(each.devices, each.step, each.usd, each.memory, each.layout) for each in front],
        "commands": _commands(plan, report.plan_path),
        "band": _band(found),
        "notes": (*found.notes, *plan.warnings),
    }


def _kinds(timeline: StepTimeline) -> list[tuple[str, str]]:
    """Kinds of work that there are, each with its colour."""
    spans = (span for rank in timeline.ranks for span in (*rank.actions, *rank.exposed))
    used = {span.work for span in spans}
    return [(work.value, COLOURS[work]) for work in Work if work in used]


def _cards(plan: Plan) -> list[tuple[str, str, str]]:
    """Name, value, and what stands small beneath it."""
    p = plan.prediction
    assert p is not None
    low, high = p.step_time_low_s, p.step_time_high_s
    band = "" if low is None or high is None else f"{seconds(low)} to {seconds(high)}"
    fits = "" if p.fit_probability is None else f"fits with {probability(p.fit_probability)}"
    cards = [
        ("step", seconds(p.step_time_s), band),
        (f"{items(plan.training.seq_len)}/s/GPU", f"{p.tokens_per_s_per_gpu:,.0f}", ""),
        ("MFU", f"{p.mfu:.1%}", f"{p.model_flops_per_gpu_per_s / 1e12:.3g} model TFLOP/s/GPU"),
        ("fullest GPU", fullest_text(p), fits),
    ]
    if p.usd_per_step is not None:
        cards.append(("a step costs", dollars(p.usd_per_step), ""))
    return cards


def _status(plan: Plan) -> str:
    search = plan.search
    if search is None:
        return "This plan was priced, not searched for."
    return f"{search.status}: {proof_words(plan)}."


def _runners_up(found: Explanation) -> list[tuple[str, str, str, str, str]]:
    """Label, layout, step, what it loses, and where."""
    return [
        (row.label, layout_line(each), seconds(each.step_time_s), loses(found, row), where_text(row))
        for row in found.runners_up
        for each in (row.candidate,)
        if each is not None
    ]


def _operators(found: Explanation) -> list[tuple[str, str, str, str, str]]:
    """Operator, share of the compute, what it waits for, rate, share of the roofline."""
    return [
        (
            f"{row.operator} in {row.module}" if row.module else row.operator,
            f"{row.reached.share:.1%}",
            LIMITS[row.reached.limit],
            f"{row.reached.flops_per_s / 1e12:.3g} TFLOP/s"
            if row.reached.limit == "arithmetic"
            else f"{row.reached.bytes_per_s / 1e12:.2f} TB/s",
            f"{row.reached.roofline:.0%}",
        )
        for row in found.compute.operators[:MOST_OPERATORS]
    ]


def _units(found: Explanation) -> list[tuple[str, str, str, str, str]]:
    return [
        (
            row.name,
            str(row.count),
            f"{row.reached.share:.1%}",
            LIMITS[row.reached.limit],
            f"{row.reached.roofline:.0%}",
        )
        for row in found.compute.units
    ]


def _commands(plan: Plan, path: Path) -> list[tuple[str, str]]:
    """What each command is for, and the command, quoted for a shell."""
    name = shlex.quote(str(path))
    commands = [("see whether each rank runs, without a GPU", f"planner check {name}")]
    if plan.num_devices > 1:
        commands.append(("train on one machine", f"planner run {name} --steps 100"))
    commands += [
        ("price it on other hardware", f"planner estimate {name} --hardware dgx-h200"),
        ("ask why not something else", f"planner explain {name} --why-not tp=4,pp=2"),
    ]
    return commands


def _band(found: Explanation) -> str:
    p = found.plan.prediction
    assert p is not None
    if p.step_time_low_s is None or p.step_time_high_s is None:
        return "There is no band: predictions of such runs were never held against measured ones."
    share = "most" if p.step_time_coverage is None else f"{p.step_time_coverage:.0%}"
    return (
        f"The band {seconds(p.step_time_low_s)} to {seconds(p.step_time_high_s)} is where {share} of measured runs lay "
        f"that had no part in the fit. Source: {found.band_source}"
    )
