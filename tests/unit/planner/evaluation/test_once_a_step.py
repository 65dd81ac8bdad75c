"""What data parallelism sends once a step, and what of it runs beside compute."""

import numpy as np
import pytest

from costmodels.overlap import Overlap
from costmodels.vocabulary.choices import Precision
from planner.evaluation.once_a_step import Collected, Passes, once_a_step_s
from planner.pricing.facts import framework_facts
from planner.pricing.target import PricingTarget
from tests.planning import A100, cluster_of, graph_of
from tests.unit.planner.pricing.test_recipe_facts import choice_of

# Of 2 s of compute half hides, at no loss.
PASSES = Passes(2.0, 2.0, Overlap(0.5, 0.0))
COLLECTED = Collected(reduce_s=3.0, first_reduce_s=0.25, gather_s=1.5, first_gather_s=0.125)


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
    found = once_a_step_s(choice_of(dp=8, zero_stage=zero), COLLECTED, PASSES, framework_facts(target))
    assert np.asarray(found) == pytest.approx(expected)
