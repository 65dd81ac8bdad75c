"""The shape of a generic transformer, from which ``planner.models.family`` builds a real module (no torch here)."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

Size = Annotated[int, Field(ge=1, le=2**40)]

DEFAULT_SEQ_LEN = 2048  # where neither the model nor the user says: the context of GPT-3 and Llama 1
LONGEST_DEFAULT_SEQ_LEN = 8192  # long-context models are pre-trained on this or less, then extended


def usual_seq_len(max_seq_len: int | None) -> int:
    """Tokens of a sequence where only the number of positions is known, if that."""
    return min(max_seq_len or DEFAULT_SEQ_LEN, LONGEST_DEFAULT_SEQ_LEN)


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


class LatentAttentionConfig(BaseModel):
    """Multi-head latent attention (DeepSeek-V2): queries and keys/values through narrow projections."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    query_rank: Size
    kv_rank: Size
    nope_head_dim: Size  # part of each query and key head without positions
    rope_head_dim: Size  # part with rotary positions; that of the keys is shared by all heads
    value_head_dim: Size

    def num_params(self, hidden: int, heads: int) -> int:
        """Both projections of each path with the norm between them, and the output's."""
        query = hidden * self.query_rank + self.query_rank * (1 + heads * (self.nope_head_dim + self.rope_head_dim))
        key_value = hidden * (self.kv_rank + self.rope_head_dim)
        key_value += self.kv_rank * (1 + heads * (self.nope_head_dim + self.value_head_dim))
        return query + key_value + heads * self.value_head_dim * hidden


class FamilyConfig(BaseModel):
    """One member of a family.

    ``gpt``: learned positions, LayerNorm, biases, fused QKV. ``llama``: rotary positions, RMSNorm,
    no biases, separate projections. ``moe``: as llama, the feed-forward network of all but the
    first ``dense_layers`` a choice of ``top_k`` of ``experts`` experts of width ``expert_ffn``
    beside ``shared_experts`` that every token takes.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    family: Literal["gpt", "llama", "moe"]
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
    qk_norm: bool = False  # RMSNorm of each query and key head
    latent_attention: LatentAttentionConfig | None = None
    experts: Size | None = None
    top_k: Size | None = None
    expert_ffn: Size | None = None  # None: ffn
    shared_experts: Annotated[int, Field(ge=0)] = 0
    dense_layers: Annotated[int, Field(ge=0)] = 0
    router: Literal["softmax", "sigmoid"] = "softmax"

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.head_dim is None and self.hidden % self.heads:
            raise ValueError(f"heads must divide hidden where head_dim is not given: {self.heads} and {self.hidden}")
        if self.heads % self.num_kv_heads:
            raise ValueError(f"kv_heads must divide heads: {self.num_kv_heads} and {self.heads}")
        if self.family != "gpt" and self.rotary_dim % 2:
            raise ValueError(f"rotary positions need an even head size, got {self.rotary_dim}")
        if self.family == "moe" and not 0 < (self.top_k or 0) <= (self.experts or 0):
            raise ValueError(f"family moe needs 1 <= top_k <= experts, got {self.top_k} and {self.experts}")
        if self.family != "moe" and self.experts is not None:
            raise ValueError(f"experts belong to family moe, not to {self.family}")
        if self.family == "gpt" and (self.latent_attention is not None or self.qk_norm):
            raise ValueError("family gpt has neither latent attention nor norms of queries and keys")
        return self

    @property
    def usual_seq_len(self) -> int:
        """Tokens of a sequence where nobody says: the model's own, up to what is pre-trained on."""
        return usual_seq_len(self.seq_len)

    @property
    def num_kv_heads(self) -> int:
        """Key and value heads."""
        return self.kv_heads or self.heads

    @property
    def size_per_head(self) -> int:
        """Width of one attention head."""
        return self.head_dim or self.hidden // self.heads

    @property
    def rotary_dim(self) -> int:
        """Width of the part of each head that is turned by its position."""
        return self.latent_attention.rope_head_dim if self.latent_attention else self.size_per_head

    @property
    def num_active_params(self) -> int:
        """Parameters that one token passes through: of the routed experts, only those it chooses."""
        idle = (self.experts or 0) - (self.top_k or 0)
        return self.num_params - (self.layers - self.dense_layers) * idle * self._feed_forward(self._expert_width)

    @property
    def num_params(self) -> int:
        """Number of parameters, a tied head counted once; derived matrix by matrix from the modules."""
        norm = (1 + self._bias) * self.hidden
        embeddings = self.vocab * self.hidden * (1 if self.tied else 2)
        positions = self.seq_len * self.hidden if self.family == "gpt" else 0
        blocks = self.layers * (self._attention() + 2 * norm) + self._feed_forwards()
        return blocks + norm + embeddings + positions

    @property
    def _bias(self) -> int:
        """1 where every matrix and every norm has a bias."""
        return 1 if self.family == "gpt" else 0

    @property
    def _expert_width(self) -> int:
        return self.expert_ffn or self.ffn

    def _attention(self) -> int:
        if self.latent_attention is not None:
            return self.latent_attention.num_params(self.hidden, self.heads)
        heads_out = self.heads * self.size_per_head
        qkv_out = heads_out + 2 * self.num_kv_heads * self.size_per_head
        matrices = self.hidden * qkv_out + heads_out * self.hidden
        return matrices + self._bias * (qkv_out + self.hidden) + (2 * self.size_per_head if self.qk_norm else 0)

    def _feed_forward(self, width: int) -> int:
        widenings = 2 if self.mlp.is_gated else 1
        return (widenings + 1) * self.hidden * width + self._bias * (widenings * width + self.hidden)

    def _feed_forwards(self) -> int:
        """Of all layers: dense ones, and those with router, routed experts and shared experts."""
        if self.experts is None:
            return self.layers * self._feed_forward(self.ffn)
        width = self._expert_width
        shared = self._feed_forward(self.shared_experts * width) if self.shared_experts else 0
        sparse = self.hidden * self.experts + self.experts * self._feed_forward(width) + shared
        return self.dense_layers * self._feed_forward(self.ffn) + (self.layers - self.dense_layers) * sparse
