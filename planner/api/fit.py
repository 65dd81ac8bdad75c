"""Whether a model fits, and how far from the edge: the searches behind ``planner fit``."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from planner.api import Question
from planner.api.front import counts_between
from planner.api.nothing_fits import no_plan, something_fits
from planner.errors import HardwareError, PlannerError
from planner.problem import Problem, at_its_smallest
from planner.request import Request, load_cluster
from planner.solver.search import Outcome, Wanted, search
from planner.translate.infeasible import Attempt
from planner.translate.to_plan import layout_text, term_bytes

# A sequence is doubled or halved so often at most, to so many tokens at least.
MOST_DOUBLINGS, SHORTEST = 10, 16
# Between a length that fits and twice that, lengths are told apart to a quarter of the first.
STEPS_OF_A_DOUBLING = 4
# Of GPUs, at most so many times as many are tried, and so many.
MOST_TIMES_THE_DEVICES, MOST_DEVICES = 64, 1_000_000


@dataclass(frozen=True)
class Fit:
    """Whether anything fits, the memory of the worst rank, and what else would fit.

    ``ledger_bytes`` is of the fastest plan that fits or, where none does, of the layout that lacks least, which
    ``layout`` says. Memory is in bytes, ``seq_len`` and ``longest_seq_len`` in tokens, micro-batches in sequences.
    """

    fits: bool
    num_devices: int
    hardware: str
    seq_len: int
    global_batch_size: int
    layout: str
    ledger_bytes: dict[str, int]
    peak_bytes: int
    room_bytes: int  # that a plan may take of the device
    least_devices: int | None  # of those tried; None: none of them fits, or devices differ
    longest_seq_len: int | None  # None: none of those tried fits, or the model is only known at one length
    largest_micro_batch: int | None
    reason: str  # where nothing fits, what binds
    change: str  # where nothing fits, the smallest change that helps
    notes: tuple[str, ...]


class _Worst(NamedTuple):
    """The rank whose memory is fullest."""

    layout: str
    ledger_bytes: dict[str, int]
    peak_bytes: int
    room_bytes: int


def find_fit(request: Request, said: Callable[[str], None] = lambda _: None) -> Fit:
    """Whether ``request.model`` fits, and what else would; without a number of devices, on one node.

    ``said`` is told what is looked for. InputError: the request is wrong or contradicts itself.
    """
    question = Question.of(replace(request, num_devices=_devices(request)))
    said("looking for a layout that fits")
    problem = Problem.build(question.target, question.training, request.pins, request.memory_risk)
    found = problem.solved()
    if found.interrupted:  # there is more to ask than this search
        raise KeyboardInterrupt
    worst = _worst(found, problem)
    said("looking for the smallest number of GPUs")
    least = _least_devices(question, fits=found.best is not None)
    reason = change = ""
    if found.best is None:
        said("looking for the smallest change")
        can_share = least is not None and least <= question.training.global_batch_size
        error = no_plan(problem, found, least_devices=least if can_share else None)
        reason, change = error.message, error.hint
    said("looking for the largest micro-batch")
    micro = None if found.best is None else _largest_micro_batch(problem)
    said("looking for the longest sequence")
    longest = _longest_sequence(question, fits=found.best is not None)
    cluster, training = question.target.cluster, question.training
    return Fit(
        fits=found.best is not None,
        num_devices=cluster.num_devices,
        hardware=cluster.profile.name,
        seq_len=training.seq_len,
        global_batch_size=training.global_batch_size,
        **worst._asdict(),
        least_devices=least,
        longest_seq_len=longest,
        largest_micro_batch=micro,
        reason=reason,
        change=change,
        notes=question.notes,
    )


def _devices(request: Request) -> int | None:
    """What is asked for or counted by ``--hardware``, else those of one node."""
    if request.num_devices is not None:
        return request.num_devices
    try:
        return load_cluster(request.hardware, None, []).num_devices
    except HardwareError:
        return load_cluster(request.hardware, 1, []).profile.node.num_devices


def _worst(found: Outcome, problem: Problem) -> _Worst:
    """Of the best layout, or of the one that lacks least cut evenly, the rank that takes most of what it may."""
    priced = found.best
    if priced is None:
        assert found.closest is not None
        priced = at_its_smallest(problem.table, found.closest)
    ledger, room = max(
        zip(priced.ledgers, priced.capacity_bytes, strict=True), key=lambda pair: pair[0].total_bytes / pair[1]
    )
    named = {name.value: num_bytes for name, num_bytes in term_bytes(ledger).items()}
    return _Worst(layout_text(priced.layout), named, round(ledger.total_bytes), round(room))


def _fits(question: Question, num_devices: int) -> bool:
    """Whether anything fits on so many devices: of the batch, else of one with a sequence for each device."""
    training, request = question.training, question.request
    cluster = question.target.cluster.model_copy(update={"num_devices": num_devices})
    return any(
        something_fits(
            question.target,
            Attempt(cluster, replace(training, global_batch_size=batch), request.pins),
            request.memory_risk,
        )
        for batch in sorted({training.global_batch_size, max(training.global_batch_size, num_devices)})
    )


def _least_devices(question: Question, *, fits: bool) -> int | None:
    """The smallest number of devices on which something fits; that more devices never fit less is taken for granted."""
    cluster = question.target.cluster
    if cluster.mixed is not None:
        return None
    there_are, node = cluster.num_devices, cluster.profile.node.num_devices
    first, last = 1, there_are
    if not fits:
        first, most = there_are, cluster.profile.most_devices or MOST_DEVICES
        last = max(first, min(most, MOST_DEVICES, first * MOST_TIMES_THE_DEVICES))
    pins = question.request.pins
    unit = math.prod(degree or 1 for degree in (pins.tp, pins.pp, pins.cp, pins.dp))  # no other number can have them
    counts = sorted({-(-count // unit) * unit for count in counts_between(first, last, node)} | {first, last})
    found = _first_that([*counts[:-1]] if fits else [*counts[1:]], lambda count: _fits(question, count))
    if found is None:
        if not fits:
            return None
        found = there_are
    too_few = max((count for count in counts if count < found), default=0)
    nodes = [count for count in range((too_few // node + 1) * node, found, node) if count % unit == 0]
    found = _first_that(nodes, lambda count: _fits(question, count)) or found
    # of numbers that do not fill their nodes some have few layouts: one that fits may follow one that does not
    others = [count for count in range(max(too_few + 1, found - node + 1), found) if count % unit == 0]
    return next((count for count in others if _fits(question, count)), found)


def _first_that(values: Sequence[int], holds: Callable[[int], bool]) -> int | None:
    """The first of ``values`` for which something holds that then holds for all after it."""
    low, high = 0, len(values)
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if holds(values[middle]) else (middle + 1, high)
    return values[low] if low < len(values) else None


def _last_that(values: Sequence[int], holds: Callable[[int], bool]) -> int | None:
    """The last of ``values`` for which something holds that then holds for all before it."""
    place = _first_that(range(len(values)), lambda place: not holds(values[place]))
    num_holding = len(values) if place is None else place
    return values[num_holding - 1] if num_holding else None


class _SizeKey(NamedTuple):
    micro_batch_size: int


def _largest_micro_batch(problem: Problem) -> int | None:
    """Sequences of the largest micro-batch of any layout that fits."""
    layouts = problem.space.layouts
    sizes = sorted({key.micro_batch_size for key in layouts.by(_SizeKey)[0]}, reverse=True)

    def fits(size: int) -> bool:
        of_size = layouts.where(_SizeKey, lambda key: key.micro_batch_size == size)
        return search(problem.table, of_size, problem.solver, wanted=Wanted(any_will_do=True)).best is not None

    return next((size for size in sizes if fits(size)), None)


def _longest_sequence(question: Question, *, fits: bool) -> int | None:
    """Tokens of the longest sequence that fits, of those tried; the global batch keeps its number of sequences."""
    start = question.training.seq_len
    if start == 1:  # a model without sequences
        return None

    def holds(seq_len: int) -> bool:
        request = replace(question.request, seq_len=seq_len, global_batch_size=question.training.global_batch_size)
        try:
            longer = Question.of(request)
        except PlannerError:  # the model takes no such sequence
            return False
        return _fits(longer, longer.target.cluster.num_devices)

    if not fits:
        # From the shortest on: where that does not fit, states alone are too large.
        shorter = [start >> step for step in range(MOST_DOUBLINGS, 0, -1) if start >> step >= SHORTEST]
        if not shorter or not holds(shorter[0]):
            return None
        return _last_that(shorter, holds)
    doubled = [start << step for step in range(1, MOST_DOUBLINGS + 1)]
    longest = _last_that(doubled, holds) or start
    part = longest // STEPS_OF_A_DOUBLING
    between = [longest + step * part for step in range(1, STEPS_OF_A_DOUBLING)] if part else []
    return _last_that(between, holds) or longest
