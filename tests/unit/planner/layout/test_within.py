"""What a framework can run of many layouts: as if each was asked about, in far fewer questions."""

import random
from dataclasses import replace

import numpy as np
import pytest

from costmodels.vocabulary.choices import Optimizer, Precision, Recompute
from costmodels.vocabulary.schedules import ScheduleName
from planner.api.within import model_facts, within_framework
from planner.formats import settings
from planner.formats.frameworks import RULES
from planner.formats.target import Refusal
from planner.layout.columns import Columns
from planner.layout.layout import Layout, Training
from planner.layout.within import Choice, Within
from planner.pricing.target import PricingTarget
from tests.planning import problem_of

TRAINING = Training(64, 128, Precision.BF16, Optimizer.ADAMW)


def target_of(framework: str, model: str = "llama-tiny") -> tuple[PricingTarget, Columns[Layout]]:
    """And some of the layouts of a search."""
    problem = problem_of(model, 8, batch=64, seq_len=128)
    layouts = problem.space.layouts
    places = random.Random(5).sample(range(len(layouts)), 800)
    return replace(problem.target, framework_name=framework), layouts.take(np.array(places))


def within_of(target: PricingTarget) -> Within:
    within = within_framework(target).within
    assert within is not None
    return within


def test_a_choice_is_asked_about_once_whatever_its_micro_batches() -> None:
    target, layouts = target_of("torchtitan")
    within, asked = within_of(target), list[Choice]()

    def against(choice: Choice, training: Training):
        asked.append(choice)
        return within.against(choice, training)

    found = replace(within, against=against).of(layouts, TRAINING)
    assert found
    schedule = within.schedules[0]
    alike = {
        each._replace(num_microbatches=1, micro_batch_size=1, schedule=schedule, virtual_stages=1, recompute=None)
        for each in layouts
    }
    assert len(asked) <= len(alike)
    assert len({each.num_microbatches for each in found}) > 2


@pytest.mark.parametrize("framework", RULES)
@pytest.mark.parametrize("model", ["llama-tiny", "moe-tiny"])
def test_what_is_left_is_what_the_rules_say_of_every_layout_by_itself(framework: str, model: str) -> None:
    """Each is asked about alone, with its own number of micro-batches, against all at once."""
    target, layouts = target_of(framework, model)
    within, kept = within_of(target), set[Layout]()
    for layout in layouts:
        if layout.mesh.pp > 1 and layout.schedule not in within.schedules:
            continue
        rounds = RULES[framework].refusals_of_rounds(layout.mesh.pp, layout.num_microbatches)
        choice = Choice(
            layout.mesh, layout.zero_stage, layout.sequence_parallel, layout.offload, layout.cp_method,
            layout.offloads_activations,
        )  # fmt: skip
        if not within.against(choice, TRAINING) and not rounds:
            modes = within.recompute if layout.recompute is None else {layout.recompute} & {*within.recompute}
            kept |= {layout._replace(recompute=mode) for mode in modes}
    assert set(within.of(layouts, TRAINING)) == kept


@pytest.mark.parametrize("framework", RULES)
def test_no_rule_but_that_of_rounds_looks_at_micro_batches(framework: str) -> None:
    """Otherwise ``Choice`` would have to say how many there are."""
    target, layouts = target_of(framework, "moe-tiny")
    model, rules = model_facts(target), RULES[framework]
    for choice in layouts.by(Choice)[0]:
        mesh, found = choice.mesh, list[set[Refusal]]()
        for number, size in ((1, 64), (2, 1), (3, 5), (7, 2)):
            one = settings.Layout(
                mesh.world_size, mesh.pp, mesh.dp_replicate, mesh.dp_shard, mesh.cp, mesh.tp, mesh.ep,
                choice.zero_stage, size, number, 64, 128, Precision.BF16, Optimizer.ADAMW, ScheduleName.ONE_F_ONE_B, 1,
                None, Recompute.NONE, choice.sequence_parallel, choice.offload, choice.cp_method, mesh.etp,
            )  # fmt: skip
            refused = rules.refusals_uncut(model.with_layout(one), has_blocks=True)
            found.append({*refused} - {*rules.refusals_of_rounds(mesh.pp, number)})
        assert all(each == found[0] for each in found)
