"""From what a config says to a whole layout: what it leaves out is asked for or assumed, and said."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

from costmodels.vocabulary.choices import ContextMethod, Offload, Optimizer, Precision, Recompute
from costmodels.vocabulary.schedules import ScheduleName
from planner.errors import InputError
from planner.formats.settings import Layout, Settings

_Value = TypeVar("_Value")


@dataclass(frozen=True)
class Given:
    """What the user says beside the config; it counts before the config. None: not said."""

    num_devices: int | None = None
    seq_len: int | None = None
    global_batch_size: int | None = None
    micro_batch_size: int | None = None
    precision: Precision | None = None
    optimizer: Optimizer | None = None
    recompute: Recompute | None = None


def completed(settings: Settings, given: Given, default_seq_len: int | None) -> tuple[Layout, tuple[str, ...]]:
    """The whole layout, and what was assumed; InputError names what must be given."""
    notes: list[str] = []
    pp, cp, tp = (max(1, degree or 1) for degree in (settings.pp, settings.cp, settings.tp))
    zero = settings.zero_stage or 0
    devices = given.num_devices or settings.num_devices
    if devices is None or devices < 1:
        raise InputError("the config does not say how many GPUs it runs on", hint="give --gpus N")
    replicate, shard = _data(settings, devices, (pp * cp * tp, zero), notes)
    micro, microbatches, batch = _batches(settings, given, replicate * shard, notes)
    seq_len = given.seq_len or settings.seq_len or default_seq_len
    if seq_len is None:
        raise InputError("the config does not say how long sequences are", hint="give --seq-len S")
    if given.seq_len is None and settings.seq_len is None:
        notes.append(f"sequences of {seq_len} tokens, the model's own: give --seq-len for others")
    schedule = settings.schedule if settings.schedule and pp > 1 else ScheduleName.ONE_F_ONE_B
    if schedule is ScheduleName.ONE_F_ONE_B and pp > 1 and microbatches < pp:
        schedule = ScheduleName.GPIPE
        notes.append(f"{microbatches} micro-batches do not fill {pp} stages: priced as GPipe, all forwards first")
    layout = Layout(
        num_devices=devices, pp=pp, dp_replicate=replicate, dp_shard=shard, cp=cp, tp=tp, ep=settings.ep or 1,
        zero_stage=zero if shard * cp > 1 else 0,
        micro_batch_size=micro, num_microbatches=microbatches, global_batch_size=batch, seq_len=seq_len,
        precision=given.precision or _assumed(settings.precision, Precision.BF16, "precision", notes),
        optimizer=given.optimizer or _assumed(settings.optimizer, Optimizer.ADAMW, "optimiser", notes),
        schedule=schedule, virtual_stages=(settings.virtual_stages or 1) if pp > 1 else 1,
        stage_blocks=settings.stage_blocks,
        recompute=given.recompute or _assumed(settings.recompute, Recompute.NONE, "recomputation", notes),
        sequence_parallel=bool(settings.sequence_parallel) and tp > 1,
        offload=settings.offload or Offload.NONE, cp_method=settings.cp_method or ContextMethod.ALL_GATHER,
        etp=None if settings.etp == tp else settings.etp, end_blocks=settings.end_blocks,
    )  # fmt: skip
    return layout, tuple(notes)


def _assumed(said: _Value | None, otherwise: _Value, what: str, notes: list[str]) -> _Value:
    if said is not None:
        return said
    notes.append(f"{what} {otherwise} is assumed: the config does not say it")
    return otherwise


def _data(settings: Settings, devices: int, others: tuple[int, int], notes: list[str]) -> tuple[int, int]:
    """Replicas and shards: what tensor, pipeline and context parallelism leave, sharded where ZeRO shards."""
    model, zero = others
    if devices % model:
        raise InputError(
            f"{devices} GPUs are no multiple of tp * pp * cp = {model}", hint="give --gpus with a multiple of it"
        )
    dp = devices // model
    replicate, shard = settings.dp_replicate, settings.dp_shard
    if replicate is not None and shard is not None and replicate * shard != dp:
        notes.append(f"{devices} GPUs are others than the config's {replicate * shard * model}: dp is {dp}")
        replicate, shard = (replicate, None) if zero else (None, shard)
    if replicate is None and shard is None:
        replicate, shard = (1, dp) if zero else (dp, 1)
    known = replicate if shard is None else shard
    assert known is not None
    if known < 1 or dp % known:
        raise InputError(f"dp {dp} is no multiple of {known}", hint="give another --gpus, or correct the config")
    return (known, dp // known) if shard is None else (dp // known, known)


def _batches(settings: Settings, given: Given, dp: int, notes: list[str]) -> tuple[int, int, int]:
    """Micro-batch, micro-batches and global batch; the global batch is kept where the GPUs are others."""
    micro = given.micro_batch_size or settings.micro_batch_size
    batch = given.global_batch_size or settings.global_batch_size
    microbatches = settings.num_microbatches
    if micro is None:
        micro = batch // (dp * microbatches) if batch and microbatches else 1
        if not (batch and microbatches):
            notes.append("micro-batches of one sequence are assumed: give --micro-batch for others")
    if batch is None:
        if microbatches is None:
            raise InputError("the config does not say the global batch", hint="give --global-batch SEQUENCES")
        batch = dp * max(1, micro) * microbatches
    if micro < 1 or batch < 1 or batch % (dp * micro):
        raise InputError(
            f"dp {dp} * micro-batch {micro} does not divide the global batch of {batch} sequences",
            hint="give another --gpus, --global-batch or --micro-batch",
        )
    if microbatches is not None and dp * micro * microbatches != batch:
        notes.append(f"{batch // (dp * micro)} micro-batches in place of {microbatches}: the global batch is kept")
    return micro, batch // (dp * micro), batch
