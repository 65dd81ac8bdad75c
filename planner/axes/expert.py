"""Expert parallelism: a rank holds 1 / ep of the experts of every layer, and rows travel to the rank of their expert.

    experts of a rank  = experts / ep, so its grouped products read 1 / ep of the weights; of one expert alone they are
                         plain products, as fast as others
    rows of a rank     = tokens · top_k · imbalance: ep ranks send each other as much as one rank's tokens make
    all-to-all         = rows · width · bytes: dispatch and combine forward, and the gradients of both backward

Experts may have a tensor-parallel degree of their own, ``etp`` 1: they are whole on a rank, each of the tp ranks routes
its own part of a sequence, and ``ep`` lies over dp_shard * cp * tp (Liu et al., "MoE Parallel Folding", 2025; Megatron
Core's --expert-tensor-parallel-size). ``axes/whole_experts.py`` places the operators of such a layer.

``imbalance`` is the busiest rank's rows over the mean, the recipe's: all ranks wait for that one. Gradients of experts
are reduced over the dp · cp / ep ranks (with ``etp`` 1: dp · cp · tp / ep) that hold the same ones.

Sources: Lepikhin et al., "GShard" (2021), for the two exchanges; Rajbhandari et al., "DeepSpeed-MoE" (2022), for
experts whose gradients are reduced over dp / ep ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from math import gcd
from typing import ClassVar, NamedTuple

from costmodels.vocabulary.choices import Precision
from costmodels.vocabulary.mesh import Group, Mesh, even_dim
from costmodels.vocabulary.terms import Pass, Term
from costmodels.vocabulary.workload import CollectiveKind, OpClass
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
from planner.graph.experts import expert_parameters, used_otherwise
from planner.table.keys import DataKey, WorkKey

EIGHT_BIT_SHARE = 0.5  # bytes of an 8-bit number over those of a 16-bit one


class ExpertKey(NamedTuple):
    """The ranks of an expert group, and how far apart they are."""

    ep: int
    tp: int
    etp: int | None = None

    @property
    def mesh(self) -> Mesh:
        """Degrees with the same group of experts."""
        return Mesh(tp=self.tp, ep=self.ep, etp=self.etp)


class ExpertAxis(Axis[ExpertKey]):
    """Expert groups lie inside the ranks of data and context parallelism, or of tensor parallelism besides."""

    name: ClassVar[str] = "ep"

    def degrees(self, asked: Asked, left: int) -> list[int]:
        """Of the ``left`` ranks in which expert groups lie, degrees that divide every layer's experts."""
        shared = gcd(left, asked.limits.num_experts)
        return pinned_degrees(shared, asked.pins.ep, divisors(shared))

    def violations(self, asked: Asked) -> list[str]:
        """It divides the experts, and the ranks in which it lies."""
        pins, limits = asked.pins, asked.limits
        if pins.ep in (None, 1):
            return _own_degree_violations(asked)
        counts = limits.expert_counts or (limits.num_experts,)
        if counts == (1,):
            return [f"ep={pins.ep} needs layers of experts (grouped products), and the model has none"]
        found = _own_degree_violations(asked)
        if pins.ep < 1 or limits.num_experts % pins.ep:
            allowed, of_layers = listed(divisors(limits.num_experts)), " and the ".join(map(str, counts))
            of_layers += " experts" if len(counts) == 1 else " experts of the model's layers"
            found.append(f"ep={pins.ep} does not divide the {of_layers}; allowed: {allowed}")
        tp, may_be_whole = pins.tp or 1, pins.etp != pins.tp and bool(limits.whole_expert_degrees)
        ranks = limits.num_devices // max(1, tp * (pins.pp or 1))
        if pins.dp is not None and pins.cp is not None:
            ranks = pins.dp * pins.cp
        kinds = "data, context and tensor parallelism" if may_be_whole else "data and context parallelism"
        ranks *= tp if may_be_whole else 1
        if pins.ep > 1 and ranks % pins.ep:
            found.append(f"ep={pins.ep} does not divide the {ranks} ranks of {kinds}, in which it lies")
        return found

    def work_fields(self, key: WorkKey) -> ExpertKey:
        """The degree, and what lies inside it."""
        return ExpertKey(key.ep, key.tensor.tp, key.tensor.etp)

    def state_fields(self, key: DataKey) -> ExpertKey:
        """The same."""
        return ExpertKey(key.ep, key.tensor.tp, key.tensor.etp)

    def work(self, work: RankWork, own: ExpertKey, placement: UnitPlacement, framework: Framework) -> RankWork:
        """A rank's experts and their rows, and the exchanges."""
        experts = work.unit.experts
        if own.ep == 1 or experts is None:
            return work
        imbalance = framework.recipe.expert_imbalance
        rows = 1.0 if imbalance is None else imbalance.value
        copies = experts.rows_per_token * rows if framework.dispatches_once_a_node else None
        exchanges = tuple(_as_run(each, framework) for each in _exchanges(experts, own, copies))
        if framework.recipe.splits_exchanges and own.mesh.expert_tp > 1:
            exchanges = _in_parts(exchanges, own, framework)
        unit = _on_one_rank(work.unit, experts, own.mesh, rows)
        return replace(work, unit=unit, collectives=(*work.collectives, *exchanges))

    def states(self, states: RankStates, own: ExpertKey, placement: UnitPlacement) -> RankStates:
        """Trained experts are divided; frozen ones are not (they count as other frozen parameters)."""
        if own.ep == 1:
            return states
        parts = own.mesh.expert_parts
        return states.each(lambda state: 1 / parts if state.kind is StateKind.EXPERT else 1.0)

    def unexecuted(self, run: Executed) -> list[str]:
        """Experts that are whole beside tensor parallelism, and parameters of experts that cannot be divided."""
        mesh = run.layout.mesh
        if mesh.ep == 1:
            return []
        problems = [f"{fqn} is used in {op} too" for fqn, op in used_otherwise(run.graph).items()]
        num_parts = mesh.tp * (mesh.num_expert_ranks // mesh.ep if run.layout.zero_stage else 1)
        for fqn in expert_parameters(run.graph):
            parameter = run.graph.parameter_of[fqn]
            experts, *sizes = parameter.shape
            if parameter.aliases:
                problems.append(f"{fqn} is tied to another parameter")
            if even_dim((experts // mesh.ep, *sizes), num_parts) is None:
                problems.append(f"{fqn} has no dim that {num_parts} ranks of the same experts divide")
        found = [
            f"planner run cannot divide this model's experts (ep={mesh.ep}): {problem}: pin --ep 1 to train with it"
            for problem in problems[:1]
        ]
        if mesh.etp is not None:
            found.append(
                f"planner run does not execute experts that are whole beside tensor parallelism yet (etp={mesh.etp}): "
                f"pin --etp {mesh.tp} to train with it"
            )
        return found


EXPERT = ExpertAxis()


def expert_degrees(asked: Asked, mesh: Mesh) -> Iterator[Mesh]:
    """``mesh`` with every expert-parallel degree, and with experts whole on a rank where they may be."""
    if asked.pins.etp in (None, mesh.tp):
        for ep in EXPERT.degrees(asked, mesh.num_expert_ranks):
            yield mesh if ep == mesh.ep else replace(mesh, ep=ep)
    if mesh.tp in asked.limits.whole_expert_degrees and asked.pins.etp in (None, 1):
        whole = replace(mesh, etp=1)
        for ep in EXPERT.degrees(asked, whole.num_expert_ranks):
            if ep > 1:
                yield replace(whole, ep=ep)


def _own_degree_violations(asked: Asked) -> list[str]:
    """Of the tensor-parallel degree of experts."""
    pins, limits = asked.pins, asked.limits
    if pins.etp is None or pins.etp == pins.tp:
        return []
    found: list[str] = []
    if pins.etp < 1:
        found.append(f"etp={pins.etp} must be 1 or the degree of tensor parallelism")
    elif pins.etp != 1 and pins.tp is not None:
        found.append(f"etp={pins.etp} must be 1 or tp={pins.tp}")
    elif pins.tp is not None and pins.tp not in limits.whole_expert_degrees:
        found.append(f"etp={pins.etp} beside tp={pins.tp} needs layers of experts, and activations split over tp")
    elif pins.tp is not None and pins.ep == 1:
        found.append(f"etp=1 beside tp={pins.tp} needs ep > 1, or every rank would hold all experts")
    elif pins.tp is not None and pins.sequence_parallel is False:
        found.append(f"etp=1 beside tp={pins.tp} needs sequence parallelism: each rank routes its own tokens")
    return found


def _exchanges(experts: ExpertRows, own: ExpertKey, copies: float | None) -> tuple[Collective, ...]:
    dispatch = Collective(
        CollectiveKind.ALL_TO_ALL,
        own.mesh.group(Group.EXPERT),
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


def _on_one_rank(unit: RankUnit, experts: ExpertRows, mesh: Mesh, rows: float) -> RankUnit:
    """``unit`` with the rank's part of its experts' weights and ``rows`` times their rows."""
    grown = experts.kernels.union(experts.dispatched)
    has_one = experts.most_experts == mesh.ep

    def on_rank(kernel: Kernel) -> Kernel:
        shared = _shared(kernel, mesh.expert_parts, rows)
        is_grouped = kernel.op_class is OpClass.GROUPED_GEMM
        return replace(shared, op_class=OpClass.GEMM) if is_grouped and has_one else shared

    return replace(
        unit,
        kernels=tuple(on_rank(k) if k.id in experts.kernels else k for k in unit.kernels),
        tensors=unit.tensors
        if rows == 1.0
        else {i: tensor.grown(rows) if i in grown else tensor for i, tensor in unit.tensors.items()},
    )


def _shared(kernel: Kernel, parts: float, rows: float) -> Kernel:
    def shared(work: Work) -> Work:
        return Work(work.flops * rows, work.moved_bytes * rows, work.weight_bytes / parts, work.launches)

    return replace(
        kernel,
        forward=shared(kernel.forward),
        backward=shared(kernel.backward),
        weight_gradient_flops=kernel.weight_gradient_flops * rows,
        norm_elements=kernel.norm_elements * rows,
        saved_extra_bytes=kernel.saved_extra_bytes * rows,
    )
