"""A plan at full size without a device of it: each pipeline rank runs the executor's code on tensors without values.

One process stands for one rank after the other of a world whose collectives do nothing. What it finds are shapes,
placements, schedules and operators that do not fit each other, and how much memory tensors take, in two steps. Of a
long step only as many micro-batches are run as show the most that is in flight: more of them repeat themselves, and
hold no more than their tokens and labels. What values decide is tried beside it on a few tokens: how losses of parts
add up, and whether ranks can share sequences.
"""

# pyright: reportPrivateUsage=false
# torch's only process group without other processes is in its tests, and its pipelines vote over real tensors.

from __future__ import annotations

import contextlib
import functools
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining.stage import InferenceMode, PipelineStage
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

from costmodels.vocabulary.choices import Offload
from planner.errors import PlanError
from planner.executor.build import example_batch, in_training, loaded_model, named_inputs
from planner.executor.context_parallel import check_model, context_of
from planner.executor.cuda_kernels import cuda_kernels
from planner.executor.executable import check_executable
from planner.executor.largest_sizes import NEEDS_VALUES, largest_sizes
from planner.executor.live_memory import LiveMemory
from planner.executor.loss_probe import recognised
from planner.executor.mesh import build_mesh, place_of
from planner.executor.optimizer import build_optimizer
from planner.executor.parallelize import parallelize
from planner.executor.ranks import quiet_torch
from planner.executor.recording import UnrecordableError
from planner.executor.step import train_step
from planner.model_file import LoadedModel
from planner.models.loss import NEXT_TOKEN, TrainingLoss
from planner.models.weightless import build_weightless, build_with_values
from planner.plan.plan_file import plan_json
from planner.plan.schema import Plan

_READ_VALUES = (  # of torch: what looks at tensors that it makes itself
    (DeviceMesh, "_concatenate"),
    (DeviceMesh, "_get_mesh_tensor_from_full_mesh"),
    (_StridedShard, "local_shard_size_and_offset"),
)
# Parameters of a model whose use of positions is tried under context parallelism. 1.6 B took 22 s on one core: four
# passes over 26 tokens, for which every weight is read.
MOST_TRIED = 2_000_000_000
NUM_STEPS = 2  # the first makes the optimiser's states; the last is counted


@dataclass(frozen=True)
class RankCheck:
    """What one rank of a pipeline rank, or of a share of the batch, came to; others of it do the same on other data."""

    pp_rank: int
    allocated_bytes: int | None  # the most that tensors held in a step; None where it could not be run
    problem: str | None
    elapsed_s: float
    notes: tuple[str, ...] = ()  # what was assumed of values


def check(plan: Plan) -> list[dict[str, object]]:
    """Every pipeline rank of ``plan``, or share of the batch. PlanError where it cannot run whatever the model."""
    check_executable(plan)
    if plan.offload is not Offload.NONE:
        raise PlanError(
            f"planner check counts the memory of devices and cannot tell it from that of hosts (offload = "
            f"{plan.offload.value})",
            hint="check the same layout without offloading: --offload none",
        )
    loaded_model(plan)
    num_rows = len(plan.pipeline.batch_shares) or plan.mesh.pp
    num_processes = min(num_rows, os.cpu_count() or 1)
    context = multiprocessing.get_context("spawn")  # a process each: DTensor keeps what it learned of a world
    with ProcessPoolExecutor(num_processes, mp_context=context, max_tasks_per_child=1) as pool:
        try:
            with _children_hear_no_interrupt():
                found = pool.map(check_rank, [plan_json(plan)] * num_rows, range(num_rows))
            return [asdict(row) for row in found]
        except KeyboardInterrupt:
            pool.shutdown(wait=False, cancel_futures=True)
            for child in multiprocessing.active_children():
                child.terminate()
            raise


