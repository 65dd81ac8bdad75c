"""Data parallelism: what one stage's parameters are to the ranks that hold the same ones, and how these are kept equal.

| stage | parameters                    | gradients                                | optimiser states |
|-------|-------------------------------|------------------------------------------|------------------|
| 0     | whole                         | whole, all-reduced once a step           | whole            |
| 1     | sharded, gathered once a step | whole, reduce-scattered once a step      | sharded          |
| 2     | sharded, gathered once a step | sharded, reduce-scattered a micro-batch  | sharded          |
| 3     | gathered a unit, twice a      | sharded, reduce-scattered a micro-batch  | sharded          |
|       | micro-batch                   |                                          |                  |

Ranks of context parallelism hold the same parameters as those of data parallelism, and count among them. Gradients are
averaged over all of these ranks, in float32. A parameter that nothing used (an expert without tokens) has a gradient of
zero, not none, so that all ranks reduce the same.

Where what is computed with is what the optimiser updates, whole and in float32 on the device, parameters are left as
they are (``whole_parameters.py``). Everything else is FSDP2's (``sharded_parameters.py``).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

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

    def __init__(self, root: nn.Module) -> None:
        self.root = root

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


def keeps_whole(plan: Plan) -> bool:
    """Whether parameters are left as they are: nothing shards, casts or moves them."""
    return plan.zero_stage == 0 and compute_dtype(plan) is torch.float32 and plan.offload is Offload.NONE
