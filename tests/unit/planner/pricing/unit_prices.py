"""Prices of single units by name, for tests that look at one of them."""

from collections.abc import Mapping

from costmodels.vocabulary.choices import Recompute
from costmodels.vocabulary.terms import Holding, Time
from planner.layout.decided import NOTHING
from planner.pricing.placements import Decision, decide
from planner.pricing.rows import work_rows
from planner.pricing.target import PricingTarget
from planner.solver.cp_sat import CpSatSolver
from planner.table.keys import TensorSplit, WorkKey

Prices = Mapping[Time | Holding, float]
WHOLE = TensorSplit(1, False)


def decision_of(target: PricingTarget, split: TensorSplit = WHOLE) -> Decision:
    """Placements of every unit kind."""
    found = decide(target.graph, split, NOTHING, target.machine, target.framework, CpSatSolver().solve_placement)
    assert found is not None
    return found


def unit_prices(
    target: PricingTarget, decision: Decision, key: WorkKey, mode: Recompute = Recompute.NONE
) -> tuple[Prices, ...]:
    """Prices of every unit kind under one key and one mode of recomputation."""
    rows = work_rows(target.graph, {key.tensor: decision}, [key], target.machine, target.framework)
    place = list(Recompute).index(mode)
    return tuple(
        {**dict(zip(Time, time_s.tolist(), strict=True)), **dict(zip(Holding, num_bytes.tolist(), strict=True))}
        for time_s, num_bytes in zip(rows.time_s[0, place], rows.num_bytes[0, place], strict=True)
    )
