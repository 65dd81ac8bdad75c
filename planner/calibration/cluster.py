"""Corrects the profile of a cluster by its own measured runs: each factor as far as they ask for it.

Whatever prices a run, the same that predicts, is handed in with it. Logarithms of step times are taken to lie around
those predicted under the factors of ``priors.TIME_FACTORS``; logarithms of peak memory around those predicted under a
factor of the allocator's reserve and a constant number of bytes, never below 0. ``posterior.py`` finds the most
probable factors: where a run says little of one, it stays near 1.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import exp, log
from typing import Literal

import numpy as np

from hardware_profiles.schema import (
    LARGEST_CALIBRATION,
    CalibratedFactor,
    Calibration,
    CalibrationRun,
    FactorName,
)
from planner.calibration.posterior import Noise, Posterior, Vector, posterior
from planner.calibration.priors import PRIOR, TIME_FACTORS, Prior

MemoryKind = Literal["allocated", "reserved", "device"]
Factors = Mapping[FactorName, float]
RESERVE: FactorName = "allocator_reserve"
TELLING = 0.999  # a factor whose spread stays above this share of its prior's was told nothing


@dataclass(frozen=True)
class MeasuredRun:
    """A run of the cluster; ``price`` predicts its step time and its peak memory under factors.

    Memory is counted as its measurement counts it, without the constant.
    """

    name: str
    framework: str
    price: Callable[[Factors], tuple[float, float]]
    step_time_s: float | None = None
    peak_memory_bytes: float | None = None
    memory_kind: MemoryKind = "allocated"
    is_seen: bool = True  # whether runs of the framework on this device were ever compared with predictions
    _known: dict[tuple[tuple[FactorName, float], ...], tuple[float, float]] = field(
        default_factory=dict[tuple[tuple[FactorName, float], ...], tuple[float, float]], repr=False, compare=False
    )

    def predicted_s(self, factors: Factors) -> float:
        """The step time under ``factors``."""
        return self._priced(factors)[0]

    def predicted_bytes(self, factors: Factors) -> float:
        """The peak memory under ``factors``, without the constant."""
        return self._priced(factors)[1]

    def _priced(self, factors: Factors) -> tuple[float, float]:
        """Both, worked out once."""
        key = tuple(sorted(factors.items()))
        if key not in self._known:
            self._known[key] = self.price(factors)
        return self._known[key]


def calibration_of(runs: Sequence[MeasuredRun], date: datetime.date, prior: Prior = PRIOR) -> Calibration:
    """What ``runs`` say of their cluster; ValueError where there is none, or none with a time or a peak of memory."""
    timed = [run for run in runs if run.step_time_s is not None]
    weighed = [run for run in runs if run.peak_memory_bytes is not None]
    if not timed and not weighed:
        raise ValueError("no run has a measured step time or a measured peak of memory")
    factors = _time_factors(timed, prior) if timed else {}
    memory, constant, spread_bytes = _memory(weighed, prior) if weighed else ({}, 0.0, None)
    found: dict[FactorName, CalibratedFactor] = {**factors, **memory}
    values: Factors = {name: factor.value for name, factor in found.items()}
    return Calibration(
        factors=found,
        constant_bytes=constant,
        constant_prior_spread_bytes=None if spread_bytes is None else prior.constant_bytes,
        constant_spread_bytes=spread_bytes,
        runs=tuple(_record(run, values, constant) for run in runs),
        date=date,
        prior=prior.source,
    )


def _time_factors(runs: Sequence[MeasuredRun], prior: Prior) -> dict[FactorName, CalibratedFactor]:
    def predict(x: Vector) -> Vector:
        factors: Factors = {name: _factor(value) for name, value in zip(TIME_FACTORS, x, strict=True)}
        return np.array([log(run.predicted_s(factors)) for run in runs])

    measured = [log(run.step_time_s) for run in runs if run.step_time_s is not None]
    noise = Noise(np.full(len(runs), prior.time_noise), prior.degrees_of_freedom)
    covariance = prior.time_covariance(is_seen=any(run.is_seen for run in runs))
    found = posterior(predict, measured, covariance, noise)
    return _told(TIME_FACTORS, found, np.sqrt(np.diag(covariance)))


def _memory(runs: Sequence[MeasuredRun], prior: Prior) -> tuple[dict[FactorName, CalibratedFactor], float, float]:
    """The factor of the reserve, the constant and its deviation."""
    measured = [log(run.peak_memory_bytes) for run in runs if run.peak_memory_bytes is not None]
    noise = Noise(np.full(len(runs), prior.memory_noise), prior.degrees_of_freedom)

    def predicted(reserve: float, constant: float) -> Vector:
        peaks = (run.predicted_bytes({RESERVE: _factor(reserve)}) for run in runs)
        return np.log([max(1.0, peak + constant) for peak in peaks])

    spreads = np.array([prior.spreads[RESERVE], 1.0])
    both = posterior(lambda x: predicted(x[0], x[1] * prior.constant_bytes), measured, np.diag(spreads**2), noise)
    constant, spread = float(both.mean[1]) * prior.constant_bytes, float(both.spread[1]) * prior.constant_bytes
    if constant >= 0:
        return _told((RESERVE,), both, spreads), constant, spread
    alone = posterior(lambda x: predicted(x[0], 0.0), measured, np.diag(spreads[:1] ** 2), noise)
    return _told((RESERVE,), alone, spreads), 0.0, spread


def _told(names: Sequence[FactorName], found: Posterior, before: Vector) -> dict[FactorName, CalibratedFactor]:
    """The factors that the runs say anything of; ``before``: their deviations in the prior."""
    return {
        name: CalibratedFactor(value=_factor(value), prior_spread=float(prior), spread=float(spread))
        for name, value, spread, prior in zip(names, found.mean, found.spread, before, strict=False)
        if spread < TELLING * prior
    }


def _factor(logarithm: float) -> float:
    most = log(LARGEST_CALIBRATION)
    return exp(min(most, max(-most, float(logarithm))))


def _record(run: MeasuredRun, values: Factors, constant: float) -> CalibrationRun:
    is_timed, is_weighed = run.step_time_s is not None, run.peak_memory_bytes is not None
    return CalibrationRun(
        name=run.name,
        framework=run.framework,
        step_time_s=run.step_time_s,
        predicted_step_time_s=run.predicted_s({}) if is_timed else None,
        calibrated_step_time_s=run.predicted_s(values) if is_timed else None,
        peak_memory_bytes=run.peak_memory_bytes,
        predicted_peak_memory_bytes=run.predicted_bytes({}) if is_weighed else None,
        calibrated_peak_memory_bytes=run.predicted_bytes(values) + constant if is_weighed else None,
        memory_kind=run.memory_kind if is_weighed else None,
    )
