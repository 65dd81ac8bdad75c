"""The best plan of each training framework side by side, and the user's own set-up: ``planner compare``.

The model is traced once. Each framework is then searched within its rules and priced by its recipe; frameworks that
have both in common are searched once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from costmodels.vocabulary.choices import Optimizer, Precision, Recompute
from planner.api import Question, answer_of
from planner.api.pinned import pinned_run, price_on
from planner.api.within import refusals
from planner.errors import PlannerError, TimeLimitError
from planner.formats.completion import Given, completed
from planner.formats.frameworks import RULES
from planner.formats.registry import read_config
from planner.formats.settings import Layout
from planner.layout.deadline import Deadline, OutOfTimeError
from planner.layout.layout import Pins
from planner.model_file import family_config_of
from planner.plan.schema import Plan
from planner.request import DEFAULT_FRAMEWORK as OURS
from planner.request import Request, borrowed, check_offload, target_of

FRAMEWORKS = (OURS, *RULES)
NO_TIME = "the time limit came before any plan of it was found"


def names_file(mine: str) -> bool:
    """Whether a user's own set-up is called by its file: no pins, such as ``tp=8,pp=4``, and not without a word."""
    return mine.strip() != "" and ("=" not in mine or Path(mine).exists())


@dataclass(frozen=True)
class Config:
    """A framework's own config: the name of its file, its text, and what is said beside it, which counts first."""

    file_name: str
    text: str
    micro_batch_size: int | None = None
    recompute: Recompute | None = None
    precision: Precision | None = None
    optimizer: Optimizer | None = None


@dataclass(frozen=True)
class Row:
    """The best plan of a framework, or why there is none.

    ``lacks``: what the fastest plan of all frameworks has and this framework cannot run. ``source``: where its rules
    were read.
    """

    framework: str
    plan: Plan | None
    recipe: str
    source: str
    borrowed: str = ""  # why its recipe is another framework's
    lacks: tuple[str, ...] = ()
    reason: str = ""
    way_out: str = ""
    is_late: bool = False  # whether the time limit is why

    @property
    def step_time_s(self) -> float:
        """Of its plan; infinite where there is none."""
        return float("inf") if self.plan is None or self.plan.prediction is None else self.plan.prediction.step_time_s


@dataclass(frozen=True)
class Comparison:
    """``rows``: of every framework, the fastest first, those without a plan last. ``mine``: the user's own set-up."""

    question: Question
    rows: tuple[Row, ...]
    mine: Row | None
    notes: tuple[str, ...]
    interrupted: bool


def compare(
    request: Request,
    mine: Pins | Config | None = None,
    deadline: Deadline | None = None,
    said: Callable[[str], None] = lambda _: None,
) -> Comparison:
    """Searches every framework for ``request``, whose own ``framework`` is that of ``mine`` where this is pins.

    The training is that of ``mine`` where this is a config, but for what is said beside it. What is left of the time is
    shared evenly by the searches that are left; ``said`` is told which one runs. InputError: the request, or the
    config, is wrong.
    """
    deadline = deadline or Deadline.answering_within(request.time_limit_s)
    shape, notes = family_config_of(request.model), []
    layout = own = None
    if isinstance(mine, Config):
        own, layout, notes = _read(request, mine, None if shape is None else shape.usual_seq_len)
        request = replace(
            request, seq_len=layout.seq_len, global_batch_size=layout.global_batch_size, precision=layout.precision,
            optimizer=layout.optimizer,
        )  # fmt: skip
    question = Question.in_time(replace(request, may_idle=False))
    rows, interrupted = _searched(question, deadline, said)
    fastest = rows[0].plan
    if fastest is not None:
        rows = [replace(row, lacks=_lacks(row, fastest, question)) for row in rows]
    row = None
    if not interrupted and isinstance(mine, Pins):
        said("your own set-up")
        row = _answered("yours", replace(question, request=replace(question.request, pins=mine)), deadline)
    elif not interrupted and own is not None and layout is not None:
        row = _priced(question, own, layout)
    return Comparison(question, tuple(rows), row, (*question.notes, *notes), interrupted)


