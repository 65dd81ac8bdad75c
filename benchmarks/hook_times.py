"""How much of the host's time hooks take as our executor runs a micro-batch: those of FSDP2, those of recomputation.

``python -m benchmarks.hook_times`` runs small models through the executor on one rank of a fake process group, with and
without them (``benchmarks.host_cost`` says why nothing but the host's work is left). It fits ``hooks`` of a recipe
(``planner.calibration.hook_times``) to Llama-shaped models, predicts a GPT that the fit has not seen, and writes both
to ``benchmarks/results/``. Seconds are of the process's CPU time on one thread.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from datetime import date
from pathlib import Path
from typing import Any

import torch

from benchmarks.host_cost import (
    LLAMA,
    NUM_MICROBATCHES,
    RESULTS,
    ROOT,
    SEQ_LEN,
    WARM_UPS,
    fake_world,
    processor,
    reading_line,
    reading_s,
)
from costmodels.vocabulary.choices import Offload, Optimizer, Precision, Recompute
from costmodels.vocabulary.terms import Pass
from planner.api import find_plan
from planner.axes.traced import representatives, whole_work
from planner.calibration.hook_times import HookTiming, PassTimes, fit_pass, predicted_s
from planner.executor.data_parallel import keeps_whole
from planner.executor.mesh import build_mesh
from planner.executor.parallelize import parallelize
from planner.layout.layout import Pins
from planner.model_file import load_model, resolve_model
from planner.plan.schema import Plan
from planner.pricing.kernels import kernels_issued
from planner.pricing.target import PricingTarget
from planner.request import Request, load_cluster, load_graph

REPEATS = 20
# Ranks, ZeRO stage, precision.
SETTINGS = (
    (1, 0, Precision.FP32),
    (2, 1, Precision.FP32),
    (2, 2, Precision.FP32),
    (2, 3, Precision.FP32),
    (1, 0, Precision.BF16),
    (2, 2, Precision.BF16),
    (2, 3, Precision.BF16),
)


@dataclass(frozen=True)
class PassSeconds:
    """One micro-batch."""

    forward_s: float
    backward_s: float


def request_of(model: str, num_ranks: int, zero_stage: int, precision: Precision, recompute: Recompute) -> Request:
    """The plan that one row measures."""
    pins = Pins(tp=1, pp=1, cp=1, dp=num_ranks, zero=zero_stage, micro_batch=1, recompute=recompute)
    batch = NUM_MICROBATCHES * num_ranks
    request = Request(model, num_ranks, "cpu-gloo", SEQ_LEN, batch, precision=precision, optimizer=Optimizer.SGD)
    return replace(request, pins=pins)


def measure(model: str, plan: Plan) -> PassSeconds:
    """One micro-batch through the executor on rank 0, forward and backward."""
    loaded = load_model(resolve_model(model))
    tokens = torch.zeros(NUM_MICROBATCHES, SEQ_LEN, dtype=torch.int64)
    with fake_world(plan.num_devices), _timed_backward() as backward:
        module = parallelize(
            loaded.build(), {"input_ids": tokens[:1]}, loaded.training_loss, plan, build_mesh(plan, "cpu")
        )
        whole: list[float] = []
        for _ in range(WARM_UPS + REPEATS):
            backward.append(0.0)
            start = time.process_time()
            module.forward_backward({"input_ids": tokens, "labels": tokens})
            whole.append(time.process_time() - start)
    each = [*zip(whole, backward, strict=True)][WARM_UPS:]
    # Others' work on this machine makes rounds longer, never shorter.
    forward_s, backward_s = (
        statistics.quantiles(times)[0] for times in zip(*((w - b, b) for w, b in each), strict=True)
    )
    return PassSeconds(forward_s / NUM_MICROBATCHES, backward_s / NUM_MICROBATCHES)


@contextmanager
def _timed_backward() -> Generator[list[float]]:
    """Adds what autograd takes backward to the last number of the list."""
    seconds, backward = list[float](), torch.autograd.backward

    def timed(*args: Any, **kwargs: Any) -> None:
        start = time.process_time()
        backward(*args, **kwargs)
        seconds[-1] += time.process_time() - start

    torch.autograd.backward = timed
    try:
        yield seconds
    finally:
        torch.autograd.backward = backward


def _kernels(request: Request) -> tuple[int, int, int]:
    """Blocks, their kernels forward, and all kernels of both passes, as they are priced."""
    cluster = load_cluster(request.hardware, request.num_devices, [])
    graph = load_graph(request.model, request.seq_len, request.precision)
    framework = PricingTarget(graph, cluster, request.precision.value).framework
    blocks = of_blocks = of_all = 0
    for unit in representatives(graph):
        count = sum(other.kind == unit.kind for other in graph.units)
        work = whole_work(graph, unit).unit
        issued = {run: count * sum(kernels_issued(kernel, framework, run) for kernel in work.kernels) for run in Pass}
        of_all += sum(issued.values())
        if work.is_block:
            blocks, of_blocks = blocks + count, of_blocks + issued[Pass.FORWARD]
    return blocks, of_blocks, of_all


def timings_of(model: str, name: str) -> list[HookTiming]:
    """Every setting of one model, beside the one without hooks."""
    bare: PassSeconds | None = None
    found: list[HookTiming] = []
    for num_ranks, zero_stage, precision in SETTINGS:
        for recompute in Recompute:
            request = request_of(model, num_ranks, zero_stage, precision, recompute)
            plan = find_plan(request).plan
            assert plan.offload is Offload.NONE
            seconds = measure(model, plan)
            if bare is None:
                bare = seconds
                continue
            blocks, kernels, all_kernels = _kernels(request)
            found.append(
                HookTiming(
                    name,
                    not keeps_whole(plan),
                    precision is not Precision.FP32,
                    zero_stage,
                    recompute,
                    len(plan.placements.sharded_units),
                    blocks,
                    kernels,
                    (bare.forward_s + bare.backward_s) / all_kernels,
                    seconds.forward_s - bare.forward_s,
                    seconds.backward_s - bare.backward_s,
                )
            )
    return found


def write_results(fitted: list[HookTiming], held: list[HookTiming], reading: float) -> None:
    """One markdown and one JSON file, named after the day; the table is printed too."""
    forward, backward = fit_pass(fitted, forward=True), fit_pass(fitted, forward=False)
    name = f"hook_times_cpu_{date.today()}"
    lines = [
        f"# Host time of hooks, a micro-batch, {date.today()}",
        "",
        f"torch {torch.__version__.partition('+')[0]}, {processor()}, one thread. Milliseconds more than the same",
        "model takes in fp32 without FSDP2 and recomputation. `python -m benchmarks.hook_times` repeats it.",
        "",
        "| fitted, microseconds | forward | backward |",
        "|---|---|---|",
        *(_fitted_row(forward, backward, field, what) for field, what in _WORDS.items()),
        "",
        reading_line(reading),
        "",
        "| model | precision | ZeRO | recomputation | more ms | predicted | error | |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for timing in (*fitted, *held):
        predicted = predicted_s(timing, forward, backward)
        precision = "bf16" if timing.is_cast else "fp32"
        lines.append(
            f"| {timing.model} | {precision} | {timing.zero_stage} | {timing.recompute.value} "
            f"| {timing.more_s * 1e3:.2f} | {predicted * 1e3:.2f} | {predicted / timing.more_s - 1:+.0%} "
            f"| {'not in the fit' if timing in held else ''} |"
        )
    print("\n".join(lines))
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"{name}.md").write_text("\n".join(lines) + "\n")
    document = {
        "processor": processor(),
        "reading_s": reading,
        "forward": asdict(forward),
        "backward": asdict(backward),
        "rows": [{**asdict(timing), "held_back": timing in held} for timing in (*fitted, *held)],
    }
    (RESULTS / f"{name}.json").write_text(json.dumps(document, indent=1) + "\n")


_WORDS = {
    "sharded_s": "FSDP2 around a unit",
    "cast_s": "more, in 16 bits",
    "gather_s": "more, where a pass gathers it",
    "reduce_s": "more, where a micro-batch reduces it",
    "checkpoint_s": "a checkpoint around a block",
    "selected_s": "more, for each kernel of a block forward, where recomputation is selective",
}


def _fitted_row(forward: PassTimes, backward: PassTimes, field: str, what: str) -> str:
    return f"| {what} | {getattr(forward, field) * 1e6:.0f} | {getattr(backward, field) * 1e6:.0f} |"


def main() -> None:
    """Measures, fits, predicts, and writes the results."""
    torch.set_num_threads(1)
    before_s = reading_s()
    with tempfile.TemporaryDirectory() as folder:
        fitted: list[HookTiming] = []
        for layers in (4, 8):
            file = Path(folder) / f"llama_{layers}.py"
            file.write_text(LLAMA.format(layers=layers))
            fitted += timings_of(str(file), f"Llama, {layers} layers")
    held = timings_of(str(ROOT / "examples" / "tiny_gpt.py"), "GPT, 4 layers")
    write_results(fitted, held, (before_s + reading_s()) / 2)


if __name__ == "__main__":
    main()