@contextlib.contextmanager
def _children_hear_no_interrupt() -> Generator[None]:
    """Processes that begin inside, or in threads that do, are not told of Ctrl-C: whoever began them ends them."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def check_rank(plan_text: str, row: int) -> RankCheck:
    """One row of the plan in ``plan_text``, in a process that has not been part of any world."""
    plan = Plan.model_validate_json(plan_text)
    with quiet_torch():
        return _check_rank(plan, loaded_model(plan), row)


def _first_rank(plan: Plan, row: int) -> int:
    """Of a pipeline rank, or a share of the batch."""
    mesh, shares = plan.mesh, plan.pipeline.batch_shares
    if not shares:
        return row * (mesh.shape().world_size // mesh.pp)
    return sum(share.num_replicas for share in shares[:row]) * mesh.cp * mesh.tp


def _check_rank(plan: Plan, loaded: LoadedModel, row: int) -> RankCheck:
    start_s = time.perf_counter()
    # Of ranks that share sequences the last sees all keys of the others: it keeps most where attention goes by blocks.
    rank = _first_rank(plan, row) + (plan.mesh.cp - 1) * plan.mesh.tp
    dist.init_process_group("fake", rank=rank, world_size=plan.mesh.shape().world_size, store=FakeStore())
    allocated, problem, notes = None, None, list[str]()
    try:
        mesh = build_mesh(plan, "cpu")  # outside: a mesh of tensors without values has no ranks
        loss = loss_of(loaded, plan)  # outside: it is found out by numbers
        untried = _try_positions(plan, loaded, loss, mesh) if row == 0 else None  # of the model, whatever the rank
        no_values = FakeTensorMode(allow_non_fake_inputs=True)
        with no_values, _torch_has_values(), cuda_kernels(), largest_sizes() as notes:
            allocated = _steps(shorter(plan), loaded, loss, mesh) + _left_out_bytes(plan, row)
        notes += [untried] if untried is not None else []
    except Exception as error:  # whatever the model or torch raises is what is looked for
        while error.__cause__ is not None and isinstance(error.__cause__, Exception):
            error = error.__cause__
        problem = f"{type(error).__name__}: {error}"
        if isinstance(error, NEEDS_VALUES):
            problem = f"{error} depends on values of tensors, and here are none: planner parity tries it with values"
    finally:
        dist.destroy_process_group()
    pp_rank, elapsed_s = 0 if plan.pipeline.batch_shares else row, time.perf_counter() - start_s
    return RankCheck(pp_rank, allocated, problem, elapsed_s, tuple(notes))


def shorter(plan: Plan) -> Plan:
    """``plan`` with as few micro-batches as hold as much at once."""
    pipeline, training = plan.pipeline, plan.training
    rules, p, m = pipeline.schedule.rules, plan.mesh.pp, pipeline.num_microbatches
    few = m if rules.forwards_first and p > 1 else rules.shortened(p, m)
    update = {"global_batch_size": training.global_batch_size // m * few}
    return plan.model_copy(
        update={
            "pipeline": pipeline.model_copy(update={"num_microbatches": few}),
            "training": training.model_copy(update=update),
        }
    )


def _left_out_bytes(plan: Plan, row: int) -> int:
    """What the micro-batches that are not run hold: token ids and labels of the rank's own part."""
    pipeline = plan.pipeline
    each = pipeline.batch_shares[row].micro_batch_size if pipeline.batch_shares else pipeline.micro_batch_size
    left_out = pipeline.num_microbatches - shorter(plan).pipeline.num_microbatches
    return left_out * each * plan.training.seq_len * 2 * torch.int64.itemsize


def loss_of(loaded: LoadedModel, plan: Plan) -> TrainingLoss:
    """The loss that the plan's model is trained with, and what could be found out of it."""
    if loaded.training_loss == NEXT_TOKEN:
        return NEXT_TOKEN
    module = build_weightless(loaded.build)
    return recognised(loaded.training_loss, module, functools.partial(named_inputs, loaded), plan.training.seq_len)


