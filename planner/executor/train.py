"""Trains what a plan says on the ranks that are already running: one process is one device."""

from __future__ import annotations

import contextlib
import hashlib
import math
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from costmodels.vocabulary.choices import Offload
from planner.errors import DivergedError, InputError, PlanError
from planner.executor.build import loaded_model
from planner.executor.checkpoint import Checkpointer, Found, check_kept
from planner.executor.compiled import INDUCTOR
from planner.executor.data import TokenData, open_data
from planner.executor.mesh import build_mesh, check_world_size, device_of, local_part, place_of
from planner.executor.not_finite import ValueWatch, where_not_finite
from planner.executor.optimizer import build_optimizer, parameter_groups, rate_at
from planner.executor.options import RunOptions
from planner.executor.parallelize import ParallelModel
from planner.executor.randomness import seed_rank
from planner.executor.ranks import process_group, quiet_torch, say, told_by_rank, told_to_stop
from planner.executor.requirements import buffers_unchanged
from planner.executor.run_log import RunLog, StepReport
from planner.executor.start import Start, started
from planner.executor.states_on_disk import put_on_disk
from planner.executor.step import evaluate, local_batch, train_step
from planner.executor.watch import watched
from planner.model_file import LoadedModel, digest_of
from planner.plan.checks import degrees_text
from planner.plan.manifest import Progress
from planner.plan.schema import ModelSection, Plan

_DIVERGED = "try a smaller --learning-rate, or look for what overflows in the model or the data"


@dataclass(frozen=True)
class Run:
    """What the loop works on."""

    model: ParallelModel
    optimizer: torch.optim.Optimizer
    mesh: DeviceMesh
    data: TokenData
    options: RunOptions
    eval_data: TokenData | None
    checkpointer: Checkpointer | None

    @property
    def optimization(self) -> str:
        """How it is trained, in the words that checkpoints keep."""
        return self.options.optimization.text(self.model.plan.training.optimizer, self.options.steps)


def train(plan: Plan, options: RunOptions, report: Callable[[StepReport], None]) -> bool:
    """Runs ``plan``; ``report`` is called after each step on every rank.

    Whether ``options.steps`` steps are done: False where SIGTERM came before, and what was done is saved.
    """
    options.optimization.check(options.steps)
    offloads = plan.offload is not Offload.NONE
    with quiet_torch(), process_group(options.timeout_s, _work(plan, options), offloads=offloads) as device:
        check_world_size(plan)
        folder = options.checkpoints.folder
        checkpointer = None if folder is None else Checkpointer(folder, options.checkpoints.keep)
        found = _found(checkpointer, options, plan)
        options = replace(options, seed=options.seed or 0 if found is None else found.manifest.progress.seed)
        loaded = loaded_model(plan)
        if loaded.digest != plan.model.digest:
            say(f"warning: {plan.model.source} has changed since the plan was made for it")
        for note in loaded.training_notes:
            say(f"warning: {plan.model.source}: {note}")
        run = prepare(plan, loaded, options, device, checkpointer, found is not None)
        first = 0
        if checkpointer is not None and found is not None:
            checkpointer.load(found, run.model, run.optimizer, plan.training.optimizer)
            first = found.manifest.progress.step
            run = replace(run, data=replace(run.data, origin=_origin(found.manifest.progress, plan)))
            _say_what_changed(run, found.manifest.progress)
            say(f"going on after step {first} of {folder}")
        for text in options.never_comes(first):
            say(f"warning: nothing comes of {text}")
        return _loop(run, first, device, report)


def _work(plan: Plan, options: RunOptions) -> str:
    """What all ranks must have been told alike: paths may differ from host to host."""
    numbers = (options.steps, options.seed, options.optimization, options.data.eval_every, options.data.eval_batches,
               options.checkpoints.every, options.checkpoints.folder is None, options.log.is_wanted,
               options.is_compiled)  # fmt: skip
    return hashlib.sha256(f"{plan.model_dump_json()} {numbers}".encode()).hexdigest()


