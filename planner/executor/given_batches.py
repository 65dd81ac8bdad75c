"""Batches as a script of one's own gives them, in the customs of transformers where these are not the planner's.

Its collators add a mask that hides nothing, and positions that count from 0. A model that comes to the same without
these is run without them under context parallelism, where each rank sees a part of a sequence. Its causal models shift
labels themselves; the planner's loss takes the next tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from planner.errors import InputError
from planner.executor.context_parallel import LONGEST_PROBE, NUM_PROBE_TOKENS, moved_copy, own_cores
from planner.executor.integers import is_integer
from planner.executor.stage_trace import tensors_in
from planner.models.inputs import LABELS, by_name, call_model
from planner.models.loss import IGNORED, tokens_of

Tensors = Mapping[str, torch.Tensor]
MASK, POSITIONS = "attention_mask", "position_ids"
_REL = 1e-5  # of the output's norm; the same operators on the same numbers, in float32


@dataclass(frozen=True)
class GivenBatches:
    """What is asked of each batch before it is run. ``plain``: inputs that the model was split without."""

    plain: frozenset[str] = frozenset()
    shifts_labels: bool = False  # the model does, and the loss that is used does not

    def named(self, given: object) -> dict[str, torch.Tensor]:
        """A batch by name; InputError where ``plain`` says something after all, or labels are not the next tokens."""
        batch = by_name(given)
        strange = [name for name in sorted(self.plain) if name in batch and not _is_plain(name, batch[name])]
        if strange:
            raise InputError(
                f"{strange[0]} hides or moves positions in this batch: the model was split for batches in which it "
                "does neither, for ranks of context parallelism run it without",
                hint="fill sequences up with tokens and give these the label -100, or plan with cp = 1",
            )
        if self.shifts_labels:
            _check_next_tokens(batch)
        return batch


ANY_BATCH = GivenBatches()


def plain_inputs(module: nn.Module, example: Tensors) -> frozenset[str]:
    """Those of ``example`` that mask nothing and count from 0, and without which ``module`` comes to the same.

    That is found out with a copy on the CPU and a few tokens: a model that cannot do without them keeps them.
    """
    names = [name for name, value in example.items() if name in (MASK, POSITIONS) and _is_plain(name, value)]
    if not names or any(isinstance(parameter, FakeTensor) for parameter in module.parameters()):
        return frozenset()
    with torch.random.fork_rng(devices=()), torch.no_grad(), own_cores():
        torch.manual_seed(0)
        copied = moved_copy(module).eval()
        others = [name for name in example if name not in (*names, LABELS)]
        tokens = {name: torch.randint(NUM_PROBE_TOKENS, (2, LONGEST_PROBE)) for name in others}
        plain = {name: _plain(name, example[name].dtype) for name in names}
        try:
            pair = call_model(copied, {**tokens, **plain}), call_model(copied, tokens)
        except Exception:  # whatever the user's code raises without them
            return frozenset()
    return frozenset(names) if _are_equal(*pair) else frozenset()


def _check_next_tokens(batch: Tensors) -> None:
    labels, tokens = batch.get(LABELS), tokens_of(dict(batch))
    if labels is None or labels.shape != tokens.shape or labels.ndim != 2:
        return
    counted = labels != IGNORED
    are_own = (labels == tokens) | ~counted
    are_not_next = counted[:, :-1] & (labels[:, :-1] != tokens[:, 1:])
    if bool(are_own.all() & are_not_next.any()):
        raise InputError(
            "the labels are the tokens of their own positions, as transformers' models take them, which shift them; "
            "the planner's loss takes the next tokens, so the model would learn to copy",
            hint="shift them, labels = torch.nn.functional.pad(labels[:, 1:], (0, 1), value=-100), or leave labels out "
            "where every next token counts",
        )


def _is_plain(name: str, value: torch.Tensor) -> bool:
    if value.ndim != 2 or not (is_integer(value) or value.dtype is torch.bool):
        return False
    wanted = torch.ones_like(value) if name == MASK else torch.arange(value.shape[1], device=value.device)
    return bool((value == wanted).all())


def _plain(name: str, dtype: torch.dtype) -> torch.Tensor:
    if name == MASK:
        return torch.ones(2, LONGEST_PROBE, dtype=dtype)
    return torch.arange(LONGEST_PROBE, dtype=dtype).expand(2, -1)


def _are_equal(found: object, expected: object) -> bool:
    pairs = list(zip(tensors_in(found), tensors_in(expected), strict=False))
    return bool(pairs) and all(
        one.shape == other.shape and float((one - other).norm()) <= _REL * float(other.norm())
        for one, other in pairs
        if other.is_floating_point()
    )
