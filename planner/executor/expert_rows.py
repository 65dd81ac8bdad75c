"""Rows of experts' layers on their way: sent to the rank of their expert, worked on there, and brought back.

A model sorts rows by expert and multiplies each with its expert's matrix. ``Exchange`` sends rows to the ranks that
hold their experts and brings results back, both with their gradients. ``ExpertRows`` stands, in the model's own code,
for rows that are away: what works on each row for itself is done where they are, and anything else brings them back
first.
"""

# pyright: reportPrivateUsage=false
# torch has no public way to look at a tensor's own size past its class's functions.

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed._functional_collectives import all_to_all_single_autograd, wait_tensor
from torch.distributed.tensor import DTensor, Replicate
from torch.nn import functional as F  # noqa: N812
from torch.utils._pytree import tree_leaves, tree_map_only

from planner.errors import ModelError
from planner.executor.tensor_parallel import redistribute
from planner.operators.elementwise import ELEMENTWISE
from planner.operators.record import Trait
from planner.operators.registry import base_of, operator_called

Function = Callable[..., object]

_SIZES = ("shape", "dtype", "device", "ndim", "requires_grad", "is_meta")
_KNOWN_OF_ROWS = frozenset(getattr(torch.Tensor, name).__get__ for name in _SIZES) | {
    torch.Tensor.size,
    torch.Tensor.dim,
    torch.Tensor.is_floating_point,
    torch.Tensor.__len__,
}
_OF_ELEMENTS = frozenset(name for each in ELEMENTWISE if not each.has(Trait.DROPOUT) for name in each.names)
_CUTS = operator_called("split").names  # along a dim, the first unless they are told another


