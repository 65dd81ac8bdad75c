"""What a user asks for, and what the words of it stand for: a cluster, a graph, a training."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from math import inf

from costmodels.bands import with_bands
from costmodels.calibrated import recipe_on
from costmodels.compute import UNALIGNED_DTYPES
from costmodels.memory_band import DEFAULT_RISK, MOST_RISK
from costmodels.recipe import Recipe, attention_kernel
from costmodels.vocabulary.bounds import (
    MOST_DEVICES,
    MOST_ITEMS,
    MOST_SEQ_LEN,
    MOST_SEQUENCES,
    MOST_STAGES_A_RANK,
    MOST_TOKENS,
)
from costmodels.vocabulary.choices import Offload, Optimizer, Precision, Preference
from costmodels.vocabulary.software import TENSOR_OVERLAP, named
from hardware_profiles.catalog import HardwareProfileError, default_profile_name
from hardware_profiles.mixed import Hardware, cluster_for
from hardware_profiles.sanity import doubts
from hardware_profiles.schema import ClusterSpec
from planner.errors import HardwareError, InputError, ModelError, PlanError, UntrustedModelError
from planner.frameworks.as_run import effective_zero_stage, with_kernels, with_overlap
from planner.frameworks.kernels import KERNEL_WORDS, attention_name_for, dispatches_once_a_node
from planner.frameworks.registry import OUR_FRAMEWORK, Where, framework_of, kernels_of, recipe_for, year_of
from planner.graph.alignment import alignment_warnings
from planner.graph.graph_cache import (
    Known,
    default_folder,
    held_graph,
    known_graph,
    known_held_graph,
    traced_graph,
)
from planner.graph.graph_file import read_graph
from planner.graph.model_graph import ModelGraph
from planner.graph.tracing import TraceRequest
from planner.graph.trainable import check_positions
from planner.layout.layout import NO_PINS, Pins, Training
from planner.model_file import (
    HELD,
    SEARCH_AGAIN,
    LoadedModel,
    ModelKind,
    ModelSource,
    PlannedModel,
    check_num_params,
    family_config_of,
    planned_source,
    resolve_model,
)
from planner.pricing.facts import unpriced_offload
from planner.pricing.target import PricingTarget

# Samples of a default global batch of models without sequences: Dosovitskiy et al. 2021 (ViT), section 4.1 (4,096).
BATCH_SAMPLES = 4096
BATCH_BITS = 4  # of a device's share of a default batch, which is at most a sixteenth more or less than asked for
# A micro-batch of two is traced, so that the batch dim cannot be mistaken for a dim of size one.
TRACED_BATCH_SIZE = 2
DEFAULT_FRAMEWORK = OUR_FRAMEWORK
# Tokens of a default global batch, for models up to so many parameters: what was trained with. Brown et al. 2020
# (GPT-3), table 2.1: 0.5 M up to 0.8 B, 1 M for 1.3 and 2.7 B, 2 M for 6.7 and 13 B, 3.2 M for 175 B; Touvron et al.
# 2023 (Llama 2): 4 M for 34 and 70 B; Grattafiori et al. 2024 (Llama 3), section 3.4.1: up to 16 M for 405 B. Larger
# batches train less per token (McCandlish et al. 2018, "An Empirical Model of Large-Batch Training").
BATCH_TOKENS = ((1e9, 2**19), (4e9, 2**20), (2e10, 2**21), (2e11, 2**22), (inf, 2**24))


@dataclass(frozen=True)
class Request:
    """What a user asks for; None leaves a value to its default: the devices, to what ``hardware`` counts."""

    model: str
    num_devices: int | None
    hardware: Hardware | None = None
    seq_len: int | None = None
    global_batch_size: int | None = None
    precision: Precision = Precision.BF16
    optimizer: Optimizer = Optimizer.ADAMW
    pins: Pins = NO_PINS
    time_limit_s: float | None = None  # from the call on
    num_runners_up: int | None = None  # None: up to five of those that the search comes by
    prefer: Preference = Preference.SIMPLE
    framework: str = DEFAULT_FRAMEWORK  # within whose rules is searched, and whose recipe prices
    memory_risk: float = DEFAULT_RISK  # that the plan does not fit after all
    may_idle: bool = True  # devices, where fewer are faster or all of them cannot share the work
    shares_over_all: bool = False  # that all devices cannot share the work is an error, though some may idle
    robust: bool = False  # choose by the worst of a few cases in place of the nominal one
    num_tokens: int | None = None  # of the whole training run, for what it takes
    held: LoadedModel | None = None  # where ``model`` names a module that is held in Python
    planned: PlannedModel | None = None  # where ``model`` is that of a plan: its code is run as the plan records it


@dataclass(frozen=True)
class Software:
    """What ran a measured run, in the words of a table of runs (docs/calibrate.md); blank where it is not said."""

    framework: str
    version: str = ""
    kernels: tuple[str, ...] = ()
    overlap: tuple[tuple[str, bool], ...] = ()
    uses_flash: bool | None = None

    @staticmethod
    def named(text: str) -> Software:
        """``torchtitan``, ``megatron-lm@2022``, ``accelerate+compile``.

        InputError where the version says no year, a kernel is unknown, or an option is another framework's.
        """
        name, version, kernels = named(text)
        framework = framework_of(name)  # as it was written, which lower case would not be
        if version and year_of(version) is None:
            raise InputError(
                f"the version {version!r} of {name} says no year, by which recipes are chosen",
                hint=f"give one that does: {name}@2022, {name}@24.07",
            )
        known = (*KERNEL_WORDS, TENSOR_OVERLAP)
        unknown = [word for word in kernels if word not in known]
        if unknown:
            raise InputError(f"no kernel {unknown[0]!r} is known", hint=f"known are {', '.join(known)}")
        asked = TENSOR_OVERLAP in kernels
        if asked and not framework.rare_overlaps:
            raise InputError(
                f"{TENSOR_OVERLAP} is an option of Megatron-LM, and not of {name}", hint=f"leave out +{TENSOR_OVERLAP}"
            )
        overlap = tuple((option, True) for option in framework.overlap_options) if asked else ()
        return Software(name.lower(), version, kernels, overlap)

    @property
    def recipe(self) -> Recipe:
        """The recipe of the framework's generation, with the overlaps that were chosen."""
        return self.recipe_with(())

    def recipe_with(self, kernels: Collection[str]) -> Recipe:
        """The same with what ``kernels`` say of it; overlaps that were chosen come before those."""
        told = dict(self.overlap)
        found = recipe_for(self.framework, self.version, self.kernels, told)
        return with_overlap(with_kernels(found, kernels), framework_of(self.framework).overlap_of(told))

    def zero_stage(self, zero_stage: int, *, num_ranks: int, pp: int) -> int:
        """What a ZeRO stage amounts to in that framework."""
        return effective_zero_stage(self.recipe, zero_stage, num_ranks=num_ranks, pp=pp)


