"""plan.json: refused by name where it is damaged, foreign or contradicts itself; it names its model from its folder."""

from __future__ import annotations

import os
import re
from pathlib import Path

from costmodels.vocabulary.shown import ascii_json
from planner.errors import PlanError
from planner.json_file import FileFormat
from planner.output_file import write_text
from planner.plan.checks import contradictions
from planner.plan.schema import SCHEMA_VERSION, ModelSection, Origin, Plan

PLAN_FILE = FileFormat(
    name="plan",
    model=Plan,
    version=SCHEMA_VERSION,
    contradictions=contradictions,
    error_class=PlanError,
    max_bytes=2**23,  # a plan over 100,000 devices has less than one
    way_out="correct these keys, or search again: planner search MODEL -o plan.json",
)
# What names a file: a path with folders, a .json, a .py with or without its factory. Presets are none of these.
_CODE = re.compile(r"(?P<path>.+\.py)(?P<factory>:\w+)?", re.DOTALL)


def plan_json(plan: Plan) -> str:
    """``plan`` as JSON text, its model named from the current folder."""
    return ascii_json(plan.model_dump_json(indent=2)) + "\n"


def write_plan(plan: Plan, path: Path) -> None:
    """Writes ``plan`` to ``path`` in one step, its model named from there."""
    write_text(path, plan_json(plan.model_copy(update={"model": _named_from(_folder_of(path), plan.model)})))


def read_plan(path: Path, *, trust: bool = False) -> Plan:
    """The plan in ``path``; PlanError with every violation where it is none.

    ``trust``: code of its model may be run that lies outside the folder of the plan.
    """
    plan = PLAN_FILE.read(path)
    return plan.model_copy(update={"model": _found_from(Origin(_folder_of(path), trust), plan.model)})


def _folder_of(path: Path) -> Path:
    """Where the file itself lies, links followed."""
    return Path(os.path.realpath(path)).parent


def _named_from(folder: Path, model: ModelSection) -> ModelSection:
    """``model``, named from the current folder, named from ``folder``."""
    name, factory = _parts(model.source)
    if not _is_path(name) and not (name and Path(name).is_dir()):
        return model
    absolute = Path(os.path.realpath(Path(name).parent)) / Path(name).name  # a link to a model keeps its own name
    relative = os.path.relpath(absolute, folder)
    return model.model_copy(update={"source": (relative if _is_path(relative) else f"./{relative}") + factory})


def _found_from(origin: Origin, model: ModelSection) -> ModelSection:
    """``model``, named from the folder of ``origin``, named from the current folder."""
    name, factory = _parts(model.source)
    if not _is_path(name):
        return model
    absolute, here = os.path.normpath(origin.folder / name), os.getcwd()
    shown = os.path.relpath(absolute, here) if Path(absolute).is_relative_to(here) else absolute
    return model.found_in(origin if name.endswith(".py") else None, shown + factory)


def _parts(source: str) -> tuple[str, str]:
    """The name without its factory, and ``:factory``."""
    found = _CODE.fullmatch(source)
    return (source, "") if found is None else (found["path"], found["factory"] or "")


def _is_path(name: str) -> bool:
    return os.sep in name or name.endswith((".py", ".json"))
