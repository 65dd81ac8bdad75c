"""The pieces of a model that hardly repeats itself: modules in a row, divided by work, cut where few tensors cross."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from planner.graph.blocks import DOMINANT_SHARE, ModuleTree
from planner.graph.model_graph import Node

# Shares of all work: a module with more than COARSE is divided even where more tensors cross inside it than behind
# it; one with less than FINE is not, eight stages are even enough with it whole; less than NEGLIGIBLE is no piece.
COARSE_SHARE = 1 / 4
FINE_SHARE = 1 / 16
NEGLIGIBLE_SHARE = 1 / 64


def find_pieces(
    nodes: Sequence[Node], consumers: Mapping[int, Sequence[int]], tree: ModuleTree, blocks: Collection[str]
) -> tuple[str, ...]:
    """FQNs in execution order of modules that a pipeline can cut between; ``blocks`` are among them."""
    has_flops = any(node.flops for node in nodes)
    work = [node.flops if has_flops else node.bytes_read + node.bytes_written for node in nodes]
    return _Divider(nodes, tree, frozenset(blocks), (0, *accumulate(work)), crossing_tensors(nodes, consumers)).find()


def crossing_tensors(nodes: Sequence[Node], consumers: Mapping[int, Sequence[int]]) -> tuple[int, ...]:
    """For each node, how many distinct tensors with a gradient are alive after it."""
    last_use: dict[int, int] = {}
    for node in nodes:
        if node.requires_grad:
            last_use[node.storage] = max(last_use.get(node.storage, 0), *consumers.get(node.id, (0,)))
    changes = [0] * (len(nodes) + 1)
    for storage, last in last_use.items():
        if last > storage:
            changes[storage] += 1
            changes[last] -= 1
    return tuple(accumulate(changes[:-1]))


@dataclass(frozen=True)
class _Divider:
    nodes: Sequence[Node]
    tree: ModuleTree
    blocks: frozenset[str]
    work_before: Sequence[int]  # FLOPs (of a model without any, bytes) of all nodes before each
    crossing: Sequence[int]

    def find(self) -> tuple[str, ...]:
        """The blocks, and all other pieces with more than negligible work."""
        return tuple(
            piece
            for piece in self._divided("")
            if piece in self.blocks or (piece and self._share(piece) >= NEGLIGIBLE_SHARE)
        )

    def _divided(self, module: str) -> tuple[str, ...]:
        prefix = f"{module}." if module else ""
        holds_blocks = any(block.startswith(prefix) for block in self.blocks)
        parts = self._parts(module) if holds_blocks or self._share(module) >= FINE_SHARE else ()
        if not parts or not (holds_blocks or self._is_divided_well(module, parts)):
            return (module,)
        return tuple(piece for part in parts for piece in self._divided(part))

    def _share(self, module: str) -> float:
        """Of all work."""
        first, last = self.tree.span(module) if module else (0, len(self.nodes) - 1)
        return (self.work_before[last + 1] - self.work_before[first]) / max(1, self.work_before[-1])

    def _parts(self, module: str) -> tuple[str, ...]:
        """What ``module`` consists of, in execution order: its children, or what lies in those that interleave.

        A list that is not called itself interleaves with what runs between its entries. A module
        that is called again and again with others in between is no part.
        """
        parts = self._children(module)
        while mixed := [part for part in parts if self._interleaves(part, parts)]:
            widest = max(mixed, key=lambda part: self.tree.span(part)[1] - self.tree.span(part)[0])
            parts = [part for part in parts if part != widest] + self._children(widest)
        return tuple(sorted(parts, key=self.tree.span))

    def _children(self, module: str) -> list[str]:
        if module in self.blocks:
            return []
        return [child for child in self.tree.children[module] if self.tree.node_ids[child]]

    def _interleaves(self, part: str, others: Sequence[str]) -> bool:
        first, last = self.tree.span(part)
        spans = (self.tree.span(other) for other in others if other != part)
        return any(start <= last and first <= stop for start, stop in spans)

    def _is_divided_well(self, module: str, parts: Sequence[str]) -> bool:
        """Whether ``parts`` hold most of the work, and are cut as thinly as behind ``module`` or have to be."""
        if sum(map(self._share, parts)) < DOMINANT_SHARE * self._share(module):
            return False
        if self._share(module) > COARSE_SHARE:
            return True
        allowed = max(1, self.crossing[self.tree.span(module)[1]])
        return all(self.crossing[self.tree.span(part)[1]] <= allowed for part in parts[:-1])
