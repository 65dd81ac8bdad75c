"""The optimiser of a run: its parameter groups, and its learning rate at every step."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from costmodels.vocabulary.choices import MOMENTUM, Optimizer
from planner.executor.options import DEFAULT_LEARNING_RATE, Decay, LearningRate, Optimization

_OPTIMIZERS: dict[Optimizer, Callable[..., torch.optim.Optimizer]] = {
    Optimizer.ADAMW: torch.optim.AdamW,
    Optimizer.ADAM: torch.optim.Adam,
    Optimizer.SGD: torch.optim.SGD,
    Optimizer.SGD_MOMENTUM: partial(torch.optim.SGD, momentum=MOMENTUM),
}
# One pass over the shards, as the planner prices it; torch 2.13 has no rule for DTensors in a fused SGD, and fuses
# nothing where numbers are complex.
_FUSED = (Optimizer.ADAMW, Optimizer.ADAM)
WSD_DECAY_SHARE = 0.1  # of all steps; Hu et al., "MiniCPM", 2024, found about a tenth to be enough


def rate_at(step: int, options: Optimization, peak: float, steps: int) -> float:
    """The learning rate of ``step`` (from 0) of a run of ``steps``. It depends on nothing else, so a run can go on."""
    if step < options.warmup_steps:
        return peak * (step + 1) / options.warmup_steps
    end = options.schedule_steps or steps
    lowest = peak * options.final_share
    start = options.warmup_steps
    if options.schedule is LearningRate.WSD:
        decay = math.ceil(end * WSD_DECAY_SHARE) if options.decay_steps is None else options.decay_steps
        start = max(start, end - decay)
    if options.schedule is LearningRate.CONSTANT or step < start:
        return peak
    done = min(1.0, (step - start) / max(1, end - start))
    if options.schedule is LearningRate.COSINE:
        return lowest + (peak - lowest) * 0.5 * (1.0 + math.cos(math.pi * done))
    return peak + (lowest - peak) * done


def parameter_groups(named: Sequence[tuple[str, nn.Parameter]], options: Optimization) -> list[dict[str, Any]]:
    """Trainable parameters in at most two groups: those that decay, and those that do not."""
    trainable = [(fqn, parameter) for fqn, parameter in named if parameter.requires_grad]
    extra: dict[str, Any] = {} if options.weight_decay is None else {"weight_decay": options.weight_decay}
    if options.decay is Decay.ALL:
        return [{"params": [parameter for _, parameter in trainable], **extra}]
    kept = [p for fqn, p in trainable if p.ndim < 2 or fqn.endswith("bias")]
    decayed = [p for fqn, p in trainable if not (p.ndim < 2 or fqn.endswith("bias"))]
    groups: list[dict[str, Any]] = [{"params": decayed, **extra}, {"params": kept, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]


def build_optimizer(
    parameters: Sequence[nn.Parameter] | list[dict[str, Any]], name: Optimizer, learning_rate: float | None
) -> torch.optim.Optimizer:
    """The plan's optimiser over this rank's shards of the trainable parameters, or over groups of them."""
    rate = DEFAULT_LEARNING_RATE[name] if learning_rate is None else learning_rate
    given = [p for p in parameters if isinstance(p, dict) or p.requires_grad]
    every = [p for each in given for p in (each["params"] if isinstance(each, dict) else [each])]
    options = {"fused": True} if name in _FUSED and not any(p.is_complex() for p in every) else {}
    return _OPTIMIZERS[name](given, lr=rate, **options)
