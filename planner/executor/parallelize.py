"""Makes a plan's part of a model on this rank: the steps, in order."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement

from costmodels.vocabulary.mesh import MeshAxis
from planner.errors import PlanError
from planner.executor.batch_share import check_share
from planner.executor.compiled import apply_compile, check_compilable
from planner.executor.context_parallel import Context, check_model, context_of
from planner.executor.data_parallel import DataParallel, ShardingUnits, drop_unreached, keeps_whole
from planner.executor.evaluated import call_evaluated, in_both_modes
from planner.executor.executable import check_executable
from planner.executor.expert_parallel import Experts, experts_of
from planner.executor.given_batches import ANY_BATCH, GivenBatches
from planner.executor.gradient_hooks import check_later_hooks
from planner.executor.gradients import norm_of_all, scale_down
from planner.executor.loss import SCALE_KEY, LossOfParts, check_reduction
from planner.executor.loss_beside import check_beside
from planner.executor.mesh import compute_dtype, data_mesh, device_of, place_of, replicas
from planner.executor.pipeline import Schedule, TiedGradient, build_schedule, separate_ties, tied_gradients
from planner.executor.randomness import seed_rank
from planner.executor.ranks import say
from planner.executor.recompute import Surroundings, apply_recompute, repeated_in
from planner.executor.recording import UnrecordableError
from planner.executor.requirements import (
    check_labels,
    check_parameters_kept,
    check_trainable,
    check_whole_sequences,
    notes_on_parts,
)
from planner.executor.sharded_parameters import ShardedParameters
from planner.executor.sharding_rules import register_sharding_rules
from planner.executor.stage_module import StageModule, stage_root
from planner.executor.stage_split import (
    StageProgram,
    TiedParameter,
    check_stage_modules,
    keep_unused,
    split_trace,
    tied_parameters,
)
from planner.executor.stage_trace import (
    ReadsValuesError,
    TensorMeta,
    Trace,
    trace_as_compiled,
    trace_forward,
    trace_real_forward,
)
from planner.executor.tensor_parallel import (
    apply_tensor_parallel,
    parameter_placements,
    tensor_parallel_context,
    torch_placement,
)
from planner.executor.whole_parameters import WholeParameters
from planner.models.inputs import LABELS, call_model
from planner.models.loss import Reduction, TrainingLoss
from planner.plan.schema import Plan

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class ParallelModel:
    """This rank's stages of the model, and what runs one step over them."""

    roots: tuple[nn.Module, ...]
    stages: tuple[StageModule, ...]
    schedule: Schedule | None  # None without a pipeline
    ties: tuple[TiedGradient, ...]
    plan: Plan
    loss: LossOfParts
    has_loss: bool  # this rank computes the loss
    sample_shapes: Mapping[str, torch.Size]  # of the inputs that it was split for
    context: Context | None  # where ranks share sequences
    experts: Experts | None  # where they divide experts
    replicas: tuple[dist.ProcessGroup, ...]  # of the ranks that hold this rank's stages, one for each axis
    evaluates: bool  # what is between the modules of a pipeline is known for evaluation too
    given: GivenBatches = ANY_BATCH  # what is asked of the batches of a script

    @property
    def input_name(self) -> str:
        """Of the token ids."""
        return next(name for name in self.sample_shapes if name != LABELS)

    def parameters(self) -> list[nn.Parameter]:
        """All parameters of this rank's stages."""
        return [parameter for root in self.roots for parameter in root.parameters()]

    def forward_backward(self, batch: object) -> torch.Tensor:
        """Gradients of the loss of the global batch, of which ``batch`` is this data-parallel rank's part.

        They are added to those that are there. Returns this rank's share: the mean over ranks of data and context
        parallelism is that loss. 0 on ranks without it. InputError for a part of another size or shape than the plan's,
        PlanError for hooks on gradients that would be lost, or that see parts of them only.
        """
        check_later_hooks([stage.data for stage in self.stages], self.plan)
        whole, before = self._scaled(batch), self._set_aside()
        kept = {parameter for tie in self.ties for parameter in tie.parameters}  # of which other stages hold copies
        kept |= {parameter for parameter in self.parameters() if parameter.grad is not None}
        with tensor_parallel_context(self.plan.mesh.tp > 1), _casting_anew():
            losses = self._all_microbatches(whole) if self.schedule is None else self._pipelined(self.schedule, whole)
            for stage in self.stages:
                stage.data.finish_step()
        share = self.loss.finish(losses, self.parameters())
        drop_unreached([stage.data for stage in self.stages], kept, self.replicas)
        if self.experts is not None:
            self.experts.average(self.parameters())
        for tie in self.ties:
            tie.reduce()
        for parameter, gradient in before:
            parameter.grad = gradient if parameter.grad is None else gradient.add_(parameter.grad)
        return share

    def gradient_norm(self) -> torch.Tensor:
        """The Euclidean norm of all gradients, as one process would have it: float64 (). Collective."""
        return norm_of_all(self.parameters(), self.ties, self.loss.mesh)

    def clip_gradients(self, max_norm: float) -> torch.Tensor:
        """Scales all gradients so that their norm is at most ``max_norm``; the norm before. Collective.

        In place of ``torch.nn.utils.clip_grad_norm_``, which sees the parameters of one rank's pipeline stages alone.
        """
        norm = self.gradient_norm()
        scale_down(self.parameters(), norm, max_norm)
        return norm

    def _set_aside(self) -> list[tuple[nn.Parameter, torch.Tensor]]:
        """Gradients from before, where those of a step are scaled or summed up once all of them are there."""
        if not self.ties and self.experts is None and self.loss.loss.reduction is not Reduction.COUNTED:
            return []
        before = [(parameter, parameter.grad) for parameter in self.parameters()]
        for parameter, _ in before:
            parameter.grad = None
        return [(parameter, gradient) for parameter, gradient in before if gradient is not None]

    def loss_alone(self, batch: object) -> torch.Tensor:
        """The loss as ``forward_backward`` gives it; gradients stay as they were.

        Through a pipeline it takes as long as a step: of torch's schedules those that split backward passes cannot run
        without them.
        """
        before = [(parameter, parameter.grad) for parameter in self.parameters()]
        for parameter, _ in before:
            parameter.grad = None
        share = self.forward_backward(batch) if self.schedule is not None else self._forward(batch)
        for parameter, gradient in before:
            parameter.grad = gradient
        return share

    def _forward(self, batch: object) -> torch.Tensor:
        whole = self._scaled(batch)
        with torch.no_grad(), tensor_parallel_context(self.plan.mesh.tp > 1), _casting_anew():
            losses = [self.stages[0](**part) for part in self._parts(whole)]
        share = self.loss.finish(losses, self.parameters())
        self.stages[0].data.finish_forward()
        return share

    def _scaled(self, batch: object) -> Tensors:
        """This rank's batch by name, with the scales of its losses. Collective."""
        named = self.given.named(batch)
        check_share(named, self.sample_shapes, self.plan, self.loss.mesh)
        named = named if self.context is None else self.context.shard(named)
        return {**named, SCALE_KEY: self.loss.scales(named)}

    def _parts(self, batch: Tensors) -> list[Tensors]:
        """The micro-batches of ``batch``."""
        count = self.plan.pipeline.num_microbatches
        chunks = {key: value.chunk(count) for key, value in batch.items()}
        return [{key: values[index] for key, values in chunks.items()} for index in range(count)]

    def _all_microbatches(self, batch: Tensors) -> list[torch.Tensor]:
        (stage,), parts = self.stages, self._parts(batch)
        losses: list[torch.Tensor] = []
        for index, part in enumerate(parts):
            loss = stage(**part)
            stage.data.prepare_backward(last=index == len(parts) - 1)
            loss.backward()
            losses.append(loss.detach())
        return losses

    def _pipelined(self, schedule: Schedule, batch: Tensors) -> list[torch.Tensor]:
        losses: list[torch.Tensor] = []
        for stage in self.stages:  # as each first forward must find it: no backward of the step before is the last
            stage.data.prepare_backward(last=False)
        target = torch.zeros(self.plan.pipeline.num_microbatches)  # the last stage has the loss, but torch asks for it
        options: dict[str, torch.Tensor] = {**batch, "target": target}
        schedule.step(losses=losses, return_outputs=False, **options)  # pyright: ignore[reportArgumentType]
        return [loss.detach() for loss in losses]


