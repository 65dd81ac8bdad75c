"""What training takes in time and money: a step, and a whole run."""

from __future__ import annotations

from math import isclose

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


def other_price(plan: Plan, now: float | None) -> tuple[str, ...]:
    """A note where ``plan`` was made at another price than ``now``, in dollars of a device-hour; None: there is none.

    So it is where a profile of the user's has the name of a shipped one.
    """
    found = plan.prediction
    if found is None:
        return ()
    then = None
    if found.usd_per_step is not None:
        then = found.usd_per_step * SECONDS_AN_HOUR / (found.step_time_s * plan.num_devices)
    if then == now or (then is not None and now is not None and isclose(then, now, rel_tol=1e-6)):
        return ()
    texts = ["without a price" if usd is None else f"at ${usd:.4g} a GPU-hour" for usd in (then, now)]
    return (
        f"the plan was made with {plan.hardware} {texts[0]}, and is priced with it {texts[1]}: where that was a "
        "profile of yours, give it as --hardware FILE",
    )


def check_price(usd_per_hour: object | None, hardware: str) -> None:
    """InputError where the profile has no price, so that nothing can be said of dollars."""
    if usd_per_hour is None:
        raise InputError(
            f"{hardware} has no price of a device, so no plan on it is the cheapest",
            hint="add device.usd_per_hour with its source to a profile of yours (planner hardware show NAME --json "
            "prints one to start from) and give it as --hardware FILE, or use --objective time",
        )
