"""From a traced program's fx nodes to graph nodes: names, aliases, gradients, work and what is saved."""

# pyright: reportPrivateUsage=false
# torch has no public name for an operator overload, its schema, or the identity of a storage.

from __future__ import annotations

import operator
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from torch import fx, nn

from hardware_profiles.vocabulary import OpClass
from planner.graph.model_graph import Node, Parameter
from planner.graph.tracer import stand_ins
from planner.graph.tracer.failure import Failure, TraceStoppedError
from planner.graph.tracer.frames import short_place
from planner.graph.tracer.fx_reading import (
    ValueDependentSizeError,
    asks_for_value,
    attribute_value,
    base_name,
    distinct_bytes,
    flat_nodes,
    inlined_region,
    named_arguments,
    operator_run_by,
    past_same_shape,
    storage_bytes,
    storage_of,
    tensor_value,
    values_of,
    writes_sequence_first,
)
from planner.graph.tracer.measured import Measurements
from planner.graph.tracer.program import GRAD_ENABLED, MODEL, Program
from planner.operators.call import AttributeValue, OpCall, Saved, TensorValue
from planner.operators.product_rules import Products
from planner.operators.record import Trait
from planner.operators.registry import operator_called
from planner.operators.saved_rules import keep_all
from planner.operators.work import saved_for_backward, work_of

_DROPPED = ("_assert", "sym_constrain", "sym_size", "sym_numel", "sym_stride")
_IGNORED_ARGUMENTS = frozenset(("device", "layout", "memory_format", "pin_memory", "non_blocking", "generator"))
_CALLS_LOSS = stand_ins.__file__
_SOURCE_LINE = re.compile(r'File "([^"]+)", line (\d+)')


@dataclass(frozen=True)
class _Entry:
    """What one fx value is: where it comes from, its tensor, and the memory behind it."""

    source: int | str | None  # node id, parameter FQN, or None for a buffer or constant
    value: TensorValue
    owner: int | None  # node that owns the memory; None: a parameter's, a buffer's or a constant's
    batch_dependent: bool = False


@dataclass(frozen=True)
class _Write:
    """The last in-place write to some memory."""

    node: int
    requires_grad: bool
    batch_dependent: bool


