"""The collectives a step runs are those that the cost models price."""

from __future__ import annotations

import pytest

from tests.distributed.cases import GLOBAL_BATCH_SIZE
from tests.distributed.conftest import Outcome
from tests.distributed.toy_models import NUM_LAYERS

UNITS = NUM_LAYERS + 3  # the embedding, the last norm and the head are FSDP units of their own
BIG_UNITS = NUM_LAYERS + 2  # the norm's 128 bytes count as small
MICROBATCHES = GLOBAL_BATCH_SIZE // 4


def counts_of(name: str, outcomes: dict[str, Outcome]) -> dict[str, int]:
    counts = outcomes[name]["counts"]
    assert isinstance(counts, dict)
    return counts


@pytest.mark.parametrize(
    ("name", "all_gathers", "reduce_scatters", "all_reduces"),
    [
        ("count-zero0", 0, 0, BIG_UNITS),
        ("count-zero1", BIG_UNITS, BIG_UNITS, 0),
        ("count-zero2", BIG_UNITS, BIG_UNITS * MICROBATCHES, 0),
        ("count-zero3", BIG_UNITS * MICROBATCHES * 2, BIG_UNITS * MICROBATCHES, 0),
        ("count-hsdp-zero2", BIG_UNITS, BIG_UNITS * MICROBATCHES, BIG_UNITS),
    ],
)
def test_zero_stages(
    name: str, all_gathers: int, reduce_scatters: int, all_reduces: int, outcomes: dict[str, Outcome]
) -> None:
    counts = counts_of(name, outcomes)
    found = (counts.get("all_gather", 0), counts.get("reduce_scatter", 0), counts.get("all_reduce", 0))
    assert found == (all_gathers, reduce_scatters, all_reduces)


def test_zero3_under_a_pipeline_gathers_each_micro_batch(outcomes: dict[str, Outcome]) -> None:
    counts = counts_of("count-pp-zero3", outcomes)
    units, microbatches = NUM_LAYERS // 2 + 1, GLOBAL_BATCH_SIZE // 2 // 2  # of the first stage
    assert counts["all_gather"] == units * microbatches * 2
    assert counts["reduce_scatter"] == units * microbatches


# Beside the blocks: the embedding forward, and the gradient of the head's input backward.
def test_tensor_parallel_all_reduces(outcomes: dict[str, Outcome]) -> None:
    assert counts_of("count-tp", outcomes)["all_reduce"] == 4 * NUM_LAYERS + 2
    # Recomputation repeats the attention's all-reduce; it stops before the block's last one.
    assert counts_of("count-tp-full", outcomes)["all_reduce"] == 5 * NUM_LAYERS + 2


def test_sequence_parallel_gathers_and_scatters(outcomes: dict[str, Outcome]) -> None:
    counts = counts_of("count-sp", outcomes)
    assert (counts["all_gather"], counts["reduce_scatter"]) == (4 * NUM_LAYERS + 2, 4 * NUM_LAYERS + 2)
    assert "all_reduce" not in counts


def test_selective_recomputation_repeats_no_communication(outcomes: dict[str, Outcome]) -> None:
    assert counts_of("count-sp-selective", outcomes) == counts_of("count-sp", outcomes)


def test_full_recomputation_repeats_the_forward_communication(outcomes: dict[str, Outcome]) -> None:
    counts = counts_of("count-sp-full", outcomes)
    assert (counts["all_gather"], counts["reduce_scatter"]) == (6 * NUM_LAYERS + 2, 5 * NUM_LAYERS + 2)


def test_rows_travel_to_their_experts_and_back_once_each_way(outcomes: dict[str, Outcome]) -> None:
    counts = counts_of("count-ep", outcomes)
    assert counts["all_to_all"] == 4 * NUM_LAYERS  # one micro-batch; sizes and the weights of rows count as small
    assert counts["all_gather"] == counts["reduce_scatter"] == BIG_UNITS + NUM_LAYERS  # of experts over other ranks


def test_gradients_of_experts_are_summed_over_replicas_once_a_step(outcomes: dict[str, Outcome]) -> None:
    """Both ranks of a replica hold half of the experts, whole: nothing is to be reduced over shards of these."""
    counts = counts_of("count-ep-hsdp", outcomes)
    assert (counts["all_gather"], counts["reduce_scatter"]) == (BIG_UNITS, BIG_UNITS * MICROBATCHES)
    assert counts["all_reduce"] == BIG_UNITS + NUM_LAYERS
