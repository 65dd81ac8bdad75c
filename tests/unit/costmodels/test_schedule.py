import itertools
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from costmodels.vocabulary.action import FORWARD, INPUT_GRADIENT, WEIGHT_GRADIENT, Action, ActionColumns
from costmodels.vocabulary.schedules import SCHEDULES, ScheduleName, peak_in_flight


def counting(num_stages: int, weight: float = 1.0) -> dict[int, float]:
    return dict.fromkeys(range(num_stages), weight)


def test_four_microbatches_on_two_ranks() -> None:
    first, last = ScheduleName("1F1B").rules.actions(2, 1, 4)
    assert [f"{a.kind}{a.microbatch}" for a in first] == ["F0", "F1", "B0", "F2", "B1", "F3", "B2", "B3"]
    assert [f"{a.kind}{a.microbatch}" for a in last] == ["F0", "B0", "F1", "B1", "F2", "B2", "F3", "B3"]


@pytest.mark.parametrize(("num_ranks", "num_microbatches"), [(1, 1), (4, 4), (4, 9), (8, 32)])
def test_in_flight(num_ranks: int, num_microbatches: int) -> None:
    weights = counting(num_ranks)
    for rank, actions in enumerate(ScheduleName("GPipe").rules.actions(num_ranks, 1, num_microbatches)):
        assert peak_in_flight(actions, weights) == num_microbatches, rank
    for rank, actions in enumerate(ScheduleName("1F1B").rules.actions(num_ranks, 1, num_microbatches)):
        assert peak_in_flight(actions, weights) == min(num_microbatches, num_ranks - rank)


@pytest.mark.parametrize(("p", "v"), [(2, 2), (4, 2), (4, 3), (8, 4), (16, 2)])
def test_interleaving_holds_more_by_the_published_factor(p: int, v: int) -> None:
    # Narayanan et al. (2021): p · (1 + (p-1)/(p·v)) whole micro-batches on the first rank
    first = ScheduleName("Interleaved1F1B").rules.actions(p, v, 4 * p)[0]
    assert peak_in_flight(first, counting(p * v, 1 / v)) == pytest.approx(p * (1 + (p - 1) / (p * v)))


def test_stages_of_unequal_size_are_weighed() -> None:
    actions = [Action("F", 0, 0), Action("F", 2, 0), Action("B", 2, 0), Action("F", 0, 1), Action("B", 0, 0)]
    assert peak_in_flight(actions, {0: 3.0, 2: 10.0}) == 13.0


@pytest.mark.parametrize("p", [2, 4, 8])
def test_activations_of_the_schedules_that_split_backward_passes(p: int) -> None:
    # Qi et al. (2024): against the p micro-batches of 1F1B, ZB-1P and ZB-V hold 1x and ZB-2P 2x, on every rank alike;
    # DeepSeek-V3's table: DualPipe holds one stage more than there are, and DualPipeV has 2p stages
    expected = {
        ("InterleavedZeroBubble", 1): p,
        ("InterleavedZeroBubble", 2): p,
        ("ZB-2P", 1): 2 * p - 1,
        ("ZBVZeroBubble", 2): p,
        ("DualPipeV", 2): p + 1 / 2,
    }
    for (name, v), number in expected.items():
        peaks = [peak_in_flight(a, counting(p * v, 1 / v)) for a in ScheduleName(name).rules.actions(p, v, 4 * p)]
        assert peaks == pytest.approx([number] * p), name


def test_gradients_wait_beside_activations() -> None:
    actions = [Action("F", 0, 0), Action("I", 0, 0), Action("F", 0, 1), Action("W", 0, 0), Action("B", 0, 1)]
    assert peak_in_flight(actions, {0: 3.0}, {0: 0.5}) == 6.5
    assert peak_in_flight(actions[-2:-1], {0: 0.0}, {0: 1.0}) == 0.0


@given(
    p=st.integers(1, 8),
    v=st.integers(1, 4),
    m=st.integers(1, 24),
    name=st.sampled_from(list(SCHEDULES)),
)
def test_every_rank_runs_every_microbatch_of_its_stages_once(p: int, v: int, m: int, name: str) -> None:
    if ScheduleName(name).rules.violations(p, v, m):
        with pytest.raises(ValueError, match="."):
            ScheduleName(name).rules.actions(p, v, m)
        return
    for rank, actions in enumerate(ScheduleName(name).rules.actions(p, v, m)):
        mine = [stage for stage in range(p * v) if ScheduleName(name).rules.rank_of(stage, p) == rank]
        forwards = {Action("F", stage, i) for stage in mine for i in range(m)}
        backwards = {action._replace(kind="B") for action in forwards}
        whole = Counter(a._replace(kind="B") if a.kind == "I" else a for a in actions if a.kind != "W")
        assert whole == Counter(forwards | backwards)
        split = {a[1:] for a in actions if a.kind == "I"}
        assert Counter(a[1:] for a in actions if a.kind == "W") == Counter(split)


