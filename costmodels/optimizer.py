"""Time of the optimiser step: memory traffic over the states of one rank, in one fused pass.

    t = num_elements · bytes per element / (memory bandwidth · fraction of the memory-bound class)

Adam reads parameter, gradient and both moments and writes parameter and moments, all fp32: 7 · 4 = 28 bytes; SGD
without momentum reads parameter and gradient and writes the parameter: 12 bytes. Source: torch.optim's fused
implementations (``torch._fused_adamw_``, ``torch._fused_sgd_``), which make one pass over their operands.
"""

from __future__ import annotations

from costmodels.compute import op_time_s
from costmodels.workload import OpClass, OpWorkload
from hardware_profiles.schema import DeviceProfile

BYTES_PER_ELEMENT = {"adamw": 28, "adam": 28, "sgd": 12}


def optimizer_step_s(num_elements: float, optimizer: str, device: DeviceProfile) -> float:
    """Seconds to update ``num_elements`` parameters on one rank; ValueError for an unknown optimiser."""
    if optimizer not in BYTES_PER_ELEMENT:
        raise ValueError(f"optimizer must be one of {', '.join(BYTES_PER_ELEMENT)}, got {optimizer!r}")
    num_bytes = num_elements * BYTES_PER_ELEMENT[optimizer]
    return op_time_s(OpWorkload(OpClass.MEMORY_BOUND, 0.0, num_bytes), device, "fp32") if num_bytes else 0.0
