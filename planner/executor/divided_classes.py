"""Logarithms of probabilities, and losses of them, where the ranks of a DTensor's mesh divide the classes.

torch's ``loss_parallel`` has the forward passes. Its backward passes are those of cross entropy alone: of the two steps
the first computes both and the second nothing, so that any other loss of ``log_softmax`` would get wrong gradients
without a word. Here each step has its own. That takes one more reduction, of one number a token. What ``gather`` picks
of divided classes DTensor leaves as sums to be made, which it cannot make any more behind a ``squeeze``: they are here.
Label smoothing writes zeros into sums that are to be made, which DTensor refuses to do.
"""

# pyright: reportPrivateUsage=false
# torch gives what loss_parallel switches on no public names, and DTensor no public way to add an operator.

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._ops import OpOverload
from torch.distributed._functional_collectives import all_reduce, wait_tensor
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import loss

_aten = torch.ops.aten
_Arguments = tuple[Any, ...]
_Handler = Callable[[OpOverload, _Arguments, dict[str, object]], object]


def register_divided_classes() -> None:
    """Says to DTensor how it computes them; where the classes are not divided its own rules hold.

    To be called before each step: where a loop of the user's leaves torch's ``loss_parallel``, nothing of it is left.
    """
    handlers: dict[OpOverload, _Handler] = DTensor._op_dispatcher._custom_op_handlers
    for operator, handler in (loss.customized_loss_ops | _OWN).items():
        handlers[operator] = _where(_are_divided, handler, handlers)
    handlers[_aten.masked_fill_.Scalar] = _where(_are_sums_to_be_made, _mask_sums, handlers)


def _where(
    applies: Callable[[OpOverload, _Arguments], bool], handler: _Handler, handlers: dict[OpOverload, _Handler]
) -> _Handler:
    def handle(operator: OpOverload, args: _Arguments, kwargs: dict[str, object]) -> object:
        if applies(operator, args):
            return handler(operator, args, kwargs)
        own = handlers.pop(operator)
        try:
            return operator(*args, **kwargs)
        finally:
            handlers[operator] = own

    return handle


def _are_divided(operator: OpOverload, args: _Arguments) -> bool:
    scores, dim = _scores(operator, args)
    return isinstance(scores, DTensor) and any(placement.is_shard(dim) for placement in scores.placements)


def _scores(operator: OpOverload, args: _Arguments) -> tuple[object, int]:
    """The tensor that has a number for each class, and along which dim."""
    place_of = {argument.name: place for place, argument in enumerate(operator._schema.arguments)}
    scores = args[1 if "grad_output" in place_of else 0]
    return scores, args[place_of["dim"]] % scores.ndim if "dim" in place_of else min(1, scores.ndim - 1)


def _gather(operator: OpOverload, args: _Arguments, kwargs: dict[str, object]) -> DTensor:
    scores, dim, picked = args
    mesh, mesh_dim = scores.device_mesh, _divided(scores, dim)
    size, first = scores.placements[mesh_dim].local_shard_size_and_offset(
        scores.shape[dim], mesh.size(mesh_dim), mesh.get_local_rank(mesh_dim)
    )
    picked = picked.full_tensor() if isinstance(picked, DTensor) else picked
    here = (picked >= first) & (picked < first + size)
    local = scores.to_local()
    found = local.gather(dim, (picked - first).clamp(0, size - 1)) if size else local.new_zeros(picked.shape)
    whole = wait_tensor(all_reduce(found.masked_fill(~here, 0.0), "sum", group=(mesh, mesh_dim)))
    return DTensor.from_local(whole, mesh, [Replicate()] * mesh.ndim, run_check=False)


def _are_sums_to_be_made(_: OpOverload, args: _Arguments) -> bool:
    sums, mask, value = args
    return (
        value == 0
        and isinstance(sums, DTensor)
        and any(placement.is_partial("sum") for placement in sums.placements)
        and not any(
            placement.is_shard() for each in (sums, mask) if isinstance(each, DTensor) for placement in each.placements
        )
    )


def _mask_sums(operator: OpOverload, args: _Arguments, kwargs: dict[str, object]) -> DTensor:
    """Zeros in each rank's part of a sum are zeros in the sum."""
    sums, mask, value = args
    operator(sums.to_local(), mask.full_tensor() if isinstance(mask, DTensor) else mask, value, **kwargs)
    return sums


def _divided(scores: DTensor, dim: int) -> int:
    """The dim of its mesh that divides ``dim`` of ``scores``."""
    (found,) = [place for place, each in enumerate(scores.placements) if each.is_shard(dim % scores.ndim)]
    return found


def _log_softmax_backward(_: OpOverload, args: _Arguments, kwargs: dict[str, object]) -> DTensor:
    gradient, output, dim, dtype = args
    gradient = gradient.redistribute(placements=output.placements)
    local = gradient.to_local()
    total = all_reduce(local.sum(dim, keepdim=True), "sum", group=(output.device_mesh, _divided(output, dim)))
    return _like(output, (local - output.to_local().exp() * total).to(dtype))


def _nll_loss_backward(operator: OpOverload, args: _Arguments, kwargs: dict[str, object]) -> object:
    """Its own share of what torch computes, which adds the probabilities of all classes: there are none."""
    local = args[1].to_local()
    nothing = local.new_full((), float("-inf")).expand(local.shape)
    return loss._nll_loss_backward_handler(operator, (args[0], _like(args[1], nothing), *args[2:]), kwargs)


def _like(whole: DTensor, local: torch.Tensor) -> DTensor:
    return DTensor.from_local(
        local, whole.device_mesh, whole.placements, run_check=False, shape=whole.shape, stride=whole.stride()
    )


_OWN: dict[OpOverload, _Handler] = {
    _aten.gather.default: _gather,
    _aten._log_softmax_backward_data.default: _log_softmax_backward,
    _aten.nll_loss_backward.default: _nll_loss_backward,
    _aten.nll_loss2d_backward.default: _nll_loss_backward,
}
