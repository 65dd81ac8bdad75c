"""plan.json: refused by name where it is damaged, foreign or contradicts itself."""

from __future__ import annotations

import json
from pathlib import Path

from pydantic import ValidationError

from planner.errors import PlanError
from planner.json_file import listed, read_object, violations_of, write_text
from planner.plan.checks import contradictions
from planner.plan.schema import SCHEMA_VERSION, Plan


def plan_json(plan: Plan) -> str:
    """``plan`` as JSON text."""
    return plan.model_dump_json(indent=2) + "\n"


def write_plan(plan: Plan, path: Path) -> None:
    """Writes ``plan`` to ``path`` in one step."""
    write_text(path, plan_json(plan))


def read_plan(path: Path) -> Plan:
    """The plan in ``path``; PlanError with every violation where it is none."""
    content = read_object(path, PlanError)
    version = content.get("schema_version")
    if version != SCHEMA_VERSION:
        raise PlanError(
            f"{path}: schema_version is {version!r}, this planner reads {SCHEMA_VERSION}",
            hint="is it a plan at all? `planner search MODEL -o plan.json` writes one",
        )
    try:
        plan = Plan.model_validate_json(json.dumps(content))
    except ValidationError as error:
        raise _refused(path, violations_of(error)) from error
    found = contradictions(plan)
    if found:
        raise _refused(path, found)
    return plan


def _refused(path: Path, violations: list[str]) -> PlanError:
    return PlanError(
        f"{path} is not a valid plan: {listed(violations)}",
        hint="correct these keys, or search again: planner search MODEL -o plan.json",
    )
