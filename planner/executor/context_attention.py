"""Attention over positions that the ranks of a group share, exactly: gathered, passed round a ring, or by heads.

Of n ranks, rank r holds the chunks r and 2n - 1 - r of the 2n that a sequence is cut into (zig-zag), in this order, so
that a causal mask leaves every rank the same work. What a rank's queries see of another's keys is then without a mask:

    its own keys          as in any causal attention, for a rank's positions ascend
    of a rank before it   the first half of the keys, by all queries
    of a rank behind it   all keys, by the second half of the queries

Each of these blocks gives an output and the logarithm of its sum of exponentials; these are joined as Milakov and
Gimelshein join parts of a softmax (2018), in float32. Gradients travel in the
dtype of keys. Backward repeats the blocks with the whole output and sum, which
is what makes each block's gradients its part of the whole (Liu et al., "Ring Attention", 2023).
"""

# pyright: reportPrivateUsage=false
# torch has no public name for attention that returns its sums of exponentials.

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from typing import NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch.autograd.function import FunctionCtx
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.nn import functional as F  # noqa: N812

from planner.models.causal_attention import has_flash_kernel

_aten = torch.ops.aten


class Part(NamedTuple):
    """What the queries of a rank see of another's keys."""

    queries: slice
    keys: slice
    is_causal: bool


class Blocks(NamedTuple):
    """How attention is meant: the rank among ``num_ranks``, the mask, the factor of scores, and a number a head.

    ``window``: keys that a query sees at most, its own with them; 0 for all.
    """

    rank: int
    num_ranks: int
    is_causal: bool
    scale: float
    window: int = 0
    sinks: torch.Tensor | None = None

    @property
    def has_window_or_sinks(self) -> bool:
        """Whether ``scaled_dot_product_attention`` cannot be told so."""
        return self.window > 0 or self.sinks is not None


class Carrier(Protocol):
    """Brings every rank's keys and values, one tensor (batch, heads, length, sizes of both), to this one."""

    def blocks(self, mine: torch.Tensor) -> Generator[tuple[int, torch.Tensor]]:
        """Pairs of a rank and what it holds, this rank's own first."""
        ...

    def kept(self, mine: torch.Tensor, last: torch.Tensor) -> torch.Tensor:
        """Of this rank's own and of what ``blocks`` came to last, the one to keep for ``gradients``."""
        ...

    def gradients(self, kept: torch.Tensor) -> Generator[tuple[int, torch.Tensor], torch.Tensor, torch.Tensor]:
        """All pairs, each answered with its gradient; returns the sum of all ranks' gradients of this rank's own."""
        ...


def positions_of(rank: int, num_ranks: int, seq_len: int) -> torch.Tensor:
    """Positions (seq_len / num_ranks,) that a rank holds, ascending."""
    chunk = seq_len // (2 * num_ranks)
    return torch.cat([torch.arange(start, start + chunk) for start in chunk_starts(rank, num_ranks, chunk)])


def chunk_starts(rank: int, num_ranks: int, chunk: int) -> tuple[int, int]:
    """The first positions of a rank's two chunks, of ``chunk`` each."""
    return rank * chunk, (2 * num_ranks - 1 - rank) * chunk


def part_of(blocks: Blocks, source: int, length: int) -> Part:
    """What queries see of the ``length`` keys of rank ``source``."""
    everything, half = slice(None), length // 2
    if not blocks.is_causal:
        return Part(everything, everything, is_causal=False)
    if source == blocks.rank:
        return Part(everything, everything, is_causal=True)
    if source < blocks.rank:
        return Part(everything, slice(half), is_causal=False)
    return Part(slice(half, None), everything, is_causal=False)


