"""Expert parallelism on any model with grouped products: a rank holds some experts, and rows travel to theirs.

The plan names the parameters (experts, in, out). Each becomes a DTensor, divided by experts over the ranks of ``ep``,
whose FQN and global shape stay. A model runs its own router and sorts its own rows; the grouped products that it calls
are answered otherwise: rows are sent to the ranks of their experts before the first product of a layer and brought back
behind the last (``executor/expert_rows.py``). A parameter that is used in another way is refused.

The gradient of an expert is the sum over all rows that it saw, of whichever rank. It is averaged over the ranks that
hold the same expert, 1 / ep of those that data parallelism averages over, so it is divided by ``ep`` once more.
"""

# pyright: reportPrivateUsage=false
# FSDP takes a mesh for single parameters, but has no public name for it; nor has torch for leaving fake tensors.

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeGuard, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, HSDPMeshInfo, ShardPlacementResult
from torch.distributed.tensor import DTensor, Placement, Shard, distribute_tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.weak import WeakTensorKeyDictionary

from costmodels.vocabulary.mesh import MeshAxis, even_dim
from planner.errors import ModelError, PlanError
from planner.executor.expert_rows import Exchange, ExpertRows
from planner.executor.mesh import EP, EXPERT_SHARD, expert_mesh
from planner.executor.tensor_parallel import own_parameters
from planner.operators.registry import operator_called
from planner.plan.schema import Plan

Function = Callable[..., object]
_T = TypeVar("_T")
_By: TypeAlias = MutableMapping[torch.Tensor, tuple[int, _T]]  # by a tensor, as it was at a version
_GROUPED_PRODUCTS = operator_called("grouped_mm").names


@dataclass(frozen=True)
class Experts:
    """The experts' parameters of a model, by FQN, and the ranks over which they are divided."""

    names: frozenset[str]
    mesh: DeviceMesh  # ``expert_mesh``
    tensor_mesh: DeviceMesh | None  # of the other parameters, where tensor parallelism divides products

    @property
    def degree(self) -> int:
        """Ranks that divide the experts of a layer."""
        return self.mesh[EP].size()

    def mode(self) -> TorchFunctionMode:
        """Inside, grouped products reach the experts of other ranks. May be entered more than once."""
        return _Dispatched(self.mesh[EP], self.tensor_mesh)

    def shard(self, module: nn.Module, chosen: Mapping[str, Placement]) -> None:
        """Keeps this rank's experts of those in ``module``, which holds the same values on every rank.

        ``chosen``: placements on the tp axis, by FQN.
        """
        for prefix, owner in module.named_modules():
            for name, parameter in own_parameters(owner).items():
                fqn = f"{prefix}.{name}" if prefix else name
                if fqn in self.names:
                    mesh, placements = self.mesh[EP], [Shard(0)]
                    if self.tensor_mesh is not None:
                        mesh, placements = self.mesh[EP, MeshAxis.TP.value], [Shard(0), chosen[fqn]]
                    part = distribute_tensor(parameter.detach(), mesh, placements, src_data_rank=None)
                    owner.register_parameter(name, nn.Parameter(part, requires_grad=parameter.requires_grad))

    def placements(self) -> Callable[[nn.Parameter], ShardPlacementResult | None]:
        """For FSDP: over which ranks it shards an expert's parameter, and along which dim; None for all others."""
        info: FSDPMeshInfo
        if self.mesh[MeshAxis.DP_REPLICATE.value].size() > 1:
            both = self.mesh[MeshAxis.DP_REPLICATE.value, EXPERT_SHARD]
            info = HSDPMeshInfo(both, shard_mesh_dim=1, replicate_mesh_dim=0)
        else:
            info = FSDPMeshInfo(self.mesh[EXPERT_SHARD], shard_mesh_dim=0)

        def place(parameter: nn.Parameter) -> ShardPlacementResult | None:
            if not _is_divided(parameter):
                return None
            dim = even_dim(parameter.to_local().shape, info.shard_mesh_size)
            assert dim is not None
            return ShardPlacementResult(Shard(dim), info)

        return place

    def replicas(self, of_others: dist.ProcessGroup, parameter: nn.Parameter) -> dist.ProcessGroup:
        """The ranks that hold the same parameter under ZeRO stage 0; ``of_others``: that are no expert's."""
        return self.mesh[MeshAxis.DP_REPLICATE.value].get_group() if _is_divided(parameter) else of_others

    def average(self, parameters: Iterable[nn.Parameter]) -> None:
        """Makes of gradients that data parallelism has averaged those of one process."""
        for parameter in parameters:
            if parameter.grad is not None and _is_divided(parameter):
                parameter.grad.div_(self.degree)


def experts_of(plan: Plan, module: nn.Module, mesh: DeviceMesh) -> Experts | None:
    """Where experts are divided. PlanError where the plan's names do not fit ``module``. Collective over ``mesh``."""
    if plan.mesh.ep == 1:
        return None
    wider = expert_mesh(plan, mesh.device_type)
    names = _named(module, plan.placements.experts)
    _check(module, names, plan.mesh.ep, wider[EXPERT_SHARD].size() * plan.mesh.tp)
    return Experts(frozenset(names), wider, mesh[MeshAxis.TP.value] if plan.mesh.tp > 1 else None)


