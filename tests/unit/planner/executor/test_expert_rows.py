"""Rows that are with their experts: what is done there, what brings them back, and that both come to the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import pytest
import torch
import torch.distributed as dist
from torch.nn import functional as F  # noqa: N812

from planner.errors import ModelError
from planner.executor.expert_rows import Exchange, ExpertRows

NUM_ROWS, WIDTH = 6, 4
Function = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


class Elsewhere:
    """An exchange of one rank with itself: rows lie in another order there."""

    def __init__(self) -> None:
        self.num_rows, self.num_sent, self.num_returned = NUM_ROWS, 0, 0
        self.order = torch.tensor([3, 0, 5, 1, 4, 2])

    def dispatched(self, rows: torch.Tensor) -> torch.Tensor:
        self.num_sent += 1
        return rows[self.order]

    def combined(self, rows: torch.Tensor) -> torch.Tensor:
        self.num_returned += 1
        return rows[self.order.argsort()]


def results(function: Function) -> tuple[torch.Tensor, torch.Tensor, Elsewhere]:
    """What ``function`` of rows and a column makes of both gradients and values, here and there."""
    found: list[torch.Tensor] = []
    exchange = Elsewhere()
    for is_away in (False, True):
        torch.manual_seed(0)
        leaf = torch.randn(NUM_ROWS, WIDTH, requires_grad=True)
        column = torch.rand(NUM_ROWS, 1, requires_grad=True)
        rows = leaf * 1.0
        if is_away:
            rows = ExpertRows(rows[exchange.order], cast("Exchange", exchange))
        result = function(rows, column)
        num_returned = exchange.num_returned
        whole = result.home() if isinstance(result, ExpertRows) else result
        exchange.num_returned = num_returned  # by the function alone
        (whole.float() * torch.arange(1, whole.numel() + 1).view_as(whole)).sum().backward()
        assert leaf.grad is not None
        parts = [whole.detach(), leaf.grad, torch.zeros(1) if column.grad is None else column.grad]
        found.append(torch.cat([part.flatten() for part in parts]))
    return found[0], found[1], exchange


THERE: dict[str, Function] = {
    "an activation": lambda rows, _: F.silu(rows),
    "another": lambda rows, _: F.gelu(rows),
    "a gate": lambda rows, _: F.silu(rows.chunk(2, dim=-1)[0]) * rows.chunk(2, dim=-1)[1],
    "every other column": lambda rows, _: rows[..., ::2] * rows[:, 1::2],
    "numbers": lambda rows, _: 2 * (1 - rows) / 3 + 1,
    "the same for all": lambda rows, _: rows * torch.arange(WIDTH) + torch.ones(1, WIDTH),
    "in place": lambda rows, _: (rows * 1).mul_(2).clamp_(min=-0.5),
    "another dtype": lambda rows, _: rows.to(torch.float64).float(),
}
SENT: dict[str, Function] = {
    "weights": lambda rows, column: rows * column,
    "weights first": lambda rows, column: column * rows,
    "added in place": lambda rows, column: (rows * 1).add_(column.expand(-1, WIDTH)),
}
HERE: dict[str, Function] = {
    "another order": lambda rows, _: rows.index_select(0, torch.arange(NUM_ROWS).flip(0)),
    "summed": lambda rows, _: rows.view(3, 2, WIDTH).sum(dim=1),
    "a part of the rows": lambda rows, _: rows[1:3],
    "cut by rows": lambda rows, _: torch.cat(rows.chunk(2)[::-1]),
    "one column": lambda rows, _: rows[..., 0],
    "a product": lambda rows, _: rows @ torch.arange(WIDTH * 2.0).view(WIDTH, 2),
    "along the rows": lambda rows, _: rows.softmax(dim=0),
    "chosen rows": lambda rows, _: rows[torch.tensor([4, 0, 2])],
    "as they are": lambda rows, _: rows[()],
    "written into others": lambda rows, column: (column.expand(-1, WIDTH) * 1).mul_(rows),
}


@pytest.mark.parametrize("what", THERE)
def test_what_works_on_rows_is_done_where_they_are(what: str) -> None:
    here, there, exchange = results(THERE[what])
    torch.testing.assert_close(here, there, rtol=1e-6, atol=1e-6)
    assert (exchange.num_sent, exchange.num_returned) == (0, 0)


@pytest.mark.parametrize("what", SENT)
def test_other_rows_follow_them(what: str) -> None:
    here, there, exchange = results(SENT[what])
    torch.testing.assert_close(here, there, rtol=1e-6, atol=1e-6)
    assert (exchange.num_sent, exchange.num_returned) == (1, 0)


@pytest.mark.parametrize("what", HERE)
def test_anything_else_brings_them_back_once(what: str) -> None:
    here, there, exchange = results(HERE[what])
    torch.testing.assert_close(here, there, rtol=1e-6, atol=1e-6)
    assert (exchange.num_sent, exchange.num_returned) == (0, 1)


def test_rows_that_were_brought_back_stay() -> None:
    exchange = Elsewhere()
    rows = ExpertRows(torch.randn(NUM_ROWS, WIDTH), cast("Exchange", exchange))
    rows.sum()
    assert not rows.is_away
    assert not isinstance(rows * 2, ExpertRows)
    assert exchange.num_returned == 1
    others = ExpertRows(torch.randn(NUM_ROWS, WIDTH), cast("Exchange", exchange))
    before = rows.home().clone()
    rows.mul_(others)
    torch.testing.assert_close(rows.home(), before * others.home())


def test_the_model_sees_the_size_of_all_rows() -> None:
    rows = ExpertRows(torch.randn(2, WIDTH), cast("Exchange", Elsewhere()))
    assert (tuple(rows.shape), rows.size(-1), len(rows), rows.ndim) == ((NUM_ROWS, WIDTH), WIDTH, NUM_ROWS, 2)
    assert (rows.dtype, rows.device.type, rows.requires_grad) == (torch.float32, "cpu", False)


def test_rows_of_no_expert_stay_and_come_back_as_zeros() -> None:
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    try:
        assert dist.group.WORLD is not None
        exchange = Exchange(torch.tensor([2, 2, 5], dtype=torch.int32), NUM_ROWS, dist.group.WORLD)
        leaf = torch.randn(NUM_ROWS, WIDTH, requires_grad=True)
        there = exchange.dispatched(leaf)
        torch.testing.assert_close(there, leaf[:5])
        assert exchange.ends.tolist() == [2, 2, 5]
        home = exchange.combined(there * 2)
        torch.testing.assert_close(home, torch.cat((leaf[:5] * 2, torch.zeros(1, WIDTH))))
        home.sum().backward()
        assert leaf.grad is not None
        torch.testing.assert_close(leaf.grad, torch.cat((torch.full((5, WIDTH), 2.0), torch.zeros(1, WIDTH))))
    finally:
        dist.destroy_process_group()


def test_rows_that_leave_torch_are_refused() -> None:
    class Own(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, rows: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            return rows + 1

    rows = ExpertRows(torch.randn(NUM_ROWS, WIDTH), cast("Exchange", Elsewhere()))
    with torch._C.DisableTorchFunctionSubclass(), pytest.raises(ModelError, match="under expert parallelism"):
        Own.apply(rows)
