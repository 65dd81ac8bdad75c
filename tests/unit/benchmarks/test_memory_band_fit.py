"""The fit of the band of memory, and of the spread of stragglers, on runs whose answers are known."""

from math import exp, log

import pytest

from benchmarks.memory_band import MIN_RUNS, WIDER, Peak, band_of, bands_of, enough, held_out_shares
from benchmarks.straggler_fit import WEAK_SCALING, by_source, fitted_spread, grown_error, pair_between, weak_scaling
from costmodels.stragglers import expected_largest


def peaks(recipe: str, source: str, ratios: list[float], share: float = 0.9) -> list[Peak]:
    return [Peak(recipe, source, "reserved", ratio, share) for ratio in ratios]


def test_every_source_counts_alike_and_none_judges_itself() -> None:
    runs = peaks("a", "calm", [exp(0.1), exp(-0.1)] * 50) + peaks("b", "wild", [exp(0.3), exp(-0.3)])
    band = band_of(runs)
    assert band.spread_above == pytest.approx(((0.01 + 0.09) / 2) ** 0.5, rel=0.02)
    assert (band.num_runs, band.num_sources) == (102, 2)
    # exp(0.3) is above the calm band's exp(0.1 * 1.645); under the wild one all calm runs lie inside.
    assert held_out_shares(runs) == {"calm": 1.0, "wild": 0.5}
    assert band.held_out_share == 0.75


def test_a_recipe_has_its_own_band_only_with_enough_runs_that_fill_their_device() -> None:
    others = peaks("b", "wild", [exp(0.3), exp(-0.3)])
    many = peaks("a", "calm", [exp(0.1), exp(-0.1)] * (MIN_RUNS // 2))
    assert set(bands_of(many + others)) == {"", "a"}
    assert set(bands_of(many[1:] + others)) == {""}
    small = peaks("a", "calm", [exp(0.1), exp(-0.1)] * MIN_RUNS, share=0.05)
    assert set(bands_of(small + others)) == {""}


def test_a_band_is_as_wide_as_it_takes_for_a_source_that_was_left_out() -> None:
    calm = [run for name in "abcd" for run in peaks(name, name, [exp(0.1), exp(-0.1)])]
    # Of exp(0.2) a band of the calm ones holds none until exp(0.1 * 1.645 * wider) reaches it: at 1.25.
    wider, held = enough([*calm, *peaks("e", "wild", [exp(0.2), exp(-0.2)])])
    assert (wider, held) == (1.25, 1.0)
    assert band_of([*calm, *peaks("e", "wild", [exp(0.2), exp(-0.2)])]).spread_above == pytest.approx(
        1.25 * ((4 * 0.01 + 0.04) / 5) ** 0.5, rel=0.02
    )
    # Of fewer sources than five nothing is made of what one that is left out says; a source far out is never reached.
    assert enough([*calm[:4], *peaks("e", "wild", [exp(0.2), exp(-0.2)])])[0] == 1
    assert enough([*calm, *peaks("e", "far", [exp(2), exp(-2)])]) == (WIDER[-1], 0.9)


def test_a_pair_gives_the_spread_that_explains_it() -> None:
    growth = 0.04 * (expected_largest(512) - expected_largest(64))
    pair = pair_between("one", (64, 0.1), (512, 0.1 + growth))
    assert pair is not None
    assert pair.spread == pytest.approx(0.04)
    assert pair_between("one", (64, 0.1), (100, 0.2)) is None  # too near
    nothing = pair_between("two", (64, 0.1), (512, 0.1))
    faster = pair_between("three", (64, 0.1), (512, 0.0))
    assert nothing is not None
    assert faster is not None
    assert fitted_spread(by_source([pair, pair, nothing])) == pytest.approx(0.02)  # the middle of two sources
    assert fitted_spread(by_source([nothing, faster])) == 0.0


def test_measured_weak_scaling_is_the_loss_of_utilisation() -> None:
    found = by_source(weak_scaling(WEAK_SCALING))
    plain = next(pairs for name, pairs in found.items() if name.endswith("Megatron-LM"))
    widest = next(pair for pair in plain if pair.num_devices == (2240, 11200))
    assert widest.growth == pytest.approx(log(0.492 / 0.482))


def test_stragglers_beyond_a_reference_leave_smaller_runs_alone() -> None:
    assert grown_error(-0.1, 64, 512, 0.05) == pytest.approx(-0.1)
    by_hand = 0.9 * exp(0.05 * (expected_largest(2048) - expected_largest(512))) - 1
    assert grown_error(-0.1, 2048, 512, 0.05) == pytest.approx(by_hand)
