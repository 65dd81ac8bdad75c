"""Rotary positions: the tables, and the turning of queries and keys by them."""

from __future__ import annotations

import torch


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
