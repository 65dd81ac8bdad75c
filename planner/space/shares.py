"""Shares of the batch that replicas on unlike devices may have, where there is no pipeline.

A layout with shares gives the replicas on each group a size of micro-batch of their own, and all as many micro-batches:

    global batch = micro-batches * sum over groups of replicas * size

There are many such lists of sizes. The replicas on a group take the same time whatever the others' sizes are, so listed
is each group by itself with each size that it may have (``Layout.parts``); ``solver.shares`` puts these together.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from itertools import accumulate
from math import factorial

from costmodels.vocabulary.mesh import Mesh
from planner.axes.base import Asked, divisors
from planner.axes.context import CONTEXT, methods
from planner.axes.data import MAX_MICRO_BATCH_SIZE
from planner.axes.pipeline import schedules
from planner.axes.tensor import TENSOR
from planner.axes.unlike_devices import MAX_ORDERS
from planner.layout.columns import Columns
from planner.layout.layout import Layout
from planner.space.search_space import Degrees, Shape, divided, layouts_on


def parts_of_shares(asked: Asked, groups: Mapping[str, int]) -> Columns[Layout]:
    """The replicas on each of ``groups`` with each size of micro-batch; empty where the user fixes one size for all.

    And of more groups than pipelines are laid over in every order. ``groups``: the devices of each, in order.
    """
    found = [Columns.of(Layout, ())]
    if asked.pins.micro_batch is not None or asked.pins.pp not in (None, 1) or factorial(len(groups)) > MAX_ORDERS:
        return found[0]

    @cache
    def shapes(replicas: tuple[int, ...]) -> list[Columns[Shape]]:
        return [Columns.of(Shape, _shapes(asked, replicas, place)) for place in range(len(groups))]

    for degrees in _degrees(asked):
        for mesh in divided(asked, degrees):
            if not _has_whole_parts(mesh, [*groups.values()]):
                continue
            replicas = tuple(count // (mesh.cp * mesh.tp) for count in groups.values())
            ways = methods(asked, mesh.tp, mesh.cp)
            pairs = zip(groups, shapes(replicas), strict=True)
            for group, of_group in ((group, of_group) for group, of_group in pairs if of_group):
                part = layouts_on(mesh, asked, of_group).with_each("cp_method", ways)
                found.append(part.with_each("groups", [(group,)]))
    return Columns.joined(found)


def _degrees(asked: Asked) -> Iterator[Degrees]:
    """Of tensor and context parallelism, and data parallelism over the rest, which need not divide the batch."""
    left = asked.limits.num_devices
    for tp in TENSOR.degrees(asked, left):
        for cp in CONTEXT.degrees(asked, left // tp):
            dp = left // tp // cp
            if asked.pins.dp in (None, dp):
                yield Degrees(1, dp, cp, tp)


def _has_whole_parts(mesh: Mesh, ranks: Sequence[int]) -> bool:
    """Whether every group holds whole replicas, and whole groups of ranks that exchange rows of experts."""
    together = mesh.ep * mesh.expert_tp
    divides = all(count % (mesh.cp * mesh.tp) == 0 for count in ranks)
    return divides and all(end % together == 0 for end in accumulate(ranks))


def _shapes(asked: Asked, replicas: tuple[int, ...], place: int) -> Iterator[Shape]:
    """Sizes of the group at ``place`` that leave every replica of the others a sequence, and none too many."""
    batch, others = asked.training.global_batch_size, sum(replicas) - replicas[place]
    for number in divisors(batch):
        each = batch // number  # sequences of a micro-batch of all replicas together
        if not sum(replicas) <= each <= sum(replicas) * MAX_MICRO_BATCH_SIZE:
            continue
        most = min(MAX_MICRO_BATCH_SIZE, (each - others) // replicas[place])
        for schedule, virtual in schedules(asked, 1, number):
            yield from (Shape(size, number, schedule, virtual) for size in range(1, most + 1))
