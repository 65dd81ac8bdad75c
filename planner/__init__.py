"""Planner as a library: the commands of the same names as functions. Nothing heavy is imported before it is called.

import planner

plan = planner.search("llama3-8b", gpus=64, hardware="dgx-h100-80gb", tp=8)
print(plan.mesh, plan.prediction.step_time_s)
planner.estimate(plan, hardware="dgx-a100-80gb").prediction.step_time_s
planner.fit("llama3-70b", gpus=16).fits
planner.compare("llama3-8b", gpus=64, mine="tp=8").rows[0].framework
planner.explain(plan, why_not="tp=4").binding
planner.search(module, gpus=8, example_inputs={"input_ids": tokens})  # an nn.Module, on meta or with weights
"""

from __future__ import annotations

TYPE_CHECKING = False  # typing's, which takes as long to import as all else here: Ctrl-C meets none of that
if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from planner.api.compare import Comparison, Config
    from planner.api.explain import Explanation
    from planner.api.fit import Fit
    from planner.executor.in_script import LossFunction, Module
    from planner.executor.parallelize import ParallelModel
    from planner.layout.deadline import Deadline
    from planner.layout.layout import Pins
    from planner.model_file import ExampleInputs
    from planner.plan.schema import Plan
    from planner.request import Request

    Model = str | Path | Module

    __version__: str

__all__ = ["__version__", "compare", "estimate", "explain", "fit", "load_plan", "parallelize", "search"]


def search(
    model: Model,
    gpus: int | None = None,
    *,
    hardware: str | Path | None = None,
    example_inputs: ExampleInputs | None = None,
    loss_fn: LossFunction | None = None,
    **options: object,
) -> Plan:
    """The fastest plan that fits for ``model``: a preset, a model file, a config or a graph.json, as in a command.

    Or a module, on meta or with weights, which is copied without them and not changed. ``example_inputs`` and
    ``loss_fn(output, batch)`` are then what a model file calls so: a function (batch_size, seq_len), or one micro-batch
    (a tensor, a tuple or a dict by name, whose tensors begin with the number of samples); by default token ids and
    next-token cross entropy. ``model.source`` of its plan is ``module:`` and the name of its class: it is trained with
    ``planner.parallelize``, and ``planner run`` refuses it.

    ``warnings`` of the plan name what would be refused there, among it a loss, of a module or of a model file, that
    cannot be computed in the parts of the plan's batch.

    ``gpus`` may be left out where ``hardware``, a name or the path of a profile, counts them. ``options`` are fields of
    ``planner.request.Request``, such as ``seq_len``, ``global_batch_size`` and ``precision``, and pins of
    ``planner.layout.layout.Pins``, such as ``tp`` and ``zero``. Raises ``planner.errors.InputError``,
    ``InfeasibleError`` and ``TimeLimitError``.
    """
    from planner.api import find_plan
    from planner.api.asked import request_of
    from planner.layout.deadline import Deadline

    request = request_of(_model(model, example_inputs, loss_fn), gpus, hardware, options)
    deadline = Deadline.answering_within(request.time_limit_s)
    plan = find_plan(request, None, deadline).plan
    has_default_loss = request.held is not None and loss_fn is None
    return plan if has_default_loss else _with_loss_note(plan, request, deadline)


def fit(
    model: Model,
    gpus: int | None = None,
    *,
    hardware: str | Path | None = None,
    example_inputs: ExampleInputs | None = None,
    loss_fn: LossFunction | None = None,
    **options: object,
) -> Fit:
    """Whether ``model`` fits, and what else would. Arguments as of ``search``; without ``gpus`` on one node."""
    from planner.api.asked import request_of
    from planner.api.fit import find_fit

    return find_fit(request_of(_model(model, example_inputs, loss_fn), gpus, hardware, options))


