"""Plans with context parallelism held against one process: gradient by gradient, in float32.

``python -m benchmarks.context_parity`` asks the planner for plans with every way of context parallelism pinned, beside
data, tensor and pipeline parallelism and under every ZeRO stage, for small models of ours and of Hugging Face. Ranks of
gloo on this machine run one step of each. The other side is plain autograd over the whole batch, which shares no code
with the executor. Samples have unequal numbers of labels, and some have none.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn import functional as F  # noqa: N812

from costmodels.vocabulary.choices import ContextMethod, Optimizer, Precision, Recompute
from planner.api import find_plan
from planner.executor.build import build_model
from planner.executor.mesh import build_mesh, place_of
from planner.executor.parallelize import parallelize
from planner.executor.ranks import process_group, quiet_torch
from planner.layout.layout import Pins
from planner.model_file import load_model, resolve_model
from planner.models.inputs import call_model
from planner.models.loss import logits_of
from planner.plan.schema import Plan
from planner.request import Request

SEQ_LEN, GLOBAL_BATCH_SIZE, VOCAB = 32, 8, 64
TOLERANCE = 1e-5  # of a gradient's norm; float32 has 1.2e-7, and sums differ in order
SMALLEST = 1e-3  # of the largest norm: what is smaller is held against that, for it may be zero but for rounding
RESULTS = Path(__file__).parent / "results"

OURS = """
from planner.models.config import FamilyConfig
from planner.models.family import build_family

SIZES = dict(layers=2, hidden=32, heads=8, ffn=64, vocab={vocab}, seq_len={seq_len})

def gpt():
    return build_family(FamilyConfig(family="gpt", tied=True, **SIZES))

def llama():
    return build_family(FamilyConfig(family="llama", kv_heads=4, mlp="swiglu", **SIZES))

def mixture():
    experts = dict(experts=4, top_k=2, expert_ffn=32)
    return build_family(FamilyConfig(family="moe", kv_heads=4, mlp="swiglu", **experts, **SIZES))
