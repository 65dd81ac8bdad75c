"""What a run is asked to do. Nothing here needs the executor, so that a launcher begins without importing it."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

from costmodels.vocabulary.choices import Offload, Optimizer
from planner.errors import InputError
from planner.executor.ranks import DEFAULT_TIMEOUT_S
from planner.executor.run_log import LogOptions
from planner.executor.token_file import TokenDtype

DEFAULT_LEARNING_RATE = {
    Optimizer.ADAMW: 3e-4, Optimizer.ADAM: 3e-4, Optimizer.SGD: 0.1, Optimizer.SGD_MOMENTUM: 0.1
}  # fmt: skip
EVAL_BATCHES = 8  # enough for the mean loss to stand still, and a small part of training
KEPT = 3  # checkpoints: one may be damaged, and the run may have gone wrong before the next


class LearningRate(StrEnum):
    """How the learning rate goes on after its warm-up."""

    CONSTANT = "constant"
    LINEAR = "linear"
    COSINE = "cosine"
    WSD = "wsd"  # warm-up, stable, decay: constant until a linear decay at the end


class Decay(StrEnum):
    """Which parameters weight decay pulls towards zero."""

    ALL = "all"
    MATRICES = "matrices"  # all but vectors (norms' scales, biases) and whatever is named a bias


@dataclass(frozen=True)
class Optimization:
    """What changes the updates. As it stands nothing is changed: a constant rate, torch's own decay, no clipping."""

    learning_rate: float | None = None  # the highest one; None: the optimiser's default of ours
    schedule: LearningRate = LearningRate.CONSTANT
    warmup_steps: int = 0  # in which the rate grows linearly
    schedule_steps: int | None = None  # at which the schedule ends; None: the run's steps
    decay_steps: int | None = None  # of WSD; None: a tenth
    final_share: float = 0.0  # of the highest rate, at the schedule's end
    weight_decay: float | None = None  # None: torch's own, 0.01 for AdamW
    decay: Decay = Decay.ALL
    clip_norm: float | None = None

    def peak(self, name: Optimizer) -> float:
        """The highest learning rate."""
        return DEFAULT_LEARNING_RATE[name] if self.learning_rate is None else self.learning_rate

    def text(self, name: Optimizer, steps: int) -> str:
        """What a run of ``steps`` is trained with, but for the seed: other words, other updates."""
        end = self.schedule_steps or steps
        shape = f"to {self.final_share:g} of it after step {end}"
        if self.schedule is LearningRate.WSD and self.decay_steps is not None:
            shape += f" in {self.decay_steps} steps"
        parts = [
            f"{self.schedule.value} learning rate {self.peak(name):g}",
            "" if self.schedule is LearningRate.CONSTANT else shape,
            f"warm-up of {self.warmup_steps} steps" if self.warmup_steps else "",
            "" if self.weight_decay is None else f"weight decay {self.weight_decay:g}",
            f"decay of {self.decay.value}" if self.decay is not Decay.ALL else "",
            "" if self.clip_norm is None else f"gradients clipped at {self.clip_norm:g}",
        ]
        return ", ".join(part for part in parts if part)

    def check(self, steps: int) -> None:
        """InputError where the schedule cannot be followed, or no gradient is left."""
        if self.clip_norm == 0:
            raise InputError("--clip-norm 0 leaves nothing of any gradient: nothing would be learned",
                             hint="leave it out, and nothing is clipped")  # fmt: skip
        self._check_used()
        end = self.schedule_steps or steps
        if self.schedule is not LearningRate.CONSTANT and self.warmup_steps >= end:
            raise InputError(
                f"the learning rate grows for {self.warmup_steps} steps, but its schedule ends after {end}",
                hint="lower --warmup, or raise --steps or --schedule-steps",
            )
        if self.decay_steps is not None and self.warmup_steps + self.decay_steps > end:
            raise InputError(
                f"the learning rate falls for {self.decay_steps} steps behind a warm-up of {self.warmup_steps}, but "
                f"its schedule ends after {end}",
                hint="lower --decay-steps or --warmup, or raise --steps or --schedule-steps",
            )

    def _check_used(self) -> None:
        """InputError where an option is of another schedule: the rate would not go as it was meant."""
        if self.decay_steps is not None and self.schedule is not LearningRate.WSD:
            raise InputError(
                f"--decay-steps is of --lr-schedule wsd, and the schedule is {self.schedule.value}",
                hint="leave it out, or choose --lr-schedule wsd",
            )
        if self.schedule is not LearningRate.CONSTANT:
            return
        given = {"--schedule-steps": self.schedule_steps is not None, "--final-lr-share": self.final_share > 0}
        unused = [name for name, is_given in given.items() if is_given]
        if unused:
            raise InputError(
                f"{' and '.join(unused)} would change nothing: the learning rate is constant",
                hint="choose --lr-schedule linear, cosine or wsd, or leave out what is for these",
            )


