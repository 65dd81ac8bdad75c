"""How much slower a job of n devices runs than its devices do on average: the slowest of them sets the pace.

Devices of one kind are not equally fast: clocks follow temperature and silicon, hosts differ. Every step ends with a
collective over all of them, so the step takes what the slowest takes. With ln(slowdown) of a device normal with
standard deviation s, the expected slowest of n is s · e(n) away from the middle, and against a job of n_0 devices

    slowdown(n) = exp(s · (e(n) - e(n_0)))  for n > n_0, and 1 for fewer
    e(n) = Phi^-1((n - a) / (n - 2a + 1)),  a = 0.375

n_0 is the size of jobs that the profile's rates and the recipes were fitted to: their slowest device is in these
numbers already. Example: e(512) = 3.03 and e(16,384) = 3.96, so with s = 0.026 and n_0 = 512 compute of a job of 16,384
devices takes exp(0.026 · 0.93), 2.4 % longer.

Source of e(n), the expected largest of n standard normal values: G. Blom, "Statistical Estimates and Transformed
Beta-Variables", 1958.
"""

from __future__ import annotations

from math import exp
from statistics import NormalDist

BLOM = 0.375


def expected_largest(num_values: int) -> float:
    """The expected largest of so many standard normal values."""
    if num_values < 1:
        raise ValueError(f"there is no largest of {num_values} values")
    return NormalDist().inv_cdf((num_values - BLOM) / (num_values - 2 * BLOM + 1))


def straggler_slowdown(num_devices: int, num_reference: int, spread: float) -> float:
    """Time of a job's slowest device over that of the slowest of ``num_reference`` devices; 1 where there are fewer."""
    if num_devices <= num_reference:
        return 1.0
    return exp(spread * (expected_largest(num_devices) - expected_largest(num_reference)))


def expected_wait_s(num_ranks: int, mean_delay_s: float) -> float:
    """Seconds that a rank waits on average for the last of ``num_ranks`` whose hosts are late by chance.

    Delays are taken as exponentially distributed: the last of n comes after ``mean_delay_s`` times the n-th harmonic
    number, and a rank's own delay is the first term of it (Rényi, "On the theory of order statistics", 1953).
    """
    return mean_delay_s * sum(1 / rank for rank in range(2, num_ranks + 1))
