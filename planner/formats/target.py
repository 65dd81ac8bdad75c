"""What a target is: a named version of a framework or launcher, what it can express, and how its config is written.

Each file in ``targets/`` holds ``TARGETS``. ``refused`` is the one way to ask what of a plan a target cannot express.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field, replace

from costmodels.vocabulary.choices import ContextMethod, Offload, Optimizer, Precision, Recompute
from costmodels.vocabulary.schedules import ScheduleName
from planner.errors import InputError
from planner.formats.settings import Job, Layout, Settings


class NotExpressibleError(InputError):
    """A target has no way to say what a plan says."""


@dataclass(frozen=True)
class Refusal:
    """Something of a plan that a target cannot express: the rule with the values, and the way out."""

    reason: str
    way_out: str


@dataclass(frozen=True)
class Abilities:
    """What a target can express of each choice by itself; what does not go together is in ``Target.limits``."""

    axes: frozenset[str]  # of the mesh, that may be above 1: pp, dp_replicate, dp_shard, cp, tp, ep
    zero_stages: tuple[int, ...]  # over more than one rank of dp_shard * cp
    schedules: tuple[ScheduleName, ...]  # where pp is above 1
    recompute: tuple[Recompute, ...]
    precisions: tuple[Precision, ...]
    optimizers: tuple[Optimizer, ...]
    cp_methods: tuple[ContextMethod, ...] = ()
    offloads: tuple[Offload, ...] = (Offload.NONE,)
    sequence_parallel: tuple[bool, ...] = (False, True)  # where tp is above 1
    cuts_unevenly: bool = False  # stages may hold any number of blocks
    mixes_recompute: bool = False  # blocks may differ in what they recompute
    has_whole_experts: bool = False  # experts may be whole on a rank beside tensor parallelism (etp 1)
    fills_rounds: bool = False  # a pipeline's micro-batches are a multiple of its ranks


@dataclass(frozen=True)
class Written:
    """A config as text, and what is said with it: what is left to the user."""

    text: str
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Read:
    """What a config says, the model as far as it tells one, and what was assumed or left out."""

    settings: Settings
    shape: dict[str, object] | None = None  # fields of a FamilyConfig
    preset: str | None = None
    notes: tuple[str, ...] = ()
    kernels: tuple[str, ...] = ()  # that change the price: words as in ``framework+compile``


def _no_limits(_job: Job) -> Iterator[Refusal]:
    return iter(())


@dataclass(frozen=True)
class Target:
    """A format to export to. ``abilities`` None: it starts ``planner run``, so it runs what the executor runs."""

    name: str
    version: str
    sources: tuple[str, ...]  # where its names and rules were read
    write: Callable[[Job], Written]
    abilities: Abilities | None = None
    limits: Callable[[Job], Iterator[Refusal]] = field(default=_no_limits)
    framework: str = "planner"  # by whose recipe an imported config is priced
    read: Callable[[str], Read] | None = None
    is_one: Callable[[str, str], bool] = field(default=lambda _name, _text: False)  # of a file's name and content

    def software(self, read: Read) -> str:
        """What runs a config of this format, today's version: ``torchtitan+compile``."""
        return "+".join((self.framework, *read.kernels))


def refused(target: Target, job: Job) -> list[Refusal]:
    """Everything of the plan that ``target`` cannot express; empty where it can."""
    found: list[Refusal] = []
    if job.plan.pipeline.batch_shares or any(stage.device_group is not None for stage in job.plan.pipeline.stages):
        found.append(
            Refusal(
                "the plan lies on groups of unlike devices, which no target can name",
                "plan for one kind of device: --hardware NAME",
            )
        )
    if job.layout.num_devices > job.devices_per_node and job.layout.num_devices % job.devices_per_node:
        found.append(
            Refusal(
                f"{job.layout.num_devices} GPUs fill no whole nodes of {job.devices_per_node}",
                "give --gpus-per-node N, or plan for whole nodes",
            )
        )
    if target.abilities is not None:
        found += beyond(target.abilities, job.layout)
    return [*found, *target.limits(job)]


def written(target: Target, job: Job) -> Written:
    """The config of the plan; NotExpressibleError with every reason where there is none."""
    found = refused(target, job)
    if found:
        raise NotExpressibleError(
            f"{target.name} ({target.version}) cannot express this plan: " + "; ".join(each.reason for each in found),
            hint="; ".join(dict.fromkeys(each.way_out for each in found)),
        )
    config = target.write(job)
    if target.abilities is None or job.layout.tp == 1:
        return config
    split = f"operators are split over tp by {target.name}'s own rule: the plan's placements are not written"
    return replace(config, notes=(*config.notes, split))


_AXIS_OPTIONS = {
    "pp": "--pp 1", "dp_replicate": "--zero 0, or sharding over all ranks", "dp_shard": "--zero 0", "cp": "--cp 1",
    "tp": "--tp 1", "ep": "--ep 1",
}  # fmt: skip


