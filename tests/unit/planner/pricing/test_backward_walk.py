"""What a block holds in its backward pass, held against torch's own: two linear layers with an activation between."""

from __future__ import annotations

import torch
from torch import nn

from costmodels.vocabulary.workload import OpClass
from planner.axes.lowered import Kernel, RankUnit, Tensor, Work
from planner.executor.live_memory import LiveMemory
from planner.layout.columns import Array
from planner.pricing.backward_walk import held_in_backward

TOKENS, WIDTH, INNER = 64, 32, 48
ITEM = 4
ENTERS, UP, BENT, DOWN = range(4)


def kernel(place: int, made_from: int, saves: tuple[int, ...], weights: float = 0.0) -> Kernel:
    work = Work(1.0, 1.0, weights, 1)
    return Kernel(
        id=place,
        operator="operator",
        op_class=OpClass.GEMM,
        is_view=False,
        is_kept_product=False,
        is_eight_bit=False,
        forward=work,
        backward=work,
        weight_gradient_flops=weights,
        scores=0.0,
        query_rows=0.0,
        norm_elements=0.0,
        inputs=(made_from,),
        keys_and_values=(),
        storage=place,
        saves=saves,
        saved_extra_bytes=0.0,
        follows_batch=True,
    )


def unit() -> RankUnit:
    sizes = {ENTERS: WIDTH, UP: INNER, BENT: INNER, DOWN: WIDTH}
    each = {i: float(TOKENS * size * ITEM) for i, size in sizes.items()}
    tensors = {i: Tensor(i, size, size, size, ITEM, is_floating=True, follows_batch=True) for i, size in each.items()}
    weights = float(WIDTH * INNER * ITEM)
    kernels = kernel(UP, ENTERS, (ENTERS,), weights), kernel(BENT, UP, (BENT,)), kernel(DOWN, BENT, (BENT,), weights)
    return RankUnit(kernels, tensors, frozenset({ENTERS}), {}, is_block=True, loss=None)


def nothing(_: Kernel) -> Array:
    return torch.zeros(2).numpy()


def counted() -> int:
    """Bytes besides parameters, the result and its gradient, which the caller keeps, at the peak of a backward pass."""
    model = nn.Sequential(nn.Linear(WIDTH, INNER, bias=False), nn.Tanh(), nn.Linear(INNER, WIDTH, bias=False))
    tracker, enters = LiveMemory(), torch.randn(TOKENS, WIDTH, requires_grad=True)
    with tracker:
        result = model(enters * 1.0)  # which autograd alone keeps
        tracker.note(model.parameters())
        tracker.start_over()
        gradient = torch.ones_like(result)
        result.backward(gradient)
    return tracker.peak_bytes - sum(each.nbytes for each in (*model.parameters(), result, gradient))


def test_gradients_of_weights_pile_up_while_what_is_saved_is_freed() -> None:
    found = held_in_backward(
        unit(), lambda i: torch.tensor([0.0, unit().tensors[i].bytes]).numpy(), nothing, nothing
    ).sum(axis=1)
    narrow, wide, weights = TOKENS * WIDTH * ITEM, TOKENS * INNER * ITEM, WIDTH * INNER * ITEM
    assert found.tolist() == [
        narrow + wide + (narrow + wide) + weights,  # the last product: both saved, its gradients, and its weight's
        narrow + wide + 2 * wide + weights,  # what bends it saves its own output
        narrow + (wide + narrow) + 2 * weights,  # the first product
    ]
    assert found[1] == max(found) == counted()
