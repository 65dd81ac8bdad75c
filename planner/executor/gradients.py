"""The norm of all gradients of the whole model, and gradients scaled down to one, under any layout."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from costmodels.vocabulary.mesh import MeshAxis
from planner.executor.mesh import device_of, local_part
from planner.executor.pipeline import TiedGradient

CLIP_EPSILON = 1e-6  # as torch.nn.utils.clip_grad_norm_ has it


def norm_of_all(parameters: Sequence[nn.Parameter], ties: Sequence[TiedGradient], mesh: DeviceMesh) -> torch.Tensor:
    """The Euclidean norm of all gradients of the whole model, float64 (): what one process would have. Collective.

    ``parameters`` are those of this rank's stages. Each number counts once: ranks that hold the same one each add their
    share of its square. Gradients may lie on different meshes, which torch's own ``clip_grad_norm_`` refuses.
    """
    copies = {id(p): tie.num_copies for tie in ties for p in tie.parameters}
    total = torch.zeros((), dtype=torch.float64, device=device_of(mesh))  # a stage of the loss alone has no parameters
    ranks = mesh.size() // mesh[MeshAxis.PP.value].size()  # that hold the same stages
    for parameter in parameters:
        gradient = parameter.grad
        if gradient is None:
            continue
        local, parts = _local(gradient)
        numbers = torch.view_as_real(local) if local.is_complex() else local
        square = torch.linalg.vector_norm(numbers, dtype=torch.float64).square()
        total += square * parts / (ranks * copies.get(id(parameter), 1))
    dist.all_reduce(total)
    return total.sqrt()


def scale_down(parameters: Sequence[nn.Parameter], norm: torch.Tensor, max_norm: float) -> None:
    """Scales gradients of this ``norm`` so that it is at most ``max_norm``, as torch's ``clip_grad_norm_`` does.

    Where the norm is none, numbers that are some stay, so that it can be told which gradient was at fault.
    """
    share = (max_norm / (norm + CLIP_EPSILON)).clamp(max=1.0).nan_to_num(1.0)
    for parameter in parameters:
        gradient = parameter.grad
        if gradient is not None:
            local = local_part(gradient)
            local.mul_(share.to(local.device, local.dtype))


def _local(gradient: torch.Tensor) -> tuple[torch.Tensor, int]:
    """What of ``gradient`` lies on this rank, and in how many parts its ranks hold it."""
    if not isinstance(gradient, DTensor):
        return gradient, 1
    if any(placement.is_partial() for placement in gradient.placements):
        placements = [Replicate() if p.is_partial() else p for p in gradient.placements]
        gradient = gradient.redistribute(placements=placements)
    mesh = gradient.device_mesh
    sizes = [mesh.size(dim) for dim, p in enumerate(gradient.placements) if not isinstance(p, Replicate)]
    return gradient.to_local(), math.prod(sizes)
