"""Tensor parallelism on any model: parameters are DTensors on the ``tp`` axis, and so are activations.

A DTensor keeps its global shape, so ``view(batch, sequence, heads, head_dim)`` in a user's code
still holds. Plain tensors that meet DTensors (token ids, masks, rotary tables) count as replicated.
Where a module's output is to be redistributed, a forward hook does it: that is where the
all-reduce, reduce-scatter and all-gather of tensor and sequence parallelism happen.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Generator, Mapping, Sequence

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, distribute_tensor
from torch.distributed.tensor import Partial as PartialPlacement
from torch.distributed.tensor import Replicate as ReplicatePlacement
from torch.distributed.tensor import Shard as ShardPlacement
from torch.distributed.tensor.experimental import implicit_replication
from torch.utils._pytree import tree_map_only

from costmodels.vocabulary.choices import Partial, Replicate, Shard, parse_placement
from planner.errors import PlanError
from planner.executor.divided_classes import register_divided_classes
from planner.plan.schema import ModulePlacement


def torch_placement(text: str) -> Placement:
    """A plan's placement as torch's."""
    match parse_placement(text):
        case Replicate():
            return ReplicatePlacement()
        case Shard(dim):
            return ShardPlacement(dim)
        case Partial():
            return PartialPlacement()


def apply_tensor_parallel(
    module: nn.Module, chosen: Mapping[str, Placement], entries: Sequence[ModulePlacement], tp_mesh: DeviceMesh
) -> None:
    """Replaces every parameter by a DTensor and hooks every output that ``entries`` redistribute.

    ``chosen`` are the ``parameter_placements`` of the whole model, of which ``module`` may be one
    pipeline stage. ``module`` holds the same values on every rank, so nothing is sent.
    """
    replaced: dict[nn.Parameter, nn.Parameter] = {}
    for prefix, owner in module.named_modules():
        for name, parameter in own_parameters(owner).items():
            if isinstance(parameter, DTensor):  # of experts, which are divided besides
                continue
            if parameter not in replaced:
                placement = chosen[f"{prefix}.{name}" if prefix else name]
                sharded = distribute_tensor(parameter.detach(), tp_mesh, [placement], src_data_rank=None)
                replaced[parameter] = nn.Parameter(sharded, requires_grad=parameter.requires_grad)
            owner.register_parameter(name, replaced[parameter])
    for entry in entries:
        if entry.output is not None:
            for _, target in _matching(module, entry.module):
                target.register_forward_hook(_RedistributeHook(tp_mesh, torch_placement(entry.output)))
    module.register_forward_hook(_WholeHook(tp_mesh))


def parameter_placements(module: nn.Module, entries: Sequence[ModulePlacement]) -> Mapping[str, Placement]:
    """Placement of every parameter, under each of its names; PlanError where two names disagree.

    A tied parameter is placed as any one of its names is. The rest is replicated.
    """
    chosen: dict[nn.Parameter, Placement] = {}
    for entry in entries:
        for fqn, target in _matching(module, entry.module):
            for name, parameter in own_parameters(target).items():
                if name not in entry.parameters:
                    continue
                placement = torch_placement(entry.parameters[name])
                if chosen.setdefault(parameter, placement) != placement:
                    raise PlanError(
                        f"{fqn}.{name} is placed as {placement}, but is tied to one placed as {chosen[parameter]}",
                        hint="give all names of one tensor the same placement",
                    )
    named = module.named_parameters(remove_duplicate=False)
    return {fqn: chosen.get(parameter, ReplicatePlacement()) for fqn, parameter in named}


def check_placements(module: nn.Module, placements: Sequence[ModulePlacement], tp: int) -> None:
    """PlanError that lists patterns without a module, unknown parameters and dims that tp does not divide."""
    problems = [problem for entry in placements for problem in _entry_problems(module, entry, tp)]
    if problems:
        raise PlanError(
            "placements.tp does not fit the model: " + "; ".join(problems),
            hint="search again for this model, or correct it",
        )


def _entry_problems(module: nn.Module, entry: ModulePlacement, tp: int) -> list[str]:
    matched = _matching(module, entry.module)
    problems = [] if matched else [f"no module matches {entry.module!r}"]
    for name, text in entry.parameters.items():
        placement = parse_placement(text)
        owners = [(fqn, own[name]) for fqn, target in matched if name in (own := own_parameters(target))]
        if matched and not owners:
            problems.append(f"{entry.module!r} has no parameter {name!r}")
        if isinstance(placement, Partial):
            problems.append(f"{entry.module}.{name} is placed as partial: parameters are sharded or replicated")
        if isinstance(placement, Shard) and placement.pieces > 1:
            problems.append(f"{entry.module}.{name} is split in {placement.pieces} pieces, which is not executed yet")
        elif isinstance(placement, Shard):
            problems += [
                f"{fqn}.{name} of shape {tuple(value.shape)} cannot be split {tp} ways along dim {placement.dim}"
                for fqn, value in owners
                if not _divides(tp, value.shape, placement.dim)
            ]
    return problems


def own_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that belong to ``module`` itself, tied or not."""
    return dict(module.named_parameters(recurse=False, remove_duplicate=False))


