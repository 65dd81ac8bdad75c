"""What a model must be for a plan to be executed, looked at before anything is split."""

# pyright: reportPrivateUsage=false
# torch has no public name for what all batch norms are.

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Generator, Sequence

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from costmodels.vocabulary.choices import Recompute
from planner.errors import ModelError, PlanError
from planner.executor.data_parallel import keeps_whole
from planner.executor.glue import DIFFERENTIATES, REPARAMETRIZES
from planner.executor.gradient_hooks import check_hooks
from planner.executor.stage_trace import META, Inputs, twin
from planner.executor.tensor_parallel import check_placements
from planner.model_file import check_num_params
from planner.models.inputs import LABELS, call_model
from planner.plan.checks import nearest
from planner.plan.schema import Plan

_ANY_NUMBER = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
NUM_NAMED = 3  # names in one message: enough to see which


def check_labels(module: nn.Module, inputs: Inputs) -> None:
    """ModelError where forward cannot be called without labels, which ``inputs`` do not have."""
    parameters = inspect.signature(module.forward).parameters.values()
    needed = [each.name for each in parameters if each.default is each.empty and each.kind not in _ANY_NUMBER]
    if LABELS in needed and LABELS not in inputs and len(inputs) < len(needed):  # as many may come in order
        raise ModelError(
            f"the model's forward needs {LABELS}: it is given {', '.join(inputs)} alone, and the loss function has the "
            "labels, the next tokens",
            hint=f"give {LABELS} a default, and return logits where there are none; a loss of these other than "
            f"next-token cross entropy is loss_fn(output, batch), which takes batch['{LABELS}']",
        )


def check_whole_sequences(inputs: Inputs) -> None:
    """PlanError where forward is given labels, of which each rank would see those of its own positions alone."""
    if LABELS in inputs:
        raise PlanError(
            f"the model's forward takes {LABELS}: under context parallelism each rank has some positions of a "
            "sequence, and a loss that forward computes itself could not look at the labels of the others",
            hint="plan with --cp 1, or leave labels out of example_inputs and let loss_fn(output, batch) compute the "
            "loss of logits",
        )


def check_trainable(module: nn.Module, inputs: Inputs, plan: Plan) -> None:
    """PlanError or ModelError where ``plan`` cannot train ``module``, which is whole and in training mode.

    Whoever takes one step of a plan asks this of the plan as it is, whatever precision and mode that step is in.
    """
    check_names(module, plan)
    check_buffers(module, inputs, plan)
    check_parameters(module, plan)
    check_placements(module, plan.placements.tp, plan.mesh.tp)
    check_num_params(plan.model, sum(parameter.numel() for parameter in module.parameters()))


def check_names(module: nn.Module, plan: Plan) -> None:
    """PlanError that lists the modules of ``sharded_units`` and ``recompute`` that the model does not have."""
    known = {fqn for fqn, _ in module.named_modules()}
    wanted = [("placements.sharded_units", plan.placements.sharded_units)]
    wanted += [("recompute", rule.modules) for rule in plan.recompute]
    wanted += [("offloaded_activations", plan.offloaded_activations)]
    problems = [f"{key} names {fqn!r}{nearest(fqn, known)}" for key, names in wanted for fqn in names
                if fqn not in known]  # fmt: skip
    if problems:
        raise PlanError(
            "the model has no such modules: " + "; ".join(problems),
            hint="search again for this model, or correct the names",
        )


def check_parameters(module: nn.Module, plan: Plan) -> None:
    """PlanError where what is tied to parameters as they are would be lost as they are divided or copied."""
    check_hooks(module, plan)
    renormed = [fqn for fqn, part in module.named_modules() if getattr(part, "max_norm", None) is not None]
    if renormed and (_keeps_copies(plan) or not keeps_whole(plan) or plan.mesh.tp > 1):
        raise PlanError(
            f"{', '.join(renormed[:NUM_NAMED])}: an embedding with max_norm changes its weights in the forward pass, "
            "and several ranks would each change their own",
            hint="leave max_norm out, or plan with --dp 1 --tp 1 --zero 0 in fp32",
        )
    tables = [(fqn, part) for fqn, part in module.named_modules() if isinstance(part, nn.Embedding | nn.EmbeddingBag)]
    sparse = [fqn for fqn, table in tables if table.sparse]
    if sparse:
        raise PlanError(
            f"{', '.join(sparse[:NUM_NAMED])}: an embedding with sparse=True has gradients of the rows that a batch "
            "reads, and those of several micro-batches and ranks are added up whole",
            hint="leave sparse out: gradients are the same numbers, and take as much memory as the table",
        )
    complex_ones = [fqn for fqn, parameter in module.named_parameters() if parameter.is_complex()]
    if complex_ones and not keeps_whole(plan):
        raise PlanError(
            f"complex parameters {', '.join(complex_ones[:NUM_NAMED])}: FSDP divides and casts real numbers alone",
            hint="plan with --zero 0 in fp32, or keep them as real numbers (torch.view_as_real) and make complex ones "
            "of them in forward",
        )


def check_parameters_kept(unrecorded: Sequence[str], plan: Plan) -> None:
    """PlanError where FSDP or a repeated pass loses what a forward does: ``unrecorded``, as a recording says it."""
    if DIFFERENTIATES in unrecorded and not keeps_whole(plan):
        raise PlanError(
            f"the model's forward {DIFFERENTIATES}: FSDP frees parameters in that backward pass, and the one after it "
            "needs them",
            hint="plan with --zero 0 in fp32",
        )
    if REPARAMETRIZES in unrecorded and (_repeats(plan) or not keeps_whole(plan)):
        by_fsdp = "FSDP gathers a module's own when it is called"
        by_repeating = "recomputation repeats these calls once a module's own are there again"
        raise PlanError(
            f"the model's forward {REPARAMETRIZES}: {by_repeating if keeps_whole(plan) else by_fsdp}",
            hint="plan with --zero 0 --recompute none in fp32, or compute with these parameters inside a block",
        )


