"""Planner as a library: the commands of the same names as functions. Nothing heavy is imported before it is called.

import planner

plan = planner.search("llama3-8b", gpus=64, hardware="dgx-h100-80gb", tp=8)
print(plan.mesh, plan.prediction.step_time_s)
planner.estimate(plan, hardware="dgx-a100-80gb").prediction.step_time_s
planner.fit("llama3-70b", gpus=16).fits
planner.compare("llama3-8b", gpus=64, mine="tp=8").rows[0].framework
planner.explain(plan, why_not="tp=4").binding
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

    from planner.api.compare import Comparison, Config
    from planner.api.explain import Explanation
    from planner.api.fit import Fit
    from planner.executor.in_script import LossFunction, Module
    from planner.executor.parallelize import ParallelModel, Tensors
    from planner.layout.layout import Pins
    from planner.plan.schema import Plan
    from planner.request import Request

    __version__: str

__all__ = ["__version__", "compare", "estimate", "explain", "fit", "load_plan", "parallelize", "search"]


def search(model: str | Path, gpus: int | None = None, *, hardware: str | None = None, **options: object) -> Plan:
    """The fastest plan that fits for ``model``: a preset, a model file, a config or a graph.json, as in a command.

    ``gpus`` may be left out where ``hardware`` counts them. ``options`` are fields of ``planner.request.Request``, such
    as ``seq_len``, ``global_batch_size`` and ``precision``, and pins of ``planner.layout.layout.Pins``, such as ``tp``
    and ``zero``. Raises ``planner.errors.InputError``, ``InfeasibleError`` and ``TimeLimitError``.
    """
    from planner.api import find_plan

    return find_plan(_request(model, gpus, hardware, options)).plan


def fit(model: str | Path, gpus: int | None = None, *, hardware: str | None = None, **options: object) -> Fit:
    """Whether ``model`` fits, and what else would. Arguments as of ``search``; without ``gpus`` on one node."""
    from planner.api.fit import find_fit

    return find_fit(_request(model, gpus, hardware, options))


def compare(
    model: str | Path,
    gpus: int | None = None,
    *,
    hardware: str | None = None,
    mine: str | Path | None = None,
    **options: object,
) -> Comparison:
    """The best plan of every framework, the fastest first, and beside them ``mine``: ``tp=8,pp=4``, or a config's path.

    Other arguments as of ``search``; ``framework`` is that by which pins of ``mine`` are priced. Times are in seconds,
    memory in bytes. Raises ``planner.errors.InputError``; a framework without a plan is a row with its reason.
    """
    from planner.api.compare import compare as compared

    own = None if mine is None else _own(mine)
    return compared(_request(model, gpus, hardware, options), own)


def explain(
    plan: Plan | str | Path,
    *,
    hardware: str | None = None,
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
    from planner.api.explain import Wishes
    from planner.api.explain import explain as explained
    from planner.errors import InputError
    from planner.plan.schema import Plan

    try:
        which = Searches(searches)
    except ValueError:
        words = ", ".join(each.value for each in Searches)
        raise InputError(f"searches must be one of {words}, got {searches!r}", hint="choose one of these") from None
    loaded = plan if isinstance(plan, Plan) else load_plan(plan)
    pins = None if why_not is None else _pins(why_not)
    return explained(loaded, hardware, Wishes(pins, tokens, which, time_limit_s))


def parallelize(
    model: Module,
    plan: Plan | str | Path,
    *,
    loss_fn: LossFunction | None = None,
    inputs: Tensors | None = None,
) -> ParallelModel:
    """This rank's part of ``model`` under ``plan``, in a script that torchrun started. Collective over all ranks.

    ``torch.distributed`` is initialised, with as many ranks as the plan has devices, and ``model`` holds equal values
    on all of them. It takes ``model`` over. ``loss_fn(output, batch)`` is the loss of a batch, a scalar; None: mean
    cross entropy of the next token. ``inputs``: one micro-batch by name, of which shapes and dtypes are read; None:
    token ids, int64 (micro-batch, sequence). ``forward_backward(batch)`` of what is returned runs the micro-batches of
    one step, where ``batch`` is this data-parallel rank's part of the global batch with its ``labels``; its
    ``parameters()`` go into an optimiser. Raises ``planner.errors.PlanError`` and ``ModelError``.
    """
    from planner.executor.in_script import parallelized
    from planner.plan.schema import Plan

    return parallelized(model, plan if isinstance(plan, Plan) else load_plan(plan), loss_fn, inputs)


def estimate(
    plan: Plan | str | Path, *, hardware: str | None = None, gpus: int | None = None, framework: str | None = None
) -> Plan:
    """``plan``, or the plan in a file, priced again: on other hardware, or with another data-parallel degree."""
    from planner.api import price_plan
    from planner.plan.schema import Plan

    loaded = plan if isinstance(plan, Plan) else load_plan(plan)
    return price_plan(loaded, hardware, gpus, framework).plan


def load_plan(path: str | Path, *, trust: bool = False) -> Plan:
    """The plan in a file; ``planner.errors.PlanError`` with every violation where it is none.

    ``trust``: code of its model may be run that lies outside the folder of the plan.
    """
    from pathlib import Path

    from planner.plan.plan_file import read_plan

    return read_plan(Path(path), trust=trust)


def _request(model: object, gpus: int | None, hardware: str | None, options: dict[str, object]) -> Request:
    """InputError where a name among ``options`` is neither a field of a request nor a pin, or a word is none of its."""
    from dataclasses import fields
    from os import PathLike, fspath

    from planner.errors import InputError
    from planner.layout.layout import Pins
    from planner.request import Request

    if not isinstance(model, str | PathLike):
        raise InputError(
            f"model must be a name or a path, got {type(model).__name__}",
            hint="put a build_model() that returns the module into a model.py, and pass the path of that",
        )
    pins = {each.name for each in fields(Pins)}
    known = {each.name for each in fields(Request)} - {"model", "num_devices", "hardware", "pins", "planned"}
    unknown = sorted(options.keys() - pins - known)
    if unknown:
        raise InputError(
            f"unknown option {', '.join(unknown)}", hint=f"the options are {', '.join(sorted(pins | known))}"
        )
    options = {name: _word(name, value) for name, value in options.items()}
    chosen = Pins(**{name: options[name] for name in options.keys() & pins})  # pyright: ignore[reportArgumentType]
    others = {name: options[name] for name in options.keys() & known}
    return Request(fspath(model), gpus, hardware, pins=chosen, **others)  # pyright: ignore[reportArgumentType]


def _own(mine: str | Path) -> Pins | Config:
    """Pins, or the config in a file."""
    from pathlib import Path

    from planner.api.compare import Config
    from planner.errors import InputError
    from planner.json_file import read_content

    path = Path(mine)
    if isinstance(mine, str) and "=" in mine and not path.exists():
        return _pins(mine)
    try:
        return Config(path.name, read_content(path, InputError).decode("utf-8"))
    except UnicodeDecodeError as error:
        raise InputError(f"{path} is no text: {error}", hint="is it damaged, or another kind of file?") from error


def _pins(text: str) -> Pins:
    """``tp=4,pp=2``; InputError where that fixes no choices."""
    from planner.errors import InputError
    from planner.layout.layout import Pins

    try:
        return Pins.parsed(text)
    except (TypeError, ValueError) as error:
        raise InputError(f"{text!r} fixes no choice of a plan: {error}", hint="give choices as tp=4,pp=2") from error


def _word(name: str, value: object) -> object:
    """What a word such as ``bf16`` stands for, where the option takes words; anything else as it is."""
    from costmodels.vocabulary.choices import ContextMethod, Offload, Optimizer, Precision, Preference, Recompute
    from costmodels.vocabulary.schedules import ScheduleName
    from planner.errors import InputError

    kinds = {
        "precision": Precision, "optimizer": Optimizer, "prefer": Preference, "schedule": ScheduleName,
        "recompute": Recompute, "offload": Offload, "cp_method": ContextMethod,
    }  # fmt: skip
    if name not in kinds or not isinstance(value, str):
        return value
    try:
        return kinds[name](value)
    except ValueError:
        words = ", ".join(each.value for each in kinds[name])
        raise InputError(f"{name} must be one of {words}, got {value!r}", hint="choose one of these") from None


def __getattr__(name: str) -> str:
    if name == "__version__":
        from importlib.metadata import version

        return version("planner")
    raise AttributeError(f"module 'planner' has no attribute {name!r}")
