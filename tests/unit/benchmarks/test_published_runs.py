import csv
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import fidelity
from benchmarks.published.frameworks import (
    attention_name_of,
    recipe_called,
    recipe_name_of,
    study_recipe_names,
    with_dropout,
)
from benchmarks.published.machines import KNOWN_CLUSTERS, STUDY_PROFILES, cluster_of, study_profile
from benchmarks.published.pairs import counts_of, pairs_of
from benchmarks.published.pricing import RunPricer, layout_of
from benchmarks.published.summary import Row, kendall_tau, order_in_group, row_of, summarise
from costmodels.recipe import list_recipes, load_recipe
from costmodels.vocabulary.choices import Recompute
from costmodels.vocabulary.schedules import ScheduleName
from costmodels.vocabulary.terms import MemoryTerm
from hardware_profiles.catalog import list_profiles
from hardware_profiles.sanity import violations
from planner.formats.run_table import Rejected, Run, Software, UnpriceableRunError, read_out_of_memory, read_runs
from planner.formats.table_run import mesh_of

ROOT = Path(__file__).resolve().parents[3]
ROW = {
    "id": "toy",
    "source_title": "A toy",
    "source_ref": "",
    "notes": "",
    "model_name": "toy",
    "layers": "4",
    "hidden": "512",
    "heads": "8",
    "kv_heads": "",
    "head_dim": "",
    "ffn": "2048",
    "vocab": "1024",
    "seq_len": "256",
    "mlp_type": "gelu",
    "tied_embeddings": "True",
    "gpu_type": "A100-80GB-SXM",
    "gpu_mem_gb": "80",
    "n_gpus": "8",
    "gpus_per_node": "8",
    "inter_node_link_gbps_per_gpu": "",
    "dp": "2",
    "tp": "2",
    "pp": "2",
    "vpp": "1",
    "cp": "1",
    "sp": "False",
    "ep": "1",
    "zero_stage_or_fsdp": "1(all DP)",
    "global_batch_sequences": "32",
    "micro_batch": "2",
    "precision": "bf16",
    "recompute": "none",
    "offload": "none",
    "flash_attention": "True",
    "schedule": "1F1B",
    "iteration_time_s": "0.1",
    "peak_memory_gb_per_gpu": "2",
    "peak_memory_kind": "max over ranks of torch max_memory_allocated (GiB)",
    "group": "toys",
    "framework": "megatron-lm",
    "framework_version": "2022",
    "kernels": "",
    "partition": "even",
    "stage_layers": "",
    "vocab_parallel": "none",
    "overlap": "",
    "cluster": "",
}


def write(path: Path, *changes: dict[str, str]) -> Path:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, fieldnames=list(ROW))
        writer.writeheader()
        writer.writerows({**ROW, **change} for change in changes)
    return path


@pytest.fixture(scope="module")
def pricer() -> RunPricer:
    return RunPricer()


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Run:
    (run,) = read_runs(write(tmp_path_factory.mktemp("runs") / "runs.csv", {}))
    assert isinstance(run, Run)
    return run


@pytest.fixture(scope="module")
def large(toy: Run) -> Run:
    """So wide that GPUs, not hosts, say how long a step takes."""
    shape = replace(toy.architecture, hidden=4096, heads=32, kv_heads=32, ffn=16384, seq_len=2048)
    return replace(toy, architecture=shape)


@pytest.mark.parametrize(
    ("words", "stage", "shard_size"),
    [
        ("0", 0, None),
        ("1(shard 8, in-node)", 1, 8),
        ("FSDP-FULL_SHARD(3)", 3, None),
        ("FSDP-SHARD_GRAD_OP(2)", 2, None),
        ("FSDP2(3)", 3, None),
        ("HSDP", 3, None),
        ("HSDP(8)", 3, 8),
        ("FSDP(shard=8)", 3, 8),
        ("FSDP", 3, None),
        ("ZeRO-3", 3, None),
        ("DeepSpeed ZeRO-1", 1, None),
        ("DDP", 0, None),
    ],
)
def test_sharding_words(tmp_path: Path, words: str, stage: int, shard_size: int | None) -> None:
    (run,) = read_runs(write(tmp_path / "runs.csv", {"zero_stage_or_fsdp": words}))
    assert isinstance(run, Run)
    assert (run.layout.zero_stage, run.layout.shard_size) == (stage, shard_size)


