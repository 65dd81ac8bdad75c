"""How long the host takes to issue the operators of a micro-batch, as our executor runs it: with and without DTensor.

``python -m benchmarks.host_cost`` runs small models through the executor on one rank of a fake process group, where
kernels take next to nothing and collectives nothing, so that what is left is Python, autograd and dispatch. It fits the
host's cost (``planner.calibration.host_cost``) to Llama-shaped models, predicts a GPT that the fit has not seen, and
writes both to ``benchmarks/results/``. Kernels and collectives are those that ``planner.pricing`` counts. Seconds are
of the process's CPU time on one thread.
"""

from __future__ import annotations

import json
import platform
import re
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import asdict
from datetime import date
from pathlib import Path

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from costmodels.vocabulary.choices import Optimizer, Precision, Recompute
from costmodels.vocabulary.terms import Pass
from hardware_profiles.probes.issuing import time_issuing
from planner.api import find_plan
from planner.axes.tensor import TENSOR
from planner.axes.traced import representatives, whole_work
from planner.calibration.host_cost import HostCost, HostTiming, fit_host_cost
from planner.executor.mesh import build_mesh
from planner.executor.parallelize import parallelize
from planner.layout.decided import NOTHING
from planner.layout.layout import Pins
from planner.model_file import load_model, resolve_model
from planner.pricing.kernels import kernels_issued
from planner.pricing.placements import decide
from planner.pricing.target import PricingTarget
from planner.pricing.work import issued_by_host
from planner.request import Request, load_cluster, load_graph
from planner.solver.cp_sat import CpSatSolver
from planner.table.keys import TensorSplit

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
SEQ_LEN = 16
NUM_MICROBATCHES = 4
WARM_UPS, REPEATS = 3, 12
LLAMA = """
from planner.models.config import FamilyConfig, MlpType
from planner.models.family import build_family

def build_model():
    return build_family(FamilyConfig(
        family="llama", layers={layers}, hidden=64, heads=4, kv_heads=4, ffn=128, vocab=64, seq_len=16,
        mlp=MlpType.SWIGLU, tied=False))
"""


def measure(model: str, name: str, tp: int, *, sequence_parallel: bool) -> HostTiming:
    """One micro-batch of ``model`` through the executor on rank 0 of ``tp``."""
    pins = Pins(
        tp=tp, pp=1, cp=1, dp=1, zero=0, micro_batch=1, recompute=Recompute.NONE,
        sequence_parallel=sequence_parallel if tp > 1 else None,
    )  # fmt: skip
    request = Request(
        model, tp, "cpu-gloo", SEQ_LEN, NUM_MICROBATCHES, precision=Precision.FP32, optimizer=Optimizer.SGD, pins=pins
    )
    plan = find_plan(request).plan
    loaded = load_model(resolve_model(model))
    tokens = torch.zeros(NUM_MICROBATCHES, SEQ_LEN, dtype=torch.int64)
    with fake_world(tp):
        module = parallelize(
            loaded.build(), {"input_ids": tokens[:1]}, loaded.training_loss, plan, build_mesh(plan, "cpu")
        )
        batch = {"input_ids": tokens, "labels": tokens}
        seconds: list[float] = []
        for _ in range(WARM_UPS + REPEATS):
            start = time.process_time()
            module.forward_backward(batch)
            seconds.append((time.process_time() - start) / NUM_MICROBATCHES)
    kernels, collectives = _issued(request)
    return HostTiming(name, tp, sequence_parallel, kernels, collectives, statistics.median(seconds[WARM_UPS:]))


def _issued(request: Request) -> tuple[int, int]:
    """Kernels and collectives of one micro-batch, forward and backward, as they are priced."""
    cluster = load_cluster(request.hardware, request.num_devices, [])
    graph = load_graph(request.model, request.seq_len, request.precision)
    target = PricingTarget(graph, cluster, request.precision.value)
    framework, split = target.framework, TensorSplit(cluster.num_devices, bool(request.pins.sequence_parallel))
    decision = decide(graph, split, NOTHING, target.machine, framework, CpSatSolver().solve_placement)
    assert decision is not None
    num_units = Counter(unit.kind for unit in graph.units)
    kernels = collectives = 0
    for unit, placement in zip(representatives(graph), decision, strict=True):
        work = TENSOR.work(whole_work(graph, unit), split, placement, framework)
        for run in Pass:
            kernels += num_units[unit.kind] * sum(kernels_issued(k, framework, run) for k in work.unit.kernels)
            collectives += num_units[unit.kind] * len(issued_by_host(work.collectives, run))
    return kernels, collectives


