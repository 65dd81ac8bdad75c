"""The stages in order, from what a user asks to a Plan: the page to read first, and the Python API.

request -> cluster, graph, training -> problem (placements, space, cost table) -> search -> plan
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from planner.api.fewer import Counted, idle_note, over_devices, solved_over_fewer, with_fewer
from planner.api.money import other_price, whole_run
from planner.api.nothing_fits import no_plan
from planner.api.robust import most_robust
from planner.api.runners_up import unlike_runners
from planner.api.within import pins_under, refusals, runnable, said_of, within_framework
from planner.errors import (
    HardwareError,
    InputError,
    ModelError,
    NoLayoutError,
    PlanError,
    TimeLimitError,
)
from planner.evaluation.evaluator import Evaluated
from planner.evaluation.shares import AnyEvaluator, evaluator_of
from planner.layout.deadline import Deadline, OutOfTimeError
from planner.layout.layout import NO_PINS, Pins, Training
from planner.plan.schema import CaseSection, Plan, SearchSection
from planner.pricing.decisions import decided
from planner.pricing.placements import Decision
from planner.pricing.table_builder import build_table
from planner.pricing.target import PricingTarget
from planner.problem import Problem, Solved, placement_solver, solved_by
from planner.report.timeline import StepTimeline, step_timeline
from planner.request import (
    DEFAULT_RISK,
    Request,
    alignment_notes,
    check_memory_risk,
    check_offload,
    check_precision,
    check_sizes,
    graph_of,
    load_cluster,
    load_planned_graph,
    target_of,
    training_of,
)
from planner.solver.preference import tie_share
from planner.solver.search import Outcome, Progress
from planner.table.keys import TensorSplit
from planner.translate import from_plan, to_plan

# What a run is made to give up first where its devices change: degrees that must divide another number now.
PINS_IN_THE_WAY = (
    "dp", "dp_replicate", "micro_batch", "virtual_stages", "schedule", "pp", "cp_method", "cp", "ep", "etp", "tp",
    "sequence_parallel", "zero", "recompute", "offload", "offload_activations",
)  # fmt: skip


@dataclass(frozen=True)
class Answer:
    """The plan and what was assumed on the way."""

    plan: Plan
    notes: tuple[str, ...]
    interrupted: bool


@dataclass(frozen=True)
class Question:
    """A request with all its words looked up, and what was assumed."""

    request: Request
    target: PricingTarget
    training: Training
    notes: tuple[str, ...]

    @staticmethod
    def of(request: Request) -> Question:
        """InputError: the request is wrong or contradicts itself."""
        notes: list[str] = []
        check_sizes(request)
        check_memory_risk(request.memory_risk)
        request = replace(request, pins=pins_under(request.framework, request.pins))
        cluster = load_cluster(request.hardware, request.num_devices, notes)
        check_precision(cluster, request.precision)
        check_offload(cluster, request.pins.offload, activations=request.pins.offload_activations)
        graph = graph_of(request, notes)
        notes += graph.warnings
        training = training_of(request, cluster, graph, notes)
        target = within_framework(target_of(graph, cluster, training.precision, request.framework, notes))
        notes += alignment_notes(target)
        return Question(request, target, training, (*notes, *said_of(target)))

    @staticmethod
    def in_time(request: Request) -> Question:
        """The same; TimeLimitError where the clock ended it."""
        try:
            return Question.of(request)
        except OutOfTimeError:
            raise TimeLimitError from None

    def run_by(self, framework: str) -> Question:
        """The same training as another framework runs it, over all devices; nothing more is assumed."""
        asked = replace(
            self.request, framework=framework, pins=pins_under(framework, self.request.pins), may_idle=False
        )
        whole = self.target
        target = target_of(whole.graph, whole.cluster, self.training.precision, framework, [])
        return replace(self, request=asked, target=within_framework(target), notes=())

    def over(self, num_devices: int) -> Question:
        """The same training over another number of devices of one kind; nothing more is assumed."""
        cluster = self.target.cluster.model_copy(update={"num_devices": num_devices})
        return replace(self, target=replace(self.target, cluster=cluster), notes=())


def find_plan(request: Request, progress: Progress | None = None, deadline: Deadline | None = None) -> Answer:
    """The fastest plan that fits, or the best by the deadline: ``request.time_limit_s`` from now, where none is given.

    InputError: the request is wrong or contradicts itself. InfeasibleError: nothing fits.
    TimeLimitError: nothing was found in time.
    """
    deadline = deadline or Deadline.answering_within(request.time_limit_s)
    return answer_of(Question.in_time(request), deadline, progress)


def answer_of(
    question: Question, deadline: Deadline, progress: Progress | None = None, *, brief: bool = False
) -> Answer:
    """The fastest plan that fits, or the best by the deadline; errors as of ``find_plan``.

    ``brief``: without runners-up, a plan with room, and a search for what would help where nothing fits.
    """
    request, target, notes = question.request, question.target, list(question.notes)
    try:
        solved = _solved(question, deadline, progress)
        counted = with_fewer(solved, deadline, progress) if request.may_idle else Counted(solved)
    except OutOfTimeError:
        raise TimeLimitError from None
    problem, outcome = counted.solved.problem, counted.solved.outcome
    if outcome.best is None:
        raise no_plan(problem, outcome, deadline, brief=brief)
    deadline.settle()
    baseline = problem.solved_baseline()
    cases: tuple[CaseSection, ...] = ()
    if request.robust:
        robust = most_robust(problem, outcome)
        outcome, cases = robust.outcome, robust.cases
        notes.append(robust.note)
    else:
        outcome = problem.preferred(outcome, baseline, request.prefer)
    outcome, roomier = runnable(outcome, problem.target, lambda found: described(problem, found)), None
    if brief:
        outcome = replace(outcome, ranking=() if outcome.best is None else (outcome.best,))
    else:
        outcome, roomier = with_room(problem, outcome, deadline, may_replace=not request.robust)
    plan = plan_of(problem, outcome, baseline, request.num_runners_up, roomier, deadline)
    plan = plan.model_copy(update={"search": plan.search and plan.search.model_copy(update={"cases": cases})})
    plan = over_devices(plan, counted, target.cluster.num_devices, target)
    run = None if request.num_tokens is None else whole_run(plan, request.num_tokens)
    if plan.idle_devices:
        notes.append(idle_note(plan))
    plan = plan.model_copy(update={"framework": request.framework, "run": run})
    return Answer(plan, tuple(notes), outcome.interrupted)


def _solved(question: Question, deadline: Deadline, progress: Progress | None) -> Solved:
    """The best over all devices, or where these cannot be shared out over the largest number that can."""
    request, target, training = question.request, question.target, question.training
    try:
        return solved_by(deadline, target, training, request.pins, request.memory_risk, progress)
    except NoLayoutError:
        if not request.may_idle or request.shares_over_all:
            raise
        found = solved_over_fewer(deadline, target, training, request.pins, request.memory_risk)
        if found is None:
            raise
        return found


def replan(plan: Plan, num_devices: int, hardware: str | None = None, fixed: Pins = NO_PINS) -> Answer:
    """A plan for the same run on another number of devices: model, global batch, sequences, precision, optimiser kept.

    So are memory risk and tokens, and the user's pins and ``fixed``, as far as any layout on ``num_devices`` can have
    them; what is dropped is said in the notes. Devices stay idle where fewer are faster, and where no layout has all of
    them. InputError and InfeasibleError as of a search.
    """
    pins = {**({} if plan.search is None else plan.search.pins), **fixed.given()}
    try:
        return _replanned(plan, num_devices, hardware, pins, over_all=True)
    except NoLayoutError:
        return _replanned(plan, num_devices, hardware, pins, over_all=False)


def _replanned(
    plan: Plan, num_devices: int, hardware: str | None, pins: Mapping[str, int | bool | str], *, over_all: bool
) -> Answer:
    """``over_all``: pins that no layout over all devices has are given up; otherwise those that none over fewer has."""
    kept, dropped, num_tokens = dict(pins), list[str](), None if plan.run is None else plan.run.num_tokens
    in_the_way = [name for name in PINS_IN_THE_WAY if name in pins]
    while True:
        try:
            request = same_run(plan, num_devices, hardware, kept)
            answer = find_plan(replace(request, may_idle=True, shares_over_all=over_all, num_tokens=num_tokens))
            break
        except (HardwareError, ModelError, PlanError):
            raise
        except InputError:
            if not in_the_way:
                raise
            name = in_the_way.pop(0)
            dropped.append(f"{name}={kept.pop(name)}")
    note = f"no layout on {num_devices} GPUs has {', '.join(dropped)}: chosen anew"
    return replace(answer, notes=(*answer.notes, note)) if dropped else answer


def same_run(plan: Plan, num_devices: int, hardware: str | None, given: Mapping[str, int | bool | str]) -> Request:
    """The request whose answer would train what ``plan`` does, at its memory risk, with these pins.

    PlanError where they are none.
    """
    training = plan.training
    try:
        pins = Pins.of(given)
    except (TypeError, ValueError) as error:
        raise PlanError(f"search.pins is not what a search writes: {error}", hint="search again") from error
    return Request(
        model=plan.model.source,
        planned=plan.model,
        num_devices=num_devices,
        hardware=hardware or plan.made_on,
        seq_len=training.seq_len,
        global_batch_size=training.global_batch_size,
        precision=training.precision,
        optimizer=training.optimizer,
        pins=pins,
        framework=plan.framework,
        memory_risk=DEFAULT_RISK if plan.search is None else plan.search.memory_risk,
        may_idle=False,
    )


def with_room(
    problem: Problem, outcome: Outcome, deadline: Deadline, *, may_replace: bool = True
) -> tuple[Outcome, Evaluated | None]:
    """``outcome`` and its roomier layout: its best where that is faster, as may be where cuts were not all tried."""
    roomier = problem.roomier(outcome, deadline)
    if roomier is None or roomier.step_time_s >= outcome.ranking[0].step_time_s:
        return outcome, roomier
    if outcome.is_exhausted or not may_replace or refusals(described(problem, roomier), problem.target):
        return outcome, roomier
    best = problem.exactly(roomier)  # with all of the memory to take
    others = [each for each in outcome.ranking if each.layout != best.layout]
    return replace(outcome, best=best, ranking=(best, *others)), None


def plan_of(
    problem: Problem,
    outcome: Outcome,
    baseline: Outcome,
    num_runners_up: int | None,
    roomier: Evaluated | None,
    deadline: Deadline,
) -> Plan:
    """The plan of the best layout; beside it runners-up unlike each other, plain FSDP, and one with more memory free.

    ``deadline`` says how many seconds the answer took so far.
    """
    assert outcome.best is not None
    target, best = problem.target, problem.exactly(outcome.best)
    runners = unlike_runners(problem, outcome, num_runners_up, deadline)
    reference = problem.closest_baseline(baseline)
    is_proved = outcome.is_exhausted and problem.placements_are_proved and problem.lower_bound_s >= best.step_time_s
    fastest = best if outcome.ranking[0].layout == best.layout else problem.exactly(outcome.ranking[0])
    bound = min(best.step_time_s, fastest.step_time_s if is_proved else outcome.bound_s, problem.lower_bound_s)
    return described(problem, best).model_copy(
        update={
            "search": SearchSection(
                status="OPTIMAL" if is_proved else "FEASIBLE",
                bound_step_time_s=bound,
                gap=(best.step_time_s - bound) / best.step_time_s,
                num_candidates=outcome.num_candidates,
                elapsed_s=deadline.elapsed_s,
                memory_risk=problem.memory_risk,
                error_between_layouts=problem.table.framework.error_between_layouts,
                pins=problem.space.pins.given(),
                preferred_within=0.0 if fastest is best else tie_share(problem.table),
                baseline=None if reference is None else to_plan.candidate("plain FSDP", reference, target),
                runners_up=tuple(to_plan.candidate(f"#{i + 2}", found, target) for i, found in enumerate(runners)),
                roomier=None if roomier is None else to_plan.candidate("with room", roomier, target),
            )
        }
    )


def described(problem: Problem, found: Evaluated) -> Plan:
    """``found`` as a Plan without a search section."""
    layout = found.layout
    decision = problem.decisions[TensorSplit(layout.mesh.tp, layout.sequence_parallel, layout.mesh.etp)]
    return to_plan.described(found, problem.target, problem.space.training, decision)


@dataclass(frozen=True)
class PlannedLayout:
    """An existing plan as the numbers of the search, and what was assumed on the way."""

    evaluator: AnyEvaluator
    starts: tuple[int, ...]
    target: PricingTarget
    training: Training
    decision: Decision
    framework: str
    notes: tuple[str, ...]

    def on(self, target: PricingTarget) -> Evaluated:
        """The same layout, cut and placements priced on another cluster."""
        layout = self.evaluator.layout
        split = TensorSplit(layout.mesh.tp, layout.sequence_parallel, layout.mesh.etp)
        table = build_table(target, self.training, {split: self.decision}, layout.parts)
        return evaluator_of(table, layout, self.evaluator.modes).evaluate(self.starts, exact=True)


def planned_layout(
    plan: Plan, hardware: str | None, num_devices: int | None, framework: str | None = None
) -> PlannedLayout:
    """``plan`` on its own or on other hardware; PlanError where it cannot be priced."""
    notes: list[str] = []
    section = plan.training
    layout = from_plan.layout_of(plan, num_devices or plan.num_devices)
    cluster = load_cluster(hardware or plan.made_on, layout.mesh.world_size, notes)
    if hardware is None and plan.hardware_profile is not None:
        notes.append(f"{plan.hardware} is as the plan carries it; --hardware FILE takes another")
    if hardware is None:
        price = cluster.profile.device.usd_per_hour
        notes.extend(other_price(plan, None if price is None else price.value))
    from_plan.check_shares(plan, cluster)
    if layout.groups and not layout.shares and not from_plan.lies_on(layout, cluster):
        notes.append(f"priced as if all devices were alike: {cluster.profile.name} has not the groups of the plan")
        layout = layout._replace(groups=())
    check_precision(cluster, section.precision)
    check_offload(cluster, layout.offload, activations=layout.offloads_activations)
    graph = load_planned_graph(plan.model, section.seq_len, section.precision, notes)
    from_plan.check_priceable(plan, graph)
    notes.extend(from_plan.unknown_modules(plan, graph))
    training = Training(section.global_batch_size, section.seq_len, section.precision, section.optimizer)
    framework = framework or plan.framework
    target = within_framework(target_of(graph, cluster, section.precision, framework, notes))
    beyond = refusals(plan, target)
    if beyond:
        notes.append(f"{framework} itself cannot run this plan: {'; '.join(each.reason for each in beyond)}")
    split = TensorSplit(layout.mesh.tp, layout.sequence_parallel, layout.mesh.etp)
    decision = decided(target, split, from_plan.placements_of(plan, graph), placement_solver().solve_placement)
    if decision is None:
        raise PlanError(
            f"placements: those of this plan cannot run with tp={layout.mesh.tp} on {graph.source}",
            hint="search for a new plan: planner search MODEL -o plan.json",
        )
    table = build_table(target, training, {split: decision}, layout.parts)
    starts = from_plan.starts_of(plan, graph)
    evaluator = evaluator_of(table, layout, from_plan.modes_of(plan, graph))
    return PlannedLayout(evaluator, starts, target, training, decision, framework, tuple(notes))


def price_plan(
    plan: Plan, hardware: str | None = None, num_devices: int | None = None, framework: str | None = None
) -> Answer:
    """Prices an existing plan again, on other hardware or with another data-parallel degree, without searching."""
    planned = planned_layout(plan, hardware, num_devices, framework)
    found, notes = planned.evaluator.evaluate(planned.starts, exact=True), planned.notes
    if not found.fits:
        worst = "fullest node" if found.fits_devices else "worst GPU"
        notes += (f"this plan does not fit: its {worst} needs more memory than there is",)
    again = priced_again(plan, planned, found)
    return Answer(again.model_copy(update={"search": None}), notes, interrupted=False)


def priced_again(plan: Plan, planned: PlannedLayout, found: Evaluated) -> Plan:
    """``plan`` as it was priced: on another cluster, with another data-parallel degree or as another framework.

    The run that it tells of is that of the new prices; devices are left idle only where they are those of the plan.
    """
    target = planned.target
    prediction = to_plan.prediction_section(found, target, planned.training)
    is_there = (plan.hardware, plan.num_devices) == (target.cluster.profile.name, target.cluster.num_devices)
    update: dict[str, object] = {
        "warnings": to_plan.warnings_again(plan.warnings, found, prediction, target.cluster),
        "hardware": target.cluster.profile.name,
        "hardware_profile": to_plan.kept(target.cluster),
        "idle_devices": plan.idle_devices if is_there else 0,
        "framework": planned.framework,
        "num_devices": target.cluster.num_devices,
        "mesh": to_plan.mesh_section(found.layout),
        "pipeline": to_plan.pipeline_section(found, target.graph, target.cluster),
        "prediction": prediction,
    }
    again = plan.model_copy(update=update)
    return again if plan.run is None else again.model_copy(update={"run": whole_run(again, plan.run.num_tokens)})


def schedule_plan(
    plan: Plan, hardware: str | None = None, num_devices: int | None = None
) -> tuple[StepTimeline, tuple[str, ...]]:
    """The predicted step of an existing plan, action by action, and what was assumed on the way.

    It ends when the predicted step time does.
    """
    planned = planned_layout(plan, hardware, num_devices)
    return step_timeline(planned.evaluator, planned.starts), planned.notes