@pytest.mark.parametrize(
    ("arguments", "rule"),
    [
        (("ZBVZeroBubble", 4, 1, 8), "ZBVZeroBubble has 2 stages a rank, got 1 virtual stages"),
        (
            ("DualPipeV", 4, 2, 7),
            "DualPipeV needs at least as many micro-batches as stages, got 7 for 8",
        ),
        (("1F1B", 4, 1, 3), "1F1B needs at least as many micro-batches as stages, got 3 for 4"),
        (("1F1B", 4, 2, 8), "1F1B has one stage a rank, got 2 virtual stages"),
        (("GPipe", 4, 2, 8), "GPipe has one stage a rank, got 2 virtual stages"),
        (("Interleaved1F1B", 4, 1, 8), "Interleaved1F1B needs at least 2 virtual stages a rank, got 1"),
        (
            ("Interleaved1F1B", 4, 2, 9),
            "Interleaved1F1B needs micro-batches that divide into 2 rounds (micro-batches // ranks = 9 // 4), got 9",
        ),
    ],
)
def test_broken_rules_are_said(arguments: tuple[str, int, int, int], rule: str) -> None:
    name, *numbers = arguments
    assert ScheduleName(name).rules.violations(*numbers) == (rule,)


def test_all_broken_rules_are_said_at_once() -> None:
    assert len(ScheduleName("1F1B").rules.violations(4, 2, 3)) == 2
    assert len(ScheduleName("GPipe").rules.violations(0, 0, 0)) == 3


@pytest.mark.parametrize("arguments", [("Interleaved1F1B", 4, 2, 10), ("Interleaved1F1B", 4, 2, 3), ("GPipe", 4, 1, 1)])
def test_what_torch_allows_is_allowed(arguments: tuple[str, int, int, int]) -> None:
    name, *numbers = arguments
    assert ScheduleName(name).rules.violations(*numbers) == ()


def _listed_in_flight(name: ScheduleName, p: int, v: int, m: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """What ``in_flight_by_stage`` says, counted along the actions."""
    flying, waits = [0] * (p * v), [0] * (p * v)
    for actions in name.rules.actions(p, v, m):
        held = [sum((a.kind == "F") - (a.kind in "BW") for a in actions[: k + 1]) for k in range(len(actions))]
        for kind, stage, _ in actions[: held.index(max(held)) + 1]:
            flying[stage] += (kind == "F") - (kind in "BW")
            waits[stage] += (kind == "I") - (kind == "W")
    return tuple(flying), tuple(waits)


@pytest.mark.parametrize("name", ScheduleName)
def test_what_schedules_hold_in_closed_form_is_what_their_lists_hold(name: ScheduleName) -> None:
    seen = 0
    for p, v, m in itertools.product((1, 2, 3, 4, 6), (1, 2, 3), (1, 2, 3, 4, 6, 8, 12, 13)):
        # Without a pipeline a micro-batch is finished at once, whatever the list says.
        if not name.rules.violations(p, v, m) and (p > 1 or not name.rules.has_one_stage):
            assert name.rules.in_flight_by_stage(p, v, m) == _listed_in_flight(name, p, v, m), (p, v, m)
            seen += 1
    assert seen > 20


@pytest.mark.parametrize("schedule", ScheduleName)
def test_only_backward_passes_that_are_split_stand_in_the_way_of_recomputation_and_sharded_gradients(
    schedule: ScheduleName,
) -> None:
    is_split = schedule in {
        ScheduleName.INTERLEAVED_ZERO_BUBBLE, ScheduleName.ZBV_ZERO_BUBBLE, ScheduleName.DUAL_PIPE_V, ScheduleName.ZB_2P
    }  # fmt: skip
    rules = schedule.rules
    assert bool(rules.conflicts(zero_stage=None, recomputation=["full"])) is is_split
    assert bool(rules.conflicts(zero_stage=2, recomputation=[])) is is_split
    assert rules.conflicts(zero_stage=1, recomputation=[]) == ()
    assert len(rules.conflicts(zero_stage=3, recomputation=["full", "selective"])) == 2 * is_split


@pytest.mark.parametrize("name", ScheduleName)
def test_columns_say_what_lists_say(name: ScheduleName) -> None:
    tried = 0
    for p, v, m in itertools.product((1, 2, 3, 5), (1, 2, 3), (1, 4, 5, 6, 12)):
        if not name.rules.violations(p, v, m):
            tried += 1
            columns, lists = name.rules.columns(p, v, m), name.rules.actions(p, v, m)
            again = ActionColumns.of(lists)
            for mine, other in ((columns.kind, again.kind), (columns.stage, again.stage)):
                assert mine.tolist() == other.tolist()
            assert columns.microbatch.tolist() == again.microbatch.tolist()
            assert columns.ends == again.ends == tuple(np.cumsum([len(each) for each in lists]).tolist())
            assert {type(action) for each in lists for action in each} == {Action}
    assert tried > 0


@pytest.mark.parametrize(("p", "m"), [(2, 3), (3, 4), (4, 12), (5, 7)])
def test_zb_2p_follows_its_description(p: int, m: int) -> None:
    """torch has no lists of it. 2 (p-1-r) forwards more than one, then F and I in turn, and each W once 2r more Is."""
    for rank, actions in enumerate(ScheduleName.ZB_2P.rules.actions(p, 1, m)):
        left = {kind: [Action(kind, rank, i) for i in range(m)] for kind in (FORWARD, INPUT_GRADIENT, WEIGHT_GRADIENT)}
        expected = [left[FORWARD].pop(0) for _ in range(min(m, 2 * (p - 1 - rank)))]
        for _ in range(m):
            expected += [left[FORWARD].pop(0)] if left[FORWARD] else []
            expected.append(left[INPUT_GRADIENT].pop(0))
            if expected[-1].microbatch >= 2 * rank:
                expected.append(left[WEIGHT_GRADIENT].pop(0))
        assert list(actions) == expected + left[WEIGHT_GRADIENT]