@contextlib.contextmanager
def tensor_parallel_context(enabled: bool) -> Generator[None]:
    """Where forward and backward run: plain tensors beside DTensors are taken as replicated."""
    if not enabled:
        yield
        return
    register_divided_classes()
    with implicit_replication():
        yield


def redistribute(tensor: DTensor, mesh: DeviceMesh, placement: Placement) -> DTensor:
    """``tensor`` at ``placement``; its gradient arrives whole or sharded, never as partial sums."""
    moved = _Redistribute.apply(tensor, mesh, placement)
    assert isinstance(moved, DTensor)
    return moved


class _RedistributeHook:
    """A forward hook that brings every DTensor of a module's output to one placement."""

    def __init__(self, mesh: DeviceMesh, placement: Placement) -> None:
        self._mesh = mesh
        self._placement = placement

    def __call__(self, module: nn.Module, arguments: object, output: object) -> object:
        return tree_map_only(DTensor, self._move, output)

    def _move(self, tensor: DTensor) -> torch.Tensor:
        return redistribute(tensor, self._mesh, self._placement)


class _Redistribute(torch.autograd.Function):
    """Redistribution whose gradient is never partial sums: they are reduced here, once.

    torch's own backward of Partial -> Replicate lets partial gradients pass. They would travel on
    through every residual connection and reach an embedding that cannot take them.
    """

    @staticmethod
    def forward(
        ctx: torch.autograd.function.FunctionCtx, tensor: DTensor, mesh: DeviceMesh, placement: Placement
    ) -> torch.Tensor:
        (before,) = tensor.placements
        ctx.gradient_placement = ReplicatePlacement() if before.is_partial() else before  # pyright: ignore[reportAttributeAccessIssue]
        return tensor.redistribute(mesh, [placement])

    @staticmethod
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: torch.autograd.function.FunctionCtx, gradient: DTensor
    ) -> tuple[torch.Tensor, None, None]:
        placement: Placement = ctx.gradient_placement  # pyright: ignore[reportAttributeAccessIssue]
        return gradient.redistribute(gradient.device_mesh, [placement]), None, None


class _WholeHook:
    """A forward hook that makes DTensors of plain tensors with gradients: what forward made and wrote DTensors to."""

    def __init__(self, mesh: DeviceMesh) -> None:
        self._mesh = mesh

    def __call__(self, module: nn.Module, arguments: object, output: object) -> object:
        return tree_map_only(torch.Tensor, self._whole, output)

    def _whole(self, tensor: torch.Tensor) -> torch.Tensor:
        if isinstance(tensor, DTensor) or not tensor.requires_grad:
            return tensor
        whole = _Whole.apply(tensor, self._mesh)
        assert isinstance(whole, DTensor)
        return whole


class _Whole(torch.autograd.Function):
    """A plain tensor, the same on every rank, as a DTensor; its gradient stays one, which parameters before it need."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, tensor: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
        return DTensor.from_local(tensor, mesh, [ReplicatePlacement()], run_check=False)

    @staticmethod
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: torch.autograd.function.FunctionCtx, gradient: DTensor
    ) -> tuple[torch.Tensor, None]:
        return gradient.redistribute(gradient.device_mesh, [ReplicatePlacement()]), None


def _matching(module: nn.Module, pattern: str) -> list[tuple[str, nn.Module]]:
    components = ("[^.]+" if component == "*" else re.escape(component) for component in pattern.split("."))
    expression = re.compile(r"\.".join(components))
    return [(fqn, target) for fqn, target in module.named_modules() if expression.fullmatch(fqn)]


def _divides(tp: int, shape: torch.Size, dim: int) -> bool:
    return dim < len(shape) and shape[dim] % tp == 0
