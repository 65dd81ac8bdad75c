"""The shipped presets: named shapes, each with the document it was read from (no torch here)."""

from __future__ import annotations

import json
from importlib.resources import files
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from planner.models.config import FamilyConfig


class Preset(BaseModel):
    """A named model."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    source: Annotated[str, Field(min_length=1)]  # where the shape stands
    config: FamilyConfig
    left_out: str | None = None  # of the published model, said with every trace


def list_presets() -> tuple[Preset, ...]:
    """All presets, by family and then by number of parameters."""
    folder = files("planner.models") / "presets"
    presets = (
        Preset.model_validate(json.loads(entry.read_text(encoding="utf-8")))
        for entry in folder.iterdir()
        if entry.name.endswith(".json")
    )
    return tuple(sorted(presets, key=lambda preset: (preset.config.family, preset.config.num_params, preset.name)))


def find_preset(name: str) -> Preset | None:
    """The preset called ``name``, in any letter case."""
    return next((preset for preset in list_presets() if preset.name == name.lower()), None)
