"""The optimiser step on one device: t = launch + elements · bytes per element / memory bandwidth.

Bytes per element of a fused optimiser (torch.optim with ``fused=True``: one pass), all in fp32: Adam reads parameter,
gradient and two moments and writes parameter and moments, 7 · 4; SGD reads parameter and gradient and writes the
parameter, 3 · 4, and with momentum reads and writes the moment, 5 · 4, in Apex and Transformer Engine. torch 2.13 does
not fuse the SGD of DTensors, and with momentum it passes three times (torch/optim/sgd.py): the moment is scaled, the
gradient is added to it, and it to the parameter, (2 + 3 + 3) · 4.
"""

from __future__ import annotations

from costmodels.compute import roofline
from costmodels.vocabulary.workload import OpClass
from hardware_profiles.schema import DeviceProfile

_ACCESSES = {"adamw": 7, "adam": 7, "sgd": 3, "sgd-momentum": 8}
_FUSED_MOMENTUM = 5
FP32_BYTES = 4


def update_bytes(optimizer: str, *, fuses_momentum: bool = False) -> float:
    """Moved for each fp32 parameter that is updated; ValueError for an unknown optimiser.

    ``fuses_momentum``: SGD with momentum is one kernel, and not torch's own.
    """
    if optimizer not in _ACCESSES:
        raise ValueError(f"optimizer must be one of {', '.join(_ACCESSES)}, got {optimizer!r}")
    is_fused = fuses_momentum and optimizer == "sgd-momentum"
    return (_FUSED_MOMENTUM if is_fused else _ACCESSES[optimizer]) * FP32_BYTES


def optimizer_step_line(num_bytes: float, device: DeviceProfile) -> tuple[float, float]:
    """Seconds to begin, and for each fp32 parameter that one device updates, of which it moves ``num_bytes``."""
    line = roofline(device, OpClass.MEMORY_BOUND, "fp32")
    return line.launch_s, num_bytes * line.seconds_per_byte
