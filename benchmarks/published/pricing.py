"""A published run priced by the planner itself: its model built and traced, its layout pinned, its price simulated."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise
from math import inf

from benchmarks.published.frameworks import (
    attention_name_of,
    framework_name_of,
    kernel_words_of,
    overlap_of,
    recipe_called,
    recipe_name_of,
    with_dropout,
    with_norms,
)
from benchmarks.published.machines import cluster_of
from costmodels.communication import collective_time_s
from costmodels.recipe import AttentionKernel, Recipe, attention_kernel
from costmodels.vocabulary.choices import Optimizer, Precision
from costmodels.vocabulary.schedules import ScheduleName
from costmodels.vocabulary.workload import Collective, CollectiveKind, GroupPlacement
from hardware_profiles.calibrated import Factors
from hardware_profiles.schema import Calibration, ClusterProfile, ClusterSpec, DeviceProfile
from planner.evaluation.evaluator import Evaluated, Evaluator
from planner.evaluation.stage_program import stage_problem
from planner.formats.run_table import Architecture, Run, Software, UnpriceableRunError
from planner.formats.table_run import check_split, mesh_of, precision_of, schedule_of, shape_of
from planner.frameworks.as_run import effective_zero_stage, with_kernels, with_overlap
from planner.frameworks.kernels import dispatches_once_a_node
from planner.frameworks.registry import Where
from planner.graph.model_graph import ModelGraph
from planner.graph.tracer import trace_model, traced_dtype
from planner.layout.decided import NOTHING
from planner.layout.layout import Layout, Training
from planner.model_file import ModelKind, ModelSource, family_model
from planner.pricing.decisions import decided
from planner.pricing.placements import Decision
from planner.pricing.table_builder import build_table
from planner.pricing.target import PricingTarget
from planner.solver.cp_sat import CpSatSolver
from planner.solver.dynamic_program import DynamicProgramSolver
from planner.table.cost_table import CostTable
from planner.table.keys import TensorSplit
from planner.table.shared_vocabulary import VocabularySharing, with_shared_vocabulary

# As the planner traces: a batch of two cannot be mistaken for a dim of size one.
TRACED_BATCH_SIZE = 2
ACTIVATION_BYTES = 2  # of one element between blocks


@dataclass(frozen=True)
class Prediction:
    """What the planner says of one run."""

    priced: Evaluated
    cluster: ClusterSpec
    recipe_name: str = ""
    framework: str = ""


@dataclass(frozen=True)
class RunPricer:
    """Prices runs one after another; graphs and placements that runs share are made once.

    ``recipes``, ``kernels`` and ``devices`` stand in for the shipped ones of the same names. ``profiles`` and
    ``calibrations`` are of the rows of a cluster, by the name that the table gives it.
    """

    recipes: Mapping[str, Recipe] = field(default_factory=dict[str, Recipe])
    kernels: Mapping[str, AttentionKernel] = field(default_factory=dict[str, AttentionKernel])
    devices: Mapping[str, DeviceProfile] = field(default_factory=dict[str, DeviceProfile])
    profiles: Mapping[str, ClusterProfile] = field(default_factory=dict[str, ClusterProfile])
    calibrations: Mapping[str, Calibration] = field(default_factory=dict[str, Calibration])
    is_plain: bool = False  # clusters of studies have the plain profiles of their GPUs, too

    _graphs: dict[tuple[Architecture, str, float], ModelGraph] = field(
        default_factory=dict[tuple[Architecture, str, float], ModelGraph]
    )
    _decisions: dict[tuple[object, ...], Decision | None] = field(
        default_factory=dict[tuple[object, ...], "Decision | None"]
    )
    _solver: CpSatSolver = field(default_factory=CpSatSolver)

    def price(self, run: Run, factors: Factors | None = None) -> Prediction:
        """The prediction for ``run``; UnpriceableRunError says why there is none.

        ``factors`` of its cluster in place of those that its calibration has, and of the constant that this has.
        """
        cluster = self.cluster(run)
        layout = layout_of(run)
        precision = precision_of(run.precision)
        where = Where(cluster.profile.node.num_devices, cluster.profile.device.name, precision.value)
        words = kernel_words_of(run, where)
        recipe = with_norms(with_dropout(self.recipe(recipe_name_of(run)), run), run)
        recipe = with_kernels(recipe, words)
        recipe = with_overlap(recipe, overlap_of(run))
        name = attention_name_of(run, recipe)
        kernel = self.kernels.get(name) or attention_kernel(name)
        graph = self.graph(run, precision, recipe.dropout)
        target = PricingTarget(graph, cluster, precision.value, recipe, kernel, dispatches_once_a_node(words))
        split = TensorSplit(layout.mesh.tp, layout.sequence_parallel, layout.mesh.etp)
        decision = self._decision(target, run, split)
        target = self._calibrated(target, run, factors)
        training = Training(run.layout.global_batch_size, run.architecture.seq_len, precision, Optimizer.ADAMW)
        table = build_table(target, training, {split: decision}, (layout,))
        sharing = _sharing(run)
        if sharing is VocabularySharing.ENDS or layout.mesh.pp == 1:
            evaluator = Evaluator(table, layout)
            starts = _starts(evaluator, run.software)
        else:
            table, starts = _shared(table, run, layout, cluster)
            evaluator = Evaluator(table, layout)
        return Prediction(evaluator.evaluate(starts), cluster, recipe.name, framework_name_of(run))

    def _calibrated(self, target: PricingTarget, run: Run, factors: Factors | None) -> PricingTarget:
        calibration = self.calibrations.get(run.software.cluster) or target.cluster.profile.calibration
        if factors is not None:
            return target.scaled(factors)
        return target if calibration is None else target.scaled(calibration.values, calibration.constant_bytes)

    def recipe(self, name: str) -> Recipe:
        """The recipe called ``name``, as it stands here."""
        return self.recipes.get(name) or recipe_called(name)

    def cluster(self, run: Run) -> ClusterSpec:
        """The machine of ``run``, its device as it stands here."""
        own = self.profiles.get(run.software.cluster)
        if self.is_plain:
            run = replace(run, software=replace(run.software, cluster=""))
        cluster = cluster_of(run) if own is None else ClusterSpec(profile=own, num_devices=run.hardware.num_devices)
        device = self.devices.get(cluster.profile.device.name)
        if device is None:
            return cluster
        return cluster.model_copy(update={"profile": cluster.profile.model_copy(update={"device": device})})

    def graph(self, run: Run, precision: Precision, dropout: float) -> ModelGraph:
        """The traced graph of the run's model."""
        key = (run.architecture, precision.value, dropout)
        if key not in self._graphs:
            config = shape_of(run.architecture, dropout)
            loaded = family_model(ModelSource("published run", ModelKind.PRESET), config)
            self._graphs[key] = trace_model(loaded, TRACED_BATCH_SIZE, config.seq_len, traced_dtype(precision))
        return self._graphs[key]

    def _decision(self, target: PricingTarget, run: Run, split: TensorSplit) -> Decision:
        """Placements as Megatron splits blocks, whatever the links: those that are best inside a node."""
        profile = target.cluster.profile
        of_graph = run.architecture, target.recipe.dropout
        key = (*of_graph, target.recipe.name, target.precision, profile.device.name, split)
        if key not in self._decisions:
            inside = profile.tiers[0].model_copy(update={"num_devices": None})
            cluster = target.cluster.model_copy(update={"profile": profile.model_copy(update={"tiers": (inside,)})})
            self._decisions[key] = decided(
                replace(target, cluster=cluster), split, NOTHING, self._solver.solve_placement
            )
        decision = self._decisions[key]
        if decision is None:
            raise UnpriceableRunError(f"no placement of the operators for tp={split.tp}")
        return decision


