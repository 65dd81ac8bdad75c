"""The module that one pipeline stage runs: the user's own model with the other stages' modules left out.

Its root is the user's root, so every FQN is the original one; its forward replays the stage's
calls. Around it, ``StageModule`` turns what is received and sent between local tensors and DTensors
and computes the loss on the last stage.
"""

# pyright: reportPrivateUsage=false
# torch has no public name for whether a tensor is a view.

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from planner.errors import ModelError
from planner.executor.data_parallel import DataParallel
from planner.executor.glue import Writing
from planner.executor.stage_split import StageProgram
from planner.executor.stage_trace import (
    ByMode,
    Call,
    InputSlot,
    Slot,
    StateSlot,
    TensorMeta,
    inside,
    map_leaves,
    tensors_in,
)
from planner.executor.tensor_parallel import redistribute

Tensors = dict[str, torch.Tensor]


def stage_root(module: nn.Module, program: StageProgram, device: torch.device) -> nn.Module:
    """``module`` with only the modules and parameters of ``program``; modules are shared, not copied."""
    root = _pruned(module, "", program)
    root.forward = _replayed(root, program, device)
    return root


def _pruned(module: nn.Module, prefix: str, program: StageProgram) -> nn.Module:
    shell = copy.copy(module)
    # nn.Module has no public way to copy one without what it holds. Hooks above all must be the shell's own: several
    # stages of a rank are shells of one module, and what FSDP hooks to one must not run, and reshard, for another.
    # The recording has what the user hooked to its forward pass.
    empty = {name: value for name, value in vars(nn.Module()).items() if isinstance(value, dict | set)}
    state: dict[str, Any] = {
        name: value if name.startswith("_forward") else copy.copy(vars(module)[name]) for name, value in empty.items()
    }
    state |= {"_parameters": {}, "_buffers": {}, "_modules": {}}
    for kind in ("_parameters", "_buffers"):
        held: dict[str, object] = getattr(module, kind)
        state[kind] = {name: value for name, value in held.items() if prefix + name in program.states}
    wanted = (*program.modules, *program.states)
    for name, child in module.named_children():
        fqn = prefix + name
        if fqn in program.modules:
            state["_modules"][name] = child
        elif any(inside(other, fqn) for other in wanted):
            state["_modules"][name] = _pruned(child, fqn + ".", program)
    shell.__dict__.update(state)
    return shell


def _replayed(root: nn.Module, program: StageProgram, device: torch.device) -> Callable[..., object]:
    written = {slot for call in program.calls if isinstance(call.function, Writing) for slot in call.operands}
    written &= set(program.inputs)

    def forward(received: Sequence[torch.Tensor], inputs: Tensors) -> object:
        values: dict[Slot, torch.Tensor] = dict(zip(program.inputs, received, strict=True))
        for slot in written:  # autograd lets no leaf be written into
            values[slot] = values[slot].clone()

        def decode(leaf: object) -> object:
            if isinstance(leaf, ByMode):
                leaf = leaf.training if root.training else leaf.evaluated
            return values[leaf] if isinstance(leaf, Slot) else _known(leaf, inputs, root, device)

        with device:
            for call, released in zip(program.calls, program.released, strict=True):
                result = _run(root, call, map_leaves(decode, call.args), map_leaves(decode, call.kwargs))
                values.update(zip(call.results, tensors_in(result), strict=True))
                for slot in released:
                    values.pop(slot, None)
        if program.result is not None:
            return map_leaves(decode, program.result)
        return tuple(values[slot] for slot in program.outputs)

    return forward


def _known(leaf: object, inputs: Tensors, root: nn.Module, device: torch.device) -> object:
    """What a leaf that no call computed stands for."""
    match leaf:
        case InputSlot(key):
            return inputs[key]
        case StateSlot(fqn):
            owner, _, name = fqn.rpartition(".")
            return getattr(root.get_submodule(owner), name)
        case torch.device(type="meta"):
            return device
        case _:
            return leaf


def _run(root: nn.Module, call: Call, args: object, kwargs: object) -> object:
    assert isinstance(args, tuple)
    assert isinstance(kwargs, dict)
    function = root.get_submodule(call.module) if call.function is None else call.function
    with torch.set_grad_enabled(call.grad_enabled and torch.is_grad_enabled()):
        return function(*args, **kwargs)