def prepare(
    plan: Plan,
    loaded: LoadedModel,
    options: RunOptions,
    device: torch.device,
    checkpointer: Checkpointer | None,
    is_resumed: bool = False,
) -> Run:
    """This rank's part of the model with its optimiser and data; no values where it is resumed. Collective."""
    mesh = build_mesh(plan, device.type)
    seed, files = options.seed or 0, options.data
    data = open_data(plan, files.file, loaded.vocab_size, seed, files.dtype)
    eval_data = None
    if files.eval_every is not None:
        eval_data = open_data(plan, files.eval_file, loaded.vocab_size, seed, files.dtype)
        wanted = files.eval_batches * plan.training.global_batch_size
        if wanted > eval_data.num_samples:
            say(f"warning: the held-back data hold {eval_data.num_samples} samples, and {wanted} are evaluated: some "
                "count more than once; give fewer --eval-batches")  # fmt: skip
    backend = INDUCTOR if options.is_compiled else None
    model = started(loaded, plan, mesh, Start(seed, options.weights, is_resumed, backend=backend))
    if eval_data is not None and not model.evaluates:
        raise PlanError(
            "between its pipelined modules the model does something else in evaluation than in training: stages replay "
            "a recording, which has the one alone",
            hint="do it inside a block, leave out --eval-every, or plan with pp = 1",
        )
    named = [pair for root in model.roots for pair in root.named_parameters()]
    groups = parameter_groups(named, options.optimization)
    optimizer = build_optimizer(groups, plan.training.optimizer, options.optimization.learning_rate)
    options.check_offload(plan.offload)
    if checkpointer is not None:
        check_kept(model)
    if options.offload_dir is not None:
        put_on_disk(optimizer, plan.training.optimizer, options.offload_dir)
    return Run(model, optimizer, mesh, data, options, eval_data, checkpointer)


def _loop(run: Run, first: int, device: torch.device, report: Callable[[StepReport], None]) -> bool:
    options, plan = run.options, run.model.plan
    log = RunLog(options.log, plan, device, first) if options.log.is_wanted else None
    saves = run.checkpointer is not None
    with (
        watched(options.timeout_s) as finished,
        told_to_stop(device, enabled=saves) as is_to_stop,
        written_before_diverging(run.checkpointer),
    ):
        step = first
        watch = ValueWatch(options.finds_nan)
        while step < options.steps:
            seed_rank(options.seed or 0, run.mesh, step)
            with (
                told_by_rank(step),
                buffers_unchanged(run.model.roots, plan, enabled=step == first + 1),
                _profiled(options, step),
                watch.over(run.model.roots),
            ):
                outcome = timed_step(run, step)
            step += 1
            finished(step)
            diverged = _diverged(run, outcome, watch)
            outcome = outcome if diverged else _evaluated(run, outcome)
            report(outcome)
            if log is not None:
                log.write(outcome)
            if diverged is not None:
                raise diverged
            if is_to_stop():
                break
            every = options.checkpoints.every
            if every is not None and step % every == 0:
                _save(run, step)
        if log is not None:
            log.close()
        if run.checkpointer is None:
            _check_parameters(run, step)
        elif step > first:
            _save(run, step)
            run.checkpointer.close()
            if step < options.steps:
                say(f"told to stop: step {step} is saved")
        return step >= options.steps


@contextlib.contextmanager
def written_before_diverging(checkpointer: Checkpointer | None) -> Generator[None]:
    """Where training cannot go on, which all ranks know at once, the checkpoint that is being written gets its name."""
    try:
        yield
    except DivergedError:
        if checkpointer is not None:
            checkpointer.wait()
        raise


def timed_step(run: Run, step: int) -> StepReport:
    """One step (from 0) and what came of it. Collective."""
    model, options, training = run.model, run.options, run.model.plan.training
    rate = rate_at(step, options.optimization, options.optimization.peak(training.optimizer), options.steps)
    for group in run.optimizer.param_groups:
        group["lr"] = rate
    max_norm, norms = options.optimization.clip_norm, list[torch.Tensor]()

    def look_at_gradients() -> None:
        norms.append(model.gradient_norm() if max_norm is None else model.clip_gradients(max_norm))

    wanted = max_norm is not None or options.log.is_wanted
    start_s = time.perf_counter()
    batch = local_batch(model, run.data, step, run.mesh)
    loss = float(train_step(model, run.optimizer, batch, run.mesh, look_at_gradients if wanted else None))
    step_time_s = time.perf_counter() - start_s  # the loss waited for the device
    tokens_per_step = training.global_batch_size * training.seq_len
    norm = float(norms[0]) if norms else None
    return StepReport(step + 1, loss, step_time_s, tokens_per_step / step_time_s, rate, norm)


def _save(run: Run, step: int) -> None:
    assert run.checkpointer is not None
    _check_parameters(run, step)
    training = run.model.plan.training
    run.checkpointer.save(
        run.model,
        run.optimizer,
        Progress(
            step=step,
            sequences=run.data.origin + step * training.global_batch_size,
            seed=run.options.seed or 0,
            seq_len=training.seq_len,
            optimizer=training.optimizer,
            layout=degrees_text(run.model.plan),
            data=run.data.text,
            optimization=run.optimization,
            model=_model_text(run.model.plan.model),
        ),
    )


