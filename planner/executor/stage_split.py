"""Cuts a recorded forward pass into pipeline stages: which calls, values and parameters each stage has.

A call of a module that a stage lists runs on that stage. Glue runs on the stage of its latest
operand; glue that depends on the model's inputs and constants alone (positions, rotary tables,
masks) is repeated on every stage that needs it, and nothing of it is sent. What draws random numbers is not repeated:
the first stage does and sends them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from planner.errors import PlanError
from planner.executor.stage_order import agreed_places
from planner.executor.stage_trace import Call, Slot, StateSlot, TensorMeta, Trace, inside, leaves_of, slots_in
from planner.plan.checks import nearest


@dataclass(frozen=True)
class StageProgram:
    """What one stage does: receive ``inputs`` in order, run ``calls``, send ``outputs`` in order."""

    index: int
    calls: tuple[Call, ...]
    released: tuple[tuple[Slot, ...], ...]  # beside each call: values that nothing needs after it
    inputs: tuple[Slot, ...]
    outputs: tuple[Slot, ...]
    metas: Mapping[Slot, TensorMeta]
    result: object  # the model's output with slots, on the last stage
    modules: tuple[str, ...]
    states: frozenset[str]  # parameters and buffers that its glue uses


@dataclass(frozen=True)
class TiedParameter:
    """One tensor that several stages hold: its FQN on each of them."""

    fqns: Mapping[int, str]  # by stage


def split_trace(module: nn.Module, trace: Trace, stages: Sequence[Sequence[str]]) -> tuple[StageProgram, ...]:
    """The programs of all stages.

    PlanError where the order of ``stages`` contradicts the flow of data, or a module uses a parameter of another stage.
    """
    _check_borrowed(trace, stages)
    parameters = {fqn for fqn, _ in module.named_parameters(remove_duplicate=False)}
    placed = _assign_stages(trace, stages, parameters)
    last = len(stages) - 1
    produced = {slot: stage for call, stage in zip(trace.calls, placed, strict=True) for slot in call.results}
    needed_until = dict.fromkeys(slots_in(trace.output), last)
    for call, stage in zip(trace.calls, placed, strict=True):
        if stage is not None:
            needed_until.update({slot: max(needed_until.get(slot, 0), stage) for slot in call.operands})
    sent = sorted(needed_until, key=agreed_places(trace).__getitem__)
    cuts = [
        tuple(slot for slot in sent if (stage := produced[slot]) is not None and stage <= cut < needed_until[slot])
        for cut in range(last)
    ]
    boundaries = [(), *cuts, ()]
    return tuple(
        _program(index, trace, placed, modules, (boundaries[index], boundaries[index + 1]), index == last)
        for index, modules in enumerate(stages)
    )


def _check_borrowed(trace: Trace, stages: Sequence[Sequence[str]]) -> None:
    for module, names in trace.borrowed:
        user = next(index for index, modules in enumerate(stages) if module in modules)
        owners = [index for index, listed in enumerate(stages) for each in listed for fqn in names if inside(fqn, each)]
        if user not in owners:
            where = f"is on stage {owners[0]}" if owners else "is on no stage"
            raise PlanError(
                f"module {module!r} is on stage {user} and uses {names[0]}, which is none of its own and {where}: "
                "it would use a copy that nobody trains",
                hint="make it a parameter of that module as well (a tied one), or plan with pp = 1",
            )


def tied_parameters(module: nn.Module, programs: Sequence[StageProgram]) -> tuple[TiedParameter, ...]:
    """Tensors that several stages hold."""
    holders = _holders(module, programs)
    return tuple(
        TiedParameter(stages)
        for tensor, stages in holders.items()
        if isinstance(tensor, nn.Parameter) and len(stages) > 1
    )


def keep_unused(module: nn.Module, programs: Sequence[StageProgram]) -> tuple[StageProgram, ...]:
    """Every name of a parameter or buffer is on a stage, so that checkpoints of all layouts have it.

    What nothing uses is on the first stage, or as another name of what it is tied to on the first that holds that.
    """
    holders = _holders(module, programs)
    kept = [set(program.states) for program in programs]
    for fqn, tensor in _named_tensors(module):
        if not any(_holds(program, fqn) for program in programs):
            kept[min(holders.get(tensor, (0,)))].add(fqn)
    return tuple(replace(program, states=frozenset(states)) for program, states in zip(programs, kept, strict=True))


def _holders(module: nn.Module, programs: Sequence[StageProgram]) -> dict[torch.Tensor, dict[int, str]]:
    """The FQN of each parameter and buffer on the stages that hold it."""
    holders: dict[torch.Tensor, dict[int, str]] = {}
    for fqn, tensor in _named_tensors(module):
        for stage in [program.index for program in programs if _holds(program, fqn)]:
            holders.setdefault(tensor, {}).setdefault(stage, fqn)
    return holders


def _holds(program: StageProgram, fqn: str) -> bool:
    """Whether a parameter or buffer of this name is on the stage."""
    return fqn in program.states or any(inside(fqn, name) for name in program.modules)


def _named_tensors(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters and buffers, tied ones under each of their names."""
    yield from module.named_parameters(remove_duplicate=False)
    yield from module.named_buffers(remove_duplicate=False)


