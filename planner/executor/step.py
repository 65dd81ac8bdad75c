"""One step of training, or one look at held-back data, under any layout."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from planner.executor.data import TokenData
from planner.executor.mesh import device_of, place_of
from planner.executor.parallelize import ParallelModel, Tensors


def train_step(
    model: ParallelModel,
    optimizer: torch.optim.Optimizer,
    batch: Tensors,
    mesh: DeviceMesh,
    before_update: Callable[[], None] | None = None,
) -> torch.Tensor:
    """One optimiser step on this rank's part of the global batch; the mean loss over the global batch.

    ``before_update`` is called once all gradients are there. Collective.
    """
    optimizer.zero_grad(set_to_none=True)
    loss = model.forward_backward(batch)
    if before_update is not None:
        before_update()
    optimizer.step()
    return _of_all_ranks(loss, model, mesh)


def evaluate(model: ParallelModel, data: TokenData, num_batches: int, mesh: DeviceMesh) -> float:
    """The mean loss over the first ``num_batches`` global batches of ``data``, nothing learned. Collective.

    Gradients are dropped. Modules are in their evaluation mode meanwhile.
    """
    is_trained = {module: module.training for root in model.roots for module in root.modules()}
    for root in model.roots:
        root.eval()
        root.zero_grad(set_to_none=True)
    total = torch.zeros((), dtype=torch.float64)
    for index in range(num_batches):
        loss = model.loss_alone(local_batch(model, data, index, mesh))
        total += float(_of_all_ranks(loss, model, mesh))
    for module, was_trained in is_trained.items():
        module.training = was_trained
    return float(total) / num_batches


def local_batch(model: ParallelModel, data: TokenData, step: int, mesh: DeviceMesh) -> Tensors:
    """This rank's part of the global batch of ``step``, on its device."""
    device = device_of(mesh)
    size, shares = model.plan.training.global_batch_size, model.plan.pipeline.batch_shares
    tokens, labels = data.local_batch(step, size, place_of(mesh), shares)
    return {model.input_name: tokens.to(device), "labels": labels.to(device)}


def _of_all_ranks(loss: torch.Tensor, model: ParallelModel, mesh: DeviceMesh) -> torch.Tensor:
    """The loss of the global batch from each rank's share of it."""
    place = place_of(mesh)
    # Every rank of the last pipeline stage has its part's loss: tp ranks the same one, so the sum counts it tp times.
    share = loss / (place.num_parts * model.plan.mesh.tp) if model.has_loss else torch.zeros_like(loss)
    dist.all_reduce(share)
    return share
