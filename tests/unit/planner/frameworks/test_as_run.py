"""Settings of a run change its recipe by what they say, and by nothing besides."""

import pytest

from costmodels.recipe import load_recipe
from planner.frameworks.as_run import effective_zero_stage, with_kernels, with_overlap
from planner.pricing.facts import cluster_facts
from planner.pricing.target import PricingTarget
from tests.planning import cluster_of, graph_of, training_of

OVERLAPPING = load_recipe("megatron-core-overlap")


def test_nothing_said_changes_nothing() -> None:
    assert with_overlap(OVERLAPPING, {}) == OVERLAPPING


def test_words_of_kernels_say_how_blocks_run_again_and_that_nothing_is_dropped() -> None:
    base = load_recipe("megatron-lm-2022")
    assert not base.stops_recomputation_early
    assert base.dropout > 0
    assert with_kernels(base, ("te", "flash2")) == base
    early, whole = (with_kernels(base, (word,)) for word in ("non-reentrant-recompute", "no-dropout"))
    assert (early.stops_recomputation_early, early.dropout) == (True, base.dropout)
    assert (whole.stops_recomputation_early, whole.dropout) == (False, 0.0)


def test_words_of_kernels_say_what_a_release_chose() -> None:
    base = load_recipe("nemo")
    whole, crossing, fused, lossy = (
        with_kernels(base, (word,))
        for word in ("whole-step-graphs", "exchanges-overlapped", "fused-experts", "te-cross-entropy")
    )
    assert (whole.issue_s(is_sharded=False), whole.issue_s(is_sharded=True)) == (0.0, 0.0)
    assert whole.host_s_per_collective.value == 0.0
    layers = with_kernels(base, ("te", "cuda-graphs"))
    assert (layers.issue_s(is_sharded=False), layers.issue_s(is_sharded=True)) == (0.0, 0.0)
    assert layers.host_s_per_collective == base.host_s_per_collective  # those of gradients lie between layers
    assert crossing == with_overlap(base, {"ep-comm": True})
    assert (base.fuses_experts, fused.fuses_experts) == (False, True)
    assert lossy.memory.logit_kept_bytes.value == lossy.memory.logit_peak_bytes.value == 2


@pytest.mark.parametrize(("hardware", "plain", "deterministic"), [("dgx-a100-80gb", 16.25, 64), ("dgx-b200", 64, 64)])
def test_deterministic_products_have_workspaces_of_their_own_size(
    hardware: str, plain: float, deterministic: float
) -> None:
    """MiB of two handles: each 2 of 4 MiB and 8 of 16 KiB before compute capability 9.0, else 8 of 4 MiB."""
    graph, cluster = graph_of("llama3-8b", 1024), cluster_of(hardware, 8)
    found = [
        cluster_facts(PricingTarget(graph, cluster, "bf16", recipe), training_of(8, 1024)).software.workspace_bytes
        for recipe in (OVERLAPPING, with_kernels(OVERLAPPING, ("te", "deterministic")))
    ]
    assert found == [plain * 2**20, deterministic * 2**20]


def test_each_overlap_is_taken_as_said() -> None:
    plain = with_overlap(OVERLAPPING, {"grad-reduce": False, "param-gather": False, "tp-comm": False})
    assert (plain.overlaps_reduction, plain.overlaps_gather, plain.tensor_overlap.value) == (False, False, 0.0)
    assert with_overlap(OVERLAPPING, {"tp-comm": True}) == OVERLAPPING
    again = with_overlap(load_recipe("megatron-core"), {"grad-reduce": True})
    assert (again.overlaps_reduction, again.overlaps_gather) == (True, False)


@pytest.mark.parametrize(
    ("recipe", "asked", "num_ranks", "pp", "effective"),
    [("torchtitan", 3, 4, 2, 1), ("torchtitan", 3, 4, 1, 3), ("deepspeed", 3, 4, 2, 3), ("torchtitan", 0, 4, 2, 0),
     ("deepspeed", 3, 1, 4, 0)],
)  # fmt: skip
def test_the_stage_that_takes_effect(recipe: str, asked: int, num_ranks: int, pp: int, effective: int) -> None:
    assert effective_zero_stage(load_recipe(recipe), asked, num_ranks=num_ranks, pp=pp) == effective


def test_a_run_says_whether_exchanges_of_experts_are_overlapped() -> None:
    base, hiding = load_recipe("nemo"), load_recipe("megatron-core-expert-overlap")
    overlapped, exposed = (with_overlap(base, {"ep-comm": told}) for told in (True, False))
    assert not base.hides_exchanges
    assert overlapped.exchanges_hide_under == hiding.exchanges_hide_under != ()
    assert overlapped.exchanges_hide_without_pipeline
    assert not exposed.hides_exchanges
    assert not with_overlap(hiding, {"ep-comm": False}).hides_exchanges
