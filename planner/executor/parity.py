"""One step of SGD under a plan against one process: gradient by gradient, and the parameters after it, by FQN.

The other side is plain autograd over the whole batch with the model's own loss; nothing of the executor has a part in
it. Both sides compute in float32, with modules in evaluation mode so that nothing is drawn at random.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from costmodels.vocabulary.choices import Offload, Optimizer, Precision
from planner.errors import ModelError, PlannerError
from planner.executor.build import build_model, example_batch, loaded_model
from planner.executor.data import TokenData, open_data
from planner.executor.mesh import build_mesh, check_world_size
from planner.executor.optimizer import build_optimizer
from planner.executor.options import ParityOptions
from planner.executor.parallelize import ParallelModel
from planner.executor.ranks import process_group, quiet_torch
from planner.executor.requirements import check_labels, check_trainable
from planner.executor.start import Start, started
from planner.executor.step import local_batch, train_step
from planner.model_file import LoadedModel
from planner.models.inputs import LABELS, call_model
from planner.plan.schema import Plan

LEARNING_RATE = 0.1
FLOOR = 1e-4  # of the norm of all gradients: what is smaller than this share of it is held against this share
State = dict[str, torch.Tensor]


@dataclass(frozen=True)
class ParityRow:
    """One parameter. Errors are distances of the worst copy that any rank holds, over the norm of one process's own."""

    fqn: str
    gradient_norm: float
    gradient_error: float
    parameter_error: float  # after the step
    num_copies: int  # ranks that hold some of it; 0: nobody has it


def compare(plan: Plan, options: ParityOptions) -> dict[str, object]:
    """Rows of every parameter, and both losses. Runs on each rank of the plan; every rank gets the same."""
    with quiet_torch(), process_group(options.timeout_s, offloads=plan.offload is not Offload.NONE) as device:
        return compared(plan, options, device)


def compared(plan: Plan, options: ParityOptions, device: torch.device) -> dict[str, object]:
    """As ``compare``, among ranks that have found each other."""
    asked, training = plan, plan.training.model_copy(update={"precision": Precision.FP32, "optimizer": Optimizer.SGD})
    plan = plan.model_copy(update={"training": training})
    check_world_size(plan)
    loaded, mesh = loaded_model(plan), build_mesh(plan, device.type)
    data = open_data(plan, options.data, loaded.vocab_size, options.seed, options.data_dtype)
    reference = _reference(loaded, options.seed, asked) if dist.get_rank() == 0 else None
    shapes = _shapes(reference)
    expected_loss, gradients, parameters = 0.0, dict[str, torch.Tensor](), dict[str, torch.Tensor]()
    if reference is not None:
        expected_loss, gradients, parameters = _one_process(reference, loaded, plan, data)
    model = started(loaded, plan, mesh, Start(options.seed, is_evaluated=True))
    optimizer = build_optimizer(model.parameters(), Optimizer.SGD, LEARNING_RATE)
    found = float(train_step(model, optimizer, local_batch(model, data, 0, mesh), mesh))
    rows = _rows(model, shapes, gradients, parameters)
    return {"loss": found, "expected_loss": expected_loss, "rows": [asdict(row) for row in rows]}


def _reference(loaded: LoadedModel, seed: int, plan: Plan) -> nn.Module:
    """One process's model, in evaluation mode. PlanError or ModelError where ``plan`` cannot train it as it is."""
    module = build_model(loaded, seed)
    check_trainable(module, example_batch(loaded, plan, module), plan)
    return module.eval()


def _shapes(reference: nn.Module | None) -> dict[str, torch.Size]:
    """Of each trainable parameter of rank 0's ``reference``, which every rank gets."""
    named = () if reference is None else reference.named_parameters(remove_duplicate=False)
    box = [{fqn: parameter.shape for fqn, parameter in named if parameter.requires_grad}]
    dist.broadcast_object_list(box)
    return box[0]


def _one_process(module: nn.Module, loaded: LoadedModel, plan: Plan, data: TokenData) -> tuple[float, State, State]:
    """Loss, gradients and parameters after one step on the whole batch, on the CPU."""
    tokens, labels = data.global_batch(0, plan.training.global_batch_size)
    inputs = {name: labels if name == LABELS else tokens for name in example_batch(loaded, plan, module)}
    check_labels(module, inputs)
    before = torch.get_rng_state()
    try:
        loss: object = loaded.loss_fn(call_model(module, inputs), {**inputs, "labels": labels})
        if isinstance(loss, tuple):  # the sum of terms and their number
            loss = loss[0] / loss[1]
        assert isinstance(loss, torch.Tensor)
        loss.backward()
    except PlannerError:
        raise
    except Exception as error:  # whatever the user's code raises
        raise ModelError(
            f"the model does not train in one process: {type(error).__name__}: {error}",
            hint="correct the model; its example_inputs say what it takes",
        ) from error
    if not torch.equal(torch.get_rng_state(), before):
        raise ModelError(
            f"{loaded.source.name} draws random numbers in evaluation mode too: no two of its steps are alike",
            hint="let it draw them where self.training is true",
        )
    named = dict(module.named_parameters(remove_duplicate=False))
    gradients = {fqn: torch.zeros_like(p) if p.grad is None else p.grad for fqn, p in named.items()}
    torch.optim.SGD(module.parameters(), lr=LEARNING_RATE).step()
    return float(loss.detach()), gradients, {fqn: p.detach() for fqn, p in named.items()}


def _rows(model: ParallelModel, shapes: dict[str, torch.Size], gradients: State, parameters: State) -> list[ParityRow]:
    """Rank 0 sends what is right, one parameter after the other; those who hold it compare."""
    device = model.parameters()[0].device
    held: dict[str, list[nn.Parameter]] = {}
    for root in model.roots:
        for fqn, parameter in root.named_parameters(remove_duplicate=False):
            held.setdefault(fqn, []).append(parameter)
    norms = torch.zeros(len(shapes), dtype=torch.float64, device=device)
    errors = torch.zeros(2, len(shapes), dtype=torch.float64, device=device)
    copies = torch.zeros(len(shapes), dtype=torch.int64, device=device)
    sizes = torch.zeros(len(shapes), dtype=torch.float64, device=device)
    for index, (fqn, shape) in enumerate(shapes.items()):
        gradient, value = (
            state[fqn].to(device).contiguous() if state else torch.empty(shape, device=device)
            for state in (gradients, parameters)
        )
        for tensor in (gradient, value):
            dist.broadcast(tensor, src=0)
        norms[index], sizes[index] = gradient.double().norm(), value.double().norm()
        for parameter in held.get(fqn, ()):
            own = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            for row, (mine, right) in enumerate(((own, gradient), (parameter.detach(), value))):
                errors[row, index] = max(errors[row, index], (_whole(mine) - right).double().norm())
            copies[index] += 1
    dist.all_reduce(errors, dist.ReduceOp.MAX)
    dist.all_reduce(copies)
    floor = FLOOR * norms.norm()
    relative = errors / torch.stack([norms.clamp(min=floor), sizes.clamp(min=LEARNING_RATE * floor)])
    return [
        ParityRow(fqn, float(norms[i]), float(relative[0, i]), float(relative[1, i]), int(copies[i]))
        for i, fqn in enumerate(shapes)
    ]


def _whole(value: torch.Tensor) -> torch.Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value