def parallelize(
    module: nn.Module,
    inputs: Tensors,
    training_loss: TrainingLoss,
    plan: Plan,
    mesh: DeviceMesh,
    backend: str | None = None,
) -> ParallelModel:
    """Splits ``module`` as ``plan`` says and keeps this rank's part, which takes over its parameters.

    ``module`` holds equal values on every rank, or its parameters lie on the meta device: then this rank's are zeros,
    which the caller is to fill, and UnrecordableError says where values are needed. ``inputs`` are one micro-batch of
    its inputs, of which only shapes and dtypes are read. Collective over ``mesh``. From here on ranks draw random
    numbers by their place, out of torch's current seed, which must be the same on all of them. ``backend``: of
    torch.compile, None where nothing is compiled.
    """
    if backend is not None:
        check_compilable(plan, backend, mesh.device_type)
    register_sharding_rules()
    context = context_of(plan, mesh)
    _check(module, inputs, training_loss, (plan, mesh, context))
    shapes = {name: tensor.shape[1:] for name, tensor in inputs.items()}
    inputs = inputs if context is None else context.example(inputs)
    experts = experts_of(plan, module, mesh)
    surroundings = functools.partial(_within, context, experts)
    chosen = parameter_placements(module, plan.placements.tp)
    mine = [stage.index for stage in plan.pipeline.stages if stage.pp_rank == place_of(mesh).pp_rank]
    programs, ties, evaluates = _programs(module, inputs, plan)
    units = ShardingUnits(plan.placements.sharded_units, _shared_states(module, inputs, plan, programs))
    roots = {index: stage_root(module, programs[index], device_of(mesh)) if programs else module for index in mine}
    separate_ties(ties, roots)
    where = plan, mesh, backend
    divided = {index: _divide(root, where, chosen, units, experts) for index, root in roots.items()}
    parts = LossOfParts(training_loss, mesh, plan.pipeline.num_microbatches)
    last = len(plan.pipeline.stages) - 1
    around, names = (plan, mesh, surroundings), tuple(inputs)
    stages = [
        _stage_module(data, programs[index] if programs else None, around, names, parts if index == last else None)
        for index, data in divided.items()
    ]
    schedule = build_schedule(stages, mine, plan, mesh) if programs else None
    seed_rank(torch.initial_seed(), mesh)
    return ParallelModel(
        roots=tuple(roots.values()),
        stages=tuple(stages),
        schedule=schedule,
        ties=tied_gradients(ties, roots, plan, mesh),
        plan=plan,
        loss=parts,
        has_loss=mine[-1] == last,
        sample_shapes=shapes,
        context=context,
        experts=experts,
        replicas=tuple(group for group in data_mesh(mesh, plan.zero_stage).get_all_groups() if group.size() > 1),
        evaluates=evaluates,
    )


