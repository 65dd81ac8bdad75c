"""Activations in host memory: what autograd keeps of a block is copied to the host, and back for its backward pass.

Copies are made in the order of the computation, so that results are those of a block whose activations stay; they do
not run beside it, as predictions assume. On a CPU they are copies in the same memory: nothing is gained, and as much is
checked. Parameters and buffers are not copied: they are there all the time, or sharded by FSDP.
"""

# pyright: reportPrivateUsage=false
# torch has no public name for which storage a tensor's is.

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Generator, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Placement
from torch.distributed.tensor.device_mesh import DeviceMesh


class KeptValue(Protocol):
    """What torch's selective checkpointing keeps of one operator's output: a tensor and how often it was written to."""

    val: Any
    version: int | None


Packed: TypeAlias = "torch.Tensor | OnHost"


@dataclass
class OnHost:
    """A tensor in host memory that knows where it came from."""

    copy: torch.Tensor  # of this rank's part
    device: torch.device
    parts: tuple[DeviceMesh, Sequence[Placement], torch.Size, tuple[int, ...]] | None  # of a tensor in parts
    _back: Callable[[], torch.Tensor | None] = field(default=lambda: None)

    @staticmethod
    def of(tensor: torch.Tensor) -> OnHost:
        """A copy of ``tensor``, in pinned memory where it comes from a GPU."""
        with torch.no_grad():
            detached = tensor.detach()
            parts = None
            if isinstance(detached, DTensor):
                parts = (detached.device_mesh, detached.placements, detached.shape, detached.stride())
                detached = detached.to_local()
            host = torch.empty_like(detached, device="cpu", pin_memory=detached.device.type == "cuda")
            return OnHost(host.copy_(detached), detached.device, parts)

    def back(self) -> torch.Tensor:
        """The tensor on its device again; one copy serves all who ask while somebody holds it."""
        known = self._back()
        if known is not None:
            return known
        with torch.no_grad():
            found = torch.empty_like(self.copy, device=self.device, pin_memory=False).copy_(
                self.copy, non_blocking=True
            )
            if self.parts is not None:
                mesh, placements, shape, stride = self.parts
                found = DTensor.from_local(found, mesh, placements, run_check=False, shape=shape, stride=stride)
        self._back = weakref.ref(found)
        return found


def kept_on_host(forward: Callable[..., object], module: nn.Module) -> Callable[..., object]:
    """``forward``, a pass of ``module``, with what autograd keeps of it in host memory."""

    @functools.wraps(forward)
    def run(*args: object, **kwargs: object) -> object:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        staying = storages_of(module.parameters()) | storages_of(module.buffers())
        # A tensor that several operators keep is copied once. Until the pass ends none of them is freed, so that no
        # other takes its place.
        known: dict[Hashable, tuple[torch.Tensor, OnHost]] = {}

        def pack(tensor: torch.Tensor) -> Packed:
            if storage_of(tensor) in staying:
                return tensor
            key = (storage_of(tensor), tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype)
            if key not in known:
                known[key] = tensor, OnHost.of(tensor)
            return known[key][1]

        with torch.autograd.graph.saved_tensors_hooks(pack, _unpack):
            result = forward(*args, **kwargs)
        known.clear()
        return result

    return run


def _unpack(packed: Packed) -> torch.Tensor:
    return packed.back() if isinstance(packed, OnHost) else packed


@contextlib.contextmanager
def leaving(kept: Callable[[], Iterable[KeptValue]]) -> Generator[None]:
    """After the pass inside, what it kept besides autograd goes to the host."""
    yield
    for each in kept():
        if isinstance(each.val, torch.Tensor):
            each.val = OnHost.of(each.val)


@contextlib.contextmanager
def returning(kept: Callable[[], Iterable[KeptValue]]) -> Generator[None]:
    """And comes back before the pass inside."""
    for each in kept():
        if isinstance(each.val, OnHost):
            each.val = each.val.back()
            each.version = each.val._version
    yield


def storages_of(tensors: Iterable[torch.Tensor]) -> set[int]:
    """Which memory ``tensors`` lie in."""
    return {storage_of(tensor) for tensor in tensors}


def storage_of(tensor: torch.Tensor) -> int:
    """Which memory ``tensor``, or this rank's part of it, lies in: the same for all views of a tensor that is there."""
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local.untyped_storage()._cdata