@contextmanager
def fake_world(num_ranks: int) -> Generator[None]:
    """Rank 0 of a fake process group."""
    dist.init_process_group("fake", rank=0, world_size=num_ranks, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


def main() -> None:
    """Measures, fits, predicts, and writes the results."""
    torch.set_num_threads(1)
    before_s = reading_s()
    settings = ((1, False), (2, False), (2, True), (4, True))
    with tempfile.TemporaryDirectory() as folder:
        fitted: list[HostTiming] = []
        for layers in (4, 8):
            file = Path(folder) / f"llama_{layers}.py"
            file.write_text(LLAMA.format(layers=layers))
            fitted += [measure(str(file), f"Llama, {layers} layers", tp, sequence_parallel=sp) for tp, sp in settings]
    gpt = str(ROOT / "examples" / "tiny_gpt.py")
    held = [measure(gpt, "GPT, 4 layers", tp, sequence_parallel=sp) for tp, sp in settings]
    write_results(fit_host_cost(fitted), fitted, held, (before_s + reading_s()) / 2)


def write_results(cost: HostCost, fitted: list[HostTiming], held: list[HostTiming], reading: float) -> None:
    """One markdown and one JSON file, named after the day; the table is printed too."""
    name = f"host_cost_cpu_{date.today()}"
    rows = [{**asdict(case), "predicted_s": cost.predict(case), "held_back": case in held} for case in (*fitted, *held)]
    lines = [
        f"# Host time of a micro-batch, {date.today()}",
        "",
        f"torch {torch.__version__.partition('+')[0]}, {processor()}, one thread.",
        "`python -m benchmarks.host_cost` repeats it.",
        "",
        f"- a kernel: {cost.kernel_s * 1e6:.1f} us",
        f"- a kernel of DTensors: {cost.sharded_kernel_s * 1e6:.1f} us",
        f"- a redistribution of a DTensor: {cost.collective_s * 1e6:.0f} us",
        f"- a micro-batch, whatever the model: {cost.microbatch_s * 1e3:.1f} ms",
        reading_line(reading),
        "",
        "| model | tp | sequence parallel | kernels | collectives | measured ms | predicted ms | error | |",
        "|---|---|---|---|---|---|---|---|---|",
        *(
            f"| {r['model']} | {r['tp']} | {'yes' if r['sequence_parallel'] else 'no'} | {r['num_kernels']} "
            f"| {r['num_collectives']} | {r['measured_s'] * 1e3:.2f} | {r['predicted_s'] * 1e3:.2f} "
            f"| {r['predicted_s'] / r['measured_s'] - 1:+.1%} | {'not in the fit' if r['held_back'] else ''} |"
            for r in rows
        ),
    ]
    print("\n".join(lines))
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"{name}.md").write_text("\n".join(lines) + "\n")
    document = {"processor": processor(), "torch": torch.__version__.partition("+")[0], "reading_s": reading}
    document |= {**asdict(cost), "rows": rows}
    (RESULTS / f"{name}.json").write_text(json.dumps(document, indent=1) + "\n")


def reading_s() -> float:
    """What `planner profile` reads as a host's time of a kernel: how fast this one is now."""
    return statistics.median(time_issuing(torch.device("cpu")))


def reading_line(reading: float) -> str:
    """How to compare these times with others'."""
    return f"- `planner profile` reads {reading * 1e6:.2f} us a kernel of this host (mean of before and after)"


def processor() -> str:
    """What the operating system calls the processor."""
    try:
        found = re.search(r"model name\s*:\s*(.+)", Path("/proc/cpuinfo").read_text())
    except OSError:
        found = None
    return found.group(1) if found else platform.machine()


if __name__ == "__main__":
    main()
