"""From a loaded model to its ModelGraph, by the first way of tracing that works.

1. ``export``: torch.export of one training step, on the meta device, then as if on the CPU.
2. ``modules``: the modules are run on tensors without values and watched, on the meta device, then
   as if on the CPU; there, values that the model's Python asks for are known or assumed.

Neither parameters nor activations take memory, so any size of model can be traced. As in
mixed-precision training under FSDP, parameters and floating inputs are in the dtype of the
precision; buffers and what the model computes in float32 stay in float32.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import nn

from costmodels.vocabulary.choices import Precision
from planner.errors import ModelError
from planner.graph.assemble import GraphHeader, assemble_graph
from planner.graph.mixing import mixing_warnings
from planner.graph.model_graph import ModelGraph, Node, Parameter
from planner.graph.tracer.assumptions import Assumptions, trace_with_guesses
from planner.graph.tracer.export import export_step, quiet
from planner.graph.tracer.failure import Failure, TraceStoppedError
from planner.graph.tracer.folding import Fold, find_folds, shortened, unfold
from planner.graph.tracer.nodes import NodeBuilder
from planner.graph.tracer.program import Program
from planner.graph.tracer.recording import record_step
from planner.graph.tracer.stand_ins import Sizes, StandIn, TrainingStep, on_fake_cpu, on_meta, on_valued_cpu
from planner.model_file import LoadedModel
from planner.models.causal_masks import unfinished_passes_forgotten
from planner.models.grouped_shapes import know_grouped_shapes

_DTYPES = {Precision.BF16: "bfloat16", Precision.FP16: "float16", Precision.FP32: "float32", Precision.FP8: "bfloat16"}

_NAMES_DTYPE = re.compile(r"bfloat16|float16|\bhalf\b|dtype|scalar type", re.IGNORECASE)
Run = Callable[[TrainingStep, StandIn], Program]
Tier = Literal["export", "modules"]
TIERS: tuple[Tier, ...] = ("export", "modules")


def traced_dtype(precision: Precision) -> str:
    """Dtype of parameters and activations under ``precision``; 8-bit products keep bfloat16 activations."""
    return _DTYPES[precision]


@dataclass(frozen=True)
class Traced:
    """The operators of one training step."""

    nodes: tuple[Node, ...]
    edges: tuple[tuple[int, int], ...]
    parameters: tuple[Parameter, ...]
    warnings: tuple[str, ...]
    reads_values: tuple[str, ...]  # modules whose Python asks for values of tensors
    assumed: tuple[str, ...] = ()  # what was not known of such values


def trace_model(
    loaded: LoadedModel,
    batch_size: int,
    seq_len: int,
    dtype: str = "bfloat16",
    tiers: tuple[Tier, ...] = TIERS,
) -> ModelGraph:
    """The operators of one training step on ``batch_size`` sequences of ``seq_len`` tokens.

    Equal blocks are traced once where they provably repeat one another. ModelError says where each
    of ``tiers`` stopped, if none works.
    """
    know_grouped_shapes()
    sizes = Sizes(batch_size, seq_len, dtype)
    ways: dict[Tier, tuple[Callable[[], Traced], ...]] = {
        "export": (
            lambda: _trace(loaded, lambda: (on_meta(loaded, sizes), export_step)),
            lambda: _trace(loaded, lambda: (on_fake_cpu(loaded, sizes), export_step)),
        ),
        "modules": (
            lambda: _trace(loaded, lambda: (on_meta(loaded, sizes), _watch)),
            lambda: _trace_with_values(loaded, sizes),
        ),
    }
    stopped: dict[Tier, Failure] = {}
    for tier in tiers:
        for way in ways[tier]:
            try:
                with unfinished_passes_forgotten():
                    traced = way()
            except TraceStoppedError as error:
                stopped[tier] = error.failure
            except ModelError:  # it cannot be built as if on the CPU: why that was tried says more
                if not stopped:
                    raise
                raise _no_way(loaded, list(stopped.values()), dtype) from None
            else:
                stopped.pop(tier, None)
                return _graph(loaded, sizes, tier, _noting(traced, stopped))
    raise _no_way(loaded, list(stopped.values()), dtype)


def trace_whole(loaded: LoadedModel, batch_size: int, seq_len: int, dtype: str = "bfloat16") -> ModelGraph:
    """As ``trace_model``, by torch.export alone and block by block, equal or not."""
    sizes = Sizes(batch_size, seq_len, dtype)
    return _graph(loaded, sizes, "export", _whole(loaded, on_meta(loaded, sizes), export_step))


def _graph(loaded: LoadedModel, sizes: Sizes, tier: Tier, traced: Traced) -> ModelGraph:
    notices = (f"{loaded.stands_for}; planned for a generic model of the same sizes",) if loaded.stands_for else ()
    notices += (f"{loaded.source.name} is traced without {loaded.left_out}",) if loaded.left_out else ()
    kind = "config" if loaded.stands_for else tier
    header = GraphHeader(loaded.source.name, loaded.digest, kind, sizes.batch_size, sizes.seq_len, sizes.dtype)
    warnings = (*notices, *traced.assumed, *traced.warnings)
    graph = assemble_graph(header, traced.nodes, traced.edges, traced.parameters, warnings)
    return graph.model_copy(update={"reads_values": traced.reads_values})


def _noting(traced: Traced, stopped: dict[Tier, Failure]) -> Traced:
    """``traced`` with a warning that names where the tiers before it stopped, and what that loses."""
    lost = "what it asks of values is assumed" if traced.assumed else "nothing is lost"
    notes = tuple(
        f"traced by running the modules, since torch.{tier} stopped: {failure}; {lost}"
        for tier, failure in stopped.items()
    )
    return replace(traced, assumed=(*notes, *traced.assumed))


def _no_way(loaded: LoadedModel, failures: list[Failure], dtype: str) -> ModelError:
    texts = dict.fromkeys(map(str, failures))
    hints = [failure.hint for failure in failures if failure.hint]
    plain = "correct the line, or keep it out of the forward pass; mixed dtypes need a cast"
    if dtype != "float32" and any(_NAMES_DTYPE.search(text) for text in texts):
        plain += f", or plan in float32 (--precision fp32) a model that does not run in {dtype}"
    return ModelError(
        f"{loaded.source.name} cannot be traced: {'; then, run module by module, '.join(texts)}",
        hint=hints[0] if hints else plain,
    )


def _watch(step: TrainingStep, stand_in: StandIn) -> Program:
    with torch.device(stand_in.device):
        return record_step(step, stand_in.batch)


def _trace_with_values(loaded: LoadedModel, sizes: Sizes) -> Traced:
    """As if on the CPU, with what is known or assumed of values; each guess of a branch is another trace."""

    def trace(assumptions: Assumptions) -> Traced:
        def prepared() -> tuple[StandIn, Run]:
            valued = on_valued_cpu(loaded, sizes)
            assumptions.know(valued.known)

            def run(step: TrainingStep, stand_in: StandIn) -> Program:
                with valued.mode, torch.device(stand_in.device), assumptions.answering():
                    return record_step(step, stand_in.batch, assumptions.run)

            return valued.stand_in, run

        return _trace(loaded, prepared)

    traced, notes = trace_with_guesses(trace, lambda traced: _work(traced.nodes))
    return replace(traced, assumed=notes)


def _work(nodes: tuple[Node, ...]) -> tuple[int, int]:
    """What tells more work from less: FLOPs, then bytes."""
    return sum(n.flops + n.backward_flops for n in nodes), sum(n.bytes_read + n.bytes_written for n in nodes)


def _trace(loaded: LoadedModel, prepared: Callable[[], tuple[StandIn, Run]]) -> Traced:
    """Block by distinct block where that works; else whole, with a new stand-in: the first may remember what it ran."""
    stand_in, run = prepared()
    folds = find_folds(stand_in.model)
    folded = _folded(loaded, stand_in, folds, run) if folds else None
    if folded is not None:
        return folded
    if folds:
        stand_in, run = prepared()
    return _whole(loaded, stand_in, run)


def _whole(loaded: LoadedModel, stand_in: StandIn, run: Run) -> Traced:
    """The nodes of the model as it is; TraceStoppedError says where it stopped."""
    model = stand_in.model
    step = TrainingStep(model, loaded.loss_fn, stand_in.inputs)
    parameters = list_parameters(model)
    try:
        with quiet():
            program = run(step, stand_in)
    except Exception as error:
        raise TraceStoppedError(Failure.of(error)) from error
    builder = NodeBuilder(
        module_names=_first_names(model),
        parameters={alias: p for p in parameters for alias in p.names},
        folder=str(loaded.source.path.resolve().parent) if loaded.source.path else "",
    )
    builder.add_program(program)
    shapes = {name: parameter.shape for parameter in parameters for name in parameter.names}
    mixing = mixing_warnings(builder.nodes(), builder.edges(), shapes, stand_in.batch_size, builder.of_loss())
    warnings = (*builder.warnings(), *mixing)
    return Traced(builder.nodes(), builder.edges(), parameters, warnings, builder.reads_values())


def _first_names(model: nn.Module) -> dict[str, str]:
    """Each FQN of a module, and the first of this module's: where it is called by another, it is the same module."""
    first: dict[nn.Module, str] = {}
    return {name: first.setdefault(module, name) for name, module in model.named_modules(remove_duplicate=False)}


def _folded(loaded: LoadedModel, stand_in: StandIn, folds: tuple[Fold, ...], run: Run) -> Traced | None:
    """The nodes of the model from a trace of its distinct blocks; None where it does not fold."""
    try:
        with shortened(stand_in.model, folds):
            traced = _whole(loaded, stand_in, run)
    except TraceStoppedError:
        return None  # perhaps it counts its layers: the whole model will tell
    nodes, edges = traced.nodes, traced.edges
    for fold in folds:
        unfolded = unfold(nodes, edges, fold)
        if unfolded is None:
            return None
        nodes, edges = unfolded
    return replace(traced, nodes=nodes, edges=edges, parameters=list_parameters(stand_in.model))


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
