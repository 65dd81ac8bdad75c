"""Records one forward pass of a model as a list of calls that can be cut into pipeline stages.

The pass runs on the meta device, or where a module needs values (experts that are chosen by value)
once for real on the CPU. Every module that a stage names is one opaque call; what the modules
around them do between those calls ("glue") is recorded function by function, at the level at which
the user wrote it. Replaying the calls with the original modules is the original model, so sharding,
hooks and checkpointing of those modules still apply.

Refused in the glue: values read from tensors (``item()``, ``if tensor``), tensors that are neither parameters nor
buffers, and for pipelines what ``executor.glue`` sees. An own autograd function is one call.
"""

# pyright: reportPrivateUsage=false
# torch.compiler has no public way to say to a model that it is being recorded, nor a module a public name for its call.

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from planner.errors import PlanError
from planner.executor.glue import Aliases, Draws, Watch, Writing
from planner.models import autograd_functions, leaves

Function = Callable[..., object]

META, CPU = torch.device("meta"), torch.device("cpu")
_T = TypeVar("_T")


class ReadsValuesError(PlanError):
    """What a model does depends on values that a recording does not have."""


@dataclass(frozen=True)
class Slot:
    """A tensor computed during the pass."""

    number: int


@dataclass(frozen=True)
class InputSlot:
    """An input of the model, by name or position."""

    key: str


@dataclass(frozen=True)
class StateSlot:
    """A parameter or buffer of the model that glue uses directly."""

    fqn: str


@dataclass(frozen=True)
class ByMode:
    """An argument that is another one under evaluation than in training."""

    training: object
    evaluated: object


@dataclass(frozen=True)
class Call:
    """One recorded call; ``results`` are the tensors of its output in order."""

    function: Function | None  # None: the module ``module``
    module: str
    args: tuple[object, ...]  # with slots in place of tensors, as are the keyword arguments
    kwargs: Mapping[str, object]
    results: tuple[Slot, ...]
    grad_enabled: bool
    is_random: bool = False  # glue that draws from torch's generators

    @property
    def operands(self) -> tuple[Slot, ...]:
        """Computed tensors among the arguments."""
        return slots_in((self.args, self.kwargs))

    @property
    def states(self) -> tuple[str, ...]:
        """FQNs of parameters and buffers among the arguments."""
        return tuple(leaf.fqn for leaf in leaves_of((self.args, self.kwargs)) if isinstance(leaf, StateSlot))