class Exchange:
    """Where the rows of one layer go. ``group``: the ranks among which experts are divided, equally and in order."""

    def __init__(self, ends: torch.Tensor, num_rows: int, group: dist.ProcessGroup) -> None:
        """``ends``: (experts,), one past the last row of each expert, of ``num_rows`` in all. Collective."""
        self.num_rows, self._group = num_rows, group
        num_ranks = group.size()
        ends = ends.full_tensor() if isinstance(ends, DTensor) else ends
        with torch.no_grad(), torch._C.DisableTorchFunction():  # a model with shared positions answers arange
            counts = ends.long().diff(prepend=ends.new_zeros(1, dtype=torch.int64))
            arriving = wait_tensor(_exchanged(counts, [len(counts) // num_ranks] * num_ranks, None, group))
            arriving = arriving.view(num_ranks, -1)  # by the rank that sends, and the expert here
            self._sent, self._received = _sizes(counts.view(num_ranks, -1), arriving, num_rows)
            num_arriving = sum(self._received)
            expert = torch.arange(arriving.shape[1], device=ends.device).repeat(num_ranks)
            expert = expert.repeat_interleave(arriving.flatten(), output_size=num_arriving)
            self._order = expert.argsort(stable=True)
            self._back = self._order.argsort()
            self.ends = arriving.sum(dim=0).cumsum(dim=0).to(ends.dtype)

    def dispatched(self, rows: torch.Tensor) -> torch.Tensor:
        """``rows`` (``num_rows``, ...) -> those of this rank's experts, sorted by expert. Collective."""
        return _each_part(self._dispatched, rows)

    def combined(self, rows: torch.Tensor) -> torch.Tensor:
        """The way back. Rows of no expert, behind the last, are zero. Collective."""
        return _each_part(self._combined, rows)

    def _dispatched(self, rows: torch.Tensor) -> torch.Tensor:
        arriving = _exchanged(rows[: sum(self._sent)], self._received, self._sent, self._group)
        return arriving.index_select(0, self._order)

    def _combined(self, rows: torch.Tensor) -> torch.Tensor:
        home = wait_tensor(_exchanged(rows.index_select(0, self._back), self._sent, self._received, self._group))
        missing = self.num_rows - len(home)
        return F.pad(home, [0, 0] * (home.ndim - 1) + [0, missing]) if missing else home


def _each_part(move: Callable[[torch.Tensor], torch.Tensor], rows: torch.Tensor) -> torch.Tensor:
    """What ``move`` makes of ``rows``; where tensor parallelism divides their width, or sums them, of each part."""
    if not isinstance(rows, DTensor):
        return move(rows)
    mesh, (placement,) = rows.device_mesh, rows.placements
    if placement.is_shard(0):
        placement = Replicate()
        rows = redistribute(rows, mesh, placement)
    return DTensor.from_local(move(rows.to_local()), mesh, [placement], run_check=False)


def _exchanged(
    rows: torch.Tensor, received: Sequence[int], sent: Sequence[int] | None, group: dist.ProcessGroup
) -> torch.Tensor:
    return all_to_all_single_autograd(rows.contiguous(), list(received), list(sent or received), group)


def _sizes(sent: torch.Tensor, received: torch.Tensor, num_rows: int) -> tuple[list[int], list[int]]:
    """Rows to and from each rank; where tensors have no values, as when a plan is only checked, equal parts."""
    if isinstance(sent, FakeTensor):
        part = [num_rows // len(sent)] * len(sent)
        return part, part
    to, back = torch.stack([sent.sum(dim=1), received.sum(dim=1)]).tolist()
    return to, back


class ExpertRows(torch.Tensor):
    """Rows (rows, width) of the model that are with their experts, as ``local`` rows of this rank's."""

    local: torch.Tensor
    exchange: Exchange
    _home: torch.Tensor | None  # once they were brought back: from then on these are the rows

    @staticmethod
    def __new__(cls: type[ExpertRows], local: torch.Tensor, exchange: Exchange) -> ExpertRows:
        """``local`` (rows here, width): what ``exchange`` dispatched, or what became of it."""
        shape = (exchange.num_rows, *local.shape[1:])
        rows = torch.Tensor._make_wrapper_subclass(
            cls, shape, dtype=local.dtype, device=local.device, requires_grad=local.requires_grad
        )
        rows.local, rows.exchange, rows._home = local, exchange, None
        return rows

    def __init__(self, local: torch.Tensor, exchange: Exchange) -> None:
        """Made by ``__new__``, as every tensor."""

    @property
    def is_away(self) -> bool:
        """Whether they have not been brought back."""
        return self._home is None

    def home(self) -> torch.Tensor:
        """All rows as the model has them. Collective the first time."""
        if self._home is None:
            self._home = self.exchange.combined(self.local)
        return self._home

    @classmethod
    def __torch_function__(
        cls, func: Function, types: object, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> object:
        kwargs = dict(kwargs or {})
        if func in _KNOWN_OF_ROWS:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        exchange = _where(func, args, kwargs)
        if exchange is None:
            home = ExpertRows.home
            return func(*tree_map_only(ExpertRows, home, args), **tree_map_only(ExpertRows, home, kwargs))
        there = functools.partial(_there, exchange)
        result = func(*tree_map_only(torch.Tensor, there, args), **tree_map_only(torch.Tensor, there, kwargs))
        if _writes(func):
            return args[0]
        return tree_map_only(torch.Tensor, lambda local: ExpertRows(local, exchange), result)

    @classmethod
    def __torch_dispatch__(cls, func: Function, types: object, args: object = (), kwargs: object = None) -> object:
        raise ModelError(
            f"under expert parallelism the model cannot be run: it hands rows of experts to {func}, past torch's "
            "functions",
            hint="compute on them with functions of torch, or plan with --ep 1",
        )


def _where(func: Function, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Exchange | None:
    """Where ``func`` can be done row by row; None where it cannot, as far as is known."""
    tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    away = [each for each in tensors if isinstance(each, ExpertRows) and each.is_away]
    exchanges = {id(each.exchange): each.exchange for each in away}
    if len(exchanges) != 1 or "out" in kwargs or (_writes(func) and not any(args[0] is each for each in away)):
        return None
    exchange, ndim = away[0].exchange, away[0].ndim
    fits = all(each.ndim < ndim or (each.ndim == ndim and len(each) in (1, exchange.num_rows)) for each in tensors)
    return exchange if fits and _keeps_rows(func, args, kwargs) else None


def _keeps_rows(func: Function, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Whether each row of the result is made of the same rows of the operands."""
    name = base_of(_name(func))
    if name in _CUTS:
        dim = kwargs.get("dim", next(iter(args[2:]), 0))
        return dim % args[0].ndim != 0
    if name == "__getitem__":
        index: list[object] = list(args[1]) if isinstance(args[1], tuple) else [args[1]]
        others = all(isinstance(each, slice) for each in index[1:])
        is_whole = index[:1] == [slice(None)] or (index[:1] == [Ellipsis] and len(index) <= args[0].ndim)
        return others and is_whole
    return name.strip("_") in _OF_ELEMENTS


def _there(exchange: Exchange, tensor: torch.Tensor) -> torch.Tensor:
    """What of ``tensor`` goes with the rows: a row for each of them, or the same for all."""
    if isinstance(tensor, ExpertRows):
        return tensor.local if tensor.is_away else exchange.dispatched(tensor.home())
    return exchange.dispatched(tensor) if tensor.ndim > 1 and len(tensor) == exchange.num_rows else tensor


def _writes(func: Function) -> bool:
    return base_of(_name(func)) != _name(func)


def _name(func: Function) -> str:
    return str(getattr(func, "__name__", ""))
