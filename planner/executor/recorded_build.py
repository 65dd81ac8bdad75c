"""A model built without memory, whose values can be made later.

While a model is built its tensors have shapes and no values, and every operator that would make or change values is
written down (``recording.py``). Played back, they make, to the last bit, the values of building the model as it stands.

What this cannot do is found out while it is recorded, and ``UnrecordableError`` says why: code that looks at values or
at addresses, that draws random numbers in other ways, or that keeps tensors where nobody would look for them.
"""

# pyright: reportPrivateUsage=false
# torch has no public names for tensors without values and for what one knows of an operator.

from __future__ import annotations

import contextlib
import gc
import warnings
from collections.abc import Callable, Generator, Iterable
from typing import Any, NamedTuple

import torch
from torch import nn
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.nn import init
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

from planner.executor.gradient_hooks import hooked_parameters
from planner.executor.recording import BEGINNING, Operation, Recording, UnrecordableError, View, storages_in
from planner.operators.record import Trait
from planner.operators.registry import names_with

MOST_CONSTANT_BYTES = 2**26  # of tensors that were there before and that the recording keeps copies of
MARK = 0x9E3779B9  # with an operator's number a seed that nobody chooses; torch reads 32 bits of it

# These write all values of their operand, the first ones random numbers, of which its shape alone says how many.
_FILLING_AT_RANDOM = frozenset(
    ("normal_", "uniform_", "random_", "exponential_", "cauchy_", "log_normal_", "geometric_")
)
_FILLING = _FILLING_AT_RANDOM | {f"{name}_" for name in names_with(Trait.OVERWRITES)} | {"zero_"}
_DRAWING = _FILLING_AT_RANDOM | names_with(Trait.DRAWS_BY_SHAPE) | {"randperm", "randint_like"}
_ASKING = frozenset(("data_ptr", "numpy", "tolist", "__array__", "untyped_storage", "storage", "__reduce_ex__"))
_MOVING = frozenset(("set_", "resize_", "resize_as_", "resize"))  # storages, which then are not what was recorded


class RecordedModel(NamedTuple):
    """A module whose parameters are on the meta device, and whose buffers have their values."""

    module: nn.Module
    recording: Recording
    parameters: dict[str, View]  # by FQN, of tied ones each


def recorded_model(build: Callable[[], nn.Module]) -> RecordedModel:
    """Builds with the default generator as it is, which is left so. UnrecordableError where it cannot be played back.

    What the user's code raises meanwhile is such an error too: it may be due to the missing values.
    """
    with torch.random.fork_rng(devices=()):
        recorder, without_values = _Recorder(), FakeTensorMode(allow_non_fake_inputs=True)
        try:
            with without_values, recorder, _Guard(recorder), _torch_as_recorded(recorder):
                module = build()
        except Exception as error:  # whatever the user's code raises without values
            text = recorder.problem or f"{type(error).__name__}: {error}"
            raise UnrecordableError(text) from None
        if recorder.problem is not None:
            raise UnrecordableError(recorder.problem)
        if hooked_parameters(module):
            raise UnrecordableError("it hooks the gradients of parameters")
        parameters = {fqn: recorder.view_of(p) for fqn, p in module.named_parameters(remove_duplicate=False)}
        _empty(module)
        _fill_buffers(module, recorder)
    if _is_held(without_values):
        gc.collect()  # it takes longer than to look
        if _is_held(without_values):
            raise UnrecordableError("it keeps tensors that are neither parameters nor buffers")
    return RecordedModel(module, recorder.recording, parameters)


def _is_held(mode: FakeTensorMode) -> bool:
    """Whether anybody has a tensor of ``mode``."""
    return any(type(each) is FakeTensor and each.fake_mode is mode for each in gc.get_objects())


@contextlib.contextmanager
def _torch_as_recorded(recorder: _Recorder) -> Generator[None]:
    """Changes what of torch itself looks at values or minds that there are none.

    Its cut-off normal distribution looks at what it has drawn and draws again: that becomes one operator. Its way to
    change the dtype of a module exchanges tensors where these are fake, and refuses to where something refers to them.
    """
    original, apply = init._no_grad_trunc_normal_, nn.Module._apply

    def cut_off(
        tensor: torch.Tensor, mean: float, std: float, a: float, b: float, generator: torch.Generator | None = None
    ) -> torch.Tensor:
        if not isinstance(tensor, FakeTensor):
            return original(tensor, mean, std, a, b, generator)
        recorder.fill(original, tensor, (mean, std, a, b, generator))
        return tensor

    init._no_grad_trunc_normal_, nn.Module._apply = cut_off, _apply
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Accessing the data pointer of Fake")  # where one is copied
            yield
    finally:
        init._no_grad_trunc_normal_, nn.Module._apply = original, apply