@dataclass(frozen=True)
class DataOptions:
    """What to train on, and what to look at in between."""

    file: Path | None = None  # None: the standard library's source
    dtype: TokenDtype | None = None  # of a file that does not say its own; None: such a file is text
    eval_file: Path | None = None
    eval_every: int | None = None  # steps
    eval_batches: int = EVAL_BATCHES  # global batches, each time the same


@dataclass(frozen=True)
class CheckpointOptions:
    """Where to go on from and to save: at the end, on SIGTERM, and ``every`` so many steps."""

    folder: Path | None = None
    every: int | None = None
    keep: int = KEPT
    must_resume: bool = False  # an error where there is nothing to go on from


@dataclass(frozen=True)
class RunOptions:
    """How long and on what to train."""

    steps: int = 20
    seed: int | None = None  # None: that of the checkpoint, or 0
    timeout_s: float = DEFAULT_TIMEOUT_S  # how long a rank may say nothing
    data: DataOptions = field(default_factory=DataOptions)
    optimization: Optimization = field(default_factory=Optimization)
    checkpoints: CheckpointOptions = field(default_factory=CheckpointOptions)
    weights: Path | None = None  # safetensors to begin with
    is_compiled: bool = False  # each unit by torch.compile
    offload_dir: Path | None = None  # for what a plan keeps on NVMe
    log: LogOptions = field(default_factory=LogOptions)
    profile: tuple[int, Path] | None = None  # a step to profile, and the folder for one trace a rank
    finds_nan: bool = False  # modules are looked at for numbers that are not finite

    def never_comes(self, first: int) -> list[str]:
        """What is asked for at steps that a run after step ``first`` does not take."""
        if first >= self.steps:
            return [f"--steps {self.steps}: {first} are done already, which count among them"]
        every, asked = self.data.eval_every, list[str]()
        if every is not None and self.steps // every == first // every:
            asked.append(f"--eval-every {every}: no step from {first + 1} to {self.steps} is a multiple of it")
        if self.profile is not None and not first < self.profile[0] <= self.steps:
            asked.append(f"--profile-step {self.profile[0]}: steps are {first + 1} to {self.steps}")
        return asked

    def check_profile(self) -> None:
        """InputError before the run rather than in it, where traces cannot be written."""
        if self.profile is not None and self.profile[1].exists() and not self.profile[1].is_dir():
            raise InputError(f"cannot write traces into {self.profile[1]}: it is no folder",
                             hint="choose another --profile-dir")  # fmt: skip

    def check_watch(self) -> None:
        """InputError where modules are to be looked at that are none when they run."""
        if self.finds_nan and self.is_compiled:
            raise InputError("--find-nan looks at modules, and --compile makes one program of those of a block",
                             hint="leave one of them out")  # fmt: skip

    def check_offload(self, offload: Offload) -> None:
        """InputError where a plan that offloads so needs a folder and has none, or the other way round."""
        if offload is Offload.NVME and self.offload_dir is None:
            raise InputError(
                "the plan keeps optimiser states on NVMe, and nobody says where",
                hint="name a folder with --offload-dir",
            )
        if offload is not Offload.NVME and self.offload_dir is not None:
            raise InputError(
                f"--offload-dir is for plans that keep optimiser states on NVMe; this one has offload = "
                f"{offload.value}",
                hint="leave it out, or search again with --offload nvme",
            )


@dataclass(frozen=True)
class ParityOptions:
    """What the one step of a comparison with one process is taken on."""

    seed: int = 0
    data: Path | None = None
    data_dtype: TokenDtype | None = None
    timeout_s: float = DEFAULT_TIMEOUT_S
