"""Layers of experts of transformers that compute every expert for every token compute here what their routers chose."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from torch import nn

from planner.graph.experts import expert_counts
from planner.graph.tracer import trace_model
from planner.models.huggingface import for_training
from tests.unit.planner.graph.traced import loaded_from_code

EXPERTS, SIZES = 8, {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "intermediate_size_mlp": 64, "head_dim": 8,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 8,
    "interleave_moe_layer_step": 2, "max_position_embeddings": 64, "attention_chunk_size": 64,
}  # fmt: skip


def llama4(top_k: int = 1) -> nn.Module:
    """As a user builds one, with all values drawn: transformers leaves those of experts empty."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    model = transformers.Llama4ForCausalLM(transformers.Llama4TextConfig(**SIZES, num_experts_per_tok=top_k))
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.1)
    return model


@pytest.mark.parametrize("top_k", [1, 2])
def test_what_comes_out_and_every_gradient_stay_as_transformers_has_them(top_k: int) -> None:
    theirs = llama4(top_k)
    ours = for_training(copy.deepcopy(theirs))
    tokens = torch.randint(64, (2, 16))
    outputs = [model(tokens).logits for model in (theirs, ours)]
    for output in outputs:
        output.square().mean().backward()
    torch.testing.assert_close(outputs[1], outputs[0])
    theirs_of, ours_of = (dict(model.named_parameters()) for model in (theirs, ours))
    assert list(theirs_of) == list(ours_of)
    for fqn, parameter in theirs_of.items():
        torch.testing.assert_close(ours_of[fqn].grad, parameter.grad, msg=fqn)
    chosen = ours_of["model.layers.1.feed_forward.experts.down_proj"].grad
    assert chosen is not None
    assert chosen.flatten(1).any(dim=1).sum() > EXPERTS / 2


def test_a_layer_is_still_one_of_transformers_and_can_be_copied() -> None:
    ours = for_training(llama4())
    copied = copy.deepcopy(ours)
    layer, again = (model.get_submodule("model.layers.1.feed_forward") for model in (ours, copied))
    assert type(layer) is type(again)
    assert {f"{each.__module__}.{each.__name__}" for each in type(layer).__mro__[:2]} == {
        "transformers.models.llama4.modeling_llama4.Llama4TextMoe"
    }
    tokens = torch.randint(64, (2, 16))
    with torch.no_grad():
        torch.testing.assert_close(copied(tokens).logits, ours(tokens).logits)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_trace_has_the_work_of_the_chosen_experts_alone(dtype: str, tmp_path: Path) -> None:
    """Llama 4 Maverick had 24 times its work and no experts to divide: nothing fitted 1,024 H100."""
    code = f"""
import torch
from transformers import Llama4ForCausalLM, Llama4TextConfig

def build_model():
    return Llama4ForCausalLM(Llama4TextConfig(**{SIZES}, num_experts_per_tok=1)).to(torch.{dtype})
"""
    graph = trace_model(loaded_from_code(code, tmp_path), 1, 32)
    assert expert_counts(graph) == (EXPERTS,)
    products = [node for node in graph.nodes if "grouped_mm" in node.op]
    # Gate and up together, and down: one row for each token.
    expected = sum(2.0 * 32 * 32 * width for width in (96, 48))
    assert sum(node.flops for node in products) == expected
