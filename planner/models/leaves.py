"""Nests of values that modules take and return, leaf by leaf."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable

from torch.utils._pytree import tree_map


def map_leaves(function: Callable[[object], object], value: object, whole: tuple[type, ...] = ()) -> object:
    """``value`` with ``function`` applied to every leaf; dataclasses count as containers, but those of ``whole``."""

    def visit(leaf: object) -> object:
        if not dataclasses.is_dataclass(leaf) or isinstance(leaf, (type, *whole)):
            return function(leaf)
        changed = copy.copy(leaf)
        for field in dataclasses.fields(leaf):
            object.__setattr__(changed, field.name, map_leaves(function, getattr(leaf, field.name), whole))
        return changed

    return tree_map(visit, value)
