"""One recording for training and for evaluation: what the code between pipelined modules does in either mode."""

from __future__ import annotations

from dataclasses import replace

from torch import nn

from planner.executor.stage_trace import ByMode, Call, Inputs, Trace, leaves_of, map_leaves
from planner.models.inputs import call_model


def call_evaluated(module: nn.Module, inputs: Inputs) -> object:
    """Calls ``module`` in its evaluation mode."""
    return call_model(module.eval(), inputs)


def in_both_modes(training: Trace, evaluated: Trace) -> Trace | None:
    """``training`` with each argument that is another one under evaluation in both ways; None where calls differ."""
    if len(training.calls) != len(evaluated.calls) or training.output != evaluated.output:
        return None
    calls = [_in_both(*pair) for pair in zip(training.calls, evaluated.calls, strict=True)]
    found = [call for call in calls if call is not None]
    return replace(training, calls=tuple(found)) if len(found) == len(calls) else None


def _in_both(one: Call, other: Call) -> Call | None:
    arguments, others = leaves_of((one.args, one.kwargs)), leaves_of((other.args, other.kwargs))
    same = replace(other, args=one.args, kwargs=one.kwargs, is_random=one.is_random)
    if same != one or len(arguments) != len(others) or one.kwargs.keys() != other.kwargs.keys():
        return None
    pairs = zip(arguments, others, strict=True)
    merged = iter([mine if _is_same(mine, its) else ByMode(mine, its) for mine, its in pairs])
    args, kwargs = map_leaves(lambda _: next(merged), (one.args, one.kwargs))  # pyright: ignore[reportGeneralTypeIssues]
    return replace(one, args=args, kwargs=kwargs)


def _is_same(one: object, other: object) -> bool:
    return one is other or (type(one) is type(other) and one == other)
