from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from costmodels.schedule import Action, build_schedule, peak_in_flight, validate_schedule


def counting(num_stages: int, weight: float = 1.0) -> dict[int, float]:
    return dict.fromkeys(range(num_stages), weight)


def test_four_microbatches_on_two_ranks() -> None:
    first, last = build_schedule("1F1B", 2, 1, 4)
    assert [f"{a.kind}{a.microbatch}" for a in first] == ["F0", "F1", "B0", "F2", "B1", "F3", "B2", "B3"]
    assert [f"{a.kind}{a.microbatch}" for a in last] == ["F0", "B0", "F1", "B1", "F2", "B2", "F3", "B3"]


@pytest.mark.parametrize(("num_ranks", "num_microbatches"), [(1, 1), (4, 4), (4, 9), (8, 32)])
def test_in_flight(num_ranks: int, num_microbatches: int) -> None:
    weights = counting(num_ranks)
    for rank, actions in enumerate(build_schedule("GPipe", num_ranks, 1, num_microbatches)):
        assert peak_in_flight(actions, weights) == num_microbatches, rank
    for rank, actions in enumerate(build_schedule("1F1B", num_ranks, 1, num_microbatches)):
        assert peak_in_flight(actions, weights) == min(num_microbatches, num_ranks - rank)


@pytest.mark.parametrize(("p", "v"), [(2, 2), (4, 2), (4, 3), (8, 4), (16, 2)])
def test_interleaving_holds_more_by_the_published_factor(p: int, v: int) -> None:
    # Narayanan et al. (2021): p · (1 + (p-1)/(p·v)) whole micro-batches on the first rank
    first = build_schedule("Interleaved1F1B", p, v, 4 * p)[0]
    assert peak_in_flight(first, counting(p * v, 1 / v)) == pytest.approx(p * (1 + (p - 1) / (p * v)))


def test_stages_of_unequal_size_are_weighed() -> None:
    actions = [Action("F", 0, 0), Action("F", 2, 0), Action("B", 2, 0), Action("F", 0, 1), Action("B", 0, 0)]
    assert peak_in_flight(actions, {0: 3.0, 2: 10.0}) == 13.0


@given(
    p=st.integers(1, 8),
    v=st.integers(1, 4),
    m=st.integers(1, 24),
    name=st.sampled_from(["GPipe", "1F1B", "Interleaved1F1B"]),
)
def test_every_rank_runs_every_microbatch_of_its_stages_once(p: int, v: int, m: int, name: str) -> None:
    if validate_schedule(name, p, v, m):
        with pytest.raises(ValueError, match="."):
            build_schedule(name, p, v, m)
        return
    for rank, actions in enumerate(build_schedule(name, p, v, m)):
        expected = {Action(kind, c * p + rank, i) for kind in ("F", "B") for c in range(v) for i in range(m)}
        assert Counter(actions) == Counter(expected)


@pytest.mark.parametrize(
    ("arguments", "rule"),
    [
        (("ZBV", 4, 1, 8), "schedule must be one of GPipe, 1F1B, Interleaved1F1B, got 'ZBV'"),
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
    assert validate_schedule(*arguments) == (rule,)


def test_all_broken_rules_are_said_at_once() -> None:
    assert len(validate_schedule("1F1B", 4, 2, 3)) == 2
    assert len(validate_schedule("GPipe", 0, 0, 0)) == 3


@pytest.mark.parametrize("arguments", [("Interleaved1F1B", 4, 2, 10), ("Interleaved1F1B", 4, 2, 3), ("GPipe", 4, 1, 1)])
def test_what_torch_allows_is_allowed(arguments: tuple[str, int, int, int]) -> None:
    assert validate_schedule(*arguments) == ()
