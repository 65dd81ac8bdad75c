"""Which change is named where nothing fits: the smallest that was found to help."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from costmodels.vocabulary.choices import Optimizer, Precision
from hardware_profiles.catalog import load_profile
from hardware_profiles.schema import ClusterSpec
from planner.layout.layout import NO_PINS, Pins, Training
from planner.translate.infeasible import Attempt, smallest_change


def asked(num_devices: int, batch: int, pins: Pins = NO_PINS) -> Attempt:
    cluster = ClusterSpec(profile=load_profile("dgx-h100-80gb"), num_devices=num_devices)
    return Attempt(cluster, Training(batch, 1024, Precision.BF16, Optimizer.ADAMW), pins)


@pytest.mark.parametrize(
    ("needed", "devices"),
    [(25, 32), (48, 48), (49, 56), (64, 64), (65, 72), (97, 112)],  # whole nodes; a doubling is parted into eighths
)
def test_of_more_devices_the_fewest_that_were_tried_are_named(needed: int, devices: int) -> None:
    """Twice as many, four times and so on were all that was tried: 24 could not be told to be 64."""

    def fits(attempt: Attempt) -> bool:
        return attempt.cluster.num_devices >= needed and attempt.pins == NO_PINS

    hint = f"use --gpus {devices}: on that many of these GPUs a plan fits"
    assert smallest_change(asked(24, 48), fits) == hint


@pytest.mark.parametrize(
    ("enough", "said"),
    [
        (lambda attempt: attempt.training.global_batch_size == 1, "use --gpus 16: "),
        (lambda attempt: attempt.training.global_batch_size >= 16, "use --gpus 16 --global-batch 16: "),
    ],
)
def test_the_batch_is_kept_where_it_need_not_grow(enough: Callable[[Attempt], bool], said: str) -> None:
    """One long sequence is shared out by context parallelism: it was told to train 64 of them."""

    def fits(attempt: Attempt) -> bool:
        is_plain = attempt.pins == NO_PINS
        return is_plain and attempt.cluster.num_devices >= 16 and enough(attempt)

    assert smallest_change(asked(8, 1), fits).startswith(said)


def test_where_nothing_helps_what_may_is_said() -> None:
    plain = asked(8, 8)
    wide = replace(plain, training=replace(plain.training, precision=Precision.FP32))
    assert smallest_change(plain, lambda _: False) == "use devices with more memory, or a shorter --seq-len"
    assert smallest_change(wide, lambda _: False).endswith("or --precision bf16")