def test_a_row_without_a_needed_number_is_rejected_with_the_reason(tmp_path: Path) -> None:
    rows = list(read_runs(write(tmp_path / "runs.csv", {"hidden": ""}, {"micro_batch": "two"}, {})))
    assert [isinstance(row, Rejected) for row in rows] == [True, True, False]
    assert isinstance(rows[0], Rejected)
    assert rows[0].reason == "hidden is blank and has no default"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"gpu_type": ""}, "gpu_type is blank and has no default"),
        ({"n_gpus": "1e999"}, "n_gpus is inf, not a number from 0 to 1e+15"),
        ({"hidden": "nan"}, "hidden is nan, not a number from 0 to 1e+15"),
        ({"iteration_time_s": "", "tokens_per_s_per_gpu": "-1"}, "tokens_per_s_per_gpu is -1"),
        ({"iteration_time_s": "0"}, "iteration_time_s is 0"),
        ({"iteration_time_s": "fast"}, "iteration_time_s is 'fast', not a number"),
        ({"peak_memory_gb_per_gpu": "0"}, "peak_memory_gb_per_gpu is 0"),
    ],
)
def test_what_is_no_number_of_anything_is_a_reason(tmp_path: Path, change: dict[str, str], reason: str) -> None:
    path = tmp_path / "runs.csv"
    row = {**ROW, **change}
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, fieldnames=list(row))
        writer.writeheader()
        writer.writerow(row)
    (found,) = read_runs(path)
    assert isinstance(found, Rejected)
    assert found.reason.startswith(reason)


def test_a_decimal_comma_is_no_end_of_a_number(tmp_path: Path) -> None:
    """3,6 seconds in the last column were read as 3."""
    path = tmp_path / "runs.csv"
    columns = [*(name for name in ROW if name != "iteration_time_s"), "iteration_time_s"]
    path.write_text(",".join(columns) + "\n" + ",".join(ROW[name] for name in columns[:-1]) + ",3,6\n")
    (found,) = read_runs(path)
    assert isinstance(found, Rejected)
    assert "decimal comma" in found.reason


def test_a_table_of_rates_alone_is_one_as_a_spreadsheet_writes_it(tmp_path: Path) -> None:
    """It was refused for want of a column of seconds; the mark before the first column's name hid that column."""
    path = tmp_path / "runs.csv"
    row = {name: value for name, value in ROW.items() if name != "iteration_time_s"} | {"tokens_per_s_per_gpu": "512"}
    with path.open("w", newline="", encoding="utf-8-sig") as file:
        writer = csv.DictWriter(file, fieldnames=list(row))
        writer.writeheader()
        writer.writerow(row)
    (found,) = read_runs(path)
    assert isinstance(found, Run)
    assert (found.id, found.step_time_s) == ("toy", int(ROW["global_batch_sequences"]) * 256 / (512 * 8))
    path.write_text("layers;iteration_time_s\n1;2\n")
    with pytest.raises(ValueError, match="with commas"):
        list(read_runs(path))


def test_a_table_without_a_column_rejects_its_rows(tmp_path: Path) -> None:
    path = tmp_path / "runs.csv"
    path.write_text("iteration_time_s,layers,hidden,heads,seq_len,n_gpus,global_batch_sequences\n1,2,64,4,32,8,8\n")
    (found,) = read_runs(path)
    assert isinstance(found, Rejected)
    assert found.reason == "gpu_type is blank and has no default"