class BlockAttention(torch.autograd.Function):
    """Attention of this rank's queries over all ranks' keys. ``kv``: keys and values beside each other."""

    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: FunctionCtx, query: torch.Tensor, kv: torch.Tensor, carrier: Carrier, blocks: Blocks
    ) -> torch.Tensor:
        """``query`` (batch, heads, length, size); the output has the values' size."""
        output, sums, last = attend(query, carrier.blocks(kv), blocks)
        output = output.to(query.dtype)
        ctx.save_for_backward(query, carrier.kept(kv, last), output, sums)
        ctx.carrier, ctx.blocks = carrier, blocks  # pyright: ignore[reportAttributeAccessIssue]
        return output

    @staticmethod
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: FunctionCtx, gradient: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, None, None]:
        """Gradients of queries, keys and values."""
        query, kept, output, sums = ctx.saved_tensors  # pyright: ignore[reportAttributeAccessIssue]
        carrier: Carrier = ctx.carrier  # pyright: ignore[reportAttributeAccessIssue]
        blocks: Blocks = ctx.blocks  # pyright: ignore[reportAttributeAccessIssue]
        of_query = torch.zeros_like(query, dtype=torch.float32)
        visits = carrier.gradients(kept)
        source, held = next(visits)
        while True:
            part = part_of(blocks, source, held.shape[2])
            rows, of_kv = part.queries, torch.zeros_like(held, dtype=torch.float32)
            seen = (query[:, :, rows], held[:, :, part.keys], output[:, :, rows], sums[:, :, rows])
            mine, theirs = _block_backward(gradient[:, :, rows], seen, part.is_causal, blocks.scale)
            of_query[:, :, rows] += mine
            of_kv[:, :, part.keys] += theirs
            try:
                source, held = visits.send(of_kv)
            except StopIteration as end:
                return of_query.to(query.dtype), end.value.to(kept.dtype), None, None


