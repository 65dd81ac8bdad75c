"""Logs of training frameworks, in short excerpts as each framework writes them."""

import pytest

from planner.errors import InputError
from planner.formats.run_log import GIB, MIB, Job, read_log

JOB = Job(global_batch_size=512, seq_len=4096, num_devices=64)


def megatron(times_ms: list[float]) -> str:
    return (
        "[Rank 0] (after 1 iterations) memory (MB) | allocated: 999.5 | max allocated: 8696.25 | reserved: 8786.0\n"
        + (
            "\n".join(
                f" [2024-10-16 06:21:12] iteration {step:8d}/  500000 | consumed samples:  256 | elapsed time per "
                f"iteration (ms): {ms:.1f} | throughput per GPU (TFLOP/s/GPU): 401.5 | learning rate: 4.0E-07 | global "
                f"batch size:   512 | lm loss: 1.192634E+01 | loss scale: 1.0 | grad norm: 5.960 |"
                for step, ms in enumerate(times_ms, start=1)
            )
        )
    )


def titan(rates: list[str]) -> str:
    return "\n".join(
        f"[rank0]:\x1b[31m[titan] 2025-06-16 22:30:50,322 - root - INFO - \x1b[31mstep: {step:2d}  \x1b[32mloss:  6.1  "
        f"\x1b[38;2;54;234;195mgrad_norm:  0.8  \x1b[33mmemory: 49.66GiB(52.28%)  \x1b[34mtps: {rate}  \x1b[36mtflops: "
        "339.16  \x1b[35mmfu: 34.29%\x1b[39m"
        for step, rate in enumerate(rates, start=1)
    )


def deepspeed(rates: list[float]) -> str:
    return "\n".join(
        f"[2023-11-07 01:55:23,711] [INFO] [logging.py:96:log_dist] [Rank 0] step={step}0, skipped=4, lr=[4.9e-05], "
        f"mom=[(0.9, 0.95)]\n[2023-11-07 01:55:23,714] [INFO] [timer.py:260:stop] epoch=0/micro_step={step}40/"
        f"global_step={step}0, RunningAvgSamplesPerSec=25, CurrSamplesPerSec={rate}, MemAllocated=4.32GB, "
        "MaxMemAllocated=38.49GB"
        for step, rate in enumerate(rates, start=1)
    )


def nanotron(times: list[str]) -> str:
    return "\n".join(
        "08/31/2024 14:37:31 [INFO|DP=0|PP=0|TP=0]:  Memory usage: 64.15MiB. Peak allocated 309.29MiB. Peak reserved: "
        f"496.00MiB\n08/31/2024 14:37:31 [INFO|DP=0|PP=0|TP=0]: iteration: {step} / 15 | consumed_tokens: 512 | "
        f"elapsed_time_per_iteration_ms: {time} | tokens_per_sec: 109 | tokens_per_sec_per_gpu: 109 | batch: "
        "512 | lm_loss: 5.32 | lr: 0.00015 | model_tflops_per_gpu: 410"
        for step, time in enumerate(times, start=1)
    )


def nemo(times: list[float]) -> str:
    return "\n".join(
        f"Training epoch 0, iteration {step}/99 | lr: 6.897e-06 | global_batch_size: 512 | global_step: {step} | "
        f"max_memory_reserved: 127785762816 | max_memory_allocated: 115792977920 | reduced_train_loss: 11.96 | "
        f"train_step_timing in s: {time} | TFLOPS_per_GPU: 1.249e+03 | consumed_samples: 5888"
        for step, time in enumerate(times)
    )


def test_megatron_lm() -> None:
    """The first step compiles and allocates; one of the others writes a checkpoint: neither is the median."""
    found = read_log(megatron([271607.0, 2034.8, 2030.0, 9000.0, 2031.2]), JOB)
    assert (found.framework, found.num_steps) == ("megatron-lm", 4)
    assert found.step_time_s == pytest.approx((2.0312 + 2.0348) / 2)
    assert found.peak_memory_bytes == 8696.25 * MIB
    assert found.memory_kind == "allocated"


