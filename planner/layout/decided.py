"""What a plan says of placements on the tensor-parallel axis: it is taken as it is, and only the rest is chosen."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

from costmodels.vocabulary.choices import Placement


class _Way(Protocol):
    @property
    def placement(self) -> Placement: ...

    @property
    def is_hooked(self) -> bool: ...


Way = TypeVar("Way", bound=_Way)


@dataclass(frozen=True)
class Decided:
    """Placements that are decided already.

    ``parameters``: by any FQN. ``outputs``: what modules' outputs are redistributed to, by FQN, those of all others
    being left as they are; None where nothing is decided about them.
    """

    parameters: Mapping[str, Placement] = field(default_factory=dict[str, Placement])
    outputs: Mapping[str, Placement] | None = None

    def of_output(self, module: str, ways: list[Way]) -> list[Way]:
        """Those of ``ways`` to run an operator that ends with ``module``'s output as was decided.

        A module with several outputs may redistribute one of them alone.
        """
        if self.outputs is None:
            return ways
        wanted = self.outputs.get(module)
        hooked = [way for way in ways if way.is_hooked and way.placement == wanted]
        return hooked or [way for way in ways if not way.is_hooked]


NOTHING = Decided()
