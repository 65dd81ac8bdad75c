"""How long tracing takes, and what it finds: ``python -m benchmarks.tracing`` writes the table into benchmarks/results.

Each model is traced in a process of its own, one sequence (or image, or piece of sound) in bfloat16.
Seconds are of the process's CPU time, which other work on the machine disturbs less than the clock;
torch's import is not counted, all other imports are. Configs without a name of their own are what
transformers builds from the model type alone: BERT base, ViT base, ResNet-50, Mistral 7B and so on.
"Off by" is the difference of the graph's FLOPs to what torch.utils.flop_counter counts, forward and
backward, on the same model at the same size on the meta device, attention as products; to the
counter's own operators the products of grouped experts are added, which it does not know. Models
with windows are counted without them, since a mask cannot be made on meta and changes no count;
a model that asks for values cannot be counted there (the tests count it small, on the CPU).
Parameters are compared with sum(p.numel()) and must be equal. "Again" is the whole process of
`planner trace MODEL` a second time, by the clock, with the start of the interpreter.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"

PRESETS = (
    "gpt2-1.5b",
    "gpt3-175b",
    "megatron-1008b",
    "llama2-7b",
    "llama3-8b",
    "llama3-70b",
    "llama3-405b",
    "qwen3-8b",
    "qwen3-32b",
    "mixtral-8x7b",
    "mixtral-8x22b",
    "qwen3-30b-a3b",
    "qwen3-235b-a22b",
    "deepseek-v3",
)
FILES = (
    "examples/model.py",
    "examples/tiny_gpt.py",
    "tests/fixtures/hf/gpt2",
    "tests/fixtures/hf/llama",
    "tests/fixtures/hf/qwen3",
    "tests/fixtures/odd_models.py:lora_on_llama",
    "tests/fixtures/odd_models.py:perceptron",
    "tests/fixtures/odd_models.py:ten_layers",
    "tests/fixtures/odd_models.py:thousand_layers",
)
TYPES: Mapping[str, str] = {  # model type of transformers -> the class that is trained
    "mistral": "MistralForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "deepseek_v3": "DeepseekV3ForCausalLM",
    "bert": "BertForMaskedLM",
    "t5": "T5ForConditionalGeneration",
    "vit": "ViTForImageClassification",
    "whisper": "WhisperForConditionalGeneration",
    "mamba2": "Mamba2ForCausalLM",
    "resnet": "ResNetForImageClassification",
    "clip": "CLIPModel",
    "llava": "LlavaForConditionalGeneration",
}
# Sequence lengths where the config names none that fits: text beside an image, or a text encoder's own.
SEQ_LENS: Mapping[str, int] = {"t5": 512, "clip": 77, "llava": 1024, "mamba2": 2048, "whisper": 448}
WINDOWED = ("mistral", "gemma2")
AGAIN = ("llama3-405b", "deepseek-v3", "examples/model.py")

Row = dict[str, object]


def trace_one(model: str, name: str) -> Row:
    """Traces ``model`` in this process at the model's own length."""
    import torch  # noqa: F401  # pyright: ignore[reportUnusedImport]  # its import is not counted

    started, started_cpu = time.perf_counter(), time.process_time()
    from planner.graph.tracer import trace_model
    from planner.model_file import load_model, resolve_model

    loaded = load_model(resolve_model(model))
    graph = trace_model(loaded, 1, SEQ_LENS.get(name, loaded.default_seq_len))
    cpu_s, wall_s = time.process_time() - started_cpu, time.perf_counter() - started
    num_params, counted = count(without_windows(model) if name in WINDOWED else model, graph.seq_len)
    if num_params != graph.num_params:
        raise AssertionError(f"{name}: {graph.num_params} parameters in the graph, {num_params} in the module")
    off_by = None
    if counted is not None:
        forward, backward = counted[0], counted[1] + overcounted(graph.nodes)
        off_by = [graph.forward_flops / forward - 1, graph.backward_flops / backward - 1]
    return {
        "model": name,
        "tier": graph.tier,
        "num_params": graph.num_params,
        "seq_len": graph.seq_len,
        "num_nodes": len(graph.nodes),
        "blocks": [block.count for block in graph.blocks],
        "num_units": len(graph.units),
        "forward_flops": graph.forward_flops,
        "backward_flops": graph.backward_flops,
        "off_by": off_by,
        "saved_activation_bytes": graph.saved_activation_bytes,
        "warnings": list(graph.warnings),
        "cpu_s": round(cpu_s, 2),
        "wall_s": round(wall_s, 2),
    }


def overcounted(nodes: tuple[object, ...]) -> int:
    """torch's counter takes the weight gradient of a convolution in groups for that of one without: to be taken off."""
    from planner.graph.model_graph import Node

    found = [(n.weight_gradient_flops, n.attributes.get("groups", 1)) for n in nodes if isinstance(n, Node)]
    return -sum(flops * (groups - 1) for flops, groups in found if isinstance(groups, int))


def without_windows(model: str) -> str:
    """The config beside ``model`` whose layers all look at the whole sequence."""
    from transformers import AutoConfig

    num_layers = AutoConfig.from_pretrained(model).num_hidden_layers
    whole = {"sliding_window": None, "layer_types": ["full_attention"] * num_layers}
    path = Path(model).with_suffix(".whole.json")
    path.write_text(json.dumps({**json.loads(Path(model).read_text()), **whole}), encoding="utf-8")
    return str(path)


