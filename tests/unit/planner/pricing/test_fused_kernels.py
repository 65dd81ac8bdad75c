"""Operators that a framework runs as one, and products that stay in 16 bits, against closed forms."""

from collections.abc import Mapping

import pytest

from costmodels.recipe import load_recipe
from costmodels.vocabulary.terms import Holding, Time
from hardware_profiles.schema import Quantity
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


# -- copies for products in 8 bits --------------------------------------------------------------------


COPYING = OURS.model_copy(
    update={
        "eight_bit_copy_bytes": Quantity(value=5.0, tag="specified", source="a test"),
        "fuses_kernels": True,
        "hooks": None,
        "host_s_per_launch": None,
    }
)


def eight_bit_times(model: str, update: Mapping[str, object], precision: str = "fp8") -> tuple[float, float]:
    """Forward and backward compute of a block on one H100, one sequence."""
    recipe = COPYING.model_copy(update=update)
    target = PricingTarget(graph_of(model, SEQ_LEN), cluster_of(H100, 8), precision, recipe)
    block = unit_prices(target, decision_of(target), WorkKey(WHOLE, 1, 1, 1))[BLOCK]
    return block[Time.COMPUTE_FORWARD], block[Time.COMPUTE_BACKWARD]


def copy_s(elements: float) -> float:
    device = cluster_of(H100, 8).profile.device
    rate = device.memory_bandwidth_bytes_per_s.value * device.efficiency["memory_bound"].fraction.value
    return 5.0 * SEQ_LEN * elements / rate


def test_products_in_8_bits_copy_each_input_once_and_the_gradient_of_each_output() -> None:
    """Llama-3 8B, per position: inputs 4096 (queries, keys, values), 4096, 4096 (gate, up), 14336; outputs 4096 +
    2 * 1024, 4096, 2 * 14336, 4096. Forward 4 kernels, backward 7."""
    plain, copying = (eight_bit_times("llama3-8b", update) for update in ({"eight_bit_copy_bytes": None}, {}))
    launch_s = cluster_of(H100, 8).profile.device.kernel_launch_s.value
    assert copying[0] - plain[0] == pytest.approx(copy_s(3 * 4096 + 14336) + 4 * launch_s, rel=1e-6)
    assert copying[1] - plain[1] == pytest.approx(copy_s(3 * 4096 + 2 * 1024 + 2 * 14336) + 7 * launch_s, rel=1e-6)


def test_products_in_16_bits_copy_nothing() -> None:
    plain, copying = (eight_bit_times("llama3-8b", update, "bf16") for update in ({"eight_bit_copy_bytes": None}, {}))
    assert copying == plain


def test_fused_experts_copy_and_move_nothing_between_their_products() -> None:
    """Qwen3-30B-A3B, 8 experts of width 768 a token. Forward neither the activation's three tensors in 16 bits nor the
    copy of its output; backward the activation's two inputs are read alone, and their gradients are not copied."""
    apart, fused = (eight_bit_times("qwen3-30b-a3b", {"fuses_experts": fuses}) for fuses in (False, True))
    launch_s = cluster_of(H100, 8).profile.device.kernel_launch_s.value
    row, weights = 8 * 768, 8
    moved = COPYING.memory_traffic.value * BF16 / 5.0
    forward = copy_s(row) + copy_s((3 * row + weights) * moved) + 2 * launch_s
    backward = copy_s(2 * row) + copy_s((3 * row + weights) * moved) + 2 * launch_s
    assert apart[0] - fused[0] == pytest.approx(forward, rel=0.02)
    assert apart[1] - fused[1] == pytest.approx(backward, rel=0.02)


# -- logits that become their gradient in place -------------------------------------------------------


def test_logits_whose_gradient_is_made_in_place_need_nothing_more_backward() -> None:
    held = OURS.memory.logit_kept_bytes.model_copy(update={"value": 2.0})
    names = ("logit_kept_bytes", "logit_peak_bytes", "logit_reserved_bytes")
    recipe = OURS.model_copy(update={"memory": OURS.memory.model_copy(update=dict.fromkeys(names, held))})
    target = PricingTarget(graph_of("llama3-8b", SEQ_LEN), cluster_of(A100, 8), "bf16", recipe)
    head = unit_prices(target, decision_of(target), WorkKey(WHOLE, 1, 1, 1))[HEAD]
    assert head[Holding.LOSS] == 0.0
    assert head[Holding.WORKING] < SEQ_LEN * BF16 * 128256
