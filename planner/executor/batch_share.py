"""Whether what a rank is given of a global batch is the plan's part for it, in number and in shape."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch.distributed.device_mesh import DeviceMesh

from planner.errors import InputError
from planner.executor.mesh import place_of
from planner.plan.schema import Plan


def check_share(
    batch: Mapping[str, torch.Tensor], shapes: Mapping[str, torch.Size], plan: Plan, mesh: DeviceMesh
) -> None:
    """InputError where ``batch`` is not as large as the plan's part for this rank, or its samples of other ``shapes``.

    These count where stages replay a recording, in which sizes are numbers, and where ranks share out positions.
    """
    pipeline = plan.pipeline
    size, whose = pipeline.micro_batch_size, "this rank"
    if pipeline.batch_shares:
        share = pipeline.batch_shares[place_of(mesh).row(pipeline.batch_shares)]
        size, whose = share.micro_batch_size, f"this rank, one of the replicas on {share.device_group},"
    wanted, found = pipeline.num_microbatches * size, {len(value) for value in batch.values()}
    if found != {wanted}:
        raise InputError(
            f"{whose} was given a batch of {', '.join(map(str, sorted(found)))} sequences: its part is "
            f"{pipeline.num_microbatches} micro-batches of {size} = {wanted}",
            hint="give every data-parallel rank its part of the plan's global batch; leave out a last smaller one",
        )
    if plan.mesh.pp * plan.mesh.cp == 1:
        return
    other = [name for name, shape in shapes.items() if name in batch and batch[name].shape[1:] != shape]
    if other:
        name = other[0]
        raise InputError(
            f"samples of {name} are {tuple(batch[name].shape[1:])}, and the model was split for {tuple(shapes[name])}: "
            f"under pp={plan.mesh.pp}, cp={plan.mesh.cp} every step has the same",
            hint="pad samples to that shape, or plan with pp = 1 and cp = 1",
        )
