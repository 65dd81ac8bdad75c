"""Attention that works on blocks of keys and values one after another, as they arrive from other ranks.

Of n blocks each is 1 / n of the work. Against attention in one piece, n blocks cost more, n - 1 times over: the
launches and the start of a kernel; forward, adding a block's output to those before it; backward, adding a block's
gradients of queries, keys and values. A sum is kept in fp32: it is read and written, and what is added is read, by one
fused kernel for each tensor.

A message passes on a block while attention works on the one at hand (``costmodels.overlap``, block by block).

Sources: Liu et al., "Ring Attention with Blockwise Transformers" (2023); torch 2.13's
torch/distributed/tensor/experimental/_context_parallel/_attention.py for the sums in fp32 (``_SDPAMerger``,
``accum_dtype``).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from costmodels.overlap import Overlap, exposed_s
from costmodels.vocabulary.terms import Pass
from costmodels.vocabulary.workload import OpClass
from planner.axes.framework import Framework
from planner.axes.lowered import Collective, Kernel, RankUnit
from planner.layout.columns import Array
from planner.pricing.kernels import kernels_issued
from planner.pricing.machine import Machine

SUM_BYTES = 4  # of one element of a sum, fp32


class BlockTimes(NamedTuple):
    """Seconds at each size that blocks add to attention in one piece."""

    forward_s: Array
    backward_s: Array


def block_times(unit: RankUnit, num_blocks: int, sizes: Array, machine: Machine, framework: Framework) -> BlockTimes:
    """What ``num_blocks`` blocks add for ``sizes`` sequences each; nothing where there is one."""
    kernels = _attention(unit) if num_blocks > 1 else ()

    def added(run: Pass) -> Array:
        each = (_more_s(unit, kernel, sizes, machine, framework, run) for kernel in kernels)
        return (num_blocks - 1) * sum(each, np.zeros(len(sizes)))

    return BlockTimes(added(Pass.FORWARD), added(Pass.BACKWARD))


def more_kernels(unit: RankUnit, num_blocks: int, framework: Framework, run: Pass) -> int:
    """Kernels that blocks add."""
    each = sum(kernels_issued(k, framework, run) + len(_sums(k, run)) for k in _attention(unit))
    return (num_blocks - 1) * each


def beside_blocks(collective: Collective, seconds: Array, compute_s: Array, overlap: Overlap) -> tuple[Array, Array]:
    """Exposed seconds of messages that take ``seconds`` together, and compute that hides the rest.

    Each runs beside one of as many blocks as there are ranks, which take ``compute_s`` together.
    """
    repeats = collective.repeats
    message_s, block_s = seconds / repeats, compute_s / collective.group.num_ranks
    hidden_s = np.minimum(message_s, overlap.fraction * block_s)
    hiding_s = np.divide(hidden_s, overlap.fraction, out=np.zeros_like(hidden_s), where=hidden_s > 0)
    return repeats * exposed_s(message_s, block_s, overlap), repeats * hiding_s


def _attention(unit: RankUnit) -> list[Kernel]:
    return [kernel for kernel in unit.kernels if kernel.keys_and_values]


def _sums(kernel: Kernel, run: Pass) -> tuple[int, ...]:
    """Tensors that are added up: the output, or the gradients of queries, keys and values."""
    return (kernel.id,) if run is Pass.FORWARD else (*kernel.inputs[:1], *kernel.keys_and_values)


def _more_s(unit: RankUnit, kernel: Kernel, sizes: Array, machine: Machine, framework: Framework, run: Pass) -> Array:
    """One more block of one kernel."""
    attention = machine.roofline(OpClass.ATTENTION, framework.precision)
    start_s = kernels_issued(kernel, framework, run) * attention.launch_s
    start_s += attention.half_size_flops * attention.seconds_per_flop
    between = machine.roofline(OpClass.MEMORY_BOUND, framework.precision)
    found = np.full(len(sizes), start_s)
    for i in _sums(kernel, run):
        tensor = unit.tensors[i]
        moved = tensor.bytes * (1 + 2 * SUM_BYTES / tensor.item_bytes)
        found += between.times_s(np.zeros(len(sizes)), moved * sizes)
    return found
