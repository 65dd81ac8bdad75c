"""What units must take more at least so that they hold less."""

from __future__ import annotations

from itertools import permutations

import numpy as np

from planner.layout.columns import Array


def least_extra_s(saved: Array, extra_s: Array, counts: Array, lacking: Array) -> Array:
    """Seconds that units must take more so that they save the bytes that are ``lacking``, [layouts].

    ``saved``, ``extra_s``: of one unit in each mode, [modes, layouts, kinds]. For any price of a byte, each unit costs
    the least over its modes of its seconds less the price of what it saves, and what is lacking is paid: so much it
    takes at least. Prices at which one mode becomes as good as another are tried.
    Example: six units save 1 GiB for 0.3 s or 1.5 GiB for 0.9 s, and 3 GiB are lacking. At 0.3 s a GiB the modes cost 0
    and 0.45 s, as nothing saved does: 0.9 s.
    """
    found = np.zeros(len(lacking))
    for a, b in permutations(range(len(saved)), 2):
        more = saved[b] - saved[a]
        with np.errstate(divide="ignore", invalid="ignore"):
            prices = np.where((more > 0) & (extra_s[b] > extra_s[a]), (extra_s[b] - extra_s[a]) / more, 0.0)
        for price in prices.T[prices.any(axis=0)]:  # of each kind, [layouts]
            cheapest = np.min(extra_s - price[:, None] * saved, axis=0)
            found = np.maximum(found, cheapest @ counts + price * lacking)
    return found


def prices_of_modes(kept: Array, extra_s: Array) -> Array:
    """Seconds a byte at which one mode becomes as good as another in some stage of a rank.

    [layouts, ranks, prices]. ``kept``: [layouts, modes, ranks, stages of one]; ``extra_s``: [layouts, modes, ranks or
    1].
    """
    unlike = {kept[..., place].tobytes(): place for place in range(kept.shape[3])}  # many stages keep the same
    kept = kept[..., list(unlike.values())]
    found = [np.zeros((*kept.shape[::2], 1))]
    for a, b in permutations(range(extra_s.shape[1]), 2):
        more = (extra_s[:, b] - extra_s[:, a])[..., None]
        if (more > 0).any():
            saved = kept[:, a] - kept[:, b]
            with np.errstate(divide="ignore", invalid="ignore"):
                found.append(np.where((saved > 0) & (more > 0), more / saved, 0.0))
    return np.concatenate(found, axis=2)