def _lacks(row: Row, fastest: Plan, question: Question) -> tuple[str, ...]:
    target = replace(question.target, framework_name=row.framework)
    return () if row.plan is fastest else tuple(each.reason for each in refusals(fastest, target))


def _searched(question: Question, deadline: Deadline, said: Callable[[str], None]) -> tuple[list[Row], bool]:
    """A row of every framework, in the order of their step times, and whether Ctrl-C ended it."""
    alike: dict[tuple[str, int], list[str]] = {}
    asked: dict[str, Question] = {}
    for framework in FRAMEWORKS:
        asked[framework] = question.run_by(framework)
        key = asked[framework].target.recipe.name, id(RULES.get(framework))
        alike.setdefault(key, []).append(framework)
    rows: list[Row] = []
    for place, names in enumerate(alike.values()):
        said(", ".join(names))
        left_s = deadline.left_with_answer_s / (len(alike) - place) if deadline.is_limited else None
        try:
            found = _answered(names[0], asked[names[0]], Deadline.within(left_s), brief=True)
        except KeyboardInterrupt:
            if not any(row.plan for row in rows):
                raise
            return sorted(rows, key=_step_s), True
        rows += [_named(found, name) for name in names]
    return sorted(rows, key=_step_s), False


def _step_s(row: Row) -> float:
    return row.step_time_s


def _named(row: Row, framework: str) -> Row:
    plan = None if row.plan is None else row.plan.model_copy(update={"framework": framework})
    return replace(row, framework=framework, plan=plan, borrowed=borrowed(framework))


def _answered(label: str, question: Question, deadline: Deadline, *, brief: bool = False) -> Row:
    """The plan that ``planner search --framework`` finds, or why there is none."""
    request, target = question.request, question.target
    source = "planner run" if request.framework == OURS else RULES[request.framework].source
    row = Row(label, None, target.recipe.name, source)
    try:
        check_offload(target.cluster, request.pins.offload, activations=request.pins.offload_activations)
        answer = answer_of(question, deadline, brief=brief)
    except (OutOfTimeError, TimeLimitError):
        return replace(row, reason=NO_TIME, way_out="raise --time-limit", is_late=True)
    except PlannerError as error:
        return replace(row, reason=error.message, way_out=error.hint)
    if answer.interrupted:
        raise KeyboardInterrupt
    return replace(row, plan=answer.plan)


def _read(request: Request, config: Config, default_seq_len: int | None) -> tuple[str, Layout, list[str]]:
    """The framework of a config, and its whole layout; what was assumed."""
    target, read = read_config(config.file_name, config.text)
    given = Given(
        request.num_devices, request.seq_len, request.global_batch_size, config.micro_batch_size,
        config.precision, config.optimizer, config.recompute,
    )  # fmt: skip
    layout, assumed = completed(read.settings, given, default_seq_len)
    notes = [f"your own is read as {target.name} ({target.version})", *read.notes, *assumed]
    notes.append(f"all are for its {layout.global_batch_size} sequences of {layout.seq_len} tokens, {layout.precision}")
    return target.software(read), layout, notes


def _priced(question: Question, framework: str, layout: Layout) -> Row:
    whole = question.target
    target = target_of(whole.graph, whole.cluster, layout.precision, framework, [])
    priced = price_on(pinned_run(question.request.model, framework, layout), target)
    row = Row("yours", priced.plan, priced.target.recipe.name, f"priced as {framework} runs it")
    if priced.found.fits:
        return row
    pairs = zip(priced.found.ledgers, priced.found.capacity_bytes, strict=True)
    lacks = max(need.total_bytes - room for need, room in pairs)
    return replace(row, reason=f"it does not fit: its fullest GPU lacks {lacks / 2**30:.1f} GiB")
