"""Collectives that a model's forward pass runs as operators, once it is parallel: no traced model has them."""

from __future__ import annotations

from planner.operators.record import ONE_PASS, PLAIN, Operator, named

COLLECTIVES = (
    Operator(
        names=named("all_reduce all_gather_into_tensor reduce_scatter_tensor all_to_all_single"),
        work=ONE_PASS,
        saved=None,
        placements=None,
        samples=None,
        kept_as=named(
            "_c10d_functional.all_reduce _c10d_functional.all_gather_into_tensor "
            "_c10d_functional.reduce_scatter_tensor _c10d_functional.all_to_all_single"
        ),
        traits=PLAIN,
    ),
)
"""Selective recomputation does not send again what was sent."""
