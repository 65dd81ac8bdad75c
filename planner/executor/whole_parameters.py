"""ZeRO 0 in float32: parameters are left as they are, and gradients are all-reduced once a step.

A unit's gradients are reduced in place, in one collective, as soon as the last backward pass of the step has made all
of them, so that this hides behind the units before. Collectives begin in one order on all ranks, in which units run
backward. A unit of which something got no gradient, and one whose gradients autograd's hooks do not see, is reduced at
the end of the step.
"""

# pyright: reportPrivateUsage=false

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from planner.errors import ModelError
from planner.executor.data_parallel import DataParallel

# In place and all at once: what torch.distributed has of that under a public name is deprecated.
_collectives: Any = torch.ops._c10d_functional
GroupOf = Callable[[nn.Parameter], dist.ProcessGroup]


@dataclass
class _Bucket:
    """Parameters whose gradients the ranks of ``group`` reduce as one."""

    parameters: tuple[nn.Parameter, ...]
    group: dist.ProcessGroup
    missing: set[nn.Parameter] = field(default_factory=set)  # those without a gradient in the last backward pass
    is_reduced: bool = False

    @property
    def trained(self) -> list[nn.Parameter]:
        """Those that are trained now: a loop of one's own may freeze or unfreeze some midway, on all ranks."""
        return [parameter for parameter in self.parameters if parameter.requires_grad]

    def start_over(self) -> None:
        self.missing, self.is_reduced = set(self.trained), False


class WholeParameters(DataParallel):
    """A stage whose parameters lie whole, but for tensor and expert parallelism, on each of ``group_of``'s ranks.

    ``units``: FQNs of modules in the order in which they run forward; what is outside them is reduced last.
    """

    def __init__(self, root: nn.Module, units: Sequence[str], device: torch.device, group_of: GroupOf) -> None:
        super().__init__(root, device)
        _move(root, device)
        self._buckets = _buckets(root, units, group_of)
        self._is_last, self._next = False, 0
        self._under_way: list[torch.Tensor] = []
        self._zeros: list[nn.Parameter] = []  # which have some in place of a gradient
        for bucket in self._buckets:
            for parameter in bucket.parameters if bucket.group.size() > 1 else ():
                _hook(parameter, partial(self._arrived, bucket))

    def prepare_backward(self, *, last: bool) -> None:
        """Only gradients of the last pass are reduced, with those that they were added to."""
        self._is_last = last
        if last:
            for bucket in self._buckets:
                bucket.start_over()

    def finish_weights(self, *, last: bool) -> None:
        """Begins to reduce everything, where all of it is there."""
        if last:
            self._reduce_first(len(self._buckets))

    def finish_step(self) -> None:
        """Reduces what is left, and waits."""
        self._reduce_first(len(self._buckets))
        for gradient in self._under_way:
            _collectives.wait_tensor(gradient)
        self._under_way.clear()
        self.unreached, self._zeros = frozenset(self._zeros), []
        self._is_last, self._next = False, 0

    def finish_forward(self) -> None:
        """Nothing: there are no copies."""

    def share_reductions(self, reductions: list[Any]) -> None:
        """Nothing: there are no buffers."""

    def _arrived(self, bucket: _Bucket, parameter: nn.Parameter) -> None:
        if not self._is_last:
            return
        if bucket.is_reduced:
            raise ModelError(
                "a backward pass makes the gradient of a parameter in several parts, as reentrant checkpoints do, and "
                "the first was taken for all of it",
                hint="give torch.utils.checkpoint use_reentrant=False, or plan with --zero 1",
            )
        bucket.missing.discard(parameter)
        ready = self._next
        while ready < len(self._buckets) and not self._buckets[ready].missing:
            ready += 1
        self._reduce_first(ready)

    @torch.no_grad()
    def _reduce_first(self, number: int) -> None:
        """Begins with those of the first so many buckets that are still to be reduced."""
        while self._next < number:
            bucket = self._buckets[self._next]
            bucket.is_reduced, self._next = True, self._next + 1
            self._zeros += [parameter for parameter in bucket.trained if parameter.grad is None]
            gradients = [settled_gradient(parameter) for parameter in bucket.trained]
            if bucket.group.size() > 1 and gradients:
                for gradient in gradients:
                    gradient.div_(bucket.group.size())
                _collectives.all_reduce_coalesced_(gradients, "sum", bucket.group.group_name)
                self._under_way += gradients


def _hook(parameter: nn.Parameter, arrived: Callable[[nn.Parameter], None]) -> None:
    """Calls ``arrived`` whenever ``parameter`` has a gradient; torch takes no such hook for one that is frozen now."""
    is_trained = parameter.requires_grad
    parameter.requires_grad_(True).register_post_accumulate_grad_hook(arrived)  # pyright: ignore[reportArgumentType]
    parameter.requires_grad_(is_trained)


def settled_gradient(parameter: nn.Parameter) -> torch.Tensor:
    """This rank's part of the gradient, contiguous: zero where there was none, and placed as the parameter is."""
    gradient = parameter.grad
    if gradient is None:
        gradient = torch.zeros_like(parameter, memory_format=torch.contiguous_format)
    elif isinstance(gradient, DTensor):
        assert isinstance(parameter, DTensor)
        gradient = gradient.redistribute(placements=parameter.placements)
    parameter.grad = gradient = gradient.contiguous()
    return gradient.to_local() if isinstance(gradient, DTensor) else gradient


def _buckets(root: nn.Module, units: Sequence[str], group_of: GroupOf) -> list[_Bucket]:
    """In the order in which their gradients are there. Of a unit one for each group of ranks."""
    place_of = {fqn: place for place, fqn in enumerate(units)}
    found: dict[tuple[int, dist.ProcessGroup], list[nn.Parameter]] = {}
    for fqn, parameter in root.named_parameters():
        if not (parameter.is_floating_point() or parameter.is_complex()):  # which nobody can train
            continue
        parts = fqn.split(".")
        prefixes = [".".join(parts[:count]) for count in range(len(parts) - 1, 0, -1)]  # the innermost unit first
        place = next((place_of[prefix] for prefix in prefixes if prefix in place_of), -1)
        found.setdefault((place, group_of(parameter)), []).append(parameter)
    order = sorted(found, key=lambda key: -key[0])
    return [_Bucket(tuple(found[key]), key[1]) for key in order]


def _move(root: nn.Module, device: torch.device) -> None:
    """To ``device``; parameters without values become zeros there. Tied ones stay tied."""
    made: dict[nn.Parameter, nn.Parameter] = {}
    for owner in root.modules():
        for name, parameter in owner.named_parameters(recurse=False, remove_duplicate=False):
            if parameter.is_meta:
                if parameter not in made:
                    zeros = torch.zeros_like(parameter, device=device)
                    made[parameter] = nn.Parameter(zeros, requires_grad=parameter.requires_grad)
                setattr(owner, name, made[parameter])
    for tensor in (*root.parameters(), *root.buffers()):
        if tensor.device.type != device.type:
            tensor.data = tensor.data.to(device)
