"""The stages in order, from what a user asks to a Plan: the page to read first, and the Python API.

model -> graph -> placements of one block per degree -> cost table -> search -> plan
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace

from hardware_profiles.catalog import HardwareProfileError, default_profile_name
from hardware_profiles.mixed import cluster_for, grown
from hardware_profiles.schema import ClusterSpec
from planner.errors import HardwareError, InfeasibleError, InputError, PlanError, TimeLimitError
from planner.graph.experts import num_experts
from planner.graph.graph_cache import default_folder, traced_graph
from planner.graph.graph_file import read_graph
from planner.graph.model_graph import ModelGraph, OpClass
from planner.graph.node_operators import mixes_positions_outside_attention
from planner.graph.tracing import TraceRequest
from planner.model_file import ModelKind, resolve_model
from planner.parallelism import Offload, Optimizer, Placement, Precision, Preference
from planner.plan.schema import Plan, SearchSection
from planner.pricing.cost_table import CostTable
from planner.pricing.offloading import unpriced_offload
from planner.pricing.operator_time import PricingTarget
from planner.pricing.point import Point, Priced
from planner.pricing.table_builder import Sharding, ShardKey, build_table, shard_units
from planner.report.timeline import StepTimeline, step_timeline
from planner.solver import decode, existing
from planner.solver.base import StageSolver
from planner.solver.binding import binding_text
from planner.solver.cp_sat import CpSatSolver
from planner.solver.dynamic_program import DynamicProgramSolver
from planner.solver.preference import simplest, tie_share
from planner.solver.search import Outcome, Progress, search
from planner.space.columns import Columns
from planner.space.device_groups import over_groups
from planner.space.search_space import Choice, Limits, Pins, SearchSpace, Training, build_space, divisors

# A micro-batch of two is traced, so that the batch dim cannot be mistaken for a dim of size one.
TRACED_BATCH_SIZE = 2
# Tokens of a default global batch: GPT-3 (2020) used 3.2 M, Llama 3 started with 4 M.
DEFAULT_BATCH_TOKENS = 4 * 2**20
NO_PINS = Pins()
# How many times as many GPUs are tried when nothing fits.
MORE_DEVICES = (2, 4, 8, 16, 32, 64)


@dataclass(frozen=True)
class Request:
    """What a user asks for; None leaves a value to its default: the devices, to what ``hardware`` counts."""

    model: str
    num_devices: int | None
    hardware: str | None = None
    seq_len: int | None = None
    global_batch_size: int | None = None
    precision: Precision = Precision.BF16
    optimizer: Optimizer = Optimizer.ADAMW
    pins: Pins = NO_PINS
    time_limit_s: float | None = None
    num_runners_up: int = 5
    prefer: Preference = Preference.SIMPLE


@dataclass(frozen=True)
class Answer:
    """The plan and what was assumed on the way."""

    plan: Plan
    notes: tuple[str, ...]
    interrupted: bool


def find_plan(request: Request, progress: Progress | None = None) -> Answer:
    """The fastest plan that fits.

    InputError: the request is wrong or contradicts itself. InfeasibleError: nothing fits.
    TimeLimitError: nothing was found in time.
    """
    notes: list[str] = []
    cluster = load_cluster(request.hardware, request.num_devices, notes)
    check_precision(cluster, request.precision)
    check_offload(cluster, request.pins.offload)
    graph = load_graph(request.model, request.seq_len, request.precision)
    notes += graph.warnings
    training = training_of(request, cluster.num_devices, graph.seq_len, notes)
    problem = Problem.build(graph, cluster, training, request.pins)
    outcome = search(
        problem.table, problem.space.choices, problem.solver, time_limit_s=request.time_limit_s, progress=progress
    )
    if outcome.best is None:
        raise no_plan(problem, outcome)
    baseline = search(problem.table, problem.baseline_choices, problem.solver)
    outcome = problem.preferred(outcome, baseline, request.prefer)
    return Answer(problem.plan(outcome, baseline, request.num_runners_up), tuple(notes), outcome.interrupted)


@dataclass(frozen=True)
class Problem:
    """One search, ready to be solved."""

    target: PricingTarget
    space: SearchSpace
    baseline_choices: Columns[Choice]
    shardings: Mapping[ShardKey, Sharding]
    table: CostTable
    solver: StageSolver

    @staticmethod
    def build(
        graph: ModelGraph,
        cluster: ClusterSpec,
        training: Training,
        pins: Pins,
        fixed: Mapping[str, Placement] | None = None,
    ) -> Problem:
        """Places the operators for every degree, enumerates the space and prices it."""
        target = PricingTarget(graph, cluster, training.precision.value)
        shardings = shard_for_degrees(target, pins, fixed or {}, CpSatSolver())
        limits = limits_of(graph, cluster, shardings)
        space = build_space(training, pins, limits)
        baseline = baseline_space(training, limits)
        if cluster.mixed is not None:
            pipelines = over_groups(space.choices, cluster.mixed.groups)
            space = replace(space, choices=Columns.joined([space.choices, pipelines]))
        table = build_table(target, training, shardings, Columns.joined([space.choices, baseline]))
        return Problem(target, space, baseline, shardings, table, DynamicProgramSolver())

    def preferred(self, outcome: Outcome, baseline: Outcome, preference: Preference) -> Outcome:
        """``outcome`` with a simpler point as its best, where one is predicted alike; never slower than plain FSDP."""
        assert outcome.best is not None
        tie = tie_share(self.table.recipe)
        if preference is Preference.FASTEST or not outcome.is_exhausted or tie == 0:
            return outcome
        limit_s = outcome.best.step_time_s * (1 + tie)
        if baseline.best is not None:
            limit_s = min(limit_s, baseline.best.step_time_s)
        found = simplest(self.table, outcome, limit_s, self.solver)
        if found is None:
            return outcome
        others = [priced for priced in outcome.ranking if priced.choice != found.choice]
        return replace(
            outcome, best=found, ranking=tuple(sorted([*others, found], key=lambda priced: priced.step_time_s))
        )

    def plan(self, outcome: Outcome, baseline: Outcome, num_runners_up: int) -> Plan:
        """The plan of the best point, with the runners-up and the plain FSDP baseline beside it."""
        assert outcome.best is not None
        best = self.reprice(outcome.best)
        runners = [p for p in outcome.ranking if p.choice != best.choice][:num_runners_up]
        reference = self.closest_baseline(baseline)
        is_proved = outcome.is_exhausted and all(s.is_proved for kinds in self.shardings.values() for s in kinds)
        fastest = best if outcome.ranking[0].choice == best.choice else self.reprice(outcome.ranking[0])
        bound = min(best.step_time_s, fastest.step_time_s if is_proved else outcome.bound_s)
        band = self.table.recipe.error_band
        return self.describe(best).model_copy(
            update={
                "search": SearchSection(
                    status="OPTIMAL" if is_proved else "FEASIBLE",
                    bound_step_time_s=bound,
                    gap=(best.step_time_s - bound) / best.step_time_s,
                    num_candidates=outcome.num_candidates,
                    elapsed_s=outcome.elapsed_s,
                    error_between_layouts=None if band is None else band.between_layouts,
                    preferred_within=0.0 if fastest is best else tie_share(self.table.recipe),
                    baseline=None if reference is None else decode.candidate("plain FSDP", reference),
                    runners_up=tuple(decode.candidate(f"#{i + 2}", p) for i, p in enumerate(runners)),
                )
            }
        )

    def reprice(self, priced: Priced) -> Priced:
        """The same point with every micro-batch simulated."""
        return Point(self.table, priced.choice).price(priced.starts, exact=True)

    def closest_baseline(self, baseline: Outcome) -> Priced | None:
        """The best plain FSDP plan, or where none fits the one that lacks least memory."""
        if baseline.best is not None:
            return baseline.best
        return None if baseline.closest is None else Point(self.table, baseline.closest).price((0,))

    def describe(self, priced: Priced) -> Plan:
        """``priced`` as a Plan without a search section."""
        graph, table, choice = self.target.graph, self.table, priced.choice
        sharding = self.shardings[choice.mesh.tp, choice.sequence_parallel]
        return Plan(
            model=decode.model_section(graph),
            hardware=table.cluster.profile.name,
            num_devices=table.cluster.num_devices,
            training=decode.training_section(table),
            mesh=decode.mesh_section(choice),
            zero_stage=choice.zero_stage,
            pipeline=decode.pipeline_section(priced, graph, table),
            placements=decode.placement_section(choice, graph, sharding, table.units.kinds),
            recompute=decode.recompute_rules(choice, graph),
            offload=choice.offload,
            prediction=decode.prediction_section(priced, table, graph.num_params),
            warnings=decode.execution_warnings(choice, table, graph),
        )


def load_cluster(hardware: str | None, num_devices: int | None, notes: list[str]) -> ClusterSpec:
    """The cluster named by ``--hardware``; the default profile where none is named, said in ``notes``."""
    if num_devices is not None and num_devices < 1:
        raise InputError(f"the number of GPUs must be at least 1, got {num_devices}", hint="give --gpus N")
    try:
        cluster = cluster_for(num_devices, hardware)
    except HardwareProfileError as error:
        raise HardwareError(error.message, hint=error.hint) from error
    if hardware is None:
        notes.append(f"no --hardware given: planning for {default_profile_name()}")
    return cluster


def check_precision(cluster: ClusterSpec, precision: Precision) -> None:
    """HardwareError where the device has no arithmetic of that precision."""
    known = cluster.profile.device.peak_flops_per_s
    if precision.value not in known:
        raise HardwareError(
            f"{cluster.profile.device.name} has no {precision.value} arithmetic in its profile",
            hint=f"choose --precision from {', '.join(p.value for p in Precision if p.value in known)}",
        )


def check_offload(cluster: ClusterSpec, offload: Offload | None) -> None:
    """HardwareError where the profile does not say enough of its nodes to price offloading."""
    problem = unpriced_offload(cluster, offload or Offload.NONE)
    if problem is not None:
        raise HardwareError(
            f"--offload {offload}: {problem}",
            hint="use --offload none, or add the numbers to a profile of yours: planner profile -o profile.json",
        )


def load_graph(model: str, seq_len: int | None, precision: Precision) -> ModelGraph:
    """The graph of MODEL: read where it was traced before, from graph.json or the cache; traced otherwise."""
    source = resolve_model(model)
    if source.kind is ModelKind.GRAPH:
        assert source.path is not None
        graph = read_graph(source.path)
        if seq_len not in (None, graph.seq_len):
            raise InputError(
                f"{model} was traced with sequences of {graph.seq_len} tokens, not {seq_len}",
                hint=f"trace it again: planner trace MODEL --seq-len {seq_len} -o {model}",
            )
        return graph
    return traced_graph(TraceRequest(source, TRACED_BATCH_SIZE, seq_len, precision), default_folder())


def training_of(request: Request, num_devices: int, seq_len: int, notes: list[str]) -> Training:
    """The training as asked; the default global batch is said in ``notes``."""
    batch = request.global_batch_size
    if batch is None:
        # The smallest multiple of the number of devices with at least the default number of tokens.
        batch = -(-DEFAULT_BATCH_TOKENS // (seq_len * num_devices)) * num_devices
        notes.append(f"no --global-batch given: {batch} sequences of {seq_len} tokens ({batch * seq_len:,} tokens)")
    if batch < 1:
        raise InputError(f"the global batch must be at least 1 sequence, got {batch}", hint="give --global-batch B")
    return Training(batch, seq_len, request.precision, request.optimizer)


def shard_for_degrees(
    target: PricingTarget, pins: Pins, fixed: Mapping[str, Placement], solver: CpSatSolver
) -> dict[ShardKey, Sharding]:
    """Placements for every tensor-parallel degree of the space, with and without sequence parallelism."""
    cluster = target.cluster
    degrees = {1, *(d for d in divisors(cluster.num_devices) if d <= cluster.devices_per_node)}
    if pins.tp is not None and pins.tp >= 1:
        degrees = {1, pins.tp}
    found: dict[ShardKey, Sharding] = {}
    for degree in sorted(degrees):
        for sequence_parallel in (False, True) if degree > 1 else (False,):
            sharding = shard_units(target, (degree, sequence_parallel), fixed, solver.solve_placement)
            if sharding is not None:
                found[degree, sequence_parallel] = sharding
    return found


def limits_of(graph: ModelGraph, cluster: ClusterSpec, shardings: Mapping[ShardKey, Sharding]) -> Limits:
    """What this model on this cluster allows."""
    has_attention = any(node.op_class is OpClass.ATTENTION for node in graph.nodes)
    splitting = {key for key, sharding in shardings.items() if key[0] > 1 and any(s.splits_weights for s in sharding)}
    return Limits(
        num_devices=cluster.num_devices,
        devices_per_node=cluster.devices_per_node,
        num_pipeline_units=max(1, sum(unit.is_block for unit in graph.units)),
        tensor_degrees=frozenset(degree for degree, _ in splitting),
        sequence_degrees=frozenset(degree for degree, is_sequence in splitting if is_sequence),
        num_experts=num_experts(graph),
        context_splits=has_attention and not mixes_positions_outside_attention(graph),
    )


def baseline_space(training: Training, limits: Limits) -> Columns[Choice]:
    """Plain FSDP over all devices, whatever the user pinned; empty where the batch does not divide."""
    n = limits.num_devices
    if training.global_batch_size % n or n == 1:
        return Columns.of(Choice, ())
    pins = Pins(tp=1, pp=1, cp=1, ep=1, dp=n, dp_replicate=1, zero=3)
    return build_space(training, pins, limits).choices


def no_plan(problem: Problem, outcome: Outcome) -> InfeasibleError | TimeLimitError:
    """Why nothing was found, and the smallest change that would help."""
    if not outcome.is_exhausted:
        return TimeLimitError(
            f"no plan was found in time ({outcome.num_visited} of {outcome.num_candidates} layouts tried)",
            hint="raise --time-limit, or pin a choice such as --tp 8",
        )
    assert outcome.closest is not None
    point = Point(problem.table, outcome.closest)
    closest = point.price(point.even_starts())
    pinned = problem.space.pins.describe()
    space_text = f"{outcome.num_candidates} layouts{f' with {pinned}' if pinned else ''}"
    return InfeasibleError(binding_text(problem.table, closest, space_text), hint=smallest_change(problem))


def smallest_change(problem: Problem) -> str:
    """The first with which something fits: dropping one pin, dropping all, offloading, more GPUs."""
    target, training, pins = problem.target, problem.space.training, problem.space.pins
    for field in fields(pins):
        if getattr(pins, field.name) is None:
            continue
        freed = replace(pins, **{field.name: None})
        if something_fits(target.graph, target.cluster, training, freed):
            return f"drop --{field.name.replace('_', '-')}: without that pin a plan fits"
    if pins != NO_PINS and something_fits(target.graph, target.cluster, training, NO_PINS):
        return f"drop the pins {pins.describe()}: without all of them a plan fits"
    offloading = replace(pins, offload=Offload.CPU)
    if pins.offload in (None, Offload.NONE) and something_fits(target.graph, target.cluster, training, offloading):
        return "add --offload cpu: with optimiser states in host memory a plan fits, which planner run cannot train yet"
    for factor in MORE_DEVICES:
        num_devices = target.cluster.num_devices * factor
        batch = -(-max(training.global_batch_size, num_devices) // num_devices) * num_devices
        larger = replace(training, global_batch_size=batch)
        if something_fits(target.graph, grown(target.cluster, factor), larger, NO_PINS):
            devices = f"--gpus {num_devices}" if target.cluster.mixed is None else f"{factor} times as many of each"
            options = devices + (f" --global-batch {batch}" if batch != training.global_batch_size else "")
            return f"use {options}{' without pins' if pins != NO_PINS else ''}: on that many of these GPUs a plan fits"
    return "use devices with more memory, a shorter --seq-len, or --precision bf16"


def something_fits(graph: ModelGraph, cluster: ClusterSpec, training: Training, pins: Pins) -> bool:
    """Whether any point fits; stops at the first."""
    try:
        check_offload(cluster, pins.offload)
        problem = Problem.build(graph, cluster, training, pins)
    except (HardwareError, InputError):
        return False
    return search(problem.table, problem.space.choices, problem.solver, stop_at_first=True).best is not None


@dataclass(frozen=True)
class PlannedPoint:
    """An existing plan as the numbers of the search, and what was assumed on the way."""

    point: Point
    starts: tuple[int, ...]
    graph: ModelGraph
    notes: tuple[str, ...]


def point_of(plan: Plan, hardware: str | None, num_devices: int | None) -> PlannedPoint:
    """``plan`` on its own or on other hardware; PlanError where it cannot be priced."""
    notes: list[str] = []
    section = plan.training
    choice = existing.choice_of(plan, num_devices or plan.num_devices)
    cluster = load_cluster(hardware or plan.hardware, choice.mesh.world_size, notes)
    if choice.groups and not existing.lies_on(choice, cluster):
        notes.append(f"priced as if all devices were alike: {cluster.profile.name} has not the groups of the plan")
        choice = choice._replace(groups=())
    check_precision(cluster, section.precision)
    check_offload(cluster, choice.offload)
    graph = load_graph(plan.model.source, section.seq_len, section.precision)
    if graph.digest != plan.model.digest:
        notes.append(f"{plan.model.source} has changed since the plan was made: its digest differs")
    existing.check_priceable(plan, graph)
    training = Training(section.global_batch_size, section.seq_len, section.precision, section.optimizer)
    target = PricingTarget(graph, cluster, section.precision.value)
    key = (choice.mesh.tp, choice.sequence_parallel)
    sharding = shard_units(target, key, existing.parameter_placements(plan, graph), CpSatSolver().solve_placement)
    if sharding is None:
        raise PlanError(
            f"placements: those of this plan cannot run with tp={choice.mesh.tp} on {graph.source}",
            hint="search for a new plan: planner search MODEL -o plan.json",
        )
    table = build_table(target, training, {key: sharding}, (choice,))
    return PlannedPoint(Point(table, choice), existing.starts_of(plan, graph), graph, tuple(notes))


def price_plan(plan: Plan, hardware: str | None = None, num_devices: int | None = None) -> Answer:
    """Prices an existing plan again, on other hardware or with another data-parallel degree, without searching."""
    planned = point_of(plan, hardware, num_devices)
    table, notes = planned.point.table, planned.notes
    priced = planned.point.price(planned.starts, exact=True)
    if not priced.fits:
        worst = "fullest node" if priced.fits_devices else "worst GPU"
        notes += (f"this plan does not fit: its {worst} needs more memory than there is",)
    update = {
        "hardware": table.cluster.profile.name,
        "num_devices": table.cluster.num_devices,
        "mesh": decode.mesh_section(priced.choice),
        "pipeline": decode.pipeline_section(priced, planned.graph, table),
        "prediction": decode.prediction_section(priced, table, planned.graph.num_params),
        "search": None,
    }
    return Answer(plan.model_copy(update=update), notes, interrupted=False)


def schedule_plan(
    plan: Plan, hardware: str | None = None, num_devices: int | None = None
) -> tuple[StepTimeline, tuple[str, ...]]:
    """The predicted step of an existing plan, action by action, and what was assumed on the way.

    It ends when the predicted step time does.
    """
    planned = point_of(plan, hardware, num_devices)
    return step_timeline(planned.point, planned.starts), planned.notes
