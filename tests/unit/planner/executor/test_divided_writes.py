"""What a forward pass writes in place to a tensor that ranks share out is what one process writes.

On two real ranks: those of a fake world have the same parts.
"""

from __future__ import annotations

import json

from tests.forked_python import OnRanks
from tests.unit.planner.executor.divided_writes import WRITES

PROGRAM = "from tests.unit.planner.executor.divided_writes import main; main()"


def test_what_is_written_its_views_and_its_gradient_are_those_of_one_process(on_ranks: OnRanks) -> None:
    """Llama 4's router scatters into its logits: torch refused. Writes to a slice along the divided dim were lost."""
    errors = json.loads(on_ranks(2, PROGRAM)[0])
    assert len(errors) == 2 * len(WRITES) + 1
    assert {name: error for name, error in errors.items() if error > 1e-4} == {}
