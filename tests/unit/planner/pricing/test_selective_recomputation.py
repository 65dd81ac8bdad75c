"""What our selective recomputation keeps of collectives, in closed form: the executor keeps results of all of them."""

from __future__ import annotations

import pytest

from costmodels.vocabulary.choices import ContextMethod, Recompute
from costmodels.vocabulary.terms import Holding, Time
from planner.pricing.target import PricingTarget
from planner.table.keys import TensorSplit, WorkKey
from tests.planning import A100, cluster_of, graph_of
from tests.unit.planner.pricing.unit_prices import Prices, decision_of, unit_prices

MODEL, SEQ_LEN = "llama3-8b", 4096
HIDDEN, FFN, HEADS, KV = 4096, 14336, 32, 1024
BF16, FP32 = 2, 4
SEQUENCE = SEQ_LEN * HIDDEN * BF16  # bytes of a block's input, whole


def block(tp: int, cp: int, mode: Recompute, method: ContextMethod = ContextMethod.ALL_GATHER) -> Prices:
    target = PricingTarget(graph_of(MODEL, SEQ_LEN), cluster_of(A100, 8), "bf16")
    split = TensorSplit(tp, tp > 1)
    decision = decision_of(target, split)
    place = (
        next(i for i, unit in enumerate(decision) if any("gate" in name for name in unit.parameters)) if tp > 1 else 1
    )
    return unit_prices(target, decision, WorkKey(split, 1, cp, 1, method), mode)[place]


def products(parts: int) -> float:
    """Outputs of a block's products on one of ``parts`` ranks, its input, and attention's sums of exponentials."""
    widths = 3 * HIDDEN + 2 * KV + 2 * FFN + HIDDEN  # queries, attention, its product; keys, values; gate, up; down
    return (SEQUENCE + SEQ_LEN * (widths * BF16 + HEADS * FP32)) / parts


def test_nothing_is_kept_besides_products_where_nothing_is_sent() -> None:
    assert block(1, 1, Recompute.SELECTIVE)[Holding.KEPT] == pytest.approx(products(1))


@pytest.mark.parametrize("tp", [2, 4])
def test_what_is_gathered_is_kept_and_what_is_summed_is_kept_whole_as_well(tp: int) -> None:
    # Two norms' outputs are gathered; attention's and the feed-forward part's last products make whole partial sums.
    assert block(tp, 1, Recompute.SELECTIVE)[Holding.KEPT] == pytest.approx(products(tp) + 4 * SEQUENCE)


@pytest.mark.parametrize("method", [ContextMethod.ALL_GATHER, ContextMethod.RING])
def test_attention_in_blocks_keeps_an_output_a_block(method: ContextMethod) -> None:
    output = (SEQUENCE + SEQ_LEN * HEADS * FP32) / 4
    assert block(1, 4, Recompute.SELECTIVE, method)[Holding.KEPT] == pytest.approx(products(4) + 3 * output)


def test_heads_that_changed_hands_are_kept_and_not_sent_again() -> None:
    sent = SEQ_LEN * (2 * HIDDEN + 2 * KV) * BF16 / 4  # queries, keys, values, and the output on its way back
    kept = block(1, 4, Recompute.SELECTIVE, ContextMethod.ALL_TO_ALL)[Holding.KEPT]
    assert kept == pytest.approx(products(4) + sent)


def test_attention_sends_again_what_recomputation_repeats() -> None:
    gathered, exchanged = (
        block(1, 4, Recompute.SELECTIVE, method) for method in (ContextMethod.ALL_GATHER, ContextMethod.ALL_TO_ALL)
    )
    once = gathered[Time.CONTEXT_FORWARD]
    assert once > 0
    assert gathered[Time.RECOMPUTE] - exchanged[Time.RECOMPUTE] == pytest.approx(once)
