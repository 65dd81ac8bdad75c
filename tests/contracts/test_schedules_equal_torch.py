"""Our action lists are those that torch.distributed.pipelining runs, recorded from its own classes."""

from types import SimpleNamespace
from typing import Literal

import pytest
from torch.distributed.pipelining.schedules import Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B

from costmodels.schedule import Action, build_schedule

KINDS: dict[str, Literal["F", "B"]] = {"FORWARD": "F", "FULL_BACKWARD": "B"}


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
        ours = build_schedule(name, p, 1, m)
        assert ours == tuple(recorded(schedule, rank, p, m) for rank in range(p)), name


@pytest.mark.parametrize(
    ("p", "v", "m"), [(1, 2, 3), (2, 2, 2), (2, 2, 8), (4, 2, 3), (4, 2, 8), (4, 3, 10), (4, 4, 16), (8, 2, 24)]
)
def test_several_stages_a_rank(p: int, v: int, m: int) -> None:
    state = SimpleNamespace(
        pp_group_size=p,
        n_local_stages=v,
        _n_microbatches=m,
        microbatches_per_round=m // max(1, m // p),
    )
    for rank, ours in enumerate(build_schedule("Interleaved1F1B", p, v, m)):
        theirs = ScheduleInterleaved1F1B._calculate_single_rank_operations(state, rank)  # type: ignore[arg-type]
        assert ours == tuple(
            Action(KINDS[a.computation_type.name], a.stage_index, a.microbatch_index or 0) for a in theirs if a
        )
