"""A run whose layout somebody else has chosen, and what it means for the units of its model's graph."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

from costmodels.vocabulary.choices import Recompute
from planner.errors import PlanError
from planner.graph.model_graph import ModelGraph
from planner.layout.layout import Layout, Training


@dataclass(frozen=True)
class PinnedRun:
    """A run of ``model`` under ``framework``.

    ``stage_blocks``: repeated blocks of every pipeline stage; None: as the framework cuts by itself. ``recompute``: of
    all blocks, or one mode for each.
    """

    model: str
    framework: str
    layout: Layout
    training: Training
    stage_blocks: tuple[int, ...] | None
    recompute: Recompute | tuple[Recompute, ...]

    def starts(self, graph: ModelGraph) -> tuple[int, ...] | None:
        """First unit of each stage, where the run says it; PlanError where the stages are not the model's.

        What stands before the blocks is in the first stage, what stands behind them in the last.
        """
        if self.stage_blocks is None:
            return None
        blocks = _blocks(graph)
        if sum(self.stage_blocks) != len(blocks):
            raise PlanError(
                f"the stages hold {sum(self.stage_blocks)} blocks, the model has {len(blocks)}",
                hint="correct the stages, or name another model: --model MODEL",
            )
        if any(size == 0 for size in self.stage_blocks[1:-1]):
            raise PlanError("a stage between the first and the last holds no block", hint="correct the stages")
        firsts = [*blocks, blocks[-1] + 1]
        return (0, *(firsts[before] for before in accumulate(self.stage_blocks[:-1])))

    def modes(self, graph: ModelGraph) -> tuple[Recompute, ...]:
        """What every unit recomputes; PlanError where the run has modes for another number of blocks."""
        blocks = _blocks(graph)
        each = (self.recompute,) * len(blocks) if isinstance(self.recompute, Recompute) else self.recompute
        if len(each) != len(blocks):
            raise PlanError(
                f"the config has {len(each)} blocks, the model {len(blocks)}", hint="name another model: --model MODEL"
            )
        of_unit = dict(zip(blocks, each, strict=True))
        return tuple(of_unit.get(unit, Recompute.NONE) for unit in range(len(graph.units)))


def _blocks(graph: ModelGraph) -> list[int]:
    return [index for index, unit in enumerate(graph.units) if unit.is_block]
