"""Bytes that tensors hold: against sums by hand, and against torch's own tracker where that one can count."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed._tools.mem_tracker import MemTracker
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from planner.executor.live_memory import LiveMemory
from tests.fake_world import fake_world


def test_storages_count_once_until_they_are_freed_or_resized() -> None:
    with LiveMemory() as tracker:
        a = torch.zeros(1000)
        b = a.view(10, 100)[3:]
        assert tracker.live_bytes == 4000
        c = torch.ones(500)
        assert (tracker.live_bytes, tracker.peak_bytes) == (6000, 6000)
        a.untyped_storage().resize_(0)
        assert tracker.live_bytes == 2000
        b.untyped_storage().resize_(4000)
        del c
        assert tracker.live_bytes == 4000
        del a
        assert tracker.live_bytes == 4000  # of b
        del b
        assert (tracker.live_bytes, tracker.peak_bytes) == (0, 6000)
    assert "resized" not in torch.UntypedStorage.resize_.__name__


def training_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(torch.ones(64, 128)).square().mean().backward()
    optimizer.step()


def test_one_step_is_what_torch_counts() -> None:
    model = nn.Sequential(*(nn.Linear(128, 128) for _ in range(4)), nn.ReLU())
    optimizer = torch.optim.Adam(model.parameters())
    training_step(model, optimizer)
    theirs = MemTracker()
    theirs.track_external(model, optimizer)
    with theirs:
        training_step(model, optimizer)
    expected = theirs.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"]
    optimizer.zero_grad()
    ours = LiveMemory()
    ours.note(model.parameters())
    ours.note(v for state in optimizer.state.values() for v in state.values())
    with ours:
        training_step(model, optimizer)
    assert abs(ours.peak_bytes / expected - 1) < 0.01


def test_of_a_tensor_over_ranks_only_the_local_part_counts() -> None:
    with fake_world(2):
        local = torch.zeros(500, 8)
        x = DTensor.from_local(local, init_device_mesh("cpu", (2,)), [Shard(0)], run_check=False)
        tracker = LiveMemory()
        tracker.note([x])
        with tracker:
            y = torch.log_softmax(x, -1)
    assert y.shape == (1000, 8)
    assert tracker.peak_bytes == 2 * local.untyped_storage().nbytes()
