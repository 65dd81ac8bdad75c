"""Plans of any layout for the presets, made without pricing: what exporters are tried on."""

from dataclasses import dataclass
from functools import cache
from itertools import accumulate
from math import prod
from typing import Any

from costmodels.vocabulary.choices import ContextMethod, Offload, Optimizer, Precision, Recompute
from costmodels.vocabulary.schedules import ScheduleName
from planner.formats.settings import Job, layout_of
from planner.models.catalog import find_preset
from planner.models.config import FamilyConfig
from planner.plan.checks import contradictions
from planner.plan.schema import (
    MeshSection,
    ModelSection,
    PipelineSection,
    PlacementSection,
    Plan,
    RecomputeRule,
    StageSection,
    TrainingSection,
)


@dataclass(frozen=True)
class Wanted:
    """A layout in few words. ``recompute`` is of all blocks, or one mode for each."""

    model: str = "llama3-8b"
    pp: int = 1
    dp_replicate: int = 1
    dp_shard: int = 1
    cp: int = 1
    tp: int = 1
    ep: int = 1
    etp: int | None = None
    zero: int = 0
    micro_batch: int = 1
    microbatches: int = 8
    seq_len: int = 4096
    precision: Precision = Precision.BF16
    optimizer: Optimizer = Optimizer.ADAMW
    schedule: ScheduleName = ScheduleName.ONE_F_ONE_B
    virtual_stages: int = 1
    stage_blocks: tuple[int, ...] | None = None
    recompute: Recompute | tuple[Recompute, ...] = Recompute.NONE
    sequence_parallel: bool = False
    offload: Offload = Offload.NONE
    cp_method: ContextMethod = ContextMethod.ALL_GATHER
    device_group: str | None = None
    hardware: str = "dgx-h100-80gb"

    def plan(self) -> Plan:
        """The plan, which keeps all rules of plans."""
        shape = preset(self.model)
        num_blocks, num_stages = shape.layers, self.pp * self.virtual_stages
        sizes = self.stage_blocks or even(num_blocks, num_stages)
        assert sum(sizes) == num_blocks
        modes = (self.recompute,) * num_blocks if isinstance(self.recompute, Recompute) else self.recompute
        names = [f"layers.{i}" for i in range(num_blocks)]
        plan = Plan(
            model=ModelSection(source=self.model, digest="", num_params=shape.num_params),
            hardware=self.hardware,
            num_devices=prod((self.pp, self.dp_replicate, self.dp_shard, self.cp, self.tp)),
            training=TrainingSection(
                global_batch_size=self.dp_replicate * self.dp_shard * self.microbatches * self.micro_batch,
                seq_len=self.seq_len,
                precision=self.precision,
                optimizer=self.optimizer,
            ),
            mesh=MeshSection(
                pp=self.pp,
                dp_replicate=self.dp_replicate,
                dp_shard=self.dp_shard,
                cp=self.cp,
                tp=self.tp,
                ep=self.ep,
                etp=self.etp,
            ),
            zero_stage=self.zero,
            pipeline=PipelineSection(
                schedule=self.schedule,
                num_microbatches=self.microbatches,
                micro_batch_size=self.micro_batch,
                virtual_stages=self.virtual_stages,
                stages=self._stages(names, sizes),
            ),
            placements=PlacementSection(sequence_parallel=self.sequence_parallel),
            recompute=tuple(
                RecomputeRule(mode=mode, modules=tuple(n for n, own in zip(names, modes, strict=True) if own is mode))
                for mode in (Recompute.SELECTIVE, Recompute.FULL)
                if mode in modes
            ),
            offload=self.offload,
            cp_method=self.cp_method,
        )
        assert not contradictions(plan), contradictions(plan)
        return plan

    def _stages(self, names: list[str], sizes: tuple[int, ...]) -> tuple[StageSection, ...]:
        ends = list(accumulate(sizes))
        blocks = [names[end - size : end] for end, size in zip(ends, sizes, strict=True)]
        blocks[0] = ["embedding", *blocks[0]]
        blocks[-1] = [*blocks[-1], "norm", "head"]
        return tuple(
            StageSection(
                index=index,
                pp_rank=self.schedule.rules.rank_of(index, self.pp),
                modules=tuple(modules),
                device_group=self.device_group,
            )
            for index, modules in enumerate(blocks)
        )


@cache
def preset(name: str) -> FamilyConfig:
    """The shape of a preset."""
    found = find_preset(name)
    assert found is not None
    return found.config


def even(num_blocks: int, num_stages: int) -> tuple[int, ...]:
    """As equal as can be, the first ones larger."""
    return tuple(num_blocks // num_stages + (index < num_blocks % num_stages) for index in range(num_stages))


def job(wanted: Wanted | None = None, **changes: Any) -> Job:
    """What is exported, on nodes of eight H100."""
    plan = (wanted or Wanted(**changes)).plan()
    shape = preset(plan.model.source)
    return Job(plan, layout_of(plan), shape, plan.model.source, "plans/plan.json", 8, "H100-SXM5-80GB")
