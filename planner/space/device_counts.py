"""Numbers of devices below what there is that may well train faster: using fewer is a choice.

All devices must share the work evenly, so a number with few divisors leaves few layouts: of 25 devices 24 may do more,
of 126 perhaps 120 or 112. And more devices than a batch has work for only wait for each other. So three kinds of
numbers are worth a search:

- the largest that allow more meshes than every number above them, of those that fill their nodes; and where the last
  node is not filled, the number with most meshes of those that fill it less;
- those of one node, which a slow network between nodes may leave faster than all;
- half of the devices, where they are even, with what is worth a search below that. So what is found for twice the
  devices is never slower than what is found for the devices.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from planner.axes.base import Asked, divisors
from planner.layout.layout import Limits, Pins, Training
from planner.space.search_space import num_meshes

# Of the numbers that allow more meshes, the largest so many.
MOST_RICHER = 2
# Up to so many devices every number is looked at; above that whole nodes of few significant bits.
MOST_EXAMINED = 128
SIGNIFICANT_BITS = 4


def worthwhile_counts(training: Training, pins: Pins, limits: Limits) -> tuple[int, ...]:
    """Numbers of devices below that of ``limits`` that are worth a search, descending."""
    node = limits.devices_per_node
    found = {node} if node < limits.num_devices and _num_meshes(training, pins, limits, node) else set[int]()
    count = limits.num_devices
    while True:
        found.update(_richer(training, pins, limits, count))
        if count % 2:
            break
        count //= 2
        if _num_meshes(training, pins, limits, count):
            found.add(count)
    return tuple(sorted(found, reverse=True))


def _richer(training: Training, pins: Pins, limits: Limits, count: int) -> list[int]:
    """The largest numbers above half of ``count`` that allow more meshes than all between them and ``count``."""
    most = _num_meshes(training, pins, limits, count)
    found: list[int] = []
    for number in sorted(_examined(training, limits, count), reverse=True):
        meshes = _num_meshes(training, pins, limits, number)
        if meshes > most:
            most = meshes
            found.append(number)
        if len(found) == MOST_RICHER:
            break
    node = limits.devices_per_node
    if limits.num_devices % node and count > node:  # the last node is not filled, and may be filled less
        meshes = {
            number: _num_meshes(training, pins, limits, number) for number in range(count // node * node + 1, count)
        }
        richest = max(meshes, key=lambda number: (meshes[number], number), default=0)
        if meshes.get(richest, 0) > _num_meshes(training, pins, limits, count) and richest not in found:
            found.append(richest)
    return found


def _examined(training: Training, limits: Limits, count: int) -> Iterator[int]:
    """Numbers above half of ``count`` and below it."""
    node = limits.devices_per_node
    if count <= MOST_EXAMINED:
        numbers = set(range(count // 2 + 1, count))
    else:
        unit = 1 << (count.bit_length() - SIGNIFICANT_BITS)
        numbers = {n for n in range(unit, count, unit) if n > count // 2}
        numbers.update(n for n in divisors(training.global_batch_size) if count // 2 < n < count)
    return (number for number in numbers if number <= node or number % node == 0)


def _num_meshes(training: Training, pins: Pins, limits: Limits, count: int) -> int:
    """Meshes over so many devices; tensor parallelism is taken for possible wherever it divides the heads."""
    node = min(count, limits.devices_per_node)
    splits = {d for d in range(2, node + 1) if limits.num_heads % d == 0} if limits.tensor_degrees else set[int]()
    degrees = frozenset(splits | limits.tensor_degrees)
    smaller = replace(limits, num_devices=count, devices_per_node=node, tensor_degrees=degrees)
    return num_meshes(Asked(training, pins, smaller))
