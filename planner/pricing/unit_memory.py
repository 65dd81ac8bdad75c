"""Memory of one unit for one micro-batch on one rank: kept by autograd, at work beside that, or lost to caching.

The caching allocator returns nothing: what was freed and cannot be used again counts as reserved. Two things make
that large. Inputs of asynchronous collectives wait for the device, which the host is ahead of by as many launches as
the driver queues; and the loss frees copies of its logits that the next, wider ones do not fit into.
"""

from __future__ import annotations

from functools import cached_property
from math import prod

from planner.graph.model_graph import Node, OpClass, Unit
from planner.graph.node_operators import (
    is_cast,
    is_kept_by_selective_recomputation,
    is_loss,
    is_norm,
    num_scores,
    runs_in_eight_bits,
)
from planner.operators.call import ITEM_BYTES
from planner.parallelism import Recompute, Shard
from planner.pricing.operator_time import PricingTarget
from planner.pricing.sharded_unit import ShardedUnit, is_floating, tensor_bytes
from planner.pricing.split_backward import is_deferred

# Precisions of Transformer Engine.
EIGHT_BIT = {"fp8"}


def kept_products(nodes: list[Node], target: PricingTarget) -> list[Node]:
    """Operators whose outputs selective recomputation keeps."""
    products = [n for n in nodes if is_kept_by_selective_recomputation(n)]
    if target.recipe.selective == "alternate_products":
        attention = [n for n in products if n.op_class is OpClass.ATTENTION]
        return attention + [n for n in products if n.op_class is not OpClass.ATTENTION][::2]
    return products


