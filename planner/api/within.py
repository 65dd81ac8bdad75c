"""What a training framework can run: the layouts that are searched for it, and what is against a plan."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import cache
from itertools import accumulate
from typing import TYPE_CHECKING

from costmodels.vocabulary.choices import Offload
from costmodels.vocabulary.schedules import ScheduleName
from planner.errors import NoLayoutError
from planner.evaluation.evaluator import Evaluated
from planner.formats.settings import Layout, layout_of, stack_of
from planner.layout.layout import Pins, Training
from planner.layout.within import Against, Choice, Within
from planner.model_file import family_config_of
from planner.plan.schema import Plan
from planner.pricing.target import PricingTarget
from planner.request import DEFAULT_FRAMEWORK as OURS
from planner.solver.search import Outcome

if TYPE_CHECKING:
    from planner.formats.frameworks import ModelFacts, Rules
    from planner.formats.target import Abilities, Refusal


def _rules_of(framework: str) -> Rules | None:
    """As ``formats.frameworks`` says; the formats of other frameworks take time to import, which ours does not need."""
    if framework == OURS:
        return None
    from planner.formats.frameworks import rules_of

    return rules_of(framework)


def model_facts(target: PricingTarget) -> ModelFacts:
    """What rules look at of the model of ``target``, as far as its source tells."""
    from planner.formats.frameworks import ModelFacts

    source = target.graph.source
    return ModelFacts.of(source, family_config_of(source), target.cluster.devices_per_node)


def refusals(plan: Plan, target: PricingTarget) -> list[Refusal]:
    """What of ``plan`` the framework of ``target`` cannot run; empty where it can, or where nothing is known of it."""
    rules = _rules_of(target.framework_name)
    return [] if rules is None else rules.refusals(model_facts(target).with_layout(layout_of(plan)))


def pins_under(framework: str, pins: Pins) -> Pins:
    """``pins`` with what the framework does always: a place for optimiser states, where that is not the devices."""
    rules = _rules_of(framework)
    if rules is None or pins.offload is not None or Offload.NONE in rules.abilities.offloads:
        return pins
    return replace(pins, offload=rules.abilities.offloads[0])


def within_framework(target: PricingTarget) -> PricingTarget:
    """``target`` with the layouts that its framework can run; all where that is ours, or its rules are not known."""
    rules, framework = _rules_of(target.framework_name), target.framework_name
    if rules is None:
        return target
    can, model = rules.abilities, model_facts(target)
    has_stack = stack_of([unit.modules for unit in target.graph.units]) is not None
    cut = _own_cut(rules, model, target)

    def against(choice: Choice, training: Training) -> tuple[Against, ...]:
        asked = model.with_layout(_settings(choice, training, can))
        found = _said(rules.refusals_uncut(asked, has_blocks=has_stack))
        if cut is not None and choice.mesh.pp > 1 and not found and cut(choice.mesh.pp) is None:
            found.append(Against(f"it cuts this model by itself, and not into {choice.mesh.pp} stages", "pin --pp 1"))
        return tuple(found)

    def against_rounds(pp: int, num_microbatches: int) -> tuple[Against, ...]:
        return tuple(_said(rules.refusals_of_rounds(pp, num_microbatches)))

    return replace(target, within=Within(framework, against, against_rounds, can.schedules, can.recompute, cut))


def _said(refused: Iterable[Refusal]) -> list[Against]:
    return [Against(each.reason, each.way_out) for each in refused]


def said_of(target: PricingTarget) -> tuple[str, ...]:
    """What a search says of the framework that it is for; nothing of ours."""
    framework, rules = target.framework_name, _rules_of(target.framework_name)
    if framework == OURS:
        return ()
    if rules is None:
        return (f"what {framework} can run is not known here: all layouts are searched",)
    return (f"searched within what {framework} can run ({rules.source})",)


def runnable(outcome: Outcome, target: PricingTarget, described: Callable[[Evaluated], Plan]) -> Outcome:
    """``outcome`` from its first layout on that the framework can run with the stages that were chosen for it.

    NoLayoutError where it can run none of those that fit.
    """
    if target.within is None:
        return outcome
    assert outcome.best is not None
    known = [outcome.best, *(each for each in outcome.ranking if each is not outcome.best)]
    first = next((each for each in known if not refusals(described(each), target)), None)
    if first is None:
        reasons = "; ".join(each.reason for each in refusals(described(outcome.best), target))
        raise NoLayoutError(
            f"of the {len(known)} fastest layouts that fit, {target.framework_name} can run none: {reasons}",
            hint="pin --pp 1, or take another framework",
        )
    if first is outcome.best:
        return outcome
    slower = (each for each in known if each.step_time_s >= first.step_time_s and each is not first)
    return replace(outcome, best=first, ranking=(first, *slower), is_exhausted=False)


def _own_cut(rules: Rules, model: ModelFacts, target: PricingTarget) -> Callable[[int], tuple[int, ...] | None] | None:
    """The first unit of each of so many stages, as the framework cuts; None where it cuts as it is told."""
    own, shape = rules.cut, model.shape
    if own is None:
        return None
    units = [index for index, unit in enumerate(target.graph.units) if unit.is_block]

    @cache
    def cut(num_stages: int) -> tuple[int, ...] | None:
        blocks = None if shape is None else own(shape, num_stages)
        if blocks is None or sum(blocks) != len(units) or min(blocks) == 0:
            return None
        return (0, *(units[before] for before in accumulate(blocks[:-1])))

    return cut


def _settings(choice: Choice, training: Training, can: Abilities) -> Layout:
    """``choice`` in the words of configs; of what it does not say, what says least and the framework ``can`` run."""
    mesh = choice.mesh
    return Layout(
        num_devices=mesh.world_size, pp=mesh.pp, dp_replicate=mesh.dp_replicate, dp_shard=mesh.dp_shard, cp=mesh.cp,
        tp=mesh.tp, ep=mesh.ep, zero_stage=choice.zero_stage if mesh.dp_shard * mesh.cp > 1 else 0,
        micro_batch_size=1, num_microbatches=mesh.pp, global_batch_size=training.global_batch_size,
        seq_len=training.seq_len, precision=training.precision, optimizer=training.optimizer,
        schedule=can.schedules[0] if can.schedules else ScheduleName.ONE_F_ONE_B, virtual_stages=1, stage_blocks=None,
        recompute=can.recompute[0],
        sequence_parallel=choice.sequence_parallel, offload=choice.offload, cp_method=choice.cp_method, etp=mesh.etp,
        offloads_activations=choice.offloads_activations,
    )  # fmt: skip
