"""Models for the tests of the graph, loaded the way a user's would be."""

import json
from functools import cache
from pathlib import Path

from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from planner.graph.model_graph import ModelGraph
from planner.graph.tracer import trace_model
from planner.model_file import LoadedModel, load_model, resolve_model
from planner.models.inputs import call_model, training_batch

ROOT = Path(__file__).resolve().parents[4]

HF_CONFIGS: dict[str, dict[str, object]] = {
    "llama": {
        "model_type": "llama",
        "hidden_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_hidden_layers": 3,
        "intermediate_size": 160,
        "vocab_size": 256,
    },
    "gpt2": {"model_type": "gpt2", "n_embd": 64, "n_head": 4, "n_layer": 3, "vocab_size": 256, "n_positions": 64},
    "qwen3": {
        "model_type": "qwen3",
        "hidden_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "num_hidden_layers": 3,
        "intermediate_size": 160,
        "vocab_size": 256,
    },
}


def loaded(name: str) -> LoadedModel:
    return load_model(resolve_model(name))


def loaded_from_config(config: dict[str, object], folder: Path) -> LoadedModel:
    (folder / "config.json").write_text(json.dumps(config))
    return loaded(str(folder))


def loaded_from_code(code: str, folder: Path) -> LoadedModel:
    (folder / "model.py").write_text(code)
    return loaded(str(folder / "model.py"))


@cache
def graph_of(name: str, batch_size: int = 2, seq_len: int = 32, dtype: str = "bfloat16") -> ModelGraph:
    return trace_model(loaded(name), batch_size, seq_len, dtype)


def counted_flops(model: LoadedModel, batch_size: int, seq_len: int) -> tuple[int, int]:
    """Forward and backward FLOPs by torch's own counter, which knows attention on the CPU as products alone."""
    module = model.build()
    inputs = model.example_inputs(batch_size, seq_len)
    with sdpa_kernel(SDPBackend.MATH):
        with FlopCounterMode(display=False) as forward:
            loss = model.loss_fn(call_model(module, inputs), training_batch(inputs))
        with FlopCounterMode(display=False) as backward:
            loss.backward()
    return forward.get_total_flops(), backward.get_total_flops()


def assert_equal_work(exported: ModelGraph, run: ModelGraph) -> None:
    """Two ways of tracing one model agree in all that is priced, block by block."""
    assert (exported.tier, run.tier) == ("export", "modules")
    assert run.parameters == exported.parameters
    assert (run.num_params, run.num_trainable_params) == (exported.num_params, exported.num_trainable_params)
    assert (run.forward_flops, run.backward_flops) == (exported.forward_flops, exported.backward_flops)
    assert run.saved_activation_bytes == exported.saved_activation_bytes
    assert run.blocks == exported.blocks
    assert [(u.name, u.modules, u.parameters) for u in run.units] == [
        (u.name, u.modules, u.parameters) for u in exported.units
    ]