class UnitMemory:
    """What one unit holds on one rank for one micro-batch, and what the allocator cannot reuse behind it."""

    def __init__(self, target: PricingTarget, unit: Unit, sharded: ShardedUnit, scale: float) -> None:
        self._graph, self._unit, self._sharded, self._scale = target.graph, unit, sharded, scale
        self._target = target
        self._inside = set(unit.nodes)
        splits_sequence = any(sharded.placements.get(i) == Shard(1) for i in unit.boundary)
        self._splits_sequence = splits_sequence
        self._keeps_split = target.recipe.gathers_inputs_again and splits_sequence
        self._loss = next((n for n in self._nodes() if is_loss(n)), None)
        self._kept: dict[Recompute, float] = {}

    def local_bytes(self, node: Node) -> float:
        """One rank's part of the node's output for one micro-batch."""
        return tensor_bytes(node) * self._sharded.local_share(node.id) * (self._scale if node.batch_dependent else 1.0)

    def sent_bytes(self, node: Node) -> float:
        """What one rank sends of the node's output for one micro-batch to the next pipeline rank."""
        is_whole = self._sharded.local_share(node.id) == 1.0
        scattered = self._sharded.degree if is_whole and self._target.recipe.scatters_sends else 1
        return self.local_bytes(node) / scattered

    def kept(self, mode: Recompute) -> float:
        """Bytes held from forward to backward under ``mode``."""
        if mode not in self._kept:
            self._kept[mode] = self._kept_under(mode)
        return self._kept[mode]

    def _kept_under(self, mode: Recompute) -> float:
        nodes = self._nodes()
        entering = {
            self._graph.nodes[o].storage
            for n in nodes
            for o in n.operands
            if isinstance(o, int) and o not in self._inside and is_floating(self._graph.nodes[o])
        }
        if mode is Recompute.FULL:
            return self._storages(entering)
        if mode is Recompute.SELECTIVE and self._target.recipe.selective == "attention":
            kept = [n for n in nodes if n.op_class is not OpClass.ATTENTION]
            return self._storages(self._saved_by(nodes)) + self._extras(kept)
        if mode is Recompute.SELECTIVE:
            products = kept_products(nodes, self._target)
            return self._storages(entering | {n.storage for n in products}) + self._extras(
                [n for n in products if n.op_class is OpClass.ATTENTION]
            )
        logits = self._target.recipe.memory.logit_kept_bytes.value * self._num_logits()
        return self._storages(self._saved_by(nodes)) + self._extras([n for n in nodes if n is not self._loss]) + logits

    def working(self, mode: Recompute) -> float:
        """Bytes held besides while the unit's backward runs, or its loss forward if that takes more."""
        return self.kept(Recompute.NONE) - self.kept(mode) + max(self.loss(), self._largest_gradient)

    def loss(self) -> float:
        """Bytes of copies of the logits besides what is kept of them, at the loss's peak."""
        facts = self._target.recipe.memory
        return (facts.logit_peak_bytes.value - facts.logit_kept_bytes.value) * self._num_logits()

    def freed_early(self, last_deferred: int) -> float:
        """Of what is kept without recomputation, what goes with the first half of a split backward pass."""
        nodes = self._nodes()
        if not self._target.recipe.split_retains_graph:
            staying = self._saved_by([n for n in nodes if is_deferred(n, self._target)])
            return self.kept(Recompute.NONE) - self._storages(staying)
        if self._unit.boundary:  # later units hold on to this one
            return 0.0
        behind = [n for n in nodes if n.id > last_deferred]
        staying = self._saved_by([n for n in nodes if n.id <= last_deferred])
        return self._storages(self._saved_by(behind) - staying) + self._extras(behind)

    def gather_buffers(self) -> float:
        """Bytes of the buffers that split inputs are gathered into."""
        return self._target.recipe.memory.gather_buffers.value * self._whole_bytes()

    def waiting_collectives(self) -> float:
        """Bytes of freed inputs of asynchronous collectives, while the host is ahead of the device."""
        return self._target.recipe.memory.waiting_tensors.value * self._whole_bytes()

    def stranded_copies(self) -> float:
        """Bytes of the loss's freed copies that its later ones do not fit into."""
        facts = self._target.recipe.memory
        return max(0.0, facts.logit_reserved_bytes.value - facts.logit_peak_bytes.value) * self._num_logits()

    def _nodes(self) -> list[Node]:
        return [self._graph.nodes[i] for i in self._unit.nodes]

    def _num_logits(self) -> float:
        """Elements that the loss takes on this rank."""
        if self._loss is None:
            return 0.0
        logits = self._logits(self._loss)
        share = 1.0 if self._target.recipe.memory.gathers_logits else self._sharded.local_share(logits.id)
        return share * self._scale * tensor_bytes(logits) / ITEM_BYTES[logits.dtype]

    def _logits(self, loss: Node) -> Node:
        return next(self._graph.nodes[o] for o in loss.operands if isinstance(o, int))

    def _copies_of_logits(self) -> set[int]:
        """The loss and the casts and views before it: the recipe's facts count their gradients."""
        found: set[int] = set()
        node = self._loss
        while node is not None and (node is self._loss or node.op_class is OpClass.VIEW or is_cast(node)):
            found.add(node.id)
            node = next((self._graph.nodes[o] for o in node.operands if isinstance(o, int)), None)
        return found

    def _whole_bytes(self) -> float:
        """A micro-batch's input of a block before sequence parallelism splits it; 0 where it does not."""
        if not (self._splits_sequence and self._unit.is_block):
            return 0.0
        crossing = (self._graph.nodes[i] for i in self._unit.boundary)
        return sum(tensor_bytes(node) * self._scale for node in crossing if node.batch_dependent)

    @cached_property
    def _largest_gradient(self) -> float:
        """Gradient of the largest output, or scores, together with the gradients of what it was made from."""
        largest, counted = self._score_gradients(), self._copies_of_logits()
        for node in self._nodes():
            if node.op_class is OpClass.VIEW or not node.batch_dependent or not is_floating(node) or node.id in counted:
                continue
            inputs = [self._graph.nodes[o] for o in node.operands if isinstance(o, int)]
            gradients = sum(self.local_bytes(i) for i in inputs if is_floating(i) and i.batch_dependent)
            largest = max(largest, self.local_bytes(node) + gradients)
        return largest

    def _score_gradients(self) -> float:
        """Bytes of the gradients of scores in the backward pass of attention that is not fused."""
        per_score = self._target.attention_kernel.gradient_score_bytes.value
        attention = (n for n in self._nodes() if n.op_class is OpClass.ATTENTION)
        scores = (num_scores(n, self._graph) * self._sharded.fractions.get(n.id, 1.0) for n in attention)
        return per_score * self._scale * max(scores, default=0.0)

    def _saved_by(self, nodes: list[Node]) -> set[int]:
        """Storages that autograd keeps for ``nodes``."""
        return {self._graph.nodes[s].storage for n in nodes for s in n.saves}

    def _storages(self, storages: set[int]) -> float:
        kept = (self._graph.nodes[s] for s in storages if self._graph.nodes[s].batch_dependent)
        return sum(self._kept_share(node) * self.local_bytes(node) for node in kept)

    def _kept_share(self, node: Node) -> float:
        """Of a rank's part of the output: what was gathered for a product may be kept split, and what it takes cast."""
        is_gathered = self._keeps_split and self._sharded.local_share(node.id) == 1.0 and is_floating(node)
        share = 1 / self._sharded.degree if is_gathered else 1.0
        by_products, by_others = self._savers.get(node.storage, (False, True))
        if self._target.precision in EIGHT_BIT and self._target.recipe.eight_bit_inputs and by_products:
            share *= by_others + 1 / ITEM_BYTES[node.dtype]
        return share

    @cached_property
    def _savers(self) -> dict[int, tuple[bool, bool]]:
        """For each storage that is saved: whether products save it, and whether other operators do."""
        found: dict[int, tuple[bool, bool]] = {}
        for node in self._nodes():
            is_product = runs_in_eight_bits(node)
            for storage in self._saved_by([node]):
                by_products, by_others = found.get(storage, (False, False))
                found[storage] = (by_products or is_product, by_others or not is_product)
        return found

    def _extras(self, nodes: list[Node]) -> float:
        return sum(
            self._extra_bytes(n) * self._sharded.fractions.get(n.id, 1.0) * (self._scale if n.batch_dependent else 1.0)
            for n in nodes
        )

    def _extra_bytes(self, node: Node) -> float:
        """Bytes kept besides tensors of the graph: of attention that is not fused, its scores."""
        kernel, recipe = self._target.attention_kernel, self._target.recipe
        if node.op_class is OpClass.ATTENTION and not kernel.is_fused:
            dropped = kernel.dropout_saved_bytes.value if recipe.dropout == 0 else 0.0
            return (kernel.saved_score_bytes.value - dropped) * num_scores(node, self._graph)
        if is_norm(node):
            return node.saved_extra_bytes + recipe.norm_saved_bytes.value * prod(node.shape)
        return node.saved_extra_bytes