class NodeBuilder:
    """Collects the nodes of one program, in execution order."""

    def __init__(self, module_names: Mapping[str, str], parameters: Mapping[str, Parameter], folder: str) -> None:
        self._module_names = module_names
        self._parameters = parameters
        self._folder = folder
        self._nodes: list[Node] = []
        self._edges: set[tuple[int, int]] = set()
        self._warnings: dict[str, str] = {}
        self._measurements = Measurements()
        self._owners: dict[int, int | None] = {}  # storage -> owning node
        self._writes: dict[int, _Write] = {}  # owning node -> last write
        self._is_tuple: set[int] = set()
        self._reads_values: set[str] = set()
        self._of_loss: set[int] = set()

    def nodes(self) -> tuple[Node, ...]:
        """All nodes; gradients that are summed where values have several users stand apart."""
        return tuple(self._nodes)

    def edges(self) -> tuple[tuple[int, int], ...]:
        """Producer to consumer, in order."""
        return tuple(sorted(self._edges))

    def warnings(self) -> tuple[str, ...]:
        """What was not understood, once for each operator."""
        return tuple(self._warnings.values())

    def reads_values(self) -> tuple[str, ...]:
        """Modules whose Python asks for values of tensors."""
        return tuple(sorted(self._reads_values))

    def of_loss(self) -> frozenset[int]:
        """Ids of operators that no module of the model ran."""
        return frozenset(self._of_loss)

    def add_program(self, program: Program) -> None:
        """Adds all of a traced training step."""
        environment: dict[fx.Node, list[_Entry]] = {}
        for node in program.graph.nodes:
            if node.op == "placeholder" and isinstance(node.meta.get("val"), torch.Tensor):
                environment[node] = [self._placeholder(node, program)]
        self._add_nodes(program.graph, program.holder, environment, grad_enabled=True)

    def _placeholder(self, node: fx.Node, program: Program) -> _Entry:
        value = node.meta["val"]
        storage = storage_of(value)
        if node.name in program.parameters:
            parameter = self._parameters[program.parameters[node.name]]
            self._owners[storage] = None
            tensor = tensor_value(value, requires_grad=parameter.trainable)
            return _Entry(parameter.fqn, replace(tensor, is_weight=True, is_parameter=True), None)
        if node.name not in program.inputs:
            self._owners[storage] = None
            return _Entry(None, replace(tensor_value(value), is_parameter=True), None)
        index = len(self._nodes)
        self._owners[storage] = index
        tensor = tensor_value(value)
        self._nodes.append(
            Node(
                id=index,
                op="input",
                op_class=OpClass.VIEW,
                module="",
                shape=tensor.shape,
                dtype=tensor.dtype,
                storage=index,
                output_bytes=storage_bytes(value),
                num_kernels=0,
            )
        )
        return _Entry(index, tensor, index, batch_dependent=True)

    def _add_nodes(
        self, graph: fx.Graph, module: nn.Module, environment: dict[fx.Node, list[_Entry]], *, grad_enabled: bool
    ) -> list[_Entry]:
        """Adds a graph's operators; the entries of its outputs come back. ``module`` holds what it refers to."""
        for node in graph.nodes:
            if node.op == "output":
                return [entry for value in flat_nodes(node.args) for entry in environment.get(value, [])]
            if node.op == "get_attr":
                constant = getattr(module, str(node.target), None)
                if isinstance(constant, torch.Tensor):
                    self._owners[storage_of(constant)] = None
                    environment[node] = [_Entry(None, replace(tensor_value(constant), is_parameter=True), None)]
            elif node.op == "call_function":
                environment[node] = self._call(module, node, environment, grad_enabled=grad_enabled)
        return []

    def _call(
        self, module: nn.Module, node: fx.Node, environment: dict[fx.Node, list[_Entry]], *, grad_enabled: bool
    ) -> list[_Entry]:
        target = node.target
        if target is operator.getitem:
            return self._element(node, environment)
        inner = inlined_region(module, node)
        if inner is not None:
            graph, values, enabled = inner
            placeholders = [n for n in graph.graph.nodes if n.op == "placeholder"]
            scope = {
                placeholder: environment[value]
                for placeholder, value in zip(placeholders, values, strict=False)
                if isinstance(value, fx.Node) and value in environment
            }
            self._inherit_stack(graph, node)
            return self._add_nodes(graph.graph, graph, scope, grad_enabled=grad_enabled if enabled is None else enabled)
        # The loss, outside the model, may read what it likes.
        if asks_for_value(operator_run_by(node)) and _module_names(node):
            self._reads_values.add(self._module_of(node))
        if not values_of(node) or str(getattr(target, "__name__", target)).startswith(_DROPPED):
            return []
        try:
            grad_enabled = grad_enabled and node.meta.get(GRAD_ENABLED, True)
            return self._operator(node, environment, grad_enabled=grad_enabled)
        except ValueDependentSizeError as error:
            reason = f"it makes {error}, whose size depends on the values of tensors"
            raise TraceStoppedError(Failure(str(target), self._source_of(node), reason)) from error

    def _inherit_stack(self, graph: fx.GraphModule, outer: fx.Node) -> None:
        """Operators of an inlined region that know no module belong to the module around it."""
        for node in graph.graph.nodes:
            for key in ("nn_module_stack", "stack_trace"):
                if key not in node.meta and key in outer.meta:
                    node.meta[key] = outer.meta[key]

    def _element(self, node: fx.Node, environment: dict[fx.Node, list[_Entry]]) -> list[_Entry]:
        """One element of a tuple: of an inlined region it is the value itself, else a view."""
        parent, index = node.args[0], node.args[1]
        entries = environment.get(parent, []) if isinstance(parent, fx.Node) else []
        if not isinstance(index, int) or not entries:
            return []
        if entries[0].source not in self._is_tuple:
            return [entries[index]]
        entry, value = entries[index], node.meta["val"]
        new = len(self._nodes)
        tensor = tensor_value(value, requires_grad=entry.value.requires_grad)
        owner = self._owners.get(storage_of(value), entry.owner)
        self._nodes.append(
            Node(
                id=new,
                op="getitem",
                op_class=OpClass.VIEW,
                module=self._module_of(node),
                source=self._source_of(node),
                operands=(entry.source,),
                attributes={"index": index},
                shape=tensor.shape,
                dtype=tensor.dtype,
                storage=new if owner is None else owner,
                batch_dependent=entry.batch_dependent,
                num_kernels=0,
                requires_grad=tensor.requires_grad,
            )
        )
        if isinstance(entry.source, int):
            self._edges.add((entry.source, new))
        self._owners[storage_of(value)] = owner
        return [replace(entry, source=new, value=replace(tensor, is_weight=entry.value.is_weight), owner=owner)]

    def _operator(self, node: fx.Node, environment: dict[fx.Node, list[_Entry]], *, grad_enabled: bool) -> list[_Entry]:
        name, is_mutating = base_name(node)
        entries, attributes = _arguments(node, environment)
        entries = {key: self._as_last_written(entry) for key, entry in entries.items()}
        values = values_of(node)
        outputs = [self._result(name, value, entries, grad_enabled=grad_enabled) for value in values]
        new = len(self._nodes)
        owner, is_view = self._memory(node, name, values, entries, is_mutating=is_mutating)
        first = max(outputs, key=lambda output: output.requires_grad) if len(outputs) > 1 else outputs[0]
        if is_view and len(outputs) > 1:
            source = next(iter(entries.values())).value
            first = replace(first, shape=source.shape, dtype=source.dtype)
        output_bytes = distinct_bytes(values) if owner == new else 0
        written = output_bytes or (0 if is_view else sum(output.num_elements * output.item_bytes for output in outputs))
        call = OpCall(name, {key: entry.value for key, entry in entries.items()}, first, attributes, written)
        saved, measured = (Saved(), None) if is_view else self._saved(node, call)
        work = work_of(call, _bytes_of(call, saved), is_view=is_view, measured=measured)
        takes_values = not operator_called(name).has(Trait.SHAPE_ALONE)
        batch_dependent = takes_values and any(entry.batch_dependent for entry in entries.values())
        self._nodes.append(
            Node(
                id=new,
                op=str(node.target),
                module=self._module_of(node),
                source=self._source_of(node),
                operands=tuple(entry.source for entry in entries.values()),
                attributes=attributes,
                shape=first.shape,
                dtype=first.dtype,
                saves=self._saved_storages(saved, entries, owner),
                saved_extra_bytes=saved.extra_bytes,
                storage=new if owner is None else owner,
                batch_dependent=batch_dependent,
                output_bytes=output_bytes,
                requires_grad=first.requires_grad,
                **asdict(work),
            )
        )
        if not _module_names(node):
            self._of_loss.add(new)
        self._record(new, values, owner, entries)
        if is_mutating and owner is not None:
            self._writes[owner] = _Write(new, first.requires_grad, batch_dependent)
        if isinstance(node.meta["val"], list | tuple):
            self._is_tuple.add(new)
        return [_Entry(new, replace(output, is_parameter=owner is None), owner, batch_dependent) for output in outputs]

    def _as_last_written(self, entry: _Entry) -> _Entry:
        """A value whose memory was written in place since is what was written."""
        write = self._writes.get(entry.owner) if entry.owner is not None else None
        if write is None or not isinstance(entry.source, int) or entry.source >= write.node:
            return entry
        value = replace(entry.value, requires_grad=entry.value.requires_grad or write.requires_grad)
        return replace(entry, value=value, batch_dependent=entry.batch_dependent or write.batch_dependent)

    def _record(self, new: int, values: list[torch.Tensor], owner: int | None, entries: Mapping[str, _Entry]) -> None:
        """Remembers who owns the memory of the results, and the edges from the operands."""
        for value in values:
            self._owners.setdefault(storage_of(value), owner)
        for entry in entries.values():
            if isinstance(entry.source, int):
                self._edges.add((entry.source, new))
            write = self._writes.get(entry.owner) if entry.owner is not None else None
            if write is not None and write.node != new:
                self._edges.add((write.node, new))

    def _result(
        self, name: str, value: torch.Tensor, entries: Mapping[str, _Entry], *, grad_enabled: bool
    ) -> TensorValue:
        tensors = [entry.value for entry in entries.values()]
        cuts = operator_called(name).has(Trait.CUTS_GRADIENT)
        has_gradient = value.dtype.is_floating_point or value.dtype.is_complex
        differentiable = grad_enabled and not cuts and has_gradient
        requires_grad = differentiable and any(tensor.requires_grad for tensor in tensors)
        is_weight = any(tensor.is_weight for tensor in tensors) and not any(
            entry.batch_dependent for entry in entries.values()
        )
        return replace(tensor_value(value, requires_grad=requires_grad), is_weight=is_weight)

    def _memory(
        self, node: fx.Node, name: str, values: list[torch.Tensor], entries: Mapping[str, _Entry], *, is_mutating: bool
    ) -> tuple[int | None, bool]:
        """The node that owns the result's memory, and whether the operator moves nothing at all."""
        new = len(self._nodes)
        if not entries:
            return new, False
        source = next(iter(entries.values()))
        if is_mutating:
            return source.owner, False
        passes_through = operator_called(name).has(Trait.DROPOUT) and (node.args[1] == 0 or node.args[2] is False)
        if passes_through or self._is_free_on_cuda(node):
            self._owners[storage_of(values[0])] = source.owner
            return source.owner, True
        storages = {storage_of(value) for value in values}
        if all(storage in self._owners for storage in storages):
            return self._owners[next(iter(storages))], True
        return new, False

    def _is_free_on_cuda(self, node: fx.Node) -> bool:
        """Whether this copies attention's output back to (batch, sequence, heads, width).

        Where CUDA's kernel writes that layout ``transpose(1, 2).reshape(...)`` is a view; the meta device's is always
        (batch, heads, sequence, width), where it is a copy.
        """
        if not operator_run_by(node).has(Trait.KEEPS_ORDER):
            return False
        parent = past_same_shape(node.args[0])
        if parent is None or not operator_run_by(parent).has(Trait.PERMUTES_DIMS):
            return False
        attention = past_same_shape(parent.args[0])
        if attention is None or operator_run_by(attention).work.op_class is not OpClass.ATTENTION:
            return False
        before, after = attention.meta["val"].shape, parent.meta["val"].shape
        is_back = len(before) == 4 and after == (before[0], before[2], before[1], before[3])
        return is_back and writes_sequence_first(attention)

    def _saved(self, node: fx.Node, call: OpCall) -> tuple[Saved, Products | None]:
        """What ``call`` keeps; without a rule, that and its products as a run on meta shows them."""
        saved = saved_for_backward(call)
        if saved is not None:
            return saved, None
        measured = self._measurements.of(node, call.tensors)
        place = self._source_of(node)
        how = "counted by running it on meta" if measured else "priced by its bytes, all its operands taken as kept"
        self._warnings.setdefault(
            call.name, f"no rule for operator {node.target}{f' ({place})' if place else ''}: replicated, {how}"
        )
        return (measured.saved, measured.products) if measured else (keep_all(call), None)

    def _saved_storages(self, saved: Saved, entries: Mapping[str, _Entry], owner: int | None) -> tuple[int, ...]:
        owners = [owner if name == "output" else entries[name].owner for name in saved.tensors]
        return tuple(dict.fromkeys(storage for storage in owners if storage is not None))

    def _module_of(self, node: fx.Node) -> str:
        """FQN of the innermost module; of one that has several names, its first."""
        names = reversed(_module_names(node))
        return next((self._module_names[name] for name in names if name in self._module_names), "")

    def _source_of(self, node: fx.Node) -> str:
        """The user's line; "" where torch names none: of what a loss does it knows that we called it."""
        lines = [place for place in _SOURCE_LINE.findall(node.meta.get("stack_trace") or "") if place[0] != _CALLS_LOSS]
        own = [place for place in lines if "/site-packages/torch/" not in place[0]] or lines
        if not own:
            return ""
        file, line = own[-1]
        if self._folder and "site-packages/" not in file and Path(file).is_relative_to(self._folder):
            return f"{Path(file).relative_to(self._folder)}:{line}"
        return short_place(file, int(line))


