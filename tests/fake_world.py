"""One process that stands for a rank of a larger world: collectives do nothing, placements propagate for real."""

import contextlib
from collections.abc import Generator

import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore


@contextlib.contextmanager
def fake_world(num_ranks: int, rank: int = 0) -> Generator[None]:
    """Makes this process ``rank`` of ``num_ranks`` while the context lasts."""
    dist.init_process_group("fake", rank=rank, world_size=num_ranks, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()
