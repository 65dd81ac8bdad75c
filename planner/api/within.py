"""The best plan that a training framework can run: searched within its rules, priced by its recipe."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import accumulate

from costmodels.vocabulary.choices import Offload, Recompute
from costmodels.vocabulary.schedules import ScheduleName
from planner.api import MORE_TIME, Answer, Question, described, plan_of
from planner.errors import InfeasibleError, NoLayoutError, TimeLimitError
from planner.evaluation.evaluator import Evaluated, Evaluator
from planner.formats.frameworks import RULES, ModelFacts, Rules
from planner.formats.settings import Layout, layout_of
from planner.formats.target import Refusal
from planner.layout.columns import key_of
from planner.layout.deadline import Deadline
from planner.layout.layout import Training
from planner.layout.within import Choice, Within
from planner.plan.schema import Plan
from planner.problem import Problem, at_its_smallest, solved_by
from planner.request import check_offload, target_of
from planner.solver.search import Outcome
from planner.translate.infeasible import binding_text, lacking_bytes


def refusals(framework: str, plan: Plan, model: ModelFacts) -> list[Refusal]:
    """What of ``plan`` the framework cannot run; empty where it can, or where nothing is known of it."""
    rules = RULES.get(framework)
    return [] if rules is None else rules.refusals(model.with_layout(layout_of(plan)))


def within_framework(question: Question, framework: str, model: ModelFacts) -> Question:
    """``question`` as asked of ``framework``: with its recipe and its layouts, over all devices.

    Where it always offloads, that is pinned.
    """
    notes: list[str] = []
    cluster, training, request = question.target.cluster, question.training, question.request
    target = target_of(question.target.graph, cluster, training.precision, framework, notes)
    rules = RULES.get(framework)
    pins = request.pins
    if rules is not None:
        can = rules.abilities
        if pins.offload is None and Offload.NONE not in can.offloads:
            pins = replace(pins, offload=can.offloads[0])
        target = replace(target, within=_within(framework, rules, question, model))
    request = replace(request, framework=framework, pins=pins, may_idle=False)
    return replace(question, request=request, target=target, notes=())


def best_within(question: Question, model: ModelFacts, deadline: Deadline) -> Answer:
    """The fastest plan of ``within_framework`` that fits, with the stages that the framework cuts.

    HardwareError, NoLayoutError, InfeasibleError and TimeLimitError where there is none.
    OutOfTimeError: the deadline came before.
    """
    request, target, training = question.request, question.target, question.training
    check_offload(target.cluster, request.pins.offload, activations=request.pins.offload_activations)
    solved = solved_by(deadline, target, training, request.pins, request.memory_risk)
    problem, outcome = solved.problem, solved.outcome
    if outcome.best is None:
        raise _nothing(problem, outcome)
    baseline = problem.solved_baseline()
    outcome = problem.preferred(outcome, baseline, request.prefer)
    chosen = _chosen(problem, outcome, request.framework, model)
    is_best = chosen is outcome.best
    only = replace(outcome, best=chosen, ranking=(chosen,), is_exhausted=outcome.is_exhausted and is_best)
    plan = plan_of(problem, only, baseline, None, None, deadline)
    return Answer(plan.model_copy(update={"framework": request.framework}), (), outcome.interrupted)


def _nothing(problem: Problem, outcome: Outcome) -> InfeasibleError | TimeLimitError:
    """Why nothing was found. What would help takes a search for each of many changes: it is left to `planner fit`."""
    if not outcome.is_exhausted or outcome.closest is None:
        return TimeLimitError("no plan was found in time", hint=MORE_TIME)
    closest = at_its_smallest(problem.table, outcome.closest)
    layouts = f"{outcome.num_candidates} layouts"
    text = binding_text(problem.target.cluster, closest, layouts, problem.memory_risk)
    return InfeasibleError(text, hint="planner fit says what would fit", lacks_bytes=lacking_bytes(closest))


def _chosen(problem: Problem, outcome: Outcome, framework: str, model: ModelFacts) -> Evaluated:
    """The fastest of the layouts known that the framework can run, once its stages are cut as it cuts them."""
    assert outcome.best is not None
    rules = RULES.get(framework)
    if rules is None:
        return outcome.best
    known = [outcome.best, *(each for each in outcome.ranking if each is not outcome.best)]
    if rules.cut is not None:
        cut = (_cut(problem, each, rules, model) for each in known)
        known = sorted((each for each in cut if each is not None and each.fits), key=lambda each: each.step_time_s)
    for each in known:
        if not refusals(framework, described(problem, each), model):
            return each
    raise NoLayoutError(
        f"of the {len(outcome.ranking)} fastest layouts that fit, {framework} can run none with its own stages",
        hint="pin --pp 1, or take another framework",
    )


def _cut(problem: Problem, found: Evaluated, rules: Rules, model: ModelFacts) -> Evaluated | None:
    """``found`` with the framework's own stages; None where it has none for them."""
    assert rules.cut is not None
    layout = found.layout
    if layout.mesh.pp == 1:
        return found
    asked = _settings(key_of(Choice, layout), problem.space.training)
    blocks = rules.cut(model.with_layout(replace(asked, virtual_stages=layout.virtual_stages)))
    units = [index for index, unit in enumerate(problem.target.graph.units) if unit.is_block]
    if blocks is None or sum(blocks) != len(units) or min(blocks) == 0:
        return None
    starts = (0, *(units[before] for before in accumulate(blocks[:-1])))
    return Evaluator(problem.table, layout, found.modes).evaluate(starts, exact=True)


def _within(framework: str, rules: Rules, question: Question, model: ModelFacts) -> Within:
    can, training = rules.abilities, question.training
    has_blocks = any(unit.is_block for unit in question.target.graph.units)
    against: Counter[str] = Counter()
    num_asked = 0

    def allows(choice: Choice) -> bool:
        nonlocal num_asked
        if choice.mesh.etp not in (None, choice.mesh.tp):  # no config of a framework says it as yet
            return False
        asked = _settings(choice, training)
        if can.schedules:
            asked = replace(asked, schedule=can.schedules[0])
        asked = replace(asked, recompute=can.recompute[0])
        found = {each.reason for each in rules.refusals_uncut(model.with_layout(asked), has_blocks=has_blocks)}
        num_asked += 1
        against.update(found)
        return not found

    def why() -> str:
        of_all = [reason for reason, count in against.items() if count == num_asked]
        return "; ".join(of_all or [f"{reason}, and the like" for reason, _ in against.most_common(1)])

    return Within(framework, allows, frozenset(can.schedules), can.recompute, why)


def _settings(choice: Choice, training: Training) -> Layout:
    """``choice`` in the words of configs; of what it does not say, what says least."""
    mesh = choice.mesh
    return Layout(
        num_devices=mesh.world_size, pp=mesh.pp, dp_replicate=mesh.dp_replicate, dp_shard=mesh.dp_shard, cp=mesh.cp,
        tp=mesh.tp, ep=mesh.ep, zero_stage=choice.zero_stage if mesh.dp_shard * mesh.cp > 1 else 0,
        micro_batch_size=training.global_batch_size // (mesh.dp * choice.num_microbatches),
        num_microbatches=choice.num_microbatches, global_batch_size=training.global_batch_size,
        seq_len=training.seq_len, precision=training.precision, optimizer=training.optimizer,
        schedule=ScheduleName.ONE_F_ONE_B, virtual_stages=1, stage_blocks=None, recompute=Recompute.NONE,
        sequence_parallel=choice.sequence_parallel, offload=choice.offload, cp_method=choice.cp_method,
    )  # fmt: skip
