"""Pipelines over groups of unlike devices: which layouts they allow, each in every order of the groups."""

from __future__ import annotations

from itertools import islice, permutations

from hardware_profiles.schema import DeviceGroup
from planner.layout.columns import Columns
from planner.layout.layout import Layout

MAX_ORDERS = 24  # every order of four groups; of more, the first ones


def over_groups(layouts: Columns[Layout], groups: tuple[DeviceGroup, ...]) -> Columns[Layout]:
    """Those of ``layouts`` whose pipeline ranks each lie in one group, over every order of the groups.

    All ranks of a pipeline have the same number of devices, so each group must hold a whole number of them. Only
    schedules whose stages the solver cuts: equal stages would leave the faster group waiting.
    """
    counts = [group.cluster.num_devices for group in groups]

    def fits(layout: Layout) -> bool:
        pp, rules = layout.mesh.pp, layout.schedule.rules
        return pp > 1 and rules.has_one_stage and all(count % (sum(counts) // pp) == 0 for count in counts)

    orders = islice(permutations(group.name for group in groups), MAX_ORDERS)
    return layouts.where(fits, "mesh.pp", "schedule").with_each("groups", list(orders))
