"""Our action lists are those that torch.distributed.pipelining runs, recorded from its own classes."""

from collections.abc import Callable, Iterable, Iterator
from types import SimpleNamespace

import pytest
from torch.distributed.pipelining import schedules as of_torch
from torch.distributed.pipelining.schedules import Schedule1F1B, ScheduleGPipe

from costmodels.pipeline import simulate
from costmodels.vocabulary.action import Action, ActionLists, Kind
from costmodels.vocabulary.schedules import SCHEDULES, ScheduleName
from planner.executor.pipeline import SendsAfterReceives

KINDS: dict[str, Kind] = {"FORWARD": "F", "FULL_BACKWARD": "B", "BACKWARD_INPUT": "I", "BACKWARD_WEIGHT": "W"}

FORWARDS: tuple[Kind, ...] = ("F",)
BACKWARDS: tuple[Kind, ...] = ("B", "I")
COMPUTATIONS = {ours: of_torch._ComputationType[theirs] for theirs, ours in KINDS.items()}


class RecordingStage:
    """Stands where torch's PipelineStage stands, computes nothing and notes what it is asked to do."""

    def __init__(self, stage_index: int) -> None:
        self.stage_index = stage_index
        self.actions: list[Action] = []
        self.asked: list[tuple[Kind, int, int]] = []  # for the input of which pass, and how many actions came before

    def forward_one_chunk(self, microbatch: int, *_: object, **__: object) -> None:
        self.actions.append(Action("F", self.stage_index, microbatch))

    def backward_one_chunk(self, microbatch: int, **_: object) -> None:
        self.actions.append(Action("B", self.stage_index, microbatch))

    def perform_reduce_grad(self, _: int) -> None: ...

    def get_fwd_recv_ops(self, microbatch: int) -> list[object]:
        self.asked.append(("F", microbatch, len(self.actions)))
        return []

    def get_bwd_recv_ops(self, microbatch: int) -> list[object]:
        self.asked.append(("B", microbatch, len(self.actions)))
        return []

    def get_fwd_send_ops(self, _: int) -> list[object]:
        return []

    get_bwd_send_ops = get_fwd_send_ops


def recorded(schedule: type[ScheduleGPipe] | type[Schedule1F1B], rank: int, p: int, m: int) -> RecordingStage:
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
    return stage


@pytest.mark.parametrize(("p", "m"), [(1, 1), (1, 4), (2, 2), (2, 7), (4, 4), (4, 16), (8, 12)])
def test_one_stage_a_rank(p: int, m: int) -> None:
    for name, schedule in (("GPipe", ScheduleGPipe), ("1F1B", Schedule1F1B)):
        ours = ScheduleName(name).rules.actions(p, 1, m)
        assert ours == tuple(tuple(recorded(schedule, rank, p, m).actions) for rank in range(p)), name


@pytest.mark.parametrize("schedule", [ScheduleGPipe, Schedule1F1B])
def test_with_one_stage_a_rank_asks_for_an_input_when_all_before_it_is_done(schedule: type[Schedule1F1B]) -> None:
    """So results go on demand (``Transfer.ON_DEMAND``)."""
    for p, m in [(2, 2), (2, 7), (4, 16), (8, 12)]:
        for rank in range(p):
            stage = recorded(schedule, rank, p, m)
            assert stage.asked == [(kind, i, place) for place, (kind, _, i) in enumerate(stage.actions)]