def test_scores_in_memory_cost_time_and_memory(toy: Run, pricer: RunPricer) -> None:
    fused = pricer.price(toy).priced
    plain = pricer.price(replace(toy, flash_attention=False)).priced
    assert plain.step_time_s > fused.step_time_s
    assert plain.ledgers[0].bytes_of(MemoryTerm.ACTIVATIONS) > fused.ledgers[0].bytes_of(MemoryTerm.ACTIVATIONS)


def test_recomputation_costs_time_and_saves_memory(toy: Run, pricer: RunPricer) -> None:
    full = pricer.price(replace(toy, layout=replace(toy.layout, recompute=Recompute.FULL))).priced
    none = pricer.price(toy).priced
    assert full.step_time_s > none.step_time_s
    assert full.peak_memory_bytes < none.peak_memory_bytes


def test_faster_links_never_make_a_run_slower(toy: Run, pricer: RunPricer) -> None:
    times: list[float] = []
    for rate in (10e9, 100e9, 400e9):
        hardware = replace(toy.hardware, devices_per_node=2, inter_node_bits_per_s=rate)
        times.append(pricer.price(replace(toy, hardware=hardware)).priced.step_time_s)
    assert times == sorted(times, reverse=True)
    assert times[0] > times[-1]


def test_a_slow_host_bounds_small_kernels(toy: Run, pricer: RunPricer) -> None:
    name = pricer.price(toy).recipe_name
    recipe = pricer.recipe(name)
    slow = recipe.model_copy(update={"host_s_per_kernel": recipe.host_s_per_kernel.model_copy(update={"value": 1e-3})})
    bound = replace(pricer, recipes={name: slow}).price(toy).priced.step_time_s
    # 16 micro-batches, 2 blocks a stage: at least some ten kernels each way and block
    assert bound > 8 * 2 * 20 * 1e-3 > pricer.price(toy).priced.step_time_s


def test_runs_that_differ_in_one_choice_are_pairs(tmp_path: Path, pricer: RunPricer) -> None:
    changes: tuple[dict[str, str], ...] = (
        {"id": "plain", "iteration_time_s": "0.10"},
        {"id": "again", "iteration_time_s": "0.12"},
        {"id": "full", "iteration_time_s": "0.13", "recompute": "full"},
        {"id": "full and larger", "recompute": "full", "micro_batch": "4"},
        {"id": "plain and much larger", "micro_batch": "8"},
    )
    runs = [run for run in read_runs(write(tmp_path / "runs.csv", *changes)) if isinstance(run, Run)]
    rows = {run.id: row_of(run, pricer.price(run)) for run in runs}
    pairs = pairs_of(runs, rows)
    assert [(pair.kind, pair.first, pair.second) for pair in pairs] == [
        ("recomputation", "plain", "full"),
        ("micro-batch doubled", "full", "full and larger"),
    ]
    recomputed = pairs[0]
    assert recomputed.measured_ratio == pytest.approx(0.13 / 0.11)  # over the median of both plain runs
    assert 1.2 < recomputed.predicted_ratio < 1.4  # a forward pass more
    counts = counts_of(pairs)["recomputation"]
    assert (counts.number, counts.ordered, counts.clear, counts.clear_ordered) == (1, 1, 1, 1)
    alike = replace(recomputed, measured_ratio=1.01, predicted_ratio=0.99)
    assert (alike.is_clear, alike.is_close, alike.is_ordered) == (False, True, False)
    assert counts_of([recomputed, alike])["recomputation"] == (2, 1, 1 + recomputed.is_close, 1, 1)


def ran(toy: Run, framework: str, version: str = "", kernels: str = "", **more: object) -> Run:
    """``toy`` under another framework."""
    software = replace(toy.software, framework=framework, version=version, kernels=tuple(kernels.split()))
    return replace(toy, software=replace(software, **more))


