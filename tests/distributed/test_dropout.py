"""Dropout zeroes different things on ranks that hold different things, the same on copies, and the same again."""

from __future__ import annotations

import pytest

from tests.distributed.conftest import Outcome

Masks = list[dict[str, list[str]]]  # by rank, then by module: a digest of what each call zeroed


def masks_of(name: str, outcomes: dict[str, Outcome]) -> Masks:
    masks = outcomes[name]["masks"]
    assert isinstance(masks, list)
    assert all(len(calls) > 0 for rank in masks for calls in rank.values())
    return masks


def all_calls(masks: dict[str, list[str]]) -> list[str]:
    return [call for calls in masks.values() for call in calls]


@pytest.mark.parametrize("name", ["dropout-dp4", "dropout-pp4", "dropout-shares"])
def test_other_data_and_other_stages_have_other_masks(name: str, outcomes: dict[str, Outcome]) -> None:
    calls = [call for rank in masks_of(name, outcomes) for call in all_calls(rank)]
    assert len(calls) > 8
    assert len(set(calls)) == len(calls)


def test_copies_of_one_activation_have_one_mask(outcomes: dict[str, Outcome]) -> None:
    masks = masks_of("dropout-tp2-dp2", outcomes)
    assert masks[0] == masks[1]  # tensor-parallel neighbours
    assert masks[2] == masks[3]
    assert not set(all_calls(masks[0])) & set(all_calls(masks[2]))


def test_shards_of_a_sequence_have_masks_of_their_own(outcomes: dict[str, Outcome]) -> None:
    masks = masks_of("dropout-tp2-dp2-sp", outcomes)
    in_blocks = [[c for fqn, calls in rank.items() if "layers" in fqn for c in calls] for rank in masks]
    calls = [call for rank in in_blocks for call in rank]
    assert all(call.startswith("(8, 8, 32)") for call in calls)  # half of 16 tokens
    assert len(set(calls)) == len(calls) > 8


@pytest.mark.parametrize("name", ["dropout-dp4-full", "dropout-tp2-dp2-sp-full"])
def test_recomputation_zeroes_the_same(name: str, outcomes: dict[str, Outcome]) -> None:
    for rank in masks_of(name, outcomes):
        for fqn, calls in rank.items():
            if "layers" not in fqn:
                continue  # nothing is recomputed outside blocks
            # A micro-batch calls a block's dropout twice. Repeating stops once the last thing that backward needs is
            # there, which is before the second.
            assert len(calls) % 3 == 0
            for number in range(0, len(calls), 3):
                first, second, again = calls[number : number + 3]
                assert first == again != second
            assert len(set(calls)) == len(calls) // 3 * 2, fqn
