"""What data parallelism sends once a step, and what of it runs beside compute."""

import numpy as np
import pytest

from costmodels.overlap import Overlap
from costmodels.vocabulary.choices import Precision, Recompute
from hardware_profiles.schema import ClusterSpec
from planner.evaluation.once_a_step import Collected, Passes, once_a_step_s
from planner.layout.layout import Pins
from planner.pricing.facts import framework_facts
from planner.pricing.target import PricingTarget
from planner.pricing.what_if import Change, changed
from planner.problem import Problem
from tests.planning import A100, cluster_of, graph_of, training_of
from tests.unit.planner.pricing.test_recipe_facts import choice_of

# Of 2 s of compute half hides, at no loss.
PASSES = Passes(2.0, 2.0, Overlap(0.5, 0.0))
NO_REPLICAS = Collected(3.0, 0.25, 1.5, 0.125, replicas_s=0.0, first_replicas_s=0.0)


@pytest.mark.parametrize(
    ("hardware", "precision", "zero", "expected"),
    [
        (A100, Precision.FP32, 0, 3.0 - 1.0),
        (A100, Precision.BF16, 0, 3.0 - 1.0),
        (A100, Precision.FP32, 1, 3.0 - 1.0 + 1.5 - 1.0),
        ("cpu-gloo", Precision.FP32, 0, 3.0 - 1.0),  # left whole, and reduced by itself
        ("cpu-gloo", Precision.BF16, 0, 3.0),  # FSDP2 waits for its collectives where there are no streams
        ("cpu-gloo", Precision.FP32, 1, 3.0 + 1.5),
        # What every micro-batch moves: the first unit's share alone, and nothing where the passes count all of it.
        (A100, Precision.BF16, 2, 0.25 + 1.5 - 1.0),
        (A100, Precision.BF16, 3, 0.25 + 0.125),
        ("cpu-gloo", Precision.FP32, 3, 0.0),
    ],
)
def test_fsdp_hides_nothing_on_a_processor(hardware: str, precision: Precision, zero: int, expected: float) -> None:
    target = PricingTarget(graph_of("llama3-8b", 2048), cluster_of(hardware, 8), precision.value)
    found = once_a_step_s(choice_of(dp=8, zero_stage=zero), NO_REPLICAS, PASSES, framework_facts(target))
    assert np.asarray(found) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("hardware", "zero", "reduce_s", "expected"),
    [
        (A100, 2, 3.0, 0.5),  # the last backward pass hides no more than its own reductions
        (A100, 2, 0.75, 0.25),  # or what they leave
        (A100, 2, 0.0, 0.125),  # except for the sum of the first unit
        (A100, 3, 0.0, 0.25),  # which gathers, too
        ("cpu-gloo", 3, 0.0, 0.5),
        (A100, 1, 0.75, 0.0),  # all of it stands in ``reduce_s``
    ],
)
def test_sums_over_replicas_hide_behind_the_last_backward_pass(
    hardware: str, zero: int, reduce_s: float, expected: float
) -> None:
    target = PricingTarget(graph_of("llama3-8b", 2048), cluster_of(hardware, 8), "fp32")
    own, rest = (0.0, 0.0) if zero == 1 else (0.5, 0.125), 0.75 if zero == 3 else 0.0
    collected = Collected(reduce_s, 0.0, rest, 0.0, *own)
    found = once_a_step_s(choice_of(dp=8, zero_stage=zero), collected, PASSES, framework_facts(target))
    assert np.asarray(found) == pytest.approx(expected)


@pytest.mark.parametrize("zero", [2, 3])
def test_more_micro_batches_send_no_more_to_replicas(zero: int) -> None:
    """A network between nodes a hundred times as slow costs a step the same, however many micro-batches it has."""
    lost: list[float] = []
    fast = cluster_of(A100, 16)
    slow = changed(fast, Change(network_between=0.01))
    for batch in (32, 128):
        pins = Pins(tp=1, pp=1, cp=1, zero=zero, dp_replicate=2, micro_batch=1, recompute=Recompute.NONE)
        steps = [step_s(cluster, batch, pins) for cluster in (fast, slow)]
        lost.append(steps[1] - steps[0])
    assert lost[1] == pytest.approx(lost[0], rel=0.01)


def step_s(cluster: ClusterSpec, batch: int, pins: Pins) -> float:
    problem = Problem.build(PricingTarget(graph_of("gpt2-1.5b", 1024), cluster, "bf16"), training_of(batch, 1024), pins)
    best = problem.solved().best
    assert best is not None
    return best.step_time_s