def _apply(self: nn.Module, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> nn.Module:
    """As torch's own does to tensors with values."""
    for child in self.children() if recurse else ():
        child._apply(fn)
    for parameter in self._parameters.values():
        if parameter is not None:
            parameter.data = fn(parameter.detach())
    for name, buffer in self._buffers.items():
        if buffer is not None:
            self._buffers[name] = fn(buffer)
    return self


def _empty(module: nn.Module) -> None:
    """Puts parameters on meta in place of those without values; ties are kept."""
    made: dict[nn.Parameter, nn.Parameter] = {}
    for owner in module.modules():
        for name, old in list(owner.named_parameters(recurse=False, remove_duplicate=False)):
            if old not in made:
                new = torch.empty_strided(old.shape, old.stride(), dtype=old.dtype, device="meta")
                made[old] = nn.Parameter(new, requires_grad=old.requires_grad)
            owner.register_parameter(name, made[old])


def _fill_buffers(module: nn.Module, recorder: _Recorder) -> None:
    views: list[View] = []
    places: list[list[tuple[nn.Module, str]]] = []
    known: dict[torch.Tensor, int] = {}
    for owner in module.modules():
        for name, buffer in owner.named_buffers(recurse=False, remove_duplicate=False):
            if isinstance(buffer, FakeTensor):
                if buffer not in known:
                    known[buffer] = len(views)
                    views.append(recorder.view_of(buffer))
                    places.append([])
                places[known[buffer]].append((owner, name))

    def give(index: int, value: torch.Tensor) -> None:
        value = value.clone()
        for owner, name in places[index]:
            owner._buffers[name] = value

    recorder.recording.play(views, give)


class _Recorder(TorchDispatchMode):
    """Writes operators down while tensors without values are active."""

    def __init__(self) -> None:
        super().__init__()
        self.recording = Recording(torch.default_generator.get_state())
        self.problem: str | None = None
        self._numbers: dict[int, int] = {}  # of storages
        self._kept: list[torch.UntypedStorage] = []  # so that no address is used twice
        self._constant_bytes = 0
        self._states = {_content(self.recording.beginning): BEGINNING}

    def view_of(self, tensor: torch.Tensor) -> View:
        """What a tensor without values is in the recording."""
        number = self._number(tensor) if isinstance(tensor, FakeTensor) else None
        if number is None or tensor.device.type != "cpu":
            raise UnrecordableError("it has tensors that came about otherwise than by torch's operators on the CPU")
        return View(number, tensor.dtype, tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()))

    def fill(self, function: Callable[..., object], target: FakeTensor, options: tuple[object, ...]) -> None:
        """Writes down that ``function`` fills ``target`` with random numbers, whatever was there."""
        with torch._C.DisableTorchFunction():
            view, replaced = self.view_of(target), self._replaced(target)
            args = (view, *tree_map(self._encode, options))
            operation = Operation(
                function, args, {}, (), {view.storage} - replaced, {view.storage}, replaced, self._drawn()
            )
        self.recording.operations.append(operation)

    def __torch_dispatch__(
        self, func: OpOverload, types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> object:
        try:
            with torch._C.DisableTorchFunction():
                return self._recorded(func, args, kwargs or {})
        except Exception as error:  # the user's code may handle it, and go another way than with values
            text = str(error) if isinstance(error, UnrecordableError) else f"{func} without values: {error}"
            self.problem = self.problem or text.splitlines()[0]
            raise

    def _recorded(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
        name = func.overloadpacket.__name__
        is_random = torch.Tag.nondeterministic_seeded in func.tags
        if name in _MOVING or (is_random and name not in _DRAWING):
            raise UnrecordableError(f"it uses {name}, which is not played back")
        changed = tree_leaves([value for argument, value in _arguments(func, args, kwargs) if _is_changed(argument)])
        if any(isinstance(leaf, torch.Tensor) and not isinstance(leaf, FakeTensor) for leaf in changed):
            raise UnrecordableError(f"it changes tensors that were there before by {name}")
        encoded_args, encoded_kwargs = tree_map(self._encode, (args, kwargs))
        reads = storages_in((encoded_args, encoded_kwargs))
        result = func(*args, **kwargs)
        results = tuple(self._made(leaf) for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor))
        made = {view.storage for view in results if view is not None}
        writes = made | storages_in(tree_map(self._encode, changed))
        if not writes and not is_random:
            return result  # a view of what is there
        replaces = made
        if name in _FILLING and isinstance(args[0], FakeTensor):
            replaces = made | self._replaced(args[0])
            reads = storages_in((encoded_args[1:], encoded_kwargs)) | (reads - replaces)
        after = self._drawn() if is_random else None
        operation = Operation(func, encoded_args, encoded_kwargs, results, reads - made, writes, replaces, after)
        self.recording.operations.append(operation)
        return result

    def _replaced(self, target: FakeTensor) -> set[int]:
        """The storage of ``target`` where it is all of it."""
        is_whole = target.is_contiguous() and target.numel() * target.itemsize == target.untyped_storage().nbytes()
        return {self.view_of(target).storage} if is_whole else set()

    def _made(self, tensor: torch.Tensor) -> View | None:
        """A result whose storage is new, which gets a number."""
        if not isinstance(tensor, FakeTensor):
            raise UnrecordableError("it makes tensors of other kinds")
        if self._number(tensor) is not None:
            return None
        storage = tensor.untyped_storage()
        self._numbers[storage._cdata] = len(self._kept)
        self._kept.append(storage)
        self.recording.storage_bytes.append(int(storage.nbytes()))
        return self.view_of(tensor)

    def _number(self, tensor: FakeTensor) -> int | None:
        return self._numbers.get(tensor.untyped_storage()._cdata)

    def _encode(self, leaf: object) -> object:
        """``leaf`` as it is kept: views for tensors, copies of those with values."""
        match leaf:
            case FakeTensor():
                return self.view_of(leaf)
            case torch.Tensor():
                self._constant_bytes += leaf.nbytes
                if leaf.device.type != "cpu" or self._constant_bytes > MOST_CONSTANT_BYTES:
                    raise UnrecordableError("it is made of large tensors that were there before")
                with _disable_current_modes():
                    return leaf.detach().clone()
            case torch.UntypedStorage() | torch.TypedStorage() | torch.Generator():
                raise UnrecordableError(f"it hands a {type(leaf).__name__} to operators")
            case _:
                return leaf

    def _drawn(self) -> int | torch.Tensor:
        """From which state an operator draws; leaves the generator in one that is unlike any other."""
        with _disable_current_modes():
            state = torch.default_generator.get_state()
            found = self._states.get(_content(state))
            number = len(self.recording.operations)
            marked = torch.Generator().manual_seed(MARK ^ number).get_state()
            marked[:8] = state[:8]  # the seed, which torch keeps first
            seed = torch.default_generator.initial_seed()
            torch.default_generator.set_state(marked)
            assert torch.default_generator.initial_seed() == seed
            self._states[_content(torch.default_generator.get_state())] = number
        return state if found is None else found


class _Guard(TorchFunctionMode):
    """Notes what the user's code asks of memory, which without values has no address and no content."""

    def __init__(self, recorder: _Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_function__(
        self,
        func: Callable[..., object],
        types: object,
        args: tuple[object, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        name = getattr(func, "__name__", "")
        if name in _ASKING:
            self._recorder.problem = self._recorder.problem or f"it uses {name}"
        return func(*args, **(kwargs or {}))


def _arguments(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterable[tuple[Any, object]]:
    """An operator's arguments as its schema declares them, each with its value."""
    declared = func._schema.arguments
    return (
        *zip(declared, args, strict=False),
        *((argument, kwargs[argument.name]) for argument in declared if argument.name in kwargs),
    )


def _is_changed(argument: Any) -> bool:
    return argument.alias_info is not None and argument.alias_info.is_write


def _content(state: torch.Tensor) -> bytes:
    return state.numpy().tobytes()
