"""Whether another order of the mesh's axes is ever faster under our prices: ``python -m benchmarks.mesh_order``.

Ranks are numbered along the axes of the mesh, outermost first, and the innermost lies inside a node. The planner's
order is fixed: pp, then data (dp with cp inside it), then tp innermost. Here the layouts of each mesh with the least
bounds are cut and priced under all six orders of these three axes, on the same placements of operators, and the best of
every order are compared. They are those that are promising under our order: another may have better ones of its own.
``--case NAME`` picks one of ``CASES``.
"""

from __future__ import annotations

import argparse
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import permutations
from pathlib import Path

import numpy as np

from costmodels.communication import Line
from costmodels.vocabulary.choices import Optimizer, Precision
from costmodels.vocabulary.mesh import Mesh
from costmodels.vocabulary.workload import CollectiveKind, GroupPlacement
from hardware_profiles.catalog import profile_for
from hardware_profiles.schema import ClusterSpec
from planner.evaluation.evaluator import Evaluated
from planner.graph.tracer import trace_model
from planner.layout.layout import NO_PINS, Layout, Training
from planner.model_file import load_model, resolve_model
from planner.pricing.machine import Machine
from planner.pricing.table_builder import build_table
from planner.pricing.target import PricingTarget
from planner.problem import Problem
from planner.solver.base import UnprovedError
from planner.solver.bounds import bounds
from planner.solver.cutting import Pricer, best_cut

PP, DATA, TP = "pp", "data", "tp"
OUR_ORDER = (PP, DATA, TP)
MOST_OF_A_MESH = 4  # layouts priced, those of the least bounds
TRACED_BATCH_SIZE = 2


@dataclass(frozen=True)
class Case:
    """A model on a cluster."""

    hardware: str
    num_devices: int
    model: str
    seq_len: int
    batch: int


CASES = {
    case.hardware: case
    for case in (
        Case("dgx-h100-80gb", 16, "llama3-8b", 8192, 64),
        Case("dgx-a100-80gb", 32, "llama3-8b", 8192, 64),
        Case("a100-pcie-80gb-x8", 16, "llama3-8b", 4096, 64),
        Case("rtx-4090-x8", 16, "llama2-7b", 2048, 32),
        Case("aws-g5-48xlarge", 32, "llama2-7b", 2048, 64),
        Case("dgx-1-v100-32gb", 32, "gpt3-6.7b", 2048, 64),
    )
}


def strides(mesh: Mesh, order: Sequence[str]) -> dict[str, int]:
    """The distance between neighbours along each axis."""
    degrees = {PP: mesh.pp, DATA: mesh.dp * mesh.cp, TP: mesh.tp}
    found: dict[str, int] = {}
    inside = 1
    for axis in reversed(order):
        found[axis] = inside
        inside *= degrees[axis]
    return found


