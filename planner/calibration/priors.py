"""How far the factors of a cluster lie from its profile before any of its runs is known."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from hardware_profiles.schema import FactorName

TIME_FACTORS: tuple[FactorName, ...] = (
    "product_rate",
    "attention_rate",
    "memory_rate",
    "host_time",
    "collective_delay",
    "network_inside",
    "network_between",
)
_SECONDS: tuple[FactorName, ...] = ("host_time", "collective_delay")  # the others are rates: more of them is faster


@dataclass(frozen=True)
class Prior:
    """Standard deviations of the logarithm of each factor, and of what no factor explains of a run's time and memory.

    ``common``: of a slowness of everything, which the factors share where no run of the framework on that device was
    ever compared. ``constant_bytes``: deviation of the memory that every run takes besides. Of noise, tails are those
    of Student's t.
    """

    spreads: Mapping[FactorName, float]
    common: float
    time_noise: float
    memory_noise: float
    constant_bytes: float
    degrees_of_freedom: float
    source: str

    def time_covariance(self, *, is_seen: bool) -> npt.NDArray[np.float64]:
        """Of the logarithms of ``TIME_FACTORS``; ``is_seen``: runs of the framework on the device were compared."""
        own = np.diag([self.spreads[name] ** 2 for name in TIME_FACTORS])
        shared = np.array([1.0 if name in _SECONDS else -1.0 for name in TIME_FACTORS]) * self.common
        return own if is_seen else own + np.outer(shared, shared)


PRIOR = Prior(
    spreads={
        "product_rate": 0.08,
        "attention_rate": 0.18,
        "memory_rate": 0.16,
        "host_time": 0.2,
        "collective_delay": 0.7,
        "network_inside": 0.2,
        "network_between": 0.23,
        "allocator_reserve": 0.5,
    },
    common=0.1,
    time_noise=0.07,
    memory_noise=0.05,
    constant_bytes=1e9,
    degrees_of_freedom=4.0,
    source="spreads between 25 clusters of published runs, each source left out of its recipe's fit, made smaller "
    "until one run of a cluster hardly moved its others away from what was measured "
    "(benchmarks/calibration_priors.py, 2026-11-23); what all share where the framework was never compared: half of "
    "the band that such frameworks have (costmodels/recipes/bands.json: 0.90 to 1.14, 80 %), and what our executor lay "
    "from the profiles of two virtual clusters (0.14 and 0.03, benchmarks/results/measured_plans_*, 2026-11-23); "
    "collective_delay, allocator_reserve, the constant, the noise of "
    "memory and the degrees of freedom are our own choice",
)
