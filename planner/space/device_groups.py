"""Pipelines over groups of unlike devices: which layouts they allow, each in every order of the groups."""

from __future__ import annotations

from itertools import islice, permutations

from hardware_profiles.schema import DeviceGroup
from planner.space.columns import Columns
from planner.space.search_space import Choice

MAX_ORDERS = 24  # every order of four groups; of more, the first ones


def over_groups(choices: Columns[Choice], groups: tuple[DeviceGroup, ...]) -> Columns[Choice]:
    """Those of ``choices`` whose pipeline ranks each lie in one group, over every order of the groups.

    All ranks of a pipeline have the same number of devices, so each group must hold a whole number of them. Only
    schedules whose stages the solver cuts: equal stages would leave the faster group waiting.
    """
    counts = [group.cluster.num_devices for group in groups]

    def fits(choice: Choice) -> bool:
        pp, rules = choice.mesh.pp, choice.schedule.rules
        return pp > 1 and rules.has_one_stage and all(count % (sum(counts) // pp) == 0 for count in counts)

    orders = islice(permutations(group.name for group in groups), MAX_ORDERS)
    return choices.where(fits, "mesh.pp", "schedule").with_each("groups", list(orders))
