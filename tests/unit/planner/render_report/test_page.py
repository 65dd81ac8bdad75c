"""The report: one page that loads nothing, runs nothing but its own script, and can be read by everybody."""

import base64
import hashlib
import json
import re
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from html.parser import HTMLParser
from pathlib import Path

import pytest

from costmodels.vocabulary.choices import Searches
from hardware_profiles.mixed import cluster_for
from planner.api import find_plan, schedule_plan
from planner.api.explain import Wishes, explain
from planner.layout.layout import Pins
from planner.plan.schema import Plan
from planner.render_report.charts import devices
from planner.render_report.page import Report, page
from planner.request import Request

Make = Callable[[], Report]
MOST_BYTES = 6 * 10**6
HOSTILE = "<script>document.title='hacked'</script><img src=x onerror=\"document.title='hacked'\">'\"&"
VOID = {"meta", "link", "br", "img", "input", "hr"}


@cache
def report() -> Report:
    pins = Pins(pp=2, tp=1, zero=1)
    request = Request("llama-tiny", 4, hardware="dgx-a100-80gb", global_batch_size=8, seq_len=32, pins=pins)
    plan = find_plan(replace(request, may_idle=False)).plan
    found = explain(plan, wishes=Wishes(num_tokens=10**9, searches=Searches.NONE))
    return Report(found, schedule_plan(plan)[0], Path("my plan.json"), (plan, twice_the_devices(plan)))


def twice_the_devices(plan: Plan) -> Plan:
    return plan.model_copy(update={"num_devices": plan.num_devices * 2})


def hostile() -> Report:
    """Every name that others choose is an attack."""
    own = report()
    plan = own.explanation.plan
    stages = tuple(
        stage.model_copy(update={"modules": (HOSTILE,), "device_group": HOSTILE}) for stage in plan.pipeline.stages
    )
    attacked = plan.model_copy(
        update={
            "model": plan.model.model_copy(update={"source": HOSTILE}),
            "hardware": HOSTILE,
            "pipeline": plan.pipeline.model_copy(update={"stages": stages}),
            "warnings": (HOSTILE,),
        }
    )
    compute = own.explanation.compute
    rows = tuple(replace(row, module=HOSTILE, operator=HOSTILE) for row in compute.operators)
    units = tuple(replace(row, name=HOSTILE) for row in compute.units)
    found = replace(
        own.explanation,
        plan=attacked,
        compute=replace(compute, operators=rows, units=units),
        runners_up=tuple(replace(row, label=HOSTILE) for row in own.explanation.runners_up),
        what_if=tuple(replace(row, change=HOSTILE, says=HOSTILE) for row in own.explanation.what_if),
        notes=(HOSTILE,),
        band_source=HOSTILE,
    )
    return replace(own, explanation=found, plan_path=Path("x; rm -rf $HOME"))


