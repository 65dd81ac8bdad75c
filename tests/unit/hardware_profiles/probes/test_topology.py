import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hardware_profiles.probes.measurement import PairTiming
from hardware_profiles.probes.topology import REFERENCE_BYTES, Matrix, discover_domains, message_times_s


def times(num_ranks: int, levels: tuple[tuple[int, float], ...], noise: float = 0.0, seed: int = 0) -> Matrix:
    """Message times where ranks within a domain of ``size`` are ``time_s`` apart, innermost first."""
    generator = np.random.default_rng(seed)
    matrix = np.zeros((num_ranks, num_ranks))
    for i in range(num_ranks):
        for j in range(num_ranks):
            if i != j:
                base = next(time_s for size, time_s in levels if i // size == j // size)
                matrix[i, j] = base * (1 + noise * generator.uniform())
    return matrix


def keys(num_ranks: int, per_host: int) -> list[str]:
    return [f"host{rank // per_host}" for rank in range(num_ranks)]


@given(st.sampled_from([1, 2, 4, 8]), st.integers(2, 6), st.integers(0, 20))
def test_hosts_are_found_by_their_speed_alone(per_host: int, num_hosts: int, seed: int):
    num_ranks = per_host * num_hosts
    matrix = times(num_ranks, ((per_host, 1e-3), (num_ranks, 2e-2)), noise=0.4, seed=seed)
    expected = (per_host, num_ranks) if per_host > 1 else (num_ranks,)
    assert discover_domains(matrix, ["the same"] * num_ranks) == expected
    assert discover_domains(matrix, keys(num_ranks, per_host)) == expected


def test_islands_hosts_and_switches_make_as_many_tiers():
    matrix = times(16, ((2, 1e-4), (4, 1e-3), (8, 1e-2), (16, 5e-2)), noise=0.2)
    assert discover_domains(matrix, keys(16, 4)) == (2, 4, 8, 16)


@pytest.mark.parametrize("slow", [0, 1, 3])
def test_a_slow_host_makes_no_tier(slow: int):
    matrix = times(8, ((2, 1e-3), (8, 2e-2)), noise=0.2)
    for other in range(8):
        for rank in (2 * slow, 2 * slow + 1):
            if other // 2 != slow:
                matrix[rank, other] = matrix[other, rank] = 0.1
    assert discover_domains(matrix, keys(8, 2)) == (2, 8)


@given(st.integers(2, 8), st.integers(0, 50))
def test_noise_on_one_host_makes_no_tier(num_ranks: int, seed: int):
    matrix = times(num_ranks, ((num_ranks, 1e-3),), noise=0.9, seed=seed)
    assert discover_domains(matrix, ["host"] * num_ranks) == (num_ranks,)


def test_hosts_as_fast_between_as_inside_are_one_tier():
    assert discover_domains(times(8, ((8, 1e-3),), noise=0.1), keys(8, 4)) == (8,)


def test_one_rank_has_no_network():
    assert discover_domains(times(1, ((1, 1.0),)), ["host"]) == ()


def test_pairs_that_were_not_timed_take_those_of_their_hosts():
    rate = REFERENCE_BYTES / 0.5
    pairs = [PairTiming(source=0, target=2, latency_s=0.5, bytes_per_s=rate),
             PairTiming(source=2, target=0, latency_s=1.5, bytes_per_s=rate),
             PairTiming(source=0, target=1, latency_s=0.0, bytes_per_s=rate)]  # fmt: skip
    matrix = message_times_s(pairs, keys(4, 2))
    assert matrix[0, 2] == matrix[1, 3] == matrix[1, 2] == pytest.approx(1.0)
    assert matrix[2, 0] == matrix[3, 1] == pytest.approx(2.0)
    assert matrix[1, 0] == pytest.approx(0.5)
