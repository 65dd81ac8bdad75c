"""The ledger's memory held against what the executor's own tensors take: ``planner check`` over plans and variants.

``python -m benchmarks.check_memory [NAME ...]`` asks the planner for plans, with choices pinned one at a time, and runs
every pipeline rank of each on tensors without values. The ledger is the planner's; what is counted comes out of torch.
Cases whose names begin with a NAME are run, or all of them, and then the table is written under ``results``;
``--output FILE`` writes it of some.
"""

from __future__ import annotations

import argparse
import datetime
import platform
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from costmodels.vocabulary.choices import ContextMethod, Precision, Recompute
from costmodels.vocabulary.schedules import ScheduleName
from planner.api import find_plan
from planner.cli.check import allocated_bytes
from planner.errors import PlannerError
from planner.executor.check import check
from planner.layout.layout import NO_PINS, Pins
from planner.plan.checks import degrees_text
from planner.plan.schema import Plan
from planner.request import Request

RESULTS = Path(__file__).parent / "results"
WITHIN = 0.03  # of the ledger: what is asked for
PLAIN: dict[str, int | bool | str] = {
    "tp": 1, "pp": 1, "cp": 1, "ep": 1, "dp_replicate": 1, "micro_batch": 1, "recompute": "none"
}  # fmt: skip
# Widths of Llama-3-8B, GPT-3 6.7B and Mixtral-8x7B with so few layers that a check takes seconds.
MODELS = """
from planner.models.config import FamilyConfig
from planner.models.family import build_family

def llama():
    return build_family(FamilyConfig(family="llama", layers=8, hidden=4096, heads=32, kv_heads=8, ffn=14336,
                                     vocab=32000, mlp="swiglu", seq_len=4096))

def vocabulary():
    return build_family(FamilyConfig(family="llama", layers=8, hidden=4096, heads=32, kv_heads=8, ffn=14336,
                                     vocab=128256, mlp="swiglu", seq_len=4096))

def gpt():
    return build_family(FamilyConfig(family="gpt", layers=8, hidden=4096, heads=32, ffn=16384, vocab=50257,
                                     tied=True, seq_len=4096))

def mixture():
    return build_family(FamilyConfig(family="moe", layers=4, hidden=4096, heads=32, kv_heads=8, ffn=14336,
                                     vocab=32000, mlp="swiglu", experts=8, top_k=2, expert_ffn=14336, seq_len=4096))
"""


@dataclass(frozen=True)
class Case:
    """A plan to ask for."""

    name: str
    model: str
    num_devices: int = 8
    pins: dict[str, int | bool | str] = field(default_factory=dict)
    hardware: str = "dgx-b200"  # room for every variant
    global_batch_size: int | None = None
    precision: Precision = Precision.BF16

    def plan(self, models: Path) -> Plan:
        """What the planner makes of it."""
        words = {"recompute": Recompute, "schedule": ScheduleName, "cp_method": ContextMethod}
        pins = Pins(**{key: words[key](value) if key in words else value for key, value in self.pins.items()})  # pyright: ignore[reportArgumentType, reportCallIssue]
        model = f"{models}:{self.model}" if f"def {self.model}()" in MODELS else self.model
        request = Request(
            model,
            self.num_devices,
            self.hardware,
            global_batch_size=self.global_batch_size,
            precision=self.precision,
            pins=pins if self.pins else NO_PINS,
            may_idle=False,
        )
        return find_plan(request).plan


@dataclass(frozen=True)
class Row:
    """One pipeline rank of a case."""

    case: Case
    layout: str
    pp_rank: int
    predicted_bytes: int
    counted_bytes: int
    elapsed_s: float

    @property
    def ratio(self) -> float:
        """Counted over predicted."""
        return self.counted_bytes / self.predicted_bytes


def published() -> list[Case]:
    """Plans as a user asks for them, nothing pinned."""
    rows = (
        ("llama3-8b", 64),
        ("llama3-70b", 512),
        ("gpt3-175b", 1024),
        ("mixtral-8x7b", 64),
        ("deepseek-v3", 2048),
        ("examples/model.py", 64),  # whose queries lie in memory as torch.cat writes them, unlike those of our families
    )
    return [Case(f"full {name} {count}", name, count, hardware="dgx-h100-80gb") for name, count in rows]


def variants() -> list[Case]:
    """One choice at a time beside plain data parallelism without recomputation."""
    base = PLAIN
    alone: list[dict[str, int | bool | str]] = [
        {"zero": 0, "dp_replicate": 8},
        *({"zero": stage} for stage in (1, 2, 3)),
        {"zero": 3, "micro_batch": 4},
        {"zero": 3, "dp_replicate": 2},
        *({"zero": stage, "recompute": mode} for stage in (1, 3) for mode in ("selective", "full")),
        *({"zero": stage, "pp": pp, "schedule": "1F1B"} for stage in (1, 2, 3) for pp in (2, 4)),
        {"zero": 1, "pp": 2, "schedule": "GPipe"},
        *({"zero": 1, "pp": pp, "schedule": "Interleaved1F1B", "virtual_stages": 2} for pp in (2, 4)),
        {"zero": 1, "pp": 2, "schedule": "InterleavedZeroBubble", "virtual_stages": 2},
        {"zero": 1, "pp": 2, "schedule": "ZBVZeroBubble"},
        *({"zero": 1, "pp": 2, "schedule": "1F1B", "recompute": mode} for mode in ("selective", "full")),
        *({"zero": 1, "tp": 2, "sequence_parallel": split} for split in (False, True)),
        *({"zero": 0, "tp": 8, "sequence_parallel": split} for split in (False, True)),
        *({"zero": 1, "tp": 2, "sequence_parallel": True, "recompute": mode} for mode in ("selective", "full")),
        *({"zero": 1, "cp": 2, "cp_method": method} for method in ("all-gather", "ring", "all-to-all")),
    ]
    cases = [("llama", {**base, **each}) for each in alone]
    cases += [(name, {**base, "zero": stage}) for name in ("vocabulary", "gpt", "mixture") for stage in (1, 3)]
    cases += [(name, {**base, "zero": 3, "recompute": "selective"}) for name in ("gpt", "mixture")]
    cases += [("gpt", {**base, "zero": 1, "tp": 2, "sequence_parallel": True})]
    return [Case(_name(model, pins), model, pins=pins, global_batch_size=_batch(pins)) for model, pins in cases]


