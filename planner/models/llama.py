"""A Llama class decoder: rotary positions, RMSNorm, grouped-query or latent attention, dense or sparse layers."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

from planner.models.config import FamilyConfig
from planner.models.feed_forward import FeedForward
from planner.models.latent_attention import LatentAttention
from planner.models.moe import MixtureOfExperts
from planner.models.rotary import rotary_tables, rotate


class Attention(nn.Module):
    """Causal self-attention in which several query heads share a key and a value head."""

    def __init__(self, config: FamilyConfig) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = config.heads, config.num_kv_heads, config.size_per_head
        self.query = nn.Linear(config.hidden, self.heads * self.head_dim, bias=False)
        self.key = nn.Linear(config.hidden, self.kv_heads * self.head_dim, bias=False)
        self.value = nn.Linear(config.hidden, self.kv_heads * self.head_dim, bias=False)
        self.output = nn.Linear(self.heads * self.head_dim, config.hidden, bias=False)
        self.query_norm = nn.RMSNorm(self.head_dim, eps=config.norm_eps) if config.qk_norm else nn.Identity()
        self.key_norm = nn.RMSNorm(self.head_dim, eps=config.norm_eps) if config.qk_norm else nn.Identity()

    def forward(self, x: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor) -> torch.Tensor:
        """``x``: (batch, sequence, hidden); the same shape comes back."""
        batch, seq_len, _ = x.shape
        query = self.query_norm(self.query(x).view(batch, seq_len, self.heads, self.head_dim)).transpose(1, 2)
        key = self.key_norm(self.key(x).view(batch, seq_len, self.kv_heads, self.head_dim)).transpose(1, 2)
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

    def __init__(self, config: FamilyConfig, *, sparse: bool) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.hidden, eps=config.norm_eps)
        self.attention = LatentAttention(config) if config.latent_attention else Attention(config)
        self.mlp_norm = nn.RMSNorm(config.hidden, eps=config.norm_eps)
        self.mlp = (
            MixtureOfExperts(config) if sparse else FeedForward(config.hidden, config.ffn, config.mlp, bias=False)
        )

    def forward(self, x: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor) -> torch.Tensor:
        """``x``: (batch, sequence, hidden); the same shape comes back."""
        x = x + self.attention(self.attention_norm(x), cosine, sine)
        return x + self.mlp(self.mlp_norm(x))


class Llama(nn.Module):
    """Token ids to logits."""

    def __init__(self, config: FamilyConfig) -> None:
        super().__init__()
        self.rotary_dim, self.rope_theta = config.rotary_dim, config.rope_theta
        self.embedding = nn.Embedding(config.vocab, config.hidden)
        self.layers = nn.ModuleList(
            Block(config, sparse=config.experts is not None and index >= config.dense_layers)
            for index in range(config.layers)
        )
        self.norm = nn.RMSNorm(config.hidden, eps=config.norm_eps)
        self.head = nn.Linear(config.hidden, config.vocab, bias=False)
        self.apply(_initialise)
        if config.tied:
            self.head.weight = self.embedding.weight

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        """``input_ids``: int64 (batch, sequence); logits (batch, sequence, vocab)."""
        x = self.embedding(input_ids)
        cosine, sine = rotary_tables(input_ids.shape[1], self.rotary_dim, self.rope_theta, x)
        for layer in self.layers:
            x = layer(x, cosine, sine)
        return self.head(self.norm(x))


def _initialise(module: nn.Module) -> None:
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)  # as Llama's reference training code does