def check_buffers(module: nn.Module, inputs: Inputs, plan: Plan) -> None:
    """ModelError where a forward pass changes buffers that several ranks, or a repeated pass, would each change.

    What cannot be found without values (``_changed_by_forward``) is found out in its second step
    (``buffers_unchanged``).
    """
    if _keeps_copies(plan):
        _refuse(_changed_by_forward(module, inputs), plan)


def _changed_by_forward(module: nn.Module, inputs: Inputs) -> list[str]:
    """FQNs of buffers that a forward pass changes, found by running a copy of ``module`` twice without values.

    None of a module that cannot run so, or that changes them where torch does not count it.
    """
    try:
        with torch.no_grad(), META:
            copied = twin(module, torch.float32, META)
            moved = {key: value.to(META) for key, value in inputs.items()}
            call_model(copied, moved)  # what is made once and kept, such as a table of angles, is made here
            before = _versions([copied])
            if before:
                call_model(copied, moved)
    except Exception:  # whatever the user's code raises without values
        return []
    return _changed(before, _versions([copied]))


def notes_on_parts(module: nn.Module, inputs: Inputs, plan: Plan, num_parts: int) -> list[str]:
    """What to say of a model that sees each global batch in ``num_parts`` parts."""
    size = plan.pipeline.micro_batch_size
    notes = [statistics_note(module, num_parts, size)]
    if num_parts > 1 and not _keeps_copies(plan):
        known = {fqn for fqn, layer in module.named_modules() if isinstance(layer, _BatchNorm)}
        changed = [fqn for fqn in _changed_by_forward(module, inputs) if fqn.rpartition(".")[0] not in known]
        more = f" and {len(changed) - NUM_NAMED} more" if len(changed) > NUM_NAMED else ""
        notes += [
            f"the model's forward changes its buffers {', '.join(changed[:NUM_NAMED])}{more}: a step runs it "
            f"{num_parts} times, on {size} samples each, and one process that takes all {num_parts * size} at once "
            "runs it once"
        ] * bool(changed)
    return [note for note in notes if note is not None]


def statistics_note(module: nn.Module, num_parts: int, part: int) -> str | None:
    """What to say of layers that look at all samples, where a batch is ``num_parts`` times ``part`` of them."""
    layers = list(module.named_modules())
    for what, found in (
        ("batch normalisation", [fqn for fqn, layer in layers if isinstance(layer, _BatchNorm) and layer.training]),
        ("scale_grad_by_freq", [fqn for fqn, layer in layers if getattr(layer, "scale_grad_by_freq", False)]),
    ):
        if found and num_parts > 1:
            return (
                f"{', '.join(found[:NUM_NAMED])}: {what} sees {part} samples at a time, not the {num_parts * part} of "
                "the global batch, so that it trains otherwise than one process that takes all at once"
            )
    return None


@contextlib.contextmanager
def buffers_unchanged(roots: Sequence[nn.Module], plan: Plan, *, enabled: bool) -> Generator[None]:
    """As ``check_buffers``, by the values, of a step inside: the second, since the first may make what is then kept."""
    if not enabled or not _keeps_copies(plan):
        yield
        return
    before = {fqn: buffer.detach().clone() for root in roots for fqn, buffer in root.named_buffers()}
    yield
    after = {fqn: buffer.detach() for root in roots for fqn, buffer in root.named_buffers()}
    _refuse([fqn for fqn, buffer in after.items() if fqn not in before or not _same(before[fqn], buffer)], plan)


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether all values are the same, not-a-numbers among them."""
    return one.shape == other.shape and bool(((one == other) | ((one != one) & (other != other))).all())


def _keeps_copies(plan: Plan) -> bool:
    shape = plan.mesh.shape()
    return shape.dp * shape.cp * shape.tp > 1 or _repeats(plan)


def _repeats(plan: Plan) -> bool:
    return any(rule.modules and rule.mode is not Recompute.NONE for rule in plan.recompute)


def _versions(roots: Sequence[nn.Module]) -> dict[str, tuple[int, int]]:
    """Which tensor each buffer is, and how often it was written to."""
    return {fqn: (id(buffer), buffer._version) for root in roots for fqn, buffer in root.named_buffers()}


def _changed(before: dict[str, tuple[int, int]], after: dict[str, tuple[int, int]]) -> list[str]:
    return [fqn for fqn, version in after.items() if before.get(fqn, version) != version]


def _refuse(changed: Sequence[str], plan: Plan) -> None:
    if not changed:
        return
    more = f" and {len(changed) - NUM_NAMED} more" if len(changed) > NUM_NAMED else ""
    degrees = {"dp": plan.mesh.shape().dp, "cp": plan.mesh.cp, "tp": plan.mesh.tp}
    why = ", ".join(f"{name}={degree}" for name, degree in degrees.items() if degree > 1) or "recomputation"
    raise ModelError(
        f"the model's forward changes its buffers {', '.join(changed[:NUM_NAMED])}{more}: under {why} they would not "
        "be what one process keeps",
        hint="use a layer that looks at one sample at a time (GroupNorm, LayerNorm), or plan for pipeline ranks alone "
        "without recomputation: statistics of a part of the batch are not those of all of it",
    )
