"""A model in the user's own Python file: executed once, with its errors told by file and line.

What the file may hold, besides the factory ``build_model() -> torch.nn.Module``:

    example_inputs(batch_size, seq_len)   the module's inputs: tensors in tuples, lists and dicts
    loss_fn(output, batch)                the loss; ``batch`` has the inputs and ``labels``
    loss_weight(batch)                    of how many terms the loss of ``batch`` is the mean

A step computes the loss part by part. ``loss_fn`` may return the pair (sum of terms, number of terms), and the loss of
the global batch is the sum of all sums over the sum of all numbers. Or it returns one number: the mean of
``loss_weight(batch)`` terms. Without ``loss_weight`` it is tried on two halves of a made-up batch, with unequal numbers
of labels of -100, and taken for what it turns out to be: a sum, a mean over those labels that are not -100, or a mean
over sequences. A loss that is none of these is not trained in parts.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import inspect
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, ModuleType

import torch
from torch import nn

from planner.errors import ModelError
from planner.models.config import usual_seq_len
from planner.models.held import check_has_shapes, own_seq_len
from planner.models.huggingface import for_training
from planner.models.inputs import Batch, Nest, flattened, taken_by_loss
from planner.models.lazy import give_shapes, has_lazy
from planner.models.loss import Reduction, TrainingLoss
from planner.models.own_code import OwnCode
from planner.models.weightless import build_weightless
from planner.signals import rung_again

DEFAULT_FACTORY = "build_model"
TIME_LIMIT_S = 60.0  # for the import, and for building without weights: far more than either needs
MAX_FILE_BYTES = 2**24  # what is larger was written by no one
# Of a decoder beside an encoder of sound (Whisper) the positions of its tokens, not those of the sound.
SEQ_LEN_NAMES = (
    *("max_position_embeddings", "n_positions", "max_target_positions", "block_size", "max_seq_len", "seq_len"),
)


@dataclass(frozen=True)
class PythonModel:
    """What a Python file offers."""

    factory_name: str
    contents: tuple[bytes, ...]  # of the file and of the modules beside it that it imported
    build: Callable[[], nn.Module]
    example_inputs: Callable[[int, int], Batch] | None
    loss_fn: Callable[[object, Batch], torch.Tensor] | None  # of a whole batch
    training_loss: TrainingLoss | None
    seq_len: int  # tokens of a sequence where nobody asks for another number
    vocab_size: int | None

    @staticmethod
    def from_file(
        path: Path,
        factory_name: str | None,
        recorded: Mapping[str, str] | None = None,
        time_limit_s: float = TIME_LIMIT_S,
    ) -> PythonModel:
        """Executes ``path`` and builds its model once without weights to see what it is.

        ``recorded``: of each file in its folder that may be executed, the SHA-256. None: all may.
        """
        content = _source_code(path)
        own = OwnCode(path.resolve().parent, recorded)
        with time_limit(time_limit_s, f"importing {path}"):
            module, beside = _execute(path.resolve(), hashlib.sha256(content).hexdigest()[:16], own)
        factory, factory_name = _find_factory(module, path, factory_name)

        def build() -> nn.Module:
            with user_code(path, f"{factory_name}()"):
                model = factory()
            if not isinstance(model, nn.Module):
                raise ModelError(
                    f"{path}: {factory_name}() returned {type(model).__name__}, not a torch.nn.Module",
                    hint=f"let {factory_name} return the model",
                )
            return for_training(model)

        with time_limit(time_limit_s, f"{factory_name}() of {path}"):
            model = build_weightless(build)
        inputs, loss = _function(module, "example_inputs", path), _training_loss(module, path)
        given = _Given.of(None if inputs is None else _checked_inputs(inputs, path), max_seq_len_of(model))
        if has_lazy(model):
            build_weightless(lambda: given.shaped(build()))  # what it raises is to be told now
        return PythonModel(
            factory_name=factory_name,
            contents=(content, *beside),
            build=lambda: given.shaped(build()),
            example_inputs=given.example_inputs,
            loss_fn=None if loss is None else _loss_of_whole(given.loss(loss)),
            training_loss=None if loss is None else given.loss(loss),
            seq_len=given.seq_len,
            vocab_size=_vocab_size(model),
        )


@dataclass(frozen=True)
class _Given:
    """What a file's own inputs say of the model: nothing where it has none."""

    makes: Callable[[int, int], tuple[Batch, Nest | None]] | None
    seq_len: int
    nest: Nest | None

    @staticmethod
    def of(makes: Callable[[int, int], tuple[Batch, Nest | None]] | None, max_seq_len: int | None) -> _Given:
        longest = usual_seq_len(max_seq_len)
        if makes is None:
            return _Given(None, longest, None)
        seq_len, nest = own_seq_len(lambda batch_size, seq_len: makes(batch_size, seq_len)[0], longest), None
        with contextlib.suppress(ModelError):
            nest = makes(2, seq_len)[1]
        return _Given(makes, seq_len, nest)

    @property
    def example_inputs(self) -> Callable[[int, int], Batch] | None:
        """By name or in order."""
        makes = self.makes
        return None if makes is None else lambda batch_size, seq_len: makes(batch_size, seq_len)[0]

    def shaped(self, model: nn.Module) -> nn.Module:
        """``model`` taking these inputs by name, with shapes for all its parameters; ModelError names one without."""
        if self.nest is not None:
            self.nest.adapted(model)
        if has_lazy(model):
            makes = self.makes or _tokens
            with contextlib.suppress(Exception):  # whatever the user's code raises without values
                give_shapes(model, makes(2, self.seq_len)[0])
            check_has_shapes(model, type(model).__name__)
        return model

    def loss(self, loss: TrainingLoss) -> TrainingLoss:
        """``loss`` taking a batch by name."""
        return taken_by_loss(self.nest, loss)


