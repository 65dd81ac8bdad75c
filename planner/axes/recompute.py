"""Recomputation: what a block keeps from forward to backward, and what it runs again instead.

Not a field of any key: every mode is lowered, so that blocks may differ in theirs.
"""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

from costmodels.vocabulary.choices import Recompute
from costmodels.vocabulary.schedules import ScheduleName
from costmodels.vocabulary.workload import OpClass
from planner.axes.base import Asked, Axis
from planner.axes.framework import Framework
from planner.axes.lowered import Kernel, RankUnit, RankWork, Recomputation, Role
from planner.axes.placement import UnitPlacement
from planner.table.keys import WorkKey


class RecomputeAxis(Axis[tuple[()]]):
    """Activation checkpointing of blocks."""

    name: ClassVar[str] = "recompute"

    def work_fields(self, key: WorkKey) -> tuple[()]:
        """Every mode at once."""
        return ()

    def work(self, work: RankWork, own: tuple[()], placement: UnitPlacement, framework: Framework) -> RankWork:
        """Every mode of recomputation at once. Units that are no blocks keep everything under every mode."""
        recipe = framework.recipe
        modes = [recomputation(work.unit, mode, recipe.selective) for mode in Recompute]
        if recipe.stops_recomputation_early:
            modes = [stopped_early(work.unit, mode) for mode in modes]
        return replace(work, unit=replace(work.unit, recomputations=tuple(modes)))


RECOMPUTE = RecomputeAxis()


def modes(asked: Asked, schedule: ScheduleName) -> list[Recompute | None]:
    """Modes that go with ``schedule``: a split backward pass would recompute again for every group of weights.

    None: every block has its own, chosen with the borders of the stages.
    """
    pin = asked.pins.recompute
    if schedule.rules.splits_backward:
        return [Recompute.NONE] if pin in (None, Recompute.NONE) else []
    return [pin]


def recomputation(unit: RankUnit, mode: Recompute, selective: str) -> Recomputation:
    """What ``mode`` does to one unit, where ``selective`` is what the framework's selective recomputation is."""
    everything = frozenset(kernel.id for kernel in unit.kernels)
    if mode is Recompute.NONE or not unit.is_block:
        extras = everything - ({unit.loss.kernel} if unit.loss else frozenset())
        return Recomputation(unit.saved, extras, keeps_logits=True, kernels=frozenset())
    if mode is Recompute.FULL or selective == "blocks":
        return Recomputation(unit.entering, frozenset(), False, everything, roles=frozenset(Role), waits_for_host=True)
    # Selective recomputation repeats kernels: not the wait for the host, nor tensor-parallel collectives. Our own
    # keeps the results of all collectives that are operators; those inside attention run again.
    attention = frozenset(kernel.id for kernel in unit.kernels if kernel.op_class is OpClass.ATTENTION)
    if selective == "attention":
        return Recomputation(unit.saved, everything - attention, keeps_logits=False, kernels=attention)
    products = _kept_products(unit, selective)
    return Recomputation(
        kept=unit.entering | {kernel.storage for kernel in products},
        kept_extras_of=attention,
        keeps_logits=False,
        kernels=everything - {kernel.id for kernel in products},
        roles=frozenset({Role.DISPATCH, Role.ATTENTION} if selective == "products" else {Role.DISPATCH}),
        keeps_results=selective == "products",
    )


def stopped_early(unit: RankUnit, mode: Recomputation) -> Recomputation:
    """``mode`` where recomputation stops when the last tensor that backward asks for is there.

    An operator's inputs are saved before it runs, so the last operator that saves something runs again only where it
    saves its own output. Source: torch 2.13, torch/utils/checkpoint.py, ``_StopRecomputationError`` (non-reentrant
    checkpoints stop early); torch/csrc/autograd/VariableTypeManual.cpp and generated code save inputs first.
    """
    saving = [kernel for kernel in unit.kernels if kernel.saves]
    if not mode.kernels or not saving:
        return mode
    last = max(saving, key=lambda kernel: kernel.id)
    stop = last.id + 1 if last.storage in last.saves or last.saved_extra_bytes else last.id
    return replace(mode, kernels=frozenset(i for i in mode.kernels if i < stop), stops_before=stop)


def _kept_products(unit: RankUnit, selective: str) -> list[Kernel]:
    """Operators whose outputs selective recomputation keeps."""
    products = [kernel for kernel in unit.kernels if kernel.is_kept_product]
    if selective != "alternate_products":
        return products
    attention = [kernel for kernel in products if kernel.op_class is OpClass.ATTENTION]
    return attention + [kernel for kernel in products if kernel.op_class is not OpClass.ATTENTION][::2]
