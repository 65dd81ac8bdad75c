"""An order of samples that is looked up, not stored: the n-th of a permutation, in constant time and memory.

A Feistel network of ``ROUNDS`` rounds is a bijection of the numbers of 2 b bits whatever its round function is, and a
different one for each key. What it sends beyond ``size`` is sent on until it falls inside (cycle walking: Black and
Rogaway, "Ciphers with arbitrary finite domains", 2002), which keeps it a bijection; 2 b is the fewest even number of
bits that holds ``size``, so this takes fewer than 4 turns on average. The round function is the finaliser of SplitMix64
(Steele, Lea and Flood, "Fast splittable pseudorandom number generators", 2014).
"""

from __future__ import annotations

import hashlib

ROUNDS = 8  # Luby and Rackoff (1988) need 4 for what no test can tell from chance, on large halves; these may be small
_MASK = 2**64 - 1


def shuffled(position: int, size: int, key: int) -> int:
    """Where ``position`` of ``range(size)`` lies in the permutation that belongs to ``key``."""
    if not 0 <= position < size:
        raise ValueError(f"position must be in range({size}), got {position}")
    bits = max(1, ((size - 1).bit_length() + 1) // 2)
    value = position
    while True:
        value = _permuted(value, bits, key)
        if value < size:
            return value


def key_of(seed: int, epoch: int) -> int:
    """A key for each epoch of each seed."""
    return int.from_bytes(hashlib.sha256(f"{seed} {epoch}".encode()).digest()[:8], "big")


def _permuted(value: int, bits: int, key: int) -> int:
    mask = (1 << bits) - 1
    left, right = value >> bits, value & mask
    for number in range(ROUNDS):
        left, right = right, left ^ (_mixed(right + key + (number + 1) * 0x9E3779B97F4A7C15) & mask)
    return left << bits | right


def _mixed(value: int) -> int:
    value &= _MASK
    value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 & _MASK
    value = (value ^ value >> 27) * 0x94D049BB133111EB & _MASK
    return value ^ value >> 31
