"""The steady step time, and the memory, that the log of a training framework tells.

Each framework has a record: the line that it writes of a step, and what that line counts. The first fifth of the steps
that are logged, at least one and at most twenty, is warm-up: compilation, autotuning, the optimiser's first states. Of
the others the median counts, so that checkpoints, evaluations and a slow step now and then do not. What a log says of
its job (batch, length of a sequence, number of GPUs) has to be what the plan says.

The formats, as public logs have them:

    Megatron-LM   iteration 10/ 100 | ... | elapsed time per iteration (ms): 283.9 | ...
    torchtitan    step: 10 loss: ... memory: 49.66GiB(52.28%) tps: 5,856 tflops: ...; its "validate step" trains nothing
    DeepSpeed     ... epoch=0/micro_step=40/global_step=10, ... CurrSamplesPerSec=25.7, ... MaxMemAllocated=38.5GB
                  [time] ... [Rank 0] step=10, skipped=0, lr=[...]
    nanotron      iteration: 10 / 100 | ... | elapsed_time_per_iteration_ms: 1.23K | ... | global_batch_size: 1.02K | ..
    NeMo          ... | global_batch_size: 512 | ... | train_step_timing in s: 6.08 | ...
                  or train_step_timing in s=6.08 of its progress bar
    MaxText       completed step: 9, seconds: 5.667, TFLOP/s/device: 134.924, Tokens/s/device: 8672.758, ...
    planner run   step   21  loss 4.7055  step time 0.077 s  13,308 tokens/s, or a line of JSON of its --log

Written by megatron/training/training.py, torchtitan/components/metrics.py, deepspeed/utils/timer.py,
nanotron/trainer.py, nemo's TimingCallback, maxtext's metric_logger.py and our planner/executor/train.py and run_log.py.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import pairwise
from statistics import median, quantiles
from typing import Literal

from planner.errors import InputError

LEAST_STEADY = 3  # steps that must be left when warm-up is skipped
WARM_UP_SHARE, MOST_WARM_UP = 5, 20
UNSTEADY = 1.25  # the third quartile over the first, above which steps are of several kinds
SCALES = {"": 1.0, "K": 1e3, "M": 1e6, "G": 1e9, "B": 1e9, "T": 1e12}
GIB, MIB = 2**30, 2**20
COLOURS = re.compile(r"\x1b\[[0-9;]*m")
VALIDATION = re.compile(r"^.*\bvalidate step:.*$", re.MULTILINE)
THREE_DIGITS = 5e-3  # of a number that is shortened to three digits, as 1,024 to 1.02K
NUMBER = r"([\d.,]+(?:[eE][+-]?\d+)?)"


@dataclass(frozen=True)
class Job:
    """What a log does not say of a run, and its rates are of. Batches are in sequences."""

    global_batch_size: int
    seq_len: int
    num_devices: int


@dataclass(frozen=True)
class Logged:
    """What a log tells. ``peak_memory_bytes`` None: nothing of memory."""

    framework: str
    step_time_s: float
    num_steps: int  # whose median it is
    middle_s: tuple[float, float]  # between which the middle half of them lies
    peak_memory_bytes: float | None = None
    memory_kind: Literal["allocated", "reserved"] = "allocated"

    @property
    def is_unsteady(self) -> bool:
        """Whether its steps are of two kinds, as of two jobs or of nodes that others use."""
        return self.middle_s[1] > UNSTEADY * self.middle_s[0]


@dataclass(frozen=True)
class LogFormat:
    """How a framework logs: seconds of a step from a match of its line, and the line of its memory, in bytes."""

    framework: str
    step: re.Pattern[str]
    seconds: Callable[[re.Match[str], Job], float]
    memory: re.Pattern[str] | None = None
    memory_unit: float = 1.0
    memory_kind: Literal["allocated", "reserved"] = "allocated"
    batch: re.Pattern[str] | None = None  # sequences of a step, where it says them
    seq_len: re.Pattern[str] | None = None  # tokens of one
    devices: re.Pattern[str] | None = None  # GPUs of the job


def read_log(text: str, job: Job, name: str = "the log") -> Logged:
    """What ``text`` tells of ``job``; InputError where no framework's steps are found in it, or too few."""
    text = VALIDATION.sub("", COLOURS.sub("", text))
    for of in FORMATS:
        times = [of.seconds(match, job) for match in of.step.finditer(text)]
        if times:
            _check_job(of, text, job, name)
            return _logged(of, times, text, name)
    times = _between_deepspeed_steps(text)
    if times:
        return _logged(DEEPSPEED, times, text, name)
    raise InputError(
        f"{name} has no line of a step that is known",
        hint="logs of Megatron-LM, torchtitan, DeepSpeed, nanotron, NeMo, MaxText and planner run are; else give the "
        "seconds: PLAN:SECONDS",
    )


def _check_job(of: LogFormat, text: str, job: Job, name: str) -> None:
    """InputError where steps are of another job than the plan's, or of several batches as while a batch ramps up."""
    known = ((of.batch, job.global_batch_size, "the steps in {} are of {} sequences"),
             (of.seq_len, job.seq_len, "the sequences in {} are of {} tokens"),
             (of.devices, job.num_devices, "the job in {} is of {} GPUs"))  # fmt: skip
    for pattern, whole, says in known:
        said = {word: _number(word) for word in dict.fromkeys(pattern.findall(text))} if pattern else {}
        if any(
            abs(value - whole) > (THREE_DIGITS * whole if word[-1:].isalpha() else 0) for word, value in said.items()
        ):
            shown = ", ".join(f"{value:.0f}" for value in sorted(said.values())[:4])
            raise InputError(
                f"{says.format(name, shown)}, the plan's of {whole}",
                hint="give the log of a run of this plan, and of its steps after any ramp of the batch size",
            )


