"""One traced training step: the common form in which every way of tracing hands it on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import fx, nn
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind

from planner.graph.tracer.failure import Failure, TraceStoppedError

PER_EXAMPLE = "torch._functorch.predispatch"  # the module of vmap's markers in an exported graph
MODEL = "model"  # the name of the user's model inside the traced step
GRAD_ENABLED = "grad_enabled"  # key in a node's meta: False where no gradient flows through it


@dataclass(frozen=True)
class Program:
    """Operators with fake results under ``meta["val"]``; a placeholder without a role is a buffer or constant."""

    graph: fx.Graph
    holder: nn.Module  # of the constants and inner graphs that the graph names
    parameters: Mapping[str, str]  # placeholder -> FQN
    inputs: frozenset[str]  # placeholders


def exported_program(program: ExportedProgram) -> Program:
    """What torch.export returned, as a Program.

    Under torch.vmap it shows each operator without the batch dim: TraceStoppedError then, for the sizes would be wrong.
    """
    for node in program.graph.nodes:
        if getattr(node.target, "__module__", None) == PER_EXAMPLE:
            raise TraceStoppedError(Failure("torch.vmap", "", "torch.export hides the dim that it maps over"))
    specs = [spec for spec in program.graph_signature.input_specs if hasattr(spec.arg, "name")]
    return Program(
        graph=program.graph,
        holder=program.graph_module,
        parameters={
            spec.arg.name: spec.target.removeprefix(f"{MODEL}.")
            for spec in specs
            if spec.kind is InputKind.PARAMETER and spec.target is not None
        },
        inputs=frozenset(spec.arg.name for spec in specs if spec.kind is InputKind.USER_INPUT),
    )
