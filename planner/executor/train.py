"""Trains what a plan says on the ranks that are already running: one process is one device."""

from __future__ import annotations

import contextlib
import datetime
import functools
import logging
import math
import os
import signal
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Generator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from costmodels.vocabulary.choices import Optimizer
from planner.errors import DivergedError, ModelError, PlanError, PlannerError
from planner.executor.checkpoint import clear_partial, resume, save
from planner.executor.data import TokenData, open_data
from planner.executor.loss_probe import recognised
from planner.executor.mesh import build_mesh, check_world_size, place_of
from planner.executor.parallelize import ParallelModel, Tensors, parallelize
from planner.executor.randomness import seed_rank
from planner.executor.requirements import buffers_unchanged
from planner.executor.watch import watched
from planner.model_file import LoadedModel, load_model, resolve_model
from planner.plan.schema import Plan

DEFAULT_LEARNING_RATE = {Optimizer.ADAMW: 3e-4, Optimizer.ADAM: 3e-4, Optimizer.SGD: 0.1}
DEFAULT_TIMEOUT_S = 300.0  # far above what a busy machine holds a process up, far below what a cluster costs idle
_OPTIMIZERS: dict[Optimizer, Callable[..., torch.optim.Optimizer]] = {
    # One pass over the shards, as the planner prices it; torch 2.13 has no rule for DTensors in a fused SGD.
    Optimizer.ADAMW: functools.partial(torch.optim.AdamW, fused=True),
    Optimizer.ADAM: functools.partial(torch.optim.Adam, fused=True),
    Optimizer.SGD: torch.optim.SGD,
}


@dataclass(frozen=True)
class RunOptions:
    """How long and on what to train."""

    steps: int = 20
    data: Path | None = None  # None: the standard library's source
    learning_rate: float | None = None  # None: the optimiser's default of ours
    seed: int = 0
    timeout_s: float = DEFAULT_TIMEOUT_S  # how long a rank may say nothing
    checkpoints: Path | None = None  # where to go on from, and to save at the end or on SIGTERM


@dataclass(frozen=True)
class StepReport:
    """One finished step, as every rank knows it."""

    step: int  # from 1
    loss: float  # mean over the global batch
    step_time_s: float
    tokens_per_s: float


@contextlib.contextmanager
def process_group(timeout_s: float = DEFAULT_TIMEOUT_S) -> Generator[torch.device]:
    """Joins the ranks that torchrun (or we) started, within ``timeout_s``; yields this rank's device."""
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    timeout = datetime.timedelta(seconds=timeout_s)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo", timeout=timeout)
    try:
        yield device
        dist.barrier()
    finally:
        dist.destroy_process_group()


def train(plan: Plan, options: RunOptions, report: Callable[[StepReport], None]) -> None:
    """Runs ``options.steps`` steps of ``plan``; ``report`` is called after each on every rank."""
    with quiet_torch(), process_group(options.timeout_s) as device:
        check_world_size(plan)
        loaded = load_model(resolve_model(plan.model.source))
        if loaded.stands_for is not None:
            raise PlanError(
                f"{plan.model.source} cannot be trained: {loaded.stands_for}",
                hint="a model of the same sizes stands for it in planning only; give a model.py",
            )
        if loaded.digest != plan.model.digest and dist.get_rank() == 0:
            _say(f"warning: {plan.model.source} has changed since the plan was made for it")
        mesh = build_mesh(plan, device.type)
        data = open_data(plan, options.data, loaded.vocab_size, options.seed)
        module = build_model(loaded, options.seed)
        loss = recognised(loaded.training_loss, module, functools.partial(named_inputs, loaded), plan.training.seq_len)
        model = parallelize(module, example_batch(loaded, plan), loss, plan, mesh)
        optimizer = build_optimizer(model.parameters(), plan.training.optimizer, options.learning_rate)
        first = _resumed(options, model, optimizer)
        with watched(options.timeout_s) as finished, _told_to_stop(options, device) as is_to_stop:
            step = first
            while step < options.steps:
                seed_rank(options.seed, mesh, step)
                with _told_by_rank(step), buffers_unchanged(model.roots, plan, enabled=step == first + 1):
                    outcome = _timed_step(model, optimizer, data, mesh, step)
                step += 1
                finished(step)
                report(outcome)
                _check_finite(outcome)
                if is_to_stop():
                    break
            if options.checkpoints is not None:
                save(options.checkpoints, model, optimizer, step)


def build_model(loaded: LoadedModel, seed: int) -> nn.Module:
    """The model on the CPU with equal values on every rank.

    Each process holds the whole model in host memory until it is sharded, which bounds the size
    of what can be trained.
    """
    torch.manual_seed(seed)
    module = loaded.build()
    if any(parameter.is_meta for parameter in module.parameters()):
        raise ModelError(f"{loaded.source.name} builds its parameters on the meta device: they have no values to train",
                         hint="let the factory build on the current default device")  # fmt: skip
    return module.float().train()


def example_batch(loaded: LoadedModel, plan: Plan) -> dict[str, torch.Tensor]:
    """One micro-batch of the model's inputs: token ids alone can be filled with text."""
    named = named_inputs(loaded, plan.pipeline.micro_batch_size, plan.training.seq_len)
    if len(named) != 1 or next(iter(named.values())).dtype != torch.int64:
        raise ModelError(
            f"{loaded.source.name} takes {', '.join(named)}: only models whose one input is token ids can be run yet",
            hint="give defaults to the other inputs of its forward",
        )
    return named


