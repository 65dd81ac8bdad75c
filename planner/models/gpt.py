"""A GPT-2/GPT-3 class decoder: learned positions, LayerNorm before each sub-layer, fused QKV."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

from planner.models.config import FamilyConfig
from planner.models.feed_forward import FeedForward


class Attention(nn.Module):
    """Causal self-attention.

    The fused projection keeps each key head's queries, key and value next to one another, so that
    a split of its columns over heads stays local.
    """

    def __init__(self, config: FamilyConfig) -> None:
        super().__init__()
        self.kv_heads = config.num_kv_heads
        self.queries_per_kv = config.heads // config.num_kv_heads
        self.head_dim = config.size_per_head
        self.dropout = config.dropout
        self.qkv = nn.Linear(config.hidden, self.kv_heads * (self.queries_per_kv + 2) * self.head_dim)
        self.output = nn.Linear(config.heads * self.head_dim, config.hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``x``: (batch, sequence, hidden); the same shape comes back."""
        batch, seq_len, _ = x.shape
        qkv = self.qkv(x).view(batch, seq_len, self.kv_heads, self.queries_per_kv + 2, self.head_dim)
        query, key, value = qkv.split([self.queries_per_kv, 1, 1], dim=3)
        y = F.scaled_dot_product_attention(
            query.flatten(2, 3).transpose(1, 2),
            key.flatten(2, 3).transpose(1, 2),
            value.flatten(2, 3).transpose(1, 2),
            dropout_p=self.dropout if self.training else 0.0,
            is_causal=True,
            enable_gqa=self.queries_per_kv > 1,
        )
        return self.output(y.transpose(1, 2).reshape(batch, seq_len, -1))


class Block(nn.Module):
    """One decoder layer."""

    def __init__(self, config: FamilyConfig) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(config.hidden, eps=config.norm_eps)
        self.attention = Attention(config)
        self.mlp_norm = nn.LayerNorm(config.hidden, eps=config.norm_eps)
        self.mlp = FeedForward(config.hidden, config.ffn, config.mlp, bias=True)
        self.dropout = nn.Dropout(config.dropout) if config.dropout else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``x``: (batch, sequence, hidden); the same shape comes back."""
        x = x + self.dropout(self.attention(self.attention_norm(x)))
        return x + self.dropout(self.mlp(self.mlp_norm(x)))


class GPT(nn.Module):
    """Token ids to logits."""

    def __init__(self, config: FamilyConfig) -> None:
        super().__init__()
        self.token_embedding = nn.Embedding(config.vocab, config.hidden)
        self.position_embedding = nn.Embedding(config.seq_len, config.hidden)
        self.dropout = nn.Dropout(config.dropout) if config.dropout else nn.Identity()
        self.layers = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.hidden, eps=config.norm_eps)
        self.head = nn.Linear(config.hidden, config.vocab, bias=False)
        self.apply(_initialise)
        if config.tied:
            self.head.weight = self.token_embedding.weight

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        """``input_ids``: int64 (batch, sequence); logits (batch, sequence, vocab)."""
        positions = torch.arange(input_ids.shape[1], device=input_ids.device)
        x = self.dropout(self.token_embedding(input_ids) + self.position_embedding(positions))
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def _initialise(module: nn.Module) -> None:
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)  # as GPT-2
    if isinstance(module, nn.Linear):
        for bias in module.parameters():
            if bias.dim() == 1:
                nn.init.zeros_(bias)