def _source_code(path: Path) -> bytes:
    try:
        size = path.stat().st_size
        if size > MAX_FILE_BYTES:
            raise ModelError(f"{path} has {size:,} bytes: no Python file", hint="name the model file")
        return path.read_bytes()
    except OSError as error:
        raise ModelError(f"cannot read {path}: {error.strerror}", hint="check its permissions") from error


class _OutOfTime(BaseException):
    """Raised by the alarm; no ``except Exception`` of the user's code swallows it."""


@contextlib.contextmanager
def time_limit(seconds: float, what: str) -> Generator[None]:
    """Ends what runs inside after ``seconds``; without effect outside the main thread, where no alarm can be set."""

    def ring(_signal: int, _frame: FrameType | None) -> None:
        raise _OutOfTime

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        with rung_again(_OutOfTime):
            yield
    except _OutOfTime:
        raise ModelError(
            f"{what} did not end within {seconds:g} s",
            hint="keep training, downloads and other work out of the model file",
        ) from None
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, previous)


@contextlib.contextmanager
def user_code(path: Path, what: str, hint: str = "correct the model file") -> Generator[None]:
    """Runs the user's code: its output goes to stderr, its errors become ModelError with file and line."""
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    except ModelError:
        raise
    except SyntaxError as error:
        place = Path(error.filename or path).name + (f":{error.lineno}" if error.lineno else "")
        raise ModelError(f"{place}: {error.msg}", hint="the file is not valid Python") from error
    except ImportError as error:
        raise ModelError(
            f"{what} failed at {_last_line(error, path)}: {error}",
            hint="install what it imports, or put it beside the file",
        ) from error
    except (Exception, SystemExit) as error:
        text = f"{_last_line(error, path)}: {type(error).__name__}: {error}".strip()
        raise ModelError(f"{what} failed at {text}", hint=hint) from error


def _last_line(error: BaseException, path: Path) -> str:
    """The innermost line of the user's own folder in the traceback, as file:line."""
    frames = traceback.extract_tb(error.__traceback__)
    folder = str(path.resolve().parent)
    own = [frame for frame in frames if frame.filename.startswith(folder) and "site-packages" not in frame.filename]
    if not own:
        return path.name
    return f"{Path(own[-1].filename).name}:{own[-1].lineno}"


def _execute(path: Path, name: str, own: OwnCode) -> tuple[ModuleType, tuple[bytes, ...]]:
    own.guard_imports()
    module_name = f"planner_user_model_{name}"
    loader = own.source_loader(module_name, str(path))
    spec = importlib.util.spec_from_file_location(module_name, path, loader=loader)
    if spec is None or spec.loader is None:
        raise ModelError(f"{path} cannot be imported", hint="name a .py file")
    module = importlib.util.module_from_spec(spec)
    before = set(sys.modules)
    sys.modules[module_name] = module
    sys.path.insert(0, str(path.parent))
    try:
        with user_code(path, f"importing {path.name}"):
            spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(path.parent))
    return module, _contents_beside(path, set(sys.modules) - before - {module_name})


def _contents_beside(path: Path, module_names: set[str]) -> tuple[bytes, ...]:
    files = {getattr(sys.modules.get(name), "__file__", None) for name in module_names}
    own = sorted(
        file
        for file in files
        if isinstance(file, str) and Path(file).is_relative_to(path.parent) and "site-packages" not in file
    )
    return tuple(Path(file).read_bytes() for file in own if file.endswith(".py"))


def _find_factory(module: ModuleType, path: Path, name: str | None) -> tuple[Callable[[], object], str]:
    if name is not None or hasattr(module, DEFAULT_FACTORY):
        name = name or DEFAULT_FACTORY
        factory = getattr(module, name, None)
        if callable(factory):
            return factory, name
        raise ModelError(f"{path} has no function {name!r}; it defines {_found(module)}", hint="name another")
    candidates = [
        value
        for value in vars(module).values()
        if isinstance(value, type) and issubclass(value, nn.Module) and value.__module__ == module.__name__
        if _needs_no_arguments(value)
    ]
    if len(candidates) == 1:
        return candidates[0], candidates[0].__name__
    reason = (
        f"several modules that need no arguments: {', '.join(c.__name__ for c in candidates)}"
        if candidates
        else f"no module that needs no arguments; it defines {_found(module)}"
    )
    raise ModelError(
        f"{path} has no {DEFAULT_FACTORY}() and {reason}",
        hint=f"add `def {DEFAULT_FACTORY}() -> torch.nn.Module`, or name a factory: {path.name}:factory",
    )


