"""One home for each heavy or peculiar dependency; import-linter sees our packages, this sees the others'."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("planner", "costmodels", "hardware_profiles")

HOMES: dict[str, tuple[str, ...]] = {
    "ortools": ("planner.solver",),
    "typer": ("planner.cli",),
    "click": ("planner.cli",),
    "rich": (
        "planner.cli",
        "planner.render",
        "planner.render_schedule",
        "planner.render_front",
        "planner.render_calibration",
        "planner.render_fit",
        "planner.render_explain",
        "planner.render_compare",
    ),
    "jinja2": ("planner.render_report",),
    "transformers": (
        "planner.models.huggingface",
        "planner.models.causal_masks",
        "planner.models.routed_experts",
        "planner.models.windowed_attention",
    ),
    "psutil": ("hardware_profiles.probes",),
    "yaml": ("planner.formats.documents",),
    "pynvml": ("hardware_profiles.probes",),
    "torch": (
        "planner.graph.tracer",
        "planner.model_file",
        "planner.models",
        "planner.executor",
        "hardware_profiles.probes",
    ),
}


def modules() -> Iterator[tuple[str, Path]]:
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            yield ".".join(parts[:-1] if parts[-1] == "__init__" else parts), path


@cache
def imported_packages(path: Path) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found.update(alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            found.add(node.module.partition(".")[0])
    return found


def lies_in(module: str, home: str) -> bool:
    return module == home or module.startswith(home + ".")


@pytest.mark.parametrize("dependency", sorted(HOMES))
def test_a_dependency_is_imported_only_at_home(dependency: str) -> None:
    strays = [
        module
        for module, path in modules()
        if dependency in imported_packages(path) and not any(lies_in(module, home) for home in HOMES[dependency])
    ]
    assert not strays, f"{dependency} belongs to {HOMES[dependency]}, but is imported by {strays}"


def test_every_third_party_import_is_declared() -> None:
    declared = set(HOMES) | {"numpy", "pydantic", "pydantic_core", "typing_extensions"}
    known = declared | set(sys.stdlib_module_names) | set(PACKAGES)
    unknown = {module: sorted(imported_packages(path) - known) for module, path in modules()}
    assert not {module: names for module, names in unknown.items() if names}


@pytest.mark.parametrize(
    "module",
    [
        "planner.cli.main",
        "costmodels.vocabulary.choices",
        "planner.plan.schema",
        "planner.graph.model_graph",
        "planner.operators.work",
        "costmodels.compute",
        "costmodels.communication",
        "costmodels.memory",
        "costmodels.pipeline",
        "costmodels.step",
        "hardware_profiles.catalog",
    ],
)
def test_planning_starts_without_torch(module: str) -> None:
    program = f"import sys, {module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=False).returncode == 0
