"""Expert parallelism: a rank holds 1 / ep of the experts of every layer, and rows travel to the rank of their expert.

    experts of a rank  = experts / ep, so its grouped products read 1 / ep of the weights
    rows of a rank     = tokens · top_k · imbalance: ep ranks send each other as much as one rank's tokens make
    all-to-all         = rows · width · bytes: dispatch and combine forward, and the gradients of both backward

``imbalance`` is the busiest rank's rows over the mean, the recipe's: all ranks wait for that one. Gradients of experts
are reduced over the dp · cp / ep ranks that hold the same ones.

Sources: Lepikhin et al., "GShard" (2021), for the two exchanges; Rajbhandari et al., "DeepSpeed-MoE" (2022), for
experts whose gradients are reduced over dp / ep ranks.
"""

from __future__ import annotations

from dataclasses import replace
from math import gcd
from typing import ClassVar, NamedTuple

from costmodels.vocabulary.choices import Precision
from costmodels.vocabulary.mesh import Group, Mesh
from costmodels.vocabulary.terms import Pass, Term
from costmodels.vocabulary.workload import CollectiveKind
from planner.axes.base import Asked, Axis, Executed, divisors, listed, pinned_degrees
from planner.axes.framework import Framework
from planner.axes.lowered import (
    Collective,
    ExpertRows,
    Hides,
    Kernel,
    RankStates,
    RankUnit,
    RankWork,
    Role,
    StateKind,
    Work,
)
from planner.axes.placement import UnitPlacement
from planner.table.keys import DataKey, WorkKey

EIGHT_BIT_SHARE = 0.5  # bytes of an 8-bit number over those of a 16-bit one


class ExpertKey(NamedTuple):
    """The ranks of an expert group, and how far apart they are."""

    ep: int
    tp: int


class ExpertAxis(Axis[ExpertKey]):
    """Expert groups lie inside the ranks of data and context parallelism, so the axis adds no ranks."""

    name: ClassVar[str] = "ep"

    def degrees(self, asked: Asked, left: int) -> list[int]:
        """Of the ``left`` ranks of sharded data and context parallelism, degrees that divide every layer's experts."""
        shared = gcd(left, asked.limits.num_experts)
        return pinned_degrees(shared, asked.pins.ep, divisors(shared))

    def violations(self, asked: Asked) -> list[str]:
        """It divides the experts, and the ranks in which it lies."""
        pins, limits = asked.pins, asked.limits
        if pins.ep in (None, 1):
            return []
        if limits.num_experts == 1:
            return [f"ep={pins.ep} needs layers of experts (grouped products), and the model has none"]
        found: list[str] = []
        if pins.ep < 1 or limits.num_experts % pins.ep:
            allowed = listed(divisors(limits.num_experts))
            found.append(f"ep={pins.ep} does not divide the {limits.num_experts} experts; allowed: {allowed}")
        ranks = limits.num_devices // max(1, (pins.tp or 1) * (pins.pp or 1))
        if pins.dp is not None and pins.cp is not None:
            ranks = pins.dp * pins.cp
        if pins.ep > 1 and ranks % pins.ep:
            found.append(
                f"ep={pins.ep} does not divide the {ranks} ranks of data and context parallelism, in which it lies"
            )
        return found

    def work_fields(self, key: WorkKey) -> ExpertKey:
        """The degree, and what lies inside it."""
        return ExpertKey(key.ep, key.tensor.tp)

    def state_fields(self, key: DataKey) -> ExpertKey:
        """The same."""
        return ExpertKey(key.ep, key.tensor.tp)

    def work(self, work: RankWork, own: ExpertKey, placement: UnitPlacement, framework: Framework) -> RankWork:
        """A rank's experts and their rows, and the exchanges."""
        experts = work.unit.experts
        if own.ep == 1 or experts is None:
            return work
        imbalance = framework.recipe.expert_imbalance
        rows = 1.0 if imbalance is None else imbalance.value
        copies = experts.rows_per_token * rows if framework.dispatches_once_a_node else None
        exchanges = tuple(_as_run(each, framework) for each in _exchanges(experts, own, copies))
        if framework.recipe.splits_exchanges and own.tp > 1:
            exchanges = _in_parts(exchanges, own, framework)
        unit = _on_one_rank(work.unit, experts, own.ep, rows)
        return replace(work, unit=unit, collectives=(*work.collectives, *exchanges))

    def states(self, states: RankStates, own: ExpertKey, placement: UnitPlacement) -> RankStates:
        """Trained experts are divided; frozen ones are not (they count as other frozen parameters)."""
        if own.ep == 1:
            return states
        return states.each(lambda state: 1 / own.ep if state.kind is StateKind.EXPERT else 1.0)

    def unexecuted(self, run: Executed) -> list[str]:
        """Only planned for, as yet."""
        ep = run.layout.mesh.ep
        if ep == 1:
            return []
        return [f"planner run does not execute expert parallelism yet (ep={ep}): pin --ep 1 to train with it"]


