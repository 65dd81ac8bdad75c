"""Times how long the host takes to issue a kernel as training does: from Python and through autograd."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 torch's own name for it
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from hardware_profiles.probes.timing import clock_of, synchronize

# So small that no processor has anything to compute, and few enough kernels that no launch waits for the device.
_WIDTH, _HEADS, _TOKENS, _BLOCKS = 64, 4, 16, 4
_WARM_UPS, _SAMPLES = 5, 25


class _Block(nn.Module):
    """A block of a transformer: attention and a gated MLP, each behind a norm and beside a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.before = nn.LayerNorm(_WIDTH)
        self.inward = nn.Linear(_WIDTH, 3 * _WIDTH, bias=False)
        self.outward = nn.Linear(_WIDTH, _WIDTH, bias=False)
        self.between = nn.LayerNorm(_WIDTH)
        self.gate = nn.Linear(_WIDTH, 2 * _WIDTH, bias=False)
        self.up = nn.Linear(_WIDTH, 2 * _WIDTH, bias=False)
        self.down = nn.Linear(2 * _WIDTH, _WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = self.inward(self.before(x)).view(1, _TOKENS, 3, _HEADS, -1).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(heads[0], heads[1], heads[2], is_causal=True)
        x = x + self.outward(attended.transpose(1, 2).reshape(1, _TOKENS, _WIDTH))
        normed = self.between(x)
        return x + self.down(F.silu(self.gate(normed)) * self.up(normed))


class _Kernels(TorchDispatchMode):
    """Counts operators that are no views."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> object:
        self.count += not func.is_view
        return func(*args, **(kwargs or {}))


def time_issuing(device: torch.device) -> tuple[float, ...]:
    """Samples of the host's seconds for one kernel, of a forward and a backward pass of four small blocks.

    What the device does meanwhile is not waited for; on a CPU the host itself computes, and next to nothing.
    """
    model = nn.Sequential(*(_Block() for _ in range(_BLOCKS))).to(device)
    x = torch.randn(1, _TOKENS, _WIDTH, device=device)

    def issue() -> None:
        model(x).sum().backward()

    issue()  # gradients are there from now on, and added up, as in training
    with _Kernels() as kernels:
        issue()
    clock, samples = clock_of(device), list[float]()
    for _ in range(_WARM_UPS + _SAMPLES):
        synchronize(device)
        start_s = clock()
        issue()
        samples.append((clock() - start_s) / kernels.count)
    return tuple(samples[_WARM_UPS:])
