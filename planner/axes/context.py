"""Context parallelism: ranks share the positions of each sequence, and attention reaches those of other ranks.

With n ranks, S = bytes of a rank's keys and values together, and Q, O = bytes of its queries and of attention's output:

    all-gather    keys and values are gathered, n · S, before attention and again in backward, where their gradients
                  are reduce-scattered
    ring          n - 1 messages of S pass on keys and values, each behind attention on the block at hand. Backward
                  begins with the keys and values that came last and ends with a rank's own, so that gradients come home
                  behind its own block: n messages, S, n - 2 times 2 · S, S. What blocks give is added up
    all-to-all    queries, keys, values and the output change hands, Q + S + O: every rank attends over all positions
                  for 1 / n of the heads. The same backward

Attention's work is even: ranks hold positions of both ends of a causal sequence (zig-zag, as torch's and Megatron's
load balancing do), so each of n blocks is 1 / n of a rank's attention.

A message of a ring takes what a rank needs that sends and receives at once, which a profile may tell apart from a
message one way.

Sources: Dubey et al., "The Llama 3 Herd of Models" (2024), section 3.3.2, for gathering; Liu et al., "Ring Attention
with Blockwise Transformers" (2023), and for the order of its backward NVIDIA Transformer Engine's
``AttnFuncWithCPAndKVP2P``; Jacobs et al., "DeepSpeed Ulysses" (2023).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import ClassVar, NamedTuple

from costmodels.vocabulary.choices import ContextMethod
from costmodels.vocabulary.mesh import Group, Mesh
from costmodels.vocabulary.terms import Pass, Term
from costmodels.vocabulary.workload import CollectiveKind, GroupPlacement
from planner.axes.base import Asked, Axis, Executed, divisors, listed, pinned_degrees, undivided
from planner.axes.framework import Framework
from planner.axes.lowered import Collective, Hides, Kernel, RankWork, Role
from planner.axes.placement import UnitPlacement
from planner.graph.trainable import unshared_positions
from planner.layout.layout import Limits, Pins
from planner.table.keys import WorkKey

MAX_CONTEXT_PARALLEL = 64


class ContextKey(NamedTuple):
    """The ranks of a context group, how far apart they are, and how they share."""

    cp: int
    tp: int
    method: ContextMethod = ContextMethod.ALL_GATHER


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
        """Of the sequence, of the model and of the framework."""
        training, pins, limits = asked
        found = [*undivided("cp", pins.cp, limits.num_devices), *_method_violations(pins, limits)]
        if pins.cp is None or pins.cp <= 1:
            return found
        if training.seq_len % pins.cp:
            found.append(f"cp={pins.cp} does not divide the sequence of {training.seq_len} tokens")
        if not limits.context_splits:
            found.append(
                "cp > 1 needs a model in which attention mixes positions and nothing else does; this one has no "
                "attention, or other such operators"
            )
        return found

    def work_fields(self, key: WorkKey) -> ContextKey:
        """The degree, what lies inside it, and the method, which says nothing of one rank."""
        method = key.cp_method
        return ContextKey(key.cp, key.tensor.tp, ContextMethod.ALL_GATHER if key.cp == 1 else method)

    def work(self, work: RankWork, own: ContextKey, placement: UnitPlacement, framework: Framework) -> RankWork:
        """A rank's positions, and what attention sends."""
        if own.cp == 1:
            return work
        sent = {
            ContextMethod.ALL_GATHER: _gathered,
            ContextMethod.RING: _passed_on,
            ContextMethod.ALL_TO_ALL: _exchanged,
        }[own.method]
        group = Mesh(cp=own.cp, tp=own.tp).group(Group.CONTEXT)
        attention = [kernel for kernel in work.unit.kernels if kernel.keys_and_values]
        return replace(
            work,
            collectives=(*work.collectives, *(each for kernel in attention for each in sent(kernel, group))),
            part_of_sequence=work.part_of_sequence / own.cp,
            num_blocks=own.cp if own.method is ContextMethod.RING else 1,
        )

    def unexecuted(self, run: Executed) -> list[str]:
        """Models that read or mix positions in ways of their own, and sequences that do not make equal chunks."""
        cp, seq_len = run.layout.mesh.cp, run.graph.seq_len
        if cp == 1:
            return []
        problems = list(unshared_positions(run.graph, cp))
        if seq_len % (2 * cp):
            problems.append(f"each rank gets two equal chunks, but 2 * cp does not divide the {seq_len} tokens")
        return [
            f"planner run cannot share this model's sequences (cp={cp}): {problem}: pin --cp 1 to train with it"
            for problem in problems
        ]