def in_full_precision() -> list[Case]:
    """ZeRO 0, of which nothing is copied, beside ZeRO 1."""
    alone: list[dict[str, int | bool | str]] = [
        {"zero": 0, "dp_replicate": 8},
        {"zero": 0, "dp_replicate": 8, "recompute": "full"},
        {"zero": 0, "dp_replicate": 4, "tp": 2, "sequence_parallel": True},
        {"zero": 0, "dp_replicate": 4, "pp": 2, "schedule": "1F1B"},
        {"zero": 0, "dp_replicate": 1, "pp": 2, "tp": 4, "schedule": "ZBVZeroBubble"},
        {"zero": 1},
    ]
    cases = [(model, {**PLAIN, **each}) for model in ("llama", "gpt") for each in alone]
    return [
        Case(f"fp32 {_name(model, pins)}", model, pins=pins, global_batch_size=_batch(pins), precision=Precision.FP32)
        for model, pins in cases
    ]


def _batch(pins: dict[str, int | bool | str], num_devices: int = 8) -> int:
    """Sequences for two micro-batches, or in a pipeline two a rank."""
    pp = int(pins["pp"])
    return num_devices // (pp * int(pins["tp"]) * int(pins["cp"])) * int(pins["micro_batch"]) * 2 * pp


def _name(model: str, pins: dict[str, int | bool | str]) -> str:
    return " ".join((model, *(f"{key}={value}" for key, value in pins.items() if PLAIN.get(key) != value)))


def rows_of(case: Case, models: Path) -> list[Row]:
    """Every pipeline rank. PlannerError where there is no plan, or one that cannot be run."""
    plan = case.plan(models)
    found: list[Row] = []
    for pp_rank, rank in enumerate(check(plan)):
        counted, predicted = rank["allocated_bytes"], allocated_bytes(plan, pp_rank)
        if not isinstance(counted, int) or predicted is None:
            raise PlannerError(f"pipeline rank {pp_rank}: {rank['problem']}")
        assert isinstance(rank["elapsed_s"], float)
        found.append(Row(case, degrees_text(plan), pp_rank, predicted, counted, rank["elapsed_s"]))
    return found


def main() -> int:
    """Prints a row for every rank as it is there; exit code 1 where one is further off than it may be."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0] if __doc__ else None)
    parser.add_argument("names", nargs="*", help="beginnings of names of cases; none: all, and the table is written")
    parser.add_argument("--output", type=Path, help="the Markdown file of the table, also where NAMEs are given")
    options = parser.parse_args()
    names: list[str] = options.names
    cases = [
        case
        for case in (*published(), *variants(), *in_full_precision())
        if not names or any(map(case.name.startswith, names))
    ]
    rows, problems, start_s = list[Row](), dict[str, str](), time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        models = Path(folder) / "model.py"
        models.write_text(MODELS)
        for case in cases:
            try:
                found = rows_of(case, models)
            except PlannerError as error:
                problems[case.name] = str(error)
                print(f"{case.name}: {error}", flush=True)
                continue
            rows += found
            for row in found:
                print(_line(row), flush=True)
    if options.output or not names:
        path = options.output or RESULTS / f"check_memory_cpu_{datetime.datetime.now(datetime.UTC).date()}.md"
        path.write_text(_page(rows, problems, time.perf_counter() - start_s))
        print(f"wrote {path}")
    return int(bool(problems) or any(abs(row.ratio - 1) > WITHIN for row in rows))


def _line(row: Row) -> str:
    sizes = (f"{each / 2**30:.2f}" for each in (row.predicted_bytes, row.counted_bytes))
    cells = (row.case.name, row.layout, str(row.pp_rank), *sizes, f"{row.ratio:.3f}", f"{row.elapsed_s:.0f}")
    return "| " + " | ".join(cells) + " |"


def _page(rows: Sequence[Row], problems: dict[str, str], elapsed_s: float) -> str:
    close = sum(abs(row.ratio - 1) <= WITHIN for row in rows)
    lines = [
        "# The ledger against what tensors take",
        "",
        f"`python -m benchmarks.check_memory`, torch {torch.__version__}, Python {platform.python_version()}, "
        f"{elapsed_s:.0f} s: of {len(rows)} pipeline ranks {close} take what the ledger says to {WITHIN:.0%}, and "
        f"{len(problems)} plans could not be made or run.",
        "",
        "Counted on tensors without values, operator by operator, at the peak of the second step. Norms and dropout "
        "keep what CUDA's kernels keep. Left out: what the allocator, NCCL and the CUDA context take, and workspaces "
        "inside kernels. The ledger's rows of these are left out as well.",
        "",
        "| case | layout | rank | ledger GiB | counted GiB | counted / ledger | s |",
        "|---|---|---|---|---|---|---|",
        *map(_line, rows),
    ]
    if problems:
        lines += ["", "Not compared:", "", *(f"- {name}: {text}" for name, text in problems.items())]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
