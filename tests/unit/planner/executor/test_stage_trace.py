"""A forward pass is recorded on the meta device, or for real where modules need values; the rest is refused."""

import random
from typing import cast

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812
from torch.utils.checkpoint import checkpoint

from planner.errors import PlanError
from planner.executor.evaluated import call_evaluated, in_both_modes
from planner.executor.glue import REPARAMETRIZES
from planner.executor.stage_module import stage_root
from planner.executor.stage_split import split_trace
from planner.executor.stage_trace import (
    CPU,
    META,
    ByMode,
    ReadsValuesError,
    Trace,
    leaves_of,
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


class Reversed(torch.autograd.Function):
    """Its input, and three times the gradient the other way."""

    @staticmethod
    def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return x.view_as(x)

    @staticmethod
    def backward(ctx: object, gradient: torch.Tensor) -> torch.Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return -3 * gradient


class Doing(Between):
    """As ``Between``, with what a list of calls does not have."""

    def __init__(self, kind: str) -> None:
        super().__init__(kind)
        self.count, self.longest = 0, 0
        if kind == "backward hook":
            self.register_full_backward_hook(lambda module, before, behind: None)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x = self.first(self.embedding(input_ids))
        match self.kind:
            case "python":
                x = x if random.random() < 0.5 else x / 2
            case "numpy":
                x = x * float(np.random.rand())
            case "hook":
                x.register_hook(torch.zeros_like)
            case "count":
                self.count += 1
                x = x / self.count
            case "autocast":
                with torch.autocast("cpu", torch.bfloat16):
                    return self.second(x)
            case "longest":
                self.longest = max(self.longest, input_ids.shape[1])
            case "view":
                y = torch.zeros_like(x)
                y[:, 1:].copy_(x[:, :-1])
                x = y
            case "items":
                y = torch.zeros_like(x)
                y[:, 1:] = x[:, :-1]
                x = y
            case "function":
                x = Reversed.apply(x)
                assert isinstance(x, torch.Tensor)
            case _:
                keep = (torch.rand(x.shape[:2], device=x.device) > 0.5)[..., None]
                return self.second(x * keep) * keep
        return self.second(x)


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("python", "draws random numbers of Python or NumPy"),
        ("numpy", "draws random numbers of Python or NumPy"),
        ("hook", "hooks gradients of tensors"),
        ("backward hook", "hooks gradients of modules"),
        ("count", "changes Doing.count of its modules"),
        ("autocast", "changes autocast"),
        ("view", "writes into a tensor and then reads another one that lies in the same memory"),
    ],
)
@pytest.mark.parametrize("real", [False, True])
def test_what_a_list_of_calls_does_not_have_is_seen(kind: str, reason: str, *, real: bool) -> None:
    """Each of these was dropped from a pipeline without a word."""
    assert traced(Doing(kind), STAGES, real=real).unrecorded == (reason,)
    assert traced(Between(""), STAGES, real=real).unrecorded == ()


class Lending(Between):
    """Its second module is called with weights that its first has."""

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x = self.first(self.embedding(input_ids))
        weights = {name: 2 * parameter for name, parameter in self.first.named_parameters()}
        return cast(torch.Tensor, torch.func.functional_call(self.second, weights, (x,)))


@pytest.mark.parametrize("real", [False, True])
def test_parameters_that_are_lent_are_seen(*, real: bool) -> None:
    """Stages ran the module with its own, without a word."""
    assert traced(Lending(""), STAGES, real=real).unrecorded == (REPARAMETRIZES,)


class Sliding(Between):
    """Goes down a slope between its modules."""

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x = self.first(self.embedding(input_ids))
        (slope,) = torch.autograd.grad(x.square().sum(), x, create_graph=True)
        return self.second(x - slope / 8)


@pytest.mark.parametrize("real", [False, True])
def test_a_derivative_is_seen(*, real: bool) -> None:
    """A stage has a part of the graph: its derivative was that of the part, or an error of autograd's."""
    assert traced(Sliding(""), STAGES, real=real).unrecorded == ("differentiates what it computes",)


def test_what_is_kept_from_the_first_pass_on_is_no_harm() -> None:
    assert traced(Doing("longest"), STAGES, real=False).unrecorded == ()


def test_what_is_written_into_a_tensor_is_replayed() -> None:
    """Item assignment returns nothing: it was left out, and stages trained another model without a word."""
    module = Doing("items")
    trace = traced(module, (("embedding", "first"), ("second",)), real=False)
    assert trace.unrecorded == ()
    programs = split_trace(module, trace, (("embedding", "first"), ("second",)))
    tokens = torch.arange(8).view(2, 4)
    first, second = (stage_root(module, program, torch.device("cpu")) for program in programs)
    sent = first((), {"input_ids": tokens})
    found = second(sent, {"input_ids": tokens})
    torch.testing.assert_close(found, module(tokens))


