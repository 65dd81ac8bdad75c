"""Multi-head latent attention (DeepSeek-V2, section 2.1), in the form that training uses."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

from planner.models.config import FamilyConfig
from planner.models.rotary import rotate


class LatentAttention(nn.Module):
    """Causal self-attention whose queries, keys and values come from narrow latent vectors."""

    def __init__(self, config: FamilyConfig) -> None:
        super().__init__()
        latent = config.latent_attention
        if latent is None:
            raise ValueError("latent attention needs its sizes: latent_attention is None")
        self.heads = config.heads
        self.nope, self.rope, self.value_dim = latent.nope_head_dim, latent.rope_head_dim, latent.value_head_dim
        self.kv_rank = latent.kv_rank
        self.query_down = nn.Linear(config.hidden, latent.query_rank, bias=False)
        self.query_norm = nn.RMSNorm(latent.query_rank, eps=config.norm_eps)
        self.query_up = nn.Linear(latent.query_rank, self.heads * (self.nope + self.rope), bias=False)
        self.kv_down = nn.Linear(config.hidden, latent.kv_rank + self.rope, bias=False)
        self.kv_norm = nn.RMSNorm(latent.kv_rank, eps=config.norm_eps)
        self.kv_up = nn.Linear(latent.kv_rank, self.heads * (self.nope + self.value_dim), bias=False)
        self.output = nn.Linear(self.heads * self.value_dim, config.hidden, bias=False)

    def forward(self, x: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor) -> torch.Tensor:
        """``x``: (batch, sequence, hidden); the same shape comes back."""
        batch, seq_len, _ = x.shape
        query = self.query_up(self.query_norm(self.query_down(x)))
        query = query.view(batch, seq_len, self.heads, self.nope + self.rope).transpose(1, 2)
        query_nope, query_rope = query.split([self.nope, self.rope], dim=-1)
        latent, key_rope = self.kv_down(x).split([self.kv_rank, self.rope], dim=-1)
        key_value = self.kv_up(self.kv_norm(latent))
        key_value = key_value.view(batch, seq_len, self.heads, self.nope + self.value_dim).transpose(1, 2)
        key_nope, value = key_value.split([self.nope, self.value_dim], dim=-1)
        key_rope = rotate(key_rope.unsqueeze(1), cosine, sine).expand(batch, self.heads, seq_len, self.rope)
        y = F.scaled_dot_product_attention(
            torch.cat((query_nope, rotate(query_rope, cosine, sine)), dim=-1),
            torch.cat((key_nope, key_rope), dim=-1),
            value,
            is_causal=True,
        )
        return self.output(y.transpose(1, 2).reshape(batch, seq_len, -1))
