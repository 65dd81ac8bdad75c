"""A Llama-class model of about 8 billion parameters in plain PyTorch: what `planner search` takes as it is."""

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

LAYERS, HIDDEN, HEADS, KV_HEADS, FFN, VOCAB = 32, 4096, 32, 8, 14336, 128256
HEAD_DIM = HIDDEN // HEADS
ROPE_BASE = 500000.0


def rope_tables(seq_len: int, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosine and sine of each position's angles, (seq_len, HEAD_DIM / 2)."""
    frequencies = ROPE_BASE ** (-torch.arange(0, HEAD_DIM, 2, device=like.device, dtype=torch.float32) / HEAD_DIM)
    angles = torch.arange(seq_len, device=like.device, dtype=torch.float32)[:, None] * frequencies
    return angles.cos().to(like.dtype), angles.sin().to(like.dtype)


def apply_rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotates the two halves of each head of ``x`` (batch, heads, seq_len, HEAD_DIM)."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wq = nn.Linear(HIDDEN, HEADS * HEAD_DIM, bias=False)
        self.wk = nn.Linear(HIDDEN, KV_HEADS * HEAD_DIM, bias=False)
        self.wv = nn.Linear(HIDDEN, KV_HEADS * HEAD_DIM, bias=False)
        self.wo = nn.Linear(HEADS * HEAD_DIM, HIDDEN, bias=False)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        batch, seq_len, _ = x.shape
        q = self.wq(x).view(batch, seq_len, HEADS, HEAD_DIM).transpose(1, 2)
        k = self.wk(x).view(batch, seq_len, KV_HEADS, HEAD_DIM).transpose(1, 2)
        v = self.wv(x).view(batch, seq_len, KV_HEADS, HEAD_DIM).transpose(1, 2)
        q, k = apply_rope(q, cos, sin), apply_rope(k, cos, sin)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.wo(y.transpose(1, 2).reshape(batch, seq_len, HEADS * HEAD_DIM))


class FeedForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w1 = nn.Linear(HIDDEN, FFN, bias=False)
        self.w2 = nn.Linear(FFN, HIDDEN, bias=False)
        self.w3 = nn.Linear(HIDDEN, FFN, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class TransformerBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(HIDDEN, eps=1e-5)
        self.attention = Attention()
        self.ffn_norm = nn.RMSNorm(HIDDEN, eps=1e-5)
        self.feed_forward = FeedForward()

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.attention_norm(x), cos, sin)
        return x + self.feed_forward(self.ffn_norm(x))


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.max_seq_len = 8192
        self.tok_embeddings = nn.Embedding(VOCAB, HIDDEN)
        self.layers = nn.ModuleList(TransformerBlock() for _ in range(LAYERS))
        self.norm = nn.RMSNorm(HIDDEN, eps=1e-5)
        self.output = nn.Linear(HIDDEN, VOCAB, bias=False)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x = self.tok_embeddings(input_ids)
        cos, sin = rope_tables(input_ids.shape[1], x)
        for layer in self.layers:
            x = layer(x, cos, sin)
        return self.output(self.norm(x))


def build_model() -> nn.Module:
    return Transformer()
