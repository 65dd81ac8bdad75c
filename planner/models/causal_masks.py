"""Models of transformers without the masks that say no more than ``is_causal`` of attention does.

transformers leaves a mask out itself where nothing is padded and no documents are packed into one sequence, so that
quicker kernels can run. It finds that out from values of positions. A trace has none, and under context parallelism
those of a rank are no row of numbers. But positions that a caller did not give are counted by the model itself, and
then nothing is packed.
"""

# pyright: reportPrivateUsage=false
# transformers has no public name for what decides about masks.

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

from torch import nn

_POSITIONS = "position_ids"
_counted: list[bool] = []  # of the models whose forward pass runs, the innermost last: whether positions are its own
NUM_SHARDS: list[int] = []  # of each sequence, while models run on one of them: windows are held against the whole


def without_plain_masks(module: nn.Module) -> nn.Module:
    """``module``, whose models of transformers make a mask only where it says more than ``is_causal``."""
    if "transformers" in sys.modules:
        from transformers import PreTrainedModel, masking_utils

        _ask_first(masking_utils, "find_packed_sequence_indices", _packed)
        _ask_first(masking_utils, "_ignore_causal_mask_sdpa", _is_plain)
        _ask_first(masking_utils, "_ignore_bidirectional_mask_sdpa", _is_plain)
        for each in module.modules():
            if isinstance(each, PreTrainedModel) and _enter not in each._forward_pre_hooks.values():
                each.register_forward_pre_hook(_enter, prepend=True, with_kwargs=True)
                each.register_forward_hook(_leave, always_call=True)
    return module


def _enter(module: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
    named = dict(zip(inspect.signature(module.forward).parameters, args, strict=False))
    _counted.append({**named, **kwargs}.get(_POSITIONS) is None)


def _leave(*_module_and_tensors: object) -> None:
    _counted.pop()


@contextmanager
def unfinished_passes_forgotten() -> Generator[None]:
    """Forward passes that end inside are over behind it: of one that is given up in a trace no hook may be called."""
    depth = len(_counted)
    try:
        yield
    finally:
        del _counted[depth:]


_Question = Callable[..., object]


def _ask_first(owner: Any, name: str, answer: Callable[[_Question, dict[str, Any]], object]) -> None:
    """Inside a forward pass that counts positions itself, ``answer`` stands for a function of transformers."""
    original: _Question | None = getattr(owner, name, None)  # other versions may lack it
    if original is None or hasattr(original, "__wrapped__"):
        return
    signature = inspect.signature(original)

    @functools.wraps(original)
    def asked(*args: object, **kwargs: object) -> object:
        if not _counted or not _counted[-1]:
            return original(*args, **kwargs)
        return answer(original, signature.bind(*args, **kwargs).arguments)

    setattr(owner, name, asked)


def _packed(_original: _Question, _given: dict[str, Any]) -> None:
    """Which document each position is of: there is one in a sequence."""


def _is_plain(original: _Question, given: dict[str, Any]) -> object:
    """Whether a mask says no more than ``is_causal`` or its absence: nothing is padded, no window is shorter."""
    window, length = given.get("local_attention_size"), given["kv_length"]
    if given["padding_mask"] is not None or given.get("q_length", length) != length:
        return original(**given)
    return window is None or length * (NUM_SHARDS[-1] if NUM_SHARDS else 1) < window
