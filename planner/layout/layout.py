"""A layout: everything that is chosen of a plan but its stages, what each block recomputes, and placements.

And what it is chosen for and within: the training, the user's pins, the limits of model and cluster.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, NamedTuple, get_args, get_type_hints

from costmodels.vocabulary.choices import ContextMethod, Offload, Optimizer, Precision, Recompute
from costmodels.vocabulary.mesh import Mesh
from costmodels.vocabulary.schedules import ScheduleName


@dataclass(frozen=True)
class Training:
    """What is trained with; the global batch is in sequences."""

    global_batch_size: int
    seq_len: int
    precision: Precision
    optimizer: Optimizer


@dataclass(frozen=True)
class Pins:
    """Choices fixed by the user; None leaves a layout to the solver. ``dp`` is dp_replicate * dp_shard."""

    tp: int | None = None
    pp: int | None = None
    dp: int | None = None
    cp: int | None = None
    zero: int | None = None
    micro_batch: int | None = None
    schedule: ScheduleName | None = None
    virtual_stages: int | None = None
    recompute: Recompute | None = None
    sequence_parallel: bool | None = None
    dp_replicate: int | None = None
    ep: int | None = None
    etp: int | None = None  # tensor-parallel degree of experts: tp, or 1
    offload: Offload | None = None  # None: states stay on the devices
    cp_method: ContextMethod | None = None
    offload_activations: bool | None = None  # True: each block may keep its own in host memory; None: as False

    def describe(self) -> str:
        """``tp=4, pp=2`` for messages."""
        given = ((f.name, getattr(self, f.name)) for f in fields(self))
        return ", ".join(f"{name}={value}" for name, value in given if value is not None)

    def given(self) -> dict[str, int | bool | str]:
        """The choices that are fixed, by name."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        return {name: value for name, value in values.items() if value is not None}

    @staticmethod
    def parsed(text: str) -> Pins:
        """``tp=4,pp=2,sequence-parallel=off``; TypeError or ValueError where it fixes no choices."""
        given: dict[str, int | bool | str] = {}
        words = {"on": True, "true": True, "off": False, "false": False}
        for part in text.split(","):
            name, _, value = (each.strip() for each in part.partition("="))
            name = name.replace("-", "_")
            if name in given:
                raise ValueError(f"{name} is given twice")
            number = int(value) if value.isascii() and value.isdigit() else value
            given[name] = words.get(value.lower(), number)
        return Pins.of(given)

    @staticmethod
    def of(given: Mapping[str, int | bool | str]) -> Pins:
        """The pins that ``given`` names; TypeError or ValueError where it names none, or none of its choices."""
        words = {
            "schedule": ScheduleName, "recompute": Recompute, "offload": Offload, "cp_method": ContextMethod,
        }  # fmt: skip
        values: dict[str, Any] = {name: words[name](v) if name in words else v for name, v in given.items()}
        kinds = get_type_hints(Pins)
        unknown = [repr(name) for name in values if name not in kinds]
        if unknown:
            raise TypeError(f"{', '.join(unknown)} is no choice")
        wrong = [name for name, v in values.items() if type(v) not in get_args(kinds[name])]
        if wrong:
            raise TypeError(", ".join(f"{name}={values[name]!r} is none of its choices" for name in wrong))
        return Pins(**values)


NO_PINS = Pins()


class Layout(NamedTuple):
    """Everything that is chosen but the borders of stages, what each block recomputes, and the placements."""

    mesh: Mesh
    zero_stage: int
    micro_batch_size: int
    num_microbatches: int
    schedule: ScheduleName
    virtual_stages: int
    recompute: Recompute | None  # of every block; None: each block has its own, chosen with the borders of the stages
    sequence_parallel: bool
    offload: Offload = Offload.NONE
    groups: tuple[str, ...] = ()  # groups of unlike devices in the order of the ranks; empty: all count as alike
    cp_method: ContextMethod = ContextMethod.ALL_GATHER  # without context parallelism it says nothing
    offloads_activations: bool = False  # every block may keep its activations in host memory
    # Without a pipeline the micro-batch size of the replicas on each of ``groups`` where they have shares of the batch,
    # of which ``micro_batch_size`` is the largest.
    shares: tuple[int, ...] = ()

    @property
    def has_alike_stages(self) -> bool:
        """Whether stages hold nearly as many blocks each: where a rank has several, and its devices are as the others'.

        Several of unlike sizes make every round of micro-batches wait for the longest.
        """
        return self.virtual_stages > 1 and not self.groups

    @property
    def parts(self) -> tuple[Layout, ...]:
        """The replicas on each group alone, where they have shares of the batch; otherwise the layout itself."""
        if not self.shares:
            return (self,)
        pairs = zip(self.groups, self.shares, strict=True)
        return tuple(self._replace(groups=(name,), micro_batch_size=size, shares=()) for name, size in pairs)

    @property
    def is_plain_fsdp(self) -> bool:
        """Fully sharded data parallelism over all devices and nothing else."""
        mesh = self.mesh
        is_sharded = mesh.dp_shard == mesh.world_size and mesh.dp_replicate == mesh.ep == 1
        return self.zero_stage == 3 and is_sharded and self.offload is Offload.NONE


@dataclass(frozen=True)
class Limits:
    """What the model and the cluster allow."""

    num_devices: int
    devices_per_node: int
    num_pipeline_units: int  # most stages the model can be cut into
    tensor_degrees: frozenset[int]  # degrees that split at least one parameter
    sequence_degrees: frozenset[int]  # of those, degrees at which activations between blocks split along the sequence
    context_splits: bool  # attention is the only operator that mixes positions
    # Tensor-parallel degrees beside which experts may be whole on a rank.
    whole_expert_degrees: frozenset[int] = frozenset()
    num_experts: int = 1  # what divides it divides the experts of every layer
    expert_counts: tuple[int, ...] = ()  # numbers of experts of the layers that have any
    offers_pipelines: bool = True  # where they are not pinned, too
    num_heads: int = 1  # what divides it divides the heads of queries, keys and values of every attention
    cp_methods: tuple[ContextMethod, ...] = tuple(ContextMethod)  # that the framework has
