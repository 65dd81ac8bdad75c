"""For every target unlike plans that it can express, and plans that it cannot, with a word of the reason."""

from typing import Any

from costmodels.vocabulary.choices import ContextMethod, Offload, Optimizer, Precision, Recompute
from costmodels.vocabulary.schedules import ScheduleName
from tests.unit.planner.formats.plans import Wanted

NONE, SELECTIVE, FULL = Recompute.NONE, Recompute.SELECTIVE, Recompute.FULL
RING, ALL_TO_ALL = ContextMethod.RING, ContextMethod.ALL_TO_ALL
FIRST_TWO = ((FULL,) * 2 + (NONE,) * 6) * 4  # of each of four stages of eight blocks
MIXED = (FULL,) * 3 + (NONE,) * 29
INTERLEAVED: dict[str, Any] = {"schedule": ScheduleName.INTERLEAVED_1F1B, "virtual_stages": 2}
GPIPE: dict[str, Any] = {"schedule": ScheduleName.GPIPE}
ZBV: dict[str, Any] = {"schedule": ScheduleName.ZBV_ZERO_BUBBLE, "virtual_stages": 2}
DUAL: dict[str, Any] = {"schedule": ScheduleName.DUAL_PIPE_V, "virtual_stages": 2}
ZB_2P: dict[str, Any] = {"schedule": ScheduleName.ZB_2P}
SPLIT: dict[str, Any] = {"schedule": ScheduleName.INTERLEAVED_ZERO_BUBBLE, "virtual_stages": 2}