def check_stage_modules(module: nn.Module, stages: Sequence[Sequence[str]]) -> None:
    """PlanError that lists unknown, repeated and nested modules, and parameters of modules on no stage.

    A module on no stage whose parameters are all tied to those of modules on stages is code between them: a head that
    several of them are followed by, or that nobody calls.
    """
    known = dict(module.named_modules())
    listed = [fqn for stage in stages for fqn in stage]
    problems = [f"the model has no module {fqn!r}{nearest(fqn, known)}" for fqn in listed if fqn not in known]
    problems += [f"{fqn!r} is listed {listed.count(fqn)} times" for fqn in sorted(set(listed)) if listed.count(fqn) > 1]
    problems += [
        f"{inner!r} is inside {outer!r}, which is listed as well"
        for outer in listed
        for inner in listed
        if inner != outer and inside(inner, outer)
    ]
    placed = {parameter for fqn in listed if fqn in known for parameter in known[fqn].parameters()}
    for fqn, target in known.items():
        holds_listed = any(inside(name, fqn) for name in listed)
        is_listed = any(inside(fqn, name) for name in listed)
        if not holds_listed and not is_listed and not placed.issuperset(target.parameters(recurse=False)):
            problems.append(f"{fqn!r} has parameters, but is on no stage")
    if problems:
        raise PlanError(
            "pipeline.stages does not fit the model: " + "; ".join(problems),
            hint="search again for this model, or correct it",
        )


def _assign_stages(trace: Trace, stages: Sequence[Sequence[str]], parameters: set[str]) -> list[int | None]:
    """Stage of each call; None for glue that every stage may repeat for itself."""
    owner = {fqn: index for index, modules in enumerate(stages) for fqn in modules}
    stage_of: dict[Slot, int | None] = {}
    placed: list[int | None] = []
    waiting: list[int] = []  # glue over parameters alone: goes where it is first used
    for position, call in enumerate(trace.calls):
        operands = [stage_of[slot] for slot in call.operands]
        latest = max((stage for stage in operands if stage is not None), default=None)
        stage = latest
        if call.function is None:
            stage = owner[call.module]
            if latest is not None and latest > stage:
                raise _out_of_order(trace.calls[:position], call.module, stage, latest)
        elif latest is None and _uses_state(call, parameters, waiting, trace):
            waiting.append(position)
        elif latest is None and call.is_random:
            stage = 0
        placed.append(stage)
        stage_of.update(dict.fromkeys(call.results, stage))
    for position in reversed(waiting):
        results = set(trace.calls[position].results)
        users = [
            placed[later] if placed[later] is not None else len(stages) - 1
            for later in range(position + 1, len(placed))
            if results & set(trace.calls[later].operands)
        ]
        placed[position] = min((user for user in users if user is not None), default=len(stages) - 1)
    return placed


def _out_of_order(before: Sequence[Call], module: str, stage: int, latest: int) -> PlanError:
    """What to say of a call of ``module``, which is on ``stage``, on what a later one computes."""
    is_repeated = any(call.function is None and call.module == module for call in before)
    return PlanError(
        f"module {module!r} is on stage {stage}, but {'is called again on' if is_repeated else 'needs'} what stage "
        f"{latest} computes",
        hint="plan with pp = 1, or put all that runs between its calls on one stage"
        if is_repeated
        else "order the modules of pipeline.stages as the model runs them",
    )


def _uses_state(call: Call, parameters: set[str], waiting: Sequence[int], trace: Trace) -> bool:
    if not parameters.isdisjoint(call.states):
        return True
    earlier = {slot for position in waiting for slot in trace.calls[position].results}
    return not earlier.isdisjoint(call.operands)


def _program(
    index: int,
    trace: Trace,
    placed: Sequence[int | None],
    modules: Sequence[str],
    boundary: tuple[tuple[Slot, ...], tuple[Slot, ...]],
    last: bool,
) -> StageProgram:
    inputs, outputs = boundary
    needed = {*outputs, *(slots_in(trace.output) if last else ())}
    kept_at_end = frozenset(needed)
    calls: list[Call] = []
    released: list[tuple[Slot, ...]] = []
    for call, stage in reversed(list(zip(trace.calls, placed, strict=True))):
        repeated = stage is None and not needed.isdisjoint(call.results)
        if stage == index or repeated:
            operands = set(call.operands)
            unused = {slot for slot in call.results if slot not in needed}
            released.append(tuple((operands - needed) | unused))
            calls.append(call)
            needed |= operands
    missing = {slot for slot in needed if slot not in inputs} - {slot for call in calls for slot in call.results}
    assert not missing, f"stage {index} lacks {missing}"
    states = {state for call in calls for state in call.states}
    result = trace.output if last else None
    states |= {leaf.fqn for leaf in leaves_of(result) if isinstance(leaf, StateSlot)}
    return StageProgram(
        index=index,
        calls=tuple(reversed(calls)),
        released=tuple(tuple(s for s in slots if s not in kept_at_end) for slots in reversed(released)),
        inputs=inputs,
        outputs=outputs,
        metas={slot: trace.metas[slot] for slot in (*inputs, *outputs)},
        result=result,
        modules=tuple(modules),
        states=frozenset(states),
    )
