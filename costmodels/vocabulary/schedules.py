"""Pipeline schedules, one record each: how many stages a rank holds, which numbers are legal, what every rank runs.

Space, plan checks, pricing and executor ask these records; a new schedule is its actions and a line in ``SCHEDULES``.
Actions stand in the order in which torch.distributed.pipelining runs them.

Rank r holds stages r, r + p, r + 2p, ... (chunk c of rank r is stage c·p + r); under the last two schedules it holds
two in the shape of a V (``v_shaped``). With p ranks, m micro-batches and v stages a rank:

    GPipe            F(0) .. F(m-1), B(0) .. B(m-1)
    1F1B             min(m, p - r) forwards, then one backward and one forward in turn, then the backwards left
    Interleaved1F1B  groups of q micro-batches pass through a rank's v stages in turn, q = m / max(1, m // p);
                     min(v·m, (v-1)·q + 2·(p-1-r)) forwards, then forward and backward in turn, then the rest
    InterleavedZeroBubble
                     the same with p-1-r in place of 2·(p-1-r), I in place of B, and each W once r more Is are done;
                     with v = 1 it is ZB-H1, the ZB-1P of the paper with all actions equally long
    ZB-2P            ZB-H2: v = 1, 2·(p-1-r) forwards more than one, W 2·r later: no bubble, at twice the activations
    ZBVZeroBubble, DualPipeV

Sources: Huang et al., "GPipe" (2019); Narayanan et al., "Memory-efficient pipeline-parallel DNN training" (1F1B, 2021)
and "Efficient large-scale language model training on GPU clusters using Megatron-LM" (interleaving, 2021); Qi et al.,
"Zero bubble pipeline parallelism" (2024). Those of torch are held against its own lists in tests/contracts.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from costmodels.vocabulary.action import (
    FORWARD,
    INPUT_GRADIENT,
    Action,
    ActionColumns,
    ActionLists,
)
from costmodels.vocabulary.bounds import MOST_PASSES
from costmodels.vocabulary.run_ahead import Ahead, run_ahead
from costmodels.vocabulary.v_shaped import (
    dual_pipe_v,
    held_by_dual_pipe_v,
    held_by_zero_bubble_v,
    zero_bubble_v,
)

# Rounds of micro-batches after which every rank has seen its peak of activations and the busiest works steadily.
STEADY_ROUNDS = 4


class ScheduleName(StrEnum):
    """Pipeline schedules, named as torch.distributed.pipelining names them."""

    __hash__ = str.__hash__  # that of Enum is in Python, and searches look up a million times

    GPIPE = "GPipe"
    ONE_F_ONE_B = "1F1B"
    INTERLEAVED_1F1B = "Interleaved1F1B"
    INTERLEAVED_ZERO_BUBBLE = "InterleavedZeroBubble"
    ZBV_ZERO_BUBBLE = "ZBVZeroBubble"
    DUAL_PIPE_V = "DualPipeV"
    ZB_2P = "ZB-2P"  # of Qi et al. (2024)

    @property
    def rules(self) -> Schedule:
        """The schedule of this name."""
        return SCHEDULES[self]


@dataclass(frozen=True)
class Schedule:
    """One pipeline schedule. p pipeline ranks hold v stages each and run m micro-batches in a step."""

    name: ScheduleName
    columns_of: Callable[[int, int, int], ActionColumns]  # of (p, v, m), which must be legal
    ahead_of_rank: Callable[[int, int], Ahead] | None = None  # of (rank, p), where forwards and backwards interleave
    # Micro-batches in flight down and up a V when (rank, p, m) holds most.
    held_by_rank: Callable[[int, int, int], tuple[int, int]] | None = None
    min_stages: int = 1  # a rank
    max_stages: int | None = 1  # a rank; None: any number
    least_microbatches_per_rank: int = 0  # times p: fewest micro-batches
    runs_in_rounds: bool = False  # micro-batches pass through a rank's stages in rounds of equal size
    splits_backward: bool = False  # gradients of inputs and of weights are made at different times
    forwards_first: bool = False  # all forward passes before the first backward: every micro-batch is in flight at once
    # A rank begins the next step without waiting for the others to end this one: gradients are checked after the step.
    overlaps_steps: bool = False
    in_torch: bool = True  # torch.distributed.pipelining has it, so it is searched and executed; otherwise only priced

    @property
    def is_v(self) -> bool:
        """Whether a rank holds two stages, one towards the last rank and one back from it."""
        return self.held_by_rank is not None

    @property
    def has_one_stage(self) -> bool:
        """Whether each rank holds just one stage, and whole backward passes: the solver chooses its size.

        The solver's formulas are those of 1F1B, or of GPipe where ``forwards_first``.
        """
        return self.max_stages == 1 and not self.splits_backward

    def violations(self, p: int, v: int, m: int) -> tuple[str, ...]:
        """Every rule of the schedule that these numbers break, as sentences; empty if it can run."""
        numbers = (("number of pipeline ranks", p), ("virtual stages", v), ("number of micro-batches", m))
        found = [f"{label} must be at least 1, got {number}" for label, number in numbers if number < 1]
        if found:
            return tuple(found)
        if self.max_stages is not None and not self.min_stages <= v <= self.max_stages:
            number = "one stage" if self.max_stages == 1 else f"{self.max_stages} stages"
            found.append(f"{self.name} has {number} a rank, got {v} virtual stages")
        elif v < self.min_stages:
            found.append(f"{self.name} needs at least {self.min_stages} virtual stages a rank, got {v}")
        least = self.least_microbatches_per_rank * p
        if m < least:
            found.append(f"{self.name} needs at least as many micro-batches as stages, got {m} for {least}")
        if p * v * m > MOST_PASSES:
            found.append(
                f"no more than {MOST_PASSES:,} forward passes of a step are simulated, got {m} micro-batches in "
                f"each of {p} * {v} stages"
            )
        if self.runs_in_rounds and m % max(1, m // p):
            found.append(
                f"{self.name} needs micro-batches that divide into {m // p} rounds (micro-batches // ranks = "
                f"{m} // {p}), got {m}"
            )
        return tuple(found)

    def conflicts(self, *, zero_stage: int | None, recomputation: Collection[str]) -> tuple[str, ...]:
        """What does not go with gradients of weights made apart from those of inputs, as sentences.

        torch would gather resharded parameters and repeat recomputed blocks once for every group of weights.
        ``zero_stage`` None: not known yet. ``recomputation``: names of the modes in use that recompute anything.
        """
        found: list[str] = []
        if self.splits_backward and zero_stage is not None and zero_stage > 1:
            found.append(f"{self.name} splits backward passes, so the ZeRO stage is 0 or 1, got {zero_stage}")
        if self.splits_backward and recomputation:
            modes = ", ".join(recomputation)
            found.append(f"{self.name} splits backward passes, so nothing can be recomputed, got {modes}")
        return tuple(found)

    def rank_of(self, stage: int, p: int) -> int:
        """The pipeline rank that holds ``stage``: in turn, or down and up again in a V."""
        return 2 * p - 1 - stage if self.is_v and stage >= p else stage % p

    def actions(self, p: int, v: int, m: int) -> ActionLists:
        """The actions of every rank; ValueError with all rules that the numbers break."""
        return self.columns(p, v, m).lists

    def columns(self, p: int, v: int, m: int) -> ActionColumns:
        """The same in columns."""
        return _columns(self.name, p, v, m)

    def microbatches_a_round(self, p: int, m: int) -> int:
        """After so many more micro-batches a long schedule repeats itself."""
        return m // max(1, m // p) if self.runs_in_rounds else p

    def shortened(self, p: int, m: int, rounds: int = STEADY_ROUNDS) -> int:
        """The number of micro-batches of the same schedule with at most so many rounds."""
        # Rounds stay of equal size: with m = r q and m // p = r, every r' <= r has r' q // p = r'.
        return m - max(0, m // p - rounds) * self.microbatches_a_round(p, m)

    def shortened_to_peak(self, p: int, m: int, rounds: int = STEADY_ROUNDS) -> int:
        """As ``shortened``, but with no fewer micro-batches than it takes to see the peak of activations."""
        if self.is_v:  # as many micro-batches as stages fill the pipeline: more run in the steady pattern
            return min(m, 2 * p)
        return m if self.forwards_first else self.shortened(p, m, rounds)

    def in_flight(self, p: int, m: int) -> tuple[int, ...]:
        """Micro-batches in flight at once on each rank, with one stage a rank and whole backward passes."""
        if self.forwards_first and p > 1:  # without a pipeline each micro-batch is finished at once
            return (m,) * p
        return tuple(min(m, p - rank) for rank in range(p))

    @property
    def begins_stage_by_stage(self) -> bool:
        """Whether a rank's whole backward passes go through one of its stages many times before another's first."""
        return not self.has_one_stage and not self.splits_backward

    def peak_comes_again(self, p: int, v: int, m: int) -> bool:
        """Whether each rank with whole backward passes holds as much at every stage before another than its first.

        With one stage a rank, once a forward pass has followed the first backward pass. Where passes interleave, a
        round later, when the last backward pass went through the rank's lowest stage. Rank 0 is the last to see it.
        """
        if self.splits_backward or self.forwards_first:
            return False
        if self.has_one_stage:
            return m > p
        assert self.ahead_of_rank is not None
        per_round = self.microbatches_a_round(p, m)
        return (2 * v - 1) * per_round + self.ahead_of_rank(0, p).forwards + 1 <= v * m

    def in_flight_at_lowest(self, p: int, v: int, m: int) -> tuple[int, ...]:
        """Micro-batches in flight at each stage before the first backward pass through its rank's lowest stage.

        By then a backward pass has begun in all stages of the rank. Of schedules that ``begins_stage_by_stage``.
        """
        return _in_flight_at_lowest(self.name, p, v, m)

    def in_flight_by_stage(self, p: int, v: int, m: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Micro-batches in flight at each stage at the moment its rank holds most of them.

        And how many of those wait for the second half of a split backward pass.
        """
        return _in_flight_by_stage(self.name, p, v, m)