@pytest.mark.parametrize(
    ("zero", "ep", "sp", "shard", "etp"),
    [(1, 2, True, 2, None), (0, 2, False, 2, None), (0, 1, False, 1, None), (1, 4, True, 2, 1)],
)
def test_experts_lie_among_the_ranks_that_can_hold_them(
    toy: Run, zero: int, ep: int, sp: bool, shard: int, etp: int | None
) -> None:
    """dp = tp = 2: four ways of expert parallelism need the tensor-parallel ranks, whose experts are whole then."""
    layout = replace(toy.layout, zero_stage=zero, ep=ep, sequence_parallel=sp)
    run = replace(toy, layout=layout, architecture=replace(toy.architecture, experts=4, top_k=2, expert_ffn=512))
    mesh = mesh_of(run)
    assert (mesh.dp_shard, mesh.ep, mesh.etp, mesh.dp) == (shard, ep, etp, 2)
    assert not mesh.violations()
    assert RunPricer().price(run).priced.step_time_s > 0


def test_experts_are_whole_where_the_row_says_so(toy: Run) -> None:
    layout = replace(toy.layout, ep=2, sequence_parallel=True)
    assert [mesh_of(replace(toy, layout=replace(layout, etp=etp))).etp for etp in (None, 1, 2)] == [None, 1, None]
    with pytest.raises(UnpriceableRunError, match="etp 4 is neither 1 nor tp = 2"):
        mesh_of(replace(toy, layout=replace(layout, etp=4)))


def test_experts_that_no_ranks_can_hold_are_refused(toy: Run) -> None:
    run = replace(toy, layout=replace(toy.layout, ep=4, sequence_parallel=False))
    with pytest.raises(UnpriceableRunError, match="ep 4 does not divide the 2 ranks that shard"):
        mesh_of(run)


def test_the_end_stages_may_have_the_embedding_or_the_head_alone(toy: Run, pricer: RunPricer) -> None:
    """Megatron counts both as a block each where it is told to: 2 blocks in 4 stages of one."""
    layout = replace(toy.layout, pp=4, dp=1)
    software = replace(toy.software, stage_layers=(0, 1, 1, 0), partition="weighted")
    run = replace(toy, layout=layout, software=software, architecture=replace(toy.architecture, layers=2))
    assert pricer.price(run).priced.step_time_s > 0
    wrong = replace(run, software=replace(software, stage_layers=(0, 0, 1, 1)))
    with pytest.raises(UnpriceableRunError, match="stage_layers 0-0-1-1 leave a stage without work"):
        pricer.price(wrong)


def test_the_nanotron_sweep_is_parted_by_its_clusters(toy: Run) -> None:
    early, late = (ran(toy, "nanotron", year, cluster=f"huggingface-h100-{year}") for year in ("2024", "2025"))
    assert (recipe_name_of(early), recipe_name_of(late)) == ("nanotron", "nanotron-2025")
    assert cluster_of(early).profile.name == "h100-nanotron-sweep-early"
    assert cluster_of(late).profile.name == "h100-nanotron-sweep"
    elsewhere = ran(toy, "nanotron", "2025", cluster="another")
    assert (recipe_name_of(elsewhere), cluster_of(elsewhere).profile.name) == ("nanotron", "dgx-a100-80gb")


def test_titles_and_notes_choose_nothing(tmp_path: Path) -> None:
    words = "nanotron sweep, slurm job 14098529; torchtitan with torch.compile; kernel triton; HybridEP; NeMo of 2019"
    plain, named = read_runs(write(tmp_path / "runs.csv", {}, {"source_title": words, "notes": words, "id": words}))
    assert isinstance(plain, Run)
    assert isinstance(named, Run)
    assert replace(named, id=plain.id, source=plain.source) == plain


