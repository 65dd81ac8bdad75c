"""Data parallelism: what one stage's parameters are to the ranks that hold the same ones, and how these are kept equal.

| stage | parameters                    | gradients                                | optimiser states |
|-------|-------------------------------|------------------------------------------|------------------|
| 0     | whole                         | whole, all-reduced once a step           | whole            |
| 1     | sharded, gathered once a step | whole, reduce-scattered once a step      | sharded          |
| 2     | sharded, gathered once a step | sharded, reduce-scattered a micro-batch  | sharded          |
| 3     | gathered a unit, twice a      | sharded, reduce-scattered a micro-batch  | sharded          |
|       | micro-batch                   |                                          |                  |

Ranks of context parallelism hold the same parameters as those of data parallelism, and count among them. Gradients are
averaged over all of these ranks, in float32. What nothing used on a rank (an expert without tokens) counts as zero
there, so that all ranks reduce the same. What nothing used on any rank has no gradient in the end, as in one process:
an optimiser leaves it alone (``drop_unreached``).

Where what is computed with is what the optimiser updates, whole and in float32 on the device, parameters are left as
they are (``whole_parameters.py``). Everything else is FSDP2's (``sharded_parameters.py``).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from costmodels.vocabulary.choices import Offload
from planner.executor.mesh import compute_dtype
from planner.plan.schema import Plan


@dataclass(frozen=True)
class ShardingUnits:
    """What is gathered or reduced as one: the modules ``fqns``, except where ``shared`` parameters are in them.

    ``shared`` are FQNs of parameters that the model also uses outside the module they belong to.
    They, and parameters tied across modules, stay in the unit of the root, where all users find
    them gathered.
    """

    fqns: tuple[str, ...]
    shared: frozenset[str] = frozenset()


class DataParallel(ABC):
    """One stage's part of the model, ``root``, or the whole of it."""

    def __init__(self, root: nn.Module, device: torch.device) -> None:
        self.root, self.device = root, device
        # to which no backward pass of the step that was finished last came on this rank
        self.unreached: frozenset[nn.Parameter] = frozenset()
        self.known_hooks: set[int] = set()  # ids of the user's on gradients that were looked at

    @abstractmethod
    def prepare_backward(self, *, last: bool) -> None:
        """Says what the coming backward pass of a micro-batch reduces and frees; ``last`` of a step, of this stage."""

    @abstractmethod
    def finish_weights(self, *, last: bool) -> None:
        """Called after the half of a backward pass that makes weights' gradients, which no hook of autograd sees."""

    @abstractmethod
    def finish_step(self) -> None:
        """Returns once gradients are those of all ranks. Called when every stage of this rank is done."""

    @abstractmethod
    def finish_forward(self) -> None:
        """Called after a forward pass that no backward pass follows."""

    @abstractmethod
    def share_reductions(self, reductions: list[Any]) -> None:
        """Takes ``reductions`` for the list of what is being reduced, which the stages of a rank have in common."""


@torch.no_grad()
def drop_unreached(
    parts: Sequence[DataParallel], kept: AbstractSet[nn.Parameter], groups: Sequence[dist.ProcessGroup]
) -> None:
    """Takes zeros for what they are: parameters that no rank reached, but for ``kept``, have no gradient.

    ``groups``: of the ranks that hold the same parameters, one for each axis. Collective over them; only a rank that
    lacks something waits.
    """
    parameters = [(p, data) for data in parts for p in data.root.parameters() if p.requires_grad and p not in kept]
    if not parameters:
        return
    reached = [parameter not in data.unreached for parameter, data in parameters]
    flags = torch.tensor(reached, dtype=torch.uint8, device=parts[0].device)
    for group in groups:
        dist.all_reduce(flags, dist.ReduceOp.MAX, group=group)
    if all(reached) or isinstance(flags, FakeTensor):
        return
    for (parameter, _), is_reached in zip(parameters, flags.tolist(), strict=True):
        if not is_reached:
            parameter.grad = None


def keeps_whole(plan: Plan) -> bool:
    """Whether parameters are left as they are: nothing shards, casts or moves them."""
    return plan.zero_stage == 0 and compute_dtype(plan) is torch.float32 and plan.offload is Offload.NONE
