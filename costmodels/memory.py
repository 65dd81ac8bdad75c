"""Device memory of training state per parameter.

Bytes per parameter under FSDP2 (``fully_shard``), d = ranks that shard; the master copy is what the optimiser updates:

    16-bit compute, Adam      copy for compute   gradients   master + moments     total
    ZeRO 0                    2                  4           4 + 8                18
    ZeRO 1                    2                  4           (4 + 8)/d            6 + 12/d
    ZeRO 2                    2                  4/d         (4 + 8)/d            2 + 16/d
    ZeRO 3                    0 (gathered units  4/d         (4 + 8)/d            16/d
                              come extra)
    fp32: the copy for compute has 4 bytes; ZeRO 0 has none. SGD has no moments, with momentum one of 4 bytes.
    Offloaded: master and moments lie on the host; ZeRO 3 keeps its shard of the copy for compute in their place, 2/d.

The copy for compute exists in fp32 too: FSDP2 keeps the sharded parameters and copies them into gathered ones
(torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py, ``wait_for_unshard``). Under ZeRO 0 in fp32, with states on
the device, our executor leaves parameters as they are, and compute uses the master copy. Gradients accumulate in fp32
(``MixedPrecisionPolicy(reduce_dtype=torch.float32)``). fp8 keeps its weights in bf16 and casts them inside each
product.

Sources: Rajbhandari et al., "ZeRO" (2020), for what each stage divides; Narayanan et al. (2021) and Korthikanti et al.
(2022), for 18 bytes and 6 + 12/d with fp32 gradients; torch 2.13's FSDP2 for where the bytes lie.
"""

from __future__ import annotations

from dataclasses import dataclass

from costmodels.ledger import StateBytes
from costmodels.recipe import StateFacts

COMPUTE_BYTES = {"bf16": 2, "fp16": 2, "fp8": 2, "fp32": 4}
MASTER_BYTES = 4
GRADIENT_BYTES = 4
# torch.optim: two fp32 moments; SGD has one with momentum, and none without.
MOMENT_BYTES = {"adamw": 8, "adam": 8, "sgd": 0, "sgd-momentum": 4}


@dataclass(frozen=True)
class KeptStates:
    """What training keeps of a parameter; ``facts``: how another framework than ours keeps gradients."""

    precision: str
    optimizer: str
    facts: StateFacts | None = None


@dataclass(frozen=True)
class Division:
    """Where the states of a parameter lie.

    ``num_shards``: ranks the state is divided over, dp_shard * cp. ``is_replicated``: gradients are reduced over more
    than one rank of data and context parallelism, which is where a framework's buffers come in. ``on_host``: master
    copy and moments do not lie on the device.
    """

    zero_stage: int
    num_shards: int
    is_replicated: bool = False
    on_host: bool = False


def leaves_whole(kept: KeptStates, division: Division) -> bool:
    """Whether compute uses the master copy itself, and gradients are reduced where they lie."""
    is_ours = kept.facts is None or kept.facts.leaves_whole
    return is_ours and kept.precision == "fp32" and division.zero_stage == 0 and not division.on_host


def state_bytes(num_trainable: float, num_frozen: float, kept: KeptStates, division: Division) -> StateBytes:
    """State of so many parameter elements on one rank, between steps and at its largest.

    Frozen parameters have neither gradients nor moments, yet FSDP2 keeps both of their copies. ZeRO 3 leaves out the
    units that are gathered at the moment. ValueError names a value that is not known.
    """
    precision, optimizer, facts = kept.precision, kept.optimizer, kept.facts
    zero_stage, num_shards = division.zero_stage, division.num_shards
    if precision not in COMPUTE_BYTES:
        raise ValueError(f"precision must be one of {', '.join(COMPUTE_BYTES)}, got {precision!r}")
    if optimizer not in MOMENT_BYTES:
        raise ValueError(f"optimizer must be one of {', '.join(MOMENT_BYTES)}, got {optimizer!r}")
    if zero_stage not in range(4):
        raise ValueError(f"ZeRO stage must be 0, 1, 2 or 3, got {zero_stage}")
    if num_shards < 1:
        raise ValueError(f"the number of shards must be at least 1, got {num_shards}")
    num_elements = num_trainable + num_frozen
    shards = num_shards if zero_stage >= 1 else 1
    gradient_shards = shards if zero_stage >= 2 else 1
    gradient_bytes, buffer_bytes, extra_bytes = float(GRADIENT_BYTES), 0.0, 0.0
    if facts is not None:
        gradient_bytes, extra_bytes = facts.held_gradient_bytes(precision), facts.optimizer_extra_bytes.value
        buffers = facts.sharded_replica_bytes if zero_stage >= 1 else facts.replica_bytes
        buffer_bytes = buffers.value if division.is_replicated else 0.0
    moments = MOMENT_BYTES[optimizer] + extra_bytes
    compute_copy = num_elements * COMPUTE_BYTES[precision]
    if leaves_whole(kept, division):
        compute_copy = 0.0
    gradients = num_trainable * (gradient_bytes + buffer_bytes) / gradient_shards
    if division.on_host:
        return StateBytes(compute_copy / (shards if zero_stage == 3 else 1), gradients, optimizer=0.0)
    return StateBytes(
        parameters=compute_copy * (zero_stage < 3),
        gradients=gradients,
        optimizer=(num_elements * MASTER_BYTES + num_trainable * moments) / shards,
        moments=num_trainable * moments / shards,
    )