@pytest.mark.parametrize(
    ("framework", "version", "kernels", "gpu", "recipe", "kernel"),
    [
        ("nemo", "24.07", "te", "H100-80GB-SXM", "nemo", "cudnn"),
        ("nemo", "24.07", "te", "A100-80GB-SXM", "nemo", "flash2"),
        ("megatron-lm", "2024", "", "H100-80GB-SXM", "megatron-core-overlap", "cudnn"),
        ("megatron-lm", "2021", "", "A100-80GB-SXM", "megatron-lm-2020", "flash1"),
        ("megatron-lm", "2023", "fused-softmax", "A100-80GB-SXM", "megatron-lm-2022", "fused_softmax"),
        ("torchtitan", "2025-06", "compile", "H100-80GB-SXM", "torchtitan-compiled", "flash2"),
        ("aleph-alpha-scaling", "2023", "flash2 fused-norm", "A100", "megatron-layouts-2023-fused-norm", "flash2"),
        ("aleph-alpha-scaling", "2023", "eager", "A100", "megatron-layouts-2023", "eager"),
    ],
)
def test_columns_choose_recipe_and_kernel(
    toy: Run, framework: str, version: str, kernels: str, gpu: str, recipe: str, kernel: str
) -> None:
    run = replace(ran(toy, framework, version, kernels), hardware=replace(toy.hardware, gpu_type=gpu))
    assert recipe_name_of(run) == recipe
    assert attention_name_of(run, recipe_called(recipe)) == kernel


@pytest.mark.parametrize("framework", ["", "a trainer of my own"])
def test_an_unknown_framework_is_priced_as_megatron_and_said_so(toy: Run, pricer: RunPricer, framework: str) -> None:
    row = row_of(ran(toy, framework, "2022"), pricer.price(ran(toy, framework, "2022")))
    known = row_of(toy, pricer.price(toy))
    assert (row.framework, row.recipe) == ("unknown", "megatron-lm-2022")
    assert row.predicted_step_time_s == known.predicted_step_time_s
    told = f"framework: {framework or 'not said'}, priced as megatron-lm by the recipe megatron-lm-2022"
    assert set(row.assumptions) - set(known.assumptions) == {told}
    assert summarise([row, known], []).num_unknown_framework == 1


def test_what_is_told_of_overlaps_is_priced(large: Run, pricer: RunPricer) -> None:
    layout = replace(large.layout, pp=1, tp=4, dp=2)
    run = replace(ran(large, "megatron-core", "2025"), layout=layout)

    def step_s(*overlap: tuple[str, bool]) -> float:
        told = replace(run, software=replace(run.software, overlap=overlap))
        return pricer.price(told).priced.step_time_s

    # What a run does not name it has not asked for: its products wait for their collectives.
    both = ("grad-reduce", True), ("param-gather", True)
    assert step_s(*both) == step_s()
    assert step_s(("tp-comm", True), *both) < step_s()
    assert step_s(("grad-reduce", True)) > step_s()


def test_stages_are_cut_as_the_row_tells(tmp_path: Path, pricer: RunPricer) -> None:
    changes = ({}, {"stage_layers": "1-3", "partition": "uneven"}, {"stage_layers": "2-3"}, {"stage_layers": "a-b"})
    even, uneven, wrong, broken, spaced = read_runs(
        write(tmp_path / "runs.csv", *changes, {"stage_layers": "1, 3", "partition": "uneven"})
    )
    assert isinstance(spaced, Run)
    assert spaced.software.stage_layers == (1, 3)
    assert isinstance(even, Run)
    assert isinstance(uneven, Run)
    assert isinstance(wrong, Run)
    (_, second_even), (_, second_uneven) = (pricer.price(run).priced.starts for run in (even, uneven))
    assert second_uneven == second_even - 1
    with pytest.raises(UnpriceableRunError, match="stage_layers tell 5 blocks in 2 stages, the run has 4 in 2"):
        pricer.price(wrong)
    assert isinstance(broken, Rejected)