def _found(checkpointer: Checkpointer | None, options: RunOptions, plan: Plan) -> Found | None:
    """The checkpoint to go on from; InputError where it contradicts the options."""
    found = None if checkpointer is None else checkpointer.find()
    if found is None:
        if options.checkpoints.must_resume:
            raise InputError(f"there is no checkpoint to go on from in {options.checkpoints.folder}",
                             hint="name the --checkpoint-dir of the run, or leave --resume out")  # fmt: skip
        return None
    progress = found.manifest.progress
    if options.seed is not None and options.seed != progress.seed:
        raise InputError(f"{found.folder} was trained with --seed {progress.seed}, not {options.seed}",
                         hint="leave --seed out, or begin anew in another --checkpoint-dir")  # fmt: skip
    if options.weights is not None:
        say(f"warning: --weights is ignored: the run goes on from {found.folder}")
    if progress.seq_len != plan.training.seq_len:
        say(f"warning: sequences had {progress.seq_len} tokens and have {plan.training.seq_len}: their order is new")
    return found


def _say_what_changed(run: Run, progress: Progress) -> None:
    """Warns where the run goes on otherwise than it began; a checkpoint of an earlier version does not say how."""
    for what, before, now in (
        ("another model", progress.model, _model_text(run.model.plan.model)),
        ("other data", progress.data, run.data.text),
        ("other optimisation", progress.optimization, run.optimization),
    ):
        if before is not None and before != now:
            say(f"warning: the run goes on with {what}: before {before}; now {now}")


def _model_text(model: ModelSection) -> str:
    """The same for the same code or config wherever it lies."""
    contents = model.files or {"": model.digest}
    return f"code or config ({digest_of(*(text for pair in sorted(contents.items()) for text in pair))[:12]})"


def _origin(progress: Progress, plan: Plan) -> int:
    """Where in the data step 0 would have begun: 0 unless the global batch changed."""
    return progress.sequences - progress.step * plan.training.global_batch_size


@contextlib.contextmanager
def _profiled(options: RunOptions, step: int) -> Generator[None]:
    """Writes a trace of the step that was asked for, one file a rank, for Perfetto or chrome://tracing."""
    if options.profile is None or options.profile[0] != step + 1:
        yield
        return
    folder = options.profile[1]
    folder.mkdir(parents=True, exist_ok=True)
    with torch.profiler.profile(profile_memory=True) as profiler:
        yield
    profiler.export_chrome_trace(str(folder / f"step-{step + 1}-rank-{dist.get_rank()}.json"))


def _diverged(run: Run, outcome: StepReport, watch: ValueWatch) -> DivergedError | None:
    """What to end with where the loss or the norm, which all ranks know alike, is no number. Collective then."""
    for name, value in (("loss", outcome.loss), ("norm of the gradients", outcome.gradient_norm or 0.0)):
        if not math.isfinite(value):
            where, way_out = where_not_finite(run.model, run.mesh, _samples(run, outcome.step - 1), watch)
            text = f"the {name} is {value} in step {outcome.step}: nothing can be learned from it any more"
            return DivergedError("; ".join(filter(None, (text, where))),
                                 hint="; ".join(filter(None, (_DIVERGED, way_out))))  # fmt: skip
    return None


def _evaluated(run: Run, outcome: StepReport) -> StepReport:
    """With the loss of the held-back data, where it is a step to evaluate after. Collective then."""
    options = run.options.data
    if run.eval_data is None or outcome.step % (options.eval_every or 1) != 0:
        return outcome
    return replace(outcome, eval_loss=evaluate(run.model, run.eval_data, options.eval_batches, run.mesh))


def _samples(run: Run, step: int) -> list[int]:
    """Of the data, those that this rank was given in ``step`` (from 0), in the order of its micro-batches."""
    size, data = run.model.plan.training.global_batch_size, run.data
    own = place_of(run.mesh).sequences(size, run.model.plan.pipeline.batch_shares)
    return [data.sample(data.origin + step * size + sequence) for sequence in own]


@torch.no_grad()
def _check_parameters(run: Run, step: int) -> None:
    """DivergedError where some are not finite, as gradients under a finite loss may have made them. Collective."""
    are_finite = torch.ones((), dtype=torch.uint8, device=device_of(run.mesh))  # a stage of the loss alone has none
    for parameter in run.model.parameters():
        are_finite *= torch.isfinite(local_part(parameter)).all()
    dist.all_reduce(are_finite, dist.ReduceOp.MIN)
    if not are_finite:
        where, _ = where_not_finite(run.model, run.mesh, _samples(run, step - 1), ValueWatch(is_on=False))
        text = f"parameters are infinite or no numbers after step {step}: they are not saved"
        raise DivergedError("; ".join(filter(None, (text, where))), hint=_DIVERGED)
