"""Measured runs, each with what predicts it under factors of its cluster: what a calibration is made of."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from planner.api import planned_layout
from planner.api.pinned import PricedRun, pinned_run, price_on, price_run
from planner.errors import PlannerError
from planner.evaluation.evaluator import Evaluated
from planner.evaluation.measured_memory import memory_as_measured
from planner.formats.run_table import Rejected, Run, UnpriceableRunError, read_runs
from planner.formats.settings import Layout as Settings
from planner.formats.table_run import layout_of, shape_of
from planner.plan.schema import Plan
from planner.pricing.target import Factors, PricingTarget
from planner.request import Software, load_cluster, load_graph, target_as_run

MemoryKind = Literal["allocated", "reserved", "device"]


@dataclass(frozen=True)
class Measurement:
    """What was measured of a run; None: it was not."""

    step_time_s: float | None = None
    peak_memory_bytes: float | None = None  # of the fullest rank
    memory_kind: MemoryKind = "allocated"
    memory_of: str = "worst"  # pipeline rank on which memory was read: worst, first or last


@dataclass(frozen=True)
class Measured:
    """A measured run; ``on`` prices it on its target as that is changed."""

    name: str
    framework: str
    found: Measurement
    target: PricingTarget
    on: Callable[[PricingTarget], Evaluated]

    def price(self, factors: Factors) -> tuple[float, float]:
        """Seconds of a step, and bytes as they were measured, where the cluster has so many times of each."""
        priced = self.on(self.target.scaled(factors))
        memory = memory_as_measured(priced, self.found.memory_kind, self.found.memory_of)
        return priced.step_time_s, memory


def measured_plan(name: str, plan: Plan, hardware: str, found: Measurement) -> Measured:
    """A run of ``plan`` on this hardware; errors as of ``planner estimate``."""
    planned = planned_layout(plan, hardware, None)
    return Measured(name, planned.framework, found, planned.target, planned.on)


def measured_config(
    name: str, model: str, framework: str, layout: Settings, hardware: str, found: Measurement
) -> Measured:
    """A run of a framework's config on this hardware; errors as of ``planner import``."""
    return _measured(name, price_run(pinned_run(model, framework, layout), hardware), found)


def measured_rows(file: Path, hardware: str, notes: list[str]) -> list[Measured]:
    """The rows of a table of runs; what cannot be priced is left out and said in ``notes``."""
    found: list[Measured] = []
    for row in read_runs(file):
        if isinstance(row, Rejected):
            notes.append(f"{file.name}, {row.id}: left out, {row.reason}")
            continue
        if row.step_time_s is None and row.peak_memory_bytes is None:
            notes.append(f"{file.name}, {row.id}: left out, nothing of it was measured")
            continue
        try:
            found.append(_measured_row(row, hardware, notes))
        except (UnpriceableRunError, PlannerError, ValueError) as error:
            notes.append(f"{file.name}, {row.id}: left out, {error}")
    return found


def _measured_row(row: Run, hardware: str, notes: list[str]) -> Measured:
    said, assumed = row.software, [*row.assumptions]
    if not said.framework:
        raise UnpriceableRunError("it names no framework")
    software = Software(said.framework, said.version, said.kernels, said.overlap, row.flash_attention)
    settings = layout_of(row)
    ranks = settings.dp_replicate * settings.dp_shard * settings.cp
    zero = software.zero_stage(settings.zero_stage, num_ranks=ranks, pp=settings.pp)
    settings = replace(settings, zero_stage=zero)
    cluster = load_cluster(hardware, settings.num_devices, assumed)
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "row.model.json"
        shape = shape_of(row.architecture, software.recipe.dropout)
        model.write_text(shape.model_dump_json(exclude_none=True), encoding="utf-8")
        graph = load_graph(str(model), settings.seq_len, settings.precision)
        target = target_as_run(graph, cluster, settings.precision, software)
        priced = price_on(pinned_run(str(model), said.framework, settings), target)
    gpu, name = re.search(r"[A-Z]+\d+", row.hardware.gpu_type.upper()), cluster.profile.device.name
    if gpu is not None and gpu[0] not in name.upper():
        notes.append(f"{row.id}: it ran on {row.hardware.gpu_type}, and is taken for a run on {name} of {hardware}")
    if assumed:
        notes.append(f"{row.id}: assumed {'; '.join(assumed)}")
    kinds: dict[str, MemoryKind] = {"reserved": "reserved", "device": "device"}
    kind = kinds.get(row.peak_memory_kind, "allocated")
    return _measured(row.id, priced, Measurement(row.step_time_s, row.peak_memory_bytes, kind, row.memory_of))


def _measured(name: str, priced: PricedRun, found: Measurement) -> Measured:
    return Measured(name, priced.run.framework, found, priced.target, priced.on)