def test_blocks_of_ranks_are_spread_over_their_stages(tmp_path: Path, pricer: RunPricer) -> None:
    """Of ten blocks on two ranks of four stages: five and five, the fewer where the embedding and the head are."""
    interleaved = {"layers": "10", "vpp": "4", "schedule": "Interleaved1F1B", "partition": "weighted"}
    cuts = ("5-5", "1-2-1-1-1-1-2-1", "6-4", "1-1-1-1-2-1-2-1")
    runs = read_runs(write(tmp_path / "runs.csv", *({**interleaved, "stage_layers": cut} for cut in cuts)))
    starts = [pricer.price(run).priced.starts for run in runs if isinstance(run, Run)]
    assert len(starts) == len(cuts)
    assert starts[0] == starts[1]
    assert starts[2] == starts[3]


def test_a_balanced_cut_gives_the_stages_of_the_vocabulary_fewer_blocks(large: Run, pricer: RunPricer) -> None:
    run = replace(large, architecture=replace(large.architecture, layers=8, vocab=131072))
    balanced = replace(run, software=replace(run.software, partition="balanced"))
    assert pricer.price(balanced).priced.starts[1] > pricer.price(run).priced.starts[1]
    assert pricer.price(balanced).priced.step_time_s < pricer.price(run).priced.step_time_s


def test_a_vocabulary_over_the_pipeline_is_part_of_the_layout(toy: Run, pricer: RunPricer) -> None:
    """Balanced stages are faster than a head at the end; passes that wait for their exchanges are slower again."""
    large = replace(toy, architecture=replace(toy.architecture, vocab=65536))

    def step_s(sharing: str) -> float:
        return pricer.price(replace(large, software=replace(toy.software, vocab_parallel=sharing))).priced.step_time_s

    assert step_s("vocab-2") == step_s("vocab-1") < step_s("interlaced") < step_s("none") == step_s("")
    with pytest.raises(UnpriceableRunError, match="vocab_parallel 'vocab-3' is none of none, vocab-1, vocab-2"):
        step_s("vocab-3")


@pytest.mark.parametrize(("words", "rank"), [("of the LAST rank", -1), ("on the logging rank", 0), ("rank-0 peak", 0)])
def test_memory_is_of_the_rank_that_was_read(tmp_path: Path, pricer: RunPricer, words: str, rank: int) -> None:
    (run,) = read_runs(write(tmp_path / "runs.csv", {"peak_memory_kind": f"torch max_memory_allocated {words} (GiB)"}))
    assert isinstance(run, Run)
    prediction = pricer.price(run)
    seen = max(ledger.allocated_bytes for _, ledger in prediction.priced.memory[rank].phases)
    assert row_of(run, prediction).predicted_peak_memory_bytes == seen
    assert len({each.peak.allocated_bytes for each in prediction.priced.memory}) == 2


def test_gpt_under_megatron_core_has_its_dropout(toy: Run, pricer: RunPricer) -> None:
    """Megatron-LM drops a tenth unless told otherwise: masks are kept. Gated models are trained without."""
    core = replace(toy, software=replace(toy.software, framework="megatron-core", version="2025"))
    without = replace(core, software=replace(core.software, kernels=("no-dropout",)))
    gated = replace(core, architecture=replace(core.architecture, mlp_type="swiglu", is_tied=False))
    held = [pricer.price(run).priced.peak_memory_bytes for run in (core, without)]
    assert held[0] > held[1]
    assert with_dropout(load_recipe("megatron-core"), gated).dropout == 0


def test_out_of_memory_rows_say_their_software_too(tmp_path: Path) -> None:
    columns = {"framework": "nanotron", "framework_version": "2025", "kernels": "flash2 fused-norm", "grad_accum": "4"}
    more = {"source": "a sweep", "zero_stage": "1", "kernel": "flash", "cluster": "huggingface-h100-2025"}
    path = tmp_path / "failed.csv"
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, fieldnames=[*ROW, "grad_accum", "source", "zero_stage", "kernel"])
        writer.writeheader()
        writer.writerow({**ROW, **columns, **more, "partition": "balanced"})
    (run,) = read_out_of_memory(path)
    assert isinstance(run, Run)
    assert recipe_name_of(run) == "nanotron-2025"
    assert run.software.kernels == ("flash2", "fused-norm")


