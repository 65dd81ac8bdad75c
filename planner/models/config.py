"""The shape of a generic transformer, from which ``planner.models.family`` builds a real module (no torch here)."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

Size = Annotated[int, Field(ge=1, le=2**40)]


class MlpType(StrEnum):
    """The feed-forward network's non-linearity; the two last are gated and have a third matrix."""

    GELU = "gelu"
    RELU = "relu"
    SQUARED_RELU = "squared_relu"
    SWIGLU = "swiglu"
    GEGLU = "geglu"

    @property
    def is_gated(self) -> bool:
        """Whether a gate of the same width multiplies the hidden layer."""
        return self in (MlpType.SWIGLU, MlpType.GEGLU)


class FamilyConfig(BaseModel):
    """One member of a family.

    ``gpt``: learned positions, LayerNorm, biases, fused QKV. ``llama``: rotary positions, RMSNorm,
    no biases, separate projections.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    family: Literal["gpt", "llama"]
    layers: Size
    hidden: Size
    heads: Size
    kv_heads: Size | None = None  # None: as many as heads
    head_dim: Size | None = None  # None: hidden / heads
    ffn: Size
    vocab: Size
    seq_len: Size
    mlp: MlpType = MlpType.GELU
    tied: bool = False
    dropout: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.0
    norm_eps: Annotated[float, Field(gt=0.0)] = 1e-5
    rope_theta: Annotated[float, Field(gt=0.0)] = 10000.0

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.head_dim is None and self.hidden % self.heads:
            raise ValueError(f"heads must divide hidden where head_dim is not given: {self.heads} and {self.hidden}")
        if self.heads % self.num_kv_heads:
            raise ValueError(f"kv_heads must divide heads: {self.num_kv_heads} and {self.heads}")
        if self.family == "llama" and self.size_per_head % 2:
            raise ValueError(f"rotary positions need an even head size, got {self.size_per_head}")
        return self

    @property
    def num_kv_heads(self) -> int:
        """Key and value heads."""
        return self.kv_heads or self.heads

    @property
    def size_per_head(self) -> int:
        """Width of one attention head."""
        return self.head_dim or self.hidden // self.heads

    @property
    def num_params(self) -> int:
        """Number of parameters, a tied head counted once; derived matrix by matrix from the modules."""
        bias = 1 if self.family == "gpt" else 0  # one output bias per matrix, and per norm
        heads_out = self.heads * self.size_per_head
        qkv_out = heads_out + 2 * self.num_kv_heads * self.size_per_head
        attention = self.hidden * qkv_out + heads_out * self.hidden + bias * (qkv_out + self.hidden)
        widenings = 2 if self.mlp.is_gated else 1
        mlp = (widenings + 1) * self.hidden * self.ffn + bias * (widenings * self.ffn + self.hidden)
        norm = (1 + bias) * self.hidden
        embeddings = self.vocab * self.hidden * (1 if self.tied else 2)
        positions = self.seq_len * self.hidden if self.family == "gpt" else 0
        return self.layers * (attention + mlp + 2 * norm) + norm + embeddings + positions
