"""The rules of the axes against those of the search space, which they are to replace.

Delete together with the rules in ``planner.space``.
"""

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

import pytest

from costmodels.vocabulary.mesh import Mesh
from costmodels.vocabulary.schedules import ScheduleName
from hardware_profiles.mixed import cluster_for
from planner.axes.base import Asked, Executed
from planner.axes.context import CONTEXT, mixes_positions_outside_attention
from planner.axes.data import DATA, micro_batches, replica_options, zero_stages
from planner.axes.expert import EXPERT
from planner.axes.offload import offload_of, unpriced_offload
from planner.axes.pipeline import PIPELINE, schedules
from planner.axes.recompute import modes
from planner.axes.registry import execution_warnings, violations
from planner.axes.tensor import TENSOR, sequence_parallel_options
from planner.axes.unlike_devices import group_of_ranks, over_groups
from planner.layout.columns import Columns
from planner.layout.layout import Layout, Limits, Pins, Training
from planner.parallelism import Offload, Optimizer, Precision, Recompute
from planner.pricing import offloading, unit_costs
from planner.solver import decode
from planner.space import device_groups
from planner.space.search_space import build_space, pin_violations
from tests.planning import cluster_of, graph_of, problem_of

LIMITS = Limits(32, 8, 12, frozenset({2, 4, 8}), frozenset({2, 4}), context_splits=True, num_experts=8)
TRAINING = Training(48, 1024, Precision.BF16, Optimizer.ADAMW)
SPACES = [
    (TRAINING, Pins(), LIMITS),
    (TRAINING, Pins(tp=2, zero=3), LIMITS),
    (TRAINING, Pins(pp=4, schedule=ScheduleName.ZB_2P), LIMITS),
    (TRAINING, Pins(cp=4, micro_batch=3, sequence_parallel=True), LIMITS),
    (TRAINING, Pins(dp=1, zero=2, recompute=Recompute.FULL), LIMITS),
    (TRAINING, Pins(dp_replicate=2, ep=4, offload=Offload.CPU), LIMITS),
    (Training(17, 96, Precision.BF16, Optimizer.SGD), Pins(), Limits(17, 1, 3, frozenset(), frozenset(), False)),
]


