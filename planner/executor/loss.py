"""The loss of a global batch from those of its micro-batches on all data-parallel ranks, as one process computes it.

Ranks of context parallelism have parts too, some positions of each sequence, and count among data-parallel ranks here.
With ranks r of d and micro-batches m, the loss of a part L(r, m) and its weight w(r, m) (``TrainingLoss``):

    a mean      sum of w L / sum of w       a sum   sum of L / sum of w, or the sum of L without weights
    counted     sum of sums / sum of counts

Weights are known before the forward pass, so each micro-batch's loss is scaled by d w / sum of w (or d / sum of w, or
d) before its backward pass, d because data parallelism averages gradients. Counts are known after it, so gradients are
scaled by d / sum of counts once a step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from costmodels.vocabulary.mesh import MeshAxis
from planner.errors import ModelError, PlannerError
from planner.executor.mesh import DATA_AXES, device_of, place_of
from planner.executor.stage_trace import tensors_in
from planner.executor.tensor_parallel import redistribute
from planner.models.loss import Reduction, TrainingLoss

SCALE_KEY = "planner_loss_scale"  # travels with a micro-batch, through pipeline schedules too; losses do not see it
SAY_HOW_PARTS_ADD_UP = (
    "define loss_weight(batch), the number of terms that the loss of batch is the mean of, or let loss_fn return "
    "(sum of terms, number of terms)"
)
Tensors = dict[str, torch.Tensor]


def check_reduction(loss: TrainingLoss, num_parts: int) -> None:
    """ModelError where a batch has several parts and nobody knows how their losses add up."""
    if loss.reduction is Reduction.UNKNOWN and num_parts > 1:
        why = f"how they add up could not be found out: {loss.doubt}" if loss.doubt else (
            "what loss_fn returns of a part is neither a sum, nor a mean over sequences, nor a mean over labels that "
            "are not -100: how the parts add up is not known"
        )  # fmt: skip
        raise ModelError(
            f"a step computes the loss in {num_parts} parts, and {why}",
            hint=f"{SAY_HOW_PARTS_ADD_UP}; planner.parallelize sees that with labels among its inputs. What "
            "forward returns of a batch as a whole, as a balance loss, is another number in each part",
        )


@dataclass
class LossOfParts:
    """``loss`` over the parts of a step on this rank's place in ``mesh``."""

    loss: TrainingLoss
    mesh: DeviceMesh
    num_microbatches: int
    of_last_step: tuple[torch.Tensor, ...] = ()  # scaled, of each micro-batch
    _counts: list[torch.Tensor] = field(default_factory=list)  # of this step

    def scales(self, batch: Tensors) -> torch.Tensor:
        """What each micro-batch's loss is multiplied with: (num_microbatches,), on the CPU. Collective."""
        self._counts.clear()
        degree = place_of(self.mesh).num_parts
        weight = self.loss.weight
        if self.loss.reduction is Reduction.COUNTED:
            return torch.ones(self.num_microbatches)
        if weight is None:  # a sum, or the one part of a batch that is not cut
            return torch.full((self.num_microbatches,), float(degree))
        parts = {key: value.chunk(self.num_microbatches) for key, value in batch.items()}
        each = [weight({key: values[index] for key, values in parts.items()}) for index in range(self.num_microbatches)]
        device = next(iter(batch.values())).device
        weights = torch.stack([torch.as_tensor(w, dtype=torch.float64).to(device) for w in each])
        total = weights.sum()
        for axis in (*DATA_AXES, MeshAxis.CP.value):
            if self.mesh[axis].size() > 1:
                dist.all_reduce(total, group=self.mesh[axis].get_group())
        if not number_in(total) > 0:
            raise PlannerError(
                f"the global batch has nothing to learn: the weight of its loss is {float(total):g}",
                hint="check the labels: -100 is what is ignored",
            )
        shares = weights if self.loss.reduction is Reduction.MEAN else torch.ones_like(weights)
        return (shares * degree / total).float().cpu()

    def of_part(self, output: object, batch: Tensors) -> torch.Tensor:
        """The scaled loss of one micro-batch, as a local tensor in float32; ``batch`` has its scale."""
        scale = number_in(batch[SCALE_KEY])
        if scale == 0.0:  # a mean over nothing is not a number
            return _nothing(output)
        value = self.loss.function(output, {key: tensor for key, tensor in batch.items() if key != SCALE_KEY})
        if isinstance(value, tuple) != (self.loss.reduction is Reduction.COUNTED):
            raise ModelError("loss_fn returns a pair (sum, count) at one time and a number at another",
                             hint="let it always return the same")  # fmt: skip
        if isinstance(value, tuple):
            value, count = value
            number = count.detach() if isinstance(count, torch.Tensor) else torch.tensor(count)
            self._counts.append(_local(number).double())
        return _local(value).float() * scale

    def finish(self, losses: Sequence[torch.Tensor], parameters: Sequence[torch.nn.Parameter]) -> torch.Tensor:
        """The sum of this rank's scaled losses. Of counted ones first divides gradients by all counts. Collective."""
        device, self.of_last_step = device_of(self.mesh), tuple(losses)
        loss = torch.stack(list(losses)).sum() if losses else torch.zeros((), device=device)
        if self.loss.reduction is not Reduction.COUNTED:
            return loss
        count = torch.stack(self._counts).sum().to(device) if losses else loss.double()
        # Ranks of the last stage alone have counts, and those that share a batch (tp) the same ones.
        dist.all_reduce(count)
        copies = self.mesh[MeshAxis.TP.value].size()
        if not number_in(count) > 0:
            raise PlannerError("the global batch has nothing to learn: loss_fn counted no terms in it",
                               hint="check the labels")  # fmt: skip
        scale = place_of(self.mesh).num_parts * copies / number_in(count)
        for gradient in [parameter.grad for parameter in parameters if parameter.grad is not None]:
            gradient.mul_(scale)
        return loss * scale


def number_in(value: torch.Tensor) -> float:
    """What ``value`` (one number) holds; 1 where tensors have no values, as when a plan is only checked."""
    return 1.0 if isinstance(value, FakeTensor) else float(value)


def _nothing(output: object) -> torch.Tensor:
    """Zero, with gradients of zero: backward passes, and their collectives, run as for any other part."""
    never = torch.zeros((), dtype=torch.bool)
    tensors = [t for t in tensors_in(output) if t.requires_grad]
    return torch.stack([_local(t.where(never.to(t.device), torch.zeros_like(t)).float().sum()) for t in tensors]).sum()


def _local(value: torch.Tensor) -> torch.Tensor:
    if isinstance(value, DTensor):
        return redistribute(value, value.device_mesh, Replicate()).to_local()
    return value
