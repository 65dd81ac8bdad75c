"""How long the host takes to issue the operators of a micro-batch, as our executor runs it: with and without DTensor.

``python -m benchmarks.host_cost`` runs small models through the executor on one rank of a fake process group, where
kernels take next to nothing and collectives nothing, so that what is left is Python, autograd and dispatch. It fits

    seconds = d + kernels · a                      without tensor parallelism
    seconds = d + kernels · b + collectives · c    with it

to Llama-shaped models, predicts a GPT that the fit has not seen, and writes both to ``benchmarks/results/``. Kernels
and collectives are those that ``planner.pricing`` counts. Seconds are of the process's CPU time on one thread.
"""

from __future__ import annotations

import json
import platform
import re
import statistics
import tempfile
import time
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from planner.api import Problem, Request, find_plan, load_cluster, load_graph, training_of
from planner.executor.mesh import build_mesh
from planner.executor.parallelize import parallelize
from planner.graph.model_graph import Unit
from planner.model_file import load_model, resolve_model
from planner.parallelism import Optimizer, Precision, Recompute
from planner.pricing.table_builder import representatives
from planner.pricing.unit_costs import issued_by_host
from planner.space.search_space import Pins

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


@dataclass(frozen=True)
class Case:
    """A model under one setting, what the host issues for a micro-batch, and how long it takes."""

    model: str
    tp: int
    sequence_parallel: bool
    num_kernels: int
    num_collectives: int
    measured_s: float


@dataclass(frozen=True)
class HostCost:
    """The fitted seconds."""

    kernel_s: float
    sharded_kernel_s: float
    collective_s: float
    microbatch_s: float  # whatever the model

    def predict(self, case: Case) -> float:
        """Seconds of one micro-batch."""
        return float(np.dot(_counts(case), list(asdict(self).values())))


def measure(model: str, name: str, tp: int, *, sequence_parallel: bool) -> Case:
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
    with _fake_world(tp):
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
    return Case(name, tp, sequence_parallel, kernels, collectives, statistics.median(seconds[WARM_UPS:]))


def _issued(request: Request) -> tuple[int, int]:
    """Kernels and collectives of one micro-batch, forward and backward, as they are priced."""
    cluster = load_cluster(request.hardware, request.num_devices, [])
    graph = load_graph(request.model, request.seq_len, request.precision)
    training = training_of(request, cluster.num_devices, graph.seq_len, [])
    problem = Problem.build(graph, cluster, training, request.pins)
    sharding = problem.shardings[cluster.num_devices, bool(request.pins.sequence_parallel)]
    kinds = representatives(graph)

    def of(unit: Unit, kind: int) -> np.ndarray:
        nodes = [graph.nodes[i] for i in unit.nodes]
        return np.sum([issued_by_host(nodes, problem.target, sharding[kind], backward=b) for b in (False, True)], 0)

    counts = np.sum([of(kinds[kind], kind) for kind in problem.table.units.kinds], axis=0)
    return int(counts[0]), int(counts[1])


@contextmanager
def _fake_world(num_ranks: int) -> Generator[None]:
    dist.init_process_group("fake", rank=0, world_size=num_ranks, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


def fit(cases: list[Case]) -> HostCost:
    """Least squares of relative errors."""
    rows = np.array([_counts(case) for case in cases]) / np.array([[case.measured_s] for case in cases])
    return HostCost(*map(float, np.linalg.lstsq(rows, np.ones(len(cases)))[0]))


def _counts(case: Case) -> list[int]:
    """What each of the fitted seconds is spent on."""
    plain, sharded = (case.num_kernels, 0) if case.tp == 1 else (0, case.num_kernels)
    return [plain, sharded, case.num_collectives, 1]


def main() -> None:
    """Measures, fits, predicts, and writes the results."""
    torch.set_num_threads(1)
    settings = ((1, False), (2, False), (2, True), (4, True))
    with tempfile.TemporaryDirectory() as folder:
        fitted: list[Case] = []
        for layers in (4, 8):
            file = Path(folder) / f"llama_{layers}.py"
            file.write_text(LLAMA.format(layers=layers))
            fitted += [measure(str(file), f"Llama, {layers} layers", tp, sequence_parallel=sp) for tp, sp in settings]
    gpt = str(ROOT / "examples" / "tiny_gpt.py")
    held = [measure(gpt, "GPT, 4 layers", tp, sequence_parallel=sp) for tp, sp in settings]
    write_results(fit(fitted), fitted, held)


def write_results(cost: HostCost, fitted: list[Case], held: list[Case]) -> None:
    """One markdown and one JSON file, named after the day; the table is printed too."""
    name = f"host_cost_cpu_{date.today()}"
    rows = [{**asdict(case), "predicted_s": cost.predict(case), "held_back": case in held} for case in (*fitted, *held)]
    lines = [
        f"# Host time of a micro-batch, {date.today()}",
        "",
        f"torch {torch.__version__.partition('+')[0]}, {_processor()}, one thread.",
        "`python -m benchmarks.host_cost` repeats it.",
        "",
        f"- a kernel: {cost.kernel_s * 1e6:.1f} us",
        f"- a kernel of DTensors: {cost.sharded_kernel_s * 1e6:.1f} us",
        f"- a redistribution of a DTensor: {cost.collective_s * 1e6:.0f} us",
        f"- a micro-batch, whatever the model: {cost.microbatch_s * 1e3:.1f} ms",
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
    document = {"processor": _processor(), "torch": torch.__version__.partition("+")[0], **asdict(cost), "rows": rows}
    (RESULTS / f"{name}.json").write_text(json.dumps(document, indent=1) + "\n")


def _processor() -> str:
    try:
        found = re.search(r"model name\s*:\s*(.+)", Path("/proc/cpuinfo").read_text())
    except OSError:
        found = None
    return found.group(1) if found else platform.machine()


if __name__ == "__main__":
    main()
