"""What each training framework can run of a layout, whether or not its config can be written.

Frameworks with a config of their own run what that can express: ``Abilities`` and ``limits`` of their target. The
others are stated here, each with the place where it was read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from costmodels.vocabulary.choices import ContextMethod, Offload, Optimizer, Precision, Recompute
from costmodels.vocabulary.schedules import ScheduleName
from costmodels.vocabulary.software import named
from planner.formats import megatron_core
from planner.formats.settings import Asked, Layout
from planner.formats.target import Abilities, Refusal, beyond, not_in_rounds
from planner.formats.targets import accelerate, deepspeed, maxtext, nanotron, nemo, torchtitan
from planner.models.catalog import find_preset
from planner.models.config import FamilyConfig


@dataclass(frozen=True)
class AskedLayout:
    """A layout of a model on a cluster, before there is a plan."""

    layout: Layout
    shape: FamilyConfig | None
    preset: str | None
    devices_per_node: int


@dataclass(frozen=True)
class ModelFacts:
    """What the rules of frameworks look at beside the layout. ``shape`` None: the model is of no generic family."""

    shape: FamilyConfig | None
    preset: str | None
    devices_per_node: int

    @staticmethod
    def of(model: str, shape: FamilyConfig | None, devices_per_node: int) -> ModelFacts:
        """Of MODEL, whose ``shape`` is known or None."""
        preset = find_preset(model)
        return ModelFacts(shape, None if preset is None else preset.name, devices_per_node)

    def with_layout(self, layout: Layout) -> AskedLayout:
        """What a framework is asked about."""
        return AskedLayout(layout, self.shape, self.preset, self.devices_per_node)


Limits = Callable[[Asked], Iterator[Refusal]]


def _no_limits(_asked: Asked) -> Iterator[Refusal]:
    return iter(())


def _cut_evenly(shape: FamilyConfig, num_stages: int) -> tuple[int, ...] | None:
    """As many blocks in every stage; None where that does not come out even."""
    return None if shape.layers % num_stages else (shape.layers // num_stages,) * num_stages


@dataclass(frozen=True)
class Rules:
    """What a framework can run. ``cut``: the blocks of each of so many stages where it cuts by itself.

    None: it cuts as it is told. ``cut`` gives None where it has no cut of the model into so many.
    """

    abilities: Abilities
    source: str
    limits: Limits = _no_limits
    cut: Callable[[FamilyConfig, int], tuple[int, ...] | None] | None = None

    def refusals(self, asked: Asked) -> list[Refusal]:
        """Everything of ``asked`` that it cannot run; empty where it can."""
        return [*beyond(self.abilities, asked.layout), *self.limits(asked)]

    def refusals_uncut(self, asked: AskedLayout, *, has_blocks: bool) -> list[Refusal]:
        """The same of a layout whose stages are not cut yet; ``has_blocks``: whether there are any to cut."""
        return [*beyond(self.abilities, asked.layout, is_stack=has_blocks), *self.limits(asked)]

    def refusals_of_rounds(self, pp: int, num_microbatches: int) -> list[Refusal]:
        """Those of ``refusals_uncut`` that depend on the number of micro-batches, which no other looks at."""
        return list(not_in_rounds(self.abilities, pp, num_microbatches))


def _of_pipelines_in_a_node(asked: Asked) -> Iterator[Refusal]:
    layout = asked.layout
    if layout.pp > asked.devices_per_node:
        yield Refusal(
            f"one process drives all devices of its pipeline, which are of one node: {layout.pp} are more than "
            f"{asked.devices_per_node}",
            "search with a smaller --pp",
        )
    if layout.pp > 1 and layout.zero_stage > 0 and layout.dp_shard > 1:
        yield Refusal("its pipeline goes with replicas of whole states", "search with --zero 0 or --pp 1")


_SCRIPTS = (Precision.BF16, Precision.FP16, Precision.FP32)
_REPLICAS = Abilities(
    axes=frozenset({"dp_replicate"}),
    zero_stages=(),
    schedules=(),
    recompute=(Recompute.NONE, Recompute.FULL),  # torch.utils.checkpoint in the model's own code
    precisions=_SCRIPTS,
    optimizers=tuple(Optimizer),
)
_SHARDS = replace(_REPLICAS, axes=frozenset({"dp_replicate", "dp_shard"}), zero_stages=(2, 3))
_MEGATRON = Rules(megatron_core.ABILITIES, "Megatron-LM core_v0.19.0", megatron_core.limits)

RULES = {
    "megatron-core": _MEGATRON,
    "megatron-lm": _MEGATRON,
    "nemo": Rules(nemo.ABILITIES, nemo.VERSION, megatron_core.limits),
    "deepspeed": Rules(deepspeed.ABILITIES, deepspeed.VERSION, deepspeed.limits),
    # deepspeed.ai/tutorials/zero-offload and /zero: states on the host or the disks, with stage 3.
    "zero-infinity": Rules(
        replace(deepspeed.ABILITIES, zero_stages=(3,), offloads=(Offload.CPU, Offload.NVME)),
        deepspeed.VERSION,
        deepspeed.limits,
    ),
    "torchtitan": Rules(torchtitan.ABILITIES, torchtitan.VERSION, torchtitan.limits),
    "accelerate": Rules(accelerate.ABILITIES, accelerate.VERSION, accelerate.limits),
    "nanotron": Rules(nanotron.ABILITIES, nanotron.VERSION, nanotron.limits, nanotron.stage_blocks),
    "maxtext": Rules(maxtext.ABILITIES, maxtext.VERSION, maxtext.limits, _cut_evenly),
    "fsdp": Rules(_SHARDS, "PyTorch 2.13: torch.distributed.fsdp.fully_shard (mesh, reshard_after_forward)"),
    "ddp": Rules(_REPLICAS, "PyTorch 2.13: torch.nn.parallel.DistributedDataParallel"),
    "horovod": Rules(_REPLICAS, "Horovod 0.28: horovod.torch.DistributedOptimizer, whole replicas"),
    "llm-foundry": Rules(_SHARDS, "Composer: composer.utils.FSDPConfig (sharding_strategy, data_parallel_*_degree)"),
    # One process drives the devices of a pipeline, so it stays in a node.
    "fairscale": Rules(
        replace(
            _REPLICAS, axes=frozenset({"dp_replicate", "dp_shard", "pp"}), zero_stages=(1, 2, 3),
            schedules=(ScheduleName.GPIPE,), cuts_unevenly=True,
        ),
        "FairScale 0.4.13: optim.OSS, nn.ShardedDataParallel, nn.FullyShardedDataParallel, nn.Pipe",
        _of_pipelines_in_a_node,
    ),
    "nnscaler": Rules(
        replace(
            _REPLICAS, axes=frozenset({"dp_replicate", "dp_shard", "pp", "tp"}), zero_stages=(1,),
            schedules=(ScheduleName.ONE_F_ONE_B,), cuts_unevenly=True, sequence_parallel=(False, True),
            cp_methods=(ContextMethod.ALL_GATHER,),
        ),
        "microsoft/nnscaler: docs/source/trainer.rst (ComputeConfig: use_zero, zero_ngroups), docs/source/autodist",
    ),
}  # fmt: skip
# Other names that ``planner.frameworks.registry`` knows for what runs the same layouts.
OTHER_NAMES = {
    "megatron-core-expert-overlap": "megatron-core",
    "megatron-bridge": "nemo",
    "fsdp-llm-foundry": "llm-foundry",
}


def rules_of(framework: str) -> Rules | None:
    """The rules of the framework that goes by this name; None of ours, and where nothing is known.

    They are those of today's version, whichever is named.
    """
    name = named(framework).name.lower()
    return RULES.get(OTHER_NAMES.get(name, name))
