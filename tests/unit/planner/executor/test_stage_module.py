"""What a stage sends lies in memory as messages do, in order and on its own, and is what its neighbour expects."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Replicate

from planner.errors import ModelError
from planner.executor.stage_module import StageModule
from planner.executor.stage_trace import TensorMeta

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
    assert not sent._is_view()  # pyright: ignore[reportPrivateUsage]
    torch.testing.assert_close(sent, expected)