def on_stages(module: nn.Module) -> object:
    """What two stages make of ``IDS``."""
    programs = split_trace(module, traced(module, STAGES, real=False), STAGES)
    first, second = (stage_root(module, program, CPU) for program in programs)
    return second(first((), IDS), IDS)


def test_hooks_run_once() -> None:
    """Those of a pipelined module were recorded as well as run, and those of the model ran on every stage."""

    def halved(_: nn.Module, args: object, output: torch.Tensor) -> torch.Tensor:
        return output * 0.5

    module = Between("")
    module.first.register_forward_pre_hook(lambda _, args: (args[0] + 1.0,))
    module.second.register_forward_hook(halved)
    module.register_forward_hook(halved)
    torch.testing.assert_close(on_stages(module), module(**IDS))


class Checkpointing(Between):
    """Checkpoints what lies on both sides of a stage's border, and something without gradients."""

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        scale = checkpoint(self.first, torch.ones(8, device=input_ids.device), use_reentrant=self.kind == "reentrant")
        assert isinstance(scale, torch.Tensor)
        self.scale_has_gradient = scale.requires_grad
        x = checkpoint(lambda x: self.second(self.first(x)), self.embedding(input_ids),
                       use_reentrant=self.kind == "reentrant")  # fmt: skip
        assert isinstance(x, torch.Tensor)
        return x * scale


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize("kind", ["reentrant", "not reentrant"])
def test_what_a_checkpoint_runs_is_recorded(kind: str) -> None:
    """A reentrant one was one call of the model that had been recorded, which has no values."""
    module = Checkpointing(kind)
    expected, found = module(**IDS), on_stages(module)
    assert module.scale_has_gradient == (kind != "reentrant")
    torch.testing.assert_close(found, expected)
    assert isinstance(found, torch.Tensor)
    parameters = list(module.parameters())
    gradients = torch.autograd.grad(found.sum(), parameters)
    expected.sum().backward()  # torch's reentrant checkpoints know no other way
    torch.testing.assert_close(gradients, tuple(parameter.grad for parameter in parameters))


def test_an_own_autograd_function_is_one_call() -> None:
    plain = torch.autograd.Function.apply
    trace = traced(Doing("function"), STAGES, real=False)
    assert torch.autograd.Function.apply == plain
    assert (len(trace.calls), trace.unrecorded) == (4, ())  # three modules, and the function
    (own,) = [call for call in trace.calls if call.function is not None]
    assert own.function is not None
    x = torch.ones(3, requires_grad=True)
    y = own.function(x)
    assert isinstance(y, torch.Tensor)
    y.sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [-3.0, -3.0, -3.0]


def test_random_numbers_are_drawn_on_one_stage() -> None:
    """Each stage drew a mask of its own, from other seeds."""
    module = Doing("random")
    trace = traced(module, STAGES, real=False)
    first, second = split_trace(module, trace, STAGES)
    assert [sum(call.is_random for call in program.calls) for program in (first, second)] == [1, 0]
    assert {second.metas[slot].dtype for slot in second.inputs} == {torch.float32, torch.bool}


class Dropping(Between):
    """Dropout outside of a module of its own, and what evaluation leaves out."""

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x = F.dropout(self.first(self.embedding(input_ids)), 0.5, self.training)
        if self.kind == "more" and self.training:
            x = x + 1
        return self.second(x)


def in_both(module: nn.Module) -> Trace | None:
    arguments = (module, frozenset({"embedding", "first", "second"}), IDS)
    one, other = (trace_forward(*arguments, call, torch.float32) for call in (call_model, call_evaluated))
    return in_both_modes(one, other)


def test_what_differs_in_evaluation_is_recorded_in_both_modes() -> None:
    """Dropout stayed on while a pipeline was evaluated."""
    module = Dropping("")
    trace = in_both(module)
    assert trace is not None
    assert [
        leaf for call in trace.calls for leaf in leaves_of((call.args, call.kwargs)) if isinstance(leaf, ByMode)
    ] == [ByMode(training=True, evaluated=False)]
    (program,) = split_trace(module, trace, [("embedding", "first", "second")])
    root = stage_root(module, program, CPU)
    for model, way in ((root, lambda: root((), IDS)), (module, lambda: module(**IDS))):
        model.eval()
        assert torch.equal(way(), way())
        model.train()
        assert not torch.equal(way(), way())
    assert torch.equal(root.eval()((), IDS), module.eval()(**IDS))


def test_other_calls_in_evaluation_are_told() -> None:
    assert in_both(Dropping("more")) is None
