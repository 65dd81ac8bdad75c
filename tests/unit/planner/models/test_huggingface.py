"""Hugging Face configs are built as transformers means them; where training here is not what they are for is said."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from planner.errors import ModelError
from planner.model_file import LoadedModel, load_model, resolve_model
from planner.models.huggingface import _put_image_tokens  # pyright: ignore[reportPrivateUsage]
from planner.models.inputs import call_model
from tests.unit.planner.graph.traced import loaded_from_code

SIZES = {"vocab_size": 256, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
         "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}  # fmt: skip


def loaded(folder: Path, model_type: str, others: dict[str, object], name: str | None = None) -> LoadedModel:
    config: dict[str, object] = {"model_type": model_type, **SIZES, **others}
    if name is not None:
        config["architectures"] = [name]
    (folder / "config.json").write_text(json.dumps(config))
    return load_model(resolve_model(str(folder / "config.json")))


def logits_of(model: LoadedModel) -> torch.Tensor:
    """Of its example: 2 texts of 16 tokens."""
    output: Any = call_model(model.build(), model.example_inputs(2, 16))
    return output.logits


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


@pytest.mark.parametrize(
    ("model_type", "name", "said"),
    [
        ("bloom", "BloomForCausalLM", "a fused kernel of attention"),
        ("gemma2", "Gemma2ForCausalLM", "a fused kernel of attention"),
        ("gpt_oss", "GptOssForCausalLM", None),
        ("mamba", "MambaForCausalLM", "the kernels of mamba-ssm"),
        ("qwen3_next", "Qwen3NextForCausalLM", "the kernels of flash-linear-attention"),
        ("llama", "LlamaForCausalLM", None),
    ],
)
def test_what_makes_its_steps_longer_than_others_is_said(
    tmp_path: Path, model_type: str, name: str, said: str | None
) -> None:
    """Plans of gpt-oss came with 6 % of the peak, without a word; it has an attention of our own now."""
    left_out = loaded(tmp_path, model_type, {}, name).left_out
    assert (left_out is None) == (said is None)
    assert said is None or said in (left_out or "")


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


def test_a_model_of_text_and_images_without_its_eyes_takes_text(tmp_path: Path) -> None:
    """Gemma 4 may have no vision_config: an AttributeError ended the search."""
    text: dict[str, object] = {
        **SIZES, "model_type": "gemma4_text", "head_dim": 8, "global_head_dim": 8, "vocab_size_per_layer_input": 256,
        "hidden_size_per_layer_input": 0, "layer_types": ["sliding_attention", "full_attention"],
    }  # fmt: skip
    others: dict[str, object] = {"text_config": text, "vision_config": None, "audio_config": None}
    model = loaded(tmp_path, "gemma4", others, "Gemma4ForConditionalGeneration")
    assert set(model.example_inputs(2, 16)) == {"input_ids"}
    assert logits_of(model).shape == (2, 16, 256)


def test_an_image_of_no_one_size_is_told() -> None:
    config: Any = SimpleNamespace(image_token_id=255, vision_config=SimpleNamespace(image_size=32, patch_size=(8, 8)))
    with pytest.raises(ModelError, match=r"image_size 32, patch_size \(8, 8\) in vision_config"):
        _put_image_tokens(torch.zeros(2, 16, dtype=torch.int64), config)


def test_a_class_of_text_alone_gets_the_config_of_the_text(tmp_path: Path) -> None:
    """As transformers does it: before, the class was given the whole config, which has no vocab_size."""
    text: dict[str, object] = {**SIZES, "head_dim": 8, "layer_types": ["full_attention", "full_attention"]}
    model = loaded(tmp_path, "qwen3_5", {"text_config": text}, "Qwen3_5ForCausalLM")
    assert logits_of(model).shape == (2, 16, 256)


def test_a_config_of_several_texts_is_told(tmp_path: Path) -> None:
    parts = {"text_encoder": {"model_type": "t5"}, "audio_encoder": {"model_type": "encodec"},
             "decoder": {"model_type": "musicgen_decoder"}}  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "musicgen", **parts}))
    with pytest.raises(ModelError, match="musicgen has several models of text") as told:
        load_model(resolve_model(str(tmp_path / "config.json")))
    assert "model.py" in told.value.hint


VIT: dict[str, object] = {"image_size": 32, "patch_size": 8}


@pytest.mark.parametrize(
    ("model_type", "name", "others", "seq_len"),
    [
        ("vit", "ViTForImageClassification", VIT, 1),
        ("llama", "LlamaForCausalLM", {}, 64),
        ("bert", "BertForMaskedLM", {}, 64),
    ],
)
def test_a_model_of_images_is_planned_in_samples(
    tmp_path: Path, model_type: str, name: str, others: dict[str, object], seq_len: int
) -> None:
    """A ViT was planned as of 2,048 tokens an image, and its tokens a second were told."""
    assert loaded(tmp_path, model_type, others, name).default_seq_len == seq_len
