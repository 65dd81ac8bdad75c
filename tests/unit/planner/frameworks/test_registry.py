"""Every framework has a recipe for every version, and a version's year chooses the generation."""

import pytest

from planner.errors import InputError
from planner.frameworks.kernels import attention_name_for, dispatches_once_a_node
from planner.frameworks.registry import FRAMEWORKS, Where, framework_of, kernels_of, recipe_for, release_of, year_of
from planner.request import Software

# The names that the command line takes.
NAMES = """planner megatron-core megatron-lm nemo deepspeed zero-infinity torchtitan fsdp ddp horovod fairscale nanotron
    maxtext nnscaler accelerate llm-foundry""".split()


@pytest.mark.parametrize("name", NAMES)
def test_every_name_of_the_command_line_has_a_recipe(name: str) -> None:
    assert recipe_for(name).name == recipe_for(name.upper()).name


def test_no_name_stands_twice_and_the_last_generation_takes_what_is_left() -> None:
    names = [name for framework in FRAMEWORKS for name in framework.names]
    assert len(set(names)) == len(names)
    for framework in FRAMEWORKS:
        assert framework.generations[-1].is_of(None, (), {}), framework.names
        for generation in framework.generations:
            assert generation.is_of(1990, (generation.with_kernel,), {"tp-comm": False}), framework.names


def test_an_unknown_framework_is_refused_with_what_there_is() -> None:
    with pytest.raises(InputError, match="no framework 'colossus'") as caught:
        framework_of("colossus")
    assert "nanotron" in caught.value.hint


@pytest.mark.parametrize(
    ("text", "parts", "recipe"),
    [
        ("megatron-lm", ("megatron-lm", "", ()), "megatron-core-overlap"),
        ("Megatron-LM@2022-02", ("megatron-lm", "2022-02", ()), "megatron-lm-2022"),
        ("accelerate+compile", ("accelerate", "", ("compile",)), "fsdp-compiled"),
        ("torchtitan@2025+compile+flash2", ("torchtitan", "2025", ("compile", "flash2")), "torchtitan-compiled"),
        (" deepspeed @ 2021 ", ("deepspeed", "2021", ()), "deepspeed-2021"),
    ],
)
def test_software_is_named_with_its_version_and_kernels(
    text: str, parts: tuple[str, str, tuple[str, ...]], recipe: str
) -> None:
    found = Software.named(text)
    assert (found.framework, found.version, found.kernels) == parts
    assert found.recipe.name == recipe


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("deepspeed@v1", "'v1' of deepspeed says no year"),
        ("torchtitan+turbo", "no kernel 'turbo'"),
        ("torchtitan+", "no kernel ''"),
        ("torchtitan+compile@2022", "no kernel 'compile@2022'"),
    ],
)
def test_what_is_no_version_or_no_kernel_is_refused(text: str, said: str) -> None:
    with pytest.raises(InputError, match=said):
        Software.named(text)


@pytest.mark.parametrize(
    ("version", "year"),
    [("2022-02", 2022), ("2025", 2025), ("24.07", 2024), ("26.02.01", 2026), ("dev-2025", 2025), ("core-0.9", None),
     ("0.12", None), ("", None), ("99.01", None)],
)  # fmt: skip
def test_versions_say_years(version: str, year: int | None) -> None:
    assert year_of(version) == year


@pytest.mark.parametrize(
    ("framework", "version", "kernels", "overlap", "recipe"),
    [
        ("megatron-lm", "2020", "", {}, "megatron-lm-2020"),
        ("megatron-lm", "2022-02", "", {}, "megatron-lm-2022"),
        ("megatron-lm", "2024", "", {}, "megatron-core-overlap"),
        ("megatron-lm", "", "", {}, "megatron-core-overlap"),
        ("megatron-core", "core-0.9", "", {"grad-reduce": True}, "megatron-core-overlap"),
        ("megatron-core", "2025", "", {"grad-reduce": False, "tp-comm": False}, "megatron-core"),
        ("megatron-bridge", "26.02", "te", {}, "nemo"),
        ("nemo", "24.05", "", {}, "nemo"),
        ("nemo", "22.03", "apex", {}, "megatron-lm-2022"),
        ("fms-fsdp", "2024-02", "flash2 eager-mode", {}, "fsdp-eager"),
        ("fms-fsdp", "2024-06", "flash2 compile", {}, "fsdp-compiled"),
        ("fms-fsdp", "", "", {}, "fsdp-compiled"),
        ("torchtitan", "2025-06", "compile", {}, "torchtitan-compiled"),
        ("torchtitan", "2025-06", "eager-mode", {}, "torchtitan"),
        ("fsdp", "", "compile", {}, "fsdp-compiled"),
        ("fsdp", "", "", {}, "fsdp-eager"),
        ("accelerate", "", "", {}, "fsdp-eager"),
        ("llm-foundry", "2023", "", {}, "fsdp-llm-foundry"),
        ("fsdp-llm-foundry", "2022-12", "flash1", {}, "fsdp-composer-2022"),
        ("maxtext", "", "", {}, "maxtext"),
        ("megatron-deepspeed", "2022-02", "", {}, "megatron-deepspeed-2022"),
        ("gpt-neox", "2021", "", {}, "megatron-deepspeed-2021"),
        ("megatron-deepspeed", "2023", "", {}, "megatron-deepspeed"),
        ("deepspeed", "2021", "", {}, "deepspeed-2021"),
        ("deepspeed", "", "", {}, "deepspeed"),
    ],
)
def test_a_run_finds_its_generation(
    framework: str, version: str, kernels: str, overlap: dict[str, bool], recipe: str
) -> None:
    assert recipe_for(framework, version, kernels.split(), overlap).name == recipe