def load_cluster(hardware: Hardware | None, num_devices: int | None, notes: list[str]) -> ClusterSpec:
    """The cluster named by ``--hardware``; the default profile where none is named, said in ``notes``."""
    if num_devices is not None and num_devices < 1:
        raise InputError(f"the number of GPUs must be at least 1, got {num_devices}", hint="give --gpus N")
    try:
        cluster = cluster_for(num_devices, hardware)
    except HardwareProfileError as error:
        raise HardwareError(error.message, hint=error.hint) from error
    if hardware is None:
        notes.append(f"no --hardware given: planning for {default_profile_name()}")
    groups = () if cluster.mixed is None else cluster.mixed.groups
    for profile in [group.cluster.profile for group in groups] or [cluster.profile]:
        notes.extend(doubt for doubt in doubts(profile) if doubt not in notes)
    vendors = {group.cluster.profile.device.vendor for group in groups}
    if len({vendor.lower() for vendor in vendors}) > 1:
        notes.append(f"no library of collectives that torch has spans devices of {' and '.join(sorted(vendors))}")
    return cluster


def check_sizes(request: Request) -> None:
    """InputError where a number is larger than any that is computed with, or there is nothing of what it counts."""
    pins = request.pins
    asked = {
        "--seq-len": (request.seq_len, MOST_SEQ_LEN),
        "--global-batch": (request.global_batch_size, MOST_SEQUENCES),
        "--tokens": (request.num_tokens, MOST_TOKENS),
        "--top": (request.num_runners_up, MOST_ITEMS),
        "--micro-batch": (pins.micro_batch, MOST_SEQUENCES),
        "--virtual-stages": (pins.virtual_stages, MOST_STAGES_A_RANK),
        **{f"--{name}": (getattr(pins, name), MOST_DEVICES) for name in ("tp", "pp", "dp", "cp", "ep", "dp_replicate")},
    }
    for name, (value, most) in asked.items():
        if value is not None and abs(value) > most:
            shown = f"{value:,}" if abs(value) < 10**30 else "a larger number"
            raise InputError(f"{name} may be {most:,} at most, got {shown}", hint="is there a digit too many?")
    for name in ("--seq-len", "--top"):
        value, _ = asked[name]
        if value is not None and value < 1:
            raise InputError(f"{name} must be at least 1, got {value}", hint="leave it out for the usual number")


