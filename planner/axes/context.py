"""Context parallelism: ranks share the positions of each sequence, and attention brings keys and values together.

Keys and values are gathered before attention, again in the backward pass, and their gradients are reduce-scattered.

Source: Dubey et al., "The Llama 3 Herd of Models" (2024), section 3.3.2, for gathering rather than passing around.
"""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar, NamedTuple

from costmodels.vocabulary.mesh import Group, Mesh
from costmodels.vocabulary.terms import Pass, Term
from costmodels.vocabulary.workload import CollectiveKind, GroupPlacement
from planner.axes.base import Asked, Axis, Executed, divisors, pinned_degrees, undivided
from planner.axes.framework import Framework
from planner.axes.lowered import Collective, Kernel, RankWork, Role
from planner.axes.placement import UnitPlacement
from planner.table.keys import WorkKey

MAX_CONTEXT_PARALLEL = 64


class ContextKey(NamedTuple):
    """The ranks of a context group, and how far apart they are."""

    cp: int
    tp: int


class ContextAxis(Axis[ContextKey]):
    """Its ranks hold the same parameters, so that gradients are reduced over them too."""

    name: ClassVar[str] = "cp"

    def degrees(self, asked: Asked, left: int) -> list[int]:
        """Degrees that divide the sequence, where attention alone mixes positions."""
        training, pins, limits = asked
        allowed = [
            d
            for d in divisors(left)
            if d == 1 or (limits.context_splits and training.seq_len % d == 0 and d <= MAX_CONTEXT_PARALLEL)
        ]
        return pinned_degrees(left, pins.cp, allowed)

    def violations(self, asked: Asked) -> list[str]:
        """Of the sequence and of the model."""
        training, pins, limits = asked
        found = undivided("cp", pins.cp, limits.num_devices)
        if pins.cp is None or pins.cp <= 1:
            return found
        if training.seq_len % pins.cp:
            found.append(f"cp={pins.cp} does not divide the sequence of {training.seq_len} tokens")
        if not limits.context_splits:
            found.append(
                "cp > 1 needs a model in which attention alone mixes positions; this one has other such operators"
            )
        return found

    def work_fields(self, key: WorkKey) -> ContextKey:
        """The degree, and what lies inside it."""
        return ContextKey(key.cp, key.tensor.tp)

    def work(self, work: RankWork, own: ContextKey, placement: UnitPlacement, framework: Framework) -> RankWork:
        """A rank's positions, and what attention gathers."""
        if own.cp == 1:
            return work
        group = Mesh(cp=own.cp, tp=own.tp).group(Group.CONTEXT)
        attention = [_gathered(kernel, group) for kernel in work.unit.kernels if kernel.keys_and_values]
        return replace(
            work,
            collectives=(*work.collectives, *(each for found in attention for each in found)),
            part_of_sequence=work.part_of_sequence / own.cp,
        )

    def unexecuted(self, run: Executed) -> list[str]:
        """Only planned for, as yet."""
        cp = run.layout.mesh.cp
        if cp == 1:
            return []
        return [f"planner run does not execute context parallelism yet (cp={cp}): pin --cp 1 to train with it"]


CONTEXT = ContextAxis()


def _gathered(kernel: Kernel, group: GroupPlacement) -> list[Collective]:
    found: list[Collective] = []
    for tensor in kernel.keys_and_values:
        forward = Collective(
            CollectiveKind.ALL_GATHER,
            group,
            Term.CONTEXT,
            Pass.FORWARD,
            Role.ATTENTION,
            of=(tensor,),
            times=group.num_ranks,  # what is gathered is as large as all ranks' positions
        )
        again = replace(forward, runs_in=Pass.BACKWARD)
        found += [forward, again, replace(again, kind=CollectiveKind.REDUCE_SCATTER)]
    return found
