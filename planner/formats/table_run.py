"""A row of a table of runs as a whole layout and a model's shape, as any other config is read."""

from __future__ import annotations

import re

from costmodels.vocabulary.choices import ContextMethod, Offload, Optimizer, Precision
from costmodels.vocabulary.mesh import Mesh
from costmodels.vocabulary.schedules import ScheduleName
from planner.formats.run_table import Architecture, Run, UnpriceableRunError
from planner.formats.settings import Layout
from planner.models.config import FamilyConfig, MlpType

# By the names of the table's column, without spaces, hyphens and what stands in brackets. Any other name is a schedule
# of its own, which has no price.
SCHEDULES = {
    "zb2p": ScheduleName.ZB_2P,
    "zb1p": ScheduleName.INTERLEAVED_ZERO_BUBBLE,
    "zbv": ScheduleName.ZBV_ZERO_BUBBLE,
    "interleaved1f1b": ScheduleName.INTERLEAVED_1F1B,
    "1f1b": ScheduleName.ONE_F_ONE_B,
    "gpipe": ScheduleName.GPIPE,
    "afab": ScheduleName.GPIPE,
    "none": ScheduleName.ONE_F_ONE_B,
}


def check_split(run: Run) -> None:
    """UnpriceableRunError where the degrees of ``run`` do not make its GPUs and its batch, or states are offloaded."""
    layout = run.layout
    world = layout.dp * layout.tp * layout.pp * layout.cp
    if world != run.hardware.num_devices:
        raise UnpriceableRunError(f"dp*tp*pp*cp = {world}, but the row has {run.hardware.num_devices} GPUs")
    if layout.offload != "none":
        raise UnpriceableRunError(f"offload to {layout.offload} is not priced")
    if layout.global_batch_size % (layout.dp * layout.micro_batch_size):
        raise UnpriceableRunError(
            f"dp {layout.dp} * micro-batch {layout.micro_batch_size} does not divide {layout.global_batch_size}"
        )


def layout_of(run: Run) -> Layout:
    """How ``run`` was split; UnpriceableRunError where that does not add up, or is not priced."""
    layout = run.layout
    check_split(run)
    mesh = mesh_of(run)
    microbatches = layout.global_batch_size // (layout.dp * layout.micro_batch_size)
    schedule = schedule_of(layout.schedule if layout.pp > 1 else "none")
    if schedule is ScheduleName.ONE_F_ONE_B and 0 < microbatches < layout.pp:
        schedule = ScheduleName.GPIPE  # fewer micro-batches than stages: all forwards come first anyway
    return Layout(
        num_devices=run.hardware.num_devices,
        pp=mesh.pp,
        dp_replicate=mesh.dp_replicate,
        dp_shard=mesh.dp_shard,
        cp=mesh.cp,
        tp=mesh.tp,
        ep=mesh.ep,
        etp=mesh.etp,
        zero_stage=layout.zero_stage if mesh.dp_shard * mesh.cp > 1 else 0,
        micro_batch_size=layout.micro_batch_size,
        num_microbatches=microbatches,
        global_batch_size=layout.global_batch_size,
        seq_len=run.architecture.seq_len,
        precision=precision_of(run.precision),
        optimizer=Optimizer.ADAMW,
        schedule=schedule,
        virtual_stages=layout.virtual_stages if layout.pp > 1 else 1,
        stage_blocks=run.software.stage_layers or None,
        recompute=layout.recompute,
        sequence_parallel=layout.sequence_parallel,
        offload=Offload.NONE,
        cp_method=ContextMethod.ALL_GATHER,
    )


def shape_of(architecture: Architecture, dropout: float = 0.0) -> FamilyConfig:
    """The member of the family builder with this shape: gated models as Llama, plain ones as GPT."""
    try:
        mlp = MlpType(architecture.mlp_type)
    except ValueError as error:
        raise UnpriceableRunError(f"mlp_type {architecture.mlp_type!r} is none of {', '.join(MlpType)}") from error
    return FamilyConfig(
        family="moe" if architecture.experts else ("llama" if mlp.is_gated else "gpt"),
        layers=architecture.layers,
        hidden=architecture.hidden,
        heads=architecture.heads,
        kv_heads=architecture.kv_heads,
        head_dim=architecture.head_dim,
        ffn=architecture.ffn,
        vocab=architecture.vocab,
        seq_len=architecture.seq_len,
        mlp=mlp,
        tied=architecture.is_tied,
        dropout=dropout,
        experts=architecture.experts or None,
        top_k=architecture.top_k or None,
        expert_ffn=architecture.expert_ffn or None,
    )


def mesh_of(run: Run) -> Mesh:
    """The degrees of ``run``; UnpriceableRunError where shards or experts do not divide its ranks.

    Experts are split over the tensor-parallel ranks unless the row says otherwise, or the data-parallel ranks alone
    cannot hold them: they are whole on a rank then, and lie across its tensor-parallel ranks, too.
    """
    layout = run.layout
    shard = min(layout.dp, layout.shard_size or (run.hardware.devices_per_node if layout.shards_in_node else layout.dp))
    if layout.zero_stage == 0:
        shard = layout.dp if layout.ep > 1 else 1  # nothing is sharded, but experts lie among these ranks
    if layout.dp % shard:
        raise UnpriceableRunError(f"shards of {shard} do not divide the {layout.dp} data-parallel ranks")
    ranks, etp = shard * layout.cp, None
    if layout.etp not in (None, 1, layout.tp):
        raise UnpriceableRunError(f"etp {layout.etp} is neither 1 nor tp = {layout.tp}")
    is_told_whole = layout.etp == 1 and min(layout.tp, layout.ep) > 1
    if is_told_whole or (layout.etp is None and ranks % layout.ep and layout.sequence_parallel):
        ranks, etp = ranks * layout.tp, 1
    if ranks % layout.ep:
        raise UnpriceableRunError(f"ep {layout.ep} does not divide the {ranks} ranks that shard")
    return Mesh(layout.pp, layout.dp // shard, shard, layout.cp, layout.tp, layout.ep, etp)


def schedule_of(name: str) -> ScheduleName:
    """The schedule of that name in the table; UnpriceableRunError where there is none."""
    found = SCHEDULES.get(re.sub(r"\(.*\)|[\s-]", "", name.lower()))
    if found is None:
        raise UnpriceableRunError(f"schedule {name!r} is not priced")
    return found


def precision_of(name: str) -> Precision:
    """The precision of that name in the table, however scales of 8 bits are found; UnpriceableRunError for others."""
    try:
        return Precision.FP8 if "fp8" in name else Precision(name)
    except ValueError as error:
        raise UnpriceableRunError(f"precision {name!r} is not priced") from error