_MEGATRON_TAKES = [
    Wanted(dp_replicate=8, microbatches=4),
    Wanted("gpt3-1.3b", pp=4, dp_shard=2, tp=2, zero=1, sequence_parallel=True, recompute=FULL, seq_len=2048),
    Wanted(pp=4, dp_shard=4, zero=1, stage_blocks=(7, 9, 9, 7), recompute=SELECTIVE),
    Wanted("llama2-70b", pp=4, dp_shard=2, tp=8, zero=1, sequence_parallel=True, **INTERLEAVED),
    Wanted("mixtral-8x7b", dp_shard=4, cp=2, ep=4, zero=3, cp_method=RING),
    Wanted("deepseek-v3", pp=4, dp_shard=8, ep=8, zero=1, stage_blocks=(15, 15, 16, 15)),
    Wanted(pp=4, dp_replicate=2, dp_shard=2, zero=1, recompute=FIRST_TWO, optimizer=Optimizer.SGD),
    Wanted(dp_shard=8, zero=1, offload=Offload.CPU, precision=Precision.FP8, microbatches=3),
    Wanted(tp=8, sequence_parallel=True, offload=Offload.CPU),
    Wanted("mixtral-8x7b", dp_shard=4, tp=2, ep=8, etp=1, zero=1, sequence_parallel=True),
    Wanted(dp_shard=4, zero=1, optimizer=Optimizer.SGD_MOMENTUM),
]
_MEGATRON_REFUSES = [
    (Wanted(pp=2, **GPIPE), "schedule GPipe"),
    (Wanted(pp=2, **ZBV), "schedule ZBVZeroBubble"),
    (Wanted(pp=2, **DUAL), "schedule DualPipeV"),
    (Wanted(pp=2, **SPLIT), "schedule InterleavedZeroBubble"),
    (Wanted(pp=2, **ZB_2P), "schedule ZB-2P"),
    (Wanted(dp_shard=8, zero=1, optimizer=Optimizer.ADAM), "optimiser adam "),
    (Wanted(dp_shard=8, zero=3, offload=Offload.NVME), "offload of optimiser states nvme"),
    (Wanted(dp_shard=8, zero=3, offload=Offload.CPU), "not with Megatron-FSDP"),
    (Wanted(dp_replicate=8, offload=Offload.CPU), "the plan has ZeRO 0"),
    (Wanted(dp_shard=8, zero=1, offload=Offload.CPU, optimizer=Optimizer.SGD), "for Adam alone"),
    (Wanted(pp=2, dp_shard=4, zero=3), "not run under a pipeline"),
    (Wanted("mixtral-8x7b", dp_shard=4, tp=2, ep=4, zero=1), "need sequence parallelism"),
    (Wanted(pp=4, dp_shard=2, zero=1, recompute=MIXED), "same number of blocks"),
    (Wanted(pp=2, dp_shard=4, zero=1, recompute=(SELECTIVE,) * 16 + (NONE,) * 16), "same number of blocks"),
    (Wanted(dp_shard=12, zero=1), "no whole nodes"),
    (Wanted(pp=2, device_group="a100"), "unlike devices"),
]
_LAUNCHERS_TAKE = [
    Wanted(dp_shard=8, zero=3),
    Wanted(dp_shard=4, zero=2),
    Wanted(pp=2, dp_replicate=8, recompute=MIXED),
    Wanted("gpt3-1.3b", pp=4, dp_shard=4, zero=1, tp=2, stage_blocks=(5, 6, 7, 6), seq_len=2048, **GPIPE),
    Wanted("llama2-70b", pp=4, dp_shard=2, tp=8, zero=1, sequence_parallel=True, **INTERLEAVED),
    Wanted(dp_shard=8, cp=4, zero=3, cp_method=ALL_TO_ALL, precision=Precision.FP32),
    Wanted(dp_shard=8, zero=1, offload=Offload.CPU),
]
_LAUNCHERS_REFUSE = [
    (Wanted("mixtral-8x7b", dp_shard=8, ep=4, zero=3), "expert parallelism"),
    (Wanted(dp_shard=8, zero=3, offload=Offload.NVME), "states that the plan keeps on NVMe"),
    (Wanted(dp_shard=8, zero=1, offload=Offload.NVME, precision=Precision.FP16), "precision = fp16"),
    (Wanted(dp_shard=8, zero=3, precision=Precision.FP16), "precision = fp16"),
    (Wanted(dp_shard=8, zero=3, precision=Precision.FP8), "precision = fp8"),
    (Wanted(pp=4, dp_shard=2, zero=1, **ZB_2P), "ZB-2P"),
    (Wanted(pp=2, dp_replicate=4, device_group="a100"), "unlike devices"),
    (Wanted(dp_shard=12, zero=3), "no whole nodes"),
    (Wanted(pp=3, dp_replicate=5, stage_blocks=(11, 11, 10)), "no whole nodes"),
    (Wanted(dp_shard=2, cp=4, zero=3, seq_len=4100), "does not divide the 4100 tokens"),
]
_LAUNCHERS = ("torchrun", "slurm", "kubernetes", "kubernetes-pytorchjob", "skypilot")

