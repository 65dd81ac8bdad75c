"""Mixture of experts without dropped tokens: tokens sorted by expert, one grouped product for each matrix."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

from planner.models.config import FamilyConfig
from planner.models.feed_forward import FeedForward, activate


@torch.library.custom_op("planner::grouped_mm", mutates_args=())
def _grouped_mm(rows: torch.Tensor, weights: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    return F.grouped_mm(rows, weights, offs=ends)


@_grouped_mm.register_fake
def _(rows: torch.Tensor, weights: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    return rows.new_empty(rows.shape[0], weights.shape[-1])


def grouped_product(rows: torch.Tensor, weights: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """``rows`` (tokens, in), sorted by expert, times each expert's own of ``weights`` (experts, in, out).

    ``ends``: int32 (experts,), one past each expert's last row. PyTorch's shape rule for the meta
    device knows bfloat16 alone, so a trace in another dtype goes through an operator of our own.
    """
    if rows.device.type == "meta" and rows.dtype is not torch.bfloat16:
        return _grouped_mm(rows, weights, ends)
    return F.grouped_mm(rows, weights, offs=ends)


def sorted_by_expert(chosen: torch.Tensor, num_experts: int) -> tuple[torch.Tensor, torch.Tensor]:
    """``chosen``: int64 (tokens, top_k). Choices in the order of their experts, and one past each expert's last."""
    order = chosen.flatten().argsort(stable=True)
    is_of = chosen.flatten()[:, None] == torch.arange(num_experts, device=chosen.device)
    return order, is_of.sum(dim=0).cumsum(0).to(torch.int32)


def in_token_order(rows: torch.Tensor, order: torch.Tensor, top_k: int) -> torch.Tensor:
    """``rows``: (tokens * top_k, hidden) in ``order``. For each token the sum of its rows, (tokens, hidden)."""
    # index_add would do both, and autograd would keep the rows for it.
    return rows.index_select(0, order.argsort()).view(len(rows) // top_k, top_k, -1).sum(dim=1)


class Router(nn.Module):
    """Chooses ``top_k`` experts for each token and weighs them."""

    def __init__(self, config: FamilyConfig) -> None:
        super().__init__()
        self.top_k, self.kind = config.top_k or 1, config.router
        self.gate = nn.Linear(config.hidden, config.experts or 1, bias=False)

    def forward(self, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """``tokens``: (tokens, hidden). Weights that sum to 1 and expert numbers, both (tokens, top_k)."""
        logits = self.gate(tokens).float()
        scores = logits.softmax(dim=-1) if self.kind == "softmax" else logits.sigmoid()
        weights, experts = scores.topk(self.top_k, dim=-1)
        return (weights / weights.sum(dim=-1, keepdim=True)).to(tokens.dtype), experts


class Experts(nn.Module):
    """All routed experts, each matrix one parameter (experts, in, out)."""

    def __init__(self, config: FamilyConfig) -> None:
        super().__init__()
        experts, hidden, width = config.experts or 1, config.hidden, config.expert_ffn or config.ffn
        self.kind = config.mlp
        self.gate = nn.Parameter(torch.empty(experts, hidden, width)) if self.kind.is_gated else None
        self.up = nn.Parameter(torch.empty(experts, hidden, width))
        self.down = nn.Parameter(torch.empty(experts, width, hidden))
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=0.02)  # as the linear layers around them

    def forward(self, rows: torch.Tensor, ends: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """``rows``: (tokens, hidden), sorted by expert; ``ends``: one past each expert's last row.

        ``weights``: (tokens, 1), of the rows that come back. They go where rows are narrower, on either side of the
        last product: autograd keeps these rows for the weights' own gradient.
        """
        up = grouped_product(rows, self.up, ends)
        if self.gate is None:
            inner = activate(up, self.kind)
        else:
            inner = activate(grouped_product(rows, self.gate, ends), self.kind) * up
        if inner.shape[1] < rows.shape[1]:
            return grouped_product(inner * weights, self.down, ends)
        return grouped_product(inner, self.down, ends) * weights


class MixtureOfExperts(nn.Module):
    """The feed-forward part of a sparse layer."""

    def __init__(self, config: FamilyConfig) -> None:
        super().__init__()
        self.router = Router(config)
        self.experts = Experts(config)
        shared_width = config.shared_experts * (config.expert_ffn or config.ffn)
        self.shared = FeedForward(config.hidden, shared_width, config.mlp, bias=False) if shared_width else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``x``: (batch, sequence, hidden); the same shape comes back."""
        tokens = x.flatten(0, 1)
        weights, experts = self.router(tokens)
        top_k = experts.shape[1]
        order, ends = sorted_by_expert(experts, self.experts.up.shape[0])
        rows = self.experts(tokens[order // top_k], ends, weights.flatten()[order][:, None])
        y = in_token_order(rows, order, top_k)
        if self.shared is not None:
            y = y + self.shared(tokens)
        return y.view_as(x)
