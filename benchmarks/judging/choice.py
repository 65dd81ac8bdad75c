"""Everything that a plan chooses as one value, read from plan.json and written back to it as a user would edit it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import gcd
from typing import Any, NamedTuple

from benchmarks.judging.estimate import Document
from costmodels.vocabulary import choices as vocabulary
from costmodels.vocabulary.choices import Recompute
from costmodels.vocabulary.schedules import ScheduleName
from hardware_profiles.schema import ClusterSpec
from planner.graph.model_graph import ModelGraph
from planner.layout.layout import Pins

# Ways of context parallelism, by their names in a plan; the first stands where there is none.
METHODS: tuple[str, ...] = tuple(map(str, getattr(vocabulary, "ContextMethod", ()))) or ("all-gather",)

# (tp, pp, sequence parallel) -> the section ``placements`` of a plan; None where operators cannot be placed so.
Placements = Callable[[int, int, bool], "dict[str, Any] | None"]


class Share(NamedTuple):
    """What the replicas on one group of unlike devices take of a batch: sequences in each micro-batch."""

    group: str
    replicas: int
    size: int


class Choice(NamedTuple):
    """A plan without its names. ``starts``: first unit of each stage; ``modes``: recomputation of each unit."""

    pp: int
    dp_replicate: int
    dp_shard: int
    cp: int
    tp: int
    ep: int
    zero_stage: int
    micro_batch_size: int
    schedule: ScheduleName
    virtual_stages: int
    sequence_parallel: bool
    starts: tuple[int, ...]
    modes: tuple[Recompute, ...]
    groups: tuple[str | None, ...] = ()  # of each pipeline rank, where devices differ; empty: all count as alike
    cp_method: str = METHODS[0]
    shares: tuple[Share, ...] = ()  # in the order of ranks, where replicas differ; ``micro_batch_size`` is the largest

    @property
    def dp(self) -> int:
        """How many ranks train on different sequences."""
        return self.dp_replicate * self.dp_shard

    @property
    def world_size(self) -> int:
        """Devices."""
        return self.pp * self.dp * self.cp * self.tp

    @property
    def num_stages(self) -> int:
        """Over all ranks."""
        return self.pp * self.virtual_stages

    def __str__(self) -> str:
        degrees = {name: getattr(self, name) for name in ("pp", "dp_replicate", "dp_shard", "cp", "tp", "ep")}
        words = [f"{name} {degree}" for name, degree in degrees.items() if degree > 1] or ["one GPU"]
        words += [f"ZeRO {self.zero_stage}", f"micro-batch {self.micro_batch_size}"]
        if self.pp > 1:
            words += [f"{self.schedule.value} x{self.virtual_stages}", f"cut {','.join(map(str, self.starts))}"]
        words += ["SP"] if self.sequence_parallel else []
        words += [f"cp by {self.cp_method}"] if self.cp > 1 else []
        counts = {mode: self.modes.count(mode) for mode in (Recompute.SELECTIVE, Recompute.FULL) if mode in self.modes}
        words += [f"{count} blocks {mode.value}" for mode, count in counts.items()]
        if self.groups:
            words.append("over " + ",".join(map(str, self.groups)))
        words += [f"{share.size} on each of {share.replicas} replicas on {share.group}" for share in self.shares]
        return " ".join(words)


@dataclass(frozen=True)
class Facts:
    """What model, batch and cluster allow. Units are the pieces that a stage holds whole, in the model's order."""

    modules: tuple[tuple[str, ...], ...]  # of each unit
    blocks: tuple[str | None, ...]  # name of each unit that is a repeated block, None for what stands around them
    global_batch_size: int
    seq_len: int
    num_devices: int
    devices_per_node: int
    num_experts: int = 1
    groups: tuple[tuple[str, int], ...] = ()  # name and devices of each, where devices differ

    @staticmethod
    def of(graph: ModelGraph, global_batch_size: int, cluster: ClusterSpec) -> Facts:
        """Of a traced model. Experts: parameters of three dims, whose first one counts them."""
        mixed = cluster.mixed
        units = graph.units
        experts = [parameter.shape[0] for parameter in graph.parameters if len(parameter.shape) == 3]
        return Facts(
            modules=tuple(tuple(unit.modules) for unit in units),
            blocks=tuple(unit.name if unit.is_block else None for unit in units),
            global_batch_size=global_batch_size,
            seq_len=graph.seq_len,
            num_devices=cluster.num_devices,
            devices_per_node=cluster.devices_per_node,
            num_experts=gcd(*experts) or 1,
            groups=() if mixed is None else tuple((each.name, each.cluster.num_devices) for each in mixed.groups),
        )

    @property
    def num_units(self) -> int:
        """Pieces that stages can be cut into."""
        return len(self.modules)

    def num_microbatches(self, choice: Choice) -> int:
        """Of each data-parallel rank; 0 where the batch does not divide."""
        each = choice.dp * choice.micro_batch_size
        if choice.shares:
            each = sum(share.replicas * share.size for share in choice.shares)
        return 0 if self.global_batch_size % each else self.global_batch_size // each

    def modes(self, mode: Recompute) -> tuple[Recompute, ...]:
        """One mode for every block; other units recompute nothing."""
        return tuple(Recompute.NONE if block is None else mode for block in self.blocks)


