"""Causal attention with a window, with sinks, or with both, as one operator: ``planner.causal_attention``.

A window of w lets a query see itself and the w - 1 keys before it. A sink is a number a head that stands beside the
scores of each query and takes its share of the softmax, but weighs no value (OpenAI, "gpt-oss-120b & gpt-oss-20b Model
Card", 2025). ``scaled_dot_product_attention`` takes a window as a mask alone, with which kernels work on all pairs, and
sinks not at all. On CUDA the flash kernel of torch takes windows; elsewhere queries go in tiles past the keys that they
see. Sinks change what comes out, not the kernel: with L the logarithm of the sum of exponentials of a query's scores,
and s its sink, the output is scaled by exp(L - L'), L' = log(exp(L) + exp(s)). Backward of a flash kernel that is given
L' and the scaled output comes to the gradients with sinks, since it makes the shares out of L' and takes the output for
their mean (as for parts of a softmax in Liu et al., "Ring Attention", 2023).
"""

# pyright: reportPrivateUsage=false
# torch has no public name for attention that takes a window and returns its sums of exponentials.

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch.overrides import handle_torch_function, has_torch_function

_aten = torch.ops.aten
_FLASH_HEAD_MULTIPLE, _FLASH_LARGEST_HEAD = 8, 256  # of CUDA's flash attention
_LEAST_TILE, _LARGEST_TILE = 128, 1024  # queries

Arguments = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None, int, float]
"""Of ``causal_attention``."""

_Gradients = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def causal_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    sinks: torch.Tensor | None,
    window: int,
    scale: float,
) -> torch.Tensor:
    """Attention (batch, heads, queries, size), whose queries are the last of the positions of its keys.

    ``key``, ``value``: (batch, heads or a divisor of them, keys, size); ``sinks``: (heads,) in any dtype; ``window``:
    keys that a query sees at most, its own with them, 0 for all before it. Products are in the dtype of ``query``.
    """
    tensors = (query, key, value)
    if has_torch_function(tensors):
        return handle_torch_function(causal_attention, tensors, *tensors, sinks, window, scale)
    return torch.ops.planner.causal_attention(query, key, value, sinks, window, scale)[0]


class Seen(NamedTuple):
    """Some queries, and the keys of which they see at least one."""

    queries: slice
    keys: slice


def tiles(num_queries: int, num_keys: int, window: int) -> Iterator[Seen]:
    """Queries in runs of about ``window``, and of ``_LARGEST_TILE`` without one."""
    before = num_keys - num_queries
    size = min(max(window, _LEAST_TILE), _LARGEST_TILE) if window else _LARGEST_TILE
    for start in range(0, num_queries, size):
        end = min(start + size, num_queries)
        yield Seen(slice(start, end), slice(first_seen(before + start, window), before + end))


def first_seen(position: int, window: int) -> int:
    """The first position of a key that the query at ``position`` sees."""
    return max(0, position - window + 1) if window else 0


