"""Losses, and how the loss of a global batch follows from those of its parts.

A step computes its loss micro-batch by micro-batch on several data-parallel ranks. That the sum of what they do is the
loss of the whole batch, as one process would compute it, takes more than a number a part: with unequal numbers of
targets a mean of means is not the mean. ``TrainingLoss`` says what is needed; the default loss, next-token cross
entropy in float32 (of two towers the contrastive loss), is a sum that is divided once by all targets.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum

import torch
from torch.nn import functional as F  # noqa: N812

from planner.errors import ModelError
from planner.models.leaves import map_leaves

Batch = dict[str, torch.Tensor] | tuple[torch.Tensor, ...]
IGNORED = -100  # the label of a position where nothing is to be learned, as torch's cross entropy has it


class Reduction(StrEnum):
    """What a loss function's value over a part of a batch is."""

    MEAN = "mean"  # over ``weight(part)`` terms
    SUM = "sum"  # of terms; the whole is divided by the ``weight`` of all parts, where there is one
    COUNTED = "counted"  # a pair: the sum of terms, and how many there were
    UNKNOWN = "unknown"  # nobody said


@dataclass(frozen=True)
class Beside:
    """What a loss function reads besides the outputs and the batch that it is given."""

    left: tuple[str, ...] = ()  # by the model's forward pass, in attributes of its modules
    parameters: tuple[str, ...] = ()  # of the model
    num_own: int = 0  # parameters that are trained and none of the model's


@dataclass(frozen=True)
class TrainingLoss:
    """A loss function, and what makes the loss of a batch of its values over the parts.

    ``function(output, batch)`` returns a scalar, or under ``COUNTED`` the pair (sum, count), whose count may be a plain
    number. ``weight(batch)`` is the number of terms in a part, from the batch alone.
    """

    function: Callable[[object, Batch], torch.Tensor | tuple[torch.Tensor, torch.Tensor | float]]
    reduction: Reduction = Reduction.UNKNOWN
    weight: Callable[[Batch], torch.Tensor | float] | None = None
    doubt: str = ""  # why it could not be found out what it is, where it was not even tried
    beside: Beside = Beside()


def logits_of(output: object) -> torch.Tensor:
    """The logits in what a module returned: a tensor, an object with ``logits``, or the first tensor it holds."""
    if isinstance(output, torch.Tensor):
        return output
    for name in ("logits", "last_hidden_state"):
        value = output.get(name) if isinstance(output, Mapping) else getattr(output, name, None)
        if isinstance(value, torch.Tensor):
            return value
    for value in _held_by(output):
        if isinstance(value, torch.Tensor):
            return value
    raise TypeError(f"the default loss needs a tensor or an output with logits, not {type(output).__name__}")


def _held_by(output: object) -> Iterable[object]:
    if isinstance(output, Mapping):
        return output.values()
    if dataclasses.is_dataclass(output):
        return [getattr(output, field.name) for field in dataclasses.fields(output)]
    return output if isinstance(output, tuple | list) else ()


def in_float32(output: object) -> object:
    """What a module returned, with its tensors of 16 bits in float32."""

    def widened(leaf: object) -> object:
        if isinstance(leaf, torch.Tensor) and leaf.dtype in (torch.bfloat16, torch.float16):
            return leaf.float()
        return leaf

    return map_leaves(widened, output)


def next_token_loss(output: object, batch: Batch) -> torch.Tensor:
    """Mean cross entropy of the logits (..., vocab) against ``labels``. ModelError where they are not as many.

    Without labels, each position of ``input_ids`` is predicted from those before it. Where the
    module compares texts with images, each belongs to the other of its number.
    """
    similarities = getattr(output, "logits_per_text", None)
    if isinstance(similarities, torch.Tensor):
        return contrastive_loss(similarities)
    return _cross_entropy(output, batch, "mean")


def num_targets(batch: Batch) -> torch.Tensor:
    """How many positions of ``batch`` the default loss counts: a scalar."""
    labels = batch.get("labels") if isinstance(batch, dict) else None
    return ((tokens_of(batch)[:, 1:] if labels is None else labels) != IGNORED).sum()


def _next_token_sum(output: object, batch: Batch) -> torch.Tensor:
    if isinstance(getattr(output, "logits_per_text", None), torch.Tensor):
        raise TypeError("the contrastive loss compares all samples of a batch: it has no value over a part of it")
    return _cross_entropy(output, batch, "sum")


NEXT_TOKEN = TrainingLoss(_next_token_sum, Reduction.SUM, num_targets)
"""The default loss in parts: the same value over a whole batch as ``next_token_loss``."""


def _cross_entropy(output: object, batch: Batch, reduction: str) -> torch.Tensor:
    logits = logits_of(output)
    if logits.dim() < 2:
        raise ModelError(
            f"the default loss takes logits, and the forward pass returns a tensor of shape {tuple(logits.shape)}",
            hint="define loss_fn(output, batch) in a model.py: where the model returns its own loss, `return output`",
        )
    labels = batch.get("labels") if isinstance(batch, dict) else None
    if labels is None:
        logits, labels = logits[:, :-1], tokens_of(batch)[:, 1:]
    flat = logits.flatten(0, -2).float()
    if len(flat) != labels.numel():
        raise ModelError(
            f"the default loss predicts a class for each of {labels.numel()} labels, one a token, and the model gives "
            f"{len(flat)} predictions, {tuple(logits.shape)}",
            hint="write a model.py: build_model() returns the model, and loss_fn(output, batch) its loss",
        )
    return F.cross_entropy(flat, labels.flatten(), ignore_index=IGNORED, reduction=reduction)


def tokens_of(batch: Batch) -> torch.Tensor:
    """What the next tokens are read from: ``input_ids``, or the first tensor where none has that name."""
    named = {name.rpartition(".")[2]: tensor for name, tensor in batch.items()} if isinstance(batch, dict) else {}
    return named["input_ids"] if "input_ids" in named else _first(batch)


def contrastive_loss(similarities: torch.Tensor) -> torch.Tensor:
    """CLIP's (Radford et al. 2021): ``similarities`` (batch, batch), row and column i belong together."""
    pairs = torch.arange(similarities.shape[0], device=similarities.device)
    scores = similarities.float()
    return (F.cross_entropy(scores, pairs) + F.cross_entropy(scores.t(), pairs)) / 2


def _first(batch: Batch) -> torch.Tensor:
    tokens = next(iter(batch.values())) if isinstance(batch, dict) else batch[0]
    if tokens.is_floating_point():
        raise TypeError("the default loss predicts tokens, but the model's first input is not made of integers")
    return tokens
