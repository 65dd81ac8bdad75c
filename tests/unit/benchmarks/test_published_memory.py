"""What published peaks of memory are held against, and what the page of accuracy says of them."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from benchmarks.published.frameworks import WRITTEN_OUT_NORM_BYTES, with_norms
from benchmarks.published.memory_page import who_ran_out
from benchmarks.published.pricing import RunPricer
from benchmarks.published.summary import Row, row_of
from costmodels.recipe import load_recipe
from planner.formats.run_table import GIB, Run, read_runs
from tests.unit.benchmarks.test_published_runs import write


def only(path: Path) -> Run:
    (run,) = read_runs(path)
    assert isinstance(run, Run)
    return run


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return only(write(tmp_path_factory.mktemp("runs") / "runs.csv", {}))


def test_a_peak_of_which_the_kind_is_not_said_is_held_against_none(tmp_path: Path) -> None:
    words = {"peak_memory_kind": "GiB as printed by the source (kind not said)"}
    run = only(write(tmp_path / "runs.csv", words))
    assert (run.peak_memory_bytes, run.peak_memory_kind) == (None, "")
    assert row_of(run, RunPricer().price(run)).memory_error is None


@pytest.mark.parametrize(
    ("words", "kind", "unit"),
    [
        ("torch max memory (MB printed, /1024 = GiB)", "allocated", GIB),
        ("GiB as printed; the monitor is nvidia-smi", "device", GIB),
        ("peak reserved of the worst rank", "reserved", 1e9),
    ],
)
def test_a_peak_is_of_the_kind_and_in_the_unit_that_are_said(
    tmp_path: Path, words: str, kind: str, unit: float
) -> None:
    run = only(write(tmp_path / "runs.csv", {"peak_memory_kind": words}))
    assert (run.peak_memory_kind, run.peak_memory_bytes) == (kind, 2 * unit)


def test_written_out_norms_of_hugging_face_keep_a_copy_in_32_bits(toy: Run) -> None:
    """Held against what torch's autograd keeps of their module."""
    width, rows = 64, 32
    kept: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    x = torch.ones(rows, width, dtype=torch.bfloat16, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        y = LlamaRMSNorm(width).to(torch.bfloat16)(x)
    assert y.shape == (rows, width)
    large = sum(size for size in kept.values() if size >= rows * width)  # neither the weight nor a number a row
    fused = x.nbytes  # PyTorch's own norm keeps its input
    assert large - fused == WRITTEN_OUT_NORM_BYTES * rows * width

    software = replace(toy.software, framework="deepspeed", version="2024", kernels=("flash2", "eager-mode"))
    gated = replace(toy, software=software, architecture=replace(toy.architecture, mlp_type="swiglu"))
    recipe = load_recipe("deepspeed")
    assert with_norms(recipe, gated).norm_saved_bytes.value == WRITTEN_OUT_NORM_BYTES
    fused_norm = replace(gated, software=replace(software, kernels=("flash2", "eager-mode", "fused-norm")))
    others = replace(gated, software=replace(software, framework="megatron-core"))
    for run in (fused_norm, others, replace(gated, architecture=toy.architecture)):
        assert with_norms(recipe, run) is recipe


def test_the_page_counts_who_ran_out_of_memory_by_what_was_predicted() -> None:
    def rows(*shares: float, recipe: str = "nanotron") -> list[Row]:
        return [Row(str(share), "", "", 1.0, recipe=recipe, device_share=share) for share in shares]

    ran = [*rows(0.1, 0.86, 0.97), *rows(0.86, recipe="maxtext")]  # of maxtext none ran out: it says nothing
    text = who_ran_out(ran, rows(0.88, 0.97, 2.0))
    assert "| 0% to 70% | 1 | 0 | 0% |" in text
    assert "| 85% to 90% | 2 | 1 | 50% |" in text
    assert "| 95% to 100% | 2 | 1 | 50% |" in text
    assert "| above 110% | 1 | 1 | 100% |" in text
