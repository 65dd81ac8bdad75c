"""From a loaded model to its ModelGraph: torch.export of one training step on the meta device.

The training IR of ``torch.export`` keeps linear, norms, attention and cross entropy whole. Neither
parameters nor activations take memory, so any size of model can be traced. As in mixed-precision
training under FSDP, parameters and floating inputs are in the dtype of the precision; buffers and
what the model computes in float32 stay in float32.
"""

# pyright: reportPrivateUsage=false
# torch has no public name for an operator overload, its schema, or the identity of a storage.

from __future__ import annotations

import inspect
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from planner.errors import ModelError
from planner.graph.assemble import GraphHeader, assemble_graph
from planner.graph.model_graph import ModelGraph, Node, Parameter
from planner.graph.tracer.folding import find_folds, shortened, unfold
from planner.graph.tracer.nodes import NodeBuilder
from planner.model_file import LoadedModel, call_model, training_batch
from planner.parallelism import Precision

Batch = dict[str, torch.Tensor] | tuple[torch.Tensor, ...]

_DTYPES = {Precision.BF16: "bfloat16", Precision.FP16: "float16", Precision.FP32: "float32", Precision.FP8: "bfloat16"}


def traced_dtype(precision: Precision) -> str:
    """Dtype of parameters and activations under ``precision``; 8-bit products keep bfloat16 activations."""
    return _DTYPES[precision]


class TrainingStep(nn.Module):
    """The forward pass and the loss as one module."""

    def __init__(self, model: nn.Module, loss_fn: Callable[[object, Batch], torch.Tensor], inputs: Batch) -> None:
        super().__init__()
        self.model = model
        self.loss_fn = loss_fn
        self.input_names = tuple(inputs) if isinstance(inputs, dict) else None

    def forward(self, batch: Batch) -> torch.Tensor:
        """``batch``: the inputs and what the loss needs besides."""
        if isinstance(batch, dict):
            inputs: Batch = {name: batch[name] for name in self.input_names or ()}
        else:
            inputs = batch
        return self.loss_fn(call_model(self.model, inputs), batch)


def trace_model(loaded: LoadedModel, batch_size: int, seq_len: int, dtype: str = "bfloat16") -> ModelGraph:
    """The operators of one training step on ``batch_size`` sequences of ``seq_len`` tokens.

    Equal blocks are traced once where they provably repeat one another.
    """
    model = build_on_meta(loaded, dtype)
    example = example_batch(loaded, batch_size, seq_len, dtype)
    traced = _folded(loaded, model, example) or _whole(loaded, model, example)
    header = GraphHeader(loaded.source.name, loaded.digest, "export", batch_size, seq_len, dtype)
    return assemble_graph(header, traced.nodes, traced.edges, list_parameters(model), traced.warnings)


def trace_whole(loaded: LoadedModel, batch_size: int, seq_len: int, dtype: str = "bfloat16") -> ModelGraph:
    """As ``trace_model``, block by block, equal or not."""
    model = build_on_meta(loaded, dtype)
    traced = _whole(loaded, model, example_batch(loaded, batch_size, seq_len, dtype))
    header = GraphHeader(loaded.source.name, loaded.digest, "export", batch_size, seq_len, dtype)
    return assemble_graph(header, traced.nodes, traced.edges, list_parameters(model), traced.warnings)


@dataclass(frozen=True)
class _Traced:
    nodes: tuple[Node, ...]
    edges: tuple[tuple[int, int], ...]
    warnings: tuple[str, ...]


def _whole(loaded: LoadedModel, model: nn.Module, example: tuple[Batch, Batch]) -> _Traced:
    """The nodes of ``model`` as it is."""
    exported = export_step(loaded, model, example)
    builder = NodeBuilder(
        module_names=frozenset(name for name, _ in model.named_modules()),
        parameters={alias: p for p in list_parameters(model) for alias in (p.fqn, *p.aliases)},
        folder=str(loaded.source.path.resolve().parent) if loaded.source.path else "",
    )
    builder.add_program(exported)
    return _Traced(builder.nodes(), builder.edges(), builder.warnings())


def _folded(loaded: LoadedModel, model: nn.Module, example: tuple[Batch, Batch]) -> _Traced | None:
    """The nodes of ``model`` from a trace of its distinct blocks; None where it does not fold."""
    folds = find_folds(model)
    if not folds:
        return None
    try:
        with shortened(model, folds):
            traced = _whole(loaded, model, example)
    except ModelError:
        return None  # perhaps it counts its layers: the whole model will tell
    nodes, edges = traced.nodes, traced.edges
    for fold in folds:
        unfolded = unfold(nodes, edges, fold)
        if unfolded is None:
            return None
        nodes, edges = unfolded
    return _Traced(nodes, edges, traced.warnings)


def build_on_meta(loaded: LoadedModel, dtype: str) -> nn.Module:
    """The module in training mode, its floating parameters in ``dtype``, without any memory."""
    with torch.device("meta"):
        model = loaded.build()
    model.train()
    target = getattr(torch, dtype)
    for parameter in model.parameters():
        if parameter.is_floating_point():
            parameter.data = parameter.data.to(device="meta", dtype=target)
    return model


def example_batch(loaded: LoadedModel, batch_size: int, seq_len: int, dtype: str) -> tuple[Batch, Batch]:
    """The inputs of the module, and the batch that the loss sees, on meta."""
    target = getattr(torch, dtype)

    def move(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(device="meta", dtype=target if tensor.is_floating_point() else None)

    with torch.device("meta"):
        inputs = loaded.example_inputs(batch_size, seq_len)
        inputs = {k: move(v) for k, v in inputs.items()} if isinstance(inputs, dict) else tuple(map(move, inputs))
        return inputs, training_batch(inputs)


def export_step(loaded: LoadedModel, model: nn.Module, example: tuple[Batch, Batch]) -> torch.export.ExportedProgram:
    """torch.export of the forward pass with its loss; ModelError names the operator and the line."""
    inputs, batch = example
    step = TrainingStep(model, loaded.loss_fn, inputs)
    try:
        with warnings.catch_warnings(), torch.device("meta"):
            warnings.simplefilter("ignore")  # export's own; what the user's code warns of shows when it runs
            return torch.export.export(step, (batch,), strict=False)
    except ModelError:
        raise
    except Exception as error:
        raise _trace_error(loaded, error) from error


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
