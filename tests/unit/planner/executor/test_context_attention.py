"""Attention over ranks that share positions, simulated in one process, against torch's attention over all of them."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import suppress
from itertools import chain
from typing import cast

import pytest
import torch
import torch.distributed as dist
from torch.nn import functional as F  # noqa: N812

from planner.executor.context_attention import BlockAttention, Blocks, Ring, attend, part_of, positions_of

SEQ_LEN, SIZE = 16, 8


class Simulated:
    """All ranks' keys and values, which come in the order of a ring; gradients are noted for each rank."""

    def __init__(self, rank: int, held: list[torch.Tensor]) -> None:
        self.rank, self.held = rank, held
        self.found: dict[int, torch.Tensor] = {}

    def blocks(self, mine: torch.Tensor) -> Generator[tuple[int, torch.Tensor]]:
        for step in range(len(self.held)):
            source = (self.rank - step) % len(self.held)
            yield source, self.held[source].detach()

    def kept(self, mine: torch.Tensor, last: torch.Tensor) -> torch.Tensor:
        return mine

    def gradients(self, kept: torch.Tensor) -> Generator[tuple[int, torch.Tensor], torch.Tensor, torch.Tensor]:
        for source, held in self.blocks(kept):
            self.found[source] = yield source, held
        return self.found[self.rank]


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
@pytest.mark.parametrize("is_causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize("value_size", [SIZE, 4], ids=["flash", "plain"])
def test_blocks_are_attention(num_ranks: int, is_causal: bool, value_size: int) -> None:
    torch.manual_seed(0)
    query, key = torch.randn(2, 4, SEQ_LEN, SIZE), torch.randn(2, 2, SEQ_LEN, SIZE)
    value = torch.randn(2, 2, SEQ_LEN, value_size)
    whole = query.clone().requires_grad_(), key.clone().requires_grad_(), value.clone().requires_grad_()
    expected = F.scaled_dot_product_attention(*whole, is_causal=is_causal, enable_gqa=True, scale=0.7)
    gradient = torch.randn_like(expected)
    expected.backward(gradient)

    places = [positions_of(rank, num_ranks, SEQ_LEN) for rank in range(num_ranks)]
    held = [torch.cat((key, value), dim=-1)[:, :, place] for place in places]
    of_kv = torch.zeros(2, 2, SEQ_LEN, SIZE + value_size)
    for rank, place in enumerate(places):
        carrier = Simulated(rank, held)
        mine, kv = query[:, :, place].requires_grad_(), held[rank].clone().requires_grad_()
        output = BlockAttention.apply(mine, kv, carrier, Blocks(rank, num_ranks, is_causal, 0.7))
        torch.testing.assert_close(output, expected[:, :, place].detach())
        output.backward(gradient[:, :, place])
        assert whole[0].grad is not None
        torch.testing.assert_close(mine.grad, whole[0].grad[:, :, place])
        for source, found in carrier.found.items():
            of_kv[:, :, places[source]] += found
    torch.testing.assert_close(of_kv[..., :SIZE], whole[1].grad)
    torch.testing.assert_close(of_kv[..., SIZE:], whole[2].grad)


def test_sums_of_exponentials_far_apart_are_joined() -> None:
    """Scores in the hundreds overflow where a softmax is not taken from its largest."""
    torch.manual_seed(0)
    query, key, value = (torch.randn(1, 1, SEQ_LEN, SIZE) for _ in range(3))
    query = query * 200
    held = [torch.cat((key, value), dim=-1)[:, :, positions_of(rank, 2, SEQ_LEN)] for rank in range(2)]
    for rank in range(2):
        place, blocks = positions_of(rank, 2, SEQ_LEN), Blocks(rank, 2, is_causal=True, scale=1.0)
        output, sums, _ = attend(query[:, :, place], Simulated(rank, held).blocks(held[rank]), blocks)
        scores = (query @ key.transpose(-1, -2)).masked_fill(torch.ones(SEQ_LEN, SEQ_LEN).triu(1).bool(), -torch.inf)
        torch.testing.assert_close(sums, scores.logsumexp(-1)[:, :, place])
        torch.testing.assert_close(output, (scores.softmax(-1) @ value)[:, :, place])


@pytest.mark.parametrize("num_ranks", [2, 3, 8])
def test_every_rank_has_the_same_work(num_ranks: int) -> None:
    length = 12
    places = [positions_of(rank, num_ranks, length * num_ranks) for rank in range(num_ranks)]
    assert sorted(torch.cat(places).tolist()) == list(range(length * num_ranks))
    seen: list[int] = []
    for rank in range(num_ranks):
        blocks, total = Blocks(rank, num_ranks, is_causal=True, scale=1.0), 0
        for source in range(num_ranks):
            part = part_of(blocks, source, length)
            rows, columns = places[rank][part.queries], places[source][part.keys]
            visible = places[rank][:, None] >= places[source][None, :]
            computed = rows[:, None] >= columns[None, :]
            assert bool(computed.all()) is not part.is_causal  # no mask is needed but for a rank's own keys
            assert int(computed.sum()) == int(visible.sum())  # and nothing that is visible is left out
            total += int(computed.sum())
        seen.append(total)
    assert len(set(seen)) == 1


class _Recorded:
    """Stands in for torch.distributed's messages: notes what is posted and what is waited for."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.events: list[str] = []
        monkeypatch.setattr(dist, "P2POp", lambda op, tensor, group, group_peer: f"{op.__name__} {group_peer}")
        monkeypatch.setattr(dist, "batch_isend_irecv", self._posted)

    def _posted(self, operations: list[str]) -> list[_Recorded]:
        self.events.append(", ".join(operations))
        return [self]

    def wait(self) -> None:
        self.events.append("wait")


class _Group:
    """The process group of rank 0 of ``num_ranks``."""

    def __init__(self, num_ranks: int) -> None:
        self._num_ranks = num_ranks

    def rank(self) -> int:
        return 0

    def size(self) -> int:
        return self._num_ranks


@pytest.mark.parametrize("num_ranks", [2, 3, 5])
def test_every_message_of_a_ring_runs_beside_a_block(num_ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Posted before attention works on a block, receives first, and waited for after it, with no other wait."""
    last = num_ranks - 1
    keys = torch.ones(1, 1, 4, 8)

    recorded = _Recorded(monkeypatch)
    ring = Ring(cast("dist.ProcessGroup", _Group(num_ranks)))
    for source, _ in ring.blocks(keys):
        recorded.events.append(f"block of {source}")
    there = f"irecv {last}, isend 1"
    steps = [[there, f"block of {-step % num_ranks}", "wait"] for step in range(last)]
    assert recorded.events == [*chain.from_iterable(steps), "block of 1"]

    recorded.events.clear()
    visits = ring.gradients(keys)
    source, held = next(visits)
    with suppress(StopIteration):
        while True:
            recorded.events.append(f"block of {source}")
            source, held = visits.send(torch.zeros_like(held))
    one, two = f"irecv 1, isend {last}", f"irecv 1, irecv 1, isend {last}, isend {last}"
    posted = [one, *[two] * (num_ranks - 2), one]
    steps = [[message, f"block of {(1 + step) % num_ranks}", "wait"] for step, message in enumerate(posted)]
    assert recorded.events == list(chain.from_iterable(steps))