def named_inputs(loaded: LoadedModel, batch_size: int, seq_len: int) -> Tensors:
    """The model's inputs by name, or where it has none by position."""
    inputs = loaded.example_inputs(batch_size, seq_len)
    return inputs if isinstance(inputs, dict) else {f"input_{index}": value for index, value in enumerate(inputs)}


def build_optimizer(
    parameters: list[nn.Parameter], name: Optimizer, learning_rate: float | None
) -> torch.optim.Optimizer:
    """The plan's optimiser over this rank's shards of the trainable parameters."""
    trainable = [parameter for parameter in parameters if parameter.requires_grad]
    return _OPTIMIZERS[name](trainable, lr=DEFAULT_LEARNING_RATE[name] if learning_rate is None else learning_rate)


def train_step(
    model: ParallelModel, optimizer: torch.optim.Optimizer, batch: Tensors, mesh: DeviceMesh
) -> torch.Tensor:
    """One optimiser step on this rank's part of the global batch; the mean loss over the global batch."""
    optimizer.zero_grad(set_to_none=True)
    loss = model.forward_backward(batch)
    optimizer.step()
    place = place_of(mesh)
    # Every rank of the last pipeline stage has its part's loss: tp ranks the same one, so the sum counts it tp times.
    share = loss / (place.num_parts * model.plan.mesh.tp) if model.has_loss else torch.zeros_like(loss)
    dist.all_reduce(share)
    return share


def _timed_step(
    model: ParallelModel, optimizer: torch.optim.Optimizer, data: TokenData, mesh: DeviceMesh, step: int
) -> StepReport:
    training, device = model.plan.training, model.parameters()[0].device
    start_s = time.perf_counter()
    tokens, labels = data.local_batch(step, training.global_batch_size, place_of(mesh))
    batch = {model.input_name: tokens.to(device), "labels": labels.to(device)}
    loss = float(train_step(model, optimizer, batch, mesh))  # waits for the device
    step_time_s = time.perf_counter() - start_s
    tokens_per_step = training.global_batch_size * training.seq_len
    return StepReport(step + 1, loss, step_time_s, tokens_per_step / step_time_s)


def _resumed(options: RunOptions, model: ParallelModel, optimizer: torch.optim.Optimizer) -> int:
    """How many steps are done already; anything but 0 is told."""
    if options.checkpoints is None:
        return 0
    if dist.get_rank() == 0:
        clear_partial(options.checkpoints)
    dist.barrier()
    step = resume(options.checkpoints, model, optimizer)
    if step > 0 and dist.get_rank() == 0:
        _say(f"going on after step {step} of {options.checkpoints}")
    return step


@contextlib.contextmanager
def _told_to_stop(options: RunOptions, device: torch.device) -> Generator[Callable[[], bool]]:
    """Yields whether any rank was sent SIGTERM, which all are to ask at once; without checkpoints it ends a rank."""
    if options.checkpoints is None or threading.current_thread() is not threading.main_thread():
        yield lambda: False
        return
    told = threading.Event()
    before = signal.signal(signal.SIGTERM, lambda number, frame: told.set())

    def any_is() -> bool:
        flag = torch.tensor(int(told.is_set()), device=device)
        dist.all_reduce(flag)
        return bool(flag)

    try:
        yield any_is
    finally:
        signal.signal(signal.SIGTERM, before)


def _check_finite(outcome: StepReport) -> None:
    """DivergedError on every rank, all of which know the same loss."""
    if not math.isfinite(outcome.loss):
        raise DivergedError(
            f"the loss is {outcome.loss} in step {outcome.step}: nothing can be learned from it any more",
            hint="try a smaller --learning-rate, or look for what overflows in the model or the data",
        )


@contextlib.contextmanager
def _told_by_rank(step: int) -> Generator[None]:
    """What goes wrong inside a step, in the user's model or in torch, with the rank it happened on."""
    rank = dist.get_rank()
    try:
        yield
    except torch.OutOfMemoryError as error:
        hint = "plan with a smaller micro-batch, recomputation or more sharding"
        raise PlannerError(f"rank {rank} is out of device memory in step {step + 1}: {error}", hint=hint) from error
    except PlannerError:
        raise
    except Exception as error:
        cause = _root_cause(error)
        text = f"rank {rank} failed in step {step + 1}: {type(cause).__name__}: {cause}{_where(cause)}"
        raise PlannerError(text, hint="run again with --debug for the whole traceback") from cause


def _root_cause(error: BaseException) -> BaseException:
    """What a pipeline schedule wraps in errors of its own, with the arguments' shapes in place of the reason."""
    while error.__cause__ is not None:
        error = error.__cause__
    return error


def _where(error: BaseException) -> str:
    """The lines that the error came through, innermost first: of the user's code, or where it is not there of ours."""
    ours = str(Path(__file__).resolve().parents[1])
    frames = [f for f in traceback.extract_tb(error.__traceback__) if "site-packages" not in f.filename]
    users = [f for f in frames if not f.filename.startswith((ours, "<"))]
    lines = [f"{Path(frame.filename).name}:{frame.lineno} in {frame.name}" for frame in reversed(users or frames[-1:])]
    return f" (at {', from '.join(lines)})" if lines else ""


@contextlib.contextmanager
def quiet_torch() -> Generator[None]:
    """Hides torch's remarks about its own internals, which no user can act on."""
    sharding_log = logging.getLogger("torch.distributed.tensor")
    level = sharding_log.level
    sharding_log.setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module=r"torch\.")
        warnings.filterwarnings("ignore", message="Full backward hook is firing", category=UserWarning)
        try:
            yield
        finally:
            sharding_log.setLevel(level)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