@torch.library.custom_op("planner::causal_attention", mutates_args=())
def _forward(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    sinks: torch.Tensor | None,
    window: int,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The output, and of each query the logarithm of its sum of exponentials, float32 (batch, heads, queries)."""
    if has_flash_kernel(query, value):
        found = _aten._flash_attention_forward(
            *(each.transpose(1, 2) for each in (query, key, value)),
            *(None, None, query.shape[2], key.shape[2], 0.0, True, False),
            scale=scale, window_size_left=_left(window), window_size_right=0,
        )  # fmt: skip
        output, sums = found[0].transpose(1, 2), found[1]
    else:
        output, sums = _forward_in_tiles(query, key, value, window, scale)
    if sinks is not None:
        joined = torch.logaddexp(sums, sinks.float()[:, None])
        output, sums = output * (sums - joined).exp().unsqueeze(-1), joined
    return output.to(query.dtype), sums


@_forward.register_fake
def _forward_shapes(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: object
) -> tuple[torch.Tensor, torch.Tensor]:
    output = _laid_out(query.new_empty((*query.shape[:-1], value.shape[-1])), has_flash_kernel(query, value))
    return output, query.new_empty(query.shape[:-1], dtype=torch.float32)


@torch.library.custom_op("planner::causal_attention_backward", mutates_args=())
def _backward(
    gradient: torch.Tensor, seen: list[torch.Tensor], sinks: torch.Tensor | None, window: int, scale: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of queries, keys, values and sinks, the last of no elements where there are none.

    ``seen``: queries, keys and values, the output and the logarithms of sums.
    """
    query, key, value, output, sums = seen
    if has_flash_kernel(query, value):
        none = torch.zeros((), dtype=torch.int64, device=query.device)  # of random numbers, for there is no dropout
        found = _aten._flash_attention_backward(
            *(each.transpose(1, 2) for each in (gradient, query, key, value, output)),
            *(sums, None, None, query.shape[2], key.shape[2], 0.0, True, none, none),
            scale=scale, window_size_left=_left(window), window_size_right=0,
        )  # fmt: skip
        of_query, of_key, of_value = (each.transpose(1, 2) for each in found)
    else:
        of_query, of_key, of_value = _backward_in_tiles(gradient, (query, key, value), (output, sums), window, scale)
    of_sinks = query.new_empty(0)
    if sinks is not None:
        share = (sinks.float()[:, None] - sums).exp()
        of_sinks = -(share * (gradient.float() * output.float()).sum(dim=-1)).sum(dim=(0, 2)).to(sinks.dtype)
    return of_query, of_key, of_value, of_sinks


@_backward.register_fake
def _backward_shapes(
    gradient: torch.Tensor, seen: list[torch.Tensor], sinks: torch.Tensor | None, *_: object
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    qkv = seen[:3]
    query, has_kernel = qkv[0], has_flash_kernel(qkv[0], qkv[2])
    of_query, of_key, of_value = (_laid_out(each.new_empty(each.shape), has_kernel) for each in qkv)
    return of_query, of_key, of_value, query.new_empty(0) if sinks is None else sinks.new_empty(sinks.shape)


class _Context(torch.autograd.function.FunctionCtx):
    """What a forward pass leaves to its backward pass."""

    saved_tensors: tuple[torch.Tensor, ...]
    has_sinks: bool
    window: int
    scale: float


def _keep(ctx: _Context, inputs: Arguments, output: tuple[torch.Tensor, torch.Tensor]) -> None:
    query, key, value, sinks, ctx.window, ctx.scale = inputs
    ctx.has_sinks = sinks is not None
    ctx.save_for_backward(query, key, value, *output, *([] if sinks is None else [sinks]))
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)


def _gradients(
    ctx: _Context, gradient: torch.Tensor | None, of_sums: torch.Tensor | None
) -> tuple[torch.Tensor | None, ...]:
    del of_sums
    if gradient is None:
        return None, None, None, None, None, None
    saved = list(ctx.saved_tensors)  # once: a checkpoint runs forward again for it
    tensors, sinks = saved[:5], saved[5] if ctx.has_sinks else None
    found: _Gradients = torch.ops.planner.causal_attention_backward(gradient, tensors, sinks, ctx.window, ctx.scale)
    return *found[:3], found[3] if ctx.has_sinks else None, None, None


_forward.register_autograd(_gradients, setup_context=_keep)


def has_flash_kernel(query: torch.Tensor, value: torch.Tensor) -> bool:
    """Whether CUDA's flash attention takes these."""
    size = query.shape[-1]
    fits = value.shape[-1] == size and size % _FLASH_HEAD_MULTIPLE == 0 and size <= _FLASH_LARGEST_HEAD
    return query.is_cuda and fits and query.dtype in (torch.bfloat16, torch.float16)


def _laid_out(tensor: torch.Tensor, has_kernel: bool) -> torch.Tensor:
    """``tensor``, positions before heads in memory where the kernel writes it."""
    return tensor.transpose(1, 2).contiguous().transpose(1, 2) if has_kernel else tensor


def _left(window: int) -> int | None:
    return window - 1 if window else None


def _forward_in_tiles(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, window: int, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    output = query.new_empty((*query.shape[:-1], value.shape[-1]), dtype=torch.float32)
    sums = query.new_empty(query.shape[:-1], dtype=torch.float32)
    for tile in tiles(query.shape[2], key.shape[2], window):
        rows, scores = tile.queries, _scores(query, key, tile, window, scale)
        sums[:, :, rows] = scores.logsumexp(dim=-1)
        shares = (scores - sums[:, :, rows].unsqueeze(-1)).exp()
        output[:, :, rows] = shares @ _of_all_heads(value[:, :, tile.keys], query)
    return output, sums


def _backward_in_tiles(
    gradient: torch.Tensor,
    qkv: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    result: tuple[torch.Tensor, torch.Tensor],
    window: int,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    query, key, value = qkv
    output, sums = result
    of_query, of_key, of_value = (torch.zeros_like(each, dtype=torch.float32) for each in qkv)
    for tile in tiles(query.shape[2], key.shape[2], window):
        rows, keys = tile.queries, tile.keys
        shares = (_scores(query, key, tile, window, scale) - sums[:, :, rows].unsqueeze(-1)).exp()
        mine = gradient[:, :, rows].float()
        of_shares = mine @ _of_all_heads(value[:, :, keys], query).transpose(-1, -2)
        mean = (mine * output[:, :, rows].float()).sum(dim=-1, keepdim=True)
        of_scores = shares * (of_shares - mean) * scale
        of_query[:, :, rows] = of_scores @ _of_all_heads(key[:, :, keys], query)
        of_key[:, :, keys] += _of_own_heads(of_scores.transpose(-1, -2) @ query[:, :, rows].float(), key)
        of_value[:, :, keys] += _of_own_heads(shares.transpose(-1, -2) @ mine, value)
    return of_query.to(query.dtype), of_key.to(key.dtype), of_value.to(value.dtype)


def _scores(query: torch.Tensor, key: torch.Tensor, tile: Seen, window: int, scale: float) -> torch.Tensor:
    """In float32, minus infinity where a query does not see a key."""
    scores = query[:, :, tile.queries].float() @ _of_all_heads(key[:, :, tile.keys], query).transpose(-1, -2) * scale
    before = key.shape[2] - query.shape[2]
    at = torch.arange(tile.queries.start, tile.queries.stop, device=query.device)[:, None] + before
    of_key = torch.arange(tile.keys.start, tile.keys.stop, device=query.device)[None, :]
    hidden = of_key > at
    if window:
        hidden |= of_key <= at - window
    return scores.masked_fill_(hidden, float("-inf"))


def _of_all_heads(tensor: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
    """Keys or values in float32, once for each head of the queries."""
    return tensor.float().repeat_interleave(query.shape[1] // tensor.shape[1], dim=1)


def _of_own_heads(gradient: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """The sum of the gradients of a head's copies."""
    return gradient.unflatten(1, (tensor.shape[1], -1)).sum(dim=2)
