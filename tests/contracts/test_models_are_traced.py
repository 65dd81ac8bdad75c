"""Every kind of model that transformers describes is traced whole: parameters, FLOPs, blocks, and nothing unknown."""

import json
from math import prod
from pathlib import Path

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from planner.graph.model_graph import ModelGraph
from planner.graph.tracer import trace_model
from planner.model_file import LoadedModel, load_model, resolve_model
from planner.models.causal_attention import causal_attention
from planner.models.inputs import call_model, training_batch
from tests.unit.planner.graph.traced import assert_equal_work

CONFIGS: dict[str, dict[str, object]] = {
    "mistral": {
        "architectures": ["MistralForCausalLM"],
        "model_type": "mistral",
        "hidden_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_hidden_layers": 3,
        "intermediate_size": 128,
        "vocab_size": 256,
        "sliding_window": 16,
    },
    "gemma2": {
        "architectures": ["Gemma2ForCausalLM"],
        "model_type": "gemma2",
        "hidden_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "num_hidden_layers": 3,
        "intermediate_size": 128,
        "vocab_size": 256,
        "sliding_window": 16,
    },
    "gemma3": {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "hidden_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "num_hidden_layers": 6,
        "intermediate_size": 128,
        "vocab_size": 256,
        "sliding_window": 16,
    },
    "mixtral": {
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "hidden_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_hidden_layers": 3,
        "intermediate_size": 128,
        "vocab_size": 256,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
    },
    "qwen3_moe": {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "hidden_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "num_hidden_layers": 3,
        "intermediate_size": 128,
        "moe_intermediate_size": 32,
        "vocab_size": 256,
        "num_experts": 8,
        "num_experts_per_tok": 2,
    },
    "deepseek_v3": {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "hidden_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "num_hidden_layers": 3,
        "intermediate_size": 128,
        "moe_intermediate_size": 32,
        "vocab_size": 256,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "n_group": 2,
        "topk_group": 1,
        "q_lora_rank": 32,
        "kv_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 16,
        "v_head_dim": 16,
        "first_k_dense_replace": 1,
    },
    "bert": {
        "architectures": ["BertForMaskedLM"],
        "model_type": "bert",
        "hidden_size": 64,
        "num_attention_heads": 4,
        "num_hidden_layers": 3,
        "intermediate_size": 128,
        "vocab_size": 256,
    },
    "t5": {
        "architectures": ["T5ForConditionalGeneration"],
        "model_type": "t5",
        "d_model": 64,
        "d_kv": 16,
        "num_heads": 4,
        "num_layers": 3,
        "num_decoder_layers": 3,
        "d_ff": 128,
        "vocab_size": 256,
        "decoder_start_token_id": 0,
    },
    "vit": {
        "architectures": ["ViTForImageClassification"],
        "model_type": "vit",
        "hidden_size": 64,
        "num_attention_heads": 4,
        "num_hidden_layers": 3,
        "intermediate_size": 128,
        "image_size": 32,
        "patch_size": 8,
        "num_labels": 10,
    },
    "whisper": {
        "architectures": ["WhisperForConditionalGeneration"],
        "model_type": "whisper",
        "d_model": 64,
        "encoder_layers": 3,
        "decoder_layers": 3,
        "encoder_attention_heads": 4,
        "decoder_attention_heads": 4,
        "encoder_ffn_dim": 128,
        "decoder_ffn_dim": 128,
        "vocab_size": 256,
        "num_mel_bins": 8,
        "max_source_positions": 50,
        "max_target_positions": 64,
        "pad_token_id": 0,
        "decoder_start_token_id": 1,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "begin_suppress_tokens": None,
        "num_hidden_layers": 3,
    },
    "mamba": {
        "architectures": ["MambaForCausalLM"],
        "model_type": "mamba",
        "hidden_size": 64,
        "num_hidden_layers": 3,
        "vocab_size": 256,
        "state_size": 8,
    },
    "mamba2": {
        "architectures": ["Mamba2ForCausalLM"],
        "model_type": "mamba2",
        "hidden_size": 64,
        "num_heads": 8,
        "head_dim": 16,
        "num_hidden_layers": 3,
        "vocab_size": 256,
        "state_size": 8,
        "n_groups": 1,
        "chunk_size": 16,
    },
    "qwen3_next": {
        "architectures": ["Qwen3NextForCausalLM"],
        "model_type": "qwen3_next",
        "hidden_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "num_hidden_layers": 4,
        "intermediate_size": 128,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 32,
        "vocab_size": 256,
        "num_experts": 8,
        "num_experts_per_tok": 2,
    },
    "resnet": {
        "architectures": ["ResNetForImageClassification"],
        "model_type": "resnet",
        "num_labels": 10,
        "embedding_size": 16,
        "hidden_sizes": [32, 64],
        "depths": [3, 4],
        "image_size": 64,
    },
    "gpt_oss": {
        "architectures": ["GptOssForCausalLM"],
        "model_type": "gpt_oss",
        "hidden_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "num_hidden_layers": 3,
        "intermediate_size": 64,
        "vocab_size": 256,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": 16,
    },
    "dense and sparse layers in turn": {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "hidden_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "num_hidden_layers": 6,
        "intermediate_size": 128,
        "moe_intermediate_size": 32,
        "vocab_size": 256,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "decoder_sparse_step": 2,
    },
    "vision tower and language model": {
        "architectures": ["LlavaForConditionalGeneration"],
        "model_type": "llava",
        "image_token_index": 255,
        "image_seq_length": 16,
        "text_config": {
            "model_type": "llama",
            "hidden_size": 64,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "num_hidden_layers": 3,
            "intermediate_size": 128,
            "vocab_size": 256,
        },
        "vision_config": {
            "model_type": "clip_vision_model",
            "hidden_size": 32,
            "num_attention_heads": 4,
            "num_hidden_layers": 6,
            "intermediate_size": 64,
            "image_size": 32,
            "patch_size": 8,
        },
    },
    "two towers": {
        "architectures": ["CLIPModel"],
        "model_type": "clip",
        "projection_dim": 32,
        "text_config": {
            "model_type": "clip_text_model",
            "hidden_size": 64,
            "num_attention_heads": 4,
            "num_hidden_layers": 4,
            "intermediate_size": 128,
            "vocab_size": 256,
            "bos_token_id": 0,
            "eos_token_id": 2,
        },
        "vision_config": {
            "model_type": "clip_vision_model",
            "hidden_size": 32,
            "num_attention_heads": 4,
            "num_hidden_layers": 3,
            "intermediate_size": 64,
            "image_size": 32,
            "patch_size": 8,
        },
    },
    "opt": {
        "architectures": ["OPTForCausalLM"],
        "model_type": "opt",
        "hidden_size": 64,
        "num_attention_heads": 4,
        "num_hidden_layers": 3,
        "ffn_dim": 128,
        "vocab_size": 256,
        "word_embed_proj_dim": 64,
    },
    "falcon": {
        "architectures": ["FalconForCausalLM"],
        "model_type": "falcon",
        "hidden_size": 64,
        "num_attention_heads": 4,
        "num_hidden_layers": 3,
        "vocab_size": 256,
    },
    "diffllama": {  # parameters from torch.normal, which knows nothing of the meta device
        "architectures": ["DiffLlamaForCausalLM"],
        "model_type": "diffllama",
        "hidden_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_hidden_layers": 3,
        "intermediate_size": 128,
        "vocab_size": 256,
    },
}

