"""What the terms of a step and of a rank's memory are, each in one line for somebody who meets them first."""

from __future__ import annotations

from collections.abc import Mapping

from costmodels.vocabulary.terms import MemoryTerm, Term

OF_TIME: Mapping[Term, str] = {
    Term.COMPUTE: "operators at work, forward and backward",
    Term.RECOMPUTE: "forward work done again in backward (activation checkpointing)",
    Term.TENSOR: "exchanges between ranks that share each operator",
    Term.CONTEXT: "exchanges between ranks that share each sequence",
    Term.EXPERT: "tokens on their way to their experts and back (all-to-all)",
    Term.DATA: "gradients and parameters between replicas or shards, as far as compute does not hide them",
    Term.SEND: "waiting for activations and gradients from the neighbouring pipeline rank",
    Term.BUBBLE: "a pipeline rank without work while the pipeline fills, drains or is out of balance",
    Term.OFFLOAD: "activations on their way to the host and back, as far as compute does not hide them",
    Term.OPTIMIZER: "the update of the parameters, once a step",
}
OF_MEMORY: Mapping[MemoryTerm, str] = {
    MemoryTerm.PARAMETERS: "weights in the dtype of the compute, where they are a copy",
    MemoryTerm.GRADIENTS: "gradients, summed over micro-batches",
    MemoryTerm.OPTIMIZER: "fp32 master copy and moments",
    MemoryTerm.ACTIVATIONS: "kept from forward for backward",
    MemoryTerm.WORKING_SET: "tensors of the block at work",
    MemoryTerm.GATHERED_PARAMETERS: "whole weights of blocks in use (ZeRO 3)",
    MemoryTerm.REDUCTION_BUFFERS: "gradients on their way between ranks",
    MemoryTerm.GATHER_BUFFERS: "whole inputs of split operators",
    MemoryTerm.OFFLOAD_BUFFERS: "activations on their way to the host, or back",
    MemoryTerm.GATHERED_UPDATE: "updated weights being gathered (ZeRO 1)",
    MemoryTerm.WAITING_COLLECTIVES: "freed, but still used by a collective",
    MemoryTerm.STRANDED_COPIES: "freed, but too small to be used again",
    MemoryTerm.ALLOCATOR_RESERVE: "gaps that the allocator cannot fill",
    MemoryTerm.WORKSPACE: "of libraries such as cuBLAS, whatever the layout",
    MemoryTerm.COMMUNICATORS: "buffers of NCCL or gloo",
    MemoryTerm.CONTEXT: "driver and libraries",
}
# Where there is no room for a line.
SHORT: Mapping[Term, str] = {
    Term.COMPUTE: "compute",
    Term.RECOMPUTE: "recomputation",
    Term.TENSOR: "TP exchanges",
    Term.CONTEXT: "CP exchanges",
    Term.EXPERT: "EP exchanges",
    Term.DATA: "DP exchanges",
    Term.SEND: "PP sends",
    Term.BUBBLE: "bubble",
    Term.OFFLOAD: "copies to the host",
    Term.OPTIMIZER: "optimiser",
}