ACCEPTED: dict[str, list[Wanted]] = {
    "megatron": _MEGATRON_TAKES,
    "nemo": _MEGATRON_TAKES,
    "torchtitan": [
        Wanted(dp_shard=8, zero=3, recompute=SELECTIVE, microbatches=4),
        Wanted(dp_replicate=2, dp_shard=8, zero=2, precision=Precision.FP8),
        Wanted(dp_replicate=8, optimizer=Optimizer.ADAM),
        Wanted("llama3-405b", pp=8, dp_shard=2, tp=8, zero=1, sequence_parallel=True, recompute=FULL, microbatches=16,
               stage_blocks=(15, 16, 16, 16, 16, 16, 16, 15)),
        Wanted("llama3-70b", pp=4, dp_shard=8, zero=3, **INTERLEAVED),
        Wanted(pp=4, dp_shard=4, zero=1, **ZBV),
        Wanted(dp_shard=4, cp=2, tp=2, zero=3, sequence_parallel=True, cp_method=RING),
        Wanted("qwen3-30b-a3b", dp_shard=8, tp=2, ep=8, zero=3, sequence_parallel=True, precision=Precision.FP32),
        Wanted("deepseek-v3", pp=4, dp_shard=8, ep=8, zero=1, **DUAL),
    ],
    "deepspeed": [
        Wanted(dp_replicate=8),
        Wanted(dp_shard=8, zero=1, offload=Offload.CPU, optimizer=Optimizer.ADAM),
        Wanted(dp_shard=16, zero=2, precision=Precision.FP16, recompute=FULL),
        Wanted(dp_shard=8, zero=3, offload=Offload.NVME, micro_batch=2, microbatches=3),
        Wanted(dp_replicate=2, dp_shard=8, zero=3, optimizer=Optimizer.SGD),
        Wanted(dp_shard=4, cp=4, zero=3, cp_method=ALL_TO_ALL),
        Wanted(dp_shard=4, tp=4, zero=2, precision=Precision.FP32),
        Wanted("mixtral-8x7b", dp_shard=8, ep=4, zero=2),
        Wanted(dp_shard=4, zero=2, optimizer=Optimizer.SGD_MOMENTUM),
    ],
    "accelerate": [
        Wanted(dp_replicate=16),
        Wanted(dp_shard=8, zero=3, recompute=FULL),
        Wanted(dp_shard=16, zero=2, precision=Precision.FP16),
        Wanted(dp_replicate=2, dp_shard=4, tp=2, zero=3),
        Wanted(dp_shard=2, cp=4, zero=3, cp_method=RING, optimizer=Optimizer.SGD),
        Wanted(dp_replicate=2, dp_shard=4, zero=2),
        Wanted(tp=8),
        Wanted(dp_shard=8, zero=3, precision=Precision.FP8),
    ],
    "nanotron": [
        Wanted(dp_shard=8, zero=1),
        Wanted(dp_replicate=4, tp=2, sequence_parallel=True, recompute=FULL, microbatches=2),
        Wanted("llama2-7b", pp=2, dp_shard=8, tp=2, zero=1, stage_blocks=(17, 15)),
        Wanted("llama2-13b", pp=2, dp_replicate=4, stage_blocks=(21, 19), **GPIPE),
        Wanted(dp_replicate=2, cp=4, cp_method=RING),
        Wanted(dp_shard=4, zero=1, precision=Precision.FP32, optimizer=Optimizer.SGD),
    ],
    "maxtext": [
        Wanted(dp_shard=8, zero=3, recompute=FULL),
        Wanted(dp_shard=16, zero=1, recompute=SELECTIVE, offload=Offload.CPU),
        Wanted("gpt3-13b", dp_replicate=4, dp_shard=4, tp=2, zero=3, seq_len=2048),
        Wanted("llama2-70b", pp=4, dp_shard=2, tp=8, zero=3, sequence_parallel=True, **GPIPE),
        Wanted("mixtral-8x7b", dp_shard=16, ep=8, zero=3, precision=Precision.FP8),
        Wanted(dp_shard=4, cp=2, tp=2, zero=3, cp_method=RING, optimizer=Optimizer.SGD),
        Wanted(dp_shard=8, zero=3, precision=Precision.FP8, microbatches=1),
        Wanted("qwen3-235b-a22b", dp_shard=32, tp=4, ep=16, zero=3),
    ],
    **dict.fromkeys(_LAUNCHERS, _LAUNCHERS_TAKE),
}  # fmt: skip

