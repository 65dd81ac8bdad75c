"""Which recipe prices a training framework: by its name, its version, and the kernels that a run of it chose.

A framework keeps its name while its software changes, so it has one recipe a generation. Generations are told by year;
a version such as ``2022-02``, ``24.07`` (NVIDIA's containers) or ``dev-2025`` says one. Where the version says no year
the newest generation counts. Frameworks that were never calibrated borrow the recipe of the nearest one that was, and
``borrows`` says why.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from costmodels.recipe import Recipe, load_recipe
from planner.errors import InputError
from planner.frameworks.as_run import EXCHANGES_OVERLAPPED, FUSED_EXPERTS, FUSED_LOSS, WHOLE_STEP_GRAPHS
from planner.frameworks.kernels import ONCE_A_NODE

OUR_FRAMEWORK = "planner"  # what `planner run` trains with
DEVICES_OF_A_NODE = 8  # at most; where NVLink connects more, the profile's node is a rack
MONTHS = 12
FIRST_CONTAINER_YEAR, LAST_CONTAINER_YEAR = 17, 49  # of releases such as 24.07; other pairs of numbers say no year


@dataclass(frozen=True)
class Generation:
    """A recipe, and of which runs it is: all of those that no generation before it in the list is of."""

    recipe: str
    last_year: int | None = None  # runs of later years are of another generation
    with_kernel: str = ""  # a word that the run's kernels must have
    overlaps_nothing: bool = False  # communication is beside computation nowhere, and the run says so

    def is_of(self, year: int | None, kernels: Collection[str], overlap: Mapping[str, bool]) -> bool:
        """Whether a run of ``year`` with such kernels and overlaps is of this generation."""
        return (
            (self.last_year is None or (year is not None and year <= self.last_year))
            and (not self.with_kernel or self.with_kernel in kernels)
            and (not self.overlaps_nothing or (len(overlap) > 0 and not any(overlap.values())))
        )


class Where(NamedTuple):
    """What a run ran on, as far as frameworks choose by it."""

    node_devices: int  # that NVLink connects
    device: str = ""  # its name
    precision: str = ""


@dataclass(frozen=True)
class Chosen:
    """Words for kernels that a framework chooses by itself, and on which runs."""

    words: tuple[str, ...]
    since: tuple[int, int]  # year and month of the release
    on_racks: bool = False  # where NVLink connects more than one node alone
    devices: tuple[str, ...] = ()  # whose names begin so; none named: all
    precision: str = ""  # alone in this one; none named: in all
    unless: tuple[str, ...] = ()  # the run names one of these, and so says itself what it chose

    def is_of(self, release: tuple[int, int] | None, where: Where) -> bool:
        """Whether a run of that release is meant; one that says none is of the newest."""
        return (
            (release is None or release >= self.since)
            and (not self.on_racks or where.node_devices > DEVICES_OF_A_NODE)
            and (not self.devices or where.device.upper().startswith(self.devices))
            and self.precision in ("", where.precision)
        )


@dataclass(frozen=True)
class Framework:
    """A training framework: the names that it goes by, and its generations, the most special first."""

    names: tuple[str, ...]
    generations: tuple[Generation, ...]
    borrows: str = ""  # why its recipe is another framework's
    chosen: tuple[Chosen, ...] = ()  # kernels that nobody asked for
    # Overlaps that are options of its command line, off unless given: a run that names some has not given the others.
    overlap_options: tuple[str, ...] = ()
    # Those that a run has not given that names none at all: our exports do not give them, and few command lines do.
    rare_overlaps: tuple[str, ...] = ()

    def overlap_of(self, told: Mapping[str, bool]) -> dict[str, bool]:
        """What a run overlaps, from what is told of it."""
        return {**dict.fromkeys(self.overlap_options if told else self.rare_overlaps, False), **told}


# --overlap-grad-reduce, --overlap-param-gather and --tp-comm-overlap of Megatron-LM's megatron/training/arguments.py.
_MEGATRON_OPTIONS = ("grad-reduce", "param-gather", "tp-comm")
# The last needs Transformer Engine's userbuffers. 19 runs that name no overlap (FlagPerf, benchmarks/data/blind) are
# -7 % off on average as if they had it, at worst -30 %, and +2 % as if not, at worst -12 %.
_MEGATRON_RARE = ("tp-comm",)
_MEGATRON_CORE = (Generation("megatron-core", overlaps_nothing=True), Generation("megatron-core-overlap"))
_FSDP = (Generation("fsdp-compiled", with_kernel="compile"), Generation("fsdp-eager"))

BLACKWELL = ("B200", "B300", "GB200", "GB300")
# Megatron-Bridge, scripts/performance: cross_entropy_fusion_impl="te". Of Qwen3 and DeepSeek-V3: on GB200 and GB300
# moe_flex_dispatcher_backend="hybridep" in v0.2.0 (container 25.11), on others in v0.4.0 (26.04); for MXFP8 in v0.5.0
# (26.06) and v0.5.1 moe_a2a_overlap, cuda_graph_impl="full_iteration", cutedsl_fused_grouped_mlp. That attention runs
# in MXFP8 there as well is left out: at 4096 positions it is no faster (cudnn-frontend, sdpa_benchmark_training).
_BRIDGE = (
    Chosen((FUSED_LOSS,), (2025, 9)),
    Chosen(("hybridep",), (2025, 11), on_racks=True, unless=ONCE_A_NODE),
    Chosen(("hybridep",), (2026, 4), devices=BLACKWELL, unless=ONCE_A_NODE),
    Chosen(
        (WHOLE_STEP_GRAPHS, EXCHANGES_OVERLAPPED, FUSED_EXPERTS),
        (2026, 6),
        devices=BLACKWELL,
        precision="fp8",
        unless=ONCE_A_NODE,
    ),
)

FRAMEWORKS = (
    Framework((OUR_FRAMEWORK,), (Generation("planner"),)),
    Framework(
        ("megatron-lm",),
        # v1 and v2; v3; since 2024 Megatron-LM trains on Megatron-Core.
        (
            Generation("megatron-lm-2020", last_year=2021),
            Generation("megatron-lm-2022", last_year=2023),
            *_MEGATRON_CORE,
        ),
        overlap_options=_MEGATRON_OPTIONS,
        rare_overlaps=_MEGATRON_RARE,
    ),
    Framework(("megatron-core",), _MEGATRON_CORE, overlap_options=_MEGATRON_OPTIONS, rare_overlaps=_MEGATRON_RARE),
    # Options of single runs that change much: named as frameworks, so that --framework takes them.
    Framework(("megatron-core-expert-overlap",), (Generation("megatron-core-expert-overlap"),)),
    Framework(("dualpipe",), (Generation("dualpipe"),), borrows="of DeepSeek's trainer no kernel was ever calibrated"),
    Framework(
        ("nemo", "megatron-bridge"),
        # NeMo Megatron of 2022 trained with apex, before Transformer Engine and overlaps.
        (Generation("megatron-lm-2022", last_year=2022), Generation("nemo")),
        chosen=_BRIDGE,
    ),
    # Under DeepSpeed's engine of 2021 and 2022 ranks wait at every collective of tensor parallelism.
    Framework(
        ("megatron-deepspeed", "gpt-neox"),
        (
            Generation("megatron-deepspeed-2021", last_year=2021),
            Generation("megatron-deepspeed-2022", last_year=2022),
            Generation("megatron-deepspeed"),
        ),
    ),
    # Of 2021, before it gathered several tensors at once.
    Framework(("deepspeed", "zero-infinity"), (Generation("deepspeed-2021", last_year=2021), Generation("deepspeed"))),
    Framework(("torchtitan",), (Generation("torchtitan-compiled", with_kernel="compile"), Generation("torchtitan"))),
    # Before 2023 its trainer was Composer with examples of MosaicML's, in other precisions.
    Framework(
        ("llm-foundry", "fsdp-llm-foundry"),
        (Generation("fsdp-composer-2022", last_year=2022), Generation("fsdp-llm-foundry")),
    ),
    # Compiled unless it says otherwise.
    Framework(("fms-fsdp",), (Generation("fsdp-eager", with_kernel="eager-mode"), Generation("fsdp-compiled"))),
    Framework(("fsdp", "accelerate", "lit-gpt"), _FSDP, borrows="PyTorch's FSDP was calibrated under fms-fsdp"),
    Framework(
        ("torchtune",),
        (Generation("torchtitan-compiled", with_kernel="compile"), Generation("torchtitan")),
        borrows="FSDP2 was calibrated under torchtitan",
    ),
    Framework(
        ("ddp", "horovod", "fairscale"),
        _FSDP,
        borrows="of PyTorch's data parallelism FSDP alone was calibrated",
    ),
    Framework(("nanotron",), (Generation("nanotron"),)),
    Framework(("internevo",), (Generation("internevo"),)),
    Framework(("maxtext",), (Generation("maxtext"),)),
    Framework(
        ("nnscaler",), _FSDP, borrows="nnScaler was never calibrated; it runs PyTorch's kernels as FSDP's trainers do"
    ),
)


def framework_of(name: str) -> Framework:
    """The framework that goes by ``name``, in any case; InputError lists those that are known."""
    wanted = name.strip().lower()
    found = next((framework for framework in FRAMEWORKS if wanted in framework.names), None)
    if found is None:
        known = ", ".join(names for framework in FRAMEWORKS for names in framework.names)
        raise InputError(f"no framework {name!r} is known", hint=f"known are {known}")
    return found


def recipe_for(
    framework: str, version: str = "", kernels: Collection[str] = (), overlap: Mapping[str, bool] | None = None
) -> Recipe:
    """The recipe of a run under ``framework``; InputError where no framework goes by that name.

    ``kernels`` and ``overlap`` are words as in the table of published runs: ``compile``, ``flash2``; ``grad-reduce``,
    ``param-gather``, ``tp-comm``.
    """
    found, year = framework_of(framework), year_of(version)
    told = found.overlap_of(overlap) if overlap else {}
    of_run = (each for each in found.generations if each.is_of(year, kernels, told))
    return load_recipe(next(of_run).recipe)


def kernels_of(framework: str, version: str, kernels: Collection[str], where: Where) -> tuple[str, ...]:
    """``kernels`` and those that ``framework`` chooses by itself there.

    InputError where no framework goes by that name.
    """
    release = release_of(version)
    found = dict.fromkeys(kernels)
    for chosen in framework_of(framework).chosen:
        if chosen.is_of(release, where) and not any(word in chosen.unless for word in kernels):
            found |= dict.fromkeys(chosen.words)
    return tuple(found)


def release_of(version: str) -> tuple[int, int] | None:
    """The year and month that a version says, of a year alone the last month; None where it says none."""
    year = year_of(version)
    if year is None:
        return None
    month = re.search(r"(?<!\d)(?:20)?\d\d[.-](0[1-9]|1[0-2])(?!\d)", version)
    return year, int(month.group(1)) if month else MONTHS


def year_of(version: str) -> int | None:
    """The year that a version says; None where it says none."""
    named = re.search(r"(?<!\d)(20\d\d)(?!\d)", version)
    if named:
        return int(named.group(1))
    container = re.match(r"(\d\d)\.(\d\d)(?:\.|$)", version)
    if container and FIRST_CONTAINER_YEAR <= int(container.group(1)) <= LAST_CONTAINER_YEAR:
        return 2000 + int(container.group(1))
    return None