BLOCKS = {  # how many repeated blocks, by kind in order of execution
    "gpt_oss": [2, 1],  # layers that look at a window, and one that looks at all
    "deepseek_v3": [1, 2],
    "gemma3": [5, 1],  # the last layer sees all positions: it needs no mask of its own
    "t5": [1, 2, 1, 2],  # the first layer of each stack computes the position bias
    "whisper": [3, 3],
    "mamba": [1, 2],  # the residual stream becomes float32 in the first
    "mamba2": [1, 2],
    "qwen3_next": [3, 1],  # three with linear attention, one that sees all positions
    "dense and sparse layers in turn": [3, 3],
    "vision tower and language model": [5, 1, 3],  # the last layer of the tower is not used
    "two towers": [3, 4],
    "resnet": [1, 2, 1, 3],  # the first of each stage changes the size
}

SAID = {
    # Parameters without gradient: Llava takes the features of the layer before the last.
    "vision tower and language model": "the first is model.vision_tower.encoder.layers.5",
    "gemma2": "without a fused kernel of attention",
    "qwen3_next": "without the kernels of flash-linear-attention",
    "mamba": "without the kernels of mamba-ssm",
    "mamba2": "without the kernels of mamba-ssm",
}


def in_windows(query: tuple[int, ...], key: tuple[int, ...], value: tuple[int, ...], window: int) -> int:
    """FLOPs of causal attention, pair by pair: each that is seen counts twice, as without a mask, on the diagonal once.

    Of rows whose window ends within the sequence the first key stands for the diagonal.
    """
    window, rows = window or key[-2], range(query[-2])
    pairs = sum(2 * min(row + 1, window) for row in rows) - window
    return 2 * prod(query[:-2]) * pairs * (query[-1] + value[-1])


