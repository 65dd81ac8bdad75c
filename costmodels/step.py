"""The optimiser step on one device: t = launch + elements · bytes per element / memory bandwidth.

Bytes per element of a fused optimiser (torch.optim with ``fused=True``: one pass), all in fp32: Adam reads parameter,
gradient and two moments and writes parameter and moments, 7 · 4; SGD reads parameter and gradient and writes the
parameter, 3 · 4. torch 2.13 does not fuse the SGD of DTensors, and with momentum it passes three times
(torch/optim/sgd.py): the moment is scaled, the gradient is added to it, and it to the parameter, (2 + 3 + 3) · 4.
"""

from __future__ import annotations

from costmodels.compute import roofline
from costmodels.vocabulary.workload import OpClass
from hardware_profiles.schema import DeviceProfile

FP32_ACCESSES = {"adamw": 7, "adam": 7, "sgd": 3, "sgd-momentum": 8}
FP32_BYTES = 4


def optimizer_step_line(optimizer: str, device: DeviceProfile, extra_bytes: float = 0.0) -> tuple[float, float]:
    """Seconds to begin, and for each fp32 parameter that one device updates; ValueError for an unknown optimiser.

    ``extra_bytes``: moved per element besides, to copy, check and clip.
    """
    if optimizer not in FP32_ACCESSES:
        raise ValueError(f"optimizer must be one of {', '.join(FP32_ACCESSES)}, got {optimizer!r}")
    line = roofline(device, OpClass.MEMORY_BOUND, "fp32")
    return line.launch_s, (FP32_ACCESSES[optimizer] * FP32_BYTES + extra_bytes) * line.seconds_per_byte