"""
_SIZES = {
    "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": VOCAB,
    "num_hidden_layers": 2, "max_position_embeddings": SEQ_LEN, "tie_word_embeddings": False,
}  # fmt: skip
HUGGINGFACE = {
    "hf-llama": {"model_type": "llama", "architectures": ["LlamaForCausalLM"], **_SIZES},
    "hf-mixtral": {
        "model_type": "mixtral", "architectures": ["MixtralForCausalLM"], "num_local_experts": 4, **_SIZES,
        "num_experts_per_tok": 2, "sliding_window": None,
    },
    "hf-qwen3": {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "head_dim": 8, **_SIZES},
}  # fmt: skip
MODELS = ("gpt", "llama", "mixture", *HUGGINGFACE)


@dataclass(frozen=True)
class Layout:
    """One cell of the matrix."""

    model: str
    method: str
    cp: int = 2
    dp_replicate: int = 1
    dp_shard: int = 1
    tp: int = 1
    pp: int = 1
    zero_stage: int = 0
    recompute: str = "none"

    @property
    def name(self) -> str:
        """In one word."""
        parts = (f"{key}{value}" for key, value in self.degrees.items() if value > 1)
        again = () if self.recompute == "none" else (self.recompute,)
        return "-".join((self.model, self.method, *parts, f"zero{self.zero_stage}", *again))

    @property
    def degrees(self) -> dict[str, int]:
        """By axis."""
        return {"pp": self.pp, "dp": self.dp_replicate * self.dp_shard, "cp": self.cp, "tp": self.tp}

    @property
    def num_ranks(self) -> int:
        """Processes."""
        return self.pp * self.dp_replicate * self.dp_shard * self.cp * self.tp

    def plan(self, sources: dict[str, str]) -> Plan:
        """What the planner makes of it."""
        pins = Pins(
            tp=self.tp,
            pp=self.pp,
            cp=self.cp,
            ep=1,
            dp=self.dp_replicate * self.dp_shard,
            dp_replicate=self.dp_replicate,
            zero=self.zero_stage,
            micro_batch=2,
            recompute=Recompute(self.recompute),
            cp_method=ContextMethod(self.method),
        )
        request = Request(
            sources[self.model],
            self.num_ranks,
            "cpu-gloo",
            seq_len=SEQ_LEN,
            global_batch_size=GLOBAL_BATCH_SIZE,
            precision=Precision.FP32,
            optimizer=Optimizer.SGD,
            pins=pins,
        )
        return find_plan(request).plan


def layouts() -> list[Layout]:
    """Pairs of axes in full for two models, one ZeRO stage of each for the others, and triples for one."""
    found: list[Layout] = []
    for method in ContextMethod:
        for model in MODELS:
            whole = model in ("gpt", "llama")
            found += [Layout(model, method, cp=4, zero_stage=z) for z in ((0, 1, 2, 3) if whole else (3,))]
            found += [Layout(model, method, dp_shard=2, zero_stage=z) for z in ((1, 2, 3) if whole else (1,))]
            found += [Layout(model, method, tp=2, zero_stage=z) for z in ((0, 1, 3) if whole else (0,))]
            found += [Layout(model, method, pp=2, zero_stage=z) for z in ((0, 1, 3) if whole else (1,))]
        found += [Layout("llama", method, dp_replicate=2, zero_stage=z) for z in (0, 1, 3)]
        found += [Layout("llama", method, dp_shard=2, zero_stage=2, recompute=mode) for mode in ("full", "selective")]
        found.append(Layout("llama", method, dp_shard=2, tp=2, zero_stage=3))
        found.append(Layout("llama", method, dp_shard=2, pp=2, zero_stage=1))
        found.append(Layout("llama", method, pp=2, tp=2, zero_stage=1))
        found.append(Layout("llama", method, dp_replicate=2, dp_shard=2, zero_stage=2))
    return found


def write_models(folder: Path) -> dict[str, str]:
    """Sources of all models, by name."""
    ours = folder / "models.py"
    ours.write_text(OURS.format(vocab=VOCAB, seq_len=SEQ_LEN))
    sources = {name: f"{ours}:{name}" for name in MODELS if name not in HUGGINGFACE}
    for name, config in HUGGINGFACE.items():
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(json.dumps(config))
        sources[name] = str(folder / name)
    return sources


def _batch() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    whole = torch.randint(VOCAB, (GLOBAL_BATCH_SIZE, SEQ_LEN + 1), generator=generator)
    tokens, labels = whole[:, :-1], whole[:, 1:].clone()
    for sample in range(GLOBAL_BATCH_SIZE):  # the last has nothing to learn
        labels[sample, : 5 * sample] = -100
    return tokens, labels


_MESHES: dict[tuple[object, ...], DeviceMesh] = {}


def errors_of(plan: Plan) -> dict[str, float]:
    """On rank 0: each gradient's distance from one process, relative to its norm, and the loss's under ``loss``."""
    key = (plan.mesh, plan.zero_stage == 0)
    if key not in _MESHES:
        _MESHES[key] = build_mesh(plan, "cpu")
    mesh = _MESHES[key]
    loaded, place = load_model(resolve_model(plan.model.source)), place_of(mesh)
    tokens, labels = _batch()
    name = "input_ids"
    example = {name: torch.zeros(plan.pipeline.micro_batch_size, SEQ_LEN, dtype=torch.int64)}
    model = parallelize(build_model(loaded, 0), example, loaded.training_loss, plan, mesh)
    mine = slice(place.dp_rank, None, place.dp_degree)
    loss = model.forward_backward({name: tokens[mine], "labels": labels[mine]})
    share = loss / (place.num_parts * plan.mesh.tp) if model.has_loss else torch.zeros_like(loss)
    dist.all_reduce(share)
    found: dict[str, torch.Tensor] = {}
    for root in model.roots:
        for fqn, parameter in root.named_parameters(remove_duplicate=False):
            gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            found[fqn] = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
    parts: list[dict[str, torch.Tensor]] = [{}] * dist.get_world_size()
    dist.all_gather_object(parts, found)
    if dist.get_rank() != 0:
        return {}
    expected, expected_loss = _in_one_process(build_model(loaded, 0), tokens, labels)
    floor = SMALLEST * max(float(each.norm()) for each in expected.values())
    errors = {
        fqn: max(float((part[fqn] - whole).norm()) / max(float(whole.norm()), floor) for part in parts if fqn in part)
        for fqn, whole in expected.items()
    }
    return {**errors, "loss": abs(float(share) - expected_loss) / abs(expected_loss)}


def _in_one_process(
    module: nn.Module, tokens: torch.Tensor, labels: torch.Tensor
) -> tuple[dict[str, torch.Tensor], float]:
    logits = logits_of(call_model(module, {"input_ids": tokens}))
    loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
    loss.backward()
    named = module.named_parameters(remove_duplicate=False)
    gradients = {fqn: torch.zeros_like(p) if p.grad is None else p.grad for fqn, p in named}
    return gradients, float(loss.detach())


def run_rank(task: Path, out: Path) -> None:
    """One rank of a world; rank 0 writes the errors of every plan in ``task``."""
    torch.set_num_threads(1)
    with quiet_torch(), process_group():
        errors = [errors_of(Plan.model_validate(each)) for each in json.loads(task.read_text())]
    if os.environ["RANK"] == "0":
        out.write_text(json.dumps(errors))


def _run_world(num_ranks: int, plans: Sequence[Plan], folder: Path) -> list[dict[str, float]]:
    task, out = folder / "plans.json", folder / "errors.json"
    task.write_text(json.dumps([plan.model_dump(mode="json") for plan in plans]))
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1"]
    program = ["--module", "benchmarks.context_parity", "--rank", str(task), str(out)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run([*launcher, "--nproc-per-node", str(num_ranks), *program], env=environment, check=True)
    return json.loads(out.read_text())


def table(rows: Sequence[tuple[Layout, dict[str, float]]]) -> str:
    """A line for each model, way and degrees: the ZeRO stages tried, and the worst gradient and loss."""
    groups: dict[tuple[str, ...], list[tuple[Layout, dict[str, float]]]] = {}
    for layout, errors in rows:
        degrees = " ".join(f"{key}{value}" for key, value in layout.degrees.items() if value > 1)
        replicas = f" ({layout.dp_replicate} replicas)" if layout.dp_replicate > 1 else ""
        key = (layout.model, layout.method, degrees + replicas, layout.recompute)
        groups.setdefault(key, []).append((layout, errors))
    lines = [
        "| model | cp_method | degrees | recompute | ZeRO | wrong | worst gradient | worst loss |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for key, members in groups.items():
        stages = " ".join(str(layout.zero_stage) for layout, _ in members)
        wrong = [str(layout.zero_stage) for layout, errors in members if max(errors.values()) > TOLERANCE]
        gradient = max(error for _, errors in members for name, error in errors.items() if name != "loss")
        loss = max(errors["loss"] for _, errors in members)
        cells = (*key, stages, f"ZeRO {' '.join(wrong)}" if wrong else "none", f"{gradient:.1e}", f"{loss:.1e}")
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> int:
    """Runs all worlds, prints the table and writes it to ``--output``; 1 where any layout is wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, help="a Markdown file, by default one of today under results/")
    parser.add_argument("--only", default="", help="a regular expression: the layouts whose names have it")
    parser.add_argument("--rank", type=Path, nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank is not None:
        run_rank(*options.rank)
        return 0
    rows: list[tuple[Layout, dict[str, float]]] = []
    chosen = [layout for layout in layouts() if re.search(options.only, layout.name)]
    start_s = time.perf_counter()
    with tempfile.TemporaryDirectory() as name:
        sources = write_models(Path(name))
        for num_ranks in sorted({layout.num_ranks for layout in chosen}):
            of_size = [layout for layout in chosen if layout.num_ranks == num_ranks]
            plans = [layout.plan(sources) for layout in of_size]
            rows += zip(of_size, _run_world(num_ranks, plans, Path(name)), strict=True)
    took_s = time.perf_counter() - start_s
    wrong = [layout.name for layout, errors in rows if max(errors.values()) > TOLERANCE]
    text = (
        "# Context parallelism against one process\n\n"
        f"`python -m benchmarks.context_parity`, torch {torch.__version__}, gloo on {os.cpu_count()} cores, "
        f"{took_s:.0f} s: {len(rows)} plans of the planner's, of which {len(wrong)} are off by more than "
        f"{TOLERANCE:g} of a gradient's norm. One step in float32 on sequences of {SEQ_LEN} tokens with unequal "
        "numbers of labels, every gradient by its name; the other side is plain autograd over the whole batch in one "
        f"process.\n\n{table(rows)}\n"
    )
    print(text)
    output = options.output or RESULTS / f"context_parity_cpu_{datetime.date.today()}.md"
    output.write_text(text)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