def _starts(evaluator: Evaluator, software: Software) -> tuple[int, ...]:
    """First units of the stages: as the row tells them, else balanced by our own solver, else as the framework cuts."""
    blocks = [unit for unit, is_block in enumerate(evaluator.table.units.is_block) if is_block]
    stage_layers = _of_stages(software.stage_layers, evaluator.layout)
    if not stage_layers:
        cuts_by_weight = evaluator.table.framework.partition == "weighted"
        one_a_rank = evaluator.layout.virtual_stages == 1
        by_hand = software.partition == "balanced" and one_a_rank and not cuts_by_weight
        if not by_hand:
            return evaluator.starts()
        return next(DynamicProgramSolver().cuts(stage_problem(evaluator), lambda: inf)).starts
    if len(stage_layers) != evaluator.num_stages or sum(stage_layers) != len(blocks):
        raise UnpriceableRunError(
            f"stage_layers tell {sum(stage_layers)} blocks in {len(stage_layers)} stages, the run has {len(blocks)} in "
            f"{evaluator.num_stages}"
        )
    borders = [*blocks, blocks[-1] + 1]  # a last stage may have the head alone
    starts = (0, *(borders[before] for before in accumulate(stage_layers[:-1])))
    if any(one >= next_one for one, next_one in pairwise((*starts, len(evaluator.table.units.is_block)))):
        raise UnpriceableRunError(f"stage_layers {'-'.join(map(str, stage_layers))} leave a stage without work")
    return starts


