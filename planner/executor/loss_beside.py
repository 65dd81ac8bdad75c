"""What a loss reads besides the outputs and the batch that it is given, and where it is not there, or another number.

A function that was made beside the model may look into it: at parameters, of which it penalises the size, or at what
forward left in an attribute, such as a router's balance. Ranks of a pipeline have those of their own stages alone, and
of a part of a batch what forward leaves is another number than of the whole. Gradients of parameters that are none of
the model's are nobody's to average.
"""

# pyright: reportPrivateUsage=false

from __future__ import annotations

import contextlib
import math
from collections.abc import Generator, Mapping

import torch
from torch import nn

from planner.errors import ModelError
from planner.executor.loss_note import num_parts_of
from planner.executor.outputs import Attribute
from planner.executor.stage_trace import CPU, Inputs, map_leaves
from planner.models.loss import Beside, TrainingLoss
from planner.plan.schema import Plan

NUM_NAMED = 3  # in one message: enough to see which


def beside_of(
    loss: TrainingLoss, module: nn.Module, given: tuple[object, Inputs], left: Mapping[Attribute, object]
) -> Beside | None:
    """What ``loss`` reads besides what it is ``given``, outputs without a gradient and a batch; None: it raises.

    ``left``: what a copy of ``module`` left in its attributes, which are filled with other numbers to see.
    """
    plain, values = _value(loss, given), _drawn(left)
    with _assigned(module, values):
        changed = _value(loss, given)
    if changed is None:
        return None if plain is None else _of_graph(plain, module)
    if plain is not None and _same(plain, _value(loss, given)) and _same(plain, changed):
        return _of_graph(plain, module)
    read: list[str] = []
    for each in values:
        with _assigned(module, {other: value for other, value in values.items() if other != each}):
            found = _value(loss, given)
        if found is None or not _same(found, changed):
            read.append(".".join(each).strip("."))
    of_graph = _of_graph(changed, module)
    return Beside(tuple(read), of_graph.parameters, of_graph.num_own)


def _value(loss: TrainingLoss, given: tuple[object, Inputs]) -> torch.Tensor | None:
    with contextlib.suppress(Exception), torch.random.fork_rng(devices=()):  # whatever it raises at what is made up
        torch.manual_seed(0)  # one that draws is to draw the same
        found = loss.function(*given)
        value = found[0] if isinstance(found, tuple) else found
        return value if math.isfinite(float(value.detach())) else None
    return None


def _same(one: torch.Tensor, other: torch.Tensor | None) -> bool:
    return other is not None and float(one.detach()) == float(other.detach())


def _drawn(left: Mapping[Attribute, object]) -> dict[Attribute, object]:
    """``left`` with random numbers in place of those in its tensors."""
    generator = torch.Generator().manual_seed(1)

    def drawn(leaf: object) -> object:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        if not leaf.is_floating_point():
            return torch.zeros(leaf.shape, dtype=leaf.dtype, device=CPU)
        return torch.rand(leaf.shape, generator=generator, device=CPU, dtype=leaf.dtype)

    return {each: map_leaves(drawn, value) for each, value in left.items()}


@contextlib.contextmanager
def _assigned(module: nn.Module, values: Mapping[Attribute, object]) -> Generator[None]:
    """Attributes of ``module`` have these ``values`` meanwhile."""
    modules, missing = dict(module.named_modules()), object()
    before = {each: vars(modules[each.module]).get(each.name, missing) for each in values}
    try:
        for each, value in values.items():
            vars(modules[each.module])[each.name] = value
        yield
    finally:
        for each, value in before.items():
            if value is missing:
                vars(modules[each.module]).pop(each.name, None)
            else:
                vars(modules[each.module])[each.name] = value


def _of_graph(value: torch.Tensor, module: nn.Module) -> Beside:
    """The parameters that ``value`` has gradients for."""
    names = {id(parameter): fqn for fqn, parameter in module.named_parameters()}
    open_nodes, seen, variables = [value.grad_fn], set[object](), dict[int, object]()
    while open_nodes:
        node = open_nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        variable = getattr(node, "variable", None)
        if variable is not None:
            variables[id(variable)] = variable
        open_nodes += [following for following, _ in node.next_functions]
    parameters = tuple(names[each] for each in variables if each in names)
    return Beside((), parameters, len(variables) - len(parameters))


def check_beside(loss: TrainingLoss, plan: Plan) -> None:
    """ModelError where under ``plan`` what ``loss`` reads beside its arguments is not that of one process."""
    read, mesh = loss.beside, plan.mesh
    shape = mesh.shape()
    degrees = {"dp": shape.dp, "cp": mesh.cp, "pp": mesh.pp}
    where = ", ".join(f"{name}={degree}" for name, degree in degrees.items() if degree > 1)
    if read.left and (mesh.pp > 1 or num_parts_of(plan) > 1):
        raise ModelError(
            f"loss_fn reads what forward leaves in the model, {_some(read.left)}: "
            + ("under a pipeline ranks have that of their own stages alone" if mesh.pp > 1 else
               f"of each of the {num_parts_of(plan)} parts of a step it is another number than of the whole batch"),
            hint="let forward return it, and loss_fn(output, batch) take it from there, of each sample; what is of a "
            "whole batch alone is trained in one part, on one stage",
        )  # fmt: skip
    is_divided = "a pipeline" if mesh.pp > 1 else "ZeRO 3" if plan.zero_stage == 3 else "ep" if mesh.ep > 1 else ""
    if read.parameters and is_divided:
        raise ModelError(
            f"loss_fn reads parameters of the model, {_some(read.parameters)}, and under {is_divided} no rank has all "
            "of them",
            hint="plan with --pp 1, --zero 2 at most and --ep 1, or penalise large parameters by --weight-decay",
        )
    if read.num_own and where:
        raise ModelError(
            f"loss_fn has {read.num_own} trained parameters that are none of the model's: under {where} nobody "
            "averages their gradients",
            hint="make them parameters of the model, whose forward returns them or what they are used for",
        )


def _some(names: tuple[str, ...]) -> str:
    more = f" and {len(names) - NUM_NAMED} more" if len(names) > NUM_NAMED else ""
    return f"{', '.join(names[:NUM_NAMED])}{more}"
