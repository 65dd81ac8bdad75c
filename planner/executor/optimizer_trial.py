"""Optimisers of a script's own: whether they make of parts of a model what they make of all of it. It is tried.

Most update each number, or each parameter, by itself. One that looks at all parameters at once, as LBFGS does, sees
those of its own rank where ranks hold others. One that looks at all numbers of a parameter, as Adafactor does, needs
rules of DTensor's for its operators where these are divided.
"""

from __future__ import annotations

import contextlib
import inspect
import weakref
from collections.abc import Sequence

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from planner.errors import PlanError
from planner.executor.parallelize import ParallelModel

NUM_STEPS = 2  # the second has the states that the first made
LEARNING_RATE = 0.1  # of the trial: a warm-up may begin with none
# Of what is changed: the same operators on the same numbers; and where they are divided, which Muon, say, multiplies in
# bfloat16: 2^-8, five times in a row.
_REL, _REL_DIVIDED = 1e-4, 0.05
_Division = tuple[DeviceMesh, tuple[Placement, ...]]


def try_optimizers(model: ParallelModel) -> None:
    """From now on each optimiser of parameters of ``model`` is tried before its first step. PlanError where it fails.

    Collective then over the ranks that divide parameters among them.
    """
    held, known = weakref.ref(model), weakref.WeakSet[Optimizer]()

    def before_step(optimizer: Optimizer, *_: object) -> None:
        now = held()
        if now is None or optimizer in known:
            return
        known.add(optimizer)
        own = {id(parameter) for parameter in now.parameters()}
        parameters = [p for group in optimizer.param_groups for p in group["params"] if id(p) in own]
        if parameters:
            check_optimizer(optimizer, parameters, now)

    weakref.finalize(model, register_optimizer_step_pre_hook(before_step).remove)


def check_optimizer(optimizer: Optimizer, parameters: Sequence[nn.Parameter], model: ParallelModel) -> None:
    """PlanError where what ``optimizer`` makes of ``parameters``, this rank's, is not what one process makes."""
    name, mesh = type(optimizer).__name__, model.plan.mesh
    apart = {"pp": mesh.pp, "ep": mesh.ep}
    where = ", ".join(f"{axis}={degree}" for axis, degree in apart.items() if degree > 1)
    if where and looks_at_all(optimizer):
        raise PlanError(
            f"{name} looks at all parameters at once, and under {where} no rank has all of them: of two parameters it "
            "makes together something else than of each alone",
            hint="use an optimiser that updates each parameter by itself, or plan with --pp 1 --ep 1",
        )
    for division in dict.fromkeys(_division(p) for p in parameters if isinstance(p, DTensor)):
        problem = None if division is None else problem_with_division(optimizer, division)
        if problem is not None:
            raise PlanError(
                f"{name} does not update parameters that are divided: {problem}",
                hint="plan with --zero 0 --tp 1 in fp32, or use an optimiser that looks at each number by itself, as "
                "AdamW",
            )


def looks_at_all(optimizer: Optimizer) -> bool:
    """Whether one like it makes of two parameters together something else than of each; False where none is made."""
    (one, other), gradients = _drawn(2, (4, 4)), _drawn(2, (4, 4), seed=1)
    with contextlib.suppress(Exception):  # whatever a user's class raises at parameters that are made up
        both = _updated(optimizer, [one, other], gradients)
        apart = [*_updated(optimizer, [one], gradients[:1]), *_updated(optimizer, [other], gradients[1:])]
        return not all(_same(*each, _REL) for each in zip(both, apart, (one, other), strict=True))
    return False


def problem_with_division(optimizer: Optimizer, division: _Division) -> str | None:
    """What one like it makes wrong of a parameter that is divided so; None: nothing, or none is made. Collective."""
    mesh, placements = division
    sizes = [4, 4]
    for axis, placement in enumerate(placements):
        if isinstance(placement, Shard) and placement.dim < len(sizes):
            sizes[placement.dim] *= mesh.size(axis)
    whole, gradient = (_drawn(1, sizes, seed=seed)[0].to(mesh.device_type) for seed in (0, 1))
    with contextlib.suppress(Exception):  # the same
        wholes = whole, gradient, *_updated(optimizer, [whole], [gradient])
        before, slope, expected = (distribute_tensor(w.clone(), mesh, placements, src_data_rank=None) for w in wholes)
        try:
            (found,) = _updated(optimizer, [before], [slope])
        except Exception as error:  # whatever torch or the class raises at DTensors
            return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        assert isinstance(found, DTensor)
        is_same = _same(found.to_local(), expected.to_local(), before.to_local(), _REL_DIVIDED)
        return None if is_same else "it makes something else of them than of whole ones"
    return None


def _division(parameter: DTensor) -> _Division | None:
    """None where a tensor that is made up is not divided like it, as what two axes split by turns."""
    is_plain = all(isinstance(p, Replicate) or (type(p) is Shard and p.dim < 2) for p in parameter.placements)
    return (parameter.device_mesh, parameter.placements) if is_plain else None


def _updated(
    optimizer: Optimizer, values: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    """What another optimiser of this kind and options makes of parameters with ``values``, given ``gradients``."""
    taken = inspect.signature(type(optimizer).__init__).parameters
    options = {key: value for key, value in optimizer.param_groups[0].items() if key in taken and key != "params"}
    if "lr" in options:
        options["lr"] = LEARNING_RATE
    parameters = [nn.Parameter(value.clone()) for value in values]

    def closure() -> float:
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient.clone()
        return 1.0

    with torch.random.fork_rng(devices=()):
        torch.manual_seed(0)
        made = type(optimizer)(parameters, **options)
        for _ in range(NUM_STEPS):
            closure()
            made.step(closure)  # pyright: ignore[reportCallIssue]
    return [parameter.detach() for parameter in parameters]


def _same(one: torch.Tensor, other: torch.Tensor, before: torch.Tensor, relative: float) -> bool:
    return float((one - other).norm()) <= relative * float((other - before).norm())


def _drawn(number: int, shape: Sequence[int], seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(*shape, generator=generator, device="cpu") for _ in range(number)]
