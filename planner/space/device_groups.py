"""Pipelines over groups of unlike devices: which layouts they allow, each in every order of the groups."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice, permutations

from hardware_profiles.schema import DeviceGroup
from planner.space.search_space import Choice

MAX_ORDERS = 24  # every order of four groups; of more, the first ones


def over_groups(choices: Iterable[Choice], groups: tuple[DeviceGroup, ...]) -> Iterator[Choice]:
    """Those of ``choices`` whose pipeline ranks each lie in one group, over every order of the groups.

    All ranks of a pipeline have the same number of devices, so each group must hold a whole number of them. Only
    schedules whose stages the solver cuts: equal stages would leave the faster group waiting.
    """
    counts = [group.cluster.num_devices for group in groups]
    fitting = [
        choice
        for choice in choices
        if choice.mesh.pp > 1
        and choice.schedule.is_cut_freely
        and all(count % (sum(counts) // choice.mesh.pp) == 0 for count in counts)
    ]
    for order in islice(permutations(group.name for group in groups), MAX_ORDERS):
        yield from (choice._replace(groups=order) for choice in fitting)
