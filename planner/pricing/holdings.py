"""Memory of one unit for one micro-batch on one rank: kept by autograd, needed while it runs, or lost to caching.

PyTorch's caching allocator keeps memory that was freed. Where it cannot be used again, it still counts as reserved. Two
things make that large. Inputs of asynchronous collectives are not reusable before the device has run the collective,
and the host is ahead of the device by as many launches as the driver queues. And the loss frees copies of its logits
that are too small for the wider copies that follow.

Each holding is a fixed number of bytes and a number of bytes for each sequence that the rank works on, but for the
fullest moment of a backward pass, which is another one the more sequences there are.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from functools import cached_property

import numpy as np

from costmodels.vocabulary.terms import PLACE, Holding, Pass
from costmodels.vocabulary.workload import CollectiveKind
from planner.axes.framework import Framework
from planner.axes.lowered import Kernel, RankUnit, RankWork, Recomputation, Role, Tensor
from planner.layout.columns import Array
from planner.pricing.backward_walk import held_in_backward
from planner.pricing.kernels import is_plain_attention, kernels_issued
from planner.pricing.split_work import is_deferred

# Precisions and products of Transformer Engine.
EIGHT_BIT = {"fp8"}


def holdings(unit: RankUnit, framework: Framework, launch_queue: float, on_rank: Array) -> Array:
    """Bytes [sizes, modes, ``Holding``] of ``unit`` where a rank works on each of ``on_rank`` sequences.

    ``launch_queue``: kernels that the driver queues before a launch blocks, so the host is ahead by no more.
    """
    held = _Held(unit, framework, launch_queue)
    modes = [held.under(mode) for mode in unit.recomputations]
    lines = np.array([[mode[holding] for holding in Holding] for mode in modes])
    found = lines[:, :, 0] + lines[:, :, 1] * on_rank[:, None, None]
    if framework.recipe.memory.has_fsdp_moments:
        whole = held.in_backward
        fullest = (whole[:, 0] + whole[:, 1] * on_rank[:, None]).max(axis=1)
        found[..., PLACE[Holding.GRADIENTS]] = fullest[:, None] - found[..., PLACE[Holding.KEPT]]
    return found


def kept_results(work: RankWork, mode: Recomputation) -> tuple[float, float]:
    """Bytes of a sequence that ``mode`` keeps because of collectives, and the part that backward has anyway.

    A sum keeps what a product made for it, whole, beside its result, which counts as the product's. What is gathered
    is the input of a product, which recomputation need not make again then. Attention that reaches other ranks'
    positions is one product a block of keys, each with an output of its own.
    """
    unit, sent = work.unit, [each for each in work.collectives if mode.keeps_results and each.runs_in is Pass.FORWARD]
    results = [each for each in sent if mode.keeps(each)]
    kept = sum(each.num_bytes(unit.tensors) for each in results)
    gathers = [each for each in results if each.kind is CollectiveKind.ALL_GATHER]
    saved = sum(each.num_bytes(unit.tensors) for each in gathers if unit.saved.issuperset(each.of))
    num_blocks = max((each.group.num_ranks for each in sent if each.role is Role.ATTENTION and each not in results),
                     default=1)  # fmt: skip
    attention = [kernel for kernel in unit.kernels if kernel.keys_and_values]
    outputs = sum(unit.tensors[kernel.id].bytes + kernel.saved_extra_bytes for kernel in attention)
    return kept + (num_blocks - 1) * outputs, saved


class _Held:
    """The holdings of one unit, each an array of two numbers: fixed bytes, and bytes for each sequence."""

    def __init__(self, unit: RankUnit, framework: Framework, launch_queue: float) -> None:
        self._unit, self._framework, self._launch_queue = unit, framework, launch_queue
        self._facts = framework.recipe.memory
        self._kernels = {kernel.id: kernel for kernel in unit.kernels}

    def under(self, mode: Recomputation) -> dict[Holding, Array]:
        """Every holding. The mode decides what is kept and what is made again; nothing else depends on it."""
        kept = self._kept(mode)
        again = self._kept_without_recomputation - kept
        return {Holding.KEPT: kept, Holding.WORKING: again + self._at_work, **self._others}

    @cached_property
    def in_backward(self) -> Array:
        """[operators, 2]: all that the unit holds when each operator's backward pass ends; nothing said of a loss."""
        if self._unit.loss is not None:
            return np.zeros((1, 2))
        per_score = self._framework.attention.gradient_score_bytes.value
        return held_in_backward(
            self._unit,
            saved_of=lambda tensor: self._storages([tensor]),
            extras_of=lambda kernel: self._extras([kernel]),
            passing_of=lambda kernel: _per_sequence(per_score * kernel.scores),
        )

    def _kept(self, mode: Recomputation) -> Array:
        kept = self._storages(mode.kept) + self._extras(self._kernels[i] for i in mode.kept_extras_of)
        if mode.keeps_logits:
            kept = kept + self._logits(self._facts.logit_kept_bytes.value)
        return kept

    @cached_property
    def _kept_without_recomputation(self) -> Array:
        return self._kept(self._unit.recomputations[0])

    @cached_property
    def _others(self) -> dict[Holding, Array]:
        facts, unit = self._facts, self._unit
        # Whole inputs of a block that cross between blocks in parts.
        whole = _per_sequence(sum(unit.tensors[i].whole_bytes for i in unit.gathered))
        num_launches = sum(kernels_issued(kernel, self._framework, run) for kernel in unit.kernels for run in Pass)
        waiting = facts.waiting_tensors.value * whole
        stranded = max(0.0, facts.logit_reserved_bytes.value - facts.logit_peak_bytes.value)
        return {
            Holding.GRADIENTS: _per_sequence(0.0),
            Holding.LOSS: self._loss,
            Holding.BUFFER: facts.gather_buffers.value * whole,
            Holding.COLLECTIVE: waiting,
            Holding.QUEUED: _times(waiting, self._launch_queue / max(1, num_launches)),
            Holding.STRANDED: self._logits(stranded),
            Holding.BOUNDARY: _summed(
                unit.tensors[i].bytes * share * _way(unit.tensors[i].follows_batch)
                for i, share in unit.boundary.items()
            ),
            Holding.WAITING: self._waiting,
        }

    @cached_property
    def _loss(self) -> Array:
        """Copies of the logits at the peak of the loss, without those that are kept."""
        return self._logits(self._facts.logit_peak_bytes.value - self._facts.logit_kept_bytes.value)

    @cached_property
    def _at_work(self) -> Array:
        """Needed while the unit's backward pass runs, or in the forward pass of its loss if that needs more."""
        return _per_sequence(max(float(self._loss[1]), self._largest_gradient()))

    def _largest_gradient(self) -> float:
        """Gradient of the largest output, or scores, together with the gradients of what it was made from."""
        per_score = self._framework.attention.gradient_score_bytes.value
        largest = per_score * max((kernel.scores for kernel in self._unit.kernels), default=0.0)
        counted = self._unit.loss.copies if self._unit.loss else frozenset[int]()
        tensors = self._unit.tensors
        for kernel in self._unit.kernels:
            if not kernel.is_view and kernel.id not in counted and tensors[kernel.id].is_activation:
                made_from = sum(tensors[i].bytes for i in kernel.inputs if tensors[i].is_activation)
                largest = max(largest, self._own_gradient(kernel.id) + made_from)
        return largest

    def _own_gradient(self, kernel_id: int) -> float:
        """Bytes of the gradient of a kernel's output; none more where logits become their gradient in place."""
        tensor, loss = self._unit.tensors[kernel_id], self._unit.loss
        is_in_place = self._facts.logit_peak_bytes.value <= tensor.item_bytes
        return 0.0 if is_in_place and loss is not None and kernel_id == loss.head else tensor.bytes

    @cached_property
    def _waiting(self) -> Array:
        """Gradients held until a split backward pass makes the weights' gradients, less what is freed before."""
        deferred = [kernel for kernel in self._unit.kernels if is_deferred(kernel, self._framework)]
        tensors = self._unit.tensors
        held = _summed(tensors[kernel.id].bytes * _way(kernel.follows_batch) for kernel in deferred)
        return held - self._freed_early(deferred)

    def _freed_early(self, deferred: list[Kernel]) -> Array:
        """Of what is kept without recomputation, the part that the first half of a split backward pass frees."""
        if not self._framework.recipe.split_retains_graph:
            return self._kept_without_recomputation - self._storages(_saved_by(deferred))
        if self._unit.boundary:  # later units hold on to this one
            return _per_sequence(0.0)
        last = deferred[-1].id if deferred else -1
        behind = [kernel for kernel in self._unit.kernels if kernel.id > last]
        staying = _saved_by(kernel for kernel in self._unit.kernels if kernel.id <= last)
        return self._storages(_saved_by(behind) - staying) + self._extras(behind)

    def _logits(self, bytes_each: float) -> Array:
        """Bytes of each of the elements that the loss takes on this rank."""
        if self._unit.loss is None:
            return _per_sequence(0.0)
        logits = self._unit.tensors[self._unit.loss.logits]
        size = logits.whole_bytes if self._facts.gathers_logits else logits.bytes
        return _per_sequence(bytes_each * size / logits.item_bytes)

    def _storages(self, ids: Collection[int]) -> Array:
        """Tensors that do not grow with the batch are tables that all micro-batches share: they are not counted."""
        tensors = (self._unit.tensors[i] for i in ids)
        return _per_sequence(sum(t.kept_bytes * self._share_in_precision(t) for t in tensors if t.follows_batch))

    def _share_in_precision(self, tensor: Tensor) -> float:
        """Of a tensor's bytes: products in 8 bits keep a copy of their own, other operators keep the tensor."""
        if self._framework.precision not in EIGHT_BIT or not self._framework.recipe.eight_bit_inputs:
            return 1.0
        by_products, by_others = self._savers.get(tensor.id, (False, True))
        return by_others + 1 / tensor.item_bytes if by_products else 1.0

    @cached_property
    def _savers(self) -> dict[int, tuple[bool, bool]]:
        """For each tensor that is saved: whether products save it, and whether other operators do."""
        found: dict[int, tuple[bool, bool]] = {}
        for kernel in self._unit.kernels:
            is_product = kernel.is_eight_bit
            for tensor in kernel.saves:
                by_products, by_others = found.get(tensor, (False, False))
                found[tensor] = (by_products or is_product, by_others or not is_product)
        return found

    def _extras(self, kernels: Iterable[Kernel]) -> Array:
        """Bytes kept besides tensors of the graph."""
        return _summed(self._extra_bytes(kernel) * _way(kernel.follows_batch) for kernel in kernels)

    def _extra_bytes(self, kernel: Kernel) -> float:
        """Bytes that an operator keeps besides its tensors; for attention that is not fused, its scores."""
        recipe, attention = self._framework.recipe, self._framework.attention
        if is_plain_attention(kernel, self._framework):
            dropped = attention.dropout_saved_bytes.value if recipe.dropout == 0 else 0.0
            return (attention.saved_score_bytes.value - dropped) * kernel.scores
        return kernel.saved_extra_bytes + recipe.norm_saved_bytes.value * kernel.norm_elements


def _saved_by(kernels: Iterable[Kernel]) -> set[int]:
    return {tensor for kernel in kernels for tensor in kernel.saves}


_FIXED, _GROWING = np.array([1.0, 0.0]), np.array([0.0, 1.0])


def _way(follows_batch: bool) -> Array:
    return _GROWING if follows_batch else _FIXED


def _per_sequence(num_bytes: float) -> Array:
    return num_bytes * _GROWING


def _summed(parts: Iterable[Array]) -> Array:
    return sum(parts, np.zeros(2))


def _times(held: Array, factor: float) -> Array:
    """``factor`` may be infinite."""
    return np.multiply(held, factor, where=held > 0, out=np.zeros_like(held))
