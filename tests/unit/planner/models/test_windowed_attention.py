"""Models of transformers with windows and sinks: as transformers computes them, traced and shared by what they see."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

from planner.graph.node_operators import is_causal
from planner.graph.tracer import trace_model
from planner.graph.trainable import unshared_positions
from planner.models import windowed_attention
from planner.models.windowed_attention import WINDOWED, WINDOWED_ATTENTION, takes_windows
from tests.unit.planner.graph.traced import loaded_from_config

WINDOW, SEQ_LEN = 9, 40
SIZES = {
    "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "intermediate_size": 96, "vocab_size": 97, "max_position_embeddings": 256, "sliding_window": WINDOW,
    "num_local_experts": 4, "num_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2,
    "moe_intermediate_size": 32, "pad_token_id": None, "bos_token_id": None, "eos_token_id": None,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
}  # fmt: skip
ASK_FOR_WINDOWS = {"use_sliding_window": True, "max_window_layers": 2}


def config_of(model_type: str) -> Any:
    transformers = pytest.importorskip("transformers")
    sizes = SIZES | (ASK_FOR_WINDOWS if model_type in ("qwen2", "qwen3", "qwen3_moe", "smollm3") else {})
    return transformers.CONFIG_MAPPING[model_type](**sizes)


def computed(config: Any, kind: str) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Logits and gradients of a model that is built with one kind of attention."""
    transformers = pytest.importorskip("transformers")
    config = copy.deepcopy(config)
    config._attn_implementation, config.use_cache = kind, False
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).train()
    for parameter in model.parameters():
        parameter.data = parameter.data.float() + 0.05 * torch.randn(parameter.shape)
    logits = model(input_ids=torch.randint(3, 90, (2, SEQ_LEN))).logits
    logits.square().mean().backward()
    return logits.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("model_type", sorted(WINDOWED))
def test_models_are_computed_as_transformers_does(model_type: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config, num_calls = config_of(model_type), 0
    attention = windowed_attention.causal_attention

    def counted(*given: Any) -> torch.Tensor:
        nonlocal num_calls
        num_calls += 1
        return attention(*given)

    monkeypatch.setattr(windowed_attention, "causal_attention", counted)
    assert takes_windows(config)
    (expected, of_theirs), (found, of_ours) = (computed(config, kind) for kind in ("eager", WINDOWED_ATTENTION))
    assert num_calls >= 2
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    assert of_ours.keys() == of_theirs.keys()
    for name, gradient in of_theirs.items():
        assert (of_ours[name] - gradient).norm() <= 1e-4 * gradient.norm() + 1e-7, name


def test_what_attention_drops_or_images_add_is_left_to_transformers() -> None:
    dropping = config_of("mistral")
    dropping.attention_dropout = 0.1
    assert not takes_windows(dropping)
    for model_type in ("gemma2", "olmoe", "llama4_text", "gemma3"):  # scores that are capped, windows of chunks, images
        assert model_type not in WINDOWED


def test_a_window_costs_what_it_sees(tmp_path: Path) -> None:
    """Windows cost as much as all pairs, and a model with sinks kept all its scores."""
    graph = trace_model(loaded_from_config(config_of("gpt_oss").to_dict(), tmp_path), 2, SEQ_LEN)
    attention = [node for node in graph.nodes if node.op_class == "attention"]
    assert [node.op.split(".")[1] for node in attention] == ["causal_attention"] * 4
    assert all(is_causal(node) for node in attention)
    of_all = 2 * 2 * (2 * 4 * SEQ_LEN * SEQ_LEN) * 16  # two products; sequences, heads, pairs, size
    seen = sum(min(place + 1, WINDOW) for place in range(SEQ_LEN))
    of_window = 2 * 2 * (2 * 4 * (2 * seen - WINDOW)) * 16  # twice what is seen, as of all pairs, less the diagonal
    assert [node.flops for node in attention] == [of_window, of_all] * 2
    assert not [node.op for node in graph.nodes if node.shape[-2:] == (SEQ_LEN, SEQ_LEN)]
    assert unshared_positions(graph, 2) == ()
