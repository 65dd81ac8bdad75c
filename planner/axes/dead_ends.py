"""Operators whose output, however they run, leads to one that cannot take it: why a unit has no placement.

``nn.MultiheadAttention`` is the best known case. It views what its fused weight makes in three pieces; the columns of a
rank are no such pieces, and no module ends between the two, where parts could be gathered.
"""

from __future__ import annotations

from planner.axes.placement import Alternatives


def dead_ends(ways: Alternatives) -> frozenset[int]:
    """Their nodes. Found from the last operator to the first, each edge by itself: not every reason is seen."""
    open_ways = [list(range(len(operator.alternatives))) for operator in ways.operators]
    edges_from: dict[int, list[int]] = {}
    for place, edge in enumerate(ways.edges):
        edges_from.setdefault(edge.source, []).append(place)
    found: set[int] = set()
    for source in sorted(edges_from, key=lambda place: ways.operators[place].node, reverse=True):
        left = [
            way
            for way in open_ways[source]
            if all(
                any(ways.edges[at].collectives[way][taken] is not None for taken in open_ways[ways.edges[at].target])
                for at in edges_from[source]
            )
        ]
        if left:
            open_ways[source] = left
        else:  # what comes before it is judged as if it were not
            found.add(ways.operators[source].node)
    return frozenset(found)