def attend(
    query: torch.Tensor, visits: Generator[tuple[int, torch.Tensor]], blocks: Blocks
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Output and logarithms of sums, in float32, over the blocks of ``visits``, and the last; its own is the first."""
    output = sums = held = query.new_zeros(0)
    for source, held in visits:
        part = part_of(blocks, source, held.shape[2])
        rows = part.queries
        found, found_sums = _block_forward(query[:, :, rows], held[:, :, part.keys], part.is_causal, blocks.scale)
        if source == blocks.rank:
            output, sums = found.float().clone(), found_sums.clone()
            continue
        joined = torch.logaddexp(sums[:, :, rows], found_sums)
        before, added = ((each - joined).exp().unsqueeze(-1) for each in (sums[:, :, rows], found_sums))
        output[:, :, rows] = output[:, :, rows] * before + found.float() * added
        sums[:, :, rows] = joined
    return output, sums, held


def _split(query: torch.Tensor, kv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values, as many heads of each as of queries."""
    copies = query.shape[1] // kv.shape[1]
    whole = kv.repeat_interleave(copies, dim=1) if copies > 1 else kv
    size = query.shape[-1]
    return whole[..., :size], whole[..., size:]


def _kernel(query: torch.Tensor, value: torch.Tensor) -> str:
    """Which of torch's kernels takes these: ``cpu``, ``cuda``, or none."""
    if query.device.type == "cpu":
        return "cpu" if value.shape[-1] == query.shape[-1] else ""
    return "cuda" if has_flash_kernel(query, value) else ""


def _block_forward(
    query: torch.Tensor, kv: torch.Tensor, is_causal: bool, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    key, value = _split(query, kv)
    match _kernel(query, value):
        case "cpu":
            return _aten._scaled_dot_product_flash_attention_for_cpu(query, key, value, 0.0, is_causal, scale=scale)
        case "cuda":
            found = _aten._scaled_dot_product_flash_attention(query, key, value, 0.0, is_causal, scale=scale)
            return found[0], found[1]
        case _:
            scores = _scores(query, key, is_causal, scale)
            sums = scores.logsumexp(dim=-1)
            return (scores - sums.unsqueeze(-1)).exp() @ value.float(), sums


def _block_backward(
    gradient: torch.Tensor, seen: Sequence[torch.Tensor], is_causal: bool, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Of queries, and of keys and values beside each other; ``seen``: queries, keys and values, output, sums."""
    query, kv, output, sums = seen
    key, value = _split(query, kv)
    match _kernel(query, value):
        case "cpu":
            of_query, of_key, of_value = _aten._scaled_dot_product_flash_attention_for_cpu_backward(
                gradient, query, key, value, output, sums, 0.0, is_causal, scale=scale
            )
        case "cuda":
            none = torch.zeros((), dtype=torch.int64, device=query.device)  # of random numbers, for there is no dropout
            of_query, of_key, of_value = _aten._scaled_dot_product_flash_attention_backward(
                *(gradient, query, key, value, output, sums, None, None, query.shape[2], key.shape[2], 0.0, is_causal),
                *(none, none),
                scale=scale,
            )
        case _:
            shares = (_scores(query, key, is_causal, scale) - sums.unsqueeze(-1)).exp()
            gradient = gradient.float()
            of_value = shares.transpose(-1, -2) @ gradient
            of_shares = gradient @ value.float().transpose(-1, -2)
            of_scores = shares * (of_shares - (gradient * output.float()).sum(dim=-1, keepdim=True)) * scale
            of_query, of_key = of_scores @ key.float(), of_scores.transpose(-1, -2) @ query.float()
    of_kv = torch.cat((of_key.float(), of_value.float()), dim=-1)
    if of_kv.shape[1] != kv.shape[1]:
        of_kv = of_kv.unflatten(1, (kv.shape[1], -1)).sum(dim=2)
    return of_query.float(), of_kv


def _scores(query: torch.Tensor, key: torch.Tensor, is_causal: bool, scale: float) -> torch.Tensor:
    scores = (query.float() @ key.float().transpose(-1, -2)) * scale
    if not is_causal:
        return scores
    future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
    return scores.masked_fill(future, float("-inf"))


class Gathered:
    """Keys and values of all ranks at once, and again in backward, where gradients are reduce-scattered."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group

    def blocks(self, mine: torch.Tensor) -> Generator[tuple[int, torch.Tensor]]:
        """See ``Carrier``."""
        rank, num_ranks = self._group.rank(), self._group.size()
        whole = gathered(mine, self._group)
        for step in range(num_ranks):
            source = (rank - step) % num_ranks
            yield source, whole[source]

    def kept(self, mine: torch.Tensor, last: torch.Tensor) -> torch.Tensor:
        """This rank's own: the last lies in what was gathered."""
        return mine

    def gradients(self, kept: torch.Tensor) -> Generator[tuple[int, torch.Tensor], torch.Tensor, torch.Tensor]:
        """See ``Carrier``."""
        of_all = kept.new_empty((self._group.size(), *kept.shape))
        for source, held in self.blocks(kept):
            of_all[source] = yield source, held
        return summed(of_all, self._group)


class Ring:
    """Keys and values pass from rank to rank, each while attention works on the one before; gradients follow them.

    Backward goes round the other way, from what came last in forward to this rank's own: the gradients of a rank's own
    come home while it works on this block, and no message is waited for with nothing to do (as NVIDIA's Transformer
    Engine orders it).
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group

    def blocks(self, mine: torch.Tensor) -> Generator[tuple[int, torch.Tensor]]:
        """See ``Carrier``."""
        rank, num_ranks = self._group.rank(), self._group.size()
        held = mine.contiguous()
        for step in range(num_ranks):
            coming = self._passed_on([held] if step < num_ranks - 1 else [], 1)
            yield (rank - step) % num_ranks, held
            held = next(coming, held)

    def kept(self, mine: torch.Tensor, last: torch.Tensor) -> torch.Tensor:
        """The last, with which backward begins."""
        return last

    def gradients(self, kept: torch.Tensor) -> Generator[tuple[int, torch.Tensor], torch.Tensor, torch.Tensor]:
        """See ``Carrier``. With a block's keys and values go the gradients of the block before, to whoever has it."""
        rank, num_ranks = self._group.rank(), self._group.size()
        held = found = kept.contiguous()
        for step in range(num_ranks):
            keys = [held] if step < num_ranks - 1 else []
            sums = [found.to(kept.dtype)] if step else []
            coming = self._passed_on([*keys, *sums], -1)
            del found  # what is on its way is in the dtype of keys
            found = yield (rank + 1 + step) % num_ranks, held
            held = next(coming) if keys else held
            found = found + next(coming) if sums else found
        return found

    def _passed_on(self, tensors: Sequence[torch.Tensor], way: int) -> Iterator[torch.Tensor]:
        """Sends ``tensors`` to the next rank one ``way``, 1 or -1; what comes this way is waited for when asked for."""
        rank, num_ranks = self._group.rank(), self._group.size()
        arriving = [torch.empty_like(each) for each in tensors]
        ahead, behind = (rank + way) % num_ranks, (rank - way) % num_ranks
        receives = [dist.P2POp(dist.irecv, each, group=self._group, group_peer=behind) for each in arriving]
        sends = [dist.P2POp(dist.isend, each, group=self._group, group_peer=ahead) for each in tensors]
        # Receives first: over gloo both ways go at once then, and one after the other else.
        works = dist.batch_isend_irecv([*receives, *sends]) if tensors else []

        def arrived() -> Iterator[torch.Tensor]:
            for work in works:
                work.wait()
            yield from arriving

        return arrived()


def attention_by_heads(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, group: dist.ProcessGroup, blocks: Blocks
) -> torch.Tensor:
    """Every rank attends over all positions for its part of the heads."""

    def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        grouped = query.shape[1] != key.shape[1]
        return F.scaled_dot_product_attention(
            query, key, value, is_causal=blocks.is_causal, scale=blocks.scale, enable_gqa=grouped
        )

    return by_heads((query, key, value), group, attend)


def by_heads(
    qkv: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    group: dist.ProcessGroup,
    attend: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor],
) -> torch.Tensor:
    """What ``attend`` makes of all positions of some heads on each rank (Jacobs et al., "DeepSpeed Ulysses", 2023)."""
    query, key, value = (_whole_positions(each, group) for each in qkv)
    output, num_ranks = attend(query, key, value), group.size()
    received = _exchanged(by_ranks(output, num_ranks), group)  # (ranks, batch, heads of that rank, length, size)
    return received.movedim(0, 1).flatten(1, 2)


def _whole_positions(tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """(batch, heads, length, size) -> (batch, heads / ranks, all positions in order, size)."""
    return in_order(_exchanged(tensor.unflatten(1, (group.size(), -1)).movedim(1, 0), group))


def gathered(mine: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """What every rank has, (ranks, ...)."""
    flat = mine.new_empty((group.size() * len(mine), *mine.shape[1:]))  # as gloo wants it
    dist.all_gather_single(flat, mine.contiguous(), group=group)
    return flat.unflatten(0, (group.size(), -1))


def summed(for_all: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """The sum of what all ranks have for this one; ``for_all``: (ranks, ...)."""
    for_all = for_all.contiguous()
    total = torch.empty_like(for_all[0])
    dist.reduce_scatter_single(total, for_all.flatten(0, 1), group=group)
    return total


def in_order(of_ranks: torch.Tensor) -> torch.Tensor:
    """(ranks, batch, heads, length, size), by whose positions they are -> (batch, heads, all positions, size)."""
    first, second = of_ranks.movedim(0, 2).chunk(2, dim=3)  # (batch, heads, ranks, chunk, size)
    return torch.cat((first, second.flip(2)), dim=2).flatten(2, 3)


def by_ranks(whole: torch.Tensor, num_ranks: int) -> torch.Tensor:
    """The way back of ``in_order``."""
    first, second = whole.unflatten(2, (2, num_ranks, -1)).unbind(dim=2)  # each (batch, heads, ranks, chunk, size)
    return torch.cat((first, second.flip(2)), dim=3).movedim(2, 0)


def _exchanged(parts: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """``parts`` (ranks, ...), one for each rank; what each rank had for this one comes back."""
    each = [1] * group.size()
    return all_to_all_single_autograd(parts.contiguous(), each, each, group)
