"""Where numbers that are not finite came from, once a loss or a norm of a step is none.

The losses of the micro-batches of a step are there anyway; so are its gradients until the next one. In which module a
forward pass first made such a number is known where its modules were looked at (``ValueWatch``), which takes time.
"""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from planner.executor.mesh import local_part, place_of
from planner.executor.parallelize import ParallelModel
from planner.executor.stage_trace import tensors_in

NUM_NAMED = 3  # in one message: enough to see which
WATCH = "--find-nan"


@dataclass
class ValueWatch:
    """What the modules of this rank's stages took and returned in a step: whether it was finite, in their order."""

    is_on: bool
    seen: list[tuple[int, str, torch.Tensor]] = field(default_factory=list)  # micro-batch, where, bool ()
    _passes: dict[nn.Module, int] = field(default_factory=dict)

    @contextlib.contextmanager
    def over(self, roots: Sequence[nn.Module]) -> Generator[None]:
        """Looks at the modules inside ``roots``, of a stage each, for one step, if it ``is_on``."""
        if not self.is_on:
            yield
            return
        self.seen.clear()
        self._passes = dict.fromkeys(roots, -1)
        handles = [root.register_forward_pre_hook(self._begins) for root in roots]
        for root in roots:
            for fqn, module in root.named_modules():
                if fqn:
                    before, after = partial(self._takes, root, fqn), partial(self._returns, root, fqn)
                    handles.append(module.register_forward_pre_hook(before, with_kwargs=True))
                    handles.append(module.register_forward_hook(after))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def first(self) -> tuple[int, str] | None:
        """The micro-batch and the words for where in it the first was that is not finite; None: nowhere."""
        return next(((number, where) for number, where, is_finite in self.seen if not is_finite), None)

    def _begins(self, root: nn.Module, _: object) -> None:
        self._passes[root] += 1

    def _takes(self, root: nn.Module, fqn: str, _: nn.Module, args: object, kwargs: object) -> None:
        self._look(root, f"before {fqn}", [*tensors_in(args), *tensors_in(kwargs)])

    def _returns(self, root: nn.Module, fqn: str, _: nn.Module, args: object, output: object) -> None:
        self._look(root, f"in {fqn}", tensors_in(output))

    @torch.no_grad()
    def _look(self, root: nn.Module, where: str, tensors: Sequence[torch.Tensor]) -> None:
        numbers = [local_part(t.detach()) for t in tensors if t.is_floating_point() or t.is_complex()]
        if numbers:  # minus infinity alone is what masks are made of
            is_finite = torch.stack([~(t.isnan() | (t == torch.inf)).any() for t in numbers]).all()
            self.seen.append((self._passes[root], where, is_finite))


def where_not_finite(
    model: ParallelModel, mesh: DeviceMesh, samples: Sequence[int], watch: ValueWatch
) -> tuple[str, str]:
    """Where in the step that was just taken the first number was that is not finite, and what to do. Collective.

    ``samples``: of the data, that this rank was given, in order. The words are the same on all ranks.
    """
    mine = _found_here(model, samples, watch.first())
    every: list[dict[str, list[str]]] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(every, {**mine, "place": [_place(mesh)]})
    said = [text for text in (_of_losses(every), _of_modules(every), _of_gradients(every)) if text]
    return "; ".join(said), "" if watch.is_on else f"{WATCH} names the module"


def _some(names: Sequence[str]) -> str:
    """The first of many."""
    more = f" and {len(names) - NUM_NAMED} more" if len(names) > NUM_NAMED else ""
    return f"{', '.join(names[:NUM_NAMED])}{more}"


def _found_here(model: ParallelModel, samples: Sequence[int], first: tuple[int, str] | None) -> dict[str, list[str]]:
    """What this rank knows: its losses, the module, and gradients, as words."""
    losses = model.loss.of_last_step if model.has_loss else ()
    bad = [index for index, loss in enumerate(losses) if not torch.isfinite(loss)]
    size = len(samples) // model.plan.pipeline.num_microbatches
    of_first = [] if not bad else [str(sample) for sample in samples[bad[0] * size : (bad[0] + 1) * size]]
    trained = [(fqn, p.grad) for root in model.roots for fqn, p in root.named_parameters() if p.grad is not None]
    return {
        "bad": [str(index + 1) for index in bad],
        "losses": [str(len(losses))],
        "samples": of_first,
        "module": [] if first is None else [f"{first[1]}, micro-batch {first[0] + 1}"],
        "gradients": [fqn for fqn, gradient in trained if not torch.isfinite(local_part(gradient)).all()],
        "trained": [fqn for fqn, _ in trained],
    }


def _of_losses(every: Sequence[dict[str, list[str]]]) -> str:
    """Of which micro-batches the losses are none."""
    having = [rank for rank, found in enumerate(every) if found["losses"] != ["0"]]
    bad = [rank for rank in having if every[rank]["bad"]]
    if not bad:
        return ""
    if len(having) * int(every[having[0]]["losses"][0]) > 1 and all(
        str(len(every[rank]["bad"])) == every[rank]["losses"][0] for rank in having
    ):
        return "it is so in every micro-batch"
    found = every[bad[0]]
    text = f"it is so in micro-batch {_some(found['bad'])} of {found['losses'][0]} on rank {bad[0]}{found['place'][0]}"
    others = f", and on {len(bad) - 1} more of {len(having)} ranks with a loss" if bad[1:] else ""
    return f"{text}, which has sample {_some(found['samples'])} of the data{others}"


def _of_modules(every: Sequence[dict[str, list[str]]]) -> str:
    """Ranks of a pipeline come in the order of its stages: the first that has one is where it began."""
    rank = next((rank for rank, found in enumerate(every) if found["module"]), None)
    if rank is None:
        return ""
    return f"the first number that is not finite was {every[rank]['module'][0]} on rank {rank}{every[rank]['place'][0]}"


def _of_gradients(every: Sequence[dict[str, list[str]]]) -> str:
    """Behind the last of them gradients are finite still, so that it is the first that a backward pass came to."""
    bad = list(dict.fromkeys(fqn for found in every for fqn in found["gradients"]))
    trained = {fqn for found in every for fqn in found["trained"]}
    if not bad or len(bad) == len(trained):
        return ""
    return f"of {len(trained)} gradients {len(bad)} are not finite, the last of them that of {bad[-1]}"


def _place(mesh: DeviceMesh) -> str:
    place = place_of(mesh)
    parts = {"data-parallel": (place.dp_rank, place.dp_degree), "pipeline": (place.pp_rank, mesh["pp"].size())}
    named = [f"{name} rank {rank}" for name, (rank, degree) in parts.items() if degree > 1]
    return f" ({', '.join(named)})" if named else ""