def _module_names(node: fx.Node) -> list[str]:
    """FQNs of the model's modules that ran the operator, outermost first; none for the loss."""
    stack = [name for name, _ in (node.meta.get("nn_module_stack") or {}).values()]
    return [name.removeprefix(MODEL).removeprefix(".") for name in stack if name.split(".")[0] == MODEL]


def _bytes_of(call: OpCall, saved: Saved) -> int:
    tensors = [call.output if name == "output" else call.tensors[name] for name in saved.tensors]
    return saved.extra_bytes + sum(tensor.num_bytes for tensor in tensors if not tensor.is_parameter)


def _arguments(
    node: fx.Node, environment: Mapping[fx.Node, list[_Entry]]
) -> tuple[dict[str, _Entry], dict[str, AttributeValue]]:
    """Tensor operands and other arguments by schema name."""
    entries: dict[str, _Entry] = {}
    attributes: dict[str, AttributeValue] = {}
    for name, value in named_arguments(node):
        if isinstance(value, fx.Node):
            found = environment.get(value)
            if found:
                entries[name] = found[0]
        elif isinstance(value, list | tuple) and any(isinstance(item, fx.Node) for item in value):
            for index, item in enumerate(value):
                found = environment.get(item) if isinstance(item, fx.Node) else None
                if found:
                    entries[f"{name}.{index}"] = found[0]
        elif name not in _IGNORED_ARGUMENTS:
            attributes[name] = attribute_value(value)
    return entries, attributes
