"""Which modules of a model compute the same, told from their state and from the names their code reads."""

# pyright: reportPrivateUsage=false
# a module's parameters, buffers and children of None are only in its private tables.

from __future__ import annotations

from collections.abc import Hashable
from types import CodeType, FunctionType

import torch
from torch import nn

_OWN_STATE = frozenset(("_parameters", "_buffers", "_modules", "training", "_non_persistent_buffers_set"))
_COUNTING = frozenset(("enumerate", "range", "zip", "len", "islice", "count"))


def fingerprint(module: nn.Module, place: tuple[int, int], shared: set[int]) -> Hashable:
    """Equal for modules that compute the same with parameters of their own; unique where that is not known.

    ``place`` is the position of the module's block in its list, and the length of the list.
    """
    position, length = place
    if any(id(p) in shared for p in module.parameters(recurse=False)):
        return id(module)
    index_names = _unused_index_names(type(module))
    state = tuple(
        (name, "index" if name in index_names and value == position else _value_of(value))
        for name, value in vars(module).items()
        if name not in _OWN_STATE
    )
    tensors = tuple(
        (name, None if t is None else (tuple(t.shape), t.dtype, t.requires_grad))
        for name, t in (*module._parameters.items(), *module._buffers.items())
    )
    children = tuple(
        (name, None if child is None else fingerprint(child, place, shared)) for name, child in module._modules.items()
    )
    per_block = _entries_by_position(getattr(module, "config", None), position, length)
    return type(module), module.training, state, per_block, tensors, children


def _entries_by_position(config: object, position: int, length: int) -> Hashable:
    """What a configuration says of this block: its entry in each list that is as long as the list of blocks."""
    return tuple(
        (name, _value_of(value[position]))
        for name, value in sorted(getattr(config, "__dict__", {}).items())
        if isinstance(value, list | tuple) and len(value) == length
    )


def _value_of(value: object) -> Hashable:
    """An attribute by value where it is plain data, else by identity."""
    if value is None or isinstance(value, bool | int | float | str | bytes | torch.dtype | torch.device):
        return type(value), value
    if isinstance(value, list | tuple | set | frozenset):
        return type(value), tuple(map(_value_of, value))
    if isinstance(value, dict):
        return dict, tuple((str(key), _value_of(item)) for key, item in value.items())
    return id(value)


def _unused_index_names(kind: type[nn.Module]) -> frozenset[str]:
    """Names under which a module may hold its own position without computing anything different for it.

    In transformers the position selects a cache, and what differs by layer is decided when the
    module is made. In other code a position counts as harmless where no method but __init__ reads it.
    """
    names = frozenset(("layer_idx", "layer_id", "layer_index", "layer_number", "idx", "index", "block_idx", "i"))
    if kind.__module__.startswith("transformers."):
        return names
    methods = _own_methods(kind)
    return names.difference(*(_names_in(methods[name].__code__) for name in methods if name != "__init__"))


def may_count(kind: type[nn.Module]) -> bool:
    """Whether the forward pass of a module around the blocks may treat them by their number.

    A loop over the blocks alone cannot. In transformers what differs by number stands in the config.
    """
    if kind.__module__.startswith(("transformers.", "torch.")):
        return False
    methods = _own_methods(kind)
    pending, seen = ["forward"], set[str]()
    while pending:
        name = pending.pop()
        if name in methods and name not in seen:
            seen.add(name)
            used = _names_in(methods[name].__code__)
            if used & _COUNTING:
                return True
            pending.extend(used)
    return False


def _own_methods(kind: type[nn.Module]) -> dict[str, FunctionType]:
    """The methods that ``kind`` and its bases define, torch's own aside."""
    return {
        name: method
        for base in reversed(kind.__mro__)
        if not base.__module__.startswith(("torch.", "builtins"))
        for name, method in vars(base).items()
        if isinstance(method, FunctionType)
    }


def _names_in(code: CodeType) -> set[str]:
    """Global and attribute names that ``code`` reads, comprehensions and inner functions with it."""
    inner = (_names_in(constant) for constant in code.co_consts if isinstance(constant, CodeType))
    return set(code.co_names).union(*inner)
