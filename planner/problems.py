"""The two programs that solvers answer, and their solutions: numbers only, with what they mean to be minimised.

A defect of a solver reproduces from these values alone, without torch, a model or a GPU.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class PlacementProblem:
    """Choose one strategy per operator at least cost.

    ``node_costs_ns[i][s]``: cost of strategy s of operator i. ``edges``: (i, j, costs) where
    ``costs[s][t]`` is what it costs to feed strategy t of j from strategy s of i; None = impossible.
    """

    node_costs_ns: tuple[tuple[int, ...], ...]
    edges: tuple[tuple[int, int, tuple[tuple[int | None, ...], ...]], ...]


@dataclass(frozen=True)
class PlacementSolution:
    """The strategy of each operator; ``bound_ns`` is proved, and equals ``cost_ns`` when optimal."""

    choices: tuple[int, ...]
    cost_ns: int
    bound_ns: int


@dataclass(frozen=True, eq=False)
class StageProblem:
    """Cut a row of units into contiguous pipeline stages, one a rank.

    ``forward_s[r][u]``, ``backward_s[r][u]``: one micro-batch through unit u on rank r, whose devices
    may be of another kind than the next rank's. ``extra_s[r, a, b]``: seconds that units a..b-1 take
    besides where they are all of rank r's stage, since they recompute what they have no room to keep;
    infinite where they do not fit. ``once_s[r, a, b]``: what rank r does at least with them once a
    step, after the last micro-batch. ``send_s[r]``: one activation from rank r to the next.
    ``windowed``: 1F1B, whose ranks alternate forward and backward; otherwise GPipe, all forwards
    first. ``receive_s[r]``: what messages add to each forward and each backward pass of rank r: those
    beside it, and where results go on demand those it stands and waits for; ``send_s`` is 0 then.
    """

    forward_s: tuple[tuple[float, ...], ...]
    backward_s: tuple[tuple[float, ...], ...]
    extra_s: NDArray[np.float64]  # [ranks, units, units + 1]
    once_s: NDArray[np.float64]  # as extra_s
    num_microbatches: int
    send_s: tuple[float, ...]
    windowed: bool
    receive_s: tuple[tuple[float, float], ...]

    @property
    def num_units(self) -> int:
        """Number of units to place."""
        return len(self.forward_s[0])

    @property
    def num_ranks(self) -> int:
        """Number of pipeline ranks and of stages; every stage holds at least one unit."""
        return len(self.forward_s)


@dataclass(frozen=True)
class StageSolution:
    """``starts[r]`` is the first unit of rank r. The step takes no less than ``bound_s`` under this cut."""

    starts: tuple[int, ...]
    bound_s: float


def of_stages(values: NDArray[np.float64], starts: tuple[int, ...]) -> tuple[float, ...]:
    """Of ``extra_s`` or ``once_s`` the entries of the stages that begin at ``starts``."""
    ends = (*starts[1:], values.shape[1])
    return tuple(float(values[rank, a, b]) for rank, (a, b) in enumerate(zip(starts, ends, strict=True)))


def rank_sums(rows: tuple[tuple[float, ...], ...], starts: tuple[int, ...]) -> tuple[float, ...]:
    """Sums over the stages that begin at ``starts``, each from its own rank's row."""
    ends = (*starts[1:], len(rows[0]))
    return tuple(sum(row[a:b]) for row, a, b in zip(rows, starts, ends, strict=True))


def pipeline_bound_s(problem: StageProblem, starts: tuple[int, ...]) -> float:
    """A lower bound on the step, which equal stages with free sends meet.

    Rank r works m (f_r + b_r); before that the first micro-batch passes the ranks below it, after it
    the last gradient passes them again. Between its first forward and first backward the micro-batch
    passes the stages behind it (suffix), of which the warm-up forwards fill at most a part; likewise
    at the end with backwards (1F1B). GPipe waits for the suffix once, because all forwards precede
    all backwards.
    """
    forward, backward = rank_sums(problem.forward_s, starts), rank_sums(problem.backward_s, starts)
    extra, once = of_stages(problem.extra_s, starts), of_stages(problem.once_s, starts)
    forward = tuple(f + first for f, (first, _) in zip(forward, problem.receive_s, strict=True))
    backward = tuple(b + e + then for b, e, (_, then) in zip(backward, extra, problem.receive_s, strict=True))
    num_ranks, m, send = problem.num_ranks, problem.num_microbatches, problem.send_s
    bound = 0.0
    for rank in range(num_ranks):
        behind = num_ranks - 1 - rank
        prefix = sum(forward[:rank]) + sum(backward[:rank]) + 2 * sum(send[:rank])
        suffix = sum(forward[rank + 1 :]) + sum(backward[rank + 1 :]) + 2 * sum(send[rank:])
        own = forward[rank] + backward[rank]
        idle = idle_s(problem, behind, suffix, forward[rank], backward[rank])
        steady = max(m * own + idle, num_rounds(problem, rank) * (own + suffix))
        bound = max(bound, prefix + steady + once[rank])
    return bound


def num_rounds(problem: StageProblem, rank: int) -> int:
    """How often a micro-batch must have gone all the way behind ``rank`` and back before others can follow.

    A 1F1B rank holds as many micro-batches as there are ranks from it on: of each such round, one has to come back
    before the next round begins.
    """
    return (problem.num_microbatches - 1) // (problem.num_ranks - rank) + 1 if problem.windowed else 1


def idle_s(problem: StageProblem, behind: int, suffix_s: float, forward_s: float, backward_s: float) -> float:
    """Least idle time of a rank with ``behind`` stages behind it (see above)."""
    if not problem.windowed:
        return suffix_s
    warmup = min(behind, problem.num_microbatches - 1)
    first = max(0.0, suffix_s - warmup * forward_s)
    last = max(0.0, suffix_s - warmup * backward_s)
    return first + last if windows_disjoint(problem, behind) else max(first, last)


def windows_disjoint(problem: StageProblem, behind: int) -> bool:
    """Whether the first backward comes before the last forward on a 1F1B rank."""
    return problem.num_microbatches >= behind + 2