def layouts_of(asked: Asked) -> Iterator[Layout]:
    """Every layout, from what the axes allow."""
    n = asked.limits.num_devices
    for tp in TENSOR.degrees(asked, n):
        for pp in PIPELINE.degrees(asked, n // tp):
            for cp in CONTEXT.degrees(asked, n // tp // pp):
                for dp in DATA.degrees(asked, n // tp // pp // cp):
                    for replicate in replica_options(asked, dp):
                        shard = dp // replicate
                        for ep in EXPERT.degrees(asked, shard * cp):
                            yield from on_mesh(asked, Mesh(pp, replicate, shard, cp, tp, ep))


def on_mesh(asked: Asked, mesh: Mesh) -> Iterator[Layout]:
    flags = sequence_parallel_options(asked, mesh.tp, mesh.cp)
    for zero, (size, number) in product(zero_stages(asked, mesh.dp, mesh.dp_shard), micro_batches(asked, mesh.dp)):
        for schedule, virtual in schedules(asked, mesh.pp, number):
            if schedule.rules.conflicts(zero_stage=zero, recomputation=()):
                continue
            for flag, mode in product(flags, modes(asked, schedule)):
                yield Layout(mesh, zero, size, number, schedule, virtual, mode, flag, offload_of(asked))


@pytest.mark.parametrize(("training", "pins", "limits"), SPACES)
def test_the_same_layouts(training: Training, pins: Pins, limits: Limits) -> None:
    found = list(layouts_of(Asked(training, pins, limits)))
    assert len(found) == len(set(found)) > 0
    assert set(found) == set(build_space(training, pins, limits).layouts)


WRONG = [
    Pins(tp=3),
    Pins(tp=0, pp=5, dp=7, cp=9),
    Pins(pp=8, dp=8, cp=2),
    Pins(pp=2, dp=2, cp=2, tp=2),
    Pins(dp=32),
    Pins(micro_batch=5),
    Pins(micro_batch=0),
    Pins(cp=32, tp=16),
    Pins(ep=3),
    Pins(ep=0),
    Pins(ep=8, dp=2, cp=2),
    Pins(pp=16, virtual_stages=0),
    Pins(pp=1, schedule=ScheduleName.DUAL_PIPE_V, virtual_stages=3, zero=3, recompute=Recompute.FULL),
    Pins(schedule=ScheduleName.INTERLEAVED_1F1B, virtual_stages=1),
    Pins(zero=4, sequence_parallel=True, tp=1),
    Pins(sequence_parallel=True, tp=8, cp=2),
]


@pytest.mark.parametrize("pins", WRONG)
@pytest.mark.parametrize("limits", [LIMITS, Limits(32, 8, 12, frozenset({2}), frozenset(), context_splits=False)])
def test_the_same_violations(pins: Pins, limits: Limits) -> None:
    training = Training(48, 1000, Precision.BF16, Optimizer.ADAMW)
    old = pin_violations(training, pins, limits)
    assert sorted(violations(Asked(training, pins, limits))) == sorted(old)


def test_some_pins_are_wrong() -> None:
    assert all(pin_violations(Training(48, 1000, Precision.BF16, Optimizer.ADAMW), pins, LIMITS) for pins in WRONG)


def test_the_same_warnings() -> None:
    table = problem_of("mixtral-8x7b", 32, batch=64, seq_len=1024).table
    graph = graph_of("mixtral-8x7b", 1024)
    reading = graph.model_copy(update={"reads_values": ("model.router",)})
    plain = Layout(Mesh(dp_shard=32), 3, 1, 2, ScheduleName.ONE_F_ONE_B, 1, Recompute.NONE, False)
    layouts = [
        plain,
        plain._replace(mesh=Mesh(pp=2, dp_shard=8, cp=2, ep=8), offload=Offload.NVME),
        plain._replace(mesh=Mesh(pp=2, dp_shard=16), schedule=ScheduleName.ZB_2P),
    ]
    for layout, model, precision in product(layouts, (graph, reading), (Precision.BF16, Precision.FP8)):
        training = Training(64, 1024, precision, Optimizer.ADAMW)
        old = decode.execution_warnings(layout, replace(table, training=training), model)
        new = execution_warnings(Executed(layout, model, table.cluster), training)
        assert sorted(old) == sorted(new)


def test_the_same_orders_of_unlike_devices() -> None:
    cluster = cluster_for(None, "a100-80gb:16,h100:16")
    assert cluster.mixed is not None
    found = build_space(TRAINING, Pins(tp=2, recompute=Recompute.NONE), LIMITS).layouts
    old = list(device_groups.over_groups(found, cluster.mixed.groups))
    assert old == list(over_groups(Columns.of(Layout, found), cluster.mixed.groups))
    layout = next(each for each in old if each.mesh.pp == 4)
    first, second = layout.groups
    assert group_of_ranks(layout, cluster) == (first, first, second, second)
    (order,) = execution_warnings(Executed(layout, graph_of("llama3-8b", 1024), cluster), TRAINING)
    assert order.endswith(f"ranks 0 to 15 on {first}, ranks 16 to 31 on {second}")


def test_the_same_facts_are_missing() -> None:
    for hardware, offload in product(("dgx-a100-80gb", "dgx-h100-80gb", "cpu-gloo"), Offload):
        cluster = cluster_of(hardware, 8)
        assert unpriced_offload(cluster, offload) == offloading.unpriced_offload(cluster, offload)
    for model in ("llama3-8b", "tests/fixtures/hf/qwen3"):
        graph = graph_of(model, 1024)
        new, old = (
            each(graph) for each in (mixes_positions_outside_attention, unit_costs.mixes_positions_outside_attention)
        )
        assert new == old
