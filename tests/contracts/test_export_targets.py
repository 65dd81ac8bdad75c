"""Every target answers the same questions: who it is, what it takes, what it refuses and why."""

import re
import subprocess
from dataclasses import replace

import pytest

from planner.cli.export import exported
from planner.errors import InputError
from planner.formats.registry import all_targets, target_called
from planner.formats.settings import Job
from planner.formats.target import Target
from tests.unit.planner.formats.cases import ACCEPTED, REFUSED
from tests.unit.planner.formats.plans import Wanted, job

TARGETS = all_targets()
NAMES = [target.name for target in TARGETS]
# Of shared/INTERFACE.md, section 2.
PROMISED = {
    "megatron", "nemo", "torchtitan", "deepspeed", "accelerate", "nanotron", "maxtext", "slurm", "kubernetes",
    "skypilot", "torchrun",
}  # fmt: skip
READABLE = {"megatron", "deepspeed", "accelerate", "torchtitan", "nanotron"}


def test_every_promised_format_is_there() -> None:
    assert set(NAMES) >= PROMISED
    assert {target.name for target in TARGETS if target.read is not None} == READABLE
    assert len(set(NAMES)) == len(NAMES)


@pytest.mark.parametrize("target", TARGETS, ids=NAMES)
def test_a_target_is_of_a_named_version_with_its_sources(target: Target) -> None:
    assert re.search(r"\d", target.version)
    assert target.sources
    assert re.fullmatch(r"[\w.-]+/[\w.-]+@[\w.-]+: \S.*", target.sources[0])


@pytest.mark.parametrize("name", NAMES)
def test_it_takes_six_plans_and_refuses_ten(name: str) -> None:
    assert len(ACCEPTED[name]) >= 6
    assert len(REFUSED[name]) >= 10


@pytest.mark.parametrize(("name", "wanted"), [(name, wanted) for name in NAMES for wanted in ACCEPTED[name]])
def test_what_it_takes_it_writes_the_same_way_each_time(name: str, wanted: Wanted) -> None:
    target = target_called(name)
    found = exported(target, job(wanted))
    assert found == exported(target, job(wanted))
    assert found.text.endswith("\n")
    assert found.text.strip()
    assert found.notes
    assert target.version in found.text or name == "deepspeed"  # JSON has no comments


@pytest.mark.parametrize(("name", "wanted", "reason"), [(n, *each) for n in NAMES for each in REFUSED[n]])
def test_what_it_cannot_express_is_refused_with_the_reason_and_a_way_out(
    name: str, wanted: Wanted, reason: str
) -> None:
    with pytest.raises(InputError) as refused:
        exported(target_called(name), job(wanted))
    assert reason in refused.value.message
    assert refused.value.hint
    assert refused.value.exit_code == 2


@pytest.mark.parametrize("target", TARGETS, ids=NAMES)
def test_abilities_agree_with_what_is_written(target: Target) -> None:
    """What abilities do not name is refused, axis by axis and word by word."""
    can = target.abilities
    if can is None:
        return
    for axis in ("pp", "dp_shard", "cp", "tp"):
        if axis not in can.axes:
            with pytest.raises(InputError, match=f"it has no {axis}"):
                exported(target, job(replace(Wanted(zero=3 if axis == "dp_shard" else 0), **{axis: 2})))
    for stage in {1, 2, 3} - set(can.zero_stages):
        with pytest.raises(InputError, match=f"ZeRO stage {stage} is not one"):
            exported(target, job(Wanted(dp_shard=8, zero=stage)))


@pytest.mark.parametrize("name", ["megatron", "maxtext", "torchrun", "slurm"])
@pytest.mark.parametrize(
    "path", ["a plan.json", "it's; rm -rf $(echo x) `y`.json", "-c.json", '"\\.json', "#&|<>*?.json"]
)
def test_no_name_of_a_file_is_a_command(name: str, path: str) -> None:
    """A shell gives the path to planner as one word, whatever it holds."""
    plain = job(Wanted("gpt3-1.3b", dp_shard=8, zero=3, seq_len=2048))
    if name == "megatron":
        plain = job(Wanted("gpt3-1.3b", dp_shard=8, zero=1, seq_len=2048))
    hostile = Job(plain.plan, plain.layout, plain.shape, plain.preset, path, 8, plain.device)
    text = exported(target_called(name), hostile).text
    assert subprocess.run(["bash", "-n"], input=text.encode(), check=False).returncode == 0
    stubs = 'scontrol() { echo node1; }; srun() { shift; "$@"; }; python3() { torchrun "$@"; }; exec() { "$@"; }; '
    stubs += "torchrun() { printf '%s\\0' \"$@\"; }; SLURM_JOB_NODELIST=n SLURM_JOB_ID=1; "
    ran = subprocess.run(["bash", "-c", stubs + text], capture_output=True, check=True)
    words = ran.stdout.decode().split("\0")
    assert ran.stderr == b""
    if name in ("torchrun", "slurm"):
        assert words[words.index("run") + 1] == (f"./{path}" if path.startswith("-") else path)


def test_a_path_that_cannot_be_printed_is_refused() -> None:
    plain = job(Wanted(dp_shard=8, zero=3))
    hostile = Job(plain.plan, plain.layout, plain.shape, plain.preset, "plan\n#SBATCH --wrap=x.json", 8, plain.device)
    for name in ("torchrun", "slurm", "kubernetes", "skypilot"):
        with pytest.raises(InputError, match="cannot be printed"):
            exported(target_called(name), hostile)
    text = exported(target_called("deepspeed"), hostile).text
    assert "SBATCH" not in text
    text = exported(target_called("accelerate"), hostile).text
    assert "\n#SBATCH" not in text
