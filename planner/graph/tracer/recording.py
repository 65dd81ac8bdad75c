"""Records the operators of one training step while its modules really run, on tensors without values.

The recorder stands where torch.export's does, above autograd, so that linear, norms, attention and
cross entropy stay whole; but it only watches. Whatever Python a model runs is run, not traced:
no rule of torch.export about state, containers, hooks or autograd functions applies.
"""

# pyright: reportPrivateUsage=false
# torch has no public name for an operator overload, its schema, the identity of a storage, or the stack of modes
# above autograd, where SchemaCheckMode is the one kind of mode that may stand alone.

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Generator, Mapping
from typing import Protocol

import torch
from torch import fx, nn
from torch._C._functorch import is_functorch_wrapped_tensor
from torch._dispatch.python import enable_python_dispatcher, no_python_dispatcher
from torch._export.utils import _compiling_state_context
from torch._ops import OpOverload
from torch._subclasses.schema_check_mode import SchemaCheckMode
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from planner.graph.tracer.as_trained import as_trained
from planner.graph.tracer.flex_attention import on_any_device, register_flex_attention
from planner.graph.tracer.frames import user_frame
from planner.graph.tracer.fx_reading import asks_for_value, operator_behind, storage_of
from planner.graph.tracer.program import GRAD_ENABLED, MODEL, Program
from planner.graph.tracer.recurrent import OVERLOADS, run_one_step
from planner.graph.tracer.stand_ins import Batch, TrainingStep


class Runner(Protocol):
    """Runs one operator on stand-ins; may answer what only values could."""

    def __call__(self, overload: OpOverload, args: tuple[object, ...], kwargs: Mapping[str, object]) -> object:
        """The operator's result."""
        ...


def run_plainly(overload: OpOverload, args: tuple[object, ...], kwargs: Mapping[str, object]) -> object:
    """Runs ``overload`` as it is."""
    return overload(*args, **kwargs)


def record_step(step: TrainingStep, batch: Batch, run: Runner = run_plainly) -> Program:
    """Runs ``step`` on ``batch`` and records its operators; raises whatever the model raises."""
    register_flex_attention(_Recorder)
    recorder = _Recorder(step, batch, run)
    with (
        on_any_device(),
        torch.compiler.set_stance("force_eager"),
        _compiling_state_context(),
        as_trained(),
        _modules_watched(step, recorder),
        enable_python_dispatcher(),
        recorder,
    ):
        step(batch)
    return recorder.program()


