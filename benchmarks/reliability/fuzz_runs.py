"""What is fuzzed of runs that were: logs of frameworks, tables of measured runs, and checkpoints' manifests."""

from __future__ import annotations

import contextlib
import csv
import io
import random
from pathlib import Path

from pydantic import ValidationError

from benchmarks.reliability.fuzz_targets import Target, changed_json, changed_lines
from costmodels.vocabulary.choices import Optimizer
from planner.errors import InputError, PlannerError
from planner.formats.run_log import Job, read_log
from planner.formats.run_table import Rejected, Run, read_runs
from planner.formats.table_run import layout_of, shape_of
from planner.json_file import read_content
from planner.plan.manifest import FILE_NAME, Chunk, Manifest, Progress, StoredFile, StoredTensor, read_manifest

MOST_BYTES = 2**20  # of a log
JOB = Job(global_batch_size=512, seq_len=4096, num_devices=64)
LOGS = (
    " [2024-10-16 06:21:12] iteration {0:8d}/  500 | consumed samples:  256 | elapsed time per iteration (ms): 28{0}.5 "
    "| throughput per GPU (TFLOP/s/GPU): 401.5 | global batch size:   512 | lm loss: 1.192634E+01 |",
    "[rank0]:\x1b[31m[titan] 2025-06-16 22:30:50,322 - root - INFO - \x1b[31mstep: {0:2d}  \x1b[32mloss:  6.1  "
    "\x1b[33mmemory: 49.66GiB(52.28%)  \x1b[34mtps: 5,8{0}6  \x1b[36mtflops: 339.16  \x1b[35mmfu: 34.29%\x1b[39m",
    "[2023-11-07 01:55:2{0},714] [INFO] [timer.py:260:stop] epoch=0/micro_step={0}40/global_step={0}0, "
    "RunningAvgSamplesPerSec=25, CurrSamplesPerSec=25.{0}, MemAllocated=4.32GB, MaxMemAllocated=38.49GB",
    "[2023-11-07 01:55:2{0},711] [INFO] [logging.py:96:log_dist] [Rank 0] step={0}0, skipped=4, lr=[4.9e-05]",
    "08/31/2024 14:37:31 [INFO|DP=0|PP=0|TP=0]: iteration: {0} / 15 | consumed_tokens: 512 | "
    "elapsed_time_per_iteration_ms: 1.2{0}K | lm_loss: 5.32 | lr: 0.00015 | Peak allocated 309.29MiB.",
    "Training epoch 0, iteration {0}/99 | lr: 6.897e-06 | max_memory_allocated: 115792977920 | "
    "reduced_train_loss: 11.96 | train_step_timing in s: 6.0{0} | consumed_samples: 5888",
)
ROW = {
    "id": "toy", "model_name": "toy", "layers": "4", "hidden": "64", "heads": "8", "kv_heads": "4", "head_dim": "8",
    "ffn": "256", "vocab": "128", "seq_len": "32", "mlp_type": "swiglu", "tied_embeddings": "True",
    "gpu_type": "A100-80GB-SXM", "gpu_mem_gb": "80", "n_gpus": "8", "gpus_per_node": "8", "dp": "2", "tp": "2",
    "pp": "2", "vpp": "1", "cp": "1", "sp": "False", "ep": "1", "zero_stage_or_fsdp": "1(all DP)",
    "global_batch_sequences": "32", "micro_batch": "2", "precision": "bf16", "recompute": "none", "offload": "none",
    "flash_attention": "True", "schedule": "1F1B", "iteration_time_s": "0.1", "peak_memory_gb_per_gpu": "2",
    "peak_memory_kind": "allocated", "framework": "megatron-lm", "framework_version": "2022", "kernels": "",
    "partition": "even", "stage_layers": "", "vocab_parallel": "none", "overlap": "", "experts": "", "top_k": "",
}  # fmt: skip
CHANGES: tuple[dict[str, str], ...] = (
    {},
    {"framework": "deepspeed", "zero_stage_or_fsdp": "3", "tp": "1", "dp": "4", "recompute": "full"},
    {"experts": "4", "top_k": "2", "moe_ffn": "128", "ep": "2", "framework": "megatron-core", "overlap": "dp=on"},
    {"framework": "nanotron", "stage_layers": "2-2", "vocab_parallel": "vocab-1", "kernels": "flash-2"},
)


def all_run_targets() -> list[Target]:
    """A target for each kind of file."""
    return [_of_logs(), _of_tables(), _of_manifests()]


def _of_logs() -> Target:
    def read(path: Path) -> object:
        return read_log(read_content(path, InputError, MOST_BYTES).decode("utf-8", "replace"), JOB)

    seeds = tuple("\n".join(line.format(step) for step in range(1, 8)).encode() for line in LOGS)
    return Target("run log", seeds, changed_lines, read, lambda _path, _found: None, file_name="run.log")


def _of_tables() -> Target:
    """Tables as ``planner calibrate`` takes them; what is used is split and shaped, not traced."""

    def read(path: Path) -> list[Run | Rejected]:
        return list(read_runs(path))

    def use(_path: Path, rows: list[Run | Rejected]) -> None:
        for row in rows:
            with contextlib.suppress(ValueError, PlannerError):  # which say why a row is left out
                if isinstance(row, Run):
                    layout_of(row)
                    shape_of(row.architecture)

    seeds = tuple(_table(change) for change in CHANGES)
    refusals = (PlannerError, OSError, ValueError)  # as the command line takes them
    return Target("run table", seeds, changed_lines, read, use, refusals, "runs.csv")


def _table(change: dict[str, str]) -> bytes:
    text = io.StringIO()
    row = {**ROW, **change}
    writer = csv.DictWriter(text, fieldnames=list(row))
    writer.writeheader()
    writer.writerow(row)
    return text.getvalue().encode()


def _of_manifests() -> Target:
    chunks = tuple(Chunk(offset=(at, 0), shape=(2, 8), file=f"rank-{at // 2}.bin", at=0) for at in (0, 2))
    files = {f"rank-{number}.bin": StoredFile(bytes=64, sha256="0" * 64) for number in (0, 1)}
    progress = Progress(step=5, sequences=40, seed=0, seq_len=16, optimizer=Optimizer.ADAMW, layout="dp 2")
    tensors = {"head.weight": StoredTensor(dtype="float32", shape=(4, 8), chunks=chunks)}
    seed = Manifest(progress=progress, tensors=tensors, files=files).signed().model_dump_json().encode()
    return Target(
        "checkpoint manifest", (seed,), changed_manifest, lambda path: read_manifest(path.parent),
        lambda _path, _manifest: None, file_name=FILE_NAME,
    )  # fmt: skip


def changed_manifest(content: bytes, draw: random.Random) -> bytes:
    """With some of its parts changed, and mostly with the digest of what it is now."""
    changed = changed_json(content, draw)
    if draw.random() < 0.2:
        return changed
    try:
        return Manifest.model_validate_json(changed).signed().model_dump_json().encode()
    except (ValidationError, ValueError):
        return changed
