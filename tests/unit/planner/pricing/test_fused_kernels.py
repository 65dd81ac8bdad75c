"""Operators that a framework runs as one, and products that stay in 16 bits, against closed forms."""

import pytest

from costmodels.recipe import load_recipe
from costmodels.vocabulary.terms import Holding, Time
from planner.pricing.target import PricingTarget
from planner.table.keys import WorkKey
from tests.planning import A100, cluster_of, graph_of
from tests.unit.planner.pricing.unit_prices import WHOLE, Prices, decision_of, unit_prices

OURS = load_recipe().model_copy(update={"stops_recomputation_early": False})
FUSING = OURS.model_copy(update={"fuses_kernels": True})
H100 = "dgx-h100-80gb"
BF16, BLOCK, HEAD, SEQ_LEN = 2, 1, 2, 1024


def prices(model: str, *, fuses: bool = False, precision: str = "bf16", hardware: str = A100) -> tuple[Prices, ...]:
    recipe = FUSING if fuses else OURS
    target = PricingTarget(graph_of(model, SEQ_LEN), cluster_of(hardware, 8), precision, recipe)
    return unit_prices(target, decision_of(target), WorkKey(WHOLE, 1, 1, 1))


def test_a_fused_activation_keeps_its_inputs_and_values_keep_the_whole_projection() -> None:
    """Llama-3 8B: the activated gate (14336) is not kept; queries and keys (4096 + 1024) lie beside the values."""
    apart, fused = (prices("llama3-8b", fuses=fuses)[BLOCK] for fuses in (False, True))
    more = SEQ_LEN * BF16 * (4096 + 1024 - 14336)
    assert fused[Holding.KEPT] - apart[Holding.KEPT] == pytest.approx(more)


def test_without_positions_that_are_turned_all_of_a_projection_is_kept_anyway() -> None:
    apart, fused = (prices("gpt3-1.3b", fuses=fuses)[BLOCK] for fuses in (False, True))
    assert fused == apart


def test_a_fused_activation_moves_its_inputs_and_its_output_once() -> None:
    """Forward 3 tensors rather than 2 + 3; backward 5 (two inputs, the gradient, two gradients) rather than 3 + 5."""
    apart, fused = (prices("llama3-8b", fuses=fuses)[BLOCK] for fuses in (False, True))
    device = cluster_of(A100, 8).profile.device
    rate = device.memory_bandwidth_bytes_per_s.value * device.efficiency["memory_bound"].fraction.value
    tensor_s = SEQ_LEN * 14336 * BF16 * FUSING.memory_traffic.value / rate
    launch_s = device.kernel_launch_s.value
    forward, backward = (apart[time] - fused[time] for time in (Time.COMPUTE_FORWARD, Time.COMPUTE_BACKWARD))
    assert forward == pytest.approx(2 * tensor_s + launch_s, rel=0.01)
    assert backward == pytest.approx(3 * tensor_s + launch_s, rel=0.01)


def test_the_product_that_makes_logits_stays_in_16_bits() -> None:
    in_bf16, in_fp8 = (prices("llama3-8b", precision=precision, hardware=H100) for precision in ("bf16", "fp8"))
    for time in (Time.COMPUTE_FORWARD, Time.COMPUTE_BACKWARD):
        assert in_fp8[HEAD][time] == in_bf16[HEAD][time]
        assert in_fp8[BLOCK][time] < in_bf16[BLOCK][time]


def test_experts_fuse_the_weights_of_rows_as_well() -> None:
    """Of rows narrower than the model's width: neither the activated gate nor its product with the other is kept."""
    model, width, top_k = "qwen3-30b-a3b", 768, 8
    apart, fused = (prices(model, fuses=fuses)[BLOCK] for fuses in (False, True))
    more = SEQ_LEN * BF16 * (4096 + 512 - 2 * top_k * width)
    assert fused[Holding.KEPT] - apart[Holding.KEPT] == pytest.approx(more)