def check_memory_risk(risk: float) -> None:
    """InputError where it is no risk that a plan can be made for."""
    if not 0 < risk <= MOST_RISK:
        raise InputError(
            f"the memory risk must be above 0 and at most {MOST_RISK}, got {risk:g}",
            hint=f"give --memory-risk {DEFAULT_RISK:g} for a plan that fits with {1 - DEFAULT_RISK:.0%}, or "
            f"--memory-risk {MOST_RISK:g} to take predictions at their word",
        )


def check_precision(cluster: ClusterSpec, precision: Precision) -> None:
    """HardwareError where the device has no arithmetic of that precision."""
    known = cluster.profile.device.peak_flops_per_s
    if precision.value not in known:
        raise HardwareError(
            f"{cluster.profile.device.name} has no {precision.value} arithmetic in its profile",
            hint=f"choose --precision from {', '.join(p.value for p in Precision if p.value in known)}",
        )


def alignment_notes(target: PricingTarget) -> tuple[str, ...]:
    """Sizes of the model that the tensor cores of the cluster's devices do not take well."""
    if not target.cluster.profile.device.has_tensor_cores or target.precision == Precision.FP32:
        return ()
    are_products_priced = target.precision in UNALIGNED_DTYPES and not target.recipe.pads_products
    return alignment_warnings(target.graph, are_products_priced=are_products_priced)


def check_offload(cluster: ClusterSpec, offload: Offload | None, *, activations: bool | None = False) -> None:
    """HardwareError where the profile does not say enough of its nodes to price offloading."""
    asked = [(f"--offload {offload}", "--offload none", offload or Offload.NONE)]
    asked += [("--offload-activations", "--no-offload-activations", Offload.CPU)] if activations else []
    for option, instead, place in asked:
        problem = unpriced_offload(cluster, place)
        if problem is not None:
            raise HardwareError(
                f"{option}: {problem}",
                hint=f"use {instead}, or add the numbers to a profile of yours: planner profile -o profile.json",
            )


def load_graph(model: str, seq_len: int | None, precision: Precision) -> ModelGraph:
    """The graph of MODEL: read where it was traced before, from graph.json or the cache; traced otherwise."""
    return _graph_of(resolve_model(model), seq_len, precision)


def _graph_of(source: ModelSource, seq_len: int | None, precision: Precision) -> ModelGraph:
    if source.kind is ModelKind.GRAPH:
        assert source.path is not None
        graph = read_graph(source.path)
        if seq_len not in (None, graph.seq_len):
            raise InputError(
                f"{source.name} was traced with sequences of {graph.seq_len} tokens, not {seq_len}",
                hint=f"trace it again: planner trace MODEL --seq-len {seq_len} -o {source.name}",
            )
        return graph
    return traced_graph(TraceRequest(source, TRACED_BATCH_SIZE, seq_len, precision), default_folder())


