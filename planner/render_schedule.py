"""A step as a Gantt chart of characters: one line a pipeline rank, readable without colours."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.text import Text

from planner.render import seconds
from planner.report.timeline import RankTimeline, Span, StepTimeline, Work

LETTERS = {
    Work.FORWARD: ("F", "black on green"),
    Work.BACKWARD: ("B", "black on cyan"),
    Work.INPUT_GRADIENT: ("I", "black on bright_cyan"),
    Work.WEIGHT_GRADIENT: ("W", "black on yellow"),
    Work.REDUCTION: ("R", "white on magenta"),
    Work.OPTIMIZER: ("O", "white on blue"),
}
IDLE = "·"
MAX_LINES = 32  # of ranks: those in the middle are left out
LABEL_WIDTH, SHARE_WIDTH = 9, 12
CELLS_OF_ACTION = 3  # of the shortest action where single actions are shown


def show_timeline(timeline: StepTimeline, width: int) -> RenderableType:
    """The whole step, and its ends action by action where the whole is too long for that."""
    num_cells = max(20, width - LABEL_WIDTH - SHARE_WIDTH)
    total_s = timeline.step_time_s
    parts: list[RenderableType] = [_headline(timeline)]
    parts.append(_panel(timeline, (0.0, total_s), num_cells, "the whole step"))
    shown_s = _shortest_action_s(timeline) / CELLS_OF_ACTION * num_cells
    if shown_s < total_s:
        parts.append(_panel(timeline, (0.0, shown_s), num_cells, "its beginning"))
        parts.append(_panel(timeline, (total_s - shown_s, total_s), num_cells, "its end"))
    parts.append(_legend(timeline))
    return Group(*parts)


def _headline(timeline: StepTimeline) -> Text:
    ranks = len(timeline.ranks)
    words = f"{timeline.schedule.value} on {ranks} pipeline ranks" if ranks > 1 else "no pipeline"
    if timeline.groups:
        words = "no pipeline, shares of the batch on " + ", ".join(f"{n} ({i})" for i, n in enumerate(timeline.groups))
    text = Text(words, style="bold")
    after_s = timeline.step_time_s - timeline.pipeline_s
    text.append(
        f": {seconds(timeline.step_time_s)} a step, of which {seconds(timeline.pipeline_s)} until the last micro-batch "
        f"is done and {seconds(after_s)} once a step\n",
        style="not bold",
    )
    return text


def _panel(timeline: StepTimeline, window: tuple[float, float], num_cells: int, title: str) -> Text:
    start_s, end_s = window
    cell_s = (end_s - start_s) / num_cells
    text = Text(no_wrap=True)
    text.append(f"{title}, {seconds(start_s)} to {seconds(end_s)}; a column is {seconds(cell_s)}\n", style="italic")
    is_whole = start_s == 0 and end_s == timeline.step_time_s
    ranks = range(len(timeline.ranks))
    shown = [*ranks] if len(ranks) <= MAX_LINES else [*ranks[: MAX_LINES // 2], *ranks[-MAX_LINES // 2 :]]
    for position, rank in enumerate(shown):
        if position and rank != shown[position - 1] + 1:
            text.append(f"{'...':>{LABEL_WIDTH - 1}}\n")
        found = timeline.ranks[rank]
        text.append(f"{'share' if timeline.groups else 'rank'} {rank:>{2 if timeline.groups else 3}} ")
        text.append_text(_line(_row(found), window, num_cells, is_dense=is_whole))
        if is_whole:
            text.append(f" {found.idle_s / timeline.step_time_s:5.1%} idle")
        text.append("\n")
    return text


def _row(rank: RankTimeline) -> list[Span]:
    """What fills a rank's line: its actions, and what it does once a step."""
    return [*(span for span in rank.actions if span.action), *(s for s in rank.exposed if not s.action), *(
        span for span in rank.actions if not span.action
    )]  # fmt: skip


def _line(spans: Sequence[Span], window: tuple[float, float], num_cells: int, *, is_dense: bool) -> Text:
    """One character a cell: what takes most of it; where actions are wide, the micro-batch's number in them."""
    start_s, end_s = window
    cell_s = (end_s - start_s) / num_cells
    most = [0.0] * num_cells  # seconds of the work that fills most of a cell
    owner: list[Span | None] = [None] * num_cells
    busy = [0.0] * num_cells
    for span in spans:
        first = max(0, int((span.start_s - start_s) / cell_s))
        last = min(num_cells - 1, int((span.end_s - start_s) / cell_s))
        for cell in range(first, last + 1):
            overlap = min(span.end_s, start_s + (cell + 1) * cell_s) - max(span.start_s, start_s + cell * cell_s)
            busy[cell] += max(0.0, overlap)
            if overlap > most[cell]:
                most[cell], owner[cell] = overlap, span
    kept = [span if used >= cell_s / 2 else None for span, used in zip(owner, busy, strict=True)]
    return _cells(kept, is_dense=is_dense)


def _cells(owner: Sequence[Span | None], *, is_dense: bool) -> Text:
    text = Text()
    cell = 0
    while cell < len(owner):
        span = owner[cell]
        width = 1
        while cell + width < len(owner) and owner[cell + width] is span:
            width += 1
        if span is None:
            text.append(IDLE * width, style="dim")
        else:
            letter, style = LETTERS[span.work]
            label = letter if is_dense or span.action is None else f"{letter}{span.action.microbatch}"
            text.append((label if len(label) <= width else letter).ljust(width, letter if is_dense else "-"), style)
        cell += width
    return text


def _legend(timeline: StepTimeline) -> Text:
    used = {span.work for rank in timeline.ranks for span in _row(rank)}
    names = [f"{letter} {work.value}" for work, (letter, _) in LETTERS.items() if work in used]
    return Text("; ".join([*names, f"{IDLE} idle. A number is that of a micro-batch."]), style="dim")


def _shortest_action_s(timeline: StepTimeline) -> float:
    return min(span.end_s - span.start_s for rank in timeline.ranks for span in rank.actions if span.action)
