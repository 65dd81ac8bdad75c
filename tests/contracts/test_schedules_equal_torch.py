"""Our action lists are those that torch.distributed.pipelining runs, recorded from its own classes."""

from collections.abc import Iterable, Iterator
from types import SimpleNamespace

import pytest
from torch.distributed.pipelining import schedules as of_torch
from torch.distributed.pipelining.schedules import Schedule1F1B, ScheduleGPipe

from costmodels.vocabulary.action import Action, Kind
from costmodels.vocabulary.schedules import SCHEDULES, ScheduleName

KINDS: dict[str, Kind] = {"FORWARD": "F", "FULL_BACKWARD": "B", "BACKWARD_INPUT": "I", "BACKWARD_WEIGHT": "W"}


class RecordingStage:
    """Stands where torch's PipelineStage stands, computes nothing and notes what it is asked to do."""

    def __init__(self, stage_index: int) -> None:
        self.stage_index = stage_index
        self.actions: list[Action] = []

    def forward_one_chunk(self, microbatch: int, *_: object, **__: object) -> None:
        self.actions.append(Action("F", self.stage_index, microbatch))

    def backward_one_chunk(self, microbatch: int, **_: object) -> None:
        self.actions.append(Action("B", self.stage_index, microbatch))

    def perform_reduce_grad(self, _: int) -> None: ...

    def get_fwd_recv_ops(self, _: int) -> list[object]:
        return []

    get_fwd_send_ops = get_bwd_recv_ops = get_bwd_send_ops = get_fwd_recv_ops


def recorded(schedule: type[ScheduleGPipe] | type[Schedule1F1B], rank: int, p: int, m: int) -> tuple[Action, ...]:
    """What torch's own loop of one rank does, without a process group."""
    stage = RecordingStage(rank)
    state = SimpleNamespace(
        _stage=stage,
        _num_stages=p,
        _n_microbatches=m,
        scale_grads=True,
        _check_inputs=lambda *_: ([()] * m, [{}] * m),
        _initialize_stage=lambda *_: None,
        _maybe_compute_loss=lambda *_: None,
        _maybe_get_loss=lambda *_: None,
        _update_losses=lambda *_: None,
    )
    schedule._step_microbatches(state)  # type: ignore[arg-type]
    return tuple(stage.actions)


@pytest.mark.parametrize(("p", "m"), [(1, 1), (1, 4), (2, 2), (2, 7), (4, 4), (4, 16), (8, 12)])
def test_one_stage_a_rank(p: int, m: int) -> None:
    for name, schedule in (("GPipe", ScheduleGPipe), ("1F1B", Schedule1F1B)):
        ours = ScheduleName(name).rules.actions(p, 1, m)
        assert ours == tuple(recorded(schedule, rank, p, m) for rank in range(p)), name


def flat(actions: Iterable[of_torch._Action | None]) -> Iterator[Action]:
    """torch's actions as ours: its pairs of DualPipeV, which its loop runs one after the other, as two."""
    for action in actions:
        if action is not None and action.sub_actions:
            yield from flat(action.sub_actions)
        elif action is not None:
            yield Action(KINDS[action.computation_type.name], action.stage_index, action.microbatch_index or 0)


def of_several_stages(name: str, rank: int, p: int, v: int, m: int) -> tuple[Action, ...]:
    """What torch's class ``name`` lists for one rank, without a process group."""
    state = SimpleNamespace(
        pp_group_size=p,
        n_local_stages=v,
        num_stages=p * v,
        _n_microbatches=m,
        microbatches_per_round=m // max(1, m // p),
    )
    schedule = of_torch.get_schedule_class(name)
    return tuple(flat(schedule._calculate_single_rank_operations(state, rank)))  # type: ignore[attr-defined, arg-type]


@pytest.mark.parametrize(
    ("p", "v", "m"), [(1, 2, 3), (2, 2, 2), (2, 2, 8), (4, 2, 3), (4, 2, 8), (4, 3, 10), (4, 4, 16), (8, 2, 24)]
)
@pytest.mark.parametrize("name", ["Interleaved1F1B", "InterleavedZeroBubble"])
def test_several_stages_a_rank(name: str, p: int, v: int, m: int) -> None:
    for rank, ours in enumerate(ScheduleName(name).rules.actions(p, v, m)):
        assert ours == of_several_stages(name, rank, p, v, m)


@pytest.mark.parametrize(("p", "m"), [(1, 4), (4, 8), (4, 10), (8, 24)])
def test_zero_bubble_with_one_stage_a_rank(p: int, m: int) -> None:
    for rank, ours in enumerate(ScheduleName("InterleavedZeroBubble").rules.actions(p, 1, m)):
        assert ours == of_several_stages("InterleavedZeroBubble", rank, p, 1, m)


@pytest.mark.parametrize(("p", "m"), [(1, 2), (2, 4), (2, 5), (3, 6), (4, 8), (4, 31), (5, 12), (8, 16), (8, 64)])
@pytest.mark.parametrize("name", ["ZBVZeroBubble", "DualPipeV"])
def test_stages_in_a_v(name: str, p: int, m: int) -> None:
    for rank, ours in enumerate(ScheduleName(name).rules.actions(p, 2, m)):
        assert ours == of_several_stages(name, rank, p, 2, m)


@pytest.mark.parametrize(("p", "m"), [(2, 1), (4, 2), (4, 5), (8, 7)])
def test_a_v_of_few_microbatches(p: int, m: int) -> None:
    for rank, ours in enumerate(ScheduleName("ZBVZeroBubble").rules.actions(p, 2, m)):
        assert ours == of_several_stages("ZBVZeroBubble", rank, p, 2, m)


def test_stages_lie_on_the_ranks_that_torch_gives_them() -> None:
    for name in ScheduleName:
        style = "v" if name.value in ("ZBVZeroBubble", "DualPipeV") else "loop"
        for p in (1, 2, 4, 5):
            theirs = of_torch.generate_stage_to_rank_mapping(p, 2 * p, style)
            assert {stage: name.rules.rank_of(stage, p) for stage in range(2 * p)} == theirs


def test_one_vocabulary() -> None:
    assert set(SCHEDULES) == set(ScheduleName)
    assert {name for name, rules in SCHEDULES.items() if not rules.in_torch} == {ScheduleName.ZB_2P}
    for name, rules in SCHEDULES.items():
        if rules.in_torch:
            assert of_torch.get_schedule_class(name.value) is not None
