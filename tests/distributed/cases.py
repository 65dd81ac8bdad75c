"""Plans for four ranks that the distributed tests train with."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

from costmodels.vocabulary.choices import ContextMethod, Offload, Optimizer, Precision, Recompute
from costmodels.vocabulary.schedules import ScheduleName
from planner.plan.plan_file import PLAN_FILE
from planner.plan.schema import (
    BatchShare,
    MeshSection,
    ModelSection,
    ModulePlacement,
    PipelineSection,
    PlacementSection,
    Plan,
    RecomputeRule,
    StageSection,
    TrainingSection,
)
from tests.distributed.toy_models import MODELS, SEQ_LEN, ToyModel

WORLD_SIZE = 4
GLOBAL_BATCH_SIZE = 16


@dataclass(frozen=True)
class Case:
    """A model and a plan, in short."""

    model: str
    mesh: MeshSection
    zero_stage: int = 0
    schedule: ScheduleName = ScheduleName.ONE_F_ONE_B
    virtual_stages: int = 1
    sequence_parallel: bool = False
    recompute: Recompute = Recompute.NONE
    micro_batch_size: int = 1
    optimizer: Optimizer = Optimizer.SGD
    precision: Precision = Precision.FP32
    stage_input: str = "replicate"
    cp_method: ContextMethod = ContextMethod.ALL_GATHER
    block_modes: tuple[Recompute, ...] = ()  # of each block, where they differ
    on_host: int = 0  # the first blocks whose activations lie in host memory
    is_compiled: bool = False
    offload: Offload = Offload.NONE
    shares: tuple[int, ...] = ()  # micro-batch sizes of groups of as many replicas each, where they differ
    loss: str = "weighed"
    minimal_placements: bool = False  # column and row parallel layers and the embedding; not its tied head

    def plan(self) -> Plan:
        """The whole plan."""
        toy = MODELS[self.model]
        shares = self._shares()
        sequences = sum(share.num_replicas * share.micro_batch_size for share in shares)
        return Plan(
            model=ModelSection(source=self.model, digest="", num_params=0),
            hardware="cpu-gloo",
            num_devices=WORLD_SIZE,
            training=TrainingSection(
                global_batch_size=GLOBAL_BATCH_SIZE, seq_len=SEQ_LEN, precision=self.precision, optimizer=self.optimizer
            ),
            mesh=self.mesh,
            zero_stage=self.zero_stage,
            pipeline=PipelineSection(
                schedule=self.schedule,
                num_microbatches=GLOBAL_BATCH_SIZE // (sequences or self.mesh.shape().dp * self.micro_batch_size),
                micro_batch_size=max(self.shares, default=self.micro_batch_size),
                batch_shares=shares,
                virtual_stages=self.virtual_stages,
                stages=_stages(toy, self.mesh.pp, self.virtual_stages, self.schedule),
            ),
            placements=PlacementSection(
                tp=self._placements(toy) if self.mesh.tp > 1 else (),
                sequence_parallel=self.sequence_parallel,
                stage_input=self.stage_input,
                sharded_units=(*toy.before, *toy.blocks, *toy.after),
                experts=toy.experts if self.mesh.ep > 1 else (),
            ),
            recompute=self._rules(toy),
            offloaded_activations=toy.blocks[: self.on_host],
            cp_method=self.cp_method,
            offload=self.offload,
        )

    def _shares(self) -> tuple[BatchShare, ...]:
        """One group of replicas for each size."""
        return tuple(
            BatchShare(
                device_group=f"group {place}",
                num_replicas=self.mesh.shape().dp // len(self.shares),
                micro_batch_size=size,
            )
            for place, size in enumerate(self.shares)
        )

    def _rules(self, toy: ToyModel) -> tuple[RecomputeRule, ...]:
        modes = self.block_modes or (self.recompute,) * len(toy.blocks)
        of_each = {mode: tuple(b for b, m in zip(toy.blocks, modes, strict=True) if m is mode) for mode in Recompute}
        return tuple(
            RecomputeRule(mode=mode, modules=blocks)
            for mode, blocks in of_each.items()
            if blocks and mode is not Recompute.NONE
        )

    def _placements(self, toy: ToyModel) -> tuple[ModulePlacement, ...]:
        entries = toy.placements(self.sequence_parallel)
        if not self.minimal_placements:
            return entries
        return tuple(e for e in entries if (".*" in e.module and e.parameters) or e.module == toy.before[0])


def _stages(toy: ToyModel, pp: int, virtual_stages: int, schedule: ScheduleName) -> tuple[StageSection, ...]:
    count = pp * virtual_stages
    size = len(toy.blocks) // count
    modules = [list(toy.blocks[index * size : (index + 1) * size]) for index in range(count)]
    modules[0] = [*toy.before, *modules[0]]
    modules[-1] += toy.after
    return tuple(
        StageSection(index=i, pp_rank=schedule.rules.rank_of(i, pp), modules=tuple(names))
        for i, names in enumerate(modules)
    )


_DP4 = MeshSection(dp_shard=4)
_TP4 = MeshSection(tp=4)
_DP2_TP2 = MeshSection(dp_shard=2, tp=2)
_PP2_DP2 = MeshSection(pp=2, dp_shard=2)
_PP2_TP2 = MeshSection(pp=2, tp=2)
_INTERLEAVED = ScheduleName.INTERLEAVED_1F1B
_ZERO_BUBBLE = ScheduleName.INTERLEAVED_ZERO_BUBBLE
_ZBV = ScheduleName.ZBV_ZERO_BUBBLE
_DUAL_PIPE_V = ScheduleName.DUAL_PIPE_V
_CP2_DP2, _CP2_TP2, _PP2_CP2 = MeshSection(dp_shard=2, cp=2), MeshSection(cp=2, tp=2), MeshSection(pp=2, cp=2)
_GATHER, _RING, _HEADS = ContextMethod.ALL_GATHER, ContextMethod.RING, ContextMethod.ALL_TO_ALL
_MODES = (Recompute.FULL, Recompute.SELECTIVE, Recompute.NONE, Recompute.FULL)

# Every schedule beside data parallelism, tied and not, is in the layouts of benchmarks.parity_matrix as well: here are
# those that meet other dimensions, attention or modules that are unusual.
CASES = {
    "dp4-zero0": Case("gpt", MeshSection(dp_replicate=4)),
    **{f"dp4-zero{stage}": Case("gpt", _DP4, stage) for stage in (1, 2, 3)},
    **{f"dp4-zero{stage}-tied": Case("gpt-tied", _DP4, stage, micro_batch_size=2) for stage in (1, 3)},
    "hsdp-2x2-zero1": Case("gpt", MeshSection(dp_replicate=2, dp_shard=2), 1),
    "hsdp-2x2-zero2": Case("llama", MeshSection(dp_replicate=2, dp_shard=2), 2),
    "hsdp-2x2-zero3": Case("unusual", MeshSection(dp_replicate=2, dp_shard=2), 3),
    "tp4-llama": Case("llama", MeshSection(tp=4), micro_batch_size=4),
    "tp4-gpt-tied": Case("gpt-tied", MeshSection(tp=4), micro_batch_size=4),
    "tp4-sp-llama": Case("llama", MeshSection(tp=4), sequence_parallel=True, micro_batch_size=4),
    "tp4-encoder": Case("encoder", _TP4, micro_batch_size=4),
    "pp2-tp2-sp-encoder": Case("encoder", _PP2_TP2, sequence_parallel=True, micro_batch_size=4),
    "tp4-of-log-probabilities": Case("gpt", _TP4, loss="of log-probabilities", micro_batch_size=4),
    "pp2-tp2-of-log-probabilities": Case("llama", _PP2_TP2, loss="of log-probabilities", micro_batch_size=4),
    "tp2-dp2-zero0": Case("gpt", MeshSection(dp_replicate=2, tp=2), micro_batch_size=2),
    "tp2-dp2-zero1-sp": Case("llama", _DP2_TP2, 1, sequence_parallel=True, micro_batch_size=2),
    "tp2-dp2-zero2-unusual": Case("unusual", _DP2_TP2, 2, micro_batch_size=4),
    "tp2-dp2-zero3-sp-gpt-tied": Case("gpt-tied", _DP2_TP2, 3, sequence_parallel=True, micro_batch_size=4),
    "tp2-dp2-sp-full-recompute": Case(
        "llama", _DP2_TP2, 1, sequence_parallel=True, recompute=Recompute.FULL, micro_batch_size=4
    ),
    "tp2-dp2-sp-selective-recompute": Case(
        "llama", _DP2_TP2, 3, sequence_parallel=True, recompute=Recompute.SELECTIVE, micro_batch_size=4
    ),
    "dp4-full-recompute": Case("gpt", _DP4, 3, recompute=Recompute.FULL),
    "dp4-selective-recompute": Case("llama", _DP4, 2, recompute=Recompute.SELECTIVE),
    "dp4-zero3-on-host": Case("gpt", _DP4, 3, on_host=2),
    "tp2-dp2-sp-on-host": Case("llama", _DP2_TP2, 3, sequence_parallel=True, on_host=4, micro_batch_size=4),
    "tp2-dp2-sp-selective-on-host": Case(
        "llama", _DP2_TP2, 1, sequence_parallel=True, recompute=Recompute.SELECTIVE, on_host=4, micro_batch_size=4
    ),
    "pp2-dp2-full-on-host": Case("gpt-tied", _PP2_DP2, 1, recompute=Recompute.FULL, on_host=2, micro_batch_size=2),
    "dp2-hsdp-zero0-states-on-host": Case("gpt-tied", MeshSection(dp_replicate=4), offload=Offload.CPU),
    "tp2-dp2-sp-zero1-states-on-host": Case(
        "llama", _DP2_TP2, 1, sequence_parallel=True, micro_batch_size=4, offload=Offload.CPU
    ),
    "pp2-dp2-zero2-tied-states-on-host": Case("gpt-tied", _PP2_DP2, 2, micro_batch_size=2, offload=Offload.CPU),
    "dp4-ep2-zero3-states-on-host": Case(
        "mixture", MeshSection(dp_shard=4, ep=2), 3, micro_batch_size=2, offload=Offload.CPU
    ),
    "cp2-hsdp-zero3-states-on-host": Case(
        "llama", MeshSection(dp_replicate=2, cp=2), 3, micro_batch_size=4, offload=Offload.CPU
    ),
    **{f"pp2-dp2-zero{stage}": Case("llama", _PP2_DP2, stage, micro_batch_size=2) for stage in (1, 3)},
    "pp2-dp2-tied": Case("gpt-tied", _PP2_DP2, 3, micro_batch_size=2),
    "pp2-dp2-looked-at-on-one-rank": Case("gpt-looked-at", _PP2_DP2, 1, micro_batch_size=4),
    "pp2-dp2-misdeclared-on-one-stage": Case("gpt-misdeclared", _PP2_DP2, 3, micro_batch_size=4),
    "pp2-dp2-full-recompute": Case("gpt-tied", _PP2_DP2, 1, recompute=Recompute.FULL, micro_batch_size=2),
    "pp2-dp2-hooked": Case("gpt-hooked", _PP2_DP2, 1, micro_batch_size=4),
    "pp2-dp2-unusual": Case("unusual", _PP2_DP2, 1, micro_batch_size=2),
    "dp4-zero3-routed": Case("routed", _DP4, 3),
    "tp2-dp2-routed": Case("routed", _DP2_TP2, 1, micro_batch_size=4),
    "tp2-dp2-mixture": Case("mixture", _DP2_TP2, 1, micro_batch_size=4),
    "tp4-sp-mixture": Case("mixture", _TP4, sequence_parallel=True, micro_batch_size=4),
    "pp2-dp2-mixture": Case("mixture", _PP2_DP2, 1, micro_batch_size=4),
    "pp2-dp2-routed": Case("routed", _PP2_DP2, 1),
    "pp2-dp2-interleaved-tied": Case("gpt-tied", _PP2_DP2, 1, _INTERLEAVED, 2, micro_batch_size=2),
    "pp2-tp2": Case("gpt", _PP2_TP2, micro_batch_size=4),
    "pp2-tp2-tied": Case("gpt-tied", _PP2_TP2, micro_batch_size=4),
    "pp2-tp2-unusual": Case("unusual", _PP2_TP2, micro_batch_size=4),
    "pp2-tp2-sp": Case("llama", _PP2_TP2, sequence_parallel=True, micro_batch_size=4, stage_input="shard(1)"),
    "pp2-tp2-interleaved-sp": Case(
        "llama", _PP2_TP2, 0, _INTERLEAVED, 2, sequence_parallel=True, micro_batch_size=4, stage_input="shard(1)"
    ),
    "pp2-tp2-zero-bubble": Case("gpt", _PP2_TP2, 0, _ZERO_BUBBLE, 2, micro_batch_size=4),
    "pp2-dp2-zbv-tied": Case("gpt-tied", MeshSection(pp=2, dp_replicate=2), 0, _ZBV, 2),
    "pp2-tp2-zbv-sp": Case(
        "llama", _PP2_TP2, 0, _ZBV, 2, sequence_parallel=True, micro_batch_size=2, stage_input="shard(1)"
    ),
    "pp2-dp2-zbv-unusual": Case("unusual", _PP2_DP2, 1, _ZBV, 2),
    "pp2-dp2-dual-pipe-v-tied": Case("gpt-tied", _PP2_DP2, 1, _DUAL_PIPE_V, 2),
    "tp4-minimal-llama": Case("llama", _TP4, micro_batch_size=4, minimal_placements=True),
    "tp2-dp2-minimal-unusual": Case("unusual", _DP2_TP2, 1, micro_batch_size=4, minimal_placements=True),
    "pp2-tp2-minimal-gpt-tied": Case("gpt-tied", _PP2_TP2, micro_batch_size=4, minimal_placements=True),
    "pp4": Case("llama", MeshSection(pp=4), micro_batch_size=4),
    "pp4-unusual": Case("unusual", MeshSection(pp=4), micro_batch_size=4),
    "cp4-gather-gpt-zero0": Case("gpt", MeshSection(cp=4), micro_batch_size=4),
    "cp4-ring-llama-zero3": Case("llama", MeshSection(cp=4), 3, cp_method=_RING, micro_batch_size=4),
    "cp4-heads-gpt-tied-zero2": Case("gpt-tied", MeshSection(cp=4), 2, cp_method=_HEADS, micro_batch_size=4),
    "cp2-hsdp-gather-mixture-zero1": Case("mixture", MeshSection(dp_replicate=2, cp=2), 1, micro_batch_size=4),
    "cp2-dp2-heads-llama-full": Case("llama", _CP2_DP2, 3, recompute=Recompute.FULL, cp_method=_HEADS),
    "cp2-dp2-ring-gpt-modes": Case("gpt", _CP2_DP2, 1, cp_method=_RING, block_modes=_MODES, micro_batch_size=4),
    "cp2-tp2-ring-llama-sp": Case("llama", _CP2_TP2, 1, sequence_parallel=True, cp_method=_RING, micro_batch_size=4),
    "cp2-tp2-gather-gpt-selective": Case("gpt", _CP2_TP2, recompute=Recompute.SELECTIVE, micro_batch_size=8),
    "cp2-dp2-ring-llama-checkpointing": Case("llama-checkpointing", _CP2_DP2, 1, cp_method=_RING, micro_batch_size=4),
    "cp2-dp2-ep2-mixture-checkpointing": Case(
        "mixture-checkpointing", MeshSection(dp_shard=2, cp=2, ep=2), 1, micro_batch_size=4
    ),
    "pp2-cp2-llama-checkpointing-full": Case(
        "llama-checkpointing", _PP2_CP2, recompute=Recompute.FULL, micro_batch_size=4
    ),
    "pp2-cp2-gather-llama-zero3": Case("llama", _PP2_CP2, 3, micro_batch_size=4),
    "pp2-cp2-heads-gpt-tied": Case("gpt-tied", _PP2_CP2, 1, cp_method=_HEADS, micro_batch_size=4),
    "pp2-cp2-ring-zero-bubble": Case("llama", _PP2_CP2, 1, _ZERO_BUBBLE, 2, cp_method=_RING, micro_batch_size=4),
    **{
        f"dp4-ep{ep}-zero{stage}": Case("mixture", MeshSection(dp_shard=4, ep=ep), stage, micro_batch_size=2)
        for ep, stage in ((2, 1), (2, 2), (2, 3), (4, 1), (4, 3))
    },
    "dp4-ep2-starved": Case("mixture-starved", MeshSection(dp_shard=4, ep=2), 3),
    "dp4-ep4-starved-one-microbatch": Case("mixture-starved", MeshSection(dp_shard=4, ep=4), 1, micro_batch_size=4),
    "hsdp-2x2-ep2-zero1": Case("mixture", MeshSection(dp_replicate=2, dp_shard=2, ep=2), 1, micro_batch_size=2),
    "hsdp-2x2-ep2-zero3-full": Case(
        "mixture", MeshSection(dp_replicate=2, dp_shard=2, ep=2), 3, recompute=Recompute.FULL, micro_batch_size=4
    ),
    "dp4-ep2-selective": Case(
        "mixture-starved", MeshSection(dp_shard=4, ep=2), 2, recompute=Recompute.SELECTIVE, micro_batch_size=2
    ),
    "cp2-hsdp-ep2-zero0": Case("mixture", MeshSection(dp_replicate=2, cp=2, ep=2), 0, micro_batch_size=4),
    "cp2-dp2-ep2-zero1": Case("mixture-starved", MeshSection(dp_shard=2, cp=2, ep=2), 1, micro_batch_size=4),
    "cp4-ep2-zero0": Case("mixture-starved", MeshSection(cp=4, ep=2), 0, micro_batch_size=4),
    "cp2-dp2-ep4-ring-zero3": Case(
        "mixture", MeshSection(dp_shard=2, cp=2, ep=4), 3, cp_method=_RING, micro_batch_size=4
    ),
    "pp2-dp2-ep2-zero1": Case("mixture", MeshSection(pp=2, dp_shard=2, ep=2), 1, micro_batch_size=2),
    "pp2-dp2-ep2-interleaved-zero3": Case(
        "mixture", MeshSection(pp=2, dp_shard=2, ep=2), 3, _INTERLEAVED, 2, micro_batch_size=4
    ),
    "pp2-dp2-ep2-zero-bubble": Case(
        "mixture-starved", MeshSection(pp=2, dp_shard=2, ep=2), 1, _ZERO_BUBBLE, 2, micro_batch_size=2
    ),
    "tp2-dp2-ep2-zero1": Case("mixture", MeshSection(dp_shard=2, tp=2, ep=2), 1, micro_batch_size=4),
    "tp2-dp2-ep2-sp-zero3-full": Case(
        "mixture-starved",
        MeshSection(dp_shard=2, tp=2, ep=2),
        3,
        sequence_parallel=True,
        recompute=Recompute.FULL,
        micro_batch_size=4,
    ),
    "tp2-cp2-ep2-zero0": Case("mixture", MeshSection(cp=2, tp=2, ep=2), 0, micro_batch_size=8),
    "dp4-ep2-zero3-mixtral": Case("mixtral", MeshSection(dp_shard=4, ep=2), 3, micro_batch_size=2),
    "tp2-dp2-sinks": Case("gpt-oss", _DP2_TP2, 1, recompute=Recompute.SELECTIVE, micro_batch_size=4),
    "cp2-dp2-sinks-zero3": Case("gpt-oss", _CP2_DP2, 3, micro_batch_size=4),
    "cp4-sinks-ring-full": Case(
        "gpt-oss", MeshSection(cp=4), recompute=Recompute.FULL, cp_method=_RING, micro_batch_size=8
    ),
    "cp2-dp2-sinks-heads": Case("gpt-oss", _CP2_DP2, 1, cp_method=_HEADS, micro_batch_size=4),
    "cp2-tp2-sinks": Case("gpt-oss", _CP2_TP2, micro_batch_size=8),
    "dp4-ep2-on-host": Case("mixture", MeshSection(dp_shard=4, ep=2), 3, on_host=2, micro_batch_size=4),
    "pp2-dp2-modes": Case("llama", _PP2_DP2, 1, block_modes=_MODES, micro_batch_size=4),
    "shares-zero0": Case("gpt", MeshSection(dp_replicate=4), shares=(1, 3)),
    **{f"shares-zero{stage}": Case("gpt-tied", _DP4, stage, shares=(3, 1)) for stage in (1, 2, 3)},
    "shares-hsdp-zero2": Case("llama", MeshSection(dp_replicate=2, dp_shard=2), 2, shares=(1, 3)),
    "shares-of-four": Case("llama", _DP4, 3, recompute=Recompute.FULL, shares=(5, 1, 8, 2)),
    "shares-tp2-dp2": Case("llama", _DP2_TP2, 1, sequence_parallel=True, shares=(1, 3)),
    "shares-cp2-dp2": Case("gpt", _CP2_DP2, 3, cp_method=_RING, shares=(3, 1)),
    "shares-ep2-zero1": Case("mixture", MeshSection(dp_shard=4, ep=2), 1, shares=(1, 3)),
    "dp4-zero3-compiled-full": Case("gpt", _DP4, 3, recompute=Recompute.FULL, micro_batch_size=4, is_compiled=True),
    "tp2-dp2-compiled": Case("gpt", _DP2_TP2, 1, micro_batch_size=8, is_compiled=True),
    "pp2-dp2-compiled": Case("gpt-tied", _PP2_DP2, 1, micro_batch_size=4, is_compiled=True),
}

NUM_LEARNING_STEPS = 25
NUM_HALF_PRECISION_STEPS = 4  # DTensor's bookkeeping makes a step of these slow on a shared CPU
LEARNING_CASES = {
    "pp2-dp2-learns": Case("gpt-tied", _PP2_DP2, 1, micro_batch_size=2, optimizer=Optimizer.ADAMW),
    "tp2-dp2-sp-bf16": Case(
        "llama",
        _DP2_TP2,
        3,
        sequence_parallel=True,
        recompute=Recompute.SELECTIVE,
        micro_batch_size=4,
        optimizer=Optimizer.ADAMW,
        precision=Precision.BF16,
    ),
    "dp4-ep2-bf16": Case(
        "mixture",
        MeshSection(dp_shard=4, ep=2),
        3,
        recompute=Recompute.SELECTIVE,
        micro_batch_size=4,
        optimizer=Optimizer.ADAMW,
        precision=Precision.BF16,
    ),
    "pp2-dp2-zbv-bf16": Case(
        "llama", _PP2_DP2, 1, _ZBV, 2, optimizer=Optimizer.ADAMW, precision=Precision.BF16, micro_batch_size=2
    ),
}
# One step in bf16 beside one process in float32.
HALF_PRECISION_CASES = {
    name: Case("gpt", mesh, stage, schedule, stages, micro_batch_size=2, precision=Precision.BF16)
    for name, mesh, stage, schedule, stages in (
        ("bf16-pp2-dp2-zbv-zero1", _PP2_DP2, 1, _ZBV, 2),
        ("bf16-pp2-dp2-zero0", MeshSection(pp=2, dp_replicate=2), 0, ScheduleName.ONE_F_ONE_B, 1),
        ("bf16-dp4-zero1", _DP4, 1, ScheduleName.ONE_F_ONE_B, 1),
    )
}
COUNTED_CASES = {
    "count-zero0": Case("llama", MeshSection(dp_replicate=4)),
    **{f"count-zero{stage}": Case("llama", _DP4, stage) for stage in (1, 2, 3)},
    "count-hsdp-zero2": Case("llama", MeshSection(dp_replicate=2, dp_shard=2), 2),
    "count-ep": Case("mixture", MeshSection(dp_shard=4, ep=2), 1, micro_batch_size=4),
    "count-ep-hsdp": Case("mixture", MeshSection(dp_replicate=2, dp_shard=2, ep=2), 2),
    "count-pp-zero3": Case("llama", _PP2_DP2, 3, micro_batch_size=2),
    "count-tp": Case("llama", _TP4, micro_batch_size=16),
    "count-tp-full": Case("llama", _TP4, recompute=Recompute.FULL, micro_batch_size=16),
    "count-sp": Case("llama", _TP4, sequence_parallel=True, micro_batch_size=16),
    "count-sp-selective": Case(
        "llama", _TP4, sequence_parallel=True, recompute=Recompute.SELECTIVE, micro_batch_size=16
    ),
    "count-sp-full": Case("llama", _TP4, sequence_parallel=True, recompute=Recompute.FULL, micro_batch_size=16),
}
# Two calls before an update: tied parameters and divided experts, whose gradients are worked on once they are there.
TWICE_CASES = {
    "twice-zero0": Case("gpt", MeshSection(dp_replicate=4)),
    "twice-zero3": Case("gpt-tied", _DP4, 3),
    "twice-pp-tied": Case("gpt-tied", _PP2_DP2, 1, micro_batch_size=2),
    "twice-ep": Case("mixture", MeshSection(dp_shard=4, ep=2), 1, micro_batch_size=4),
}
FROZEN_CASES = {"frozen-pp-tied": Case("gpt-tied", _PP2_DP2, 1, micro_batch_size=2)}
# Experts that no token reaches on any rank, and others that some reach on some ranks.
STARVED_CASES = {
    "starved-zero0": Case("routed-starved", MeshSection(dp_replicate=4)),
    **{f"starved-zero{stage}": Case("routed-starved", _DP4, stage) for stage in (1, 2, 3)},
    "starved-hsdp": Case("routed-starved", MeshSection(dp_replicate=2, dp_shard=2), 2, micro_batch_size=2),
    "starved-full": Case("routed-starved", _DP4, 3, recompute=Recompute.FULL),
    "starved-pp-zbv": Case("routed-starved", _PP2_DP2, 1, _ZBV, 2, micro_batch_size=2),
    "starved-pp-zbv-whole": Case("routed-starved", MeshSection(pp=2, dp_replicate=2), 0, _ZBV, 2, micro_batch_size=2),
}

DROPOUT_CASES = {
    "dropout-dp4": Case("gpt-dropout", _DP4, 1, micro_batch_size=2),
    "dropout-pp4": Case("gpt-dropout", MeshSection(pp=4), micro_batch_size=4),
    "dropout-tp2-dp2": Case("gpt-dropout", _DP2_TP2, 1, micro_batch_size=8),
    "dropout-tp2-dp2-sp": Case("gpt-dropout", _DP2_TP2, 1, sequence_parallel=True, micro_batch_size=8),
    "dropout-tp2-dp2-sp-full": Case(
        "gpt-dropout", _DP2_TP2, 1, sequence_parallel=True, recompute=Recompute.FULL, micro_batch_size=8
    ),
    "dropout-shares": Case("gpt-dropout", _DP4, 2, shares=(1, 3)),
    "dropout-dp4-full": Case("gpt-dropout", _DP4, 3, recompute=Recompute.FULL, micro_batch_size=2),
}


_ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = _ROOT / "examples" / "plans" / "gpt-tiny-pp2-dp2.json"


def coupled_plan() -> Plan:
    """Data parallelism over a model whose samples see each other."""
    plan, file = Case("gpt", _DP4).plan(), _ROOT / "tests" / "fixtures" / "coupled.py"
    files = {file.name: hashlib.sha256(file.read_bytes()).hexdigest()}
    return plan.model_copy(
        update={
            "model": ModelSection(source=str(file), digest="", num_params=0, files=files),
            "zero_stage": 1,
            "pipeline": plan.pipeline.model_copy(
                update={"stages": (StageSection(index=0, pp_rank=0, modules=("embedding", "head")),)}
            ),
            "placements": PlacementSection(sharded_units=("embedding", "head")),
        }
    )


def shares_plan() -> Plan:
    """The example without a pipeline, with unlike shares of the batch."""
    plan = PLAN_FILE.read(EXAMPLE)
    modules = tuple(module for stage in plan.pipeline.stages for module in stage.modules)
    shares = tuple(
        BatchShare(device_group=name, num_replicas=2, micro_batch_size=size)
        for name, size in (("one", 1), ("other", 3))
    )
    pipeline = plan.pipeline.model_copy(
        update={
            "stages": (StageSection(index=0, pp_rank=0, modules=modules),),
            "num_microbatches": 2,
            "micro_batch_size": 3,
            "batch_shares": shares,
        }
    )
    return plan.model_copy(update={"mesh": _DP4, "zero_stage": 2, "pipeline": pipeline})


def _journey(model: str) -> tuple[Case, ...]:
    """Layouts that one run passes through, a checkpoint between each and the next."""
    adamw = Optimizer.ADAMW
    return (
        Case(model, _DP4, 3, optimizer=adamw),
        Case(model, _PP2_DP2, 1, _ZBV, 2, optimizer=adamw, offload=Offload.NVME),
        Case(model, _DP2_TP2, 2, sequence_parallel=True, micro_batch_size=4, optimizer=adamw),
        Case(model, MeshSection(pp=4), micro_batch_size=4, optimizer=adamw),
        Case(model, _PP2_TP2, micro_batch_size=4, optimizer=adamw),
        Case(model, _DP2_TP2, 3, shares=(1, 3), optimizer=adamw),
        Case(model, MeshSection(dp_replicate=2, dp_shard=2), 1, optimizer=adamw, offload=Offload.CPU),
    )


def _journey_of_experts() -> tuple[Case, ...]:
    """Experts are whole, divided over two ranks, over four, in a pipeline, and whole again."""
    adamw = Optimizer.ADAMW
    return (
        Case("mixture", _DP4, 3, micro_batch_size=2, optimizer=adamw),
        Case("mixture", MeshSection(dp_shard=4, ep=2), 3, micro_batch_size=2, optimizer=adamw),
        Case("mixture", MeshSection(pp=2, dp_shard=2, ep=2), 1, micro_batch_size=4, optimizer=adamw),
        Case("mixture", MeshSection(dp_shard=4, ep=4), 2, micro_batch_size=2, optimizer=adamw, offload=Offload.NVME),
        Case("mixture", MeshSection(dp_replicate=2, dp_shard=2, ep=2), 1, micro_batch_size=4, optimizer=adamw),
        Case("mixture", _DP2_TP2, 1, micro_batch_size=4, optimizer=adamw),
    )


JOURNEYS = {
    "journey-gpt-tied": _journey("gpt-tied"),
    "journey-unusual": _journey("unusual")[:3],
    "journey-mixture": _journey_of_experts(),
}
CLIP_NORM = 0.5  # below the norm of every step of a journey

MEASUREMENTS = ("parity-equal", "parity-shares", "parity-coupled", "verify", "verify-shares")
