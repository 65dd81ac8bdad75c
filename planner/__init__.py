"""Planner as a library: the commands of the same names as functions. Nothing heavy is imported before it is called.

import planner

plan = planner.search("llama3-8b", gpus=64, hardware="dgx-h100-80gb", tp=8)
print(plan.mesh, plan.prediction.step_time_s)
planner.estimate(plan, hardware="dgx-a100-80gb").prediction.step_time_s
planner.fit("llama3-70b", gpus=16).fits
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

    from planner.api.fit import Fit
    from planner.plan.schema import Plan
    from planner.request import Request

    __version__: str

__all__ = ["__version__", "estimate", "fit", "load_plan", "search"]


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
