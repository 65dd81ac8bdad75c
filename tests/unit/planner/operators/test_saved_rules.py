"""Operator by operator: what a rule says is kept is what autograd's own hooks see."""

from collections.abc import Callable

import pytest
import torch
from torch.nn import functional as F  # noqa: N812

from planner.operators.call import OpCall, Saved, TensorValue
from planner.operators.work import saved_for_backward

ROWS = torch.tensor([0, 1, 2])
PLACES = torch.zeros(3, 5, dtype=torch.long)
MASK = torch.eye(4, 5) > 0


def values(*shape: int) -> torch.Tensor:
    return torch.rand(*shape, requires_grad=True)


# rule, function, operands by schema name
CASES: dict[str, tuple[Callable[..., torch.Tensor], dict[str, torch.Tensor]]] = {
    "index_add": (
        lambda s, i, x: s.index_add(0, i, x),
        {"self": values(4, 5), "index": ROWS, "source": values(3, 5)},
    ),
    "index_copy": (
        lambda s, i, x: s.index_copy(0, i, x),
        {"self": values(4, 5), "index": ROWS, "source": values(3, 5)},
    ),
    "scatter_add": (
        lambda s, i, x: s.scatter_add(0, i, x),
        {"self": values(4, 5), "index": PLACES, "src": values(3, 5)},
    ),
    "scatter": (lambda s, i, x: s.scatter(0, i, x), {"self": values(4, 5), "index": PLACES, "src": values(3, 5)}),
    "scatter_reduce": (
        lambda s, i, x: s.scatter_reduce(0, i, x, "amax"),
        {"self": values(4, 5), "index": PLACES, "src": values(3, 5)},
    ),
    "gather": (lambda s, i: s.gather(0, i), {"self": values(4, 5), "index": PLACES}),
    "index_select": (lambda s, i: s.index_select(0, i), {"self": values(4, 5), "index": ROWS}),
    "index_put": (lambda s, i, x: s.index_put((i,), x), {"self": values(4, 5), "indices.0": ROWS, "v": values(3, 5)}),
    "masked_select": (lambda s, m: s.masked_select(m), {"self": values(4, 5), "mask": MASK}),
    "masked_scatter": (
        lambda s, m, x: s.masked_scatter(m, x),
        {"self": values(4, 5), "mask": MASK, "source": values(20)},
    ),
    "masked_fill": (lambda s, m: s.masked_fill(m, 0.0), {"self": values(4, 5), "mask": MASK}),
    "where": (torch.where, {"condition": MASK, "self": values(4, 5), "other": values(4, 5)}),
    "lerp": (torch.lerp, {"self": values(4, 5), "end": values(4, 5), "weight": values(4, 5)}),
    "logaddexp": (torch.logaddexp, {"self": values(4, 5), "other": values(4, 5)}),
    "addcmul": (torch.addcmul, {"self": values(4, 5), "tensor1": values(4, 5), "tensor2": values(4, 5)}),
    "addcdiv": (torch.addcdiv, {"self": values(4, 5), "tensor1": values(4, 5), "tensor2": values(4, 5)}),
    "mse_loss": (F.mse_loss, {"self": values(4, 5), "target": values(4, 5)}),
    "l1_loss": (F.l1_loss, {"self": values(4, 5), "target": values(4, 5)}),
    "huber_loss": (F.huber_loss, {"self": values(4, 5), "target": values(4, 5)}),
    "var": (lambda x: x.var(0), {"self": values(4, 5)}),
    "std": (lambda x: x.std(0), {"self": values(4, 5)}),
    "amax": (lambda x: x.amax(0), {"self": values(4, 5)}),
    "logsumexp": (lambda x: x.logsumexp(0), {"self": values(4, 5)}),
    "cumprod": (lambda x: x.cumprod(0), {"self": values(4, 5)}),
    "cumsum": (lambda x: x.cumsum(0), {"self": values(4, 5)}),
    "clamp": (lambda x: x.clamp(0, 1), {"self": values(4, 5)}),
    "glu": (F.glu, {"self": values(4, 6)}),
    "cdist": (torch.cdist, {"x1": values(4, 5), "x2": values(3, 5)}),
    "instance_norm": (F.instance_norm, {"input": values(2, 3, 4)}),
}


def kept_by_autograd(function: Callable[..., torch.Tensor], operands: dict[str, torch.Tensor]) -> tuple[set[str], int]:
    """Names of the operands and ``output`` that are kept, and bytes besides."""
    names = {tensor.untyped_storage().data_ptr(): name for name, tensor in operands.items()}
    kept: dict[int, torch.Tensor] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        result = function(*operands.values())
    names[result.untyped_storage().data_ptr()] = "output"
    extra = sum(tensor.untyped_storage().nbytes() for pointer, tensor in kept.items() if pointer not in names)
    return {names[pointer] for pointer in kept if pointer in names}, extra


@pytest.mark.parametrize("name", CASES)
def test_a_rule_keeps_what_autograd_keeps(name: str) -> None:
    function, operands = CASES[name]
    result = function(*operands.values())
    call = OpCall(name, {key: value_of(tensor) for key, tensor in operands.items()}, value_of(result))
    saved = saved_for_backward(call)
    assert saved is not None
    assert (set(saved.tensors), saved.extra_bytes) == kept_by_autograd(function, operands)


def value_of(tensor: torch.Tensor) -> TensorValue:
    dtype = str(tensor.dtype).removeprefix("torch.")
    return TensorValue(tuple(tensor.shape), dtype, requires_grad=tensor.requires_grad)


def test_without_gradient_nothing_is_kept() -> None:
    tensor = TensorValue((4, 5), "float32")
    assert saved_for_backward(OpCall("mul", {"self": tensor, "other": tensor}, tensor)) == Saved()


@pytest.mark.parametrize(
    ("left", "right"),
    [
        ((2, 4, 3, 5), (4, 5, 6)),  # experts' weights
        ((2, 1, 3, 5), (2, 4, 5, 6)),
        ((1, 4, 3, 5), (4, 5, 6)),
        ((2, 4, 3, 5), (5, 6)),
        ((2, 4, 3, 5), (2, 4, 5, 6)),
    ],
)
def test_of_products_in_batches_copies_are_kept(left: tuple[int, ...], right: tuple[int, ...]) -> None:
    """torch copies a matrix for each batch that it is broadcast over, which was taken to be kept once."""
    operands = {"self": values(*left), "other": values(*right)}
    tensors = {name: value_of(tensor) for name, tensor in operands.items()}
    saved = saved_for_backward(OpCall("matmul", tensors, value_of(torch.matmul(*operands.values()))))
    assert saved is not None
    assert (set(saved.tensors), saved.extra_bytes) == kept_by_autograd(torch.matmul, operands)