def is_legal(choice: Choice, facts: Facts) -> bool:
    """Whether the numbers agree with each other and the schedule can run them: the rules of plan.json."""
    m, rules = facts.num_microbatches(choice), choice.schedule.rules
    recomputed = {mode.value for mode in choice.modes if mode is not Recompute.NONE}
    if choice.pp == 1:
        runs = choice.virtual_stages == 1 and rules.has_one_stage
    else:
        runs = not rules.violations(choice.pp, choice.virtual_stages, m)
        runs = runs and not rules.conflicts(zero_stage=choice.zero_stage, recomputation=recomputed)
    inside = choice.dp_shard * choice.cp
    sharded = inside > 1 if choice.zero_stage else choice.dp_shard == 1
    split = facts.seq_len % (choice.cp * (choice.tp if choice.sequence_parallel else 1)) == 0
    experts = inside % choice.ep == 0 and facts.num_experts % choice.ep == 0
    parallel = (choice.tp > 1 or not choice.sequence_parallel) and (choice.cp > 1 or choice.cp_method == METHODS[0])
    cut = len(choice.starts) == choice.num_stages and _is_cut(choice.starts, facts.num_units)
    fits_node = choice.tp <= facts.devices_per_node
    runs = runs and _shares_are_legal(choice)
    return m > 0 and runs and sharded and split and experts and parallel and cut and fits_node


def _shares_are_legal(choice: Choice) -> bool:
    """Whole replicas on every group, and no border between groups through ranks that share experts."""
    if not choice.shares:
        return True
    ends = accumulate(share.replicas for share in choice.shares)
    apart = not any(end * choice.cp % choice.ep for end in ends)
    whole = sum(share.replicas for share in choice.shares) == choice.dp and all(s.size > 0 for s in choice.shares)
    return apart and whole and choice.pp == 1 and choice.micro_batch_size == max(s.size for s in choice.shares)


def obeys(choice: Choice, pins: Pins, facts: Facts) -> bool:
    """Whether ``choice`` is what the user pinned."""
    pinned: Mapping[str, object] = {
        "tp": choice.tp, "pp": choice.pp, "dp": choice.dp, "cp": choice.cp, "ep": choice.ep,
        "dp_replicate": choice.dp_replicate, "micro_batch": choice.micro_batch_size,
        "sequence_parallel": choice.sequence_parallel, "virtual_stages": choice.virtual_stages,
        "zero": choice.zero_stage,
    }  # fmt: skip
    if choice.shares and pins.micro_batch is not None:
        return False
    if any(getattr(pins, name) not in (None, value) for name, value in pinned.items()):
        return False
    if choice.cp > 1 and getattr(pins, "cp_method", None) not in (None, choice.cp_method):
        return False
    # Without a pipeline all plain schedules are the same.
    runs_as_pinned = choice.pp == 1 and (pins.schedule is None or pins.schedule.rules.has_one_stage)
    if pins.schedule not in (None, choice.schedule) and not runs_as_pinned:
        return False
    return pins.recompute is None or choice.modes == facts.modes(pins.recompute)


