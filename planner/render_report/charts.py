"""The numbers of the report's charts: places in per cent of a chart's width, and the rows of the timeline."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import NamedTuple

from costmodels.vocabulary.terms import MemoryTerm, Term
from planner.glossary import OF_MEMORY, OF_TIME
from planner.plan.schema import Plan, PredictionSection
from planner.render import adding_up, degrees, dollars, rank_name, seconds, size
from planner.report.timeline import RankTimeline, Span, StepTimeline, Work

# Of pipeline ranks, and of nodes, so many are shown, half from each end.
MOST_RANKS, MOST_NODES = 16, 32
# Of the timeline's spans: some 30 bytes each.
MOST_SPANS = 60_000


class Bar(NamedTuple):
    """One bar of a waterfall: from ``left`` on, ``width`` wide, in per cent."""

    label: str
    meaning: str
    shown: str
    share: str
    left: float
    width: float


def waterfall(time_s: Mapping[Term, float]) -> list[Bar]:
    """Each term of a step begins where the one before it ended; the last bar is the step."""
    rows = [(term, value) for term, value in time_s.items() if value > 0]
    total = sum(value for _, value in rows)
    shown, unit = adding_up([value for _, value in rows])
    bars: list[Bar] = []
    before = 0.0
    for (term, value), text in zip(rows, shown, strict=False):
        share = 100 * value / total
        bars.append(Bar(term.label, OF_TIME[term], f"{text} {unit}", f"{share:.1f}%", before, share))
        before += share
    return [*bars, Bar("step", "all of it", f"{shown[-1]} {unit}", "100.0%", 0.0, 100.0)]


class Piece(NamedTuple):
    """One term of a rank's memory."""

    label: str
    number: int  # of its colour
    shown: str
    width: float


class RankBar(NamedTuple):
    """The memory of a pipeline rank; ``capacity`` is where its device ends, in per cent of the chart."""

    label: str
    shown: str
    pieces: list[Piece]
    capacity: float
    room: str


class MemoryChart(NamedTuple):
    """Bars of pipeline ranks, and what the colours mean: number, label, meaning."""

    ranks: list[RankBar]
    legend: list[tuple[int, str, str]]
    left_out: int


def memory_chart(plan: Plan, prediction: PredictionSection) -> MemoryChart:
    """Peaks of pipeline ranks beside the memory of their devices."""
    peaks, rooms = prediction.peak_memory_bytes, prediction.rooms_bytes
    widest = max(*peaks, *rooms) * 1.02
    numbers = {term: place for place, term in enumerate(MemoryTerm)}
    ranks: list[RankBar] = []
    for rank in _ends(len(peaks), MOST_RANKS):
        terms = prediction.memory_breakdown_bytes[rank]
        pieces = [
            Piece(_label(term), numbers[term], size(num_bytes), 100 * num_bytes / widest)
            for term, num_bytes in terms.items()
        ]
        need, room = size(peaks[rank]), size(rooms[rank])
        ranks.append(RankBar(rank_name(plan, rank), need, pieces, 100 * rooms[rank] / widest, room))
    used = dict.fromkeys(term for terms in prediction.memory_breakdown_bytes for term in terms)
    legend = [(numbers[term], _label(term), OF_MEMORY[term]) for term in used]
    return MemoryChart(ranks, legend, len(peaks) - len(ranks))


def _label(term: MemoryTerm) -> str:
    return term.replace("_", " ")


class Device(NamedTuple):
    """One GPU: its rank, and what it does."""

    rank: int
    pp_rank: int
    does: str


class Devices(NamedTuple):
    """Nodes with their GPUs, and what every pipeline rank holds: rank, stages, modules."""

    nodes: list[tuple[int, list[Device]]]
    left_out: int
    stages: list[tuple[int, str, str]]


def devices(plan: Plan, node_sizes: Sequence[int]) -> Devices:
    """Ranks are numbered pp, dp_replicate, dp_shard, cp, tp, the last within a node (executor/mesh.py)."""
    mesh, firsts = plan.mesh, [0, *accumulate(node_sizes)]
    sizes = {"PP": mesh.pp, "replica": mesh.dp_replicate, "shard": mesh.dp_shard, "CP": mesh.cp, "TP": mesh.tp}

    def device(rank: int) -> Device:
        left, places = rank, dict[str, int]()
        for name, degree in reversed(sizes.items()):
            left, places[name] = divmod(left, degree)
        does = " ".join(f"{name} {places[name]}" for name, degree in sizes.items() if degree > 1)
        return Device(rank, places["PP"], does or "all of it")

    shown = _ends(len(node_sizes), MOST_NODES)
    nodes = [(node, [device(rank) for rank in range(firsts[node], firsts[node + 1])]) for node in shown]
    held: dict[int, list[str]] = {}
    for stage in plan.pipeline.stages:
        modules = stage.modules
        text = modules[0] if len(modules) == 1 else f"{modules[0]} to {modules[-1]}" if modules else "nothing"
        held.setdefault(stage.pp_rank, []).append(f"stage {stage.index}: {text} ({len(modules)} modules)")
    groups = {stage.pp_rank: stage.device_group or "" for stage in plan.pipeline.stages}
    stages = [(rank, "; ".join(held[rank]), groups[rank]) for rank in sorted(held)]
    return Devices(nodes, len(node_sizes) - len(nodes), stages)