def test_our_stages_have_1f1b_post_receives_before_sends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Over gloo both ways then go at once. Every rank between two others exchanges with both, in either direction."""

    class Exchanging(RecordingStage):
        def get_fwd_recv_ops(self, microbatch: int) -> list[object]:
            return ["receive"]

        def get_fwd_send_ops(self, _: int) -> list[object]:
            return SendsAfterReceives(["send"])  # type: ignore[list-item, return-value]

        get_bwd_recv_ops, get_bwd_send_ops = get_fwd_recv_ops, get_fwd_send_ops

    batches: list[list[str]] = []
    monkeypatch.setattr(of_torch, "_batch_p2p", lambda ops, desc: batches.append(list(ops)) or [])
    monkeypatch.setattr("tests.contracts.test_schedules_equal_torch.RecordingStage", Exchanging)
    recorded(Schedule1F1B, 1, 4, 8)
    both = [batch for batch in batches if len(batch) > 1]
    assert len(both) >= 2 * (8 - 3)
    assert all(batch == ["receive", "send"] for batch in both)


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


def asked_after(lists: ActionLists, rank_of: Callable[[int], int], num_stages: int, m: int) -> dict[Action, int]:
    """For each pass that receives its input how many of its rank's actions torch runs before it posts the receive."""
    theirs: dict[int, list[of_torch._Action | None]] = {}
    for rank, actions in enumerate(lists):
        computed = [of_torch._Action(stage, COMPUTATIONS[kind], i) for kind, stage, i in actions]
        theirs[rank] = of_torch._add_reduce_grad([*of_torch._add_unshard_reshard([*computed])], m)
    found: dict[Action, int] = {}
    for actions in of_torch._add_send_recv(theirs, rank_of, num_stages).values():  # type: ignore[arg-type]
        num_before = 0
        for action in actions:
            name = action.computation_type.name
            if name.startswith("RECV"):
                kind: Kind = "F" if name == "RECV_F" else "B"
                found[Action(kind, action.stage_index, action.microbatch_index or 0)] = num_before
            num_before += name in KINDS
    return found


def makespan_with_receives(lists: ActionLists, asked: dict[Action, int], way_s: float, num_stages: int) -> float:
    """Every action takes a second, a whole backward pass two; a result leaves when made and asked for."""
    ends: list[list[float]] = [[] for _ in lists]
    end_of: dict[Action, float] = {}
    while any(len(done) < len(actions) for done, actions in zip(ends, lists, strict=True)):
        for done, actions in zip(ends, lists, strict=True):
            if len(done) == len(actions):
                continue
            kind, stage, i = action = actions[len(done)]
            begins = done[-1] if done else 0.0
            source, made_by = (stage - 1, FORWARDS) if kind == "F" else (stage + 1, BACKWARDS)
            if kind != "W" and 0 <= source < num_stages:
                made = next((end_of[a] for k in made_by if (a := Action(k, source, i)) in end_of), None)
                if made is None:
                    continue
                place = asked.get(Action("F" if kind == "F" else "B", stage, i))
                if place is not None:  # otherwise it is made on this rank
                    posted = done[place - 1] if place else 0.0
                    begins = max(begins, max(made, posted) + way_s)
            done.append(begins + (2.0 if kind == "B" else 1.0))
            end_of[action] = done[-1]
    return max(done[-1] for done in ends)


SHAPES = [(2, 2, 8), (4, 1, 16), (4, 2, 16), (8, 2, 32), (8, 4, 32)]
IN_TURN = [rules for rules in SCHEDULES.values() if rules.in_torch and not rules.has_one_stage]


@pytest.mark.parametrize(
    ("name", "p", "v", "m"),
    [(rules.name, *shape) for rules in IN_TURN for shape in SHAPES if not rules.violations(*shape)],
)
def test_with_several_stages_a_rank_inputs_are_asked_for_ahead(name: ScheduleName, p: int, v: int, m: int) -> None:
    """Ways of a tenth of a forward pass: less than 1 % longer than if all receives were posted before all actions."""
    rules, num_stages = name.rules, p * v
    lists = rules.actions(p, v, m)
    asked = asked_after(lists, lambda stage: rules.rank_of(stage, p), num_stages, m)
    found = makespan_with_receives(lists, asked, 0.1, num_stages)
    split = [1.0] * num_stages, [1.0] * num_stages
    ours = simulate(lists, [1.0] * num_stages, [2.0] * num_stages, 0.1, split).makespan_s
    assert makespan_with_receives(lists, dict.fromkeys(asked, 0), 0.1, num_stages) == pytest.approx(ours)
    assert ours * (1 - 1e-9) <= found < 1.01 * ours


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
