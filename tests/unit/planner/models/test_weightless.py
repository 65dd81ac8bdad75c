"""A module without the memory of its weights, wherever its code made them."""

import numpy as np
import torch
from torch import nn

from planner.models.weightless import build_weightless


class MadeElsewhere(nn.Module):
    """Of torch's functions some know nothing of the device that a context asks for, and NumPy none at all."""

    def __init__(self) -> None:
        super().__init__()
        self.drawn = nn.Parameter(torch.normal(0.0, 1.0, size=(4,)))
        self.loaded = nn.Parameter(torch.from_numpy(np.ones(4, dtype=np.float32)), requires_grad=False)
        self.table = nn.ParameterList([nn.Parameter(torch.from_numpy(np.zeros((2, 3))))])
        self.linear = nn.Linear(4, 4)


def test_parameters_go_to_meta_wherever_they_were_made() -> None:
    module = build_weightless(MadeElsewhere)
    assert {name: parameter.device.type for name, parameter in module.named_parameters()} == dict.fromkeys(
        ("drawn", "loaded", "table.0", "linear.weight", "linear.bias"), "meta"
    )
    assert not module.get_parameter("loaded").requires_grad