def test_torchtitan_says_tokens_per_second_and_gpu() -> None:
    found = read_log(titan(["123", "5,856", "5,593", "5,868"]), JOB)
    assert found.framework == "torchtitan"
    assert found.step_time_s == pytest.approx(512 * 4096 / (5856 * 64))
    assert (found.peak_memory_bytes, found.memory_kind) == (pytest.approx(49.66 * GIB), "reserved")


def test_deepspeed_says_samples_per_second() -> None:
    found = read_log(deepspeed([3.0, 25.6, 25.7, 25.5]), JOB)
    assert found.framework == "deepspeed"
    assert found.step_time_s == pytest.approx(512 / 25.6)
    assert found.peak_memory_bytes == pytest.approx(38.49 * GIB)


def test_deepspeed_of_old_is_read_by_the_clock() -> None:
    """Its rate leaves gradient accumulation out, so that lines of the optimiser's steps tell the time."""
    text = "\n".join(
        f"[2022-03-11 02:0{minute}:{second},985] [INFO] [logging.py:69:log_dist] [Rank 0] step={step}, skipped=2, "
        f"lr=[5e-05], mom=[[0.9, 0.999]]\n[2022-03-11 02:0{minute}:{second},985] [INFO] [timer.py:189:stop] 0/{step}, "
        "SamplesPerSec=83.4"
        for step, minute, second in [(10, 1, "00"), (20, 2, "00"), (30, 2, "15"), (40, 2, "30"), (60, 3, "01")]
    )
    found = read_log(text, JOB)
    assert (found.framework, found.num_steps) == ("deepspeed", 3)
    assert found.step_time_s == pytest.approx(1.5)


def test_nanotron_shortens_its_numbers() -> None:
    found = read_log(nanotron(["4.71K", "983", "1.01K", "1K"]), JOB)
    assert (found.framework, found.step_time_s) == ("nanotron", pytest.approx(1.0))
    assert found.peak_memory_bytes == pytest.approx(309.29 * MIB)


def test_nemo_in_lines_and_in_its_progress_bar() -> None:
    found = read_log(nemo([40.0, 6.08, 6.1, 6.06]), JOB)
    assert (found.framework, found.step_time_s) == ("nemo", 6.08)
    assert found.peak_memory_bytes == 115792977920
    bar = "\rEpoch 0: :  10%|#         | {0}/100 [00:30<04:30, reduced_train_loss=10.40, train_step_timing in s={1}]"
    assert read_log("".join(bar.format(n, t) for n, t in enumerate([30, 2.87, 2.9, 2.85])), JOB).step_time_s == 2.87


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("hello\nstep 3 took 4 s", "no line of a step"),
        (megatron([5000.0, 2000.0]), "2 steps of megatron-lm, of which 1 are past warm-up"),
        (megatron([1.0, 0.0, 0.0, 0.0]), "where a number above 0 is expected"),
        (titan(["1", "1.2.3", "4", "5"]), "where a number above 0 is expected"),
    ],
)
def test_what_tells_nothing_is_refused(text: str, says: str) -> None:
    with pytest.raises(InputError, match=says):
        read_log(text, JOB)


def test_a_moment_that_the_calendar_has_not_is_told() -> None:
    lines = [f"[2023-02-3{day} 01:55:23,711] [Rank 0] step={day}0, skipped=0" for day in (0, 1)]
    with pytest.raises(InputError, match="2023-02-30 01:55:23,711"):
        read_log("\n".join(lines), JOB)


def test_a_log_of_another_batch_is_refused() -> None:
    """As of a run whose batch ramps up, or of another job."""
    lines = megatron([900.0] + [400.0] * 10).replace("batch size:   512", "batch size:    16")
    assert read_log(lines, Job(16, 2048, 8)).step_time_s == pytest.approx(0.4)
    with pytest.raises(InputError, match="of 16 sequences, the plan's of 256"):
        read_log(lines, Job(256, 2048, 8))


