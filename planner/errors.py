"""The tree of errors a user may see; everything else that escapes is a defect of ours.

    PlannerError                 exit code 1
    ├── InputError               exit code 2   the command line or an input file is wrong
    │   ├── ModelError                         MODEL cannot be found, loaded or traced
    │   ├── PinsError                          options contradict each other, the model or the number of devices
    │   ├── NoLayoutError                      no layout has as many devices and obeys the pins
    │   ├── HardwareError                      a hardware profile is unknown or invalid
    │   └── PlanError                          a plan file is damaged, foreign or impossible
    │       └── UntrustedModelError            its model is code that lies outside the plan's folder
    ├── DivergedError            exit code 1   training cannot go on: its loss is no number
    ├── InfeasibleError          exit code 3   no plan fits
    └── TimeLimitError           exit code 4   the time limit came before any plan was found

The message states the rule and the values; the hint states the way out.
"""

from __future__ import annotations

from collections.abc import Sequence


class PlannerError(Exception):
    """An error with the rule and the values in ``message`` and the way out in ``hint``, which tracebacks show too."""

    exit_code = 1

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        if hint:
            self.add_note(f"hint: {hint}")


class InputError(PlannerError):
    """The command line or an input file is wrong."""

    exit_code = 2


class ModelError(InputError):
    """MODEL cannot be found, loaded or traced."""


class PinsError(InputError):
    """The options contradict each other, the model or the number of devices: ``violations`` says each rule."""

    def __init__(self, violations: Sequence[str]) -> None:
        self.violations = tuple(violations)
        super().__init__(
            "these options contradict each other:\n" + "\n".join(f"  - {each}" for each in violations),
            hint="change or drop the options named above",
        )


class NoLayoutError(InputError):
    """No layout uses all devices and obeys the pins, though these do not contradict each other."""


class HardwareError(InputError):
    """A hardware profile is unknown or invalid."""


class PlanError(InputError):
    """A plan file is damaged, foreign or impossible."""


class UntrustedModelError(PlanError):
    """The model of a plan is code that lies outside the plan's folder, and nobody said to trust it."""


class DivergedError(PlannerError):
    """Training cannot go on: its loss is no number."""


class InfeasibleError(PlannerError):
    """No plan fits: the message names the binding constraint, the hint the smallest change.

    ``lacks_bytes``: what the fullest device, or node, lacks under the layout that lacks least; None: not known.
    """

    exit_code = 3

    def __init__(self, message: str, *, hint: str = "", lacks_bytes: float | None = None) -> None:
        super().__init__(message, hint=hint)
        self.lacks_bytes = lacks_bytes


class TimeLimitError(PlannerError):
    """The time limit came before any plan was found."""

    exit_code = 4

    def __init__(
        self,
        message: str = "no plan was found in time",
        *,
        hint: str = "raise --time-limit, or pin a choice such as --tp 8",
    ) -> None:
        super().__init__(message, hint=hint)