def test_options_that_a_run_does_not_name_are_off_and_of_runs_that_name_none_the_rare_ones() -> None:
    """Before, tensor parallelism of Megatron-LM was priced beside the products, which our export never asked for."""
    megatron = framework_of("megatron-core")
    assert megatron.overlap_of({}) == {"tp-comm": False}
    assert framework_of("nemo").overlap_of({}) == {}
    software = Software.named("megatron-core")
    assert software.recipe.tensor_overlap.value == 0
    assert software.recipe.overlaps_reduction
    asked = Software.named("megatron-core+tp-comm-overlap")
    assert asked.recipe.tensor_overlap.value == 0.75
    assert asked.recipe.overlaps_reduction
    with pytest.raises(InputError, match="option of Megatron-LM, and not of torchtitan"):
        Software.named("torchtitan+tp-comm-overlap")
    assert megatron.overlap_of({"grad-reduce": True}) == {"grad-reduce": True, "param-gather": False, "tp-comm": False}
    assert framework_of("torchtitan").overlap_of({"tp-comm": True}) == {"tp-comm": True}


@pytest.mark.parametrize(
    ("kernels", "uses_flash", "device", "name"),
    [
        ("flash1", None, "A100", "flash1"),
        ("te fused-softmax", True, "A100", "fused_softmax"),
        ("te", True, "H100-SXM", "cudnn"),
        ("te", True, "B200", "flash2"),
        ("cudnn", None, "A100", "flash2"),
        ("flash apex", None, "H100", "cudnn"),
        ("", False, "H100", "fused_softmax"),
        ("eager-mode", None, "A100", "flash2"),
    ],
)
def test_words_name_attention_kernels(kernels: str, uses_flash: bool | None, device: str, name: str) -> None:
    assert attention_name_for(recipe_for("nemo"), kernels.split(), device, uses_flash=uses_flash) == name


def test_dispatchers_are_told_by_their_names() -> None:
    assert dispatches_once_a_node(("te", "hybridep"))
    assert not dispatches_once_a_node(("te",))


LOSS, WHOLE = "te-cross-entropy", "whole-step-graphs exchanges-overlapped fused-experts"


@pytest.mark.parametrize(
    ("version", "kernels", "where", "more"),
    [
        ("24.07", "te", Where(8, "H100", "fp8"), ""),
        ("25.09", "te", Where(72, "GB200", "fp8"), LOSS),
        ("25.11", "te", Where(72, "GB200", "fp8"), f"{LOSS} hybridep"),
        ("26.02.01", "te", Where(8, "B300", "fp8"), LOSS),
        ("26.04.01", "te", Where(8, "B300", "fp8"), f"{LOSS} hybridep"),
        ("26.04", "te", Where(8, "H100", "fp8"), LOSS),
        ("26.06", "te", Where(8, "H100", "fp8"), LOSS),
        ("26.06", "te", Where(8, "B300-SXM", "bf16"), f"{LOSS} hybridep"),
        ("26.06", "te", Where(8, "B300-SXM", "fp8"), f"{LOSS} hybridep {WHOLE}"),
        ("2026", "te", Where(72, "GB300", "fp8"), f"{LOSS} hybridep {WHOLE}"),
        ("", "te", Where(72, "GB300", "fp8"), f"{LOSS} hybridep {WHOLE}"),
        ("2026", "te hybridep", Where(72, "GB300", "fp8"), LOSS),
    ],
)
def test_some_frameworks_choose_kernels_by_release_and_machine(
    version: str, kernels: str, where: Where, more: str
) -> None:
    assert kernels_of("megatron-bridge", version, kernels.split(), where) == (*kernels.split(), *more.split())
    assert kernels_of("torchtitan", version, kernels.split(), where) == tuple(kernels.split())


@pytest.mark.parametrize(
    ("version", "release"),
    [("26.04.01", (2026, 4)), ("24.07", (2024, 7)), ("2022-02", (2022, 2)), ("2025", (2025, 12)),
     ("dev-2025", (2025, 12)), ("core-0.9", None)],
)  # fmt: skip
def test_versions_say_months(version: str, release: tuple[int, int] | None) -> None:
    assert release_of(version) == release
