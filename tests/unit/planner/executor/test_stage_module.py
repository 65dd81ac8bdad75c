"""What a stage sends lies in memory as messages do, in order and on its own, and is what its neighbour expects."""

# pyright: reportPrivateUsage=false

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight
from torch.distributed.tensor import Replicate

from planner.errors import ModelError
from planner.executor import pipeline
from planner.executor.stage_module import StageModule
from planner.executor.stage_trace import TensorMeta
from planner.executor.whole_parameters import WholeParameters
from tests.fake_world import fake_world

SENT = {
    "channels last, as images between convolutions and norms": lambda x: (x * 2).permute(0, 3, 1, 2),
    "positions first, as of a recurrent layer": lambda x: (x * 2).transpose(0, 1),
    "a copy that kept its strides": lambda x: x.transpose(0, 1) * 2,
    "rows of a larger tensor": lambda x: (x * 2)[:, 1:],
}


def test_what_is_unfrozen_before_others_after_the_split_is_told() -> None:
    """torch said that gradients can be created only for scalar outputs."""
    layer = nn.Linear(2, 2).requires_grad_(False)
    sent = TensorMeta((1, 2), torch.float32, requires_grad=False)
    data = cast(Any, SimpleNamespace(root=layer))
    stage = StageModule(data, lambda _, batch: (layer(batch["x"]),), ((), (sent,)), (None, Replicate()), None)
    assert stage(x=torch.ones(1, 2))[0].shape == (1, 2)
    layer.requires_grad_(True)
    with pytest.raises(ModelError, match="needed none when the model was split"):
        stage(x=torch.ones(1, 2))


@pytest.mark.parametrize("name", SENT)
def test_what_is_sent_is_in_order(name: str) -> None:
    """A transposed view was copied with its strides, which the backend refuses to send: the other rank waited."""
    received = torch.randn(2, 3, 4, 5, requires_grad=True)
    expected = SENT[name](received)
    data = cast(Any, SimpleNamespace(root=nn.Identity()))
    meta = TensorMeta(tuple(expected.shape), torch.float32, requires_grad=True)
    stage = StageModule(data, lambda inputs, _: (SENT[name](inputs[0]),), ((meta,), (meta,)), (None, Replicate()), None)
    (sent,) = stage(received)
    assert isinstance(sent, torch.Tensor)
    assert sent.is_contiguous()
    assert not sent._is_view()
    torch.testing.assert_close(sent, expected)


class Decoder(nn.Module):
    """Its bias goes to its own product, and to the next stage without meeting what was received; one half does not."""

    def __init__(self) -> None:
        super().__init__()
        self.bias, self.scale, self.far = (nn.Parameter(torch.randn(4)) for _ in range(3))

    def run(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        bias = self.bias * 2
        return x * self.scale + bias, bias, self.far.exp()


def test_a_split_backward_pass_gives_what_is_sent_beside_the_received_its_gradients() -> None:
    """Such as a bias of positions that all blocks of a decoder add: it had the gradient of its own stage alone."""
    root, received = Decoder(), torch.randn(3, 4, requires_grad=True)
    expected = root.run(received)
    weights = [torch.randn(value.shape) for value in expected]
    torch.autograd.backward(expected, weights)
    wanted = [parameter.grad for parameter in (received, *root.parameters())]
    received.grad = None
    root.zero_grad()

    metas = tuple(TensorMeta(tuple(value.shape), torch.float32, requires_grad=True) for value in expected)
    inputs = (TensorMeta((3, 4), torch.float32, requires_grad=True),)
    data = cast(Any, SimpleNamespace(root=root))
    stage = StageModule(data, lambda given, _: root.run(given[0]), (inputs, metas), (None, Replicate()), None)
    for _ in range(2):  # the second pass goes by what the first found out
        received.grad = None
        root.zero_grad()
        sent = stage(received)
        _, groups = stage_backward_input(list(sent), weights, [received], root.parameters())
        stage_backward_weight(root.parameters(), groups)
        for found, right in zip((received, *root.parameters()), wanted, strict=True):
            assert found.grad is not None
            torch.testing.assert_close(found.grad, right)


def test_gradients_are_sent_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a split backward pass they are as the operators made them, which the backend refused to send."""
    stage = object.__new__(pipeline._Stage)
    stage.bwd_cache = {0: (torch.randn(3, 4).t(), None)}
    monkeypatch.setattr(pipeline.PipelineStage, "get_bwd_send_ops", lambda stage, index: list(stage.bwd_cache[index]))
    first, second = stage.get_bwd_send_ops(0)
    assert cast(torch.Tensor, first).is_contiguous()
    assert second is None


@pytest.mark.parametrize("is_last", [False, True])
def test_a_stage_behind_frozen_ones_is_trained_under_a_split_backward_pass(is_last: bool) -> None:
    """Its parameters got no gradients at all: torch finds the way to them from what was received."""
    root, received = Decoder(), torch.randn(3, 4)
    taken, given_on = ((TensorMeta((3, 4), torch.float32, requires_grad=wants),) for wants in (False, True))
    with fake_world(1):
        group = dist.group.WORLD
        assert group is not None
        data = WholeParameters(root, (), torch.device("cpu"), lambda _: group)
        module = StageModule(data, lambda x, _: root.run(x[0])[:1], (taken, given_on), (None, Replicate()), None)
        stage = object.__new__(pipeline._Stage)
        stage.submod, stage.stage_index, stage.num_stages, stage._reductions = module, 1, 2 if is_last else 3, []
        (sent,) = module(received)
        passed: dict[str, object] = {"input_values": [received]}
        passed["output_grads"] = None if is_last else (torch.ones(3, 4),)
        passed["stage_output"] = (sent.sum(),) if is_last else (sent,)
        gradients, groups = stage.backward_maybe_with_nosync("input", passed)
        rest: dict[str, object] = {"stage_output": (), "param_groups": groups}
        stage.backward_maybe_with_nosync("weight", rest, last_backward=True)
    assert gradients == (None,)
    assert root.scale.grad is not None
    assert root.bias.grad is not None
    torch.testing.assert_close(root.scale.grad, received.sum(0))
    torch.testing.assert_close(root.bias.grad, torch.full((4,), 6.0))