def graph_of(request: Request, notes: list[str]) -> ModelGraph:
    """The graph of what is asked for: errors as of ``load_planned_graph`` where a plan names it."""
    if request.held is not None:
        graph = traced_anew(request.held, request.seq_len, request.precision)
    elif request.planned is not None and request.seq_len is not None:
        graph = load_planned_graph(request.planned, request.seq_len, request.precision, notes)
    else:
        graph = load_graph(request.model, request.seq_len, request.precision)
    try:
        check_positions(graph)
    except InputError as error:
        if request.held is not None or family_config_of(request.model) is None:
            raise
        # sizes of a generic family, whose table of positions is one of many sizes: what is asked is what it would take
        notes.append(f"{error.message}: planner run cannot train it so; a config with a longer seq_len can")
    return graph


def load_planned_graph(model: PlannedModel, seq_len: int, precision: Precision, notes: list[str]) -> ModelGraph:
    """The graph of a plan's model; code is run only where the cache has no graph of it, and the plan may run it.

    ModelError, UntrustedModelError: there is neither. PlanError: the code is not what the plan was made for.
    """
    graph = _planned_graph(model, seq_len, precision, notes)
    check_num_params(model, graph.num_params)
    return graph


def _planned_graph(model: PlannedModel, seq_len: int, precision: Precision, notes: list[str]) -> ModelGraph:
    if model.source.startswith(HELD):
        return _held_graph_of(model)
    known = known_graph(
        Known(model.digest, model.files, model.num_params, seq_len), TRACED_BATCH_SIZE, precision, default_folder()
    )
    try:
        source = planned_source(model)
    except (ModelError, UntrustedModelError) as error:
        if known is None:
            raise
        notes.append(f"priced by the cached graph of the model that the plan was made for: {error.message}")
        return known.model_copy(update={"source": model.source})
    graph = _graph_of(source, seq_len, precision) if known is None else known
    graph = graph.model_copy(update={"source": model.source})
    if graph.digest == model.digest:
        return graph
    if source.kind is ModelKind.PYTHON:
        raise PlanError(f"{model.source} is not the model that this plan was made for", hint=SEARCH_AGAIN)
    notes.append(f"{model.source} has changed since the plan was made: its digest differs")
    return graph


def traced_anew(held: LoadedModel, seq_len: int | None, precision: Precision) -> ModelGraph:
    """The graph of a module that is held in Python. ModelError where it cannot be traced."""
    return held_graph(held, TRACED_BATCH_SIZE, seq_len, precision)


def _held_graph_of(model: PlannedModel) -> ModelGraph:
    """ModelError where the module that the plan was made for is not known on this machine."""
    graph = known_held_graph(model.digest)
    if graph is None:
        raise ModelError(
            f"{model.source} is a module that was held in Python, and its graph is not in the cache of this machine",
            hint="pass it: planner.load_plan(path, model=module, example_inputs=...); or put a build_model() that "
            "returns it into a model.py and search again",
        )
    return graph.model_copy(update={"source": model.source})