def _gpipe(p: int, v: int, m: int) -> ActionColumns:
    return run_ahead((p, v, m), [Ahead(m, None)] * p)


def _one_f_one_b(p: int, v: int, m: int) -> ActionColumns:
    return run_ahead((p, v, m), [Ahead(p - 1 - rank, None) for rank in range(p)])


def _interleaved_1f1b(rank: int, p: int) -> Ahead:
    return Ahead(2 * (p - 1 - rank), None)


def _interleaved_zero_bubble(rank: int, p: int) -> Ahead:
    return Ahead(p - 1 - rank, rank)


def _zb_2p(rank: int, p: int) -> Ahead:
    return Ahead(2 * (p - 1 - rank), 2 * rank)


def _interleaving(ahead: Callable[[int, int], Ahead]) -> Callable[[int, int, int], ActionColumns]:
    return lambda p, v, m: run_ahead((p, v, m), [ahead(rank, p) for rank in range(p)])


def _v_shaped(of_rank: Callable[[int, int, int], tuple[Action, ...]]) -> Callable[[int, int, int], ActionColumns]:
    return lambda p, v, m: ActionColumns.of(tuple(of_rank(rank, p, m) for rank in range(p)))


SCHEDULES: Mapping[ScheduleName, Schedule] = {
    schedule.name: schedule
    for schedule in (
        Schedule(ScheduleName.ONE_F_ONE_B, _one_f_one_b, least_microbatches_per_rank=1),
        Schedule(ScheduleName.GPIPE, _gpipe, forwards_first=True),
        Schedule(
            ScheduleName.INTERLEAVED_1F1B,
            _interleaving(_interleaved_1f1b),
            ahead_of_rank=_interleaved_1f1b,
            min_stages=2,
            max_stages=None,
            runs_in_rounds=True,
        ),
        Schedule(
            ScheduleName.INTERLEAVED_ZERO_BUBBLE,
            _interleaving(_interleaved_zero_bubble),
            ahead_of_rank=_interleaved_zero_bubble,
            max_stages=None,
            runs_in_rounds=True,
            splits_backward=True,
        ),
        Schedule(
            ScheduleName.ZBV_ZERO_BUBBLE,
            _v_shaped(zero_bubble_v),
            held_by_rank=held_by_zero_bubble_v,
            min_stages=2,
            max_stages=2,
            splits_backward=True,
        ),
        Schedule(
            ScheduleName.DUAL_PIPE_V,
            _v_shaped(dual_pipe_v),
            held_by_rank=held_by_dual_pipe_v,
            min_stages=2,
            max_stages=2,
            least_microbatches_per_rank=2,
            splits_backward=True,
        ),
        Schedule(
            ScheduleName.ZB_2P,
            _interleaving(_zb_2p),
            ahead_of_rank=_zb_2p,
            splits_backward=True,
            overlaps_steps=True,
            in_torch=False,
        ),
    )
}
"""Every schedule there is, the plainest first."""


