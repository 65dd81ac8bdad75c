"""The search space: every layout that the cluster, the model, the batch and the user's pins allow."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import gcd

from costmodels.vocabulary.mesh import Mesh
from costmodels.vocabulary.schedules import SCHEDULES, ScheduleName
from planner.errors import InputError
from planner.layout.columns import Columns
from planner.layout.layout import Layout, Limits, Pins, Training
from planner.parallelism import Offload, Recompute

MAX_MICRO_BATCH_SIZE = 64
MAX_VIRTUAL_STAGES = 8
MAX_CONTEXT_PARALLEL = 64


@dataclass(frozen=True)
class SearchSpace:
    """All layouts, and what they were made from."""

    training: Training
    pins: Pins
    limits: Limits
    layouts: Columns[Layout]


def build_space(training: Training, pins: Pins, limits: Limits) -> SearchSpace:
    """Every allowed layout; InputError naming every violated rule where there is none."""
    violations = pin_violations(training, pins, limits)
    if violations:
        raise InputError(
            "these options contradict each other:\n" + "\n".join(f"  - {v}" for v in violations),
            hint="change or drop the options named above",
        )
    layouts = _layouts(training, pins, limits)
    if not layouts:
        raise InputError(
            f"no layout satisfies {pins.describe() or 'the rules'} for global batch {training.global_batch_size} "
            f"on {limits.num_devices} GPUs",
            hint="micro-batch * data-parallel degree must divide the global batch, and of the micro-batches that makes "
            "1F1B needs at least pp, DualPipeV at least twice pp, and the interleaved schedules rounds of equal size: "
            "drop a pin or change --global-batch",
        )
    return SearchSpace(training, pins, limits, layouts)


def divisors(n: int) -> list[int]:
    """Divisors of ``n``, ascending."""
    small = [d for d in range(1, int(n**0.5) + 1) if n % d == 0]
    return sorted({*small, *(n // d for d in small)})


def pin_violations(training: Training, pins: Pins, limits: Limits) -> list[str]:
    """Each rule that the pins break by themselves, with its values."""
    found: list[str] = []
    n, batch = limits.num_devices, training.global_batch_size
    product = 1
    for name in ("pp", "dp", "cp", "tp"):
        degree = getattr(pins, name)
        if degree is None:
            continue
        product *= degree
        if degree < 1 or n % degree:
            allowed = ", ".join(map(str, divisors(n)))
            found.append(f"{name}={degree} does not divide the {n} GPUs; allowed: {allowed}")
    pinned = [name for name in ("pp", "dp", "cp", "tp") if getattr(pins, name) is not None]
    if len(pinned) > 1 and not found and n % product:
        found.append(f"{' * '.join(pinned)} = {product} does not divide the {n} GPUs")
    if len(pinned) == 4 and product != n:
        found.append(f"pp * dp * cp * tp = {product}, but there are {n} GPUs")
    if pins.dp and batch % pins.dp:
        found.append(f"dp={pins.dp} does not divide the global batch of {batch} sequences")
    micro, dp = pins.micro_batch, pins.dp or 1
    if micro is not None and (micro < 1 or batch % (micro * dp)):
        found.append(f"micro-batch {micro} * dp {dp} does not divide the global batch of {batch} sequences")
    if pins.cp and pins.cp > 1:
        if training.seq_len % pins.cp:
            found.append(f"cp={pins.cp} does not divide the sequence of {training.seq_len} tokens")
        if not limits.context_splits:
            found.append(
                "cp > 1 needs a model in which attention alone mixes positions; this one has other such operators"
            )
    if pins.tp and pins.tp > 1 and pins.tp not in limits.tensor_degrees:
        allowed = ", ".join(map(str, sorted(limits.tensor_degrees)))
        found.append(f"tp={pins.tp} splits no parameter of the model; degrees that do: {allowed}")
    return (
        found
        + _expert_violations(pins, limits)
        + _pipeline_violations(pins, limits)
        + _sharding_violations(training, pins, limits)
    )


def _expert_violations(pins: Pins, limits: Limits) -> list[str]:
    if pins.ep in (None, 1):
        return []
    if limits.num_experts == 1:
        return [f"ep={pins.ep} needs layers of experts (grouped products), and the model has none"]
    found: list[str] = []
    if pins.ep < 1 or limits.num_experts % pins.ep:
        allowed = ", ".join(map(str, divisors(limits.num_experts)))
        found.append(f"ep={pins.ep} does not divide the {limits.num_experts} experts; allowed: {allowed}")
    ranks = limits.num_devices // max(1, (pins.tp or 1) * (pins.pp or 1))
    if pins.dp is not None and pins.cp is not None:
        ranks = pins.dp * pins.cp
    if pins.ep > 1 and ranks % pins.ep:
        found.append(
            f"ep={pins.ep} does not divide the {ranks} ranks of data and context parallelism, in which it lies"
        )
    return found


def _pipeline_violations(pins: Pins, limits: Limits) -> list[str]:
    found: list[str] = []
    pp, virtual = pins.pp or 1, 1 if pins.virtual_stages is None else pins.virtual_stages
    if virtual < 1:
        found.append(f"virtual stages must be at least 1, got {virtual}")
    if pp * virtual > limits.num_pipeline_units:
        found.append(f"pp {pp} * virtual stages {virtual} exceeds the {limits.num_pipeline_units} blocks of the model")
    if pins.schedule is not None:
        found += _schedule_violations(pins.schedule, pins)
    if virtual > 1 and pins.pp == 1:
        found.append(f"{virtual} virtual stages need pp > 1")
    return found


def _schedule_violations(schedule: ScheduleName, pins: Pins) -> list[str]:
    found: list[str] = []
    rules, virtual = schedule.rules, pins.virtual_stages
    if virtual is not None and rules.max_stages is not None and virtual > rules.max_stages:
        able = ", ".join(name for name, other in SCHEDULES.items() if other.max_stages is None)
        found.append(f"{virtual} virtual stages need one of the schedules {able}, not {schedule}")
    if virtual is not None and virtual < rules.min_stages:
        found.append(f"{schedule} needs at least {rules.min_stages} virtual stages, got {virtual}")
    if pins.pp == 1 and not rules.has_one_stage:
        found.append(f"{schedule} needs pp > 1")
    modes = [] if pins.recompute in (None, Recompute.NONE) else [pins.recompute.value]
    return [*found, *rules.conflicts(zero_stage=pins.zero, recomputation=modes)]


def _sharding_violations(training: Training, pins: Pins, limits: Limits) -> list[str]:
    found: list[str] = []
    if pins.zero is not None and pins.zero not in range(4):
        found.append(f"ZeRO stage must be 0, 1, 2 or 3, got {pins.zero}")
    if pins.sequence_parallel and pins.tp == 1:
        found.append("sequence parallelism needs tp > 1")
    able = [d for d in sorted(limits.sequence_degrees) if training.seq_len % (d * max(1, pins.cp or 1)) == 0]
    if pins.sequence_parallel and pins.tp and pins.tp > 1 and pins.tp not in able:
        found.append(
            f"tp={pins.tp} cannot split activations along the sequence of {training.seq_len} tokens; "
            f"degrees that can: {', '.join(map(str, able)) or 'none'}"
        )
    return found


def _layouts(training: Training, pins: Pins, limits: Limits) -> Columns[Layout]:
    """Every layout; those of one mesh serve for all meshes that allow the same."""
    alike: dict[tuple[object, ...], list[Mesh]] = defaultdict(list)
    for mesh in _meshes(training, pins, limits):
        zero_stages, flags = _zero_stages(mesh, pins), _sequence_parallel(training, pins, limits, mesh)
        alike[mesh.pp, mesh.dp, tuple(zero_stages), tuple(flags)].append(mesh)
    on_one = (Columns.of(Layout, _layouts_on(meshes[0], training, pins, limits)) for meshes in alike.values())
    parts = (layouts.with_each("mesh", meshes) for layouts, meshes in zip(on_one, alike.values(), strict=True))
    return Columns.joined([Columns.of(Layout, ()), *parts])


def _layouts_on(mesh: Mesh, training: Training, pins: Pins, limits: Limits) -> Iterator[Layout]:
    offload = pins.offload or Offload.NONE
    for zero in _zero_stages(mesh, pins):
        for micro, num_micro in _micro_batches(training, pins, mesh):
            for schedule, virtual in _schedules(pins, limits, mesh, num_micro):
                if schedule.rules.splits_backward and zero > 1:
                    continue
                for sequence_parallel in _sequence_parallel(training, pins, limits, mesh):
                    for recompute in _recomputations(pins, schedule):
                        yield Layout(
                            mesh, zero, micro, num_micro, schedule, virtual, recompute, sequence_parallel, offload
                        )


def _meshes(training: Training, pins: Pins, limits: Limits) -> Iterator[Mesh]:
    n = limits.num_devices
    for tp in _degrees(n, pins.tp, lambda d: d == 1 or (d in limits.tensor_degrees and d <= limits.devices_per_node)):
        for pp in _degrees(n // tp, pins.pp, lambda d: d <= limits.num_pipeline_units):
            for cp in _degrees(
                n // tp // pp,
                pins.cp,
                lambda d: d == 1 or (limits.context_splits and training.seq_len % d == 0 and d <= MAX_CONTEXT_PARALLEL),
            ):
                dp = n // tp // pp // cp
                if (pins.dp is not None and dp != pins.dp) or training.global_batch_size % dp:
                    continue
                for replicate in divisors(dp):
                    shard = dp // replicate
                    if pins.dp_replicate is None or replicate == pins.dp_replicate:
                        for ep in _degrees(gcd(shard * cp, limits.num_experts), pins.ep, lambda d: True):
                            yield Mesh(pp=pp, dp_replicate=replicate, dp_shard=shard, cp=cp, tp=tp, ep=ep)


def _degrees(n: int, pin: int | None, allowed: Callable[[int], bool]) -> list[int]:
    if pin is not None:
        return [pin] if n % pin == 0 else []
    return [d for d in divisors(n) if allowed(d)]


def _zero_stages(mesh: Mesh, pins: Pins) -> list[int]:
    """Sharding needs ranks to shard over."""
    stages = [0] if mesh.dp_shard == 1 else [1, 2, 3]
    if mesh.dp == 1 and pins.zero is not None:
        return [0]  # with one data-parallel rank every stage is the same
    return [stage for stage in stages if pins.zero in (None, stage)]


def _micro_batches(training: Training, pins: Pins, mesh: Mesh) -> list[tuple[int, int]]:
    per_rank = training.global_batch_size // mesh.dp
    sizes = [pins.micro_batch] if pins.micro_batch else divisors(per_rank)
    return [
        (size, per_rank // size)
        for size in sizes
        if per_rank % size == 0 and (size <= MAX_MICRO_BATCH_SIZE or pins.micro_batch)
    ]


def _schedules(pins: Pins, limits: Limits, mesh: Mesh, num_micro: int) -> list[tuple[ScheduleName, int]]:
    if mesh.pp == 1:
        is_possible = pins.virtual_stages in (None, 1) and (pins.schedule is None or pins.schedule.rules.has_one_stage)
        return [(pins.schedule or ScheduleName.ONE_F_ONE_B, 1)] if is_possible else []
    pp = mesh.pp
    most = min(pins.virtual_stages or MAX_VIRTUAL_STAGES, limits.num_pipeline_units // pp)
    return [
        (name, virtual)
        for name, rules in SCHEDULES.items()
        if pins.schedule is name or (pins.schedule is None and rules.in_torch)
        for virtual in range(rules.min_stages, min(most, rules.max_stages or most) + 1)
        if pins.virtual_stages in (None, virtual) and not rules.violations(pp, virtual, num_micro)
    ]


def _recomputations(pins: Pins, schedule: ScheduleName) -> list[Recompute]:
    """A backward pass that is split would recompute again for every group of weights."""
    if schedule.rules.splits_backward:
        return [Recompute.NONE] if pins.recompute in (None, Recompute.NONE) else []
    return [pins.recompute] if pins.recompute else list(Recompute)


def _sequence_parallel(training: Training, pins: Pins, limits: Limits, mesh: Mesh) -> list[bool]:
    possible = [False]
    if mesh.tp in limits.sequence_degrees and training.seq_len % (mesh.tp * mesh.cp) == 0:
        possible.append(True)
    return [flag for flag in possible if pins.sequence_parallel in (None, flag)]
