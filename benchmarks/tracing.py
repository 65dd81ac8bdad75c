"""How long tracing takes, and what it finds: ``python -m benchmarks.tracing`` writes the table into benchmarks/results.

Each model is traced in a process of its own, without the cache; torch's import is not counted, all
other imports are. Seconds are of the process's CPU time, which other work on the machine disturbs
less than the clock.
"""

from __future__ import annotations

import json
import subprocess
import sys
from datetime import date
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"

MODELS = (
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
    "examples/model.py",
    "examples/tiny_gpt.py",
    "tests/fixtures/hf/gpt2",
    "tests/fixtures/hf/llama",
    "tests/fixtures/hf/qwen3",
)


def trace_one(model: str) -> dict[str, object]:
    """Traces ``model`` in this process; one sequence of the model's own length, bfloat16."""
    import time

    import torch  # noqa: F401  # pyright: ignore[reportUnusedImport]  # its import is not counted

    started, started_cpu = time.perf_counter(), time.process_time()
    from planner.graph.tracer import trace_model
    from planner.model_file import load_model, resolve_model

    loaded = load_model(resolve_model(model))
    graph = trace_model(loaded, 1, loaded.default_seq_len)
    return {
        "model": model,
        "tier": graph.tier,
        "num_params": graph.num_params,
        "seq_len": graph.seq_len,
        "num_nodes": len(graph.nodes),
        "blocks": [block.count for block in graph.blocks],
        "forward_flops": graph.forward_flops,
        "backward_flops": graph.backward_flops,
        "saved_activation_bytes": graph.saved_activation_bytes,
        "num_warnings": len(graph.warnings),
        "cpu_s": round(time.process_time() - started_cpu, 2),
        "wall_s": round(time.perf_counter() - started, 2),
    }


def table_of(rows: list[dict[str, object]]) -> str:
    """The rows as Markdown."""
    lines = [
        "| model | tier | parameters (10⁹) | tokens | operators | blocks | forward TFLOP | saved GiB | CPU s |",
        "|---|---|---:|---:|---:|---|---:|---:|---:|",
    ]
    for row in rows:
        params, flops, saved = (
            float(str(row[key])) for key in ("num_params", "forward_flops", "saved_activation_bytes")
        )
        blocks = " + ".join(map(str, row["blocks"])) if isinstance(row["blocks"], list) else ""
        sizes = f"{params / 1e9:,.3f} | {row['seq_len']} | {row['num_nodes']}"
        lines.append(
            f"| {row['model']} | {row['tier']} | {sizes} | {blocks} "
            f"| {flops / 1e12:,.2f} | {saved / 2**30:,.2f} | {row['cpu_s']} |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    """Without arguments: all models. With ``--one MODEL``: that one, as JSON on stdout."""
    if sys.argv[1:2] == ["--one"]:
        print(json.dumps(trace_one(sys.argv[2])))
        return
    rows: list[dict[str, object]] = []
    for model in MODELS:
        command = [sys.executable, "-m", "benchmarks.tracing", "--one", model]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
        rows.append(json.loads(done.stdout))
        print(f"{model}: {rows[-1]['cpu_s']} s", file=sys.stderr)
    name = f"tracing_cpu_{date.today():%Y-%m-%d}"
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"{name}.json").write_text(json.dumps(rows, indent=2) + "\n", encoding="utf-8")
    introduction = (__doc__ or "").partition("\n\n")[2]
    (RESULTS / f"{name}.md").write_text(f"# Tracing\n\n{introduction}\n{table_of(rows)}", encoding="utf-8")


if __name__ == "__main__":
    main()