def read_choice(document: Document, facts: Facts) -> Choice:
    """What ``document`` chooses."""
    mesh, pipeline = document["mesh"], document["pipeline"]
    stage_of = {module: stage["index"] for stage in pipeline["stages"] for module in stage["modules"]}
    stages = [stage_of[modules[0]] if len(pipeline["stages"]) > 1 else 0 for modules in facts.modules]
    mode_of = {module: Recompute(rule["mode"]) for rule in document["recompute"] for module in rule["modules"]}
    group_of = {stage["pp_rank"]: stage["device_group"] for stage in pipeline["stages"]}
    groups = tuple(group_of[rank] for rank in sorted(group_of))
    return Choice(
        **{name: mesh[name] for name in ("pp", "dp_replicate", "dp_shard", "cp", "tp", "ep")},
        zero_stage=document["zero_stage"],
        micro_batch_size=pipeline["micro_batch_size"],
        schedule=ScheduleName(pipeline["schedule"]),
        virtual_stages=pipeline["virtual_stages"],
        sequence_parallel=document["placements"]["sequence_parallel"],
        starts=tuple(stages.index(stage) for stage in range(len(pipeline["stages"]))),
        modes=tuple(Recompute.NONE if name is None else mode_of.get(name, Recompute.NONE) for name in facts.blocks),
        groups=groups if any(groups) else (),
        cp_method=document.get("cp_method", METHODS[0]) if mesh["cp"] > 1 else METHODS[0],
        shares=tuple(
            Share(each["device_group"], each["num_replicas"], each["micro_batch_size"])
            for each in pipeline.get("batch_shares", ())
        ),
    )


def written(choice: Choice, document: Document, facts: Facts, placements: Placements) -> Document | None:
    """``document`` with the choices of ``choice``; None where operators cannot be placed on its tensor ranks."""
    before = document["mesh"]["tp"], document["placements"]["sequence_parallel"]
    placed: dict[str, Any] | None = document["placements"]
    if before != (choice.tp, choice.sequence_parallel):
        placed = placements(choice.tp, choice.pp, choice.sequence_parallel)
    if placed is None:
        return None
    names = [(mode, [b for b, m in zip(facts.blocks, choice.modes, strict=True) if b and m is mode]) for mode in
             (Recompute.SELECTIVE, Recompute.FULL)]  # fmt: skip
    return {
        **document,
        **({"cp_method": choice.cp_method} if "cp_method" in document else {}),
        "mesh": {name: getattr(choice, name) for name in ("pp", "dp_replicate", "dp_shard", "cp", "tp", "ep")},
        "num_devices": choice.world_size,
        "zero_stage": choice.zero_stage,
        "placements": placed,
        "recompute": [{"mode": mode.value, "modules": blocks} for mode, blocks in names if blocks],
        "pipeline": {
            "schedule": choice.schedule.value,
            "num_microbatches": facts.num_microbatches(choice),
            "micro_batch_size": choice.micro_batch_size,
            "virtual_stages": choice.virtual_stages,
            "stages": _stages(choice, facts),
            **({"batch_shares": [_share(each) for each in choice.shares]} if choice.shares else {}),
        },
    }


def _share(share: Share) -> dict[str, Any]:
    return {"device_group": share.group, "num_replicas": share.replicas, "micro_batch_size": share.size}


def _stages(choice: Choice, facts: Facts) -> list[dict[str, Any]]:
    ends = (*choice.starts[1:], facts.num_units)
    found: list[dict[str, Any]] = []
    for index, (start, end) in enumerate(zip(choice.starts, ends, strict=True)):
        rank = choice.schedule.rules.rank_of(index, choice.pp)
        modules = [module for unit in facts.modules[start:end] for module in unit]
        group = choice.groups[rank] if choice.groups else None
        found.append({"index": index, "pp_rank": rank, "modules": modules, "device_group": group})
    return found


def _is_cut(starts: Sequence[int], num_units: int) -> bool:
    pairs = zip(starts, (*starts[1:], num_units), strict=True)
    return starts[0] == 0 and all(start < end for start, end in pairs)