def placed(group: GroupPlacement, mesh: Mesh, order: Sequence[str]) -> GroupPlacement:
    """Where a group of the planner's order lies under another."""
    ours, theirs = strides(mesh, OUR_ORDER), strides(mesh, order)
    if group.stride >= ours[PP] and mesh.pp > 1:
        return GroupPlacement(group.num_ranks, theirs[PP])
    if group.stride < ours[DATA]:
        return GroupPlacement(group.num_ranks, theirs[TP])
    return GroupPlacement(group.num_ranks, group.stride // ours[DATA] * theirs[DATA])


@dataclass(frozen=True)
class ReorderedMachine(Machine):
    """A cluster on which the ranks of one mesh are numbered in another order."""

    mesh: Mesh = field(default_factory=Mesh)
    order: tuple[str, ...] = OUR_ORDER

    def lines(self, kind: CollectiveKind, group: GroupPlacement) -> tuple[Line, ...]:
        """As those of the group where it now lies."""
        return super().lines(kind, placed(group, self.mesh, self.order))


@dataclass(frozen=True)
class ReorderedTarget(PricingTarget):
    """What is priced, on such a cluster."""

    mesh: Mesh = field(default_factory=Mesh)
    order: tuple[str, ...] = OUR_ORDER

    def machine_on(self, cluster: ClusterSpec) -> Machine:
        """The cluster with its ranks in the order."""
        return ReorderedMachine(cluster, mesh=self.mesh, order=self.order)


def orders_of(mesh: Mesh) -> Iterator[tuple[str, ...]]:
    """The orders that differ for this mesh, ours first: axes of one rank may stand anywhere."""
    degrees = {PP: mesh.pp, DATA: mesh.dp * mesh.cp, TP: mesh.tp}
    seen: set[tuple[str, ...]] = set()
    for order in permutations(OUR_ORDER):
        telling = tuple(axis for axis in order if degrees[axis] > 1)
        if telling not in seen:
            seen.add(telling)
            yield order


def priced_in_orders(problem: Problem) -> dict[tuple[str, ...], Evaluated]:
    """The fastest of the layouts that were priced, under each order."""
    target, training = problem.target, problem.space.training
    best: dict[tuple[str, ...], Evaluated] = {}
    for mesh, layouts in most_promising(problem).items():
        for order in orders_of(mesh):
            reordered = ReorderedTarget(
                target.graph, target.cluster, target.precision, target.recipe, target.attention, mesh=mesh, order=order
            )
            table = build_table(reordered, training, problem.decisions, layouts)
            for layout in layouts:
                try:
                    found = best_cut(Pricer(table, layout), problem.solver, None).best
                except UnprovedError:
                    continue
                if found is not None and (order not in best or found.step_time_s < best[order].step_time_s):
                    best[order] = found
    return best


def most_promising(problem: Problem) -> dict[Mesh, list[Layout]]:
    """Of every mesh the layouts of least bounds that may fit."""
    layouts = problem.space.layouts
    lower = bounds(problem.table, layouts)
    fits = np.flatnonzero(lower.memory_bytes <= problem.table.cluster.devices[0].memory_bytes)
    found: dict[Mesh, list[Layout]] = defaultdict(list)
    for place in fits[np.argsort(lower.step_time_s[fits], kind="stable")].tolist():
        layout = layouts[place]
        if len(found[layout.mesh]) < MOST_OF_A_MESH:
            found[layout.mesh].append(layout)
    return dict(found)


def problem_of(case: Case) -> Problem:
    """The whole problem of a case."""
    model = load_model(resolve_model(case.model))
    graph = trace_model(model, TRACED_BATCH_SIZE, case.seq_len, "bfloat16")
    cluster = profile_for(case.num_devices, case.hardware)
    precision = Precision.BF16 if "bf16" in cluster.profile.device.peak_flops_per_s else Precision.FP16
    training = Training(case.batch, case.seq_len, precision, Optimizer.ADAMW)
    return Problem.build(PricingTarget(graph, cluster, precision.value), training, NO_PINS)


def line_of(case: Case) -> str:
    """One row of the table: ours, and the best of the others."""
    best = priced_in_orders(problem_of(case))
    ours = best[OUR_ORDER]
    others = {order: found for order, found in best.items() if order != OUR_ORDER}
    where = f"| {case.num_devices} x {case.hardware} | {case.model}, {case.batch} x {case.seq_len} |"
    if not others:
        return f"{where} {ours.step_time_s:.3f} s, {_mesh_text(ours)} | | |"
    order, other = min(others.items(), key=lambda pair: pair[1].step_time_s)
    return (
        f"{where} {ours.step_time_s:.3f} s, {_mesh_text(ours)} | {' > '.join(order)}: {other.step_time_s:.3f} s, "
        f"{_mesh_text(other)} | {other.step_time_s / ours.step_time_s - 1:+.1%} |"
    )


def _mesh_text(found: Evaluated) -> str:
    mesh = found.layout.mesh
    text = f"pp {mesh.pp} dp {mesh.dp} cp {mesh.cp} tp {mesh.tp} ZeRO {found.layout.zero_stage}"
    return text + f" {'mixed' if found.only_mode is None else found.only_mode.value}"


def main() -> int:
    """Exit code 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", choices=CASES, action="append", help="one of the clusters; all where none is named")
    parser.add_argument("--page", type=Path, help="write what is printed here, as Markdown")
    options = parser.parse_args()
    lines = [
        "# Orders of the mesh's axes, outermost first",
        "",
        "| cluster | model, batch | pp > data > tp | best of the other orders | |",
        "|---|---|---|---|---|",
    ]
    print("\n".join(lines), flush=True)
    for name in options.case or CASES:
        lines.append(line_of(CASES[name]))
        print(lines[-1], flush=True)
    if options.page:
        options.page.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
