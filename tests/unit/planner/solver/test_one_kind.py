"""Blocks of one kind in any stages, against every way to cut a row of blocks."""

import random
from itertools import combinations_with_replacement

import pytest

from planner.evaluation.cuts import StageSizes
from planner.solver.one_kind import OneKind


@pytest.mark.parametrize("seed", range(12))
def test_no_rank_holds_fewer_other_blocks(seed: int) -> None:
    rng = random.Random(seed)
    is_one = tuple(rng.random() < 0.6 for _ in range(9))
    blocks, ends = OneKind(0, [1], is_one), (0, len(is_one))
    for num_stages in (1, 2, 3):
        of_ranks = blocks.others_of_ranks(3, num_stages)
        assert of_ranks.shape == (3, blocks.number + 1)
        least: dict[tuple[int, int], int] = {}
        # The stages of one rank lie anywhere: of every choice of as many runs of blocks, what they hold.
        for borders in combinations_with_replacement(range(len(is_one) + 1), 2 * num_stages):
            runs = [is_one[borders[2 * at] : borders[2 * at + 1]] for at in range(num_stages)]
            held, others = sum(map(sum, runs)), sum(len(run) - sum(run) for run in runs)
            for rank in [rank for rank in range(3) if rank == 1 or borders[-rank // 2] == ends[rank // 2]]:
                least[rank, held] = min(least.get((rank, held), len(is_one)), others)
        for (rank, held), others in least.items():
            assert of_ranks[rank, held] <= others
            if num_stages == 1:
                assert of_ranks[rank, held] == others


def test_what_lies_between_mixtures_and_before_them() -> None:
    by_turns = OneKind(1, [0], (False, True) * 24)
    assert by_turns.others_of_ranks(3, 1)[:, :5].tolist() == [[0, 1, 2, 3, 4], [0, 0, 1, 2, 3], [0, 0, 1, 2, 3]]
    assert by_turns.others_of_ranks(3, 2)[:, :6].tolist() == [[0, 0, 0, 1, 2, 3]] * 3
    assert by_turns.sizes(StageSizes(3, 7)) == StageSizes(1, 4)
    first_are_dense = OneKind(1, [0], (False,) * 3 + (True,) * 58)
    assert first_are_dense.others_of_ranks(2, 1)[:, :3].tolist() == [[0, 3, 3], [0, 0, 0]]
    assert not first_are_dense.others_of_ranks(4, 4).any()
    assert first_are_dense.sizes(StageSizes(2, 5)) == StageSizes(0, 5)
