"""The feed-forward network of a transformer block, plain or gated."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

from planner.models.config import MlpType


def activate(x: torch.Tensor, kind: MlpType) -> torch.Tensor:
    """The non-linearity of ``kind``; of the gated ones that of the gate."""
    match kind:
        case MlpType.GELU | MlpType.GEGLU:
            return F.gelu(x)
        case MlpType.SWIGLU:
            return F.silu(x)
        case MlpType.RELU:
            return F.relu(x)
        case MlpType.SQUARED_RELU:
            return F.relu(x).square()


class FeedForward(nn.Module):
    """``down(activation(up(x)))``, or ``down(activation(gate(x)) * up(x))`` for the gated kinds."""

    def __init__(self, hidden: int, ffn: int, kind: MlpType, *, bias: bool) -> None:
        super().__init__()
        self.kind = kind
        self.gate = nn.Linear(hidden, ffn, bias=bias) if kind.is_gated else None
        self.up = nn.Linear(hidden, ffn, bias=bias)
        self.down = nn.Linear(ffn, hidden, bias=bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``x``: (..., hidden); the same shape comes back."""
        if self.gate is None:
            return self.down(activate(self.up(x), self.kind))
        return self.down(activate(self.gate(x), self.kind) * self.up(x))