def _divide(
    root: nn.Module,
    where: tuple[Plan, DeviceMesh, str | None],
    chosen: Mapping[str, Placement],
    units: ShardingUnits,
    experts: Experts | None,
) -> DataParallel:
    """Makes of one stage's part of the model, or the whole, what this rank holds of it."""
    plan, mesh, backend = where
    if experts is not None:
        experts.shard(root, chosen)
    if plan.mesh.tp > 1:
        apply_tensor_parallel(root, chosen, plan.placements.tp, mesh[MeshAxis.TP.value])
    if backend is not None:
        apply_compile(root, plan, backend)
    apply_recompute(root, plan.recompute, plan.offloaded_activations)
    if keeps_whole(plan):
        group = replicas(mesh)
        group_of = (lambda _: group) if experts is None else functools.partial(experts.replicas, group)
        return WholeParameters(root, units.fqns, device_of(mesh), group_of)
    return ShardedParameters(root, units, mesh, plan, None if experts is None else experts.placements())


def _check(
    module: nn.Module, inputs: Tensors, training_loss: TrainingLoss, where: tuple[Plan, DeviceMesh, Context | None]
) -> None:
    """PlanError or ModelError where plan, model and loss do not go together."""
    plan, mesh, context = where
    check_executable(plan)
    check_labels(module, inputs)
    num_parts = plan.pipeline.num_microbatches * place_of(mesh).num_parts
    check_beside(training_loss, plan)
    check_reduction(training_loss, num_parts)
    check_trainable(module, inputs, plan)
    for note in notes_on_parts(module, inputs, plan, num_parts):
        say(f"warning: {note}")
    if context is not None:
        check_whole_sequences(inputs)
        check_model(module, inputs, training_loss, context)


