"""Traces each distinct block once: long lists of equal modules are shortened before the trace.

Three periods of a run of equal modules are kept. After the trace the second must be the third
moved back by one period, operand by operand, and the first must have the same operators: then the
second is what every module in between would have been. Wherever that does not hold, or the
shortened model does not run, the caller traces the whole model.
"""

# pyright: reportPrivateUsage=false
# torch has no public way to take children out of a list and put them back.

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Generator, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from planner.graph.blocks import ModuleTree
from planner.graph.model_graph import Node
from planner.graph.tracer.module_kinds import fingerprint, may_count

Edge = tuple[int, int]

KEPT_PERIODS = 3
MIN_PERIODS = 5  # fewer are not worth the check
MAX_PERIOD = 8

_LISTS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)


@dataclass(frozen=True)
class Fold:
    """``periods`` equal groups of ``period`` modules in the list at ``path``, from child ``first`` on."""

    path: str
    first: int
    period: int
    periods: int
    length: int  # of the whole list

    @property
    def stop(self) -> int:
        """One past the last child of the run."""
        return self.first + self.period * self.periods

    def kept(self) -> tuple[int, ...]:
        """Children that stay: what is outside the run, its first two periods and its last."""
        inner = self.first + (KEPT_PERIODS - 1) * self.period
        return tuple(i for i in range(self.length) if i < inner or i >= self.stop - self.period)


def find_folds(model: nn.Module) -> tuple[Fold, ...]:
    """The longest run in each list of modules; nothing is folded twice."""
    uses = Counter(id(p) for _, p in model.named_parameters(remove_duplicate=False))
    shared = {id(p) for p in model.parameters() if uses[id(p)] > 1}
    folds: list[Fold] = []
    for path, module in model.named_modules():
        if type(module) not in _LISTS or any(_lies_in(path, fold.path) for fold in folds):
            continue
        children = list(module.children())
        if len(children) < MIN_PERIODS or list(module._modules) != [str(i) for i in range(len(children))]:
            continue
        run = _longest_run([fingerprint(child, (index, len(children)), shared) for index, child in enumerate(children)])
        if run is not None:
            folds.append(Fold(path, *run, length=len(children)))
    outside = {type(m) for name, m in model.named_modules() if not any(name.startswith(f"{f.path}.") for f in folds)}
    return () if any(may_count(kind) for kind in outside) else tuple(folds)


@contextlib.contextmanager
def shortened(model: nn.Module, folds: Iterable[Fold]) -> Generator[None]:
    """``model`` without the modules that ``folds`` leave out, for as long as the context lasts."""
    whole: list[tuple[nn.Module, dict[str, nn.Module | None]]] = []
    try:
        for fold in folds:
            module = model.get_submodule(fold.path)
            whole.append((module, dict(module._modules)))
            kept = [module._modules[str(index)] for index in fold.kept()]
            module._modules.clear()
            module._modules.update({str(index): child for index, child in enumerate(kept)})
        yield
    finally:
        for module, children in whole:
            module._modules.clear()
            module._modules.update(children)


def unfold(
    nodes: Sequence[Node], edges: Sequence[Edge], fold: Fold
) -> tuple[tuple[Node, ...], tuple[Edge, ...]] | None:
    """The nodes and edges of the whole list; None where the kept periods do not repeat one another."""
    start, length = _kept_range(nodes, fold)
    first, second, third = (range(start + i * length, start + (i + 1) * length) for i in range(KEPT_PERIODS))
    if length <= 0 or third.stop > len(nodes):
        return None
    incoming = _incoming(edges)
    names = _Renaming(fold)
    if not all(_same_operator(nodes[a], nodes[b], names) for a, b in zip(first, second, strict=True)):
        return None
    back = _Move(start, length)
    for b, c in zip(second, third, strict=True):
        if names.moved(back.node(nodes[b]), names.next_period) != nodes[c]:
            return None
        if {back.id(p) for p in incoming.get(b, ())} != set(incoming.get(c, ())):
            return None
    if any(start <= p < third.start for i in range(third.stop, len(nodes)) for p in incoming.get(i, ())):
        return None  # something after the run reads from inside it: the modules are not alike to it
    return _expand(nodes, incoming, fold, (start, length))


