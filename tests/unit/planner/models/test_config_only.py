"""A config that transformers does not know is planned as the nearest generic family, and that is said."""

import json
from pathlib import Path

import pytest
import torch

from planner.errors import ModelError
from planner.graph.tracer import trace_model
from planner.model_file import FAMILY_TYPES, family_config_of, load_model, resolve_model
from planner.models.catalog import find_preset
from planner.models.config_only import family_of
from planner.models.huggingface import HuggingFaceModel

HF = Path(__file__).resolve().parents[3] / "fixtures" / "hf"

ROOT = Path(__file__).resolve().parents[4]

LLAMA = json.loads((ROOT / "tests/fixtures/hf/llama/config.json").read_text())
MIXTRAL: dict[str, object] = {
    **LLAMA,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
}
DEEPSEEK: dict[str, object] = {
    "hidden_size": 7168,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "n_routed_experts": 256,
    "num_experts_per_tok": 8,
    "n_shared_experts": 1,
    "first_k_dense_replace": 3,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "vocab_size": 129280,
    "hidden_act": "silu",
}
GPT2 = json.loads((ROOT / "tests/fixtures/hf/gpt2/config.json").read_text())


@pytest.mark.parametrize(
    ("config", "preset"),
    [(LLAMA, "llama2-7b"), (MIXTRAL, "mixtral-8x7b"), (DEEPSEEK, "deepseek-v3"), (GPT2, "gpt2-1.5b")],
)
def test_sizes_are_those_of_the_real_model(config: dict[str, object], preset: str) -> None:
    family, real = family_of(config), find_preset(preset)
    assert family is not None
    assert real is not None
    assert family.num_params == real.config.num_params


def test_an_unknown_type_is_traced_as_a_generic_model(tmp_path: Path) -> None:
    unknown = {
        **LLAMA,
        "model_type": "llama-of-tomorrow",
        "architectures": ["NoSuchForCausalLM"],
        "num_hidden_layers": 2,
    }
    (tmp_path / "config.json").write_text(json.dumps(unknown))
    loaded = load_model(resolve_model(str(tmp_path)))
    assert loaded.stands_for is not None
    graph = trace_model(loaded, 2, 32)
    assert graph.tier == "config"
    assert "planned for a generic model of the same sizes" in graph.warnings[0]
    assert graph.num_params == 2 * (4 * 4096**2 + 3 * 4096 * 11008 + 2 * 4096) + 2 * 32000 * 4096 + 4096


def test_a_config_without_sizes_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama-of-tomorrow"}')
    with pytest.raises(ModelError, match="transformers cannot read it"):
        load_model(resolve_model(str(tmp_path)))


@pytest.mark.parametrize(("name", "layers"), [("llama", 32), ("gpt2", 48), ("llama3-8b", 32)])
def test_a_shape_is_told_where_the_family_is_the_model(name: str, layers: int) -> None:
    shape = family_config_of(name if "-" in name else str(HF / name))
    assert shape is not None
    assert shape.layers == layers


@pytest.mark.parametrize("kind", FAMILY_TYPES)
def test_what_a_config_leaves_out_is_what_transformers_means(kind: str) -> None:
    """A Llama without hidden_act was taken for a GPT, and refused by nanotron and torchtitan."""
    from transformers import AutoConfig

    of_heads = {"llama": ("head_dim", "num_key_value_heads")}.get(kind, ())  # follow from the number of heads there
    whole = {name: value for name, value in AutoConfig.for_model(kind).to_dict().items() if name not in of_heads}
    assert family_of({"model_type": kind}) == family_of(whole)
    fewer = {"model_type": kind, "num_hidden_layers": 2, "n_layer": 2}
    assert family_of(fewer) == family_of({**whole, **fewer})


@pytest.mark.parametrize("name", ["qwen3", "nothing"])
def test_no_shape_is_told_of_models_that_have_more(name: str) -> None:
    """Qwen3 has norms of queries and keys, which its config does not name."""
    assert family_config_of(str(HF / name)) is None


@pytest.mark.parametrize("bias", ["attention_bias", "mlp_bias"])
def test_no_shape_is_told_of_a_llama_with_biases(bias: str, tmp_path: Path) -> None:
    """Exports left them out."""
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA, bias: True}))
    assert family_config_of(str(tmp_path)) is None
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA, bias: False}))
    assert family_config_of(str(tmp_path)) is not None


def test_initial_values_are_one_process_s_where_an_attention_is_not_there(tmp_path: Path) -> None:
    """Falcon refuses the first that is tried, after it has drawn random numbers."""
    from transformers import FalconConfig, FalconForCausalLM

    config = FalconConfig(vocab_size=256, hidden_size=64, num_hidden_layers=1, num_attention_heads=4)
    config.architectures = ["FalconForCausalLM"]
    config.save_pretrained(tmp_path)
    torch.manual_seed(0)
    expected = FalconForCausalLM(config).state_dict()
    torch.manual_seed(0)
    found = HuggingFaceModel.from_file(tmp_path / "config.json").build().state_dict()
    assert found.keys() == expected.keys()
    assert all(torch.equal(value, expected[fqn]) for fqn, value in found.items())
