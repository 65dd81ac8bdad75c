"""Several numbers of devices side by side: the Pareto front of step time, devices, memory and dollars."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from planner.api import Answer, Question, answer_of
from planner.api.money import check_price
from planner.errors import InfeasibleError, InputError, NoLayoutError, PinsError, PlannerError, TimeLimitError
from planner.layout.deadline import Deadline, OutOfTimeError
from planner.plan.schema import Plan
from planner.request import Request

# Called before each number of devices with that number, and after it with its plan.
Progress = Callable[[int, Plan | None], None]


@dataclass(frozen=True)
class Front:
    """``plans``: those that no other is as good as in everything and better in something, by devices ascending.

    ``dominated``: numbers of devices whose plan is none of these; ``refused``: those without a plan, and why.
    """

    plans: tuple[Plan, ...]
    chosen: Plan
    dominated: tuple[int, ...]
    refused: tuple[tuple[int, str], ...]
    notes: tuple[str, ...]
    interrupted: bool
    num_devices: int  # of the largest number that was asked for


def find_front(
    request: Request,
    first: int,
    *,
    by_cost: bool = False,
    progress: Progress | None = None,
    deadline: Deadline | None = None,
) -> Front:
    """The best plan of each number of devices from ``first`` to ``request.num_devices`` that is worth a look.

    The global batch is the same for all: where none is asked for, the default of the largest. The fastest plan is
    chosen, or with ``by_cost`` the cheapest. What Ctrl-C or the deadline leaves is the front of what was found.
    InfeasibleError where nothing fits anywhere, PinsError where no number can have the pins, InputError where a range
    or a cost makes no sense.
    """
    deadline = deadline or Deadline.answering_within(request.time_limit_s)
    question = Question.in_time(replace(request, may_idle=False))
    cluster = question.target.cluster
    _check_range(first, question)
    if by_cost:
        check_price(cluster.profile.device.usd_per_hour, cluster.profile.name)
    counts = counts_between(first, cluster.num_devices, cluster.profile.node.num_devices)
    walk = _Walk(question, deadline, progress)
    walk.over(counts if by_cost else counts[::-1])
    return walk.front(by_cost=by_cost)


def cheapest_plan(request: Request, progress: Progress | None = None, deadline: Deadline | None = None) -> Answer:
    """The plan whose step costs least over any number of devices up to those there are; the rest stays idle."""
    front = find_front(request, 1, by_cost=True, progress=progress, deadline=deadline)
    there_are = front.num_devices
    plan = front.chosen.model_copy(update={"idle_devices": there_are - front.chosen.num_devices})
    fastest = min(front.plans, key=_step_s)
    notes = list(front.notes)
    if fastest is not front.chosen:
        notes.append(
            f"a step is cheapest on {plan.num_devices} of {there_are} GPUs: the fastest plan found takes "
            f"{_step_s(fastest) / _step_s(plan):.1%} of the time and costs {_usd(fastest) / _usd(plan) - 1:.1%} more"
        )
    return Answer(plan, tuple(notes), front.interrupted)


def counts_between(first: int, last: int, devices_per_node: int) -> tuple[int, ...]:
    """Numbers of devices of a range that are worth a look, ascending: both ends, and powers of two and half as many
    again, in whole nodes where they are more than one.
    """
    found = {first, last}
    power = 1
    while power <= last:
        found.update(
            n
            for n in (power, power * 3 // 2)
            if first < n < last and (n <= devices_per_node or n % devices_per_node == 0)
        )
        power *= 2
    return tuple(sorted(found))


def _check_range(first: int, question: Question) -> None:
    cluster = question.target.cluster
    if not 1 <= first <= cluster.num_devices:
        raise InputError(
            f"the range of GPUs {first}..{cluster.num_devices} is empty", hint="give --gpus A..B with A up to B"
        )
    if cluster.mixed is not None:
        raise InputError(
            f"{cluster.mixed.name} has {cluster.num_devices} devices of several kinds: which of them fewer would be is "
            "not said",
            hint="name one kind of devices, or drop the range and --objective cost",
        )


class _Walk:
    """Plans of several numbers of devices, one search after the other."""

    def __init__(self, question: Question, deadline: Deadline, progress: Progress | None) -> None:
        self._question, self._deadline, self._progress = question, deadline, progress
        self._plans: list[Plan] = []
        self._errors: list[tuple[int, PlannerError]] = []
        self._interrupted = False

    def over(self, counts: tuple[int, ...]) -> None:
        """Searches each number; the first Ctrl-C after a plan ends the walk, and so does the deadline."""
        for count in counts:
            if self._plans and (self._interrupted or self._deadline.is_over()):
                return
            try:
                self._deadline.resume()
                self._over(count)
            except (InfeasibleError, NoLayoutError, PinsError) as error:
                self._errors.append((count, error))
            except (TimeLimitError, OutOfTimeError):
                if not self._plans:
                    raise TimeLimitError from None
            except KeyboardInterrupt:
                if not self._plans:
                    raise
                self._interrupted = True

    def _over(self, count: int) -> None:
        if self._progress is not None:
            self._progress(count, None)
        answer = answer_of(self._question.over(count), self._deadline)
        self._plans.append(answer.plan)
        self._interrupted = answer.interrupted
        if self._progress is not None:
            self._progress(count, answer.plan)

    def front(self, *, by_cost: bool) -> Front:
        """What was found; the error of the largest number where nothing was, of those that can have the pins."""
        self._deadline.settle()
        if not self._plans:
            raise max(self._errors, key=lambda pair: (not isinstance(pair[1], PinsError), pair[0]))[1]
        plans = sorted(self._plans, key=lambda plan: plan.num_devices)
        best = [plan for plan in plans if not any(_dominates(other, plan) for other in plans)]
        return Front(
            plans=tuple(best),
            chosen=min(best, key=_usd if by_cost else _step_s),
            dominated=tuple(plan.num_devices for plan in plans if plan not in best),
            refused=tuple((count, _why(error)) for count, error in sorted(self._errors, key=_count)),
            notes=self._question.notes,
            interrupted=self._interrupted,
            num_devices=self._question.target.cluster.num_devices,
        )


def _count(pair: tuple[int, PlannerError]) -> int:
    return pair[0]


def _why(error: PlannerError) -> str:
    return "; ".join(error.violations) if isinstance(error, PinsError) else error.message.partition("\n")[0]


def _dominates(one: Plan, other: Plan) -> bool:
    """Whether ``one`` is nowhere worse than ``other`` and somewhere better."""
    ours, theirs = _measures(one), _measures(other)
    return ours != theirs and all(a <= b for a, b in zip(ours, theirs, strict=True))


def _measures(plan: Plan) -> tuple[float, ...]:
    """Step time, devices, memory of the fullest and dollars: of each less is better."""
    assert plan.prediction is not None
    return _step_s(plan), plan.num_devices, max(plan.prediction.peak_memory_bytes), _usd(plan)


def _step_s(plan: Plan) -> float:
    assert plan.prediction is not None
    return plan.prediction.step_time_s


def _usd(plan: Plan) -> float:
    """Dollars of a step; 0 where the profile has no price."""
    assert plan.prediction is not None
    return plan.prediction.usd_per_step or 0.0