assert causal_attention  # its import makes the operators
UNCOUNTED = {  # by torch's counter: a solution has half the products of the same matrix times what is found
    torch.ops.planner.causal_attention: lambda q, k, v, _, window, *__, **___: in_windows(q, k, v, window),
    torch.ops.planner.causal_attention_backward: lambda _, seen, __, window, *___, **____: (
        2 * in_windows(seen[0], seen[1], seen[2], window)
    ),
    torch.ops.aten.linalg_solve_triangular: lambda matrix, *_, out_shape, **__: prod(out_shape) * matrix[-1],
}

TOKENS = {"mamba": 8}  # transformers scans it one by one in Python


def load(name: str, folder: Path) -> LoadedModel:
    (folder / "config.json").write_text(json.dumps(CONFIGS[name]))
    return load_model(resolve_model(str(folder)))


def counted(model: LoadedModel, graph: ModelGraph) -> tuple[int, int]:
    """FLOPs by torch's counter, attention as products and experts one by one: what it knows."""
    module = model.build()
    if "num_experts_per_tok" in CONFIGS[graph.source.rpartition("/")[2]]:
        module.set_experts_implementation("eager")  # pyright: ignore[reportCallIssue]
    inputs = model.example_inputs(graph.batch_size, graph.seq_len)
    with sdpa_kernel(SDPBackend.MATH):
        with FlopCounterMode(display=False, custom_mapping=UNCOUNTED) as forward:
            loss = model.loss_fn(call_model(module, inputs), training_batch(inputs))
        with FlopCounterMode(display=False, custom_mapping=UNCOUNTED) as backward:
            loss.backward()
    return forward.get_total_flops(), backward.get_total_flops()


def overcounted(graph: ModelGraph) -> int:
    """torch's counter takes the weight gradient of a convolution in groups for that of one without."""
    groups = [(node.weight_gradient_flops, node.attributes.get("groups", 1)) for node in graph.nodes]
    return sum(flops * (count - 1) for flops, count in groups if isinstance(count, int))


@pytest.mark.parametrize("name", sorted(CONFIGS))
def test_traced_whole(name: str, tmp_path: Path) -> None:
    (folder := tmp_path / name).mkdir()
    model = load(name, folder)
    tokens = TOKENS.get(name, 32)
    graph = trace_model(model, 2, tokens)
    assert graph.tier == "export"
    assert len(graph.warnings) == (name in SAID)
    assert all(SAID[name] in warning for warning in graph.warnings)
    with torch.device("meta"):
        assert graph.num_params == sum(p.numel() for p in model.build().parameters())
    assert [block.count for block in graph.blocks] == BLOCKS.get(name, [CONFIGS[name].get("num_hidden_layers")])
    forward, backward = counted(model, graph)
    assert graph.forward_flops == pytest.approx(forward, rel=1e-3)
    assert graph.backward_flops + overcounted(graph) == pytest.approx(backward, rel=1e-3)
    assert_equal_work(graph, trace_model(model, 2, tokens, tiers=("modules",)))
