"""Hugging Face configs are built as transformers means them; where training here is not what they are for is said."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from planner.model_file import LoadedModel, load_model, resolve_model
from tests.unit.planner.graph.traced import loaded_from_code

SIZES = {"vocab_size": 256, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
         "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}  # fmt: skip


def loaded(folder: Path, model_type: str, others: dict[str, object], name: str | None = None) -> LoadedModel:
    config: dict[str, object] = {"model_type": model_type, **SIZES, **others}
    if name is not None:
        config["architectures"] = [name]
    (folder / "config.json").write_text(json.dumps(config))
    return load_model(resolve_model(str(folder / "config.json")))


@pytest.mark.parametrize(
    ("model_type", "others"),
    [("doge", {"keep_window_size": 8}), ("llama", {}), ("qwen3", {}), ("mistral", {"sliding_window": 8})],
)
def test_no_position_sees_what_follows(tmp_path: Path, model_type: str, others: dict[str, object]) -> None:
    """Doge makes its mask out of the causal one: without that, it saw everything."""
    torch.manual_seed(0)
    module = loaded(tmp_path, model_type, others).build().eval()
    tokens = torch.randint(0, 256, (2, 32))
    other = tokens.clone()
    other[:, 20:] = 255 - tokens[:, 20:]
    with torch.no_grad():
        before, after = module(tokens).logits, module(other).logits
    torch.testing.assert_close(before[:, :20], after[:, :20])
    assert not torch.equal(before[:, 20:], after[:, 20:])


MIXTRAL = {"num_local_experts": 4, "num_experts_per_tok": 2, "router_aux_loss_coef": 0.02}


@pytest.mark.parametrize(
    ("model_type", "name", "others", "said"),
    [
        ("bert", "BertForMaskedLM", {}, "sees what is on both sides"),
        ("bert", "BertModel", {}, "has no head"),
        ("llama", "LlamaModel", {}, "has no head"),
        ("clip", "CLIPModel", {}, None),  # a loss of its own
        ("gpt2", "GPT2DoubleHeadsModel", {}, None),
        ("mixtral", "MixtralForCausalLM", {**MIXTRAL, "output_router_logits": True}, "router_aux_loss_coef = 0.02"),
        ("mixtral", "MixtralForCausalLM", MIXTRAL, None),  # transformers does not add it either
        ("gpt2", "GPT2LMHeadModel", {}, None),
        ("llama", None, {}, None),
    ],
)
def test_what_it_does_not_learn_here_is_said(
    tmp_path: Path, model_type: str, name: str | None, others: dict[str, object], said: str | None
) -> None:
    notes = loaded(tmp_path, model_type, others, name).training_notes
    assert len(notes) == (said is not None)
    assert said is None or said in notes[0]


SCRIPT = """
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

class Wrapped(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = LlamaForCausalLM(LlamaConfig(vocab_size=256, hidden_size=32, num_hidden_layers=2,
                                                  num_attention_heads=4, intermediate_size=64))
    def forward(self, input_ids):
        self.kept = self.inner(input_ids=input_ids)
        return self.kept.logits

def build_model():
    return Wrapped()
"""


def test_models_of_scripts_keep_no_keys_for_later_tokens(tmp_path: Path) -> None:
    """They went from block to block in one object: under tensor and pipeline parallelism that was our own defect."""
    pytest.importorskip("transformers")
    module = loaded_from_code(SCRIPT, tmp_path).build()
    module(torch.zeros(1, 8, dtype=torch.int64))
    kept: Any = module.kept
    assert kept.past_key_values is None
