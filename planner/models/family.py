"""From the shape of a generic transformer to a real, trainable module."""

from __future__ import annotations

from torch import nn

from planner.models.config import FamilyConfig
from planner.models.gpt import GPT
from planner.models.llama import Llama


def build_family(config: FamilyConfig) -> nn.Module:
    """The module of ``config``, on the current default device."""
    match config.family:
        case "gpt":
            return GPT(config)
        case "llama" | "moe":
            return Llama(config)
