"""Samples come in an order that is a permutation of each epoch, the same under every layout, and looked up at once."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest
import torch

from planner.errors import PlanError
from planner.executor.data import TokenData, open_data
from planner.executor.mesh import RankPlace
from planner.executor.order import key_of, shuffled
from planner.plan.plan_file import read_plan
from planner.plan.schema import BatchShare

SEQ_LEN = 4


def data_of(num_samples: int, seed: int = 0) -> TokenData:
    return TokenData(torch.arange(num_samples * SEQ_LEN + 1).remainder(251).to(torch.uint8), SEQ_LEN, seed)


@pytest.mark.parametrize("size", [*range(1, 70), 255, 256, 257, 1000, 4096, 65537])
def test_every_order_is_a_permutation(size: int) -> None:
    for key in (key_of(0, 0), key_of(0, 1), key_of(7, 0)):
        assert sorted(shuffled(position, size, key) for position in range(size)) == list(range(size))


def test_orders_of_epochs_and_seeds_have_nothing_in_common() -> None:
    """Of two random orders of 1000 one position agrees on average, 10 or more with probability 1e-7."""
    orders = [[shuffled(p, 1000, key_of(seed, epoch)) for p in range(1000)] for seed in range(3) for epoch in range(3)]
    orders.append(list(range(1000)))
    for number, one in enumerate(orders):
        for other in orders[:number]:
            assert sum(a == b for a, b in zip(one, other, strict=True)) < 10


def test_neighbours_are_no_neighbours_afterwards() -> None:
    """The distance of two random positions of n is n / 3 on average, here to 3 of its standard deviations."""
    order = [shuffled(p, 10_000, key_of(1, 0)) for p in range(10_000)]
    distances = [abs(a - b) for a, b in itertools.pairwise(order)]
    mean, deviation = 10_000 / 3, 10_000 / 18**0.5 / 100
    assert abs(sum(distances) / len(distances) - mean) < 3 * deviation


def test_an_epoch_visits_every_sample_once_over_the_border_of_batches() -> None:
    data = data_of(50)
    epoch = [data.sample(position) for position in range(50, 100)]
    assert sorted(epoch) == list(range(50))
    assert epoch != [data.sample(position) for position in range(50)]


@pytest.mark.parametrize("degree", [1, 2, 3, 6])
def test_ranks_share_out_one_global_batch(degree: int) -> None:
    data = data_of(100)
    tokens, labels = data.global_batch(9, 12)
    for rank in range(degree):
        mine, its_labels = data.local_batch(9, 12, RankPlace(0, rank, degree))
        assert torch.equal(mine, tokens[rank::degree])
        assert torch.equal(its_labels, labels[rank::degree])


def test_a_batch_of_a_huge_file_needs_no_permutation_of_it() -> None:
    """A permutation of 10^8 samples took 6.9 s of processor time, a step of 64 of them; one of 10^15 has no room."""
    data = TokenData(torch.zeros(1, dtype=torch.uint8).expand(10**15 + 1), 1, 0)
    tokens, _ = data.global_batch(3, 64)
    assert tokens.shape == (64, 1)


@pytest.mark.parametrize("sizes", [(1, 3), (3, 1), (2, 2), (5, 1, 8, 2)])
@pytest.mark.parametrize("replicas", [1, 2])
def test_unlike_shares_make_up_one_global_batch(sizes: tuple[int, ...], replicas: int) -> None:
    shares = [
        BatchShare(device_group=str(place), num_replicas=replicas, micro_batch_size=size)
        for place, size in enumerate(sizes)
    ]
    each, degree = replicas * sum(sizes), replicas * len(sizes)
    parts = [RankPlace(0, rank, degree).sequences(3 * each, shares) for rank in range(degree)]
    assert [len(part) for part in parts] == [3 * size for size in sizes for _ in range(replicas)]
    for number in range(3):  # the sequences of one micro-batch of all ranks come one behind the other
        own = [part[number * len(part) // 3 : (number + 1) * len(part) // 3] for part in parts]
        assert sorted(position for part in own for position in part) == [*range(number * each, (number + 1) * each)]
    if len(set(sizes)) == 1:
        assert parts == [[*RankPlace(0, rank, degree).sequences(3 * each)] for rank in range(degree)]
    assert [RankPlace(0, rank, degree).row(shares) for rank in range(degree)] == [
        place for place in range(len(sizes)) for _ in range(replicas)
    ]


def test_tokens_of_one_byte_are_no_text(tmp_path: Path) -> None:
    """Tokens of a small vocabulary in a .npy of uint8 were refused as text."""
    plan = read_plan(Path(__file__).resolve().parents[4] / "examples" / "plans" / "gpt-tiny-pp2-dp2.json")
    np.save(tmp_path / "tokens.npy", np.arange(9000, dtype=np.uint8) % 50)
    assert open_data(plan, tmp_path / "tokens.npy", 50, 0).num_samples > 0
    for path in (tmp_path / "tokens.npy", None):
        with pytest.raises(PlanError, match="vocabulary has 40 entries"):
            open_data(plan, path, 40, 0)


def test_data_are_told_apart_by_what_they_hold() -> None:
    other = data_of(3000)
    other.tokens[0] = 7
    assert data_of(3000).text == data_of(3000, seed=1).text
    assert len({data_of(3000).text, data_of(3001).text, other.text}) == 3