def _ends(number: int, most: int) -> list[int]:
    """All of so many, or half of the ``most`` from each end."""
    everything = range(number)
    return [*everything] if number <= most else [*everything[: most // 2], *everything[-most // 2 :]]


_ROWS: Sequence[Work] = tuple(Work)
# Of the timeline: P. Tol, "Colour schemes", SRON/EPS/TN/09-002 (2021): bright, darker where white is on it.
COLOURS = {
    Work.FORWARD: "#1e7a2e",
    Work.BACKWARD: "#34659a",
    Work.INPUT_GRADIENT: "#66ccee",
    Work.WEIGHT_GRADIENT: "#ccbb44",
    Work.EXPOSED: "#d62f4b",
    Work.REDUCTION: "#aa3377",
    Work.OPTIMIZER: "#6b4fbb",
    Work.SEND_ACTIVATIONS: "#888888",
    Work.SEND_GRADIENTS: "#888888",
}


def timeline_rows(timeline: StepTimeline) -> dict[str, object]:
    """What the script draws: for each rank spans as kind, start and end in microseconds, stage, micro-batch."""
    shown = _ends(len(timeline.ranks), MOST_RANKS)
    most = MOST_SPANS // max(1, len(shown))
    rows = [_spans(timeline.ranks[rank]) for rank in shown]
    return {
        "kinds": [work.value for work in _ROWS],
        "colours": [COLOURS[work] for work in _ROWS],
        "end": _microseconds(timeline.step_time_s),
        "ranks": [{"rank": rank, "spans": spans[:most]} for rank, spans in zip(shown, rows, strict=True)],
        "shares": [(rank, *_shares(timeline.ranks[rank], timeline.step_time_s)) for rank in shown],
        "left_out": len(timeline.ranks) - len(shown),
        "is_cut": any(len(spans) > most for spans in rows),
        "schedule": timeline.schedule.value,
    }


def _spans(rank: RankTimeline) -> list[tuple[float, ...]]:
    """In the order of time; communication is drawn over the action that waits for it."""
    spans = [*rank.actions, *rank.exposed]
    return [_span(each) for each in sorted(spans, key=lambda each: (each.start_s, -each.end_s))]


def _span(span: Span) -> tuple[float, ...]:
    where = (span.action.stage, span.action.microbatch) if span.action is not None else (-1, -1)
    return (_ROWS.index(span.work), _microseconds(span.start_s), _microseconds(span.end_s), *where)


def _microseconds(value_s: float) -> float:
    return round(value_s * 1e6, 2)


def _shares(rank: RankTimeline, step_s: float) -> tuple[str, str, str]:
    """Working, of that communication that is not hidden, and idle."""
    exposed = sum(span.end_s - span.start_s for span in rank.exposed)
    once = sum(span.end_s - span.start_s for span in rank.exposed if span.action is None)
    busy = sum(span.end_s - span.start_s for span in rank.actions) + once
    return f"{busy / step_s:.1%}", f"{exposed / step_s:.1%}", f"{max(0.0, 1 - busy / step_s):.1%}"


class Point(NamedTuple):
    """A plan of the front: its place in per cent, and what it is."""

    left: float
    bottom: float
    devices: str
    step: str
    usd: str
    memory: str
    layout: str
    is_plan: bool


def front_chart(plans: Sequence[Plan], own: Plan) -> list[Point]:
    """Step time over GPUs, both on logarithmic scales."""
    if not plans:
        return []
    counts = [math.log(plan.num_devices) for plan in plans]
    times = [math.log(_predicted(plan).step_time_s) for plan in plans]
    return [
        Point(
            left=_place(log_count, counts),
            bottom=_place(log_time, times),
            devices=str(plan.num_devices),
            step=seconds(_predicted(plan).step_time_s),
            usd="" if (usd := _predicted(plan).usd_per_step) is None else dollars(usd),
            memory=size(max(_predicted(plan).peak_memory_bytes)),
            layout=f"{degrees(plan.mesh)}, ZeRO {plan.zero_stage}",
            is_plan=plan.num_devices == own.num_devices,
        )
        for plan, log_count, log_time in zip(plans, counts, times, strict=True)
    ]


def _place(value: float, values: Sequence[float]) -> float:
    """Between 5 and 95 per cent."""
    low, high = min(values), max(values)
    return 50.0 if high == low else 5 + 90 * (value - low) / (high - low)


def _predicted(plan: Plan) -> PredictionSection:
    assert plan.prediction is not None
    return plan.prediction
