"""What a pipeline stage sends is what its neighbour was told to expect when the model was split."""

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
