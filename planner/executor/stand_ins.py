"""Values that stand in for those of a model that has none yet, where it is only tried.

They are as generic as random numbers, and take no more memory than the largest parameter: all matrices and tables lie
in one piece of noise, each from a place of its own on.
"""

from __future__ import annotations

import copy

import torch
from torch import nn

from planner.executor.recording import UnrecordableError

_PERIOD = 2**22 - 3  # of the noise, which is copied faster than drawn; prime, so that no two rows are alike
_APART = 8  # numbers from the beginning of one parameter to that of the next


def stood_in(module: nn.Module) -> nn.Module:
    """A copy of ``module``, whose parameters are on the meta device, with float32 values on the CPU; ties are kept.

    Products keep the size of what they are made of. Vectors are near one, biases near zero. The caller must not write
    to parameters, which share memory. Draws from torch's current seed. UnrecordableError where parameters are no real
    numbers: what would stand for an index is not known.
    """
    named = dict(module.named_parameters())
    strange = [fqn for fqn, parameter in named.items() if not parameter.is_floating_point()]
    if strange:
        raise UnrecordableError(f"{strange[0]} is of {named[strange[0]].dtype}, for which no values stand in")
    tables = [parameter for parameter in named.values() if parameter.ndim > 1]
    size = max((parameter.numel() for parameter in named.values()), default=0) + _APART * len(named)
    spread = max((table.shape[-1] for table in tables), default=1) ** -0.5
    noise = (spread * torch.randn(min(_PERIOD, size))).repeat(-(-size // _PERIOD))
    memo: dict[int, object] = {id(buffer): buffer.detach().clone() for buffer in module.buffers()}
    for index, (fqn, parameter) in enumerate(named.items()):
        value = noise[_APART * index :][: parameter.numel()].view(parameter.shape)
        if parameter.ndim < 2 and not fqn.endswith("bias"):
            value = 1.0 + value
        memo[id(parameter)] = nn.Parameter(value, requires_grad=parameter.requires_grad)
    return copy.deepcopy(module, memo)
