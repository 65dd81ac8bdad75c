"""How far measured peak memory lies from predicted, as a distribution: with what probability a plan fits.

With r = measured / predicted peak memory of one run, ln r is taken to have two halves of normal distributions that meet
at its median, 0 (a split log-normal):

    P(r <= x) = Phi(ln x / s),   s = spread_above where x >= 1, spread_below where x < 1
    factor(risk) = exp(spread_above * Phi^-1(1 - risk)),   0 < risk <= 1/2

A plan that is predicted to need M bytes fits into C bytes with P(r <= C / M), and one that needs at most
C / factor(risk) fails to fit with at most ``risk``. At a risk of 1/2 the factor is exactly 1: predictions are taken at
their word. The median is not fitted. A model that counts too much on average gets no credit for it.

Each spread is the root mean square of ln r on its side, which is its maximum-likelihood value; every source of runs
counts alike (``spreads``), since whoever plans for a new cluster is a new source. Shipped bands are wider above: as
wide as it takes for runs of a source that was left out (``benchmarks/memory_band.py``).

Source of the form: J. F. Gibbons and S. Mylroie, "Estimation of impurity profiles in ion-implanted amorphous targets
using joined half-Gaussian distributions", Applied Physics Letters 22 (1973).
"""

from __future__ import annotations

from collections.abc import Sequence
from math import exp, inf, log, sqrt
from statistics import NormalDist
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

DEFAULT_RISK = 0.05
MOST_RISK = 0.5  # above it a plan would be allowed more memory than there is
SPREAD = 101  # quantiles that stand for one source

_NORMAL = NormalDist()


class MemoryBand(BaseModel):
    """The distribution of measured over predicted peak memory of runs of one recipe."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    spread_above: Annotated[float, Field(gt=0)]  # of ln(measured / predicted), of runs that need more than predicted
    spread_below: Annotated[float, Field(gt=0)]  # of those that need less
    num_runs: Annotated[int, Field(ge=1)]
    num_sources: Annotated[int, Field(ge=1)]
    # Of runs of each source, under a band fitted to the others: the share within factor(0.05), all sources alike.
    held_out_share: Annotated[float, Field(ge=0, le=1)] | None = None
    source: Annotated[str, Field(min_length=1)]

    def factor(self, risk: float) -> float:
        """What a device must have over what is predicted for a plan to fit but for ``risk``.

        ValueError unless 0 < ``risk`` <= 1/2.
        """
        if not 0 < risk <= MOST_RISK:
            raise ValueError(f"the risk must be above 0 and at most {MOST_RISK}, got {risk}")
        return 1.0 if risk == MOST_RISK else exp(self.spread_above * _NORMAL.inv_cdf(1 - risk))

    def fit_probability(self, needed_bytes: float, capacity_bytes: float) -> float:
        """That a run which is predicted to need so many bytes fits into so many."""
        if needed_bytes <= 0:
            return 1.0
        room = log(capacity_bytes / needed_bytes) if capacity_bytes > 0 else -inf
        return _NORMAL.cdf(room / (self.spread_above if room >= 0 else self.spread_below))


def spreads(ratios_of_sources: Sequence[Sequence[float]]) -> tuple[float, float]:
    """``spread_above`` and ``spread_below`` of measured over predicted, one sequence of runs a source.

    Every source counts alike, however many runs it has. A side without runs has the other's spread.
    """
    logs = [log(ratio) for of_source in ratios_of_sources for ratio in evenly_many(of_source)]
    above, below = [x for x in logs if x > 0], [x for x in logs if x < 0]
    if not above and not below:
        raise ValueError("no run differs from its prediction: there is no spread to fit")
    return _root_mean_square(above or below), _root_mean_square(below or above)


def _root_mean_square(values: Sequence[float]) -> float:
    return sqrt(sum(x * x for x in values) / len(values))


def evenly_many(values: Sequence[float]) -> list[float]:
    """As many values of each source: its quantiles in even steps."""
    ordered = sorted(values)
    return [ordered[round(k / (SPREAD - 1) * (len(ordered) - 1))] for k in range(SPREAD)]


def share_within(ratios: Sequence[float], factor: float) -> float:
    """The share of runs that need at most ``factor`` times what is predicted."""
    return sum(ratio <= factor for ratio in ratios) / len(ratios)
