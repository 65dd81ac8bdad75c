"""Every recipe there is, and its values as they were recorded."""

from pathlib import Path

from pydantic import BaseModel

from hardware_profiles.schema import Quantity

ROOT = Path(__file__).resolve().parent
FROZEN_FILE = ROOT / "fixtures" / "resolved_recipes.json"
STUDY_RECIPES = {
    path.stem: str(path) for path in sorted((ROOT.parent / "benchmarks" / "data" / "recipes").glob("*.json"))
}
# Texts, and the file's own.
UNFROZEN = ("description", "schema_version", "error_band.source", "context_methods.source", "memory_band")


def values_of(model: BaseModel, place: str = "") -> dict[str, object]:
    """Every fact by its dotted place, quantities as bare numbers, what is not known left out."""
    found: dict[str, object] = {}
    for name in type(model).model_fields:
        value, where = getattr(model, name), f"{place}.{name}" if place else name
        if where in UNFROZEN:
            continue
        if isinstance(value, Quantity):
            found[where] = value.value
        elif isinstance(value, BaseModel):
            found |= values_of(value, where)
        elif value is not None:
            found[where] = list(value) if isinstance(value, tuple) else value
    return found
