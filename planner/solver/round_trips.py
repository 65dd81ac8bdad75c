"""How long round trips through a pipeline keep its ranks from going on: what slow links between stages cost.

A micro-batch is in flight at a stage from its forward pass there until its backward pass: at least as long as it takes
to the last stage and back. A schedule lets a rank have no more than n in flight, at all of its stages K together. So in
the time T of a step (Little's law), with u_k what the stages from k on take and h_k hops of c seconds behind it,

    n T >= m sum_(k in K) (u_k + 2 c h_k)

Example: two ranks, one stage of 1 s each, 1F1B: rank 0 has two micro-batches in flight, and a hop takes 3 s. Each is
away for 2 + 2 * 3 = 8 s, so a micro-batch takes 4 s: T >= 4 m, while the ranks work for 1 m.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from costmodels.vocabulary.schedules import ScheduleName


class RoundTrips(NamedTuple):
    """Of one pipeline, for each micro-batch in flight: the hops one way, of the first rank and of the worst one.

    ``whole_of_first``: micro-batches of the first rank's first stage, which are away for the whole pipeline.
    """

    hops_of_first: float
    whole_of_first: float
    most_hops: float


@lru_cache(maxsize=4096)
def round_trips(schedule: ScheduleName, num_ranks: int, virtual_stages: int, num_microbatches: int) -> RoundTrips:
    """As a share of those that a rank has in flight."""
    rules, num_stages = schedule.rules, num_ranks * virtual_stages
    rank_of = [rules.rank_of(stage, num_ranks) for stage in range(num_stages)]
    moves = [0, *(int(one != other) for one, other in pairwise(rank_of))]
    behind = sum(moves) - np.cumsum(moves)
    flying = np.array(rules.in_flight_by_stage(num_ranks, virtual_stages, num_microbatches)[0])
    hops, in_flight = (np.bincount(rank_of, weights=each, minlength=num_ranks) for each in (behind, flying))
    shares = hops / in_flight
    return RoundTrips(float(shares[0]), 1 / float(in_flight[0]), float(shares.max()))
