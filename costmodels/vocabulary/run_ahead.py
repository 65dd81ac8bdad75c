"""Schedules in which every rank runs so many forward passes ahead, and then forward and backward passes in turn.

All but those in the shape of a V: they differ in how far a rank runs ahead, and in whether backward passes are split.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from costmodels.vocabulary.action import (
    BACKWARD,
    FORWARD,
    INPUT_GRADIENT,
    KINDS,
    WEIGHT_GRADIENT,
    ActionColumns,
    Kind,
    Positions,
)


class Ahead(NamedTuple):
    """How far a rank runs ahead."""

    forwards: int  # before its first backward, besides those that the other stages of the rank need, and one
    delay: int | None  # input gradients that a weight gradient lets pass; None: backward passes are whole


def run_ahead(shape: tuple[int, int, int], ahead: Sequence[Ahead]) -> ActionColumns:
    """The actions of all ranks; ``shape`` is (ranks, stages a rank, micro-batches), ``ahead`` of each rank.

    Forwards ahead, then in turn k a forward, gradient k and, once as many gradients as its delay have passed, a weight
    gradient. What is left of one kind goes on without the others. Passes go through the stages of a rank in rounds,
    forwards from its lowest stage on and gradients from its highest.
    """
    num_ranks, virtual_stages, num_microbatches = shape
    per_round, total = num_microbatches // max(1, num_microbatches // num_ranks), virtual_stages * num_microbatches
    forwards = np.array([each.forwards for each in ahead])
    warmup = np.minimum(total, (virtual_stages - 1) * per_round + forwards)[:, None]
    is_split = ahead[0].delay is not None
    behind = np.minimum(total, [total if each.delay is None else each.delay for each in ahead])[:, None]
    number, left = np.arange(total), total - warmup  # forwards that are left after the warm-up

    def begins(turn: Positions) -> Positions:
        """Place of each turn on its rank."""
        return warmup + turn + np.minimum(turn, left) + np.maximum(0, turn - behind)

    each_kind: dict[Kind, Positions] = {
        FORWARD: np.where(number < warmup, number, begins(number - warmup)),
        INPUT_GRADIENT if is_split else BACKWARD: begins(number) + (number < left),
    }
    if is_split:
        turn = number + behind
        each_kind[WEIGHT_GRADIENT] = np.where(turn < total, begins(turn) + (turn < left) + 1, 2 * total + number)
    one_round, within = np.divmod(number, per_round * virtual_stages)
    chunk, index = np.divmod(within, per_round)
    ranks, num_actions = np.arange(num_ranks)[:, None], len(each_kind) * total
    kind, stage, microbatch = np.empty((3, num_ranks, num_actions), dtype=np.intp)
    for each, place in each_kind.items():
        kind[ranks, place] = KINDS.index(each)
        stage[ranks, place] = (chunk if each == FORWARD else virtual_stages - 1 - chunk) * num_ranks + ranks
        microbatch[ranks, place] = one_round * per_round + index
    ends = tuple(range(num_actions, num_ranks * num_actions + 1, num_actions))
    return ActionColumns(kind.ravel(), stage.ravel(), microbatch.ravel(), ends)
