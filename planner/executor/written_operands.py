"""Which operands an operator of torch writes to."""

# pyright: reportPrivateUsage=false
# torch has no public name for an operator's schema.

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch._ops import OpOverload
from torch.utils._pytree import tree_leaves


def is_writing(operator: object) -> bool:
    """Whether it writes to any; operators of higher order do not say."""
    return isinstance(operator, OpOverload) and operator._schema.is_mutable


def written_by(operator: OpOverload, args: Sequence[object], kwargs: Mapping[str, object]) -> list[torch.Tensor]:
    """The tensors of ``args`` and ``kwargs`` that ``operator`` writes to, those in lists among them."""
    if not is_writing(operator):
        return []
    arguments = operator._schema.arguments
    values = [*zip(arguments, args, strict=False), *((each, kwargs.get(each.name)) for each in arguments[len(args) :])]
    written = [value for each, value in values if each.alias_info is not None and each.alias_info.is_write]
    return [leaf for leaf in tree_leaves(written) if isinstance(leaf, torch.Tensor)]
