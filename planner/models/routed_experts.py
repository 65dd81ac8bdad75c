"""Mixtures of transformers that compute every expert for every token, made to compute those that the router chose.

Llama 4 scales each token by its expert's score before that expert, and by 0 before all others: what these compute is 0,
by 128 experts 128 times the work. Whoever trains the model leaves it out, and only products that are grouped by expert
can be divided over ranks. The parameters, their names and what comes out stay as they are.
"""

from __future__ import annotations

import functools
import sys
from typing import Any

import torch
from torch import nn

from planner.models.moe import grouped_product, in_token_order, sorted_by_expert


def with_routed_experts(module: nn.Module) -> nn.Module:
    """``module``, whose layers of Llama 4's experts compute what their routers chose."""
    if "transformers.models.llama4.modeling_llama4" in sys.modules:
        for each in module.modules():
            routed = _routed_classes().get(type(each))
            if routed is not None:
                each.__class__ = routed
    return module


@functools.cache
def _routed_classes() -> dict[type[nn.Module], type[nn.Module]]:
    """By the class of transformers: one that differs in its forward pass, and in nothing else that can be seen."""
    from transformers.models.llama4 import modeling_llama4 as llama4

    forwards: dict[type[nn.Module], object] = {llama4.Llama4TextMoe: _mixture, llama4.Llama4TextExperts: _experts}
    return {own: type(own.__name__, (own,), {"forward": forward, "__module__": own.__module__, "__doc__": own.__doc__})
            for own, forward in forwards.items()}  # fmt: skip


def _mixture(self: Any, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """``hidden_states``: (..., hidden). What comes out, (tokens, hidden), and the router's logits (tokens, experts)."""
    tokens = hidden_states.reshape(-1, self.hidden_dim)
    scores, logits = self.router(tokens)
    chosen = logits.topk(self.top_k, dim=1).indices
    order, ends = sorted_by_expert(chosen, self.num_experts)
    rows = tokens[order // self.top_k] * scores.gather(1, chosen).flatten()[order][:, None]
    return self.shared_expert(tokens) + in_token_order(self.experts(rows, ends), order, self.top_k), logits


def _experts(self: Any, rows: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """``rows``: (rows, hidden), sorted by expert; ``ends``: one past each expert's last row."""
    gate, up = grouped_product(rows, self.gate_up_proj, ends).chunk(2, dim=-1)
    return grouped_product(up * self.act_fn(gate), self.down_proj, ends)
