"""Schedules whose ranks hold two stages each in the shape of a V: rank r has stages r and 2p - 1 - r.

The last stage is back on the first rank, so a micro-batch turns round on the last rank without being sent. Backward
passes are split where that fills a bubble: I goes on to the stage before, W waits.

    ZBVZeroBubble   forwards down and up the V, then a pattern of F, I, W on each side, Ws of the end last: no bubble
                    where F, I and W take equally long, at the activations of 1F1B
    DualPipeV       forwards of one side beside backwards of the other, split only at both ends

Sources: Qi et al., "Pipeline parallelism with controllable memory" (2024); DeepSeek-AI, "DeepSeek-V3 technical report"
(2024), and its variant for half the ranks. Held against torch's own lists in tests/contracts. torch runs the forward
and the backward of a pair of DualPipeV one after the other, unless the user overlaps them.
"""

from __future__ import annotations

from collections import deque
from functools import lru_cache

from costmodels.vocabulary.action import BACKWARD, FORWARD, INPUT_GRADIENT, WEIGHT_GRADIENT, Action, Kind

Pattern = tuple[tuple[Kind, int], ...]  # actions on stages


class _Recorder:
    """Actions of one rank; each kind of action takes the micro-batches of a stage in order."""

    def __init__(self, rank: int, num_ranks: int) -> None:
        self.down, self.up = rank, 2 * num_ranks - 1 - rank  # the stage towards the turn and the one away from it
        self.actions: list[Action] = []
        self._done: dict[tuple[Kind, int], int] = {}
        self._waiting: deque[int] = deque()  # stages of input gradients whose weight gradient is still to come

    def done(self, kind: Kind, stage: int) -> int:
        """How many micro-batches have had ``kind`` on ``stage``; a whole backward counts as I and as W."""
        return self._done.get((kind, stage), 0)

    def add(self, kind: Kind, stage: int) -> None:
        """The next micro-batch of ``stage``."""
        first = (INPUT_GRADIENT if kind == BACKWARD else kind), stage
        number = self._done.get(first, 0)
        self.actions.append(Action(kind, stage, number))
        self._done[first] = number + 1
        if kind == BACKWARD:
            self._done[WEIGHT_GRADIENT, stage] = self.done(WEIGHT_GRADIENT, stage) + 1
        elif kind == INPUT_GRADIENT:
            self._waiting.append(stage)

    def repeat(self, times: int, pattern: Pattern) -> None:
        """The actions of ``pattern`` in order, so many times."""
        for _ in range(times):
            for kind, stage in pattern:
                self.add(kind, stage)

    def add_waiting(self) -> None:
        """The weight gradient that has waited longest, if there is one."""
        if self._waiting:
            self.add(WEIGHT_GRADIENT, self._waiting.popleft())


def zero_bubble_v(rank: int, num_ranks: int, num_microbatches: int) -> tuple[Action, ...]:
    """Actions of one rank under ZBVZeroBubble.

    The pattern is made for at least as many micro-batches as fill the pipeline; those that do not exist are left out.
    """
    if num_microbatches < 2 * num_ranks:
        filled = _filled_v(rank, num_ranks)
        return tuple(action for action in filled if action.microbatch < num_microbatches)
    return _zero_bubble_v(rank, num_ranks, num_microbatches)


@lru_cache(maxsize=512)
def _filled_v(rank: int, num_ranks: int) -> tuple[Action, ...]:
    return _zero_bubble_v(rank, num_ranks, 2 * num_ranks - 1)


def _zero_bubble_v(rank: int, num_ranks: int, filled: int) -> tuple[Action, ...]:
    """With so many micro-batches, 2 p - 1 at least."""
    recorder = _Recorder(rank, num_ranks)
    down, up, add, done = recorder.down, recorder.up, recorder.add, recorder.done
    behind = num_ranks - rank
    recorder.repeat(2 * behind - 1, ((FORWARD, down),))
    recorder.repeat(rank, ((FORWARD, up), (FORWARD, down)))
    whole_pass_up: Pattern = ((FORWARD, up), (INPUT_GRADIENT, up), (WEIGHT_GRADIENT, up))
    recorder.repeat(behind, whole_pass_up)
    while done(FORWARD, up) < filled:
        if done(FORWARD, down) < filled:
            add(FORWARD, down)
        recorder.repeat(1, ((INPUT_GRADIENT, down), (WEIGHT_GRADIENT, down), *whole_pass_up))
    recorder.repeat(rank, ((INPUT_GRADIENT, down), (INPUT_GRADIENT, up)))
    recorder.repeat(behind, ((INPUT_GRADIENT, down), (WEIGHT_GRADIENT, down)))
    for stage in (up, down):
        while done(WEIGHT_GRADIENT, stage) < filled:
            add(WEIGHT_GRADIENT, stage)
    # What the pattern runs beyond the last micro-batch does not exist either.
    return tuple(action for action in recorder.actions if action.microbatch < filled)


def held_by_zero_bubble_v(rank: int, num_ranks: int, num_microbatches: int) -> tuple[int, int]:
    """Micro-batches in flight in the two stages of a rank, down and up, when it holds most: at its (r + 1)th up."""
    return min(num_microbatches, 2 * num_ranks - 1 - rank), min(num_microbatches, rank + 1)


def dual_pipe_v(rank: int, num_ranks: int, num_microbatches: int) -> tuple[Action, ...]:
    """Actions of one rank under DualPipeV; the pairs it is named for stand one after the other."""
    recorder = _Recorder(rank, num_ranks)
    down, up, add = recorder.down, recorder.up, recorder.add
    behind = num_ranks - 1 - rank
    for _ in range(2 * behind):
        add(FORWARD, down)
    for _ in range(rank + 1):
        add(FORWARD, down)
        add(FORWARD, up)
    for _ in range(behind):
        add(INPUT_GRADIENT, up)
        recorder.add_waiting()
        add(FORWARD, up)
    for _ in range(num_microbatches - 2 * num_ranks + rank + 1):
        add(FORWARD, down)
        add(BACKWARD, up)
        add(FORWARD, up)
        add(BACKWARD, down)
    for _ in range(behind):
        add(BACKWARD, up)
        add(FORWARD, up)
        add(BACKWARD, down)
    # Of the last 2 (rank + 1) backwards, alternating up and down, the second half is split.
    for position in range(2 * (rank + 1)):
        add(_late_kind(position, rank), down if position % 2 else up)
    for _ in range(behind):
        recorder.add_waiting()
        add(_late_kind(2 * (rank + 1), rank), down)
    for _ in range(rank + 1):
        recorder.add_waiting()
    return tuple(recorder.actions)


def held_by_dual_pipe_v(rank: int, num_ranks: int, num_microbatches: int) -> tuple[int, int]:
    """As ``held_by_zero_bubble_v``: with the first forward of the pairs, which 2 p micro-batches or more reach."""
    return 2 * num_ranks - rank, rank + 1


def _late_kind(position: int, rank: int) -> Kind:
    return INPUT_GRADIENT if position > rank else BACKWARD
