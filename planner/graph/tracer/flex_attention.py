"""FlexAttention under a recorder: one attention over all pairs, whatever its mask and its change of scores.

torch runs it only on devices of its choice and through its compiler; a trace needs neither.
"""

# pyright: reportPrivateUsage=false
# torch has no public way to run FlexAttention elsewhere.

from __future__ import annotations

import contextlib
import functools
from collections.abc import Generator, Mapping
from typing import Protocol

import torch
from torch._higher_order_ops.flex_attention import flex_attention as flex_attention_operator
from torch._ops import OpOverload
from torch.nn.attention import flex_attention as torch_module
from torch.utils._python_dispatch import TorchDispatchMode


class Recorder(Protocol):
    """What watches the operators."""

    def run(self, func: OpOverload, args: tuple[object, ...], kwargs: Mapping[str, object]) -> object:
        """Runs ``func`` and appends it."""
        ...


@functools.cache
def register_flex_attention(recorder: type[TorchDispatchMode]) -> None:
    """Teaches ``recorder``, which is a Recorder, the operator behind FlexAttention, once a process."""
    flex_attention_operator.py_impl(recorder)(_as_attention)


@contextlib.contextmanager
def on_any_device() -> Generator[None]:
    """Lets FlexAttention run on tensors without values, whatever device they say they are on."""
    check = torch_module._validate_device
    torch_module._validate_device = _accept
    try:
        yield
    finally:
        torch_module._validate_device = check


def _accept(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
    del query, key, value


def _has_mask(options: tuple[object, ...]) -> bool:
    """Whether a block mask leaves out pairs, whose blocks the kernel skips; without values a trace cannot say how many.

    Taken as half of them, those of a causal mask. ``options`` begin with the change of scores and the block mask.
    """
    blocks = options[1]
    return isinstance(blocks, tuple) and blocks[-1] is not torch_module.noop_mask


def _as_attention(
    recorder: Recorder, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *options: object
) -> tuple[object, torch.Tensor, torch.Tensor]:
    """The output, and for each row the log-sum-exp and the largest score."""
    attention = torch.ops.aten.scaled_dot_product_attention.default
    said = {"is_causal": _has_mask(options), "enable_gqa": query.shape[1] != key.shape[1]}
    output = recorder.run(attention, (query, key, value), {name: True for name, holds in said.items() if holds})
    rows = query.new_empty(query.shape[:-1], dtype=torch.float32)
    return output, rows, rows.clone()
