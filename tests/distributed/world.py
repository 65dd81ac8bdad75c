"""One rank of the test world: runs every case and lets rank 0 write what came out as JSON.

Started by ``conftest.py`` under torchrun's environment: ``python -m tests.distributed.world OUT PLANS``.
"""

from __future__ import annotations

import functools
import hashlib
import json
import shutil
import sys
import tempfile
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._dynamo.utils import counters
from torch.distributed import device_mesh
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn import functional as F  # noqa: N812

from benchmarks import context_parity
from benchmarks.parity_matrix import errors_of, representative, with_every_loss
from costmodels.vocabulary.choices import Offload, Optimizer, Precision
from planner.errors import InputError
from planner.executor.checkpoint import Checkpointer
from planner.executor.data import TokenData, load_tokens
from planner.executor.mesh import build_mesh, place_of
from planner.executor.optimizer import build_optimizer
from planner.executor.options import ParityOptions, RunOptions
from planner.executor.parallelize import ParallelModel, parallelize
from planner.executor.parity import compared
from planner.executor.ranks import process_group, quiet_torch
from planner.executor.start import Start, started
from planner.executor.states_on_disk import put_on_disk
from planner.executor.step import evaluate, local_batch, train_step
from planner.executor.verify import measured
from planner.model_file import LoadedModel, ModelKind, ModelSource, token_inputs
from planner.models.loss import IGNORED, NEXT_TOKEN, Batch, Reduction, TrainingLoss, next_token_loss, num_targets
from planner.plan.manifest import Progress
from planner.plan.plan_file import read_plan
from planner.plan.schema import Plan
from tests.distributed.cases import (
    CASES,
    CLIP_NORM,
    COUNTED_CASES,
    DROPOUT_CASES,
    EXAMPLE,
    FROZEN_CASES,
    GLOBAL_BATCH_SIZE,
    HALF_PRECISION_CASES,
    JOURNEYS,
    LEARNING_CASES,
    MEASUREMENTS,
    NUM_HALF_PRECISION_STEPS,
    NUM_LEARNING_STEPS,
    STARVED_CASES,
    TWICE_CASES,
    Case,
    coupled_plan,
    shares_plan,
)
from tests.distributed.counter import CollectiveCounter
from tests.distributed.toy_models import MODELS, SEQ_LEN, VOCAB

LEARNING_RATE = 0.5
TEXT = Path(__file__).resolve().parents[2] / "LICENSE"  # the same everywhere, as what Python's library says is not