def compare(
    model: Model,
    gpus: int | None = None,
    *,
    hardware: str | Path | None = None,
    mine: str | Path | None = None,
    example_inputs: ExampleInputs | None = None,
    loss_fn: LossFunction | None = None,
    **options: object,
) -> Comparison:
    """The best plan of every framework, the fastest first, and beside them ``mine``: ``tp=8,pp=4``, or a config's path.

    Other arguments as of ``search``; ``framework`` is that by which pins of ``mine`` are priced. Times are in seconds,
    memory in bytes. Raises ``planner.errors.InputError``; a framework without a plan is a row with its reason.
    """
    from dataclasses import replace

    from planner.api.asked import request_of
    from planner.api.compare import Config
    from planner.api.compare import compare as compared

    own = None if mine is None else _own(mine)
    request = request_of(_model(model, example_inputs, loss_fn), gpus, hardware, options)
    if isinstance(own, Config):
        own = replace(own, **{name: getattr(request, name) for name in ("precision", "optimizer") if name in options})
    return compared(request, own)


def explain(
    plan: Plan | str | Path,
    *,
    hardware: str | Path | None = None,
    why_not: str | None = None,
    tokens: int | None = None,
    searches: str = "memory",
    time_limit_s: float | None = None,
) -> Explanation:
    """Why ``plan``, or the plan in a file, is as it is: what binds, where time and memory go, what others lose.

    ``why_not``: pins as ``tp=4,pp=2``, of which the best plan is set beside. ``tokens``: of a whole run, for its days
    and dollars. ``searches``: for which changes the best plan is searched, ``none``, ``memory`` or ``all``; a search
    takes up to ``time_limit_s`` seconds. Raises ``planner.errors.InputError``.
    """
    from costmodels.vocabulary.choices import Searches
    from planner.api.asked import checked, pins_of, place
    from planner.api.explain import Wishes
    from planner.api.explain import explain as explained
    from planner.plan.schema import Plan

    wishes = Wishes(
        None if why_not is None else pins_of(why_not),
        checked("tokens", tokens, int | None),
        checked("searches", searches, Searches),
        checked("time_limit_s", time_limit_s, float | None),
    )
    _, profile = place(None, hardware)
    return explained(plan if isinstance(plan, Plan) else load_plan(plan), profile, wishes)


def parallelize(
    model: Module | Callable[[], Module],
    plan: Plan | str | Path,
    *,
    loss_fn: LossFunction | None = None,
    inputs: object = None,
    weights: str | Path | None = None,
) -> ParallelModel:
    """This rank's part of ``model`` under ``plan``, in a script that torchrun started. Collective over all ranks.

    ``torch.distributed`` is initialised, with as many ranks as the plan has devices. ``model`` is a function that
    builds it on the CPU, so that no rank holds more of it than its part: the values are those that it makes in one
    process, or those of ``weights``, a file or folder of safetensors. Or it is the model, which holds equal values on
    all ranks and is taken over. ``loss_fn(output, batch)`` is the loss of a batch, a scalar; None: mean
    cross entropy of the next token. ``inputs``: one micro-batch of what forward takes, nested as it takes it, and where
    ``labels`` are none of tokens those too; None: token ids, int64 (micro-batch, sequence).
    ``forward_backward(batch)`` of what is returned runs the micro-batches of one step, where ``batch`` is this
    data-parallel rank's part of the global batch with its ``labels``, nested like ``inputs``; its ``parameters()`` go
    into an optimiser. ``clip_gradients(max_norm)`` is torch's ``clip_grad_norm_`` over all of the model.
    ``loss_alone(batch)`` is the loss of held-back data; ``roots`` are the modules of this rank, for their modes and
    states. Parameters may be divided: change values in place (``copy_``), for what is assigned to ``.data`` is not
    seen. An optimiser is tried before its first step, which is refused where it looks at all parameters at once (LBFGS)
    under a pipeline, or cannot update divided ones. Raises ``planner.errors.PlanError`` and ``ModelError``.
    """
    from pathlib import Path

    from planner.executor.in_script import parallelized
    from planner.plan.schema import Plan

    loaded = plan if isinstance(plan, Plan) else load_plan(plan)
    return parallelized(model, loaded, loss_fn, inputs, None if weights is None else Path(weights))