def _logged(of: LogFormat, times: Sequence[float], text: str, name: str) -> Logged:
    steady = times[min(MOST_WARM_UP, max(1, len(times) // WARM_UP_SHARE)) :]
    if len(steady) < LEAST_STEADY:
        raise InputError(
            f"{name} has {len(times)} steps of {of.framework}, of which {len(steady)} are past warm-up; at least "
            f"{LEAST_STEADY} must be",
            hint="give a longer log, or the seconds of a step: PLAN:SECONDS",
        )
    peaks = [] if of.memory is None else [_number(found) * of.memory_unit for found in of.memory.findall(text)]
    low, _, high = quantiles(steady, n=4, method="inclusive")
    return Logged(of.framework, median(steady), len(steady), (low, high), max(peaks, default=None), of.memory_kind)


def _number(text: str) -> float:
    """``5,856``, ``1.23K`` or ``6.859e+03``; InputError where it is none, or 0."""
    scaled = text.strip().replace(",", "")
    scale = SCALES.get(scaled[-1:].upper(), 1.0) if scaled[-1:].isalpha() else 1.0
    try:
        value = float(scaled.rstrip("KMGBTkmgbt")) * scale
    except ValueError:
        value = 0.0
    if not 0 < value < 1e18:
        raise InputError(f"a log has {text!r} where a number above 0 is expected", hint="is it damaged?")
    return value


def _between_deepspeed_steps(text: str) -> list[float]:
    """Seconds a step between lines of the optimiser's step, by the clock that stands before them."""
    pattern = re.compile(r"\[(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3})\][^\n]*?\[Rank 0\] step=(\d{1,9}),")
    stamps = [(int(step), _moment(time)) for time, step in pattern.findall(text)]
    pairs = pairwise(stamps)
    spans = [((later - earlier).total_seconds(), last - first) for (first, earlier), (last, later) in pairs]
    return [span / steps for span, steps in spans if steps > 0 and span > 0]


def _moment(text: str) -> datetime:
    try:
        return datetime.fromisoformat(text.replace(",", "."))
    except ValueError as error:
        raise InputError(f"a log has {text!r}, which is no moment: {error}", hint="is it damaged?") from error


DEEPSPEED = LogFormat(
    "deepspeed",
    # Of versions that say their micro-step the rate is of the whole batch; older ones leave accumulation out.
    re.compile(rf"micro_step=\d+/global_step=\d+, [^\n]*?CurrSamplesPerSec={NUMBER}"),
    lambda match, job: job.global_batch_size / _number(match[1].rstrip(",")),
    re.compile(rf"MaxMemAllocated={NUMBER}GB"),
    GIB,
)
FORMATS: tuple[LogFormat, ...] = (
    LogFormat(
        "nanotron",
        re.compile(r"elapsed_time_per_iteration_ms: ([\d.]+[KMB]?)"),
        lambda match, _job: _number(match[1]) / 1e3,
        re.compile(r"Peak allocated:? ([\d.]+)MiB"),
        MIB,
        batch=re.compile(r"elapsed_time_per_iteration_ms: [^\n]*?global_batch_size: ([\d.]+[KMB]?)"),
    ),
    LogFormat(
        "megatron-lm",
        re.compile(rf"elapsed time per iteration \(ms\): {NUMBER}"),
        lambda match, _job: _number(match[1]) / 1e3,
        re.compile(rf"max allocated: {NUMBER}"),  # in MB of 2**20 bytes, --log-memory-interval and after the first step
        MIB,
        batch=re.compile(r"global batch size: +([\d,]{1,12})"),
        devices=re.compile(r"using world size: (\d{1,12}),"),
    ),
    LogFormat(
        "nemo",
        re.compile(rf"train_step_timing in s(?:: |=){NUMBER}"),
        lambda match, _job: _number(match[1].rstrip(",.")),
        re.compile(rf"max_memory_allocated: {NUMBER}"),
        batch=re.compile(r"global_batch_size: (\d{1,12})[^\n\r]*?train_step_timing"),
    ),
    LogFormat(
        "torchtitan",
        re.compile(rf"step: +\d+ [^\n]*? tps: {NUMBER}"),  # tokens per second and GPU, of all GPUs of the job
        lambda match, job: job.global_batch_size * job.seq_len / (_number(match[1]) * job.num_devices),
        re.compile(rf"memory: +{NUMBER}GiB"),  # torch.cuda's reserved_bytes.all.peak
        GIB,
        "reserved",
        batch=re.compile(r"local batch size \d+, global batch size (\d{1,12}),"),
        seq_len=re.compile(r"global batch size \d+, [^\n]*?sequence length (\d{1,12}),"),
    ),
    LogFormat(
        "maxtext",
        re.compile(rf"completed step: \d+, seconds: {NUMBER}"),
        lambda match, _job: _number(match[1]),
    ),
    LogFormat(
        "planner",
        re.compile(rf'"step_time_s": {NUMBER}'),
        lambda match, _job: _number(match[1]),
        re.compile(r'"peak_memory_bytes": (\d+), "memory_kind": "allocated"'),
    ),
    LogFormat(
        "planner",
        re.compile(rf"step time [\d.]+ s +{NUMBER} tokens/s"),  # of all GPUs, and of more digits than the seconds
        lambda match, job: job.global_batch_size * job.seq_len / _number(match[1]),
    ),
    DEEPSPEED,
)
