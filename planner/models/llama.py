"""A Llama class decoder: rotary positions, RMSNorm, grouped-query attention, gated feed-forward."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

from planner.models.config import FamilyConfig
from planner.models.feed_forward import FeedForward


def rotary_tables(seq_len: int, head_dim: int, theta: float, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosine and sine, each (sequence, head_dim), in the dtype and on the device of ``like``."""
    exponents = torch.arange(0, head_dim, 2, device=like.device, dtype=torch.float32) / head_dim
    positions = torch.arange(seq_len, device=like.device, dtype=torch.float32)
    angles = torch.outer(positions, theta**-exponents)
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos().to(like.dtype), angles.sin().to(like.dtype)


def rotate(x: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor) -> torch.Tensor:
    """Turns ``x`` (batch, heads, sequence, head_dim) by its positions' angles."""
    first, second = x.chunk(2, dim=-1)
    return x * cosine + torch.cat((-second, first), dim=-1) * sine


class Attention(nn.Module):
    """Causal self-attention in which several query heads share a key and a value head."""

    def __init__(self, config: FamilyConfig) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = config.heads, config.num_kv_heads, config.size_per_head
        self.query = nn.Linear(config.hidden, self.heads * self.head_dim, bias=False)
        self.key = nn.Linear(config.hidden, self.kv_heads * self.head_dim, bias=False)
        self.value = nn.Linear(config.hidden, self.kv_heads * self.head_dim, bias=False)
        self.output = nn.Linear(self.heads * self.head_dim, config.hidden, bias=False)

    def forward(self, x: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor) -> torch.Tensor:
        """``x``: (batch, sequence, hidden); the same shape comes back."""
        batch, seq_len, _ = x.shape
        query = self.query(x).view(batch, seq_len, self.heads, self.head_dim).transpose(1, 2)
        key = self.key(x).view(batch, seq_len, self.kv_heads, self.head_dim).transpose(1, 2)
        value = self.value(x).view(batch, seq_len, self.kv_heads, self.head_dim).transpose(1, 2)
        y = F.scaled_dot_product_attention(
            rotate(query, cosine, sine),
            rotate(key, cosine, sine),
            value,
            is_causal=True,
            enable_gqa=self.kv_heads != self.heads,
        )
        return self.output(y.transpose(1, 2).reshape(batch, seq_len, -1))


class Block(nn.Module):
    """One decoder layer."""

    def __init__(self, config: FamilyConfig) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.hidden, eps=config.norm_eps)
        self.attention = Attention(config)
        self.mlp_norm = nn.RMSNorm(config.hidden, eps=config.norm_eps)
        self.mlp = FeedForward(config.hidden, config.ffn, config.mlp, bias=False)

    def forward(self, x: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor) -> torch.Tensor:
        """``x``: (batch, sequence, hidden); the same shape comes back."""
        x = x + self.attention(self.attention_norm(x), cosine, sine)
        return x + self.mlp(self.mlp_norm(x))


class Llama(nn.Module):
    """Token ids to logits."""

    def __init__(self, config: FamilyConfig) -> None:
        super().__init__()
        self.head_dim, self.rope_theta = config.size_per_head, config.rope_theta
        self.embedding = nn.Embedding(config.vocab, config.hidden)
        self.layers = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.hidden, eps=config.norm_eps)
        self.head = nn.Linear(config.hidden, config.vocab, bias=False)
        self.apply(_initialise)
        if config.tied:
            self.head.weight = self.embedding.weight

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        """``input_ids``: int64 (batch, sequence); logits (batch, sequence, vocab)."""
        x = self.embedding(input_ids)
        cosine, sine = rotary_tables(input_ids.shape[1], self.head_dim, self.rope_theta, x)
        for layer in self.layers:
            x = layer(x, cosine, sine)
        return self.head(self.norm(x))


def _initialise(module: nn.Module) -> None:
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)  # as Llama's reference training code does