@dataclass(frozen=True)
class TensorMeta:
    """What a receiver must know of a tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool

    def empty(self, device: torch.device | str = "meta") -> torch.Tensor:
        """A tensor of this kind without values."""
        return torch.empty(self.shape, dtype=self.dtype, device=device, requires_grad=self.requires_grad)


@dataclass(frozen=True)
class Trace:
    """One forward pass: the calls in order, the output with slots for tensors, and every slot's kind.

    ``unrecorded``: what the glue does besides, and a replay does not. ``borrowed``: a module of one call, and all names
    of a parameter that it uses and that is none of its own.
    """

    calls: tuple[Call, ...]
    output: object
    metas: Mapping[Slot, TensorMeta]
    unrecorded: tuple[str, ...] = ()
    borrowed: tuple[tuple[str, tuple[str, ...]], ...] = ()


def inside(fqn: str, module: str) -> bool:
    """Whether ``fqn`` names ``module`` or something in it."""
    return not module or fqn == module or fqn.startswith(module + ".")


def leaves_of(value: object) -> list[object]:
    """All leaves of a nest of containers and dataclasses, in a fixed order."""
    found: list[object] = []

    def visit(leaf: object) -> object:
        found.append(leaf)
        return leaf

    map_leaves(visit, value)
    return found


def tensors_in(value: object) -> list[torch.Tensor]:
    """All tensors in ``value``, in a fixed order."""
    return [leaf for leaf in leaves_of(value) if isinstance(leaf, torch.Tensor)]


def slots_in(value: object) -> tuple[Slot, ...]:
    """All slots in ``value``."""
    return tuple(leaf for leaf in leaves_of(value) if isinstance(leaf, Slot))


def map_leaves(function: Callable[[object], object], value: object) -> object:
    """``value`` with ``function`` applied to every leaf; dataclasses count as containers, but slots do not."""
    return leaves.map_leaves(function, value, (Slot, InputSlot, StateSlot, ByMode))


Inputs = dict[str, torch.Tensor]


def trace_forward(
    module: nn.Module,
    opaque: frozenset[str],
    inputs: Inputs,
    call: Callable[[nn.Module, Inputs], object],
    dtype: torch.dtype,
) -> Trace:
    """Runs ``call(meta twin of module, inputs)`` and records it.

    ``opaque`` are the FQNs of modules recorded as one call. ``dtype`` is what floating-point
    parameters are computed in. Raises what the model raises where it needs values.
    """
    return _trace((module, twin(module, dtype, META)), META, opaque, inputs, call)


@contextlib.contextmanager
def as_compiled() -> Generator[None]:
    """Models are told that they are compiled, and read no values where none are.

    Libraries read values only to take a short cut (Hugging Face looks whether sequences are packed), and leave it out
    under torch.compile.
    """
    before = torch.compiler._is_compiling_flag
    torch.compiler._is_compiling_flag = True
    try:
        yield
    finally:
        torch.compiler._is_compiling_flag = before


trace_as_compiled = as_compiled()(trace_forward)


def trace_real_forward(
    module: nn.Module,
    opaque: frozenset[str],
    inputs: Inputs,
    call: Callable[[nn.Module, Inputs], object],
    dtype: torch.dtype,
) -> Trace:
    """As ``trace_forward``, with the values of ``module``, which are on the CPU. PlanError where that fails too."""
    try:
        with torch.random.fork_rng(devices=()):
            return _trace((module, twin(module, dtype, CPU)), CPU, opaque, inputs, call)
    except PlanError:
        raise
    except Exception as error:
        raise PlanError(
            f"the model cannot be cut into pipeline stages: recording it stopped: {type(error).__name__}: {error}",
            hint="plan with pp = 1",
        ) from error


def _trace(
    modules: tuple[nn.Module, nn.Module],
    device: torch.device,
    opaque: frozenset[str],
    inputs: Inputs,
    call: Callable[[nn.Module, Inputs], object],
) -> Trace:
    """``modules``: the original, and its twin, which runs."""
    original, twin = modules
    moved = {key: value.to(device) for key, value in inputs.items()}
    named = dict(twin.named_modules())
    watch = Watch(target for fqn, target in named.items() if not any(inside(fqn, outer) for outer in opaque))
    recorder = _Recorder(original, twin, moved, device, watch)
    for fqn, target in named.items():
        if fqn in opaque:  # a call with its hooks, which a replay runs as well
            watch.holds(target)
            target._compiled_call_impl = _opaque_call(recorder, fqn, target._call_impl)
            target.forward = _opaque_call(recorder, fqn, target.forward)
    with device, _own_functions_as_calls(recorder), recorder.draws, recorder:
        output = call(twin, moved)
        if not recorder.contains_all(output):
            raise PlanError(
                "the model's output holds a tensor that its forward did not compute", hint="return computed tensors"
            )
        found = Trace(tuple(recorder.calls), recorder.encode(output), dict(recorder.metas))
        watch.ended(lambda: call(twin, moved))
    return replace(found, unrecorded=(*watch.reasons, *recorder.aliases.reasons), borrowed=recorder.borrowed)


def twin(module: nn.Module, dtype: torch.dtype, device: torch.device) -> nn.Module:
    """A copy of ``module`` whose parameters and buffers are on ``device``; ties are kept."""
    memo: dict[int, object] = {}
    for parameter in module.parameters():
        computed = dtype if parameter.is_floating_point() else parameter.dtype
        twin = parameter.detach().to(device=device, dtype=computed)
        memo[id(parameter)] = nn.Parameter(twin, requires_grad=parameter.requires_grad)
    for buffer in module.buffers():
        memo[id(buffer)] = buffer.detach().to(device, copy=True)
    return copy.deepcopy(module, memo)


_READ_VALUES: frozenset[Function] = frozenset(
    getattr(torch.Tensor, name)
    for name in ("__bool__", "__int__", "__float__", "__index__", "item", "tolist", "numpy", "__array__")
) | {torch.equal, torch.allclose}


class _Recorder(TorchFunctionMode):
    """Appends a ``Call`` for every torch function that returns tensors."""

    def __init__(
        self,
        original: nn.Module,
        twin: nn.Module,
        inputs: Mapping[str, torch.Tensor],
        device: torch.device,
        watch: Watch,
    ) -> None:
        super().__init__()
        self._device, self._watch, self.draws, self.aliases = device, watch, Draws(), Aliases()
        self.calls: list[Call] = []
        self.metas: dict[Slot, TensorMeta] = {}
        self._paused = False
        self._running = ""  # the module of the call that is recorded as a whole
        self._names: dict[int, list[str]] = {}  # of each parameter, also the original's: closures are not copied
        for fqn, parameter in (p for each in (original, twin) for p in each.named_parameters(remove_duplicate=False)):
            self._names.setdefault(id(parameter), []).append(fqn)
        self._borrowed: dict[tuple[str, tuple[str, ...]], None] = {}
        self._known: dict[int, Slot | InputSlot | StateSlot] = {}
        for fqn, state in [*twin.named_buffers(), *twin.named_parameters()]:
            self._know(state, StateSlot(fqn))
        for key, value in inputs.items():
            self._know(value, InputSlot(key))

    def __torch_function__(
        self, func: Function, types: object, args: tuple[object, ...] = (), kwargs: dict[str, object] | None = None
    ) -> object:
        if not self._paused and func in _READ_VALUES:
            raise ReadsValuesError(
                "between its pipelined modules the model reads values of a tensor"
                f" ({getattr(func, '__name__', func)}): what it does then cannot be recorded",
                hint="read them inside a block, or plan with pp = 1",
            )
        if self._paused:
            self._look_at_parameters(tensors_in((args, kwargs or {})))
            return func(*args, **(kwargs or {}))
        self.draws.taken()
        given = [(tensor, tensor._version) for tensor in tensors_in((args, kwargs or {}))]
        result = func(*args, **(kwargs or {}))
        self._watch.called(func)
        written = [tensor for tensor, before in given if tensor._version != before]
        if written:
            apart = self.aliases.written(written, tensors_in(result))
            self.record(Writing(func, len(apart)), "", (*apart, *args), kwargs or {}, (result, *apart))
        elif tensors_in(result):
            self.record(func, "", args, kwargs or {}, result)
        return result

    def record(
        self,
        function: Function | None,
        module: str,
        args: tuple[object, ...],
        kwargs: Mapping[str, object],
        result: object,
    ) -> None:
        """Appends one call. Every result gets a new slot, also one that was changed in place or passed through."""
        encoded_args, encoded_kwargs = self.encode(args), self.encode(kwargs)
        results: list[Slot] = []
        for tensor in tensors_in(result):
            slot = Slot(len(self.metas))
            self._know(tensor, slot)
            self.metas[slot] = TensorMeta(tuple(tensor.shape), tensor.dtype, tensor.requires_grad)
            results.append(slot)
        assert isinstance(encoded_args, tuple)
        assert isinstance(encoded_kwargs, dict)
        is_random = self.draws.taken() and function is not None
        encoded = module, encoded_args, encoded_kwargs, tuple(results)
        self.calls.append(Call(function, *encoded, torch.is_grad_enabled(), is_random))

    def _look_at_parameters(self, used: Sequence[torch.Tensor]) -> None:
        for names in [self._names[id(tensor)] for tensor in used if id(tensor) in self._names]:
            if self._running and not any(inside(name, self._running) for name in names):
                self._borrowed[(self._running, tuple(names))] = None

    @property
    def borrowed(self) -> tuple[tuple[str, tuple[str, ...]], ...]:
        """As ``Trace`` has it."""
        return tuple(self._borrowed)

    @property
    def is_paused(self) -> bool:
        """Whether what happens belongs to a call that is recorded as a whole."""
        return self._paused

    def call_paused(self, function: Callable[[], _T], module: str = "") -> _T:
        """Runs ``function``, of ``module`` if it is the call of one, without recording what happens inside."""
        self._watch.called(None)
        self._watch.enters()
        self._paused, self._running = True, module
        try:
            return function()
        finally:
            self._paused, self._running = False, ""
            self._watch.leaves()

    def encode(self, value: object) -> object:
        """``value`` with slots in place of tensors; PlanError for a tensor of unknown origin."""
        return map_leaves(self._encode_leaf, value)

    def contains_all(self, value: object) -> bool:
        """Whether the origin of every tensor in ``value`` is known."""
        return all(id(tensor) in self._known for tensor in tensors_in(value))

    def _encode_leaf(self, leaf: object) -> object:
        if isinstance(leaf, torch.device) and leaf.type == self._device.type:
            return META  # stands for the device that the stage will be on
        if not isinstance(leaf, torch.Tensor):
            return leaf
        known = self._known.get(id(leaf))
        if known is None:
            raise PlanError(
                f"between its pipelined modules the model uses a tensor of shape {tuple(leaf.shape)} that is "
                "neither a parameter nor a buffer",
                hint="register it with register_buffer, or plan with pp = 1",
            )
        self.aliases.read(leaf)
        return known

    def _know(self, tensor: torch.Tensor, slot: Slot | InputSlot | StateSlot) -> None:
        self.aliases.made(tensor)
        self._known[id(tensor)] = slot


def _own_functions_as_calls(recorder: _Recorder) -> contextlib.AbstractContextManager[None]:
    """Records every autograd function of the glue as one call: what it does inside has no gradients."""

    def apply(
        function: autograd_functions.Function,
        run: Callable[[], object],
        args: tuple[object, ...],
        kwargs: Mapping[str, object],
    ) -> object:
        if recorder.is_paused:
            return run()
        result = recorder.call_paused(run)
        recorder.record(_Applied(function), "", args, kwargs, result)
        return result

    return autograd_functions.applied_by(apply)


@dataclass(frozen=True)
class _Applied:
    """``function.apply``, looked up when it is called."""

    function: type[torch.autograd.Function]

    def __call__(self, *args: object, **kwargs: object) -> object:
        return self.function.apply(*args, **kwargs)


def _opaque_call(recorder: _Recorder, fqn: str, forward: Function) -> Function:
    def call(*args: object, **kwargs: object) -> object:
        if recorder.is_paused:
            return forward(*args, **kwargs)
        result = recorder.call_paused(lambda: forward(*args, **kwargs), fqn)
        recorder.record(None, fqn, args, kwargs, result)
        return result

    return call