def estimate(
    plan: Plan | str | Path,
    *,
    hardware: str | Path | None = None,
    gpus: int | None = None,
    framework: str | None = None,
) -> Plan:
    """``plan``, or the plan in a file, priced again: on other hardware, or with another data-parallel degree."""
    from planner.api import price_plan
    from planner.api.asked import checked, place
    from planner.plan.schema import Plan

    loaded = plan if isinstance(plan, Plan) else load_plan(plan)
    num_devices, profile = place(gpus, hardware)
    return price_plan(loaded, profile, num_devices, checked("framework", framework, str | None)).plan


def load_plan(
    path: str | Path,
    *,
    trust: bool = False,
    model: Module | None = None,
    example_inputs: ExampleInputs | None = None,
    loss_fn: LossFunction | None = None,
) -> Plan:
    """The plan in a file; ``planner.errors.PlanError`` with every violation where it is none.

    ``trust``: code of its model may be run that lies outside the folder of the plan. ``model``: the module that it was
    made for, with the ``example_inputs`` and ``loss_fn`` of the search, where that was held in Python and is not in the
    cache of this machine: PlanError where it is another.
    """
    from pathlib import Path

    from planner.plan.plan_file import read_plan

    plan = read_plan(Path(path), trust=trust)
    if model is not None:
        _make_known(plan, model, example_inputs, loss_fn)
    return plan


def _make_known(plan: Plan, model: Module, example_inputs: ExampleInputs | None, loss_fn: LossFunction | None) -> None:
    """Traces the module of a plan; PlanError where it is another's."""
    from planner.errors import PlanError
    from planner.model_file import held_model
    from planner.request import traced_anew

    graph = traced_anew(held_model(model, example_inputs, loss_fn), plan.training.seq_len, plan.training.precision)
    if graph.digest != plan.model.digest:
        raise PlanError(
            f"this is not the module that the plan was made for, {plan.model.source}: its operators differ",
            hint="pass that module with its example_inputs and loss_fn, or search again",
        )


def _model(model: object, example_inputs: object, loss_fn: object) -> object:
    """A module as it is loaded; anything else as it is."""
    import sys

    from planner.errors import InputError

    torch = sys.modules.get("torch")  # without it nobody holds a module
    if torch is not None and isinstance(model, torch.nn.Module):
        from planner.model_file import held_model

        return held_model(model, example_inputs, loss_fn)  # pyright: ignore[reportArgumentType]
    if example_inputs is not None or loss_fn is not None:
        raise InputError(
            "example_inputs and loss_fn go with a module: a model file has functions of these names",
            hint="pass the module itself, or drop them",
        )
    return model


def _with_loss_note(plan: Plan, request: Request, deadline: Deadline) -> Plan:
    """``plan`` of our executor with a warning where it could not train with the loss of the module or the file."""
    from planner.executor.loss_note import held_loss_note, loss_note
    from planner.request import DEFAULT_FRAMEWORK

    if request.framework != DEFAULT_FRAMEWORK:
        return plan
    note = loss_note(plan, deadline.left_s) if request.held is None else held_loss_note(request.held, plan)
    return plan if note is None else plan.model_copy(update={"warnings": (*plan.warnings, note)})


def _own(mine: object) -> Pins | Config:
    """Pins, or the config in a file; InputError where it is neither."""
    from os import PathLike
    from pathlib import Path

    from planner.api.asked import pins_of
    from planner.api.compare import Config, names_file
    from planner.errors import InputError
    from planner.json_file import read_content

    if not isinstance(mine, PathLike) and not (isinstance(mine, str) and names_file(mine)):
        return pins_of(mine)
    path = Path(mine)
    try:
        return Config(path.name, read_content(path, InputError).decode("utf-8"))
    except UnicodeDecodeError as error:
        raise InputError(f"{path} is no text: {error}", hint="is it damaged, or another kind of file?") from error


def __getattr__(name: str) -> object:
    if name == "errors":  # not imported before somebody asks for them
        from importlib import import_module

        return import_module("planner.errors")
    if name == "__version__":
        from importlib.metadata import version

        return version("planner")
    raise AttributeError(f"module 'planner' has no attribute {name!r}")