@lru_cache(maxsize=256)
def _columns(name: ScheduleName, p: int, v: int, m: int) -> ActionColumns:
    rules = SCHEDULES[name]
    found = rules.violations(p, v, m)
    if found:
        raise ValueError("; ".join(found))
    return rules.columns_of(p, v, m)


@lru_cache(maxsize=1024)
def _in_flight_by_stage(name: ScheduleName, p: int, v: int, m: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    rules = SCHEDULES[name]
    if rules.ahead_of_rank is not None:
        return _held_interleaved((p, v, m), [rules.ahead_of_rank(rank, p) for rank in range(p)])
    counts = [0] * (p * v)
    for rank in range(p):
        if rules.held_by_rank is not None:
            counts[rank], counts[2 * p - 1 - rank] = rules.held_by_rank(rank, p, m)
        else:
            counts[rank] = rules.in_flight(p, m)[rank]
    return tuple(counts), (0,) * len(counts)


@lru_cache(maxsize=1024)
def _in_flight_at_lowest(name: ScheduleName, p: int, v: int, m: int) -> tuple[int, ...]:
    """The passes before went through the other stages, the highest first, and a forward pass followed each of them."""
    ahead_of_rank = SCHEDULES[name].ahead_of_rank
    assert ahead_of_rank is not None
    per_round, total, chunks = SCHEDULES[name].microbatches_a_round(p, m), v * m, np.arange(v)[:, None]
    done = (v - 1) * per_round
    num_warmup = np.minimum(total, done + np.array([ahead_of_rank(rank, p).forwards for rank in range(p)]))
    forwards = np.minimum(total, num_warmup + done + 1)
    found = _of_chunk(forwards, chunks, per_round, v) - per_round * (chunks > 0)
    return tuple(found.ravel().tolist())


def peak_in_flight(
    actions_of_rank: Sequence[Action],
    activation_bytes_by_stage: Mapping[int, float],
    waiting_bytes_by_stage: Mapping[int, float] | None = None,
) -> float:
    """Largest sum of activations that a rank holds at once: from the forward of a micro-batch to its last backward.

    ``activation_bytes_by_stage``: bytes one micro-batch keeps in a stage (or 1.0, to count micro-batches), until its
    B or W. ``waiting_bytes_by_stage``: what it holds more from I to W, or less where this is negative.
    """
    waiting = waiting_bytes_by_stage or {}
    split = {(stage, microbatch) for kind, stage, microbatch in actions_of_rank if kind == INPUT_GRADIENT}
    held = 0.0
    peak = 0.0
    for kind, stage, microbatch in actions_of_rank:
        if kind == FORWARD:
            held += activation_bytes_by_stage[stage]
        elif kind == INPUT_GRADIENT:
            held += waiting.get(stage, 0.0)
        else:
            extra = waiting.get(stage, 0.0) if (stage, microbatch) in split else 0.0
            held -= activation_bytes_by_stage[stage] + extra
        if held > peak:
            peak = held
    return peak


def _held_interleaved(shape: tuple[int, int, int], ahead: Sequence[Ahead]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """What ``in_flight_by_stage`` says, without lists of actions; ``shape`` is (ranks, stages a rank, micro-batches).

    Each forward after the warm-up is followed by an input gradient, and that, once ``delay`` have passed, by a weight
    gradient, which frees what a forward took. So a rank holds most at forward number warm-up + delay + 1.
    """
    num_ranks, virtual_stages, num_microbatches = shape
    per_round, total = num_microbatches // max(1, num_microbatches // num_ranks), virtual_stages * num_microbatches
    num_warmup = np.minimum(total, (virtual_stages - 1) * per_round + np.array([each.forwards for each in ahead]))
    forwards = np.minimum(total, num_warmup + 1 + np.array([each.delay or 0 for each in ahead]))
    gradients = np.maximum(0, forwards - num_warmup - 1) * np.array([each.delay is not None for each in ahead])
    chunks = np.arange(virtual_stages)[:, None]
    counts = _of_chunk(forwards, chunks, per_round, virtual_stages)
    waits = _of_chunk(gradients, virtual_stages - 1 - chunks, per_round, virtual_stages)
    return tuple(counts.ravel().tolist()), tuple(waits.ravel().tolist())


def _of_chunk(
    positions: NDArray[np.intp], chunks: NDArray[np.intp], per_round: int, virtual_stages: int
) -> NDArray[np.intp]:
    """How many of each rank's first ``positions`` lie in each chunk, where rounds go through the chunks in order.

    [chunks, ranks].
    """
    rounds, rest = np.divmod(positions, per_round * virtual_stages)
    return rounds * per_round + np.clip(rest - chunks * per_round, 0, per_round)
