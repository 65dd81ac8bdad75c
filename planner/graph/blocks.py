"""Repeated blocks, found by structure: chains of sibling modules with equal operators and shapes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from planner.graph.model_graph import Node, Parameter
from planner.graph.signature import Signature, signature_of

DOMINANT_SHARE = 0.5  # of its parent's work that a set of blocks must hold: repeated norms are no blocks


@dataclass(frozen=True)
class ModuleTree:
    """Which modules there are, what they run and how they nest."""

    children: Mapping[str, tuple[str, ...]]  # in execution order
    node_ids: Mapping[str, tuple[int, ...]]  # of the module and all below it

    @staticmethod
    def of(nodes: Sequence[Node], parameters: Sequence[Parameter]) -> ModuleTree:
        """The tree of all modules that own an operator or a parameter."""
        ids: dict[str, list[int]] = {"": []}
        for node in nodes:
            if node.op != "input":
                for module in ancestors(node.module):
                    ids.setdefault(module, []).append(node.id)
        for parameter in parameters:
            for module in ancestors(parameter.fqn.rpartition(".")[0]):
                ids.setdefault(module, [])
        children: dict[str, list[str]] = {module: [] for module in ids}
        for module in ids:
            if module:
                children[module.rpartition(".")[0]].append(module)
        last = len(nodes)
        ordered = {
            module: tuple(sorted(names, key=lambda name: ids[name][0] if ids[name] else last))
            for module, names in children.items()
        }
        return ModuleTree(ordered, {module: tuple(values) for module, values in ids.items()})

    def span(self, module: str) -> tuple[int, int]:
        """First and last node of a module that has nodes."""
        ids = self.node_ids[module]
        return ids[0], ids[-1]


def ancestors(module: str) -> tuple[str, ...]:
    """``a.b`` as ("", "a", "a.b")."""
    parts = module.split(".") if module else []
    return ("", *(".".join(parts[: index + 1]) for index in range(len(parts))))


@dataclass(frozen=True)
class BlockFinder:
    """Looks for chains of blocks from the root of the module tree downwards."""

    nodes: Sequence[Node]
    parameters: Mapping[str, Parameter]
    tree: ModuleTree
    consumers: Mapping[int, Sequence[int]]

    def find(self, parent: str = "") -> tuple[str, ...]:
        """FQNs of the blocks below ``parent``, in execution order; overlapping ones are left out."""
        return self._disjoint(self._find(parent))

    def dominates(self, blocks: Sequence[str]) -> bool:
        """Whether ``blocks`` are most of the model, a head beside them aside."""
        return bool(blocks) and self._work(blocks) >= DOMINANT_SHARE * self._rivals_work("", blocks)

    def _find(self, parent: str) -> tuple[str, ...]:
        chain = self._chain(parent)
        if not chain:
            return tuple(block for child in self.tree.children[parent] for block in self._find(child))
        inner = {child: self._find(child) for child in self._one_of_each_kind(chain)}
        if all(self._is_finer(blocks, child) for child, blocks in inner.items()):
            return tuple(block for child in chain for block in self._find(child))
        return chain

    def _chain(self, parent: str) -> tuple[str, ...]:
        """The children of ``parent`` that repeat one after another, with their odd siblings in a list."""
        children = [child for child in self.tree.children[parent] if self._has_parameters(child)]
        if len(children) < 2:
            return ()
        kinds = {child: self._kind(child) for child in children}
        counts = Counter(kinds.values())
        repeated = [child for child in children if counts[kinds[child]] > 1]
        if not repeated or self._work(repeated) < DOMINANT_SHARE * self._rivals_work(parent, repeated):
            return ()
        if not self._follow_one_another(repeated):
            return ()
        in_a_list = all(child.rpartition(".")[2].isdigit() for child in repeated)
        return tuple(child for child in children if child in repeated or (in_a_list and _is_numbered(child)))

    def _kind(self, module: str) -> Signature:
        return signature_of(self.tree.node_ids[module], self.nodes, self.parameters, module)

    def _one_of_each_kind(self, modules: Sequence[str]) -> tuple[str, ...]:
        return tuple({self._kind(module): module for module in modules}.values())

    def _has_parameters(self, module: str) -> bool:
        ids = self.tree.node_ids[module]
        return any(isinstance(operand, str) for node_id in ids for operand in self.nodes[node_id].operands)

    def _work(self, modules: Sequence[str]) -> int:
        """FLOPs of ``modules``, or where there are none their bytes."""
        ids = [node_id for module in modules for node_id in self.tree.node_ids[module]]
        flops = sum(self.nodes[node_id].flops for node_id in ids)
        return flops or sum(self.nodes[node_id].bytes_read + self.nodes[node_id].bytes_written for node_id in ids)

    def _rivals_work(self, parent: str, repeated: Sequence[str]) -> int:
        """Work that ``repeated`` must dominate: the parent's, where they are no leaves without its leaves' (a head)."""
        if any(not self.tree.children[child] for child in repeated):
            return self._work([parent])
        return self._work([child for child in self.tree.children[parent] if self.tree.children[child]])

    def _follow_one_another(self, modules: Sequence[str]) -> bool:
        """Whether each module depends on the one before it: a chain, not experts side by side."""
        return all(self._reaches(first, second) for first, second in pairwise(modules))

    def _reaches(self, first: str, second: str) -> bool:
        targets = set(self.tree.node_ids[second])
        last = self.tree.span(second)[1]
        frontier = list(self.tree.node_ids[first])
        seen = set(frontier)
        while frontier:
            node_id = frontier.pop()
            if node_id in targets:
                return True
            for consumer in self.consumers.get(node_id, ()):
                if consumer <= last and consumer not in seen:
                    seen.add(consumer)
                    frontier.append(consumer)
        return False

    def _is_finer(self, inner: Sequence[str], outer: str) -> bool:
        """Whether cutting between ``inner`` blocks is as cheap as cutting after ``outer``, and covers it."""
        if len(inner) < 2 or self._work(inner) < DOMINANT_SHARE * self._work([outer]):
            return False
        outer_cut = self._cut_bytes(self.tree.span(outer)[1])
        return all(self._cut_bytes(self.tree.span(block)[1]) <= outer_cut for block in inner)

    def _cut_bytes(self, last: int) -> int:
        """Bytes alive after node ``last``, counting only what has a gradient."""
        alive = {
            self.nodes[node_id].storage
            for node_id in range(last + 1)
            if self.nodes[node_id].requires_grad and any(c > last for c in self.consumers.get(node_id, ()))
        }
        return sum(self.nodes[storage].output_bytes for storage in alive)

    def _disjoint(self, blocks: Sequence[str]) -> tuple[str, ...]:
        """``blocks`` in execution order without any whose nodes lie between another's."""
        ordered = sorted(blocks, key=self.tree.span)
        overlapping: set[str] = set()
        for first, second in pairwise(ordered):
            if self.tree.span(second)[0] <= self.tree.span(first)[1]:
                overlapping.update((first, second))
        return tuple(block for block in ordered if block not in overlapping)


def _is_numbered(module: str) -> bool:
    return module.rpartition(".")[2].isdigit()
