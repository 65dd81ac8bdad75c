"""From a loaded model to its ModelGraph: torch.export of one training step on the meta device.

The training IR of ``torch.export`` keeps linear, norms, attention and cross entropy whole. Neither
parameters nor activations take memory, so any size of model can be traced. As in mixed-precision
training under FSDP, parameters and floating inputs are in the dtype of the precision; buffers and
what the model computes in float32 stay in float32.
"""

# pyright: reportPrivateUsage=false
# torch has no public name for an operator overload, its schema, or the identity of a storage.

from __future__ import annotations

import contextlib
import inspect
import io
import logging
import traceback
import warnings
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from planner.errors import ModelError
from planner.graph.assemble import GraphHeader, assemble_graph
from planner.graph.model_graph import ModelGraph, Node, Parameter
from planner.graph.tracer.folding import find_folds, shortened, unfold
from planner.graph.tracer.nodes import NodeBuilder
from planner.graph.tracer.stand_ins import Sizes, StandIn, TrainingStep, on_fake_cpu, on_meta
from planner.model_file import LoadedModel
from planner.parallelism import Precision

_DTYPES = {Precision.BF16: "bfloat16", Precision.FP16: "float16", Precision.FP32: "float32", Precision.FP8: "bfloat16"}


def traced_dtype(precision: Precision) -> str:
    """Dtype of parameters and activations under ``precision``; 8-bit products keep bfloat16 activations."""
    return _DTYPES[precision]


def trace_model(loaded: LoadedModel, batch_size: int, seq_len: int, dtype: str = "bfloat16") -> ModelGraph:
    """The operators of one training step on ``batch_size`` sequences of ``seq_len`` tokens.

    Equal blocks are traced once where they provably repeat one another. What cannot be traced on
    the meta device is tried again as if on the CPU.
    """
    sizes = Sizes(batch_size, seq_len, dtype)
    stand_in = on_meta(loaded, sizes)
    try:
        traced = _folded(loaded, stand_in) or _whole(loaded, stand_in)
    except ModelError:
        stand_in = on_fake_cpu(loaded, sizes)
        traced = _whole(loaded, stand_in)
    return _graph(loaded, sizes, stand_in, traced)


def trace_whole(loaded: LoadedModel, batch_size: int, seq_len: int, dtype: str = "bfloat16") -> ModelGraph:
    """As ``trace_model``, block by block, equal or not."""
    sizes = Sizes(batch_size, seq_len, dtype)
    stand_in = on_meta(loaded, sizes)
    return _graph(loaded, sizes, stand_in, _whole(loaded, stand_in))


def _graph(loaded: LoadedModel, sizes: Sizes, stand_in: StandIn, traced: _Traced) -> ModelGraph:
    tier = "config" if loaded.stands_for else "export"
    notices = (f"{loaded.stands_for}; planned for a generic model of the same sizes",) if loaded.stands_for else ()
    header = GraphHeader(loaded.source.name, loaded.digest, tier, sizes.batch_size, sizes.seq_len, sizes.dtype)
    warnings = (*notices, *traced.warnings)
    return assemble_graph(header, traced.nodes, traced.edges, list_parameters(stand_in.model), warnings)


@dataclass(frozen=True)
class _Traced:
    nodes: tuple[Node, ...]
    edges: tuple[tuple[int, int], ...]
    warnings: tuple[str, ...]


def _whole(loaded: LoadedModel, stand_in: StandIn) -> _Traced:
    """The nodes of the model as it is."""
    model = stand_in.model
    exported = export_step(loaded, stand_in)
    builder = NodeBuilder(
        module_names=frozenset(name for name, _ in model.named_modules()),
        parameters={alias: p for p in list_parameters(model) for alias in (p.fqn, *p.aliases)},
        folder=str(loaded.source.path.resolve().parent) if loaded.source.path else "",
    )
    builder.add_program(exported)
    return _Traced(builder.nodes(), builder.edges(), builder.warnings())


def _folded(loaded: LoadedModel, stand_in: StandIn) -> _Traced | None:
    """The nodes of the model from a trace of its distinct blocks; None where it does not fold."""
    folds = find_folds(stand_in.model)
    if not folds:
        return None
    try:
        with shortened(stand_in.model, folds):
            traced = _whole(loaded, stand_in)
    except ModelError:
        return None  # perhaps it counts its layers: the whole model will tell
    nodes, edges = traced.nodes, traced.edges
    for fold in folds:
        unfolded = unfold(nodes, edges, fold)
        if unfolded is None:
            return None
        nodes, edges = unfolded
    return _Traced(nodes, edges, traced.warnings)


def export_step(loaded: LoadedModel, stand_in: StandIn) -> torch.export.ExportedProgram:
    """torch.export of the forward pass with its loss; ModelError names the operator and the line."""
    step = TrainingStep(stand_in.model, loaded.loss_fn, stand_in.inputs)
    try:
        with quiet_export(), torch.device(stand_in.device):
            return torch.export.export(step, (stand_in.batch,), strict=False)
    except ModelError:
        raise
    except Exception as error:
        raise _trace_error(loaded, error) from error


@contextlib.contextmanager
def quiet_export() -> Generator[None]:
    """Keeps torch's warnings, logs and half-traced graphs from the user, whose own warnings show when the model runs.

    What goes wrong is in the exception.
    """
    disabled = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(disabled)


def list_parameters(model: nn.Module) -> tuple[Parameter, ...]:
    """Every parameter once, with the further FQNs of tied ones."""
    names: dict[int, list[str]] = {}
    tensors: dict[int, nn.Parameter] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
        tensors[id(parameter)] = parameter
    return tuple(
        Parameter(
            fqn=fqns[0],
            shape=tuple(tensors[key].shape),
            dtype=str(tensors[key].dtype).removeprefix("torch."),
            trainable=tensors[key].requires_grad,
            aliases=tuple(fqns[1:]),
        )
        for key, fqns in names.items()
    )


def _trace_error(loaded: LoadedModel, error: Exception) -> ModelError:
    """Where the trace stopped: the operator, and the user's line that called it."""
    torch_folder = str(Path(inspect.getfile(torch)).parent)
    planner_folder = str(Path(inspect.getfile(ModelError)).parent)
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not frame.filename.startswith((torch_folder, planner_folder, "<"))]
    place = f" at {Path(own[-1].filename).name}:{own[-1].lineno} `{own[-1].line}`" if own else ""
    operator = _failed_operator(error)
    reason = str(error).strip().splitlines()[0] if str(error).strip() else ""
    if type(error).__name__ == "GuardOnDataDependentSymNode":
        reason = "the control flow depends on the values of tensors"
    return ModelError(
        f"{loaded.source.name} cannot be traced: {operator or 'the forward pass'} failed{place}: "
        f"{type(error).__name__}: {reason}",
        hint="shapes and control flow may not depend on the values of tensors; mixed dtypes need a cast",
    )


def _failed_operator(error: Exception) -> str | None:
    """The innermost ATen operator on the stack when ``error`` was raised."""
    name: str | None = None
    frame = error.__traceback__
    while frame is not None:
        operator = frame.tb_frame.f_locals.get("func")
        if isinstance(operator, torch._ops.OpOverload):
            name = str(operator)
        frame = frame.tb_next
    return name
