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

    ``stage_blocks``: repeated blocks of every pipeline stage; None: as the framework cuts by itself,
    or as ``shared_out`` does with ``end_blocks``. ``recompute``: of all blocks, or one mode for each.
    """

    model: str
    framework: str
    layout: Layout
    training: Training
    stage_blocks: tuple[int, ...] | None
    recompute: Recompute | tuple[Recompute, ...]
    end_blocks: tuple[int, int] | None = None

    def starts(self, graph: ModelGraph) -> tuple[int, ...] | None:
        """First unit of each stage, where the run says it; PlanError where the stages are not the model's.

        What stands before the blocks is in the first stage, what stands behind them in the last.
        """
        blocks, held = _blocks(graph), self.stage_blocks
        if held is None and self.end_blocks is not None:
            held = shared_out(len(blocks), self.layout.mesh.pp * self.layout.virtual_stages, self.end_blocks)
        if held is None:
            return None
        if sum(held) != len(blocks):
            raise PlanError(
                f"the stages hold {sum(held)} blocks, the model has {len(blocks)}",
                hint="correct the stages, or name another model: --model MODEL",
            )
        if any(size == 0 for size in held[1:-1]):
            raise PlanError("a stage between the first and the last holds no block", hint="correct the stages")
        firsts = [*blocks, blocks[-1] + 1]
        return (0, *(firsts[before] for before in accumulate(held[:-1])))

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


def shared_out(num_blocks: int, num_stages: int, end_blocks: tuple[int, int]) -> tuple[int, ...]:
    """Blocks of each stage where the embedding and the head count as so many of them: torchtitan's own cut.

    All are shared out evenly, one more to each of the first stages where that does not come out. PlanError where a
    stage has no room for what stands at its end.
    """
    if num_stages == 1:
        return (num_blocks,)
    share, left = divmod(num_blocks + sum(end_blocks), num_stages)
    if share < max(1, *end_blocks):
        raise PlanError(
            f"{num_blocks} blocks, and embedding and head as {end_blocks[0]} and {end_blocks[1]} of them, are no share "
            f"for each of {num_stages} stages",
            hint="take fewer stages, or smaller pipeline_parallel_first_stage_less_layers and ..._last_...",
        )
    held = [share + (index < left) for index in range(num_stages)]
    held[0] -= end_blocks[0]
    held[-1] -= end_blocks[1]
    return tuple(held)


def _blocks(graph: ModelGraph) -> list[int]:
    return [index for index, unit in enumerate(graph.units) if unit.is_block]
