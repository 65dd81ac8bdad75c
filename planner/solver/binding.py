"""Why nothing fits: the constraint that binds at the layout that lacks least."""

from __future__ import annotations

from costmodels.memory import Rows
from planner.pricing.cost_table import CostTable
from planner.pricing.offloading import HostMemory
from planner.pricing.point import Priced
from planner.solver.decode import layout_text, offloaded_bytes

GIB = 2**30
# Parts of the memory that are named.
MOST_PARTS = 3


def binding_text(table: CostTable, closest: Priced, space_text: str) -> str:
    """The rule and its values. ``space_text`` says of what ``closest`` is the smallest."""
    need, room = max(zip(closest.ledgers, closest.capacity_bytes, strict=True), key=lambda p: p[0].total_bytes / p[1])
    host = closest.host
    even = f"Even the smallest of {space_text} ({layout_text(closest.layout)}) needs"
    if host is None or host.share < need.total_bytes / room:
        return (
            f"nothing fits: memory binds. {even} {need.total_bytes / GIB:.1f} GiB on its worst GPU, and "
            f"{table.cluster.profile.device.name} has {room / GIB:.1f} GiB. {_parts_text(need.rows)}"
        )
    name, needed, capacity, rows = _scarcest(host)
    return (
        f"nothing fits: {name} binds. {even} {needed / GIB:.1f} GiB of it on its fullest node, and a node of "
        f"{table.cluster.profile.name} has {capacity / GIB:.1f} GiB. {_parts_text(rows)}"
    )


def _scarcest(host: HostMemory) -> tuple[str, float, float, Rows]:
    """What binds on a node: its name, what is needed, what there is, and what takes it."""
    states = host.states
    if states.on_nvme and states.nvme_bytes / host.nvme_capacity_bytes >= host.share:
        return "NVMe", states.nvme_bytes, host.nvme_capacity_bytes, (("optimizer", states.optimizer),)
    return "host memory", states.ram_bytes, host.ram_capacity_bytes, tuple(offloaded_bytes(host).items())


def _parts_text(rows: Rows) -> str:
    largest = sorted(rows, key=lambda row: -row[1])[:MOST_PARTS]
    return "Largest parts, in GiB: " + ", ".join(
        f"{name.replace('_', ' ')} {num_bytes / GIB:.1f}" for name, num_bytes in largest
    )
