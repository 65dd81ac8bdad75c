"""Attention of transformers' models whose layers look at windows or have sinks, by an operator that takes these.

transformers gives ``scaled_dot_product_attention`` a window as a mask, and builds gpt-oss with its scores in memory,
where it is not told of a flash kernel. Under the name below its models hand the window and the sinks to attention
itself, and make no mask, as for a flash kernel.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from planner.models.causal_attention import causal_attention
from planner.models.causal_masks import NUM_SHARDS

if TYPE_CHECKING:
    from transformers import PretrainedConfig

WINDOWED_ATTENTION = "planner_windowed"
# Model types of which tests held outputs and gradients against transformers' own attention. Others may add to their
# masks (images that are seen as a whole), or look at windows in ways of their own.
WINDOWED = frozenset(
    ("afmoe", "cohere2", "cohere2_moe", "exaone4", "exaone_moe", "gemma3_text", "gpt_oss", "granite_swa",
     "granitemoe_swa", "laguna", "mellum", "mimo_v2_flash", "ministral", "ministral3", "mistral", "mixtral", "olmo3",
     "phi3", "qwen2", "qwen3", "qwen3_moe", "smollm3", "starcoder2")
)  # fmt: skip


def takes_windows(config: PretrainedConfig) -> bool:
    """Whether the model that ``config`` describes may be built with ``WINDOWED_ATTENTION``, registered here."""
    if config.model_type not in WINDOWED or getattr(config, "attention_dropout", 0.0):
        return False
    from transformers import AttentionInterface

    AttentionInterface.register(WINDOWED_ATTENTION, _attention)
    return True


def _attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **given: Any,
) -> tuple[torch.Tensor, None]:
    """What models call: ``query`` (batch, heads, length, size); returned is (batch, length, heads, size).

    ``given`` are ``scaling``, ``sliding_window`` and sinks (``s_aux``), each of which may be missing or None.
    """
    length, sinks = key.shape[2] * (NUM_SHARDS[-1] if NUM_SHARDS else 1), given.pop("s_aux", None)
    window = given.pop("sliding_window", None) or 0
    if sinks is None and not 0 < window < length:
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        return sdpa_attention_forward(module, query, key, value, attention_mask, **given)
    scale = given.get("scaling") or query.shape[-1] ** -0.5
    output = causal_attention(query, key, value, sinks, window if window < length else 0, scale)
    return output.transpose(1, 2).contiguous(), None
