"""plan.json: refused by name where it is damaged, foreign or contradicts itself."""

from __future__ import annotations

from pathlib import Path

from planner.errors import PlanError
from planner.json_file import FileFormat, write_text
from planner.plan.checks import contradictions
from planner.plan.schema import SCHEMA_VERSION, Plan

PLAN_FILE = FileFormat(
    name="plan",
    model=Plan,
    version=SCHEMA_VERSION,
    contradictions=contradictions,
    error_class=PlanError,
    way_out="correct these keys, or search again: planner search MODEL -o plan.json",
)


def plan_json(plan: Plan) -> str:
    """``plan`` as JSON text."""
    return plan.model_dump_json(indent=2) + "\n"


def write_plan(plan: Plan, path: Path) -> None:
    """Writes ``plan`` to ``path`` in one step."""
    write_text(path, plan_json(plan))


def read_plan(path: Path) -> Plan:
    """The plan in ``path``; PlanError with every violation where it is none."""
    return PLAN_FILE.read(path)
