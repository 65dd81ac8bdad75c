"""An order of a recording's tensors in which all ranks agree, though each has recorded the forward pass by itself.

Python goes through a set of strings in another order in each process. A model that does so, as Gemma 3 and ModernBERT
through their kinds of layers, computes its rotary tables in another order on each rank; a stage that received them in
its own order would take one for the other, for they have the same shape.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import torch

from planner.executor.stage_trace import ByMode, InputSlot, Slot, StateSlot, Trace, leaves_of

_PLAIN = (bool, int, float, str, bytes, torch.dtype, InputSlot, StateSlot, type(None), type(...))


def agreed_places(trace: Trace) -> dict[Slot, tuple[str, int]]:
    """What to sort computed tensors by: how each is computed; those that are computed alike stay as they were."""
    origins: dict[Slot, str] = {}
    for call in trace.calls:
        keys = sorted(call.kwargs)
        name = getattr(call.function, "__qualname__", "")
        operands = leaves_of((call.args, [call.kwargs[key] for key in keys]))
        told = (call.module, name, *keys, *(_told(leaf, origins) for leaf in operands))
        origin = hashlib.sha256("\0".join(told).encode()).hexdigest()
        origins.update({slot: f"{origin} {place}" for place, slot in enumerate(call.results)})
    return {slot: (origin, slot.number) for slot, origin in origins.items()}


def _told(leaf: object, origins: Mapping[Slot, str]) -> str:
    """``leaf`` in words that are the same in every process."""
    match leaf:
        case Slot():
            return origins[leaf]
        case ByMode():
            return f"{_told(leaf.training, origins)} or {_told(leaf.evaluated, origins)}"
        case slice():
            return ":".join(_told(end, origins) for end in (leaf.start, leaf.stop, leaf.step))
        case _:
            return repr(leaf) if isinstance(leaf, _PLAIN) else type(leaf).__qualname__
