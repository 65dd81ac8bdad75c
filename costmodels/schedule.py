"""Pipeline schedules: the list of actions of every rank, in the order torch.distributed.pipelining runs them.

Rank r holds stages r, r + p, r + 2p, ... (chunk c of rank r is stage c·p + r). With p ranks, m micro-batches and v
stages a rank:

    GPipe            F(0) .. F(m-1), B(0) .. B(m-1)
    1F1B             min(m, p - r) forwards, then one backward and one forward in turn, then the backwards left
    Interleaved1F1B  groups of q micro-batches pass through a rank's v stages in turn, q = m / max(1, m // p);
                     min(v·m, (v-1)·q + 2·(p-1-r)) forwards, then forward and backward in turn, then the rest

Sources: Huang et al., "GPipe" (2019); Narayanan et al., "Memory-efficient pipeline-parallel DNN training" (1F1B, 2021)
and "Efficient large-scale language model training on GPU clusters using Megatron-LM" (interleaving, 2021). Held
against torch's own lists in tests/contracts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

FORWARD: Literal["F"] = "F"
BACKWARD: Literal["B"] = "B"
SCHEDULES = ("GPipe", "1F1B", "Interleaved1F1B")


class Action(NamedTuple):
    """One rank's work on one micro-batch in one stage: ``F`` forward or ``B`` backward."""

    kind: Literal["F", "B"]
    stage: int
    microbatch: int


Schedule = tuple[tuple[Action, ...], ...]


def validate_schedule(name: str, num_ranks: int, virtual_stages: int, num_microbatches: int) -> tuple[str, ...]:
    """Every rule of torch's schedule ``name`` that these numbers break, as sentences; empty if it can run."""
    if name not in SCHEDULES:
        return (f"schedule must be one of {', '.join(SCHEDULES)}, got {name!r}",)
    problems = [
        f"{label} must be at least 1, got {number}"
        for label, number in (
            ("number of pipeline ranks", num_ranks),
            ("virtual stages", virtual_stages),
            ("number of micro-batches", num_microbatches),
        )
        if number < 1
    ]
    if problems:
        return tuple(problems)
    if name != "Interleaved1F1B" and virtual_stages != 1:
        problems.append(f"{name} has one stage a rank, got {virtual_stages} virtual stages")
    if name == "Interleaved1F1B" and virtual_stages < 2:
        problems.append("Interleaved1F1B needs at least 2 virtual stages a rank, got 1")
    if name == "1F1B" and num_microbatches < num_ranks:
        problems.append(f"1F1B needs at least as many micro-batches as stages, got {num_microbatches} for {num_ranks}")
    if name == "Interleaved1F1B" and num_microbatches % max(1, num_microbatches // num_ranks):
        rounds = num_microbatches // num_ranks
        problems.append(
            f"Interleaved1F1B needs micro-batches that divide into {rounds} rounds "
            f"(micro-batches // ranks = {num_microbatches} // {num_ranks}), got {num_microbatches}"
        )
    return tuple(problems)


def build_schedule(name: str, num_ranks: int, virtual_stages: int, num_microbatches: int) -> Schedule:
    """The actions of every rank; ValueError with all rules that ``validate_schedule`` finds broken."""
    problems = validate_schedule(name, num_ranks, virtual_stages, num_microbatches)
    if problems:
        raise ValueError("; ".join(problems))
    ranks = range(num_ranks)
    if name == "GPipe":
        return tuple(_with_warmup(rank, num_microbatches, num_microbatches) for rank in ranks)
    if name == "1F1B":
        return tuple(_with_warmup(rank, num_microbatches, min(num_microbatches, num_ranks - rank)) for rank in ranks)
    return tuple(_interleaved(rank, num_ranks, virtual_stages, num_microbatches) for rank in ranks)


def peak_in_flight(actions_of_rank: Sequence[Action], activation_bytes_by_stage: Mapping[int, float]) -> float:
    """Largest sum of activations that a rank holds at once: from the forward of a micro-batch to its backward.

    ``activation_bytes_by_stage``: bytes one micro-batch keeps in a stage (or 1.0, to count micro-batches).
    """
    held = 0.0
    peak = 0.0
    for kind, stage, _ in actions_of_rank:
        if kind == FORWARD:
            held += activation_bytes_by_stage[stage]
            peak = max(peak, held)
        else:
            held -= activation_bytes_by_stage[stage]
    return peak


def _with_warmup(stage: int, num_microbatches: int, num_warmup: int) -> tuple[Action, ...]:
    actions = [Action(FORWARD, stage, microbatch) for microbatch in range(num_warmup)]
    for microbatch in range(num_microbatches):
        actions.append(Action(BACKWARD, stage, microbatch))
        if num_warmup + microbatch < num_microbatches:
            actions.append(Action(FORWARD, stage, num_warmup + microbatch))
    return tuple(actions)


def _interleaved(rank: int, num_ranks: int, virtual_stages: int, num_microbatches: int) -> tuple[Action, ...]:
    per_round = num_microbatches // max(1, num_microbatches // num_ranks)
    total = virtual_stages * num_microbatches
    num_warmup = min(total, (virtual_stages - 1) * per_round + 2 * (num_ranks - 1 - rank))

    def nth(kind: Literal["F", "B"], position: int) -> Action:
        one_round, within = divmod(position, per_round * virtual_stages)
        chunk, index = divmod(within, per_round)
        if kind == BACKWARD:
            chunk = virtual_stages - 1 - chunk
        return Action(kind, chunk * num_ranks + rank, one_round * per_round + index)

    actions = [nth(FORWARD, position) for position in range(num_warmup)]
    for position in range(total):
        if num_warmup + position < total:
            actions.append(nth(FORWARD, num_warmup + position))
        actions.append(nth(BACKWARD, position))
    return tuple(actions)