def count(model: str, seq_len: int) -> tuple[int, tuple[int, int] | None]:
    """Parameters, and FLOPs forward and backward as torch counts them; None where values are asked for."""
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.utils.flop_counter import FlopCounterMode

    from planner.model_file import load_model, resolve_model
    from planner.models.inputs import call_model, training_batch

    loaded = load_model(resolve_model(model))
    known: dict[object, Callable[..., int]] = {torch.ops.aten._grouped_mm: grouped_flops}
    with torch.device("meta"):
        module = loaded.build().to(torch.bfloat16).train()
        given = loaded.example_inputs(1, seq_len)
        inputs = (
            {name: on_meta(t) for name, t in given.items()} if isinstance(given, dict) else tuple(map(on_meta, given))
        )
        num_params = sum(p.numel() for p in module.parameters())
        try:
            with sdpa_kernel(SDPBackend.MATH):
                with FlopCounterMode(display=False, custom_mapping=known) as forward:
                    loss = loaded.loss_fn(call_model(module, inputs), training_batch(inputs))
                with FlopCounterMode(display=False, custom_mapping=known) as backward:
                    loss.backward()
        except RuntimeError as error:
            if "meta tensors" not in str(error):
                raise
            return num_params, None
    return num_params, (forward.get_total_flops(), backward.get_total_flops())


def on_meta(tensor: torch.Tensor) -> torch.Tensor:
    """An input as the trace gets it."""
    import torch

    return tensor.to("meta", torch.bfloat16 if tensor.is_floating_point() else None)


def grouped_flops(
    a: tuple[int, ...], b: tuple[int, ...], *rest: object, out_shape: object = None, **named: object
) -> int:
    """Each row meets one matrix: (rows, in) x (experts, in, out), or for its gradient (in, rows) x (rows, out)."""
    del rest, out_shape, named
    return 2 * a[0] * a[1] * b[-1]


def again(model: str) -> float:
    """Seconds of ``planner trace`` the second time."""
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "XDG_CACHE_HOME": folder}
        environment.pop("PLANNER_CACHE", None)
        command = [sys.executable, "-m", "planner", "trace", model]
        subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, check=True)
        started = time.perf_counter()
        subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, check=True)
        return round(time.perf_counter() - started, 2)


def table_of(rows: list[Row]) -> str:
    """The rows as Markdown."""
    lines = [
        "| model | tier | parameters (10⁹) | tokens | operators | blocks | units | forward TFLOP | backward TFLOP "
        "| off by (forward, backward) | saved GiB | CPU s | again, s |",
        "|---|---|---:|---:|---:|---|---:|---:|---:|---|---:|---:|---:|",
    ]
    for row in rows:
        number = {key: float(value) for key, value in row.items() if isinstance(value, int | float)}
        off_by = row["off_by"]
        blocks = " + ".join(map(str, row["blocks"])) if isinstance(row["blocks"], list) else ""
        lines.append(
            f"| {row['model']} | {row['tier']} | {number['num_params'] / 1e9:,.3f} | {row['seq_len']} "
            f"| {row['num_nodes']} | {blocks or 'none'} | {row['num_units']} | {number['forward_flops'] / 1e12:,.3f} "
            f"| {number['backward_flops'] / 1e12:,.3f} "
            f"| {', '.join(f'{share:.4%}' for share in off_by) if isinstance(off_by, list) else 'not counted'} "
            f"| {number['saved_activation_bytes'] / 2**30:,.2f} | {row['cpu_s']} | {row.get('again_s', '')} |"
        )
    warned = [f"- {row['model']}: {text}" for row in rows for text in _texts(row["warnings"])]
    return "\n".join([*lines, "", "What the traces warned of:", "", *(warned or ["- nothing"])]) + "\n"


def _texts(value: object) -> list[str]:
    return [str(text) for text in value] if isinstance(value, list) else []


def main() -> None:
    """Without arguments: all models. With ``--one MODEL NAME``: that one, as JSON on stdout."""
    if sys.argv[1:2] == ["--one"]:
        print(json.dumps(trace_one(sys.argv[2], sys.argv[3])))
        return
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        models = {name: name for name in (*PRESETS, *FILES)}
        for kind, architecture in TYPES.items():
            (path := Path(folder) / f"{kind}.json").write_text(
                json.dumps({"model_type": kind, "architectures": [architecture]}), encoding="utf-8"
            )
            models[kind] = str(path)
        for name, model in models.items():
            command = [sys.executable, "-m", "benchmarks.tracing", "--one", model, name]
            done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
            rows.append(json.loads(done.stdout))
            if name in AGAIN:
                rows[-1]["again_s"] = again(model)
            print(f"{name}: {rows[-1]['cpu_s']} s", file=sys.stderr)
            write(rows)


def write(rows: list[Row]) -> None:
    """The table and its numbers; after every model, so that a run that is stopped leaves what it has."""
    name = f"tracing_cpu_{date.today():%Y-%m-%d}"
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"{name}.json").write_text(json.dumps(rows, indent=2) + "\n", encoding="utf-8")
    introduction = (__doc__ or "").partition("\n\n")[2]
    (RESULTS / f"{name}.md").write_text(f"# Tracing\n\n{introduction}\n{table_of(rows)}", encoding="utf-8")


if __name__ == "__main__":
    main()