def _try_positions(plan: Plan, loaded: LoadedModel, loss: TrainingLoss, mesh: DeviceMesh) -> str | None:
    """ModelError where ranks cannot share the sequences of the model; why that was not tried, or None where it was."""
    context = context_of(plan, mesh)
    if context is None:
        return None
    why = f"it has {plan.model.num_params:,} parameters" if plan.model.num_params > MOST_TRIED else None
    if why is None:
        module = in_training(build_with_values(loaded.build))  # whose parameters take no memory
        try:
            check_model(module, example_batch(loaded, plan, module), loss, context)
        except UnrecordableError as error:
            why = str(error)
    said = "whether the model reads positions as context parallelism needs it was not tried"
    return None if why is None else f"{said}, for {why}: planner run tries it at its start"


def _steps(plan: Plan, loaded: LoadedModel, loss: TrainingLoss, mesh: DeviceMesh) -> int:
    training, module = plan.training, in_training(_in_float32(loaded.build))
    model = parallelize(module, example_batch(loaded, plan, module), loss, plan, mesh)
    optimizer = build_optimizer(model.parameters(), training.optimizer, None)
    if model.schedule is not None:
        model.schedule._warmup_p2p = _agree_at_once  # pyright: ignore[reportAttributeAccessIssue]
    own = place_of(mesh).sequences(training.global_batch_size, plan.pipeline.batch_shares)
    shape = (len(own), training.seq_len)
    batch = {name: torch.zeros(shape, dtype=torch.int64) for name in (model.input_name, "labels")}
    tracker = LiveMemory()
    tracker.note(model.parameters())
    tracker.note(buffer for root in model.roots for buffer in root.buffers())
    with tracker:
        for _ in range(NUM_STEPS):
            tracker.start_over()
            train_step(model, optimizer, batch, mesh)
    return tracker.peak_bytes


@contextlib.contextmanager
def _torch_has_values() -> Generator[None]:
    """Lets torch put meshes together, and find a rank's part of what is split twice, by tensors that have values."""
    before = {(owner, name): vars(owner)[name] for owner, name in _READ_VALUES}

    def real(function: Callable[..., object]) -> Callable[..., object]:
        @functools.wraps(function)
        def run(*args: object, **kwargs: object) -> object:
            with unset_fake_temporarily():
                return function(*args, **kwargs)

        return run

    try:
        for (owner, name), method in before.items():
            is_static = isinstance(method, staticmethod)
            setattr(owner, name, staticmethod(real(method.__func__)) if is_static else real(method))
        yield
    finally:
        for (owner, name), method in before.items():
            setattr(owner, name, method)


def _in_float32(build: Callable[[], nn.Module]) -> nn.Module:
    """The module in fp32; whoever builds it may give it another dtype or device, as ``model.bfloat16()`` does."""
    with mock.patch.object(nn.Module, "_apply", _with_new_parameters):
        return build().float()


def _with_new_parameters(
    module: nn.Module, convert: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True
) -> nn.Module:
    """What ``module._apply`` does, which changes parameters in place: those without values cannot be."""
    made: dict[nn.Parameter, nn.Parameter] = {}  # so that tied ones stay tied
    for owner in module.modules() if recurse else (module,):
        for name, parameter in owner.named_parameters(recurse=False):
            with torch.no_grad():
                converted = convert(parameter)
            if converted is not parameter:
                new = nn.Parameter(converted, requires_grad=parameter.requires_grad)
                owner.register_parameter(name, made.setdefault(parameter, new))
        for name, buffer in owner.named_buffers(recurse=False):
            owner._buffers[name] = convert(buffer)
    return module


def _agree_at_once(stages: Sequence[PipelineStage], has_backward: bool, p2p_done: bool) -> None:
    """What stages vote on at the start: all of ours say in advance what they send."""
    for stage in stages:
        stage._inference_mode = InferenceMode.STATIC
