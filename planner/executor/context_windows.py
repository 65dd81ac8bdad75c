"""Attention with windows or sinks over positions that the ranks of a group share.

Keys and values of all ranks are gathered, in forward and again in backward, whichever way other layers pass them on:
of a window the ring would carry most in vain. A rank's two chunks of queries then attend to what each sees. Where ranks
share heads instead (all-to-all), each has the sinks of its own.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from planner.executor.context_attention import (
    Blocks,
    by_heads,
    by_ranks,
    chunk_starts,
    gathered,
    in_order,
    summed,
)
from planner.models.causal_attention import causal_attention, first_seen


def attention_by_parts(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, group: dist.ProcessGroup, blocks: Blocks
) -> torch.Tensor:
    """Of this rank's queries (batch, heads, length, size) over the keys of all ranks."""
    kv = torch.cat((key, value), dim=-1)
    output = _Gathered.apply(query, kv, blocks.sinks, group, blocks)
    assert isinstance(output, torch.Tensor)
    return output


def causal_attention_by_heads(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, group: dist.ProcessGroup, blocks: Blocks
) -> torch.Tensor:
    """Every rank attends over all positions for its part of the heads."""
    sinks = None if blocks.sinks is None else blocks.sinks.unflatten(0, (blocks.num_ranks, -1))[blocks.rank]

    def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return causal_attention(query, key, value, sinks, blocks.window, blocks.scale)

    return by_heads((query, key, value), group, attend)


def attention_of_seen(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, distance: torch.Tensor, blocks: Blocks
) -> torch.Tensor:
    """Of queries that stand ``distance`` (queries, keys) behind keys, in any order; all scores are in memory."""
    hidden = distance < 0
    if blocks.window:
        hidden = hidden | (distance >= blocks.window)
    copies = query.shape[1] // key.shape[1]
    key, value = (each.repeat_interleave(copies, dim=1) for each in (key, value))
    scores = (query @ key.transpose(-1, -2) * blocks.scale).masked_fill(hidden, float("-inf"))
    if blocks.sinks is not None:
        beside = blocks.sinks.to(scores)[:, None, None].expand(len(scores), -1, scores.shape[2], 1)
        scores = torch.cat((scores, beside), dim=-1)
    return scores.softmax(dim=-1)[..., : key.shape[2]] @ value


class _Gathered(torch.autograd.Function):
    """Keeps a rank's own keys and values, and gathers those of all again in backward."""

    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any,
        query: torch.Tensor,
        kv: torch.Tensor,
        sinks: torch.Tensor | None,
        group: dist.ProcessGroup,
        blocks: Blocks,
    ) -> torch.Tensor:
        """``kv``: keys and values beside each other."""
        whole, found = in_order(gathered(kv, group)), list[tuple[torch.Tensor, torch.Tensor]]()
        for rows, keys in _seen_by_chunks(blocks, query.shape[2]):
            key, value = _split(whole[:, :, keys], query)
            operands = (query[:, :, rows].contiguous(), key, value, sinks)
            found.append(torch.ops.planner.causal_attention(*operands, blocks.window, blocks.scale))
        output, sums = (torch.cat(parts, dim=2) for parts in zip(*found, strict=True))
        ctx.save_for_backward(query, kv, output, sums, *([] if sinks is None else [sinks]))
        ctx.group, ctx.blocks = group, blocks._replace(sinks=None)
        return output

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Of queries, of keys and values, and of sinks."""
        query, kv, output, sums, *sinks = ctx.saved_tensors
        blocks: Blocks = ctx.blocks
        whole = in_order(gathered(kv, ctx.group))
        of_whole, of_query, of_sinks = torch.zeros_like(whole, dtype=torch.float32), list[torch.Tensor](), None
        for rows, keys in _seen_by_chunks(blocks, query.shape[2]):
            key, value = _split(whole[:, :, keys], query)
            mine = [each[:, :, rows].contiguous() for each in (gradient, query, output, sums)]
            seen = [mine[1], key, value, *mine[2:]]
            found = torch.ops.planner.causal_attention_backward(
                mine[0], seen, sinks[0] if sinks else None, blocks.window, blocks.scale
            )
            of_query.append(found[0])
            of_whole[:, :, keys] += torch.cat(found[1:3], dim=-1)
            of_sinks = found[3] if of_sinks is None else of_sinks + found[3]
        of_kv = summed(by_ranks(of_whole.to(kv.dtype), blocks.num_ranks), ctx.group)
        return torch.cat(of_query, dim=2), of_kv, of_sinks if sinks else None, None, None


def _seen_by_chunks(blocks: Blocks, length: int) -> list[tuple[slice, slice]]:
    """Of a rank's two chunks of queries: where they lie among its own, and the keys that they see of all."""
    chunk = length // 2
    found: list[tuple[slice, slice]] = []
    for place, start in enumerate(chunk_starts(blocks.rank, blocks.num_ranks, chunk)):
        keys = slice(first_seen(start, blocks.window), start + chunk)
        found.append((slice(place * chunk, (place + 1) * chunk), keys))
    return found


def _split(kv: torch.Tensor, query: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    size = query.shape[-1]
    return kv[..., :size].contiguous(), kv[..., size:].contiguous()
