"""A Hugging Face config alone, where transformers is absent or does not know it, as the nearest generic family."""

from __future__ import annotations

from collections.abc import Mapping

from pydantic import ValidationError

from planner.models.config import DEFAULT_SEQ_LEN, FamilyConfig, MlpType

# The names that configs give to the same size, in the order in which they are looked for.
NAMES: Mapping[str, tuple[str, ...]] = {
    "layers": ("num_hidden_layers", "n_layer", "n_layers", "num_layers"),
    "hidden": ("hidden_size", "n_embd", "d_model"),
    "heads": ("num_attention_heads", "n_head", "n_heads"),
    "kv_heads": ("num_key_value_heads", "num_kv_heads"),
    "head_dim": ("head_dim",),
    "ffn": ("intermediate_size", "n_inner", "ffn_dim", "d_ff"),
    "vocab": ("vocab_size",),
    "seq_len": ("max_position_embeddings", "n_positions", "max_seq_len"),
    "experts": ("num_local_experts", "num_experts", "n_routed_experts"),
    "top_k": ("num_experts_per_tok", "moe_top_k"),
    "expert_ffn": ("moe_intermediate_size",),
    "shared_experts": ("n_shared_experts", "num_shared_experts"),
    "dense_layers": ("first_k_dense_replace",),
}
# What a config of these types means by leaving a name out: the defaults of transformers' own classes of configs.
_OF_LLAMA = {
    "hidden_act": "silu",
    "num_hidden_layers": 32,
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "intermediate_size": 11008,
    "vocab_size": 32000,
    "max_position_embeddings": 2048,
}
_OF_MIXTRAL = {
    **_OF_LLAMA,
    "intermediate_size": 14336,
    "max_position_embeddings": 131072,
    "num_key_value_heads": 8,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
}
_OF_GPT2 = {"n_layer": 12, "n_embd": 768, "n_head": 12, "vocab_size": 50257, "n_positions": 1024}
DEFAULTS: Mapping[str, Mapping[str, object]] = {"gpt2": _OF_GPT2, "llama": _OF_LLAMA, "mixtral": _OF_MIXTRAL}
LATENT_NAMES: Mapping[str, str] = {
    "query_rank": "q_lora_rank",
    "kv_rank": "kv_lora_rank",
    "nope_head_dim": "qk_nope_head_dim",
    "rope_head_dim": "qk_rope_head_dim",
    "value_head_dim": "v_head_dim",
}


def family_of(config: Mapping[str, object]) -> FamilyConfig | None:
    """The family member of the same sizes; None where the config does not tell enough."""
    config = {**DEFAULTS.get(str(config.get("model_type")), {}), **config}
    found = {field: _size(config, names) for field, names in NAMES.items()}
    sizes: dict[str, object] = {field: size for field, size in found.items() if size is not None}
    hidden = sizes.get("hidden")
    if isinstance(hidden, int):
        sizes.setdefault("ffn", 4 * hidden)  # what GPT-2's config means by leaving n_inner out
    sizes.setdefault("seq_len", DEFAULT_SEQ_LEN)
    activation = str(config.get("hidden_act", config.get("activation_function", "gelu")))
    is_llama_like = activation == "silu" or any(key in config for key in ("rope_theta", "rope_scaling", "rms_norm_eps"))
    gated = MlpType.SWIGLU if activation == "silu" else MlpType.GEGLU
    is_moe = "experts" in sizes and "top_k" in sizes
    family = "moe" if is_moe else "llama" if is_llama_like else "gpt"
    if not is_moe:
        for field in ("experts", "top_k", "expert_ffn", "shared_experts", "dense_layers"):
            sizes.pop(field, None)
    latent = {field: _size(config, (name,)) for field, name in LATENT_NAMES.items()}
    if family != "gpt" and None not in latent.values():
        sizes["latent_attention"] = latent
    tied = config.get("tie_word_embeddings", family == "gpt")
    mlp = MlpType.GELU if family == "gpt" else gated
    try:
        return FamilyConfig.model_validate({**sizes, "family": family, "mlp": mlp, "tied": bool(tied)})
    except ValidationError:
        return None


def _size(config: Mapping[str, object], names: tuple[str, ...]) -> int | None:
    """The first whole number under one of ``names``."""
    values = (config.get(name) for name in names)
    return next((value for value in values if isinstance(value, int) and not isinstance(value, bool)), None)
