"""A step as Chrome trace events, which chrome://tracing and ui.perfetto.dev show: one process a pipeline rank.

Format: "Trace Event Format", Google (2016): complete events ``X`` with microseconds, metadata events ``M`` with names.
"""

from __future__ import annotations

import json
from itertools import pairwise

from planner.report.timeline import Span, StepTimeline

ROWS = ("compute", "communication not hidden", "sends of activations", "sends of gradients")
Event = dict[str, str | int | float | dict[str, str | int]]


def trace_json(timeline: StepTimeline) -> str:
    """The whole step as a JSON object of trace events."""
    return json.dumps({"displayTimeUnit": "ms", "traceEvents": trace_events(timeline)}) + "\n"


def trace_events(timeline: StepTimeline) -> list[Event]:
    """Names first, then spans in order of rank and row."""
    names: list[Event] = []
    events: list[Event] = []
    for rank, found in enumerate(timeline.ranks):
        title = f"replicas on {timeline.groups[rank]}" if timeline.groups else f"pipeline rank {rank}"
        names.append(_name("process_name", title, rank, 0))
        for row, (title, spans) in enumerate(zip(ROWS, (found.actions, found.exposed, *found.sends), strict=True)):
            if spans:
                names.append(_name("thread_name", title, rank, row))
                events += [_complete(span, limit_s, rank, row) for span, limit_s in _with_limits(spans)]
    return names + events


def _with_limits(spans: tuple[Span, ...]) -> list[tuple[Span, float]]:
    """Each span and when the next one of its row begins: a viewer nests what overlaps."""
    limits = [following.start_s for _, following in pairwise(spans)]
    return list(zip(spans, [*limits, float("inf")], strict=True))


def _name(kind: str, name: str, rank: int, row: int) -> Event:
    return {"ph": "M", "name": kind, "ts": 0, "dur": 0, "pid": rank, "tid": row, "args": {"name": name}}


def _complete(span: Span, limit_s: float, rank: int, row: int) -> Event:
    name, arguments = span.work.value, dict[str, str | int]()
    if span.action is not None:
        name = f"{span.work.value}: stage {span.action.stage}, micro-batch {span.action.microbatch}"
        arguments = {"kind": span.action.kind, "stage": span.action.stage, "microbatch": span.action.microbatch}
    microseconds = 1e6
    return {
        "ph": "X",
        "name": name,
        "cat": span.work.value,
        "ts": span.start_s * microseconds,
        "dur": (min(span.end_s, limit_s) - span.start_s) * microseconds,
        "pid": rank,
        "tid": row,
        "args": arguments,
    }