class Outline(HTMLParser):
    """Elements of a page, with a check that they are closed in order."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.text = ""
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


@pytest.mark.parametrize("make", [report, hostile])
def test_the_page_is_whole_small_and_loads_nothing(make: Make) -> None:
    text = page(make())
    outline = Outline(text)
    assert len(text.encode()) < MOST_BYTES
    for tag, attributes in outline.elements:
        assert not any(name.startswith("on") for name in attributes), (tag, attributes)
        for name in ("src", "href", "data", "action"):
            value = attributes.get(name)
            assert value is None or value.startswith("#") or value == "data:,", (tag, value)
    assert not re.search(r"url\(|@import", text)


@pytest.mark.parametrize("make", [report, hostile])
def test_only_the_script_of_the_page_may_run(make: Make) -> None:
    text = page(make())
    scripts = [attributes for tag, attributes in Outline(text).elements if tag == "script"]
    assert [each.get("type") for each in scripts] == ["application/json", None]
    run = re.findall(r"<script>(.*?)</script>", text, re.DOTALL)
    assert len(run) == 1
    digest = base64.b64encode(hashlib.sha256(run[0].encode()).digest()).decode()
    policy = next(a["content"] for _, a in Outline(text).elements if a.get("http-equiv") == "Content-Security-Policy")
    assert policy is not None
    assert f"script-src 'sha256-{digest}'" in policy
    assert "default-src 'none'" in policy
    assert "unsafe-inline" not in policy.partition("script-src")[2]


def test_names_are_shown_as_they_are_and_commands_are_quoted() -> None:
    text = page(hostile())
    outline = Outline(text)
    assert "<img" not in text
    assert outline.text.count(HOSTILE) > 10
    assert "planner check 'x; rm -rf $HOME'" in outline.text


def test_bars_add_up_and_the_line_of_the_capacity_is_there() -> None:
    own = report()
    text = page(own)
    prediction = own.explanation.plan.prediction
    assert prediction is not None
    track = [tuple(map(float, pair)) for pair in re.findall(r'<i style="left:([\d.]+)%;width:([\d.]+)%"', text)]
    terms, step = track[:-1], track[-1]
    assert step == (0.0, 100.0)
    assert terms[0][0] == 0
    for (left, width), (following, _) in zip(terms, [*terms[1:], (100.0, 0.0)], strict=True):
        assert left + width == pytest.approx(following, abs=0.01)
    for rank, stack in enumerate(re.findall(r'<div class="stack">(.*?)</div>', text)):
        widths = sum(float(width) for width in re.findall(r"width:([\d.]+)%", stack))
        capacity = float(re.findall(r"left:([\d.]+)%", stack)[0])
        share = prediction.peak_memory_bytes[rank] / prediction.memory_capacity_bytes
        assert widths / capacity == pytest.approx(share, abs=1e-3)


def test_every_gpu_stands_at_its_place() -> None:
    plan = report().explanation.plan
    mesh = plan.mesh.model_copy(update={"pp": 2, "dp_shard": 2, "dp_replicate": 1, "cp": 1, "tp": 2})
    shown = devices(plan.model_copy(update={"mesh": mesh, "num_devices": 8}), (4, 4))
    assert [[(gpu.rank, gpu.does) for gpu in gpus] for _, gpus in shown.nodes] == [
        [(4 * pp + 2 * shard + tp, f"PP {pp} shard {shard} TP {tp}") for shard in (0, 1) for tp in (0, 1)]
        for pp in (0, 1)
    ]


def test_nodes_that_are_filled_in_part_are_drawn_so() -> None:
    """Groups of 4 and 12 GPUs were drawn as two nodes of 8, which have ranks of both kinds."""
    cluster = cluster_for(None, "a100-80gb:4,h100:12")
    assert cluster.node_sizes() == (4, 8, 4)
    assert cluster.mixed is not None
    assert cluster.node_sizes([group.name for group in reversed(cluster.mixed.groups)]) == (8, 4, 4)
    plan = report().explanation.plan
    mesh = plan.mesh.model_copy(update={"pp": 4, "dp_shard": 4, "dp_replicate": 1, "cp": 1, "tp": 1})
    shown = devices(plan.model_copy(update={"mesh": mesh, "num_devices": 16}), (4, 8, 4))
    assert [[gpu.rank for gpu in gpus] for _, gpus in shown.nodes] == [[*range(4)], [*range(4, 12)], [*range(12, 16)]]


def test_the_timeline_ends_with_the_step() -> None:
    own = report()
    data = json.loads(re.findall(r'id="timeline-data">(.*?)</script>', page(own), re.DOTALL)[0])
    prediction = own.explanation.plan.prediction
    assert prediction is not None
    assert data["end"] == pytest.approx(prediction.step_time_s * 1e6, abs=0.02)
    assert max(span[2] for rank in data["ranks"] for span in rank["spans"]) == pytest.approx(data["end"], abs=0.02)
    pipeline = own.explanation.plan.pipeline
    backward = data["kinds"].index("backward")
    for rank in data["ranks"]:
        assert sum(span[0] == backward for span in rank["spans"]) == pipeline.num_microbatches * pipeline.virtual_stages


def test_headings_tables_and_regions_have_names() -> None:
    elements = Outline(page(report())).elements
    assert ("html", {"lang": "en"}) in elements
    ids = [attributes["id"] for _, attributes in elements if "id" in attributes]
    assert len(ids) == len(set(ids))
    labels = {attributes.get("aria-labelledby") for tag, attributes in elements if tag == "section"}
    assert labels <= set(ids)
    assert None not in labels
    assert all("scope" in attributes for tag, attributes in elements if tag == "th")
    regions = [attributes["aria-label"] for _, attributes in elements if attributes.get("role") == "region"]
    assert len(regions) == len(set(regions))
    assert next(tag for tag, _ in elements if tag in ("h1", "h2")) == "h1"


def luminance(colour: str) -> float:
    """Relative luminance, WCAG 2.2."""
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one: str, other: str) -> float:
    """Between 1 and 21, WCAG 2.2."""
    bright, dark = sorted((luminance(one), luminance(other)), reverse=True)
    return (bright + 0.05) / (dark + 0.05)


def test_text_can_be_read_in_both_themes() -> None:
    style = page(report()).partition("<style>")[2].partition("</style>")[0]
    blocks = re.findall(r"\{([^{}]*--page:[^{}]*)\}", style)
    themes = [dict(re.findall(r"--([a-z]+): (#[0-9a-f]{6})", block)) for block in blocks]
    assert len(themes) == 3  # light, dark as chosen, dark as the system has it
    assert themes[1] == themes[2]
    for theme in themes:
        for text in ("text", "faint", "accent"):
            for ground in ("page", "panel"):
                assert contrast(theme[text], theme[ground]) >= 4.5, (text, ground)
        for mark in ("bar", "mark"):
            assert contrast(theme[mark], theme["panel"]) >= 3, mark


def test_a_faster_runner_up_is_not_denied() -> None:
    plan = report().explanation.plan
    assert plan.search is not None
    assert plan.search.runners_up
    preferred = plan.search.model_copy(update={"status": "OPTIMAL", "preferred_within": 0.001})
    explanation = replace(report().explanation, plan=plan.model_copy(update={"search": preferred}))
    text = page(replace(report(), explanation=explanation))
    assert "#2 is fastest within the cost model, by at most 0.1%" in text
    assert "layouts is faster within the cost model" not in text
    assert "none can be faster than" not in text
    open_search = preferred.model_copy(update={"status": "FEASIBLE"})
    explanation = replace(explanation, plan=plan.model_copy(update={"search": open_search}))
    assert "none can be faster than" in page(replace(report(), explanation=explanation))