def test_nanotron_and_nemo_say_their_batch_too() -> None:
    """nanotron shortens it to three digits."""
    times = ["983", "1.01K", "1K", "1K"]
    lines = nanotron(times).replace("batch: 512", "global_batch_size: 1.02K")
    assert read_log(lines, Job(1024, 2048, 8)).step_time_s == pytest.approx(1.0)
    with pytest.raises(InputError, match="of 1020 sequences, the plan's of 1000"):
        read_log(lines, Job(1000, 2048, 8))
    with pytest.raises(InputError, match="of 64 sequences, the plan's of 512"):
        read_log(nanotron(times).replace("batch: 512", "global_batch_size: 64"), JOB)
    with pytest.raises(InputError, match="of 512 sequences, the plan's of 256"):
        read_log("global_batch_size: 8\n" + nemo([40.0, 6.08, 6.1, 6.06]), Job(256, 4096, 64))


def test_steps_of_validation_are_not_steps_of_training() -> None:
    """torchtitan writes them as often, with a rate and a memory of their own."""
    trained = titan(["123", "5,856", "5,593", "5,868"])
    checked = "\n".join(
        f"{line}\n{line.replace('step:', 'validate step:').replace('tps: 5', 'tps: 17').replace('49.66', '60.1')}"
        for line in trained.splitlines()
    )
    assert read_log(checked, JOB) == read_log(trained, JOB)


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("using world size: 32, data-parallel size: 8\n", "of 32 GPUs, the plan's of 64"),
        ("Trainer is initialized with local batch size 2, global batch size 128, gradient accumulation steps 1, "
         "sequence length 4096, total steps 9 (warmup 2)\n", "of 128 sequences, the plan's of 512"),
        ("Training starts at step 1, with local batch size 8, global batch size 512, sequence length 8192, total\n",
         "of 8192 tokens, the plan's of 4096"),
    ],
)  # fmt: skip
def test_a_log_of_another_job_is_refused(line: str, says: str) -> None:
    """It was taken for one of the plan's: torchtitan's tokens a second and GPU became seconds of the plan's batch."""
    steps = megatron([900.0] + [400.0] * 10) if "world" in line else titan(["123", "5,856", "5,593", "5,868"])
    assert read_log(steps, JOB).num_steps > 2
    with pytest.raises(InputError, match=says):
        read_log(line + steps, JOB)


def test_maxtext_and_our_own_executor() -> None:
    steps = [(0, 40.0), (1, 5.667), (2, 5.7), (3, 5.6)]
    text = "".join(f"completed step: {n}, seconds: {s:.3f}, TFLOP/s/device: 134.9, loss: 10.3\n" for n, s in steps)
    assert (read_log(text, JOB).framework, read_log(text, JOB).step_time_s) == ("maxtext", 5.667)
    lines = "".join(
        f'{{"step": {n}, "loss": 5.5, "step_time_s": {s}, "tokens_per_s": 28749.6, "mfu": 0.04, "peak_memory_bytes": '
        f'{2**30}, "memory_kind": "allocated", "predicted_step_time_s": 0.04, "predicted_peak_memory_bytes": 330}}\n'
        for n, s in steps
    )
    found = read_log(lines, JOB)
    assert (found.framework, found.step_time_s, found.peak_memory_bytes) == ("planner", 5.667, 2**30)
    assert read_log(lines.replace("allocated", "resident"), JOB).peak_memory_bytes is None
    shown = "".join(
        f"step {n:4d}  loss 5.5638  step time {s:.3f} s  {512 * 4096 / s:,.0f} tokens/s  norm 3.7178\n"
        for n, s in steps
    )
    assert read_log(shown, JOB).step_time_s == pytest.approx(5.667, rel=1e-4)


def test_steps_of_two_kinds_are_unsteady() -> None:
    """As of two jobs in one file: their median is of neither, and was taken without a word."""
    steady, evaluated = [400.0 + 10 * (n % 3) for n in range(40)], [400.0 if n % 10 else 3000.0 for n in range(40)]
    assert not read_log(megatron(steady), JOB).is_unsteady
    assert not read_log(megatron(evaluated), JOB).is_unsteady
    assert read_log(megatron([400.0] * 20) + "\n" + megatron([800.0] * 20), JOB).is_unsteady
