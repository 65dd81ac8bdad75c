"""Pipeline schedules: the list of actions of every rank, in the order torch.distributed.pipelining runs them.

Rank r holds stages r, r + p, r + 2p, ... (chunk c of rank r is stage c·p + r); under the last two schedules it holds
two in the shape of a V (``v_schedule``). With p ranks, m micro-batches and v stages a rank:

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

from collections.abc import Mapping, Sequence

from costmodels.action import BACKWARD, FORWARD, INPUT_GRADIENT, WEIGHT_GRADIENT, Action, Kind, Schedule
from costmodels.v_schedule import dual_pipe_v, zero_bubble_v

TORCH_SCHEDULES = ("GPipe", "1F1B", "Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")
SCHEDULES = (*TORCH_SCHEDULES, "ZB-2P")
V_SCHEDULES = ("ZBVZeroBubble", "DualPipeV")
SPLIT_SCHEDULES = ("InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV", "ZB-2P")
_IN_ROUNDS = ("Interleaved1F1B", "InterleavedZeroBubble")
# Fewest and most stages a rank; None: any number.
_STAGES_A_RANK: Mapping[str, tuple[int, int | None]] = {
    "GPipe": (1, 1),
    "1F1B": (1, 1),
    "Interleaved1F1B": (2, None),
    "InterleavedZeroBubble": (1, None),
    "ZBVZeroBubble": (2, 2),
    "DualPipeV": (2, 2),
    "ZB-2P": (1, 1),
}


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
    fewest, most = _STAGES_A_RANK[name]
    if most is not None and virtual_stages != most:
        number = "one stage" if most == 1 else f"{most} stages"
        problems.append(f"{name} has {number} a rank, got {virtual_stages} virtual stages")
    elif virtual_stages < fewest:
        problems.append(f"{name} needs at least {fewest} virtual stages a rank, got {virtual_stages}")
    if name == "1F1B" and num_microbatches < num_ranks:
        problems.append(f"1F1B needs at least as many micro-batches as stages, got {num_microbatches} for {num_ranks}")
    if name == "DualPipeV" and num_microbatches < 2 * num_ranks:
        problems.append(
            f"DualPipeV needs at least as many micro-batches as stages, got {num_microbatches} for {2 * num_ranks}"
        )
    if name in _IN_ROUNDS and num_microbatches % max(1, num_microbatches // num_ranks):
        rounds = num_microbatches // num_ranks
        problems.append(
            f"{name} needs micro-batches that divide into {rounds} rounds "
            f"(micro-batches // ranks = {num_microbatches} // {num_ranks}), got {num_microbatches}"
        )
    return tuple(problems)


def build_schedule(name: str, num_ranks: int, virtual_stages: int, num_microbatches: int) -> Schedule:
    """The actions of every rank; ValueError with all rules that ``validate_schedule`` finds broken."""
    problems = validate_schedule(name, num_ranks, virtual_stages, num_microbatches)
    if problems:
        raise ValueError("; ".join(problems))
    p, m, shape = num_ranks, num_microbatches, (num_ranks, virtual_stages, num_microbatches)
    ranks = range(p)
    match name:
        case "GPipe":
            return tuple(_with_warmup(rank, m, m) for rank in ranks)
        case "1F1B":
            return tuple(_with_warmup(rank, m, min(m, p - rank)) for rank in ranks)
        case "Interleaved1F1B":
            return tuple(_interleaved(rank, shape, 2 * (p - 1 - rank), None) for rank in ranks)
        case "InterleavedZeroBubble":
            return tuple(_interleaved(rank, shape, p - 1 - rank, rank) for rank in ranks)
        case "ZB-2P":
            return tuple(_interleaved(rank, shape, 2 * (p - 1 - rank), 2 * rank) for rank in ranks)
        case "ZBVZeroBubble":
            return tuple(zero_bubble_v(rank, p, m) for rank in ranks)
        case _:
            return tuple(dual_pipe_v(rank, p, m) for rank in ranks)


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
        peak = max(peak, held)
    return peak


def _with_warmup(stage: int, num_microbatches: int, num_warmup: int) -> tuple[Action, ...]:
    actions = [Action(FORWARD, stage, microbatch) for microbatch in range(num_warmup)]
    for microbatch in range(num_microbatches):
        actions.append(Action(BACKWARD, stage, microbatch))
        if num_warmup + microbatch < num_microbatches:
            actions.append(Action(FORWARD, stage, num_warmup + microbatch))
    return tuple(actions)


def _interleaved(rank: int, shape: tuple[int, int, int], more_forwards: int, delay: int | None) -> tuple[Action, ...]:
    """Forwards ahead, then one forward and one backward in turn; ``shape`` is (ranks, stages a rank, micro-batches).

    ``more_forwards``: those ahead of what the other stages of the rank need. ``delay``: how many input gradients a
    weight gradient lets pass; None: backward passes are whole.
    """
    num_ranks, virtual_stages, num_microbatches = shape
    per_round = num_microbatches // max(1, num_microbatches // num_ranks)
    total = virtual_stages * num_microbatches
    num_warmup = min(total, (virtual_stages - 1) * per_round + more_forwards)

    def nth(kind: Kind, position: int) -> Action:
        one_round, within = divmod(position, per_round * virtual_stages)
        chunk, index = divmod(within, per_round)
        if kind != FORWARD:
            chunk = virtual_stages - 1 - chunk
        return Action(kind, chunk * num_ranks + rank, one_round * per_round + index)

    actions = [nth(FORWARD, position) for position in range(num_warmup)]
    for position in range(total):
        if num_warmup + position < total:
            actions.append(nth(FORWARD, num_warmup + position))
        actions.append(nth(BACKWARD if delay is None else INPUT_GRADIENT, position))
        if delay is not None and position >= delay:
            actions.append(nth(WEIGHT_GRADIENT, position - delay))
    if delay is not None:
        actions += [nth(WEIGHT_GRADIENT, position) for position in range(max(0, total - delay), total)]
    return tuple(actions)
