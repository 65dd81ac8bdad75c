"""The shipped presets: named shapes, each with the document it was read from (no torch here)."""

from __future__ import annotations

import json
from collections.abc import Mapping
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


# Fields that say how a model is trained rather than what it is made of.
_NOT_OF_SIZE = frozenset({"seq_len", "dropout", "norm_eps", "rope_theta", "router"})


def preset_of_shape(shape: Mapping[str, object]) -> Preset | None:
    """The preset of the same family and sizes; what ``shape`` leaves out is as in the preset, or that field's default.

    The vocabulary may be left out. Learned positions must reach as far as the sequences of ``shape``.
    """
    return next((preset for preset in list_presets() if _is_of(preset.config, shape)), None)


def _is_of(config: FamilyConfig, shape: Mapping[str, object]) -> bool:
    names = FamilyConfig.model_fields.keys() - _NOT_OF_SIZE
    asked = {**config.model_dump(include={"vocab"}), **{name: shape[name] for name in names & shape.keys()}}
    try:
        same = FamilyConfig.model_validate({**asked, "seq_len": config.seq_len})
    except ValueError:
        return False
    seq_len = shape.get("seq_len")
    reaches = config.family != "gpt" or not isinstance(seq_len, int) or seq_len <= config.seq_len
    return reaches and all(_size(same, name) == _size(config, name) for name in names)


def _size(config: FamilyConfig, name: str) -> object:
    """A field's value, or what leaving it out means."""
    match name:
        case "kv_heads":
            return config.num_kv_heads
        case "head_dim":
            return config.size_per_head
        case "expert_ffn":
            return config.expert_ffn or config.ffn
        case _:
            return getattr(config, name)
