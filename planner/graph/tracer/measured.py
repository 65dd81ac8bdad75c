"""An operator without a rule, counted by running it: on meta tensors, under torch's own counters."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass

import torch
from torch import fx
from torch.utils._pytree import tree_map_only
from torch.utils.flop_counter import FlopCounterMode

from planner.graph.tracer.fx_reading import named_arguments
from planner.operators.call import Saved, TensorValue
from planner.operators.product_rules import Products


@dataclass(frozen=True)
class Measured:
    """What one run on meta shows: the products an operator is made of, and what autograd keeps."""

    products: Products
    saved: Saved


class Measurements:
    """What each kind of call shows, run once: a loop over time, or a stack of blocks, has many that are alike."""

    def __init__(self) -> None:
        self._known: dict[Hashable, Measured | None] = {}

    def of(self, node: fx.Node, tensors: Mapping[str, TensorValue]) -> Measured | None:
        """FLOPs forward and backward of ``node``, and what it keeps; None where it cannot run alone."""
        # A tensor is known by its name, whichever node it comes from.
        others = repr([(name, tree_map_only(fx.Node, lambda _: None, value)) for name, value in named_arguments(node)])
        key = (node.target, tuple(tensors.items()), others)
        if key not in self._known:
            self._known[key] = _measure(node, tensors)
        return self._known[key]


def _measure(node: fx.Node, tensors: Mapping[str, TensorValue]) -> Measured | None:
    inputs = {
        name: torch.empty(
            tensor.shape, dtype=getattr(torch, tensor.dtype), device="meta", requires_grad=tensor.requires_grad
        )
        for name, tensor in tensors.items()
    }
    try:
        return _run(node, tensors, inputs)
    except Exception:  # whatever an unknown operator raises: the caller has a cautious answer
        return None


def _run(node: fx.Node, tensors: Mapping[str, TensorValue], inputs: Mapping[str, torch.Tensor]) -> Measured:
    kept: dict[int, torch.Tensor] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage()._cdata] = tensor  # pyright: ignore[reportPrivateUsage]  # its identity
        return tensor

    with FlopCounterMode(display=False) as forward, torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        result = _call(node, inputs)
    outputs = [t for t in (result if isinstance(result, list | tuple) else (result,)) if isinstance(t, torch.Tensor)]
    differentiable = [output for output in outputs if output.requires_grad]
    others = [inputs[name] for name, t in tensors.items() if t.requires_grad and not t.is_weight]
    weights = [inputs[name] for name, t in tensors.items() if t.requires_grad and t.is_weight]
    backward = _gradient_flops(differentiable, [*others, *weights])
    flops = forward.get_total_flops()
    products = Products(flops, backward, backward - _gradient_flops(differentiable, others))
    own = {tensor.untyped_storage()._cdata: name for name, tensor in inputs.items()}  # pyright: ignore[reportPrivateUsage]
    extra = sum(tensor.untyped_storage().nbytes() for storage, tensor in kept.items() if storage not in own)
    return Measured(products, Saved(tuple(own[storage] for storage in kept if storage in own), extra))


def _call(node: fx.Node, inputs: Mapping[str, torch.Tensor]) -> object:
    """Calls the operator of ``node``, its tensors taken from ``inputs`` by the names of its schema."""
    arguments: dict[str, object] = {}
    for name, value in named_arguments(node):
        if isinstance(value, fx.Node):
            arguments[name] = inputs[name]
        elif isinstance(value, list | tuple) and any(isinstance(item, fx.Node) for item in value):
            arguments[name] = [inputs.get(f"{name}.{index}") for index in range(len(value))]
        else:
            arguments[name] = value
    if not isinstance(node.target, Callable):
        raise TypeError(f"{node.target} cannot be called")
    return node.target(*arguments.values())


def _gradient_flops(outputs: list[torch.Tensor], inputs: list[torch.Tensor]) -> int:
    if not outputs or not inputs:
        return 0
    with FlopCounterMode(display=False) as counter:
        torch.autograd.grad(
            outputs, inputs, [torch.empty_like(output) for output in outputs], retain_graph=True, allow_unused=True
        )
    return counter.get_total_flops()
