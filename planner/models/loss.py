"""The default loss, in float32: next-token cross entropy, or of two towers the contrastive loss."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch.nn import functional as F  # noqa: N812


def logits_of(output: object) -> torch.Tensor:
    """The logits in what a module returned: a tensor, an object with ``logits``, or a tuple's first tensor."""
    if isinstance(output, torch.Tensor):
        return output
    for name in ("logits", "last_hidden_state"):
        value = output.get(name) if isinstance(output, Mapping) else getattr(output, name, None)
        if isinstance(value, torch.Tensor):
            return value
    values = output.values() if isinstance(output, Mapping) else output
    if isinstance(values, tuple | list) or isinstance(output, Mapping):
        for value in values:  # pyright: ignore[reportGeneralTypeIssues]
            if isinstance(value, torch.Tensor):
                return value
    raise TypeError(f"the default loss needs a tensor or an output with logits, not {type(output).__name__}")


def next_token_loss(output: object, batch: dict[str, torch.Tensor] | tuple[torch.Tensor, ...]) -> torch.Tensor:
    """Mean cross entropy of the logits (..., vocab) against ``labels``.

    Without labels, each position of ``input_ids`` is predicted from those before it. Where the
    module compares texts with images, each belongs to the other of its number.
    """
    similarities = getattr(output, "logits_per_text", None)
    if isinstance(similarities, torch.Tensor):
        return contrastive_loss(similarities)
    logits = logits_of(output)
    labels = batch.get("labels") if isinstance(batch, dict) else None
    if labels is None:
        tokens = batch["input_ids"] if isinstance(batch, dict) and "input_ids" in batch else _first(batch)
        logits, labels = logits[:, :-1], tokens[:, 1:]
    return F.cross_entropy(logits.flatten(0, -2).float(), labels.flatten())


def contrastive_loss(similarities: torch.Tensor) -> torch.Tensor:
    """CLIP's (Radford et al. 2021): ``similarities`` (batch, batch), row and column i belong together."""
    pairs = torch.arange(similarities.shape[0], device=similarities.device)
    scores = similarities.float()
    return (F.cross_entropy(scores, pairs) + F.cross_entropy(scores.t(), pairs)) / 2


def _first(batch: dict[str, torch.Tensor] | tuple[torch.Tensor, ...]) -> torch.Tensor:
    tokens = next(iter(batch.values())) if isinstance(batch, dict) else batch[0]
    if tokens.is_floating_point():
        raise TypeError("the default loss predicts tokens, but the model's first input is not made of integers")
    return tokens