def _named(module: nn.Module, patterns: Sequence[str]) -> list[str]:
    """FQNs of parameters that ``patterns`` match; PlanError for a pattern that matches none."""
    known = [fqn for fqn, _ in module.named_parameters(remove_duplicate=False)]
    found: list[str] = []
    for pattern in patterns:
        expression = r"\.".join("[^.]+" if part == "*" else re.escape(part) for part in pattern.split("."))
        matched = [fqn for fqn in known if re.fullmatch(expression, fqn)]
        if not matched:
            raise PlanError(f"placements.experts: no parameter matches {pattern!r}",
                            hint="search again for this model, or correct it")  # fmt: skip
        found += matched
    return found


def _check(module: nn.Module, names: Sequence[str], ep: int, num_parts: int) -> None:
    """PlanError where a parameter cannot be divided, or ranks of the same experts cannot part it evenly."""
    owners: dict[nn.Parameter, int] = {}
    parameters = dict(module.named_parameters(remove_duplicate=False))
    for parameter in parameters.values():
        owners[parameter] = owners.get(parameter, 0) + 1
    problems: list[str] = []
    for fqn in names:
        shape = tuple(parameters[fqn].shape)
        if len(shape) != 3 or shape[0] % ep:
            problems.append(f"{fqn} of shape {shape} does not hold a matrix for each of a multiple of {ep} experts")
        elif even_dim((shape[0] // ep, *shape[1:]), num_parts) is None:
            problems.append(f"{fqn} of shape {shape} has no dim that {num_parts} ranks of the same experts divide")
        if owners[parameters[fqn]] > 1:
            problems.append(f"{fqn} is tied to another parameter")
    if problems:
        raise PlanError(f"experts cannot be divided over ep = {ep}: {'; '.join(problems)}",
                        hint="search again for this model, or with --ep 1")  # fmt: skip


def _is_divided(value: object) -> TypeGuard[DTensor]:
    """Whether ``value`` is an expert's parameter, or a view of it."""
    return isinstance(value, DTensor) and EP in (value.device_mesh.mesh_dim_names or ())


class _Dispatched(TorchFunctionMode):
    """Answers grouped products with experts that are divided over ``mesh``, and their products over another."""

    def __init__(self, mesh: DeviceMesh, tensor_mesh: DeviceMesh | None) -> None:
        super().__init__()
        self._group, self._tensor_mesh = mesh.get_group(), tensor_mesh
        self._exchanges: _By[Exchange] = WeakTensorKeyDictionary()  # by the ends of the rows of each expert
        self._sent: _By[tuple[Exchange, torch.Tensor]] = WeakTensorKeyDictionary()  # by the rows of several products

    def __torch_function__(
        self, func: Function, types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> object:
        kwargs = kwargs or {}
        if not any(_is_divided(leaf) for leaf in tree_leaves((args, kwargs))):
            return func(*args, **kwargs)
        name = getattr(func, "__name__", "")
        ends = kwargs.get("offs", next(iter(args[2:]), None))
        if name in _GROUPED_PRODUCTS and isinstance(ends, torch.Tensor) and _is_divided(args[1]):
            return self._product(func, args, kwargs, ends)
        if any(isinstance(leaf, torch.Tensor) and not _is_divided(leaf) for leaf in tree_leaves((args, kwargs))):
            raise ModelError(
                f"under expert parallelism the model cannot be run: it uses experts' parameters in {name}, and only "
                "grouped products can reach the experts of other ranks",
                hint="use torch.nn.functional.grouped_mm on rows sorted by expert, or plan with --ep 1",
            )
        return func(*args, **kwargs)

    def _product(self, func: Function, args: tuple[Any, ...], kwargs: dict[str, Any], ends: torch.Tensor) -> ExpertRows:
        rows, weights = args[:2]
        exchange = self._exchange(ends, len(rows))
        own = weights.to_local()
        if self._tensor_mesh is not None:
            own = DTensor.from_local(own, self._tensor_mesh, weights.placements[1:], run_check=False)
        there = {id(rows): self._there(rows, exchange), id(weights): own, id(ends): exchange.ends}
        args, kwargs = tree_map(lambda leaf: there.get(id(leaf), leaf), (args, kwargs))
        local = func(*args, **kwargs)
        assert isinstance(local, torch.Tensor)
        return ExpertRows(local, exchange)

    def _exchange(self, ends: torch.Tensor, num_rows: int) -> Exchange:
        """That of a layer, of which all products have the same ``ends``."""
        version, found = self._exchanges.get(ends) or (-1, None)
        if found is None or (version, found.num_rows) != (ends._version, num_rows):
            found = Exchange(ends, num_rows, self._group)
            self._exchanges[ends] = ends._version, found
        return found

    def _there(self, rows: torch.Tensor, exchange: Exchange) -> torch.Tensor:
        """What this rank's experts take in of all ranks' ``rows``."""
        if isinstance(rows, ExpertRows):
            if rows.is_away and rows.exchange is exchange:
                return rows.local
            rows = rows.home()
        version, sent = self._sent.get(rows) or (-1, None)
        if sent is None or version != rows._version or sent[0] is not exchange:
            sent = exchange, exchange.dispatched(rows)
            self._sent[rows] = rows._version, sent
        return sent[1]
