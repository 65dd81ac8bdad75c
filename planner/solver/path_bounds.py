"""What the longest paths of a schedule take at least, over all ways to spread the work over the stages.

See ``costmodels.pipeline_paths``. It is for ranks that hold several stages, or halves of backward passes apart.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from costmodels.path_mean import PathBound
from costmodels.pipeline_paths import coefficients, has_paths, unlike_coefficients
from planner.evaluation.unit_times import UnitTimes
from planner.layout.columns import Array, Positions
from planner.solver.of_table import UnitPasses
from planner.solver.time_bounds import AlikeLayouts


def path_s(of: AlikeLayouts, recomputed_s: Array, wanted: NDArray[np.bool]) -> Array:
    """Seconds of a step at least, for those ``wanted``, else 0; and 0 where a schedule over unlike devices has none.

    ``recomputed_s``: what all ranks must at least recompute of one micro-batch.
    """
    found = np.zeros(len(wanted))
    if of.is_over_groups and not has_paths(of.schedule, of.pp):
        return found
    slowness = of.slowness if of.is_over_groups else np.zeros((0, len(wanted)))
    shapes, which = np.unique(np.vstack([of.num_microbatches, slowness])[:, wanted], axis=1, return_inverse=True)
    places = np.flatnonzero(wanted)
    for place, (m, *slow) in enumerate(shapes.T.tolist()):
        part = places[which == place]
        bounds = _bounds(of, int(m), tuple(slow))
        of_ranks = zip(bounds, of.times_of_ranks, strict=True)
        least_s = np.min([bound.least(*_passes(times, part)) for bound, times in of_ranks], axis=0)
        passed = min(bound.forward for bound in bounds), min(bound.backward for bound in bounds)
        sends = bounds[0].sends
        if of.is_on_demand:  # what every stage receives for a pass is as if the pass took longer
            sends = max(sends, (of.pp - 1) * sum(passed))
        found[part] = least_s @ of.counts + min(passed) * recomputed_s[part] + sends * of.least_send_s[part]
        found[part] += sum(passed) / 2 * of.num_beside.sum() * of.beside_s[part] + of.once_s[part]
    return found


def _bounds(of: AlikeLayouts, num_microbatches: int, slowness: tuple[float, ...]) -> tuple[PathBound, ...]:
    """One for each rank where these are unlike, else one for all."""
    shape = of.schedule, of.pp, of.virtual_stages, num_microbatches
    return unlike_coefficients(*shape, slowness) if slowness else (coefficients(*shape),)


def _passes(times: UnitPasses | UnitTimes, part: Positions) -> tuple[Array, Array, Array]:
    """Seconds forward, for gradients of inputs and for those of weights."""
    return times.forward_s[part], times.backward_s[part] - times.weight_s[part], times.weight_s[part]