def _programs(
    module: nn.Module, inputs: Tensors, plan: Plan
) -> tuple[tuple[StageProgram, ...], tuple[TiedParameter, ...], bool]:
    """What each stage does and shares, and whether that is known for evaluation too; nothing without a pipeline."""
    if plan.mesh.pp == 1:
        return (), (), True
    stages = [stage.modules for stage in plan.pipeline.stages]
    check_stage_modules(module, stages)
    listed = frozenset(fqn for modules in stages for fqn in modules)
    trace, evaluates = _recorded(module, listed, inputs, compute_dtype(plan))
    if trace.unrecorded:
        raise PlanError(
            f"between its pipelined modules the model {' and '.join(trace.unrecorded)}: stages replay a recording of "
            "one forward pass, in which that is missing",
            hint="do it inside a block, or plan with pp = 1",
        )
    programs = keep_unused(module, split_trace(module, trace, stages))
    return programs, tied_parameters(module, programs), evaluates


def _recorded(module: nn.Module, listed: frozenset[str], inputs: Tensors, dtype: torch.dtype) -> tuple[Trace, bool]:
    """One forward pass, in both modes where that is possible, and whether it is."""
    way = trace_forward
    try:
        trace = way(module, listed, inputs, call_model, dtype)
    except ReadsValuesError:
        way = trace_as_compiled
        trace = way(module, listed, inputs, call_model, dtype)
    except PlanError:
        raise
    except Exception as error:  # whatever the user's code raises without values
        if any(parameter.is_meta for parameter in module.parameters()):
            raise UnrecordableError("it is cut into stages by a forward pass with values") from error
        way = trace_real_forward
        trace = way(module, listed, inputs, call_model, dtype)
    if not module.training:
        return trace, True
    try:
        both = in_both_modes(trace, way(module, listed, inputs, call_evaluated, dtype))
    except Exception:  # the same: it is trained, but not evaluated
        both = None
    return both or trace, both is not None


def _shared_states(module: nn.Module, inputs: Tensors, plan: Plan, programs: Sequence[StageProgram]) -> frozenset[str]:
    """Parameters that are used outside their sharded unit, such as an embedding's weight in the logits.

    A model that cannot be recorded (it needs none of that without a pipeline) is taken to use none so. PlanError where
    FSDP or recomputation would lose what its forward does with parameters.
    """
    if programs:
        return frozenset().union(*(program.states for program in programs))
    try:
        opaque = frozenset(plan.placements.sharded_units)
        trace = trace_forward(module, opaque, inputs, call_model, compute_dtype(plan))
    except Exception:  # whatever the user's code raises on the meta device
        return frozenset()
    check_parameters_kept(trace.unrecorded, plan)
    return frozenset(state for call in trace.calls for state in call.states)


@contextlib.contextmanager
def _casting_anew() -> Generator[None]:
    """Lets autocast, which the caller may be in, keep no cast weight from one micro-batch to the next.

    Its gradient comes last in a backward pass, once FSDP has taken those of the unit, and would be lost.
    """
    was_kept = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(was_kept)


@contextlib.contextmanager
def _within(*ways: Context | Experts | None) -> Generator[None]:
    """Where a model's forward runs, and is repeated."""
    with contextlib.ExitStack() as stack:
        for way in ways:
            if way is not None:
                stack.enter_context(way.mode())
        if any(ways):
            stack.enter_context(repeated_in(functools.partial(_within, *ways)))
        yield


def _stage_module(
    data: DataParallel,
    program: StageProgram | None,
    where: tuple[Plan, DeviceMesh, Surroundings],
    input_names: Sequence[str],
    loss: LossOfParts | None,
) -> StageModule:
    """A stage with what it receives, sends and computes at its ends."""
    plan, mesh, surroundings = where
    tp_mesh = mesh[MeshAxis.TP.value] if plan.mesh.tp > 1 else None

    def run_whole(received: Sequence[torch.Tensor], batch: Tensors) -> object:
        with surroundings():
            return call_model(data.root, {name: batch[name] for name in input_names})

    def run_stage(received: Sequence[torch.Tensor], batch: Tensors) -> object:
        with surroundings():
            return data.root(received, batch)

    metas: tuple[tuple[TensorMeta, ...], tuple[TensorMeta, ...]] = ((), ())
    if program is not None:
        metas = tuple(program.metas[s] for s in program.inputs), tuple(program.metas[s] for s in program.outputs)
    placement = torch_placement(plan.placements.stage_input)
    run = run_whole if program is None else run_stage
    return StageModule(data, run, metas, (tp_mesh, placement), loss and loss.of_part)
