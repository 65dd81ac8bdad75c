"""Tensor parallelism, with sequence parallelism: ranks share the operators of a block, as a placement decided.

Between blocks activations are whole on every rank, or split along the sequence (Korthikanti et al., "Reducing
Activation Recomputation in Large Transformer Models", 2022). ``planner.axes.placement`` has the ways to place a unit.
"""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

from costmodels.stragglers import expected_wait_s
from costmodels.vocabulary.choices import Shard
from costmodels.vocabulary.mesh import Group, Mesh
from costmodels.vocabulary.terms import Pass, Term
from costmodels.vocabulary.workload import CollectiveKind
from planner.axes.base import Asked, Axis, divisors, listed, pinned_degrees, undivided
from planner.axes.framework import Framework
from planner.axes.lowered import Collective, Hides, RankStates, RankUnit, RankWork, Role, State, StateKind, Tensor
from planner.axes.placement import UnitPlacement
from planner.table.keys import DataKey, TensorSplit, WorkKey


class TensorAxis(Axis[TensorSplit]):
    """Ranks of neighbouring devices, of one node."""

    name: ClassVar[str] = "tp"

    def degrees(self, asked: Asked, left: int) -> list[int]:
        """Degrees that split a parameter, within a node."""
        limits = asked.limits
        allowed = [d for d in divisors(left) if d == 1 or (d in limits.tensor_degrees and d <= limits.devices_per_node)]
        return pinned_degrees(left, asked.pins.tp, allowed)

    def violations(self, asked: Asked) -> list[str]:
        """Of the degree, and of sequence parallelism."""
        training, pins, limits = asked
        tp = pins.tp
        found = undivided("tp", tp, limits.num_devices)
        is_split = tp is not None and tp > 1
        if is_split and tp not in limits.tensor_degrees:
            allowed = listed(sorted(limits.tensor_degrees)) or "none of those there could be"
            found.append(f"tp={tp} splits no parameter of the model; degrees that do: {allowed}")
        if pins.sequence_parallel and tp == 1:
            found.append("sequence parallelism needs tp > 1")
        able = [d for d in sorted(limits.sequence_degrees) if training.seq_len % (d * max(1, pins.cp or 1)) == 0]
        if pins.sequence_parallel and is_split and tp not in able:
            found.append(
                f"tp={tp} cannot split activations along the sequence of {training.seq_len} tokens; "
                f"degrees that can: {listed(able) or 'none'}"
            )
        return found

    def work_fields(self, key: WorkKey) -> TensorSplit:
        """How operators are split."""
        return key.tensor

    def state_fields(self, key: DataKey) -> TensorSplit:
        """The same."""
        return key.tensor

    def work(self, work: RankWork, own: TensorSplit, placement: UnitPlacement, framework: Framework) -> RankWork:
        """Kernels, tensors and collectives as they were placed."""
        if own.tp == 1:
            return work
        recipe = framework.recipe
        collectives = (
            *placement.collectives,
            *_separate_reductions(work.unit, placement, framework),
        )
        rate, hidden = recipe.tensor_parallel_rate.value, recipe.tensor_overlap.value
        delay = recipe.collective_delay_s
        wait_s = 0.0 if delay is None else expected_wait_s(own.tp, delay.value)
        return replace(
            work,
            unit=_split(work.unit, placement, framework),
            collectives=(
                *work.collectives,
                *(replace(each, rate=rate, hidden_share=hidden, wait_s=wait_s) for each in collectives),
            ),
        )

    def states(self, states: RankStates, own: TensorSplit, placement: UnitPlacement) -> RankStates:
        """Parameters as they were placed under any of their names.

        Experts that are whole on a rank count as 1 / tp here, and the expert axis gives the rest back.
        """

        def is_split(state: State) -> bool:
            if own.etp is not None and state.kind is StateKind.EXPERT:
                return True
            return any(isinstance(placement.parameters.get(name), Shard) for name in state.names)

        return states.each(lambda state: 1 / own.tp if is_split(state) else 1.0)


TENSOR = TensorAxis()


def sequence_parallel_options(asked: Asked, mesh: Mesh) -> list[bool]:
    """Whether activations between blocks may be split along the sequence over tp ranks.

    They need not be, unless experts are whole: each rank then routes its own part of a sequence.
    """
    possible = [False] if mesh.etp is None else []
    if mesh.tp in asked.limits.sequence_degrees and asked.training.seq_len % (mesh.tp * mesh.cp) == 0:
        possible.append(True)
    return [flag for flag in possible if asked.pins.sequence_parallel in (None, flag)]


def _split(unit: RankUnit, placement: UnitPlacement, framework: Framework) -> RankUnit:
    degree, recipe = placement.split.tp, framework.recipe
    crosses_split = any(placement.placements.get(i) == Shard(1) for i in unit.boundary)
    # What was gathered for a product may be kept split, and gathered again in backward.
    keeps_parts = recipe.gathers_inputs_again and crosses_split

    def part(tensor: Tensor) -> Tensor:
        share = placement.local_share(tensor.id)
        is_gathered = keeps_parts and share == 1.0 and tensor.is_floating
        return tensor.times(share, 1 / degree if is_gathered else share)

    def sent(i: int, share: float) -> float:
        is_whole = placement.local_share(i) == 1.0
        return share / degree if is_whole and recipe.scatters_sends else share

    shares = placement.shares
    return replace(
        unit,
        kernels=tuple(k if shares.get(k.id, 1.0) == 1.0 else k.times(shares[k.id]) for k in unit.kernels),
        tensors={i: part(tensor) for i, tensor in unit.tensors.items()},
        boundary={i: sent(i, share) for i, share in unit.boundary.items()},
        is_split=True,
        gathered=tuple(i for i in unit.boundary if unit.tensors[i].follows_batch)
        if crosses_split and unit.is_block
        else (),
    )


def _separate_reductions(unit: RankUnit, placement: UnitPlacement, framework: Framework) -> tuple[Collective, ...]:
    """Gradients of a block's whole input that products reduce each for itself; the host's time does not count them."""
    separate = framework.recipe.separate_reductions
    whole = tuple(
        i
        for i in unit.boundary
        if unit.tensors[i].follows_batch and unit.tensors[i].is_floating and placement.local_share(i) == 1.0
    )
    if separate is None or not unit.is_block or not whole:
        return ()
    again = Collective(
        CollectiveKind.ALL_REDUCE,
        Mesh(tp=placement.split.tp).group(Group.TENSOR),
        Term.TENSOR,
        Pass.BACKWARD,
        Role.SEPARATE_REDUCTION,
        of=whole,
        of_whole=True,
        hides=Hides.KERNELS,
        repeats=separate.value,
    )
    return (again,)