class _Beside(torch.autograd.Function):
    """The first operand, recorded as following from all: the others get no gradient by it."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, *received: torch.Tensor) -> torch.Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.num_received = len(received)
        return value.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return gradient, *(None,) * ctx.num_received


def _follows(value: torch.Tensor, received: Sequence[torch.Tensor]) -> bool:
    """Whether a gradient of ``value`` comes to one of ``received``."""
    wanted = {id(tensor) for tensor in received}
    open_nodes, seen = [value.grad_fn], set[object]()
    while open_nodes:
        node = open_nodes.pop()
        if node is None or node in seen:
            continue
        if id(getattr(node, "variable", None)) in wanted:
            return True
        seen.add(node)
        open_nodes += [following for following, _ in node.next_functions]
    return False


class StageModule(nn.Module):
    """One stage, or the whole model: local tensors in, local tensors or the loss out."""

    def __init__(
        self,
        data: DataParallel,
        run: Callable[[Sequence[torch.Tensor], Tensors], object],
        metas: tuple[tuple[TensorMeta, ...], tuple[TensorMeta, ...]],
        boundary: tuple[DeviceMesh | None, Placement],
        loss: Callable[[object, Tensors], torch.Tensor] | None,
    ) -> None:
        super().__init__()
        self.data, self.root = data, data.root
        self._run = run
        self.input_metas, self.output_metas = metas
        self._tp_mesh, self._placement = boundary
        self._loss = loss
        self._alone: list[bool] | None = None  # of what is sent; known from the first pass on

    def forward(self, *received: torch.Tensor, **batch: torch.Tensor) -> torch.Tensor | tuple[torch.Tensor, ...]:
        """What the next stage receives, or on the last stage the loss."""
        inputs = [self._receive(value, meta) for value, meta in zip(received, self.input_metas, strict=True)]
        output = self._run(inputs, batch)
        if self._loss is not None:
            return self._loss(output, batch)
        assert isinstance(output, tuple)
        sent = [self._send(value, meta) for value, meta in zip(output, self.output_metas, strict=True)]
        return self._beside(sent, [value for value in received if value.requires_grad])

    def _beside(self, sent: list[torch.Tensor], received: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """``sent``, where what follows from nothing that was received is made to look as if it did.

        Half of a split backward pass starts where paths from parameters meet those from what was received (``torch/
        distributed/pipelining/_backward.py``): what of a gradient comes to a parameter by no such place is lost.
        """
        if self._alone is None and received and torch.is_grad_enabled():
            self._alone = [value.requires_grad and not _follows(value, received) for value in sent]
        alone = self._alone if received and self._alone is not None else [False] * len(sent)
        return tuple(
            _Beside.apply(value, *received) if is_alone else value  # pyright: ignore[reportArgumentType]
            for value, is_alone in zip(sent, alone, strict=True)
        )

    def local_meta(self, meta: TensorMeta) -> TensorMeta:
        """``meta`` of the part that one tensor-parallel rank sends or receives."""
        placement = self._placement_of(meta)
        if self._tp_mesh is None or not isinstance(placement, Shard):
            return meta
        shape = list(meta.shape)
        shape[placement.dim] //= self._tp_mesh.size()
        return TensorMeta(tuple(shape), meta.dtype, meta.requires_grad)

    def _placement_of(self, meta: TensorMeta) -> Placement:
        """The plan's placement where the tensor can take it."""
        placement, mesh = self._placement, self._tp_mesh
        if mesh is None or not isinstance(placement, Shard) or len(meta.shape) <= placement.dim:
            return Replicate()
        return placement if meta.shape[placement.dim] % mesh.size() == 0 else Replicate()

    def _receive(self, value: torch.Tensor, meta: TensorMeta) -> torch.Tensor:
        if self._tp_mesh is None or not meta.requires_grad:
            return value
        return DTensor.from_local(value, self._tp_mesh, [self._placement_of(meta)], run_check=False)

    def _send(self, value: torch.Tensor, meta: TensorMeta) -> torch.Tensor:
        if value.requires_grad and not meta.requires_grad:
            raise ModelError(
                "a pipeline stage sends what needs a gradient now and needed none when the model was split: all before "
                "it was frozen then",
                hint="split the model anew once that is unfrozen, or plan with pp = 1",
            )
        value = value.to(meta.dtype)
        if isinstance(value, DTensor):
            assert self._tp_mesh is not None
            placement = self._placement_of(meta) if meta.requires_grad else Replicate()
            value = redistribute(value, self._tp_mesh, placement).to_local()
        # torch cuts what is sent off its graph in place, where a schedule splits backward passes: no view may be sent.
        # And messages lie in memory in their order, which a plain copy of a transposed view would not.
        return value.clone(memory_format=torch.contiguous_format) if value._is_view() else value.contiguous()