def test_what_is_known_of_single_studies_is_sound_and_not_shipped() -> None:
    names = {path.stem for path in STUDY_PROFILES.glob("*.json")}
    assert names == set(KNOWN_CLUSTERS.values())
    for name in names:
        assert violations(study_profile(name)) == ()
        assert study_profile(name).name == name
    assert not names & {profile.name for profile in list_profiles()}
    assert not set(study_recipe_names()) & set(list_recipes())


def test_the_badly_behaved_cluster_is_a_profile_of_its_own() -> None:
    slow = study_profile("h100-nanotron-sweep").tiers[-1]
    assert [point.num_nodes for point in slow.efficiency_at_scale] == [2, 4, 8, 16, 32, 64]
    assert slow.efficiency_at_scale[-1].fraction.value < 0.1


def test_too_little_memory_costs_time_where_that_is_known(toy: Run, pricer: RunPricer) -> None:
    large = replace(
        toy,
        software=Software("nanotron", "2024"),
        layout=replace(toy.layout, micro_batch_size=64, global_batch_size=256),
        architecture=replace(toy.architecture, seq_len=4096, vocab=131072),
    )
    known = pricer.price(large)
    recipe = load_recipe("nanotron")
    other = replace(pricer, recipes={"nanotron": recipe.model_copy(update={"overflow_s_per_byte": None})}).price(large)
    over = known.priced.peak_memory_bytes - known.priced.capacity_bytes[0]
    assert over > 0
    assert recipe.overflow_s_per_byte is not None
    added = known.priced.step_time_s - other.priced.step_time_s
    assert added == pytest.approx(over * recipe.overflow_s_per_byte.value * known.priced.layout.num_microbatches)


def test_kendalls_tau_and_regret() -> None:
    assert kendall_tau([(1, 10), (2, 20), (3, 30)]) == 1
    assert kendall_tau([(1, 30), (2, 20), (3, 10)]) == -1
    assert kendall_tau([(1, 1), (2, 1), (3, 1)]) == 0
    assert order_in_group([(1.0, 5.0), (1.2, 4.0), (2.0, 9.0)]) == pytest.approx((1 / 3, 0.2))


def test_summary_counts_feasibility_and_skipped_rows() -> None:
    ran = [Row(str(i), "s", "g", 1.0, 1.1, 0.1, fits=i > 0) for i in range(4)]
    failed = [Row(str(i), "s", "", None, 1.0, fits=i == 0) for i in range(4)]
    summary = summarise([*ran, Row("x", "s", "", 1.0, skipped="why")], failed)
    assert (summary.num_rows, summary.num_skipped, summary.num_groups) == (5, 1, 1)
    assert summary.oom_recall == 3 / 4
    assert summary.oom_precision == 3 / 4
    assert summary.mape == pytest.approx(0.1)