def default_batch(num_params: int, seq_len: int, num_devices: int, devices_per_node: int) -> tuple[int, str]:
    """Sequences of a step where none are asked for, and what to say of them.

    As many tokens as models of that size are trained with (``BATCH_TOKENS``). Where that is a sequence for every
    device, the nearest multiple of their number, so that any degree of data parallelism divides it; otherwise a
    multiple of the nodes, of which each needs a sequence at least for its devices to share. Devices that do not fill
    their nodes need one each. Each one's share has at most ``BATCH_BITS`` significant bits: it is a small number times
    a power of two, which micro-batches divide. 146 = 2 * 73 has micro-batches of 1, 2 and 73; 144 has 1 to 16.
    """
    tokens = next(tokens for most, tokens in BATCH_TOKENS if num_params <= most) if seq_len > 1 else BATCH_SAMPLES
    wanted = max(1, -(-tokens // seq_len))
    sharing = devices_per_node if wanted < num_devices and num_devices % devices_per_node == 0 else 1
    users = num_devices // sharing
    share = max(1, round(wanted / users))
    spare_bits = max(0, share.bit_length() - BATCH_BITS)
    batch = (round(share / 2**spare_bits) << spare_bits) * users
    said = f"no --global-batch given: {batch} sequences of {seq_len} tokens ({batch * seq_len:,} tokens)"
    if seq_len == 1:
        return batch, f"no --global-batch given: {batch} samples"
    if wanted < users:
        whose = f"{users} nodes" if sharing > 1 else f"{users} GPUs"
        said += (
            f", for each of {whose} to have one; models of {num_params / 1e9:.3g} B parameters are trained with about "
            f"{tokens:,}"
        )
    return batch, said


def training_of(request: Request, cluster: ClusterSpec, graph: ModelGraph, notes: list[str]) -> Training:
    """The training as asked. ``notes`` then say the default global batch, and where GPUs do not divide a batch.

    InputError for a batch below 1, and for a model of which nothing is trained.
    """
    if not any(parameter.trainable for parameter in graph.parameters):
        raise InputError(
            f"{graph.source} has no parameter that is trained, of {graph.num_params:,}: there is no step to plan",
            hint="its parameters need requires_grad",
        )
    batch, seq_len, num_devices = request.global_batch_size, graph.seq_len, cluster.num_devices
    if batch is None:
        batch, said = default_batch(graph.num_params, seq_len, num_devices, cluster.devices_per_node)
        notes.append(said)
    if batch < 1:
        raise InputError(f"the global batch must be at least 1 sequence, got {batch}", hint="give --global-batch B")
    if batch % num_devices:
        notes.append(
            f"{num_devices} GPUs do not divide {batch} sequences: data parallelism over all of them, plain FSDP among "
            "it, is left out"
        )
    return Training(batch, seq_len, request.precision, request.optimizer)


def borrowed(framework: str) -> str:
    """Why the recipe of ``framework`` is another's; empty where it is its own. InputError where none goes by it."""
    return framework_of(named(framework).name).borrows


def target_of(
    graph: ModelGraph, cluster: ClusterSpec, precision: Precision, framework: str, notes: list[str]
) -> PricingTarget:
    """The model on the cluster as ``framework`` runs it; InputError where no framework goes by that name."""
    target = replace(target_as_run(graph, cluster, precision, Software.named(framework)), framework_name=framework)
    if framework != OUR_FRAMEWORK:
        reason = borrowed(framework)
        why = f"; {reason}" if reason else ""
        notes.append(f"priced as {framework} runs a layout (recipe {target.recipe.name}{why})")
        if target.attention is not None and not target.attention.is_fused and not named(framework).kernels:
            notes.append(
                f"its attention is priced with the scores in memory; where the model's is fused, as SDPA is, say "
                f"{framework}+flash"
            )
    return target


def target_as_run(graph: ModelGraph, cluster: ClusterSpec, precision: Precision, software: Software) -> PricingTarget:
    """The same by ``software``; InputError where no framework goes by its name."""
    calibration, device = cluster.profile.calibration, cluster.profile.device.name
    framework, where = software.framework, Where(cluster.profile.node.num_devices, device, precision.value)
    kernels = kernels_of(framework, software.version, software.kernels, where)
    recipe = with_bands(recipe_on(software.recipe_with(kernels), cluster.profile), device, calibration, framework)
    name = attention_name_for(recipe, software.kernels, device, uses_flash=software.uses_flash)
    once_a_node = dispatches_once_a_node(kernels)
    kernel = attention_kernel(name)
    return PricingTarget(graph, cluster, precision.value, recipe, kernel, once_a_node, framework_name=framework)
