"""The three programs that solvers answer, and their solutions: numbers only, with what they mean to be minimised.

A defect of a solver reproduces from these values alone, without torch, a model or a GPU.
"""

from __future__ import annotations

from dataclasses import dataclass


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


@dataclass(frozen=True)
class StageProblem:
    """Cut a row of units into contiguous pipeline stages, one a rank.

    ``forward_s[r][u]``, ``backward_s[r][u]``: one micro-batch through unit u on rank r, whose devices
    may be of another kind than the next rank's. ``static_bytes[u]``: states. ``kept_bytes[u]``:
    activations of one micro-batch in flight. ``in_flight[r]``: micro-batches in flight on rank r when
    its memory peaks. ``room_bytes[r]``: what rank r has for both. ``send_s[r]``: one activation from
    rank r to the next. ``windowed``: 1F1B, whose ranks alternate forward and backward; otherwise
    GPipe, all forwards first.
    """

    forward_s: tuple[tuple[float, ...], ...]
    backward_s: tuple[tuple[float, ...], ...]
    static_bytes: tuple[float, ...]
    kept_bytes: tuple[float, ...]
    in_flight: tuple[int, ...]
    room_bytes: tuple[float, ...]
    num_microbatches: int
    send_s: tuple[float, ...]
    windowed: bool

    @property
    def num_units(self) -> int:
        """Number of units to place."""
        return len(self.static_bytes)

    @property
    def num_ranks(self) -> int:
        """Number of pipeline ranks and of stages; every stage holds at least one unit."""
        return len(self.in_flight)


@dataclass(frozen=True)
class StageSolution:
    """``starts[r]`` is the first unit of rank r. ``bound_s`` bounds the simulated pipeline time from below."""

    starts: tuple[int, ...]
    bound_s: float


@dataclass(frozen=True)
class DegreeProblem:
    """maximise speed over n_d * n_m * n_p = num_devices.

    ``step_time_s[(n_d, n_m, n_p)]`` and ``memory_bytes`` of the same keys; keys that are absent
    are not allowed.
    """

    num_devices: int
    step_time_s: dict[tuple[int, int, int], float]
    memory_bytes: dict[tuple[int, int, int], float]
    capacity_bytes: float


@dataclass(frozen=True)
class DegreeSolution:
    """The degrees (data, tensor, pipeline) of least step time."""

    degrees: tuple[int, int, int]
    step_time_s: float


def stage_sums(values: tuple[float, ...], starts: tuple[int, ...]) -> tuple[float, ...]:
    """Sums of ``values`` over the stages that begin at ``starts``."""
    ends = (*starts[1:], len(values))
    return tuple(sum(values[a:b]) for a, b in zip(starts, ends, strict=True))


def rank_sums(rows: tuple[tuple[float, ...], ...], starts: tuple[int, ...]) -> tuple[float, ...]:
    """Sums over the stages that begin at ``starts``, each from its own rank's row."""
    ends = (*starts[1:], len(rows[0]))
    return tuple(sum(row[a:b]) for row, a, b in zip(rows, starts, ends, strict=True))


def rank_memory_bytes(problem: StageProblem, starts: tuple[int, ...]) -> tuple[float, ...]:
    """States and activations of each pipeline rank at its peak under the stages that begin at ``starts``."""
    static = stage_sums(problem.static_bytes, starts)
    kept = stage_sums(problem.kept_bytes, starts)
    ranks = zip(static, problem.in_flight, kept, strict=True)
    return tuple(states + flying * activations for states, flying, activations in ranks)


def fits(problem: StageProblem, starts: tuple[int, ...]) -> bool:
    """Whether every rank has room for its stage."""
    needs = rank_memory_bytes(problem, starts)
    return all(need <= room for need, room in zip(needs, problem.room_bytes, strict=True))


def pipeline_bound_s(problem: StageProblem, starts: tuple[int, ...]) -> float:
    """A lower bound on the pipeline's makespan, which equal stages with free sends meet.

    Rank r works m (f_r + b_r); before that the first micro-batch passes the ranks below it, after it
    the last gradient passes them again. Between its first forward and first backward the micro-batch
    passes the stages behind it (suffix), of which the warm-up forwards fill at most a part; likewise
    at the end with backwards (1F1B). GPipe waits for the suffix once, because all forwards precede
    all backwards.
    """
    forward = rank_sums(problem.forward_s, starts)
    backward = rank_sums(problem.backward_s, starts)
    num_ranks, m, send = problem.num_ranks, problem.num_microbatches, problem.send_s
    bound = 0.0
    for rank in range(num_ranks):
        behind = num_ranks - 1 - rank
        prefix = sum(forward[:rank]) + sum(backward[:rank]) + 2 * sum(send[:rank])
        suffix = sum(forward[rank + 1 :]) + sum(backward[rank + 1 :]) + 2 * sum(send[rank:])
        idle = idle_s(problem, behind, suffix, forward[rank], backward[rank])
        bound = max(bound, prefix + m * (forward[rank] + backward[rank]) + idle)
    return bound


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