def beyond(can: Abilities, layout: Layout, *, is_stack: bool | None = None) -> Iterator[Refusal]:
    """Each choice of ``layout`` that is none of ``can``'s.

    ``is_stack``: of a layout whose stages are not cut yet, whether the model is a single stack of blocks.
    """
    for axis, option in _AXIS_OPTIONS.items():
        degree: int = getattr(layout, axis)
        if degree > 1 and axis not in can.axes:
            yield Refusal(f"it has no {axis}, the plan has {axis} = {degree}", f"search with {option}")
    if layout.dp_shard * layout.cp > 1 and layout.zero_stage not in can.zero_stages:
        yield _unknown("ZeRO stage", layout.zero_stage, can.zero_stages, "--zero")
    if layout.pp > 1 and "pp" in can.axes:
        yield from _pipeline(can, layout, is_stack=is_stack)
    if layout.etp is not None and not can.has_whole_experts:
        yield Refusal(
            f"its experts have the tensor parallelism of attention, the plan's are whole (etp = {layout.etp})",
            f"search with --etp {layout.tp}",
        )
    if layout.offloads_activations:
        yield Refusal(
            "it cannot say which blocks keep activations in host memory", "search without --offload-activations"
        )
    if layout.micro_batch_sizes:
        sizes = " and ".join(map(str, layout.micro_batch_sizes))
        reason = f"its replicas have micro-batches of one size, the plan's of {sizes} sequences"
        yield Refusal(reason, "search with --micro-batch N")
    yield from _recompute(can, layout)
    yield from _words(can, layout)


def _pipeline(can: Abilities, layout: Layout, *, is_stack: bool | None) -> Iterator[Refusal]:
    if layout.schedule not in can.schedules:
        yield _unknown("schedule", layout.schedule.value, [each.value for each in can.schedules], "--schedule")
    yield from not_in_rounds(can, layout.pp, layout.num_microbatches)
    if layout.stage_blocks is None:
        if is_stack:
            return
        yield Refusal(
            "its stages are counted in blocks, and the plan's model is no single stack of blocks", "search with --pp 1"
        )
    elif not layout.is_cut_evenly and not can.cuts_unevenly:
        yield Refusal(
            f"its stages hold equal numbers of blocks, the plan's hold {_runs(layout.stage_blocks)}",
            "pin --pp and --virtual-stages so that their product divides the blocks, and even out pipeline.stages",
        )


def not_in_rounds(can: Abilities, pp: int, num_microbatches: int) -> Iterator[Refusal]:
    """What is against so many micro-batches in a pipeline of ``pp`` ranks."""
    if can.fills_rounds and num_microbatches % pp:
        yield Refusal(
            f"micro-batches must be a multiple of the stages: {num_microbatches} and {pp}",
            "search with another --global-batch or --pp",
        )


def _recompute(can: Abilities, layout: Layout) -> Iterator[Refusal]:
    if isinstance(layout.recompute, tuple):
        if not can.mixes_recompute:
            counts = ", ".join(f"{mode.value} {layout.recompute.count(mode)}" for mode in Recompute)
            yield Refusal(
                f"it recomputes all blocks alike, the plan's differ ({counts} blocks)", "search with --recompute full"
            )
    elif layout.recompute not in can.recompute:
        yield _unknown("recomputation", layout.recompute.value, [m.value for m in can.recompute], "--recompute")


def _words(can: Abilities, layout: Layout) -> Iterator[Refusal]:
    if layout.precision not in can.precisions:
        yield _unknown("precision", layout.precision.value, [p.value for p in can.precisions], "--precision")
    if layout.optimizer not in can.optimizers:
        yield _unknown("optimiser", layout.optimizer.value, [o.value for o in can.optimizers], "--optimizer")
    if layout.offload not in can.offloads:
        yield _unknown("offload of optimiser states", layout.offload.value, [o.value for o in can.offloads],
                       "--offload")  # fmt: skip
    if layout.cp > 1 and "cp" in can.axes and layout.cp_method not in can.cp_methods:
        yield _unknown("way of context parallelism", layout.cp_method.value, [m.value for m in can.cp_methods],
                       "--cp-method")  # fmt: skip
    if layout.tp > 1 and "tp" in can.axes and layout.sequence_parallel not in can.sequence_parallel:
        always = "with" if layout.sequence_parallel is False else "without"
        option = "--sequence-parallel" if layout.sequence_parallel is False else "--no-sequence-parallel"
        yield Refusal(f"its tensor parallelism is always {always} sequence parallelism", f"search with {option}")


def _unknown(what: str, wanted: object, known: Collection[object], option: str) -> Refusal:
    names = ", ".join(map(str, known)) or "none"
    first = next(iter(known), None)
    return Refusal(
        f"{what} {wanted} is not one of its own ({names})",
        f"search with {option} {first}" if first is not None else f"search without {option}",
    )


def _runs(numbers: tuple[int, ...]) -> str:
    """``8, 8, 7``, long lists cut."""
    return ", ".join(map(str, numbers[:8])) + (", ..." if len(numbers) > 8 else "")