REFUSED: dict[str, list[tuple[Wanted, str]]] = {
    "megatron": _MEGATRON_REFUSES,
    "nemo": [*_MEGATRON_REFUSES, (Wanted(dp_shard=8, zero=1, precision=Precision.FP32), "precision fp32")],
    "torchtitan": [
        (Wanted("mixtral-8x7b", dp_shard=4, tp=2, ep=8, etp=1, zero=3, sequence_parallel=True), "etp = 1"),
        (Wanted(pp=2, **ZB_2P), "schedule ZB-2P"),
        (Wanted(dp_shard=8, zero=3, optimizer=Optimizer.SGD_MOMENTUM), "optimiser sgd-momentum"),
        (Wanted(dp_shard=8, zero=3, precision=Precision.FP16), "precision fp16"),
        (Wanted(dp_shard=8, zero=3, optimizer=Optimizer.SGD), "optimiser sgd"),
        (Wanted(dp_shard=8, zero=3, offload=Offload.CPU), "offload of optimiser states cpu"),
        (Wanted(dp_shard=8, zero=1), "ZeRO 2 or 3"),
        (Wanted(pp=2, dp_shard=4, zero=2), "ZeRO 1 or 3"),
        (Wanted("qwen3-8b", pp=2, dp_shard=4, zero=1), "its qwen3 cannot be pipelined"),
        (Wanted("deepseek-v3", dp_shard=8, cp=2, zero=3), "takes no context parallelism"),
        (Wanted(dp_shard=4, cp=2, zero=3, cp_method=ALL_TO_ALL), "context parallelism all-to-all"),
        (Wanted(dp_shard=4, tp=2, zero=3), "always with sequence parallelism"),
        (Wanted(dp_shard=8, zero=3, recompute=MIXED), "recomputes all blocks alike"),
        (Wanted("gpt3-1.3b", dp_shard=8, zero=3, seq_len=2048), "learned positions"),
        (Wanted(dp_replicate=4, tp=2, sequence_parallel=True), "goes with no other axis"),
        (Wanted(dp_shard=4, cp=2, zero=3, seq_len=4098), "4098 tokens"),
    ],
    "deepspeed": [
        (Wanted("mixtral-8x7b", dp_shard=4, tp=2, ep=8, etp=1, zero=1, sequence_parallel=True), "etp = 1"),
        (Wanted(pp=2, dp_shard=4, zero=1), "it has no pp"),
        (Wanted(dp_replicate=2, dp_shard=4, zero=1), "groups of shards"),
        (Wanted(dp_shard=4, cp=2, zero=3, cp_method=RING), "context parallelism ring"),
        (Wanted(dp_shard=4, cp=2, zero=3), "context parallelism all-gather"),
        (Wanted(dp_shard=4, tp=2, zero=1, sequence_parallel=True), "always without sequence parallelism"),
        (Wanted(dp_shard=8, zero=3, precision=Precision.FP8), "precision fp8"),
        (Wanted(dp_shard=8, zero=3, recompute=SELECTIVE), "recomputation selective"),
        (Wanted(dp_shard=8, zero=3, recompute=MIXED), "recomputes all blocks alike"),
        (Wanted("mixtral-8x7b", dp_shard=4, tp=2, ep=4, zero=1), "whole on a rank"),
        (Wanted(dp_shard=8, zero=1, offload=Offload.NVME), "NVMe goes with ZeRO stage 3"),
        (Wanted(dp_shard=2, cp=2, tp=2, zero=1, cp_method=ALL_TO_ALL), "does not go with sequence parallelism"),
        (Wanted(dp_replicate=8, offload=Offload.CPU), "offload goes with ZeRO"),
    ],
    "accelerate": [
        (Wanted("mixtral-8x7b", dp_shard=4, tp=2, ep=8, etp=1, zero=3, sequence_parallel=True), "etp = 1"),
        (Wanted(pp=2, dp_replicate=4), "it has no pp"),
        (Wanted("mixtral-8x7b", dp_shard=8, ep=4, zero=3), "it has no ep"),
        (Wanted(dp_shard=8, zero=1), "ZeRO stage 1"),
        (Wanted(dp_shard=8, zero=3, offload=Offload.CPU), "offload of optimiser states cpu"),
        (Wanted(dp_shard=4, cp=2, zero=3, cp_method=ALL_TO_ALL), "context parallelism all-to-all"),
        (Wanted(dp_shard=4, tp=2, zero=3, sequence_parallel=True), "always without sequence parallelism"),
        (Wanted(dp_shard=8, zero=3, recompute=SELECTIVE), "recomputation selective"),
        (Wanted(dp_shard=8, zero=3, recompute=MIXED), "recomputes all blocks alike"),
        (Wanted(dp_replicate=4, tp=2), "do not go with tensor parallelism"),
        (Wanted(dp_replicate=2, cp=4, zero=3), "need dp_shard above 1"),
        (Wanted(dp_shard=4, tp=2, zero=3, precision=Precision.FP8), "do not go with tp or cp"),
    ],
    "nanotron": [
        (Wanted("mixtral-8x7b", dp_shard=4, tp=2, ep=8, etp=1, zero=1, sequence_parallel=True), "etp = 1"),
        (Wanted("llama2-7b", pp=2, dp_shard=4, zero=1), "stages of 17, 15 blocks"),
        (Wanted(pp=4, dp_shard=2, zero=1, **INTERLEAVED), "schedule Interleaved1F1B"),
        (Wanted(pp=4, dp_shard=2, zero=1, **ZBV), "schedule ZBVZeroBubble"),
        (Wanted("mixtral-8x7b", dp_shard=8, ep=4, zero=1), "it has no ep"),
        (Wanted(dp_shard=8, zero=2), "ZeRO stage 2"),
        (Wanted(dp_shard=8, zero=3), "ZeRO stage 3"),
        (Wanted(dp_shard=8, zero=1, precision=Precision.FP16), "precision fp16"),
        (Wanted(dp_shard=8, zero=1, precision=Precision.FP8), "precision fp8"),
        (Wanted(dp_shard=8, zero=1, recompute=SELECTIVE), "recomputation selective"),
        (Wanted(dp_shard=8, zero=1, recompute=MIXED), "recomputes all blocks alike"),
        (Wanted(dp_replicate=2, cp=4), "context parallelism all-gather"),
        (Wanted("gpt3-1.3b", dp_shard=8, zero=1, seq_len=2048), "Llama and Qwen2"),
        (Wanted("qwen3-8b", dp_shard=8, zero=1), "Llama and Qwen2"),
        (Wanted(dp_replicate=2, dp_shard=4, zero=1), "over all data-parallel ranks"),
    ],
    "maxtext": [
        (Wanted("mixtral-8x7b", dp_shard=4, tp=2, ep=8, etp=1, zero=3, sequence_parallel=True), "etp = 1"),
        (Wanted(pp=2, dp_shard=4, zero=3), "schedule 1F1B"),
        (Wanted(pp=2, dp_shard=4, zero=3, **INTERLEAVED), "schedule Interleaved1F1B"),
        (Wanted(dp_shard=8, zero=2), "ZeRO stage 2"),
        (Wanted(dp_shard=8, zero=3, precision=Precision.FP16), "precision fp16"),
        (Wanted(dp_shard=4, cp=2, zero=3, cp_method=ALL_TO_ALL), "context parallelism all-to-all"),
        (Wanted(dp_shard=8, zero=3, optimizer=Optimizer.ADAM), "optimiser adam "),
        (Wanted(dp_shard=8, zero=3, offload=Offload.NVME), "offload of optimiser states nvme"),
        (Wanted(dp_shard=8, zero=3, recompute=MIXED), "recomputes all blocks alike"),
        (Wanted(pp=2, dp_shard=4, zero=3, stage_blocks=(15, 17), **GPIPE), "equal numbers of blocks"),
        (Wanted(pp=4, dp_shard=2, zero=3, microbatches=6, **GPIPE), "multiple of the stages"),
        (Wanted("mixtral-8x7b", dp_shard=4, cp=2, ep=8, zero=3), "its expert axis"),
        (Wanted(dp_replicate=2, dp_shard=4, zero=1), "shards over the data axis alone"),
        (Wanted("deepseek-v3", pp=2, dp_shard=16, zero=3, stage_blocks=(30, 31), **GPIPE), "dense layers first"),
    ],
    **dict.fromkeys(_LAUNCHERS, _LAUNCHERS_REFUSE),
}