def test_the_program_writes_the_keys_of_the_interface(tmp_path: Path) -> None:
    runs = write(tmp_path / "runs.csv", {}, {"id": "other", "schedule": "DualPipe"})
    out = tmp_path / "out.json"
    command = [sys.executable, "-m", "benchmarks.fidelity", "--runs", str(runs), "--json", str(out)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    document = json.loads(out.read_text(encoding="utf-8"))
    keys = "id measured_step_time_s predicted_step_time_s error measured_peak_memory_bytes predicted_peak_memory_bytes"
    assert set(f"{keys} memory_error skipped".split()) <= document["rows"][0].keys()
    summary = """num_rows num_skipped mape median_ape p90_ape bias mape_by_source memory_mape kendall_tau_within_groups
        mean_regret max_regret oom_precision oom_recall"""
    assert set(summary.split()) <= document["summary"].keys()
    assert document["rows"][1]["skipped"] == "schedule 'DualPipe' is not priced"
    assert "skipped: schedule" in done.stdout


def test_a_result_that_cannot_be_written_is_refused_before_runs_are_priced(tmp_path: Path) -> None:
    """All runs were priced and printed first; then came a traceback."""
    runs, out = write(tmp_path / "runs.csv", {}), tmp_path / "absent" / "out.json"
    command = [sys.executable, "-m", "benchmarks.fidelity", "--runs", str(runs), "--json", str(out)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"error: cannot write {out}: ")
    assert "Traceback" not in done.stderr


def test_a_disk_that_is_full_in_the_end_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It ended in a traceback, after everything was printed."""
    runs = write(tmp_path / "runs.csv", {})
    monkeypatch.setattr(sys, "argv", ["fidelity", "--runs", str(runs), "--json", "/dev/full"])
    assert fidelity.main() == 2
    said = capsys.readouterr()
    assert "error: cannot write /dev/full: No space left on device" in said.err
    assert "toy" in said.out


def test_blanks_that_have_a_default_are_filled_and_named(tmp_path: Path) -> None:
    blank = dict.fromkeys(("vocab", "tp", "pp", "cp", "dp", "micro_batch"), "")
    gated, plain = read_runs(
        write(tmp_path / "runs.csv", {**blank, "mlp_type": "SwiGLU"}, {**blank, "mlp_type": "gelu"})
    )
    assert isinstance(gated, Run)
    assert isinstance(plain, Run)
    assert (gated.architecture.vocab, plain.architecture.vocab) == (32_000, 51_200)
    layout = gated.layout
    assert (layout.tp, layout.pp, layout.cp, layout.micro_batch_size) == (1, 1, 1, 1)
    assert layout.dp == gated.hardware.num_devices
    assert {text.split(":")[0] for text in gated.assumptions} >= set(blank)


@pytest.mark.parametrize(
    ("name", "schedule"),
    [
        ("1F1B", ScheduleName.ONE_F_ONE_B),
        ("1F1B (assumed)", ScheduleName.ONE_F_ONE_B),
        ("interleaved 1F1B", ScheduleName.INTERLEAVED_1F1B),
        ("GPipe", ScheduleName.GPIPE),
        ("ZB-2p", ScheduleName.ZB_2P),
    ],
)
def test_schedules_are_told_by_their_words(toy: Run, name: str, schedule: ScheduleName) -> None:
    stages = 2 if schedule is ScheduleName.INTERLEAVED_1F1B else 1
    layout = replace(toy.layout, schedule=name, pp=2, tp=1, dp=4, virtual_stages=stages)
    assert layout_of(replace(toy, layout=layout)).schedule is schedule
    for other in ("somehow", "interlaced-1F1B", "1F1B with more"):
        with pytest.raises(UnpriceableRunError, match="not priced"):
            layout_of(replace(toy, layout=replace(layout, schedule=other)))


def test_fsdp_under_a_pipeline_gathers_once_a_step(toy: Run) -> None:
    layout = replace(toy.layout, zero_stage=3, tp=1, pp=2, dp=4)
    assert layout_of(replace(ran(toy, "torchtitan"), layout=layout)).zero_stage == 1
    assert layout_of(replace(ran(toy, "torchtitan"), layout=replace(layout, pp=1, dp=8))).zero_stage == 3
    engine = ran(toy, "deepspeed")
    assert layout_of(replace(engine, layout=layout)).zero_stage == 3
    alone = replace(layout, dp=1, pp=4, tp=2)
    assert layout_of(replace(engine, layout=alone)).zero_stage == 0
    assert layout_of(replace(engine, layout=replace(alone, pp=1, tp=1, cp=8))).zero_stage == 3