def _found(module: ModuleType) -> str:
    names = [
        name
        for name, value in vars(module).items()
        if callable(value) and getattr(value, "__module__", None) == module.__name__
    ]
    return ", ".join(names) or "nothing that can be called"


def _needs_no_arguments(factory: type[nn.Module]) -> bool:
    parameters = list(inspect.signature(factory.__init__).parameters.values())[1:]
    return all(p.default is not p.empty or p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in parameters)


def _function(module: ModuleType, name: str, path: Path) -> Callable[..., object] | None:
    value = getattr(module, name, None)
    if value is not None and not callable(value):
        raise ModelError(f"{path}: {name} is {type(value).__name__}, not a function", hint=f"make {name} a function")
    return value


def _checked_inputs(function: Callable[..., object], path: Path) -> Callable[[int, int], tuple[Batch, Nest | None]]:
    def example_inputs(batch_size: int, seq_len: int) -> tuple[Batch, Nest | None]:
        with user_code(path, "example_inputs()", "it is called as example_inputs(batch_size, seq_len)"):
            inputs = function(batch_size, seq_len)
        try:
            return flattened(inputs)
        except TypeError as error:
            raise ModelError(
                f"{path}: example_inputs() must return tensors, alone or in tuples, lists and dicts, got {error}",
                hint="return those; a dataclass of your own counts after torch.export.register_dataclass(it)",
            ) from None

    return example_inputs


def _tokens(batch_size: int, seq_len: int) -> tuple[Batch, Nest | None]:
    return (torch.zeros(batch_size, seq_len, dtype=torch.int64),), None


def _training_loss(module: ModuleType, path: Path) -> TrainingLoss | None:
    function, weight = _function(module, "loss_fn", path), _function(module, "loss_weight", path)
    if function is None:
        if weight is not None:
            raise ModelError(f"{path} has loss_weight(), but no loss_fn()", hint="the default loss needs neither")
        return None

    def loss_fn(output: object, batch: Batch) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        with user_code(path, "loss_fn()", f"it is called as loss_fn(output, batch), {_shown_batch(batch)}"):
            loss = function(output, batch)
        match loss:
            case torch.Tensor():
                return loss
            case (torch.Tensor() as total, torch.Tensor() | int() as count) if weight is None:
                return total, torch.as_tensor(count)
            case _:
                both = isinstance(loss, tuple) and weight is not None
                text = "a tuple beside loss_weight()" if both else type(loss).__name__
                raise ModelError(
                    f"{path}: loss_fn() returned {text}, not a tensor",
                    hint="return the loss, or the pair (sum of its terms, number of them) without loss_weight()",
                )

    def loss_weight(batch: Batch) -> torch.Tensor | float:
        assert weight is not None
        with user_code(path, "loss_weight()", f"it is called as loss_weight(batch), {_shown_batch(batch)}"):
            terms = weight(batch)
        if not isinstance(terms, torch.Tensor | int | float) or (isinstance(terms, torch.Tensor) and terms.ndim):
            raise ModelError(f"{path}: loss_weight() returned {type(terms).__name__}, not one number",
                             hint="return of how many terms loss_fn(output, batch) is the mean")  # fmt: skip
        return terms

    if weight is None:
        return TrainingLoss(loss_fn)
    return TrainingLoss(loss_fn, Reduction.MEAN, loss_weight)


def _shown_batch(batch: Batch) -> str:
    return (
        f"and this batch holds {', '.join(map(str, batch))}"
        if isinstance(batch, Mapping)
        else "with the batch as it was given"
    )


def _loss_of_whole(loss: TrainingLoss) -> Callable[[object, Batch], torch.Tensor]:
    def loss_fn(output: object, batch: Batch) -> torch.Tensor:
        value = loss.function(output, batch)
        return value if isinstance(value, torch.Tensor) else value[0] / value[1]

    return loss_fn


def max_seq_len_of(model: nn.Module) -> int | None:
    """Positions that the model is made for, where it or its ``config`` says."""
    return _named_size(model, SEQ_LEN_NAMES)


def _named_size(model: nn.Module, names: tuple[str, ...]) -> int | None:
    """The first integer attribute called one of ``names`` of the model or of its ``config``."""
    for name in names:
        for owner in (model, getattr(model, "config", None)):
            value = getattr(owner, name, None)
            if isinstance(value, int) and value > 0:
                return value
    return None


def _vocab_size(model: nn.Module) -> int | None:
    """What the model says, or its largest embedding; None where it has none."""
    named = _named_size(model, ("vocab_size",))
    sizes = [module.num_embeddings for module in model.modules() if isinstance(module, nn.Embedding)]
    return named or (max(sizes) if sizes else None)
