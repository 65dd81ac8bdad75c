"""What makes a layout harder to run and to understand, most important first:

1. axes of the device mesh in use besides sharded data parallelism: a pipeline, replicas of shards, context, experts,
   tensor;
2. degrees of pipeline, context, expert and tensor parallelism;
3. stages a rank;
4. the schedule: 1F1B, then GPipe, which holds more activations, and the others in the order of ``SCHEDULES``;
5. recomputation, where blocks that differ in it come last;
6. the ZeRO stage, where 3, FSDP's own, is the plainest;
7. replicas of shards, sequence parallelism, a tensor-parallel degree of experts of their own, and unlike shares of a
   batch.
"""

from __future__ import annotations

from costmodels.vocabulary.choices import Recompute
from costmodels.vocabulary.schedules import SCHEDULES
from planner.layout.layout import Layout

_PLAINNESS = {name: place for place, name in enumerate(SCHEDULES)}
_RECOMPUTATION: dict[Recompute | None, int] = {mode: place for place, mode in enumerate([*Recompute, None])}


def complexity(layout: Layout) -> tuple[int, ...]:
    """The list above as numbers; smaller is simpler."""
    mesh = layout.mesh
    return (
        sum(d > 1 for d in (mesh.pp, mesh.dp_replicate, mesh.cp, mesh.ep, mesh.tp)),
        mesh.pp,
        mesh.cp,
        mesh.ep,
        mesh.tp,
        layout.virtual_stages,
        _PLAINNESS[layout.schedule],
        _RECOMPUTATION[layout.recompute],
        3 - layout.zero_stage,
        mesh.dp_replicate,
        layout.sequence_parallel,
        mesh.etp is not None,
        bool(layout.shares),
    )
