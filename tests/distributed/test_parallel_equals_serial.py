"""One SGD step under every plan gives the parameters that a single process gets, and training learns."""

from __future__ import annotations

from math import log

import pytest

from costmodels.vocabulary.choices import Precision
from tests.distributed.cases import (
    CASES,
    HALF_PRECISION_CASES,
    LEARNING_CASES,
    NUM_LEARNING_STEPS,
    STARVED_CASES,
    TWICE_CASES,
)
from tests.distributed.conftest import Outcome
from tests.distributed.toy_models import VOCAB

# Relative, over the norm of each whole parameter: float32 has 1.2e-7, sums differ in order.
PARAMETER_TOLERANCE = 1e-5
UPDATE_TOLERANCE = 1e-4  # of the update itself, so that a wrong factor on a small update shows
# Some gradients are zero in exact arithmetic (a key projection's bias): their rounding error is held
# against the rounding of the parameters that a step moves, not against itself.
ROUNDING = 1e-8


@pytest.mark.parametrize("name", CASES)
def test_step_equals_single_process(name: str, outcomes: dict[str, Outcome]) -> None:
    outcome = outcomes[name]
    assert outcome["missing"] == []
    assert outcome["loss"] == pytest.approx(outcome["expected_loss"], rel=1e-5)
    parameters = outcome["parameters"]
    assert isinstance(parameters, dict)
    for fqn, found in parameters.items():
        assert found["error"] <= PARAMETER_TOLERANCE * found["size"] + ROUNDING, (fqn, found)
        assert found["error"] <= UPDATE_TOLERANCE * found["update_size"] + ROUNDING, (fqn, found)


@pytest.mark.parametrize("name", CASES)
def test_step_is_visible(name: str, outcomes: dict[str, Outcome]) -> None:
    """The comparison above would hold of a step that changes nothing: this one must change much."""
    parameters = outcomes[name]["parameters"]
    assert isinstance(parameters, dict)
    moved = [found["update_size"] > 100 * UPDATE_TOLERANCE * ROUNDING for found in parameters.values()]
    assert sum(moved) > 0.9 * len(moved)
    assert max(found["update_size"] for found in parameters.values()) > 1e-2


@pytest.mark.parametrize("name", CASES)
def test_blocks_are_compiled_whole_where_they_are_to_be(name: str, outcomes: dict[str, Outcome]) -> None:
    """One graph for all blocks, which are of one class."""
    assert outcomes[name]["num_graphs"] == int(CASES[name].is_compiled)
    assert outcomes[name]["graph_breaks"] == {}


@pytest.mark.parametrize("name", HALF_PRECISION_CASES)
def test_step_in_half_precision_is_near_a_single_process(name: str, outcomes: dict[str, Outcome]) -> None:
    """A schedule that splits backward passes left the last layer as it was: FSDP had set its gradients aside."""
    outcome = outcomes[name]
    assert outcome["missing"] == []
    parameters = outcome["parameters"]
    assert isinstance(parameters, dict)
    largest = max(found["update_size"] for found in parameters.values())
    for fqn, found in parameters.items():
        assert found["error"] <= 0.03 * found["update_size"] + 1e-3 * largest, (fqn, found)


def test_loss_falls_on_real_text(outcomes: dict[str, Outcome]) -> None:
    losses = outcomes["pp2-dp2-learns"]["losses"]
    assert isinstance(losses, list)
    assert len(losses) == NUM_LEARNING_STEPS == 25
    assert sum(losses[-5:]) / 5 < sum(losses[:5]) / 5 - 1.0


@pytest.mark.parametrize("name", [name for name, case in LEARNING_CASES.items() if case.precision is Precision.BF16])
def test_mixed_precision_learns(name: str, outcomes: dict[str, Outcome]) -> None:
    losses = outcomes[name]["losses"]
    assert isinstance(losses, list)
    assert losses[0] == pytest.approx(log(VOCAB), abs=0.05)  # as good as guessing before the first step
    assert losses[-1] < losses[0] - 0.3


@pytest.mark.parametrize("loss", ["weighed", "counted", "autocast"])
@pytest.mark.parametrize("name", TWICE_CASES)
def test_gradients_of_two_calls_add_up(name: str, loss: str, outcomes: dict[str, Outcome]) -> None:
    """Tied parameters were summed up again, and gradients of counted losses scaled again.

    An evaluation between them dropped gradients under a pipeline, and scaled those of counted losses. Inside one
    autocast FSDP lost those of all micro-batches but the first.
    """
    error = outcomes[name][loss]
    assert isinstance(error, float)
    assert error < 1e-5


def test_what_is_frozen_under_one_name_is_frozen_under_all(outcomes: dict[str, Outcome]) -> None:
    """Ranks with the other copy waited for its gradient until the process group gave up."""
    given = outcomes["frozen-pp-tied"]["given"]
    assert isinstance(given, list)
    assert "layers.0.mlp.up.weight" in given
    assert not {"token_embedding.weight", "head.weight"} & set(given)


@pytest.mark.parametrize("name", STARVED_CASES)
def test_what_no_rank_uses_is_left_alone(name: str, outcomes: dict[str, Outcome]) -> None:
    """It got a gradient of zero, of which an optimiser makes weight decay and moments."""
    assert outcomes[name]["untouched"] == 4 * 4 * 2  # of every block four experts of two parameters
    error = outcomes[name]["error"]
    assert isinstance(error, float)
    assert error < 1e-5
