"""A forward pass is recorded on the meta device, or for real where modules need values; the rest is refused."""

import pytest
import torch
from torch import nn

from planner.errors import PlanError
from planner.executor.stage_split import split_trace
from planner.executor.stage_trace import (
    CPU,
    META,
    ReadsValuesError,
    Trace,
    trace_as_compiled,
    trace_forward,
    trace_real_forward,
)
from planner.models.inputs import call_model
from tests.fixtures.routed import Routed

IDS = {"input_ids": torch.arange(16).view(2, 8)}


class Between(nn.Module):
    """Two blocks with something between them."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.embedding = nn.Embedding(32, 8)
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.kind = kind

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x = self.first(self.embedding(input_ids))
        match self.kind:
            case "short cut":
                if not torch.compiler.is_compiling() and (x == 0).all():
                    return self.second(x)
            case "condition":
                x = x / 2 if x.norm() > 1 else x
            case "number":
                x = x * x.mean().item()
            case "comparison":
                x = x if torch.equal(x, x) else x / 2
            case "error":
                raise KeyError("no such thing")
            case _:
                x = x + torch.arange(8, device=x.device)
        return self.second(x)


STAGES = (("embedding", "first"), ("second",))


def traced(module: nn.Module, stages: tuple[tuple[str, ...], ...], *, real: bool) -> Trace:
    trace = trace_real_forward if real else trace_forward
    return trace(module, frozenset(fqn for stage in stages for fqn in stage), IDS, call_model, torch.float32)


def test_both_ways_record_the_same() -> None:
    meta, real = (traced(Between(""), STAGES, real=real) for real in (False, True))
    assert (meta.calls, meta.output, meta.metas) == (real.calls, real.output, real.metas)
    devices = [call.kwargs["device"] for call in meta.calls if "device" in call.kwargs]
    assert devices == [META]  # stands for the stage's own


def test_modules_that_need_values_are_recorded_for_real() -> None:
    module = Routed(2)
    stages = (("embedding", "layers.0"), ("layers.1", "head"))
    with pytest.raises(NotImplementedError):
        traced(module, stages, real=False)
    torch.manual_seed(0)
    expected = torch.rand(1)
    torch.manual_seed(0)
    trace = traced(module, stages, real=True)
    assert torch.equal(torch.rand(1), expected)  # the run for recording draws nothing from the run's own numbers
    first, second = split_trace(module, trace, stages)
    assert first.states == {"positions"}  # a parameter of the model itself: on the stage whose glue uses it
    assert second.states == frozenset()
    assert [second.metas[slot].shape for slot in second.inputs] == [(2, 8, 32)]
    assert all(parameter.device == CPU and parameter.grad is None for parameter in module.parameters())


@pytest.mark.parametrize("real", [False, True])
@pytest.mark.parametrize("kind", ["condition", "number", "comparison"])
def test_values_read_between_modules_are_refused(kind: str, *, real: bool) -> None:
    with pytest.raises(PlanError, match="reads values of a tensor") as refused:
        traced(Between(kind), STAGES, real=real)
    assert "pp = 1" in refused.value.hint


def test_what_the_model_raises_is_told() -> None:
    with pytest.raises(PlanError, match="cannot be cut into pipeline stages: .*KeyError: 'no such thing'"):
        traced(Between("error"), STAGES, real=True)


def test_a_short_cut_that_compiled_code_leaves_out_is_left_out() -> None:
    module = Between("short cut")
    arguments = (module, frozenset({"embedding", "first", "second"}), IDS, call_model, torch.float32)
    with pytest.raises(ReadsValuesError):
        trace_forward(*arguments)
    assert [call.module for call in trace_as_compiled(*arguments).calls] == ["embedding", "first", "second"]
    assert not torch.compiler.is_compiling()