def _expand(
    nodes: Sequence[Node], incoming: Mapping[int, Sequence[int]], fold: Fold, kept: tuple[int, int]
) -> tuple[tuple[Node, ...], tuple[Edge, ...]]:
    """Copies of the second period between it and the third."""
    start, length = kept
    names = _Renaming(fold)
    copies = fold.periods - KEPT_PERIODS
    pieces: list[tuple[range, int, Callable[[int], int]]] = [(range(start + 2 * length), 0, names.as_before)]
    second = range(start + length, start + 2 * length)
    pieces += [(second, copy, names.copy(copy)) for copy in range(1, copies + 1)]
    pieces.append((range(start + 2 * length, len(nodes)), copies, names.as_after))
    result: list[Node] = []
    edges: list[Edge] = []
    for ids, periods, rename in pieces:
        move = _Move(start, periods * length)
        for node_id in ids:
            result.append(names.moved(move.node(nodes[node_id]), rename))
            edges.extend((move.id(producer), move.id(node_id)) for producer in incoming.get(node_id, ()))
    return tuple(result), tuple(sorted(edges))


@dataclass(frozen=True)
class _Move:
    """Node ids from ``start`` on, moved by ``distance``."""

    start: int
    distance: int

    def id(self, node_id: int) -> int:
        """Where ``node_id`` goes."""
        return node_id + self.distance if node_id >= self.start else node_id

    def node(self, node: Node) -> Node:
        """``node`` with all its references moved."""
        if self.distance == 0:
            return node
        return node.model_copy(
            update={
                "id": self.id(node.id),
                "operands": tuple(self.id(o) if isinstance(o, int) else o for o in node.operands),
                "saves": tuple(map(self.id, node.saves)),
                "storage": self.id(node.storage),
            }
        )


@dataclass(frozen=True)
class _Renaming:
    """Names in the shortened list as names in the whole one, which differ by the index of the child."""

    fold: Fold

    def as_before(self, index: int) -> int:
        """Up to the second period nothing was left out."""
        return index

    def as_after(self, index: int) -> int:
        """From the third period on, all that was left out lies before."""
        return index + (self.fold.periods - KEPT_PERIODS) * self.fold.period

    def next_period(self, index: int) -> int:
        """The same child one period on."""
        return index + self.fold.period

    def copy(self, copy: int) -> Callable[[int], int]:
        """A child of the second period as its ``copy``-th copy."""
        return lambda index: index + copy * self.fold.period

    def rename(self, name: str, index_of: Callable[[int], int]) -> str:
        """``name`` with the index of its child replaced."""
        prefix = f"{self.fold.path}." if self.fold.path else ""
        if not name.startswith(prefix):
            return name
        index, dot, rest = name[len(prefix) :].partition(".")
        return f"{prefix}{index_of(int(index))}{dot}{rest}" if index.isdigit() else name

    def moved(self, node: Node, index_of: Callable[[int], int]) -> Node:
        """``node`` with its module and parameters renamed."""
        return node.model_copy(
            update={
                "module": self.rename(node.module, index_of),
                "operands": tuple(self.rename(o, index_of) if isinstance(o, str) else o for o in node.operands),
            }
        )


def _kept_range(nodes: Sequence[Node], fold: Fold) -> tuple[int, int]:
    """First node of the kept periods, and nodes per period (0: not found)."""
    tree = ModuleTree.of(nodes, ())
    starts: list[int] = []
    for period in range(KEPT_PERIODS):
        index = str(fold.first + period * fold.period)
        child = f"{fold.path}.{index}" if fold.path else index
        ids = tree.node_ids.get(child, ())
        if not ids:
            return 0, 0
        starts.append(ids[0])
    return starts[0], starts[1] - starts[0] if starts[2] - starts[1] == starts[1] - starts[0] else 0


def _same_operator(first: Node, second: Node, names: _Renaming) -> bool:
    """Whether two nodes do the same in neighbouring periods, whatever they read."""
    return (first.op, first.shape, first.dtype, first.requires_grad, first.op_class) == (
        second.op,
        second.shape,
        second.dtype,
        second.requires_grad,
        second.op_class,
    ) and names.rename(first.module, names.next_period) == second.module


def _incoming(edges: Iterable[Edge]) -> dict[int, list[int]]:
    incoming: dict[int, list[int]] = {}
    for producer, consumer in edges:
        incoming.setdefault(consumer, []).append(producer)
    return incoming


def _lies_in(path: str, folded: str) -> bool:
    return folded == "" or path == folded or path.startswith(folded + ".")


def _longest_run(kinds: Sequence[Hashable]) -> tuple[int, int, int] | None:
    """(first, period, periods) of the run that leaves out most modules."""
    best: tuple[int, int, int] | None = None
    for period in range(1, MAX_PERIOD + 1):
        first = 0
        while first + MIN_PERIODS * period <= len(kinds):
            stop = first + period
            while stop < len(kinds) and kinds[stop] == kinds[stop - period]:
                stop += 1
            periods = (stop - first) // period
            if periods >= MIN_PERIODS and (best is None or period * (periods - 3) > best[1] * (best[2] - 3)):
                best = (first, period, periods)
            first = max(first + 1, stop - period + 1)
    return best