CONTEXT = ContextAxis()


def methods(asked: Asked, tp: int, cp: int) -> list[ContextMethod]:
    """Ways for ``cp`` ranks to share a sequence; one rank has nothing to share, and takes what is pinned."""
    pin, limits = asked.pins.cp_method, asked.limits
    if cp == 1:
        return [pin or ContextMethod.ALL_GATHER]
    # Heads of keys are not copied, so all-to-all needs as many on every rank of tensor parallelism.
    possible = {each for each in limits.cp_methods if each is not ContextMethod.ALL_TO_ALL or _divides(tp * cp, limits)}
    return [each for each in ContextMethod if each in possible and pin in (None, each)]


def _divides(num_ranks: int, limits: Limits) -> bool:
    return limits.num_heads % num_ranks == 0


def _method_violations(pins: Pins, limits: Limits) -> list[str]:
    method, tp, cp = pins.cp_method, max(1, pins.tp or 1), max(1, pins.cp or 1)
    if method is None or cp == 1:
        return []
    if method not in limits.cp_methods:
        allowed = ", ".join(limits.cp_methods)
        return [f"cp_method={method} is not one that the framework has; allowed: {allowed}"]
    if method is ContextMethod.ALL_TO_ALL and not _divides(tp * cp, limits):
        return [
            f"cp_method={method} gives every rank some of the heads, but tp {tp} * cp {cp} does not divide the "
            f"{limits.num_heads} that heads of queries and of keys have in common; tp * cp may be "
            f"{listed(divisors(limits.num_heads))}"
        ]
    return []


def _gathered(kernel: Kernel, group: GroupPlacement) -> Iterator[Collective]:
    for tensor in kernel.keys_and_values:
        forward = Collective(
            CollectiveKind.ALL_GATHER,
            group,
            Term.CONTEXT,
            Pass.FORWARD,
            Role.ATTENTION,
            of=(tensor,),
            times=group.num_ranks,  # what is gathered is as large as all ranks' positions
            is_buffered=True,
        )
        again = replace(forward, runs_in=Pass.BACKWARD)
        yield from (forward, again, replace(again, kind=CollectiveKind.REDUCE_SCATTER))


def _passed_on(kernel: Kernel, group: GroupPlacement) -> Iterator[Collective]:
    forward = Collective(
        CollectiveKind.RING_SHIFT,
        group,
        Term.CONTEXT,
        Pass.FORWARD,
        Role.ATTENTION,
        of=kernel.keys_and_values,
        hides=Hides.BLOCKS,
        repeats=group.num_ranks - 1,
        behind=(kernel.id,),
        is_buffered=True,
    )
    # The gradients of a block's keys and values follow them from rank to rank. Both have a buffer to arrive in.
    first_keys, last_gradients = (replace(forward, runs_in=Pass.BACKWARD, repeats=1) for _ in range(2))
    both = replace(first_keys, times=2.0, repeats=group.num_ranks - 2, is_buffered=False)
    yield from (forward, first_keys, *([both] if both.repeats else []), last_gradients)


def _exchanged(kernel: Kernel, group: GroupPlacement) -> Iterator[Collective]:
    for tensor in (*kernel.inputs[:1], *kernel.keys_and_values, kernel.id):
        forward = Collective(
            CollectiveKind.ALL_TO_ALL,
            group,
            Term.CONTEXT,
            Pass.FORWARD,
            Role.ATTENTION,
            of=(tensor,),
            is_buffered=True,
        )
        yield from (forward, replace(forward, runs_in=Pass.BACKWARD))