def _of_stages(told: tuple[int, ...], layout: Layout) -> tuple[int, ...]:
    """Blocks of each stage: as told, or where as many are told as there are pipeline ranks, each rank's spread evenly.

    Where they do not divide, the first rank's first stages have one less, for they have the embedding, and of other
    ranks the last stages, of which one has the head: NeMo counts both as a block
    (account_for_embedding_in_pipeline_split and account_for_loss_in_pipeline_split).
    """
    pp, virtual = layout.mesh.pp, layout.virtual_stages
    if virtual == 1 or len(told) != pp:
        return told

    def of_stage(rank: int, place: int) -> int:
        least, more = divmod(told[rank], virtual)
        return least + (place >= virtual - more if rank == 0 else place < more)

    return tuple(of_stage(rank, place) for place in range(virtual) for rank in range(pp))


def _sharing(run: Run) -> VocabularySharing:
    try:
        return VocabularySharing(run.software.vocab_parallel or VocabularySharing.ENDS)
    except ValueError as error:
        known = ", ".join(VocabularySharing)
        raise UnpriceableRunError(f"vocab_parallel {run.software.vocab_parallel!r} is none of {known}") from error


def _shared(table: CostTable, run: Run, layout: Layout, cluster: ClusterSpec) -> tuple[CostTable, tuple[int, ...]]:
    """The table whose stages share the vocabulary's layers, and the first unit of each stage."""
    stages = layout.mesh.pp * layout.virtual_stages
    activations = layout.micro_batch_size * run.architecture.seq_len * run.architecture.hidden * ACTIVATION_BYTES
    ranks = GroupPlacement(layout.mesh.pp, cluster.num_devices // layout.mesh.pp)
    exchange_s = collective_time_s(Collective(CollectiveKind.ALL_REDUCE, activations, ranks), cluster)
    try:
        return with_shared_vocabulary(table, stages, _sharing(run), exchange_s)
    except ValueError as error:
        raise UnpriceableRunError(str(error)) from error


def layout_of(run: Run) -> Layout:
    """The layout of ``run``."""
    layout = run.layout
    check_split(run)
    if run.architecture.experts % layout.ep:
        raise UnpriceableRunError(f"ep {layout.ep} does not divide the {run.architecture.experts} experts")
    stages = layout.pp * layout.virtual_stages
    if stages > run.architecture.layers + 2:
        raise UnpriceableRunError(f"{stages} pipeline stages for {run.architecture.layers} layers")
    num_microbatches = layout.global_batch_size // (layout.dp * layout.micro_batch_size)
    schedule = schedule_of(layout.schedule if layout.pp > 1 else "none")
    problems = schedule.rules.violations(layout.pp, layout.virtual_stages, num_microbatches)
    if schedule is ScheduleName.ONE_F_ONE_B and 0 < num_microbatches < layout.pp:
        schedule, problems = ScheduleName.GPIPE, ()  # fewer micro-batches than stages: all forwards come first anyway
    if problems:
        raise UnpriceableRunError("; ".join(problems))
    return Layout(
        mesh=mesh_of(run),
        zero_stage=_zero_stage(run),
        micro_batch_size=layout.micro_batch_size,
        num_microbatches=num_microbatches,
        schedule=schedule,
        virtual_stages=layout.virtual_stages,
        recompute=layout.recompute,
        sequence_parallel=layout.sequence_parallel,
    )


def _zero_stage(run: Run) -> int:
    layout, recipe = run.layout, recipe_called(recipe_name_of(run))
    return effective_zero_stage(recipe, layout.zero_stage, num_ranks=layout.dp * layout.cp, pp=layout.pp)
