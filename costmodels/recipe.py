"""Framework recipes: what a training framework does with a layout, as a handful of physical facts with sources.

A recipe says which kernels run, what stays in memory per parameter and what is hidden behind what; how fast kernels and
links are is the hardware profile's. ``planner search`` prices for our own executor, the recipe ``planner``.

A recipe's file may name another with ``extends`` and then says only in what it differs: a fact that it states replaces
the other's, null takes an optional one away, and whatever it does not state is as there. Name, description and the two
bands are always its own.
"""

from __future__ import annotations

import json
import os
from functools import lru_cache
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from costmodels.memory_band import MemoryBand
from costmodels.vocabulary.action import Transfer
from costmodels.vocabulary.choices import ContextMethod
from costmodels.vocabulary.schedules import ScheduleName
from hardware_profiles.schema import Quantity

OUR_RECIPE = "planner"


class _Value(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class AttentionKernel(_Value):
    """How the core of attention runs: fused, or with its scores (batch, heads, queries, keys) in memory.

    A fused kernel has ``rate``, its speed over the one that the profile's efficiency is of. Otherwise two batched
    products run at the GEMM rate, and each score element moves and holds so many bytes.
    """

    name: str
    is_fused: bool
    rate: Quantity
    score_bytes_forward: Quantity
    score_bytes_backward: Quantity
    saved_score_bytes: Quantity
    dropout_saved_bytes: Quantity  # of these, what only dropout keeps
    gradient_score_bytes: Quantity  # held more in backward than what is saved, at its peak
    num_kernels: Annotated[int, Field(ge=1)] = 1  # forward; backward has twice as many
    # On devices whose names begin otherwise it is as fast as the kernel ``elsewhere``; none named: so fast everywhere.
    devices: tuple[str, ...] = ()
    elsewhere: str | None = None


class StateFacts(_Value):
    """Bytes of one parameter besides its 16-bit copy for compute and the fp32 master copy and moments."""

    gradient_bytes: Quantity  # held from the first micro-batch to the optimiser step
    replica_bytes: Quantity  # more on every rank where data parallelism replicates (buckets, copies)
    sharded_replica_bytes: Quantity  # the same where the optimiser is sharded
    optimizer_extra_bytes: Quantity  # beside master copy and moments, sharded with them
    reduction_bytes: Quantity  # sent per parameter when gradients are reduced
    gathered_bytes: Quantity | None = None  # sent per parameter that is gathered; None: as it is computed with
    fp16_gradient_bytes: Quantity | None = None  # held and reduced under fp16; None: as under other precisions
    # Under bf16, but not under fp16, 16-bit gradients are added to a sum of so many bytes, and that is reduced; and
    # what a micro-batch then moves per parameter besides. None: gradients are treated alike in both.
    bf16_sum_bytes: Quantity | None = None
    bf16_accumulation_bytes: Quantity | None = None
    # Where the optimiser is sharded: elements of each of two flat buffers of the parameters' precision, into which
    # gradients are reduced and updated parameters are gathered, however many parameters there are. None: no buffers.
    bucket_elements: Quantity | None = None
    reduces_in_place: bool  # the gradients' own memory is reduced: no buffers of a unit in transit
    # Where only the optimiser is sharded every rank still gets the sum of all gradients, by an all-reduce.
    reduces_to_all: bool = False
    # In fp32 without sharding, compute uses the optimiser's own copy, and gradients are reduced where they lie.
    leaves_whole: bool = False

    def held_gradient_bytes(self, precision: str) -> float:
        """Bytes of a parameter's gradients, with their sum where it lies apart."""
        return self._in_fp16(precision, self.gradient_bytes) + self._under(precision, self.bf16_sum_bytes)

    def reduced_bytes(self, precision: str) -> float:
        """Sent per parameter when gradients are reduced."""
        return self._under(precision, self.bf16_sum_bytes) or self._in_fp16(precision, self.reduction_bytes)

    def summed_bytes(self, precision: str) -> float:
        """Moved per parameter and micro-batch besides what every precision moves to add up gradients."""
        return self._under(precision, self.bf16_accumulation_bytes)

    def _in_fp16(self, precision: str, otherwise: Quantity) -> float:
        fact = self.fp16_gradient_bytes
        return fact.value if fact is not None and precision == "fp16" else otherwise.value

    @staticmethod
    def _under(precision: str, fact: Quantity | None) -> float:
        return fact.value if fact is not None and precision == "bf16" else 0.0


class MemoryFacts(_Value):
    """Memory besides the states of parameters and what autograd keeps of the operators.

    A logit is one element of what the loss takes, in 16 bits; its bytes count every copy. A whole tensor is a
    micro-batch's input of a block before sequence parallelism splits it.
    """

    logit_kept_bytes: Quantity  # from the loss's forward to its backward
    logit_peak_bytes: Quantity  # at the loss's own peak
    logit_reserved_bytes: Quantity  # cached by then: copies that were freed cannot hold later ones that are larger
    gathers_logits: bool  # every tensor-parallel rank holds the logits of the whole vocabulary
    gather_buffers: Quantity  # whole tensors kept for good, into which split inputs are gathered
    waiting_tensors: Quantity  # whole tensors a block that collectives still use when the host has gone on
    gathered_update_bytes: Quantity  # per parameter at the optimiser step of ZeRO 1: copies gathered to all ranks
    gathered_update_shard_bytes: Quantity  # the same, of the shard that is sent
    extra_communicators: Quantity  # process groups besides those of the mesh's axes
    keeps_gradients: bool  # gradients lie in buffers for good; otherwise the first backward pass allocates them
    # What is gathered and reduced is counted moment by moment, as FSDP2 does it, and not the most of each together.
    has_fsdp_moments: bool = False


class HookTimes(_Value):
    """What hooks in Python take of the host besides the kernels, a unit and micro-batch.

    Of FSDP2 around a unit; of activation checkpoints around a block. Seconds.
    """

    sharded_forward_s: Annotated[float, Field(ge=0)]  # where the unit's parameters are FSDP2's at all
    sharded_backward_s: Annotated[float, Field(ge=0)]
    cast_forward_s: Annotated[float, Field(ge=0)]  # more, where they are computed with in 16 bits
    cast_backward_s: Annotated[float, Field(ge=0)]
    gather_s: Annotated[float, Field(ge=0)]  # more in each pass that gathers them
    reduce_s: Annotated[float, Field(ge=0)]  # more where a micro-batch's gradients are reduced
    checkpoint_forward_s: Annotated[float, Field(ge=0)]  # where a block recomputes anything
    checkpoint_backward_s: Annotated[float, Field(ge=0)]
    # More for each kernel that the block issues forward, where recomputation is selective: PyTorch asks in Python, for
    # every operator of both passes, whether its result is kept.
    selected_forward_s: Annotated[float, Field(ge=0)]
    selected_backward_s: Annotated[float, Field(ge=0)]  # with the kernels that run again
    source: Annotated[str, Field(min_length=1)]

    def scaled(self, factor: float) -> HookTimes:
        """On a host that takes ``factor`` times as long."""
        return self.model_copy(update={name: value * factor for name, value in self if isinstance(value, float)})


class ErrorBand(_Value):
    """Where measured step times lay around predictions of runs that had no part in the fit, as measured / predicted."""

    low: Annotated[float, Field(gt=0)]
    high: Annotated[float, Field(gt=0)]
    coverage: Annotated[float, Field(gt=0, lt=1)]  # share of the runs inside
    num_runs: Annotated[int, Field(ge=1)]
    source: Annotated[str, Field(min_length=1)]
    # Median over groups of runs that differ in layout alone: how far measured ratios of two lie from predicted ones.
    between_layouts: Annotated[float, Field(gt=0)] | None = None


class ContextMethods(_Value):
    """The ways of context parallelism that a framework has, its default first."""

    methods: Annotated[tuple[ContextMethod, ...], Field(min_length=1)]
    source: Annotated[str, Field(min_length=1)]


class Recipe(_Value):
    """One framework, in one software generation."""

    schema_version: Literal[1] = 1
    name: str
    description: str
    flash_kernel: str  # with flash attention; names of recipes/attention.json
    plain_kernel: str  # without
    uses_flash: bool  # what a run that does not say so is taken to do
    product_rate: Quantity  # rate of matrix products over the profile's: software generation
    memory_traffic: Quantity  # bytes moved by memory-bound kernels over those of the traced operators
    host_s_per_kernel: Quantity  # the host issues one kernel in so much time
    host_s_per_collective: Quantity
    # More for each rank of the collective's group in jobs of several nodes; None: no more.
    host_s_per_collective_rank: Quantity | None = None
    # By so much, on average, a rank's host comes late to a collective of tensor parallelism (costmodels.stragglers).
    collective_delay_s: Quantity | None = None  # None: not at all
    host_s_per_sharded_kernel: Quantity | None = None  # under tensor parallelism; None: as any other
    # More for each kernel that a driver launches on a device, where the times above are of a processor alone; None: no
    # more.
    host_s_per_launch: Quantity | None = None
    # What `planner profile` reads as ``host_s_per_kernel`` on the host that these times hold for; None: on other hosts
    # they are taken to be the same.
    host_reading_s: Quantity | None = None
    hooks: HookTimes | None = None  # None: no time of theirs is known apart from that of kernels
    state: StateFacts
    memory: MemoryFacts
    accumulation_bytes: Quantity  # moved per parameter and micro-batch to add up gradients
    update_extra_bytes: Quantity  # moved per updated parameter besides the fused optimiser's own
    fuses_momentum: bool = False  # SGD with momentum is a kernel of Apex or Transformer Engine, not torch's
    norm_traffic: Quantity  # bytes moved by norms over those of a fused kernel: eager norms make many passes
    norm_saved_bytes: Quantity  # kept per element of a norm besides its input: eager norms keep fp32 copies
    # Rates over what the links sustain; groups with one rank on each node reach all of it (planner/pricing/machine.py).
    tensor_parallel_rate: Quantity  # of tensor-parallel collectives
    data_parallel_rate: Quantity  # of gradient reduction and parameter gathering
    overlaps_reduction: bool  # gradients are reduced behind the backward pass
    # Parameters are gathered tensor by tensor, each time with the latency of a collective; otherwise a unit's together.
    gathers_each_tensor: bool = False
    # What ZeRO 2 and 3 move in every micro-batch is beside compute; otherwise nothing hides it.
    overlaps_micro_batches: bool = True
    # What ZeRO 2 and 3 reduce over the shards in every micro-batch is summed over replicas of these once a step;
    # otherwise in every micro-batch, too.
    reduces_over_replicas_once: bool = False
    # Where a block is recomputed, ZeRO 3 gathers its parameters once more: for the recomputation alone.
    gathers_to_recompute: bool = False
    overlaps_gather: bool  # updated parameters are gathered behind the next forward pass
    tensor_overlap: Quantity  # share of tensor-parallel communication that is hidden behind products
    # All-reduces of a block's input in backward besides those of the traced operators, without sequence parallelism:
    # products that read one tensor each reduce its gradient for themselves. None: one reduces the sum.
    separate_reductions: Quantity | None = None
    # Selective recomputation keeps the outputs of products, or of every second product, or repeats attention's core,
    # or repeats whole blocks (all of them, as far as is known).
    selective: Literal["products", "alternate_products", "attention", "blocks"]
    eight_bit_inputs: bool = False  # products in 8 bits keep their input in 8 bits, a tensor of its own
    # Recomputation of a block stops when all that its backward pass asks for is there, as PyTorch's non-reentrant
    # checkpoints do; otherwise the whole block and its collectives run again.
    stops_recomputation_early: bool = False
    # The activation of gated layers is one kernel, and so is the product that makes queries, keys and values: that
    # changes what autograd keeps (planner/axes/fused_kernels.py).
    fuses_kernels: bool = False
    # The products of gated experts and what lies between them are one kernel, which also makes its inner 8-bit copies.
    fuses_experts: bool = False
    # Moved per element of what products in 8 bits take, to make the 8-bit copies: of inputs forward, of outputs'
    # gradients backward. None: not known.
    eight_bit_copy_bytes: Quantity | None = None
    gathers_inputs_again: bool  # under sequence parallelism products keep their input split and gather it in backward
    # Where a schedule splits backward passes: whether all that autograd kept waits for the weight gradients, or only
    # what these need.
    split_retains_graph: bool = False
    split_host_factor: Quantity | None = None  # host time of both halves over that of a whole backward pass; None: 1
    # Under a pipeline sharded parameters are gathered for every micro-batch. Otherwise a step gathers them once and
    # reduces gradients once: what ZeRO 2 and 3 are there is ZeRO 1.
    reshards_in_pipelines: bool = True
    # Of results between pipeline ranks; where they block, a rank's host waits too. What is on demand under schedules of
    # one stage a rank and whole backward passes is ahead under all others.
    transfers: Transfer = Transfer.AHEAD
    scatters_sends: bool = False  # each rank of tensor parallelism sends its part of what all of them hold
    partition: Literal["even", "weighted"]  # equal numbers of blocks a stage, or equal weights with the head counted
    head_weight: Quantity | None = None  # of weighted stages: the head's parameters count so much; None: in full
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    # Sides of products that tensor cores do not take are padded: Megatron-LM's vocabulary (no other side of its models
    # is one), and whatever Inductor and XLA compile.
    pads_products: bool = False
    # Each micro-batch, for what lies above the device's memory: the allocator gives blocks back and takes them again.
    overflow_s_per_byte: Quantity | None = None  # None: not known
    # Rows of the rank with most over the mean, of those that expert parallelism sends to ranks; None: routing is
    # balanced, as the trace takes it.
    expert_imbalance: Quantity | None = None
    workspace_bytes: float = 0.0  # of libraries, at least so much, whatever the profile says
    # None: the framework has no context parallelism, or none that is known; its layouts gather keys and values.
    context_methods: ContextMethods | None = None
    # Schedules under which exchanges of a forward pass run beside the backward pass of another micro-batch that follows
    # on the rank, and its exchanges beside that forward pass. Elsewhere, and where none follows, they are exposed.
    exchanges_hide_under: tuple[ScheduleName, ...] = ()
    exchanges_hide_without_pipeline: bool = False  # a rank's next forward pass runs beside a backward pass
    # Under tensor parallelism each rank exchanges its part of the rows, which are gathered at the experts and summed
    # behind them among tensor-parallel ranks; otherwise all of these exchange whole rows.
    splits_exchanges: bool = False
    # Experts may be whole on a rank beside tensor parallelism, so that expert parallelism lies over its ranks as well
    # (--expert-tensor-parallel-size 1 of Megatron-Core; megatron/core/parallel_state.py lays out such ranks).
    has_whole_experts: bool = False
    # Gate and up projection of experts that are one parameter are split each for itself under tensor parallelism.
    splits_fused_gates: bool = False
    # A token goes to each node of its experts once, and over NVLink to all of them there; otherwise once an expert.
    dispatches_once_a_node: bool = False
    nodes_per_token: Quantity | None = None  # the most nodes that hold experts of one token; None: any number
    # Where the precision has 8 bits, rows are sent to their experts in 8 bits, and so are gradients of what these made.
    eight_bit_dispatch: bool = False
    error_band: ErrorBand | None = None  # None: predictions of this framework were never held against runs
    memory_band: MemoryBand | None = None  # the same of peak memory

    @property
    def hides_exchanges(self) -> bool:
        """Whether exchanges of experts may run beside another micro-batch at all."""
        return bool(self.exchanges_hide_under) or self.exchanges_hide_without_pipeline

    def issue_s(self, *, is_sharded: bool) -> float:
        """Seconds in which the host issues one kernel, of tensors that tensor parallelism splits or of whole ones."""
        sharded = self.host_s_per_sharded_kernel
        return sharded.value if is_sharded and sharded is not None else self.host_s_per_kernel.value


@lru_cache(maxsize=1)
def _attention_kernels() -> dict[str, AttentionKernel]:
    entries = json.loads((files("costmodels") / "recipes" / "attention.json").read_text(encoding="utf-8"))
    return {entry["name"]: AttentionKernel.model_validate(entry) for entry in entries}


def attention_kernel(name: str) -> AttentionKernel:
    """The kernel called ``name``; ValueError lists those that are known."""
    known = _attention_kernels()
    if name not in known:
        raise ValueError(f"no attention kernel {name!r}; known are {', '.join(known)}")
    return known[name]


# What a recipe never takes over from the one that it extends.
OWN_FACTS = ("name", "description", "error_band", "memory_band")


@lru_cache(maxsize=32)
def load_recipe(name_or_path: str = OUR_RECIPE) -> Recipe:
    """The shipped recipe of that name, or the one in a JSON file; ValueError where there is none or it is not sound."""
    recipe = Recipe.model_validate(resolved_content(name_or_path))
    for name in (recipe.flash_kernel, recipe.plain_kernel):
        attention_kernel(name)  # which says so where there is none
    return recipe


def resolved_content(name_or_path: str) -> dict[str, object]:
    """A recipe's whole content, with what it takes over from others; ValueError where these go in a circle."""
    return _resolved(_file_of(name_or_path, None), ())


def stated_content(name_or_path: str) -> dict[str, object]:
    """What a recipe's file itself states, ``extends`` included."""
    return _stated(_file_of(name_or_path, None))


def list_recipes() -> tuple[str, ...]:
    """Names of all shipped recipes."""
    names = (entry.name.removesuffix(".json") for entry in (files("costmodels") / "recipes").iterdir())
    return tuple(sorted(name for name in names if name not in ("attention", "bands", "__pycache__")))


def _file_of(name_or_path: str, beside: Traversable | None) -> Traversable:
    """The file of a recipe; one that is extended may also be named as it lies beside the one that extends it."""
    if name_or_path.endswith(".json"):
        return Path(name_or_path)
    if isinstance(beside, Path) and os.path.isfile(neighbour := beside.parent / f"{name_or_path}.json"):
        return neighbour
    if name_or_path not in list_recipes():
        raise ValueError(f"no recipe {name_or_path!r}; shipped are {', '.join(list_recipes())}")
    return files("costmodels") / "recipes" / f"{name_or_path}.json"


def _stated(file: Traversable) -> dict[str, object]:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:  # of JSON, of text, or of a number with too many digits
        raise ValueError(f"the recipe {file} cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"the recipe {file} holds no JSON object")
    return content


def _resolved(file: Traversable, extending: tuple[str, ...]) -> dict[str, object]:
    chain = (*extending, str(file))
    if str(file) in extending:
        raise ValueError(f"recipes extend each other in a circle: {' extends '.join(chain)}")
    content = _stated(file)
    extended = content.pop("extends", None)
    if extended is None:
        return content
    base = _resolved(_file_of(str(extended), file), chain)
    return merged({key: value for key, value in base.items() if key not in OWN_FACTS}, content)


def merged(base: dict[str, object], stated: dict[str, object]) -> dict[str, object]:
    """``base`` with what is ``stated`` in its place; a quantity is replaced as a whole."""
    result = dict(base)
    for key, value in stated.items():
        below = result.get(key)
        if isinstance(value, dict) and isinstance(below, dict) and "value" not in value:
            result[key] = merged(below, value)
        else:
            result[key] = value
    return result