def _counted(output: object, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    """The default loss as a sum and how many terms it has."""
    found = NEXT_TOKEN.function(output, batch)
    assert isinstance(found, torch.Tensor)
    return found, num_targets(batch)


def _of_log_probabilities(output: object, batch: Batch) -> torch.Tensor:
    """What is made of them besides torch's cross entropy, each in its own way, and that too."""
    assert isinstance(output, torch.Tensor)
    assert isinstance(batch, dict)
    logs, labels = output.log_softmax(-1), batch["labels"]
    taken = logs.gather(-1, labels.clamp(min=0)[..., None]).squeeze(-1).exp() + logs.mean(-1)
    rows, targets = output.flatten(0, 1), labels.flatten()
    of_torch = F.nll_loss(logs.flatten(0, 1), targets, ignore_index=IGNORED, reduction="sum")
    smooth = F.cross_entropy(rows, targets, ignore_index=IGNORED, reduction="sum", label_smoothing=0.1)
    return of_torch + smooth - (taken * (labels != IGNORED)).sum()


LOSSES = {
    "weighed": NEXT_TOKEN,
    "counted": TrainingLoss(_counted, Reduction.COUNTED),
    "of log-probabilities": TrainingLoss(_of_log_probabilities, Reduction.SUM, num_targets),
}
LAYOUTS = {layout.name: layout for layout in (*representative(), *with_every_loss())}
Parameters = dict[str, torch.Tensor]


def main(out: Path, plans: Path, names: list[str]) -> None:
    """Runs the cases ``names``, all of them if there are none, and ``plans``: a JSON object of plans by their names."""
    torch.set_num_threads(1)
    _share_groups()
    results: dict[str, dict[str, object]] = {}
    with quiet_torch(), process_group():
        for name in names or [
            *CASES,
            *LEARNING_CASES,
            *HALF_PRECISION_CASES,
            *COUNTED_CASES,
            *TWICE_CASES,
            *FROZEN_CASES,
            *STARVED_CASES,
            *DROPOUT_CASES,
            *JOURNEYS,
            *MEASUREMENTS,
            *LAYOUTS,
        ]:
            results[name] = _guarded(name)
        for name, plan in json.loads(plans.read_text()).items():
            results[name] = _guarded(name, Plan.model_validate(plan))
        if dist.get_rank() == 0:
            out.write_text(json.dumps(results))


def _share_groups() -> None:
    """One process group for every axis of a name over the same ranks, and one for all axes of a rank alone.

    Each of gloo's groups has three threads that wake a hundred times a second, and stays until the world ends.
    """
    make, made = dist.new_group, dict[tuple[object, ...], object]()

    def shared(ranks: Sequence[int] | None = None, **options: Any) -> object:
        if ranks is None:  # of a checkpoint, which writes in a thread of its own
            return make(**options)
        key = (*ranks, options.get("group_desc") if len(ranks) > 1 else None)
        if key not in made:
            made[key] = make(list(ranks), **options)
        return made[key]

    dist.new_group = device_mesh.new_group = shared


def _mesh_of(plan: Plan) -> DeviceMesh:
    return build_mesh(plan, "cpu")


def _guarded(name: str, plan: Plan | None = None) -> dict[str, object]:
    """The outcome of one case. A rank that fails alone would leave the others waiting: it ends the world."""
    try:
        if plan is not None:
            return {**context_parity.errors_of(plan)}
        if name in LAYOUTS:
            return {"errors": errors_of(LAYOUTS[name])}
        if name in MEASUREMENTS:
            return _measure(name)
        for cases, outcome_of in _outcomes_of():
            if name in cases:
                return outcome_of(cases[name])
        return _run(CASES[name]) if name in CASES else _learn(LEARNING_CASES[name])
    except Exception:
        sys.stderr.write(f"rank {dist.get_rank()} failed in {name}\n{traceback.format_exc()}")
        sys.stderr.flush()
        raise


def _outcomes_of() -> tuple[tuple[Mapping[str, Any], Callable[[Any], dict[str, object]]], ...]:
    """Cases of which another outcome is wanted than that of a step, and what finds it."""
    return (
        (HALF_PRECISION_CASES, _run),
        (DROPOUT_CASES, _masks),
        (JOURNEYS, _travel),
        (COUNTED_CASES, _count),
        (TWICE_CASES, _twice_with_every_loss),
        (FROZEN_CASES, _freeze),
        (STARVED_CASES, _decay),
    )


def _count(case: Case) -> dict[str, object]:
    """Collectives of a second step: the first one also sets up."""
    model, _ = _train(case, steps=1)
    tokens, labels = _data().local_batch(1, GLOBAL_BATCH_SIZE, place_of(_mesh_of(case.plan())))
    with CollectiveCounter() as counter:
        model.forward_backward({"input_ids": tokens, "labels": labels})
    return {"counts": dict(counter.counts)}


def _twice_with_every_loss(case: Case) -> dict[str, object]:
    with_losses = {loss: _twice(case, LOSSES[loss]) for loss in ("weighed", "counted")}
    return {**with_losses, "autocast": _twice(case, NEXT_TOKEN, autocast=True)}


def _twice(case: Case, loss: TrainingLoss, *, autocast: bool = False) -> float:
    """How far the gradients of two calls are from twice those of one, as a share of the largest; of all ranks.

    After each the loss is looked at, which is to leave them alone. ``autocast``: both are inside one.
    """
    plan = case.plan()
    mesh = _mesh_of(plan)
    inputs = {"input_ids": torch.zeros(plan.pipeline.micro_batch_size, SEQ_LEN, dtype=torch.int64)}
    model = parallelize(_build(case), inputs, loss, plan, mesh)
    tokens, labels = _data().local_batch(0, GLOBAL_BATCH_SIZE, place_of(mesh))
    once: list[torch.Tensor] = []
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        for _ in range(2):
            model.forward_backward({"input_ids": tokens, "labels": labels})
            model.loss_alone({"input_ids": tokens, "labels": labels})
            once = once or [_local_gradient(parameter).clone() for parameter in model.parameters()]
    both = [_local_gradient(parameter) for parameter in model.parameters()]
    pairs = zip(once, both, strict=True)
    error = max(float((2 * one - two).abs().max() / one.abs().max().clamp(min=1e-9)) for one, two in pairs if len(one))
    largest = torch.tensor(error)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    return float(largest)


def _freeze(case: Case) -> dict[str, object]:
    """Which parameters have a gradient after a step, on any rank, where the first is frozen under its first name."""
    plan = case.plan()
    mesh = _mesh_of(plan)
    inputs = {"input_ids": torch.zeros(plan.pipeline.micro_batch_size, SEQ_LEN, dtype=torch.int64)}
    model = parallelize(_build(case), inputs, NEXT_TOKEN, plan, mesh)
    named = [pair for root in model.roots for pair in root.named_parameters()]
    first, _ = next(_seeded(case.model).named_parameters())
    for fqn, parameter in named:
        parameter.requires_grad_(fqn != first)
    tokens, labels = _data().local_batch(0, GLOBAL_BATCH_SIZE, place_of(mesh))
    model.forward_backward({"input_ids": tokens, "labels": labels})
    parts: list[list[str]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(parts, [fqn for fqn, parameter in named if parameter.grad is not None])
    return {"given": sorted({fqn for part in parts for fqn in part})}


def _decay(case: Case) -> dict[str, object]:
    """Two steps of an optimiser that decays all it updates, beside one process: what has no gradient stays as it is."""

    def optimizer_of(module: nn.Module | ParallelModel) -> torch.optim.Optimizer:
        return torch.optim.SGD(list(module.parameters()), lr=LEARNING_RATE, weight_decay=0.5)

    plan = case.plan()
    mesh = _mesh_of(plan)
    inputs = {"input_ids": torch.zeros(plan.pipeline.micro_batch_size, SEQ_LEN, dtype=torch.int64)}
    model, alone = parallelize(_build(case), inputs, NEXT_TOKEN, plan, mesh), _seeded(case.model)
    optimizer, reference, before = optimizer_of(model), optimizer_of(alone), _seeded(case.model).state_dict()
    own = list(place_of(mesh).sequences(GLOBAL_BATCH_SIZE))
    for step in range(2):
        tokens, labels = _global_batch(_data(), step)
        train_step(model, optimizer, {"input_ids": tokens[own], "labels": labels[own]}, mesh)
        reference.zero_grad()
        next_token_loss(alone(tokens), {"input_ids": tokens, "labels": labels}).backward()
        reference.step()
    gathered = _gather(model)
    expected = {fqn: parameter.detach() for fqn, parameter in alone.named_parameters()}
    return {
        "untouched": sum(bool(torch.equal(value, before[fqn])) for fqn, value in expected.items()),
        "error": max((_distance(copy, expected[fqn]) for fqn in gathered for copy in gathered[fqn]), default=0.0),
    }


def _local_gradient(parameter: nn.Parameter) -> torch.Tensor:
    gradient = parameter.grad
    assert gradient is not None
    return gradient.to_local() if isinstance(gradient, DTensor) else gradient


def _learn(case: Case) -> dict[str, object]:
    steps = NUM_LEARNING_STEPS if case.precision is Precision.FP32 else NUM_HALF_PRECISION_STEPS
    return {"losses": _train(case, steps)[1]}


def _run(case: Case) -> dict[str, object]:
    counters.clear()
    model, losses = _train(case, steps=1)
    gathered = _gather(model)
    if dist.get_rank() != 0:
        return {}
    before, expected, expected_loss = _train_serially(case.model, case.loss)
    return {
        "loss": losses[0],
        "expected_loss": expected_loss,
        "num_graphs": counters["stats"]["unique_graphs"],
        "graph_breaks": dict(counters["graph_break"]),
        "missing": sorted(set(expected) - set(gathered)),
        "parameters": {
            fqn: {
                "error": max(_distance(copy, expected[fqn]) for copy in copies),
                "size": float(expected[fqn].norm()),
                "update_size": _distance(expected[fqn], before[fqn]),
            }
            for fqn, copies in gathered.items()
        },
    }


def _masks(case: Case) -> dict[str, object]:
    """What each dropout zeroed in one step: by rank and module, one digest a call, and the shape of the first."""
    plan = case.plan()
    mesh = _mesh_of(plan)
    inputs = {"input_ids": torch.zeros(plan.pipeline.micro_batch_size, SEQ_LEN, dtype=torch.int64)}
    model = parallelize(_build(case), inputs, NEXT_TOKEN, plan, mesh)
    seen: dict[str, list[str]] = {}
    for root in model.roots:
        for fqn, module in root.named_modules():
            if isinstance(module, nn.Dropout):
                module.register_forward_hook(functools.partial(_note_mask, seen.setdefault(fqn, [])))
    own = list(place_of(mesh).sequences(GLOBAL_BATCH_SIZE, plan.pipeline.batch_shares))
    tokens, labels = (part[own] for part in _global_batch(_data(), 0))
    model.forward_backward({"input_ids": tokens, "labels": labels})
    parts: list[dict[str, list[str]] | None] = [None] * dist.get_world_size()
    dist.all_gather_object(parts, seen)
    return {"masks": parts}


def _measure(name: str) -> dict[str, object]:
    """What the commands that measure a plan find on their ranks."""
    device = torch.device("cpu")
    command, _, what = name.partition("-")
    plan = shares_plan() if what == "shares" else coupled_plan() if what == "coupled" else read_plan(EXAMPLE)
    if command == "verify":
        return measured(plan, RunOptions(steps=2), device)
    return compared(plan, ParityOptions(), device)


def _travel(cases: tuple[Case, ...]) -> dict[str, object]:
    """A clipped step under each layout in turn, from the checkpoint of the one before; then two that are refused."""
    box = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(box)
    folder = Path(box[0])
    found: dict[str, list[float]] = {"evaluated": [], "losses": [], "norms": []}
    for step, case in enumerate(cases):
        model, optimizer = _started(case)
        mesh, data = _mesh_of(case.plan()), _data()
        checkpointer = Checkpointer(folder, keep=2)
        checkpoint = checkpointer.find()
        assert (checkpoint is None) == (step == 0)
        if checkpoint is not None:
            assert checkpoint.manifest.progress.step == step
            checkpointer.load(checkpoint, model, optimizer, case.optimizer)
        found["evaluated"].append(evaluate(model, data, 1, mesh))
        norms: list[float] = []
        update = functools.partial(_clipped, model, norms)
        loss = train_step(model, optimizer, local_batch(model, data, step, mesh), mesh, update)
        found["losses"].append(float(loss))
        found["norms"] += norms
        progress = Progress(step=step + 1, sequences=0, seed=0, seq_len=SEQ_LEN, optimizer=case.optimizer, layout="")
        checkpointer.save(model, optimizer, progress)
        checkpointer.close()
    outcome: dict[str, object] = {**found, **_refusals(cases, folder)}
    if dist.get_rank() == 0:
        outcome["expected"] = _travel_serially(cases)
        shutil.rmtree(folder)
    return outcome


def _clipped(model: ParallelModel, norms: list[float]) -> None:
    norms.append(float(model.clip_gradients(CLIP_NORM)))


def _refusals(cases: tuple[Case, ...], folder: Path) -> dict[str, object]:
    """What is kept; what a foreign model hears; and what is found once the newest checkpoint is damaged."""
    kept = sorted(path.name for path in folder.glob("step-*"))
    foreign = replace(cases[0], model="llama")
    model, optimizer = _started(foreign)
    checkpointer = Checkpointer(folder, keep=2)
    checkpoint = checkpointer.find()
    assert checkpoint is not None
    words = ""
    try:
        checkpointer.load(checkpoint, model, optimizer, foreign.optimizer)
    except InputError as error:
        words = error.message
    if dist.get_rank() == 0:
        (checkpoint.folder / "rank-3.bin").write_bytes(b"half")
    dist.barrier()
    before = checkpointer.find()
    assert before is not None
    names = sorted(path.name for path in folder.glob("step-*"))
    dist.barrier()  # rank 0 deletes the folder next
    return {"kept": kept, "foreign": words, "taken": before.folder.name, "left": names}


def _travel_serially(cases: tuple[Case, ...]) -> dict[str, list[float]]:
    """The same in one process that never stops, with torch's own clipping."""
    module, data = _build(cases[0]), _data()
    optimizer = torch.optim.AdamW(module.parameters(), lr=_learning_rate(cases[0]))
    found: dict[str, list[float]] = {"evaluated": [], "losses": [], "norms": []}
    for step in range(len(cases)):
        for batch, key in ((0, "evaluated"), (step, "losses")):
            tokens, labels = data.global_batch(batch, GLOBAL_BATCH_SIZE)
            loss = next_token_loss(module(tokens), {"input_ids": tokens, "labels": labels})
            found[key].append(float(loss.detach()))
        optimizer.zero_grad()
        loss.backward()  # pyright: ignore[reportPossiblyUnboundVariable]
        found["norms"].append(float(nn.utils.clip_grad_norm_(module.parameters(), CLIP_NORM)))
        optimizer.step()
    return found


def _note_mask(seen: list[str], module: nn.Module, arguments: object, output: torch.Tensor) -> None:
    local = output.to_local() if isinstance(output, DTensor) else output
    zeros = (local == 0).flatten()
    assert 0.3 < float(zeros.float().mean()) < 0.7
    seen.append(f"{tuple(local.shape)} {hashlib.sha256(bytes(zeros.tolist())).hexdigest()}")


def _build(case: Case) -> nn.Module:
    return _seeded(case.model)


def _seeded(name: str) -> nn.Module:
    torch.manual_seed(0)
    return MODELS[name].build()


def _started(case: Case) -> tuple[ParallelModel, torch.optim.Optimizer]:
    plan = case.plan()
    start = Start(seed=0, backend="aot_eager" if case.is_compiled else None)  # inductor takes its time
    model = started(_loaded(case), plan, _mesh_of(plan), start)
    optimizer = build_optimizer(model.parameters(), plan.training.optimizer, _learning_rate(case))
    if case.offload is Offload.NVME:
        put_on_disk(optimizer, plan.training.optimizer, Path(tempfile.gettempdir()))
    return model, optimizer


def _loaded(case: Case) -> LoadedModel:
    """A toy model as a command has it."""
    source = ModelSource(case.model, ModelKind.PYTHON)
    build, loss = MODELS[case.model].build, LOSSES[case.loss]
    return LoadedModel(source, "", SEQ_LEN, VOCAB, build, token_inputs, next_token_loss, loss)


def _train(case: Case, steps: int) -> tuple[ParallelModel, list[float]]:
    model, optimizer = _started(case)
    plan = case.plan()
    mesh, data = _mesh_of(plan), _data()
    own = list(place_of(mesh).sequences(GLOBAL_BATCH_SIZE, plan.pipeline.batch_shares))
    losses: list[float] = []
    for step in range(steps):
        tokens, labels = (part[own] for part in _global_batch(data, step))
        losses.append(float(train_step(model, optimizer, {"input_ids": tokens, "labels": labels}, mesh)))
    return model, losses


@functools.cache
def _train_serially(name: str, of: str) -> tuple[Parameters, Parameters, float]:
    """Parameters before and after one step on the whole batch at once, in one process, with nothing of the executor."""
    module = _seeded(name)
    before = {fqn: p.detach().clone() for fqn, p in module.named_parameters(remove_duplicate=False)}
    tokens, labels = _global_batch(_data(), 0)
    batch: Batch = {"input_ids": tokens, "labels": labels}
    if of == "of log-probabilities":
        loss = _of_log_probabilities(module(tokens), batch) / num_targets(batch)
    else:
        loss = next_token_loss(module(tokens), batch)
    loss.backward()
    torch.optim.SGD(module.parameters(), lr=LEARNING_RATE).step()
    after = {fqn: p.detach() for fqn, p in module.named_parameters(remove_duplicate=False)}
    return before, after, float(loss.detach())


def _global_batch(data: TokenData, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and labels of a step, with as many labels left out as makes no two neighbours alike."""
    tokens, labels = data.global_batch(step, GLOBAL_BATCH_SIZE)
    labels = labels.clone()
    for sample in range(GLOBAL_BATCH_SIZE):
        labels[sample, : 5 * sample % SEQ_LEN] = -100
    return tokens, labels


def _gather(model: ParallelModel) -> dict[str, list[torch.Tensor]]:
    """Whole parameters on rank 0: every copy that any rank holds, also of tied ones."""
    mine = [(fqn, _whole(p)) for root in model.roots for fqn, p in root.named_parameters(remove_duplicate=False)]
    parts: list[list[tuple[str, torch.Tensor]] | None] = [None] * dist.get_world_size()
    dist.gather_object(mine, parts if dist.get_rank() == 0 else None)
    copies: dict[str, list[torch.Tensor]] = {}
    for part in parts:
        for fqn, value in part or ():
            copies.setdefault(fqn, []).append(value)
    return copies


def _whole(parameter: nn.Parameter) -> torch.Tensor:
    value = parameter.detach()
    return value.full_tensor() if isinstance(value, DTensor) else value


def _distance(value: torch.Tensor, other: torch.Tensor) -> float:
    return float((value - other).norm())


@functools.cache
def _data() -> TokenData:
    return TokenData(load_tokens(TEXT), SEQ_LEN, seed=0)


def _learning_rate(case: Case) -> float:
    return LEARNING_RATE if case.optimizer is Optimizer.SGD else 3e-3


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:])
