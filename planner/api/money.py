"""What training takes in time and money: a step, and a whole run."""

from __future__ import annotations

from planner.errors import InputError
from planner.plan.schema import Plan, RunSection

SECONDS_A_DAY, SECONDS_AN_HOUR = 86_400, 3_600


def whole_run(plan: Plan, num_tokens: int) -> RunSection:
    """Days, GPU-hours and dollars of training on ``num_tokens``, in whole steps, with nothing but steps in them.

    InputError where there are not so many.
    """
    if num_tokens < 1:
        raise InputError(f"a run has at least one token, got {num_tokens}", hint="give --tokens N")
    assert plan.prediction is not None
    training, step_s = plan.training, plan.prediction.step_time_s
    num_steps = -(-num_tokens // (training.global_batch_size * training.seq_len))
    usd = plan.prediction.usd_per_step
    return RunSection(
        num_tokens=num_tokens,
        num_steps=num_steps,
        days=num_steps * step_s / SECONDS_A_DAY,
        gpu_hours=num_steps * step_s * plan.num_devices / SECONDS_AN_HOUR,
        usd=None if usd is None else num_steps * usd,
    )


def check_price(usd_per_hour: object | None, hardware: str) -> None:
    """InputError where the profile has no price, so that nothing can be said of dollars."""
    if usd_per_hour is None:
        raise InputError(
            f"{hardware} has no price of a device, so no plan on it is the cheapest",
            hint="add device.usd_per_hour with its source to a profile of yours (planner hardware show NAME --json "
            "prints one to start from) and give it as --hardware FILE, or use --objective time",
        )