EXPERT = ExpertAxis()


def _exchanges(experts: ExpertRows, own: ExpertKey, copies: float | None) -> tuple[Collective, ...]:
    dispatch = Collective(
        CollectiveKind.ALL_TO_ALL,
        Mesh(ep=own.ep, tp=own.tp).group(Group.EXPERT),
        Term.EXPERT,
        Pass.FORWARD,
        Role.DISPATCH,
        of=experts.dispatched,
        is_buffered=True,
        copies=copies,
    )
    forward = dispatch, replace(dispatch, role=Role.COMBINE, of=experts.combined)
    return (*forward, *(replace(each, runs_in=Pass.BACKWARD) for each in forward))


def _in_parts(exchanges: tuple[Collective, ...], own: ExpertKey, framework: Framework) -> tuple[Collective, ...]:
    """Each tensor-parallel rank sends a part; experts take whole rows, and what leaves them are partial sums."""
    parts = tuple(replace(each, times=each.times / own.tp) for each in exchanges)
    gathered = (Role.DISPATCH, Pass.FORWARD), (Role.COMBINE, Pass.BACKWARD)
    among = Mesh(tp=own.tp).group(Group.TENSOR)
    rate = framework.recipe.tensor_parallel_rate.value

    def among_tensor_ranks(each: Collective) -> Collective:
        is_gathered = (each.role, each.runs_in) in gathered
        kind = CollectiveKind.ALL_GATHER if is_gathered else CollectiveKind.REDUCE_SCATTER
        return replace(each, kind=kind, group=among, rate=rate, copies=None, nodes=None, is_buffered=False)

    return (*parts, *map(among_tensor_ranks, exchanges))


def _as_run(exchange: Collective, framework: Framework) -> Collective:
    """Beside what it may run, to how many nodes, and in how many bits."""
    recipe = framework.recipe
    towards = (Role.DISPATCH, Pass.FORWARD), (Role.COMBINE, Pass.BACKWARD)  # what products take in, forward or backward
    is_eight_bit = recipe.eight_bit_dispatch and framework.precision == Precision.FP8
    return replace(
        exchange,
        hides=Hides.OTHER_MICRO_BATCH if recipe.hides_exchanges else Hides.NOTHING,
        nodes=None if recipe.nodes_per_token is None else recipe.nodes_per_token.value,
        times=EIGHT_BIT_SHARE if is_eight_bit and (exchange.role, exchange.runs_in) in towards else 1.0,
    )


def _on_one_rank(unit: RankUnit, experts: ExpertRows, ep: int, rows: float) -> RankUnit:
    """``unit`` with 1 / ep of its experts' weights and ``rows`` times their rows."""
    grown = experts.kernels.union(experts.dispatched)
    return replace(
        unit,
        kernels=tuple(_shared(k, ep, rows) if k.id in experts.kernels else k for k in unit.kernels),
        tensors=unit.tensors
        if rows == 1.0
        else {i: tensor.grown(rows) if i in grown else tensor for i, tensor in unit.tensors.items()},
    )


def _shared(kernel: Kernel, ep: int, rows: float) -> Kernel:
    def shared(work: Work) -> Work:
        return Work(work.flops * rows, work.moved_bytes * rows, work.weight_bytes / ep, work.launches)

    return replace(
        kernel,
        forward=shared(kernel.forward),
        backward=shared(kernel.backward),
        weight_gradient_flops=kernel.weight_gradient_flops * rows,
        norm_elements=kernel.norm_elements * rows,
        saved_extra_bytes=kernel.saved_extra_bytes * rows,
    )