class _Recorder(SchemaCheckMode):
    """Appends a node for every operator that returns tensors."""

    def __init__(self, step: TrainingStep, batch: Batch, run: Runner) -> None:
        super().__init__()
        self.__dict__["_dispatch_key"] = torch._C.DispatchKey.PreDispatch
        self.modules: list[str] = []  # that run at the moment, outermost first
        self._run = run
        self._graph = fx.Graph()
        self._known: dict[int, fx.Node] = {}  # by id of the tensor; the nodes keep the tensors alive
        self._last_of_storage: dict[int, fx.Node] = {}
        self._parameters: dict[str, str] = {}
        for fqn, parameter in step.model.named_parameters():
            self._parameters[self._placeholder(parameter).name] = fqn
        self._inputs = frozenset(self._placeholder(tensor).name for tensor in batch.values())

    def __torch_dispatch__(
        self,
        func: OpOverload,
        types: object,
        args: tuple[object, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        """Runs an operator and appends it."""
        kwargs = kwargs or {}
        if any(is_functorch_wrapped_tensor(leaf) for leaf in tree_leaves((args, kwargs)) if _is_tensor(leaf)):
            with _Below(self.run):  # under vmap or grad: what is recorded is what they make of it
                return func(*args, **kwargs)
        return self.run(func, args, kwargs)

    def run(self, func: OpOverload, args: tuple[object, ...], kwargs: Mapping[str, object]) -> object:
        """Runs ``func`` and appends it; what it calls in turn is not watched, and need not go by way of Python."""
        with no_python_dispatcher():
            result = self._result(func, args, kwargs)
        passes_through = not func._schema.is_mutable and id(result) in self._known
        asks_for_values = asks_for_value(operator_behind(func))
        if not passes_through and (asks_for_values or any(map(_is_tensor, tree_leaves(result)))):
            self._append(func, args, kwargs, result)
        return result

    def _result(self, func: OpOverload, args: tuple[object, ...], kwargs: Mapping[str, object]) -> object:
        if func not in OVERLOADS:
            return self._run(func, args, kwargs)
        return run_one_step(lambda *args, **kwargs: self._run(func, args, kwargs), args, kwargs)

    def program(self) -> Program:
        """What was recorded."""
        return Program(self._graph, nn.Module(), self._parameters, self._inputs)

    def _append(
        self, overload: OpOverload, args: tuple[object, ...], kwargs: Mapping[str, object], result: object
    ) -> None:
        named = (tree_map(self._named, args), tree_map(self._named, dict(kwargs)))
        meta = self._place()
        node = self._add(overload, named, result, meta)
        if isinstance(result, torch.Tensor):
            self._know(result, node)
        elif isinstance(result, list | tuple):
            for index, element in enumerate(result):
                if isinstance(element, torch.Tensor):
                    self._know(element, self._add(operator.getitem, ((node, index), {}), element, meta))

    def _add(
        self, target: Callable[..., object], named: tuple[object, object], value: object, meta: dict[str, object]
    ) -> fx.Node:
        args, kwargs = named
        assert isinstance(args, tuple)
        assert isinstance(kwargs, dict)
        node = self._graph.call_function(target, args, kwargs)
        node.meta.update(meta, val=value)
        return node

    def _named(self, leaf: object) -> object:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        known = self._known.get(id(leaf))
        return known if known is not None else self._unseen(leaf)

    def _unseen(self, tensor: torch.Tensor) -> fx.Node:
        """A tensor that no operator returned: another view of known memory (``x.data``), else a constant."""
        origin = self._last_of_storage.get(storage_of(tensor))
        if origin is None:
            return self._placeholder(tensor)
        same = torch.ops.aten.alias.default if tensor.requires_grad else torch.ops.aten.detach.default
        node = self._add(same, ((origin,), {}), tensor, self._place())
        self._know(tensor, node)
        return node

    def _placeholder(self, tensor: torch.Tensor) -> fx.Node:
        node = self._graph.placeholder(f"tensor_{len(self._known)}")
        node.meta["val"] = tensor
        self._know(tensor, node)
        return node

    def _know(self, tensor: torch.Tensor, node: fx.Node) -> None:
        self._known[id(tensor)] = node
        self._last_of_storage[storage_of(tensor)] = node

    def _place(self) -> dict[str, object]:
        """Where the step is: the modules, the line, and whether gradients flow.

        Inside an autograd function torch switches gradients off, yet its result has one: its
        operators count as differentiated one by one.
        """
        frame = user_frame(2)
        user_line = "" if frame is None else f'File "{frame.f_code.co_filename}", line {frame.f_lineno}'
        in_autograd_function = False
        while frame is not None and frame.f_code is not TrainingStep.forward.__code__ and not in_autograd_function:
            in_autograd_function = frame.f_code is torch.autograd.Function.apply.__func__.__code__
            frame = frame.f_back
        return {
            "nn_module_stack": {name: (name, nn.Module) for name in self.modules},
            "stack_trace": user_line,
            GRAD_ENABLED: torch.is_grad_enabled() or in_autograd_function,
        }


class _Below(TorchDispatchMode):
    """Hands on operators on plain tensors, below torch.func's transforms and autograd."""

    def __init__(self, run: Callable[[OpOverload, tuple[object, ...], Mapping[str, object]], object]) -> None:
        super().__init__()
        self._run = run

    def __torch_dispatch__(
        self,
        func: OpOverload,
        types: object,
        args: tuple[object, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        """Hands on one operator."""
        return self._run(func, args, kwargs or {})


def _is_tensor(value: object) -> bool:
    return isinstance(value, torch.Tensor)


@contextlib.contextmanager
def _modules_watched(step: TrainingStep, recorder: _Recorder) -> Generator[None]:
    """Tells ``recorder`` which modules of the model are running."""
    names = {id(module): f"{MODEL}.{name}" if name else MODEL for name, module in step.model.named_modules()}

    def enter(module: nn.Module, args: object) -> None:
        del args
        if id(module) in names:
            recorder.modules.append(names[id(module)])

    def leave(module: nn.Module, args: object, output: object) -> None:
        del args, output
        name = names.get(id(module))
        while name in recorder.modules and recorder.modules.pop() != name:
            pass  # an inner module was left by an exception that the model caught

    handles = (register_module_forward_pre_hook(enter), register_module_forward_hook(leave))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
