"""What our executor's step on one GPU takes over the step of a compiled FSDP2 script written by hand.

``python -m benchmarks.compiled_step PLAN`` trains the model of a plan for one GPU by both, a round of steps each in
turn in one process: what slows one down slows the other. The hand's side is torch alone, as its tutorials write it:
each block compiled and then given to ``fully_shard``, the parameters in float32 and the computation in the plan's
dtype, AdamW fused. Both begin with the same values, and their losses after all steps must be near: the kernels that
compiling makes round elsewhere. Without ``--compile`` neither side is compiled.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn import functional as F  # noqa: N812

from benchmarks.one_gpu import alone
from planner.executor.build import build_model, loaded_model
from planner.executor.compiled import INDUCTOR
from planner.executor.mesh import build_mesh, compute_dtype
from planner.executor.optimizer import build_optimizer
from planner.executor.start import Start, started
from planner.executor.step import train_step
from planner.plan.plan_file import read_plan
from planner.plan.schema import Plan

NUM_WARM_UP, NUM_ROUNDS, STEPS_A_ROUND = 3, 6, 4
TOLERANCE = 0.02  # of the loss after all steps: bf16 on either side, rounded at different places
LEARNING_RATE = 1e-4
Step = Callable[[torch.Tensor, torch.Tensor], float]


def by_hand(model: nn.Module, plan: Plan, *, compiled: bool) -> Step:
    """A step of ``model``, whose blocks are the children of its module lists, under FSDP2 on the GPU."""
    mesh = init_device_mesh("cuda", (1,))
    policy = MixedPrecisionPolicy(param_dtype=compute_dtype(plan), reduce_dtype=torch.float32)
    for blocks in [each for each in model.modules() if isinstance(each, nn.ModuleList)]:
        for block in blocks:
            if compiled:
                block.compile()
            fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
    root = fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=True)
    size = plan.pipeline.micro_batch_size

    def step(tokens: torch.Tensor, labels: torch.Tensor) -> float:
        optimizer.zero_grad()
        total = torch.zeros((), device=tokens.device)
        parts = list(zip(tokens.split(size), labels.split(size), strict=True))
        for number, (part, wanted) in enumerate(parts):
            root.set_requires_gradient_sync(number + 1 == len(parts))
            loss = F.cross_entropy(model(part).flatten(0, 1).float(), wanted.flatten()) * (size / len(tokens))
            loss.backward()
            total += loss.detach()
        optimizer.step()
        return float(total)

    return step


def ours(plan: Plan, *, compiled: bool) -> Step:
    """A step of the same model by our executor."""
    mesh = build_mesh(plan, "cuda")
    model = started(loaded_model(plan), plan, mesh, Start(seed=0, backend=INDUCTOR if compiled else None))
    optimizer = build_optimizer(
        [{"params": list(root.parameters())} for root in model.roots], plan.training.optimizer, LEARNING_RATE
    )
    return lambda tokens, labels: float(
        train_step(model, optimizer, {model.input_name: tokens, "labels": labels}, mesh)
    )


def rounds(plan: Plan, *, compiled: bool) -> dict[str, list[float]]:
    """Seconds of a step in each round, of either side. RuntimeError where the two do not train alike."""
    loaded = loaded_model(plan)
    whole = copy.deepcopy(build_model(loaded, 0)).cuda()
    sides = {"ours": ours(plan, compiled=compiled), "by hand": by_hand(whole, plan, compiled=compiled)}
    chance = torch.Generator().manual_seed(1)
    shape = (plan.training.global_batch_size, plan.training.seq_len + 1)
    found: dict[str, list[float]] = {name: [] for name in sides}
    last: dict[str, float] = {}
    for number in range(NUM_ROUNDS + 1):
        steps = STEPS_A_ROUND if number else NUM_WARM_UP
        batches = [torch.randint(loaded.vocab_size or 256, shape, generator=chance).cuda() for _ in range(steps)]
        for name in sorted(sides, reverse=bool(number % 2)):
            torch.cuda.synchronize()
            start_s = time.perf_counter()
            for tokens in batches:
                last[name] = sides[name](tokens[:, :-1], tokens[:, 1:])
            torch.cuda.synchronize()
            if number:
                found[name].append((time.perf_counter() - start_s) / steps)
    if abs(last["ours"] - last["by hand"]) > TOLERANCE * abs(last["by hand"]):
        raise RuntimeError(f"the two do not train alike: losses {last}")
    return found


def main() -> int:
    """Prints a line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("plan", type=Path)
    parser.add_argument("--compile", action="store_true", dest="compiled")
    options = parser.parse_args()
    plan = read_plan(options.plan, trust=True)
    with alone():
        found = rounds(plan, compiled=options.compiled)
        ratio = statistics.median(a / b for a, b in zip(found["ours"], found["by hand"], strict=True))
        print(json.dumps({"plan": options.plan.stem, "compiled": options.compiled, "over": ratio, **found}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
