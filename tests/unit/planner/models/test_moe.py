"""The mixture of experts computes what a loop over its experts computes, and is counted as such."""

import pytest
import torch
from torch.nn import functional as F  # noqa: N812

from planner.graph.model_graph import OpClass
from planner.models.catalog import find_preset
from planner.models.config import FamilyConfig
from planner.models.family import build_family
from planner.models.latent_attention import LatentAttention
from planner.models.moe import MixtureOfExperts
from planner.models.rotary import rotary_tables
from tests.unit.planner.graph.traced import graph_of

PUBLISHED = {  # total and per token, in 10^9, from the models' papers
    "mixtral-8x7b": (46.7, 12.9),
    "mixtral-8x22b": (140.6, 39.1),
    "deepseek-v3": (671.0, 37.6),
    "qwen3-30b-a3b": (30.5, 3.35),
    "qwen3-235b-a22b": (235.1, 22.2),
}


def config(**changes: object) -> FamilyConfig:
    shape: dict[str, object] = {
        "family": "moe",
        "layers": 1,
        "hidden": 16,
        "heads": 2,
        "ffn": 32,
        "vocab": 16,
        "seq_len": 8,
        "mlp": "swiglu",
        "experts": 5,
        "top_k": 2,
        "expert_ffn": 8,
    }
    return FamilyConfig.model_validate({**shape, **changes})


@pytest.mark.parametrize(("name", "billions"), PUBLISHED.items())
def test_published_sizes(name: str, billions: tuple[float, float]) -> None:
    preset = find_preset(name)
    assert preset is not None
    assert preset.config.num_params / 1e9 == pytest.approx(billions[0], abs=0.06)
    assert preset.config.num_active_params / 1e9 == pytest.approx(billions[1], abs=0.06)


@pytest.mark.parametrize(
    "changes", [{}, {"expert_ffn": 24}, {"router": "sigmoid"}, {"shared_experts": 2}, {"mlp": "gelu"}]
)
def test_equals_a_loop_over_experts(changes: dict[str, object]) -> None:
    torch.manual_seed(0)
    layer = MixtureOfExperts(config(**changes))
    x = torch.randn(2, 8, 16, requires_grad=True)
    y = layer(x)
    tokens = x.flatten(0, 1)
    weights, chosen = layer.router(tokens)
    expected = torch.zeros_like(tokens) if layer.shared is None else layer.shared(tokens)
    for token in range(16):
        for weight, expert in zip(weights[token], chosen[token], strict=True):
            up = tokens[token] @ layer.experts.up[expert]
            if layer.experts.gate is None:
                inner = F.gelu(up)
            else:
                inner = F.silu(tokens[token] @ layer.experts.gate[expert]) * up
            expected = expected + F.one_hot(torch.tensor(token), 16)[:, None] * weight * (
                inner @ layer.experts.down[expert]
            )
    torch.testing.assert_close(y, expected.view_as(y), atol=1e-5, rtol=1e-4)
    own = torch.autograd.grad(y.square().sum(), list(layer.parameters()), retain_graph=True)
    reference = torch.autograd.grad(expected.square().sum(), list(layer.parameters()))
    for ours, theirs in zip(own, reference, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-4)


def test_latent_attention_equals_plain_attention_on_expanded_heads() -> None:
    torch.manual_seed(0)
    latent = {"query_rank": 12, "kv_rank": 10, "nope_head_dim": 6, "rope_head_dim": 4, "value_head_dim": 8}
    layer = LatentAttention(config(latent_attention=latent))
    x = torch.randn(1, 8, 16)
    cosine, sine = rotary_tables(8, 4, 10000.0, x)

    def turned(part: torch.Tensor) -> torch.Tensor:
        a, b = part[..., :2], part[..., 2:]
        return torch.cat((a * cosine[:, :2] - b * sine[:, :2], b * cosine[:, 2:] + a * sine[:, 2:]), dim=-1)

    query = layer.query_up(layer.query_norm(layer.query_down(x))).view(8, 2, 10)
    down = layer.kv_down(x)[0]
    key_value = layer.kv_up(layer.kv_norm(down[:, :10])).view(8, 2, 14)
    heads: list[torch.Tensor] = []
    for head in range(2):
        q = torch.cat((query[:, head, :6], turned(query[:, head, 6:])), dim=-1)
        k = torch.cat((key_value[:, head, :6], turned(down[:, 10:])), dim=-1)
        scores = (q @ k.T / 10**0.5).masked_fill(torch.ones(8, 8).triu(1).bool(), float("-inf"))
        heads.append(scores.softmax(-1) @ key_value[:, head, 6:])
    expected = layer.output(torch.cat(heads, dim=-1))
    torch.testing.assert_close(layer(x, cosine, sine)[0], expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"top_k": 6}, "1 <= top_k <= experts"),
        ({"experts": None}, "1 <= top_k <= experts"),
        ({"family": "llama"}, "experts belong to family moe"),
    ],
)
def test_impossible_mixtures_are_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        config(**changes)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_flops_by_hand(dtype: str) -> None:
    """Each token passes through top_k routed experts and the shared one; the first of four layers is dense."""
    graph = graph_of("moe-tiny", dtype=dtype)
    tokens, hidden, seq_len = 2 * 32, 64, 32
    attention = tokens * (2 * hidden * (64 + 32 + 32 + 64) + 4 * seq_len * hidden)
    dense = tokens * 2 * 3 * hidden * 192
    routed, shared, router = tokens * 2 * 2 * 3 * hidden * 64, tokens * 2 * 3 * hidden * 64, tokens * 2 * hidden * 8
    head = tokens * 2 * hidden * 256
    assert graph.forward_flops == 4 * attention + dense + 3 * (routed + shared + router) + head
    assert graph.backward_flops == 2 * graph.forward_flops
    grouped = [node for node in graph.nodes if node.op_class is OpClass.GROUPED_GEMM]
    assert sum(node.flops for node in grouped) == 3 * routed
    assert all(node.weight_gradient_flops == node.flops for node in grouped)


def test_dense_and_sparse_layers_are_blocks_of_two_kinds() -> None:
    graph = graph_of("moe-tiny")
    assert [(block.modules, block.count) for block in graph.blocks] == [
        (("layers.0",), 1),
        (("layers.1", "layers.2", "layers.3"), 3),
    ]
    assert graph.warnings == ()


def test_it_learns() -> None:
    torch.manual_seed(0)
    module = build_family(config(layers=2, dense_layers=1, shared_experts=1, hidden=32))
    ids = torch.arange(32).view(2, 16) % 16
    optimizer = torch.optim.Adam(module.parameters(), lr=0.01)
    losses: list[float] = []
    for _ in range(30):
        loss = F.cross_entropy(module(ids).flatten(0, 1), ((ids + 1) % 16).flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.3 * losses[0]


def test_ten_trillion_parameters() -> None:
    """The shape is ours, so its size is counted by hand: matrix by matrix of one layer, without norms and routers."""
    preset = find_preset("moe-10t")
    assert preset is not None
    hidden, width, heads = 14336, 4096, 256
    attention = hidden * 3072 + 3072 * heads * 192 + hidden * 1088 + 1024 * heads * 256 + heads * 128 * hidden
    by_hand = 112 * attention + 109 * 513 * 3 * hidden * width + 3 * 3 * hidden * 36864 + 2 * hidden * 129280
    assert preset.config.num_params == pytest.approx(by_hand, rel=1e-3)
    assert preset.config.num_params == pytest.approx(1e13, rel=0.05)
