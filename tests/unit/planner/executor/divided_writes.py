"""Two ranks that write in place to what is divided over them, and hold it against one process."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.experimental import implicit_replication

from planner.executor.ranks import process_group
from planner.executor.sharding_rules import register_sharding_rules

Write = Callable[[torch.Tensor, torch.Tensor], object]
PLACES = torch.tensor([2, 0, 3, 1])

WRITES: dict[str, Write] = {  # to ``made`` (4, 8), with ``x`` of that shape
    "half": lambda made, _: made[:, :4].mul_(0.5),
    "half of the rows": lambda made, _: made[:2].mul_(0.5),
    "half by index": lambda made, _: made.__setitem__((slice(None), slice(0, 4)), made[:, :4] * 0.5),
    "across both parts": lambda made, x: made[1:3, 2:6].mul_(x[1:3, 2:6]),
    "every other": lambda made, _: made.__setitem__((slice(None), slice(None, None, 2)), 0),
    "one of four": lambda made, _: made.view(4, 4, 2)[:, 0].mul_(0.3),
    "a row": lambda made, _: made[1].add_(made[0]),
    "a column": lambda made, x: made[:, 5].copy_(x[:, 0]),
    "scatter": lambda made, x: made.scatter_(1, PLACES[:, None], x[:, :1]),
    "scatter of a number": lambda made, _: made.scatter_(1, PLACES[:, None], 7.0),
    "scatter add": lambda made, x: made.scatter_add_(1, PLACES[:, None].expand(4, 8), x),
    "scatter of rows": lambda made, x: made.scatter_(0, PLACES[:, None].expand(4, 8), x),
    "index fill": lambda made, _: made.index_fill_(1, PLACES, 7.0),
    "index add": lambda made, x: made.index_add_(0, PLACES, x),
    "mask": lambda made, _: made.__setitem__(made > 0.5, 7.0),
    "mask of rows": lambda made, x: made.__setitem__(x[:, 0] > 0, 7.0),
    "index put": lambda made, x: made.index_put_((PLACES,), x),
}


def found(write: Write, x: torch.Tensor, weight: torch.Tensor) -> list[torch.Tensor]:
    """What was written to, what a view of it sees, and the gradient of what it was made of."""
    x = x.detach().requires_grad_()
    made = x * 2.0
    seen = made.detach().view(made.shape)
    write(made, x * 3.0)
    (made @ weight).square().sum().backward()
    assert x.grad is not None
    return [made.detach(), seen, x.grad]


def trained(parameter: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """After steps of an optimiser that writes to what a mask selects."""
    parameter = torch.nn.Parameter(parameter.detach().clone())
    optimizer = torch.optim.Rprop([parameter], lr=0.02)
    for _ in range(6):
        optimizer.zero_grad()
        (parameter - target).square().sum().backward()
        optimizer.step()
    return parameter.detach()


def main() -> None:
    """Prints the largest error of every write and dim, by name, and of an optimiser."""
    register_sharding_rules()
    errors: dict[str, float | str] = {}
    with process_group():
        mesh, drawn = init_device_mesh("cpu", (2,)), torch.Generator().manual_seed(0)
        x, weight = torch.randn(4, 8, generator=drawn), torch.randn(8, 5, generator=drawn)
        for name, write in WRITES.items():
            expected = found(write, x, weight)
            for dim in (0, 1):
                with implicit_replication():
                    mine = found(write, distribute_tensor(x, mesh, [Shard(dim)]), weight)
                    whole = [each.full_tensor() if isinstance(each, DTensor) else each for each in mine]
                pairs = zip(whole, expected, strict=True)
                errors[f"{name}, dim {dim}"] = max(float((one - other).abs().max()) for one, other in pairs)
        with implicit_replication():
            mine = trained(distribute_tensor(x, mesh, [Shard(1)]), x.flip(1))
            assert isinstance(mine, DTensor)
            errors["Rprop"] = float((mine.full_tensor() - trained(x, x.flip(1))).abs().max())
        if dist.get_rank() == 0:
            sys.stdout.write(json.dumps(errors))
