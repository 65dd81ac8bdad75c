"""Random numbers of training: what dropout draws on each rank.

Ranks that hold different data or different layers draw different numbers: the default generator is seeded by the run's
seed and the rank's place on every axis but ``tp``. Ranks of one ``tp`` group have the same seed, so what is replicated
among them gets the same mask; where an activation is sharded DTensor gives each shard numbers of its own, on a GPU by
offsets into one stream, and on the CPU, where torch's own tracker does not run, by a seed of each shard's own, drawn
from the common stream. That stream is the default generator's, which activation checkpointing restores, so a repeated
forward pass draws what the first one drew.
"""

# pyright: reportPrivateUsage=false
# DTensor has no public way to say what draws its random numbers.

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Generator, Sequence

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, _random
from torch.distributed.tensor._dtensor_spec import DTensorSpec

from costmodels.vocabulary.mesh import MeshAxis


def seed_rank(seed: int, mesh: DeviceMesh, step: int = 0) -> None:
    """Seeds this rank's default generators, and DTensor's use of them, for a step on ``mesh``.

    Seeded before each step, a run that goes on from a checkpoint draws what it would have drawn without the break.
    """
    place = [step, *(mesh[axis.value].get_local_rank() for axis in MeshAxis if axis is not MeshAxis.TP)]
    torch.manual_seed(_mixed(seed, place))
    if mesh.device_type == "cpu":
        _random._rng_tracker = _CpuTracker()
    else:  # before DTensor makes one that takes over rank 0's state everywhere
        _random._rng_tracker = _random.OffsetBasedRNGTracker(mesh, run_state_sync=False)


class _CpuTracker(_random._RNGStateTracker):
    """Numbers of their own for the shards of a DTensor on the CPU, the same for its copies."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))

    @contextlib.contextmanager
    def _distribute_region(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, spec: DTensorSpec, generator: torch.Generator | None = None
    ) -> Generator[None]:
        source = torch.default_generator if generator is None else generator
        common = int(torch.randint(2**62, (1,), generator=source))  # the same on every rank of the group
        coordinate = spec.mesh.get_coordinate() or []
        shard = [c for c, placement in zip(coordinate, spec.placements, strict=True) if isinstance(placement, Shard)]
        state = torch.default_generator.get_state()
        torch.default_generator.manual_seed(_mixed(common, shard))
        try:
            yield
        finally:
            torch.default_generator.set_state(state)


def _mixed(seed: int, place: Sequence[int]) -> int:
    """One seed out of several numbers, unlike that of any other place."""
    digest = hashlib.sha256(repr((seed, tuple(place))).encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1  # a generator on the CPU takes 63 bits
