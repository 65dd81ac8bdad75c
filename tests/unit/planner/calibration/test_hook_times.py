"""Hooks' times out of timings that were made of them."""

from __future__ import annotations

from itertools import product

import pytest

from costmodels.vocabulary.choices import Recompute
from planner.calibration.hook_times import HookTiming, PassTimes, fit_pass, predicted_s

FORWARD = PassTimes(3e-4, 2e-4, 2.5e-4, 0.0, 4e-4, 5e-5)
BACKWARD = PassTimes(2e-4, 3e-4, 3e-4, 2e-4, 5e-4, 7e-5)
KERNEL_S = 1.5e-5


def timing(num_blocks: int, zero_stage: int, is_cast: bool, mode: Recompute) -> HookTiming:
    """A model of so many blocks and three other units, its seconds summed here and not by the code that fits."""
    units, kernels, repeats = num_blocks + 3, 20 * num_blocks, mode is not Recompute.NONE
    is_sharded = is_cast or zero_stage > 0

    def of_pass(times: PassTimes, *, reduces: bool) -> float:
        seconds = is_sharded * times.sharded_s + is_cast * times.cast_s
        seconds += (zero_stage == 3) * times.gather_s + reduces * times.reduce_s
        again = times.checkpoint_s * num_blocks * repeats
        return units * seconds + again + times.selected_s * kernels * (mode is Recompute.SELECTIVE)

    backward = of_pass(BACKWARD, reduces=zero_stage >= 2) + kernels * KERNEL_S * (mode is Recompute.FULL)
    counts = (zero_stage, mode, units, num_blocks, kernels)
    return HookTiming("toy", is_sharded, is_cast, *counts, KERNEL_S, of_pass(FORWARD, reduces=False), backward)


def test_the_times_that_made_the_timings_are_found() -> None:
    """Every setting of two models; a third, which the fit has not seen, is predicted."""
    settings = list(product((4, 8), (0, 1, 2, 3), (False, True), Recompute))
    timings = [timing(*each) for each in settings if each[1:] != (0, False, Recompute.NONE)]
    found = [fit_pass(timings, forward=True), fit_pass(timings, forward=False)]
    for fitted, made in zip(found, (FORWARD, BACKWARD), strict=True):
        assert list(vars(fitted).values()) == pytest.approx(list(vars(made).values()), abs=1e-12)
    unseen = timing(16, 3, True, Recompute.FULL)
    assert predicted_s(unseen, *found) == pytest.approx(unseen.more_s)
