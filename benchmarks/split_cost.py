"""What splitting a backward pass costs the host: ``python -m benchmarks.split_cost``.

Blocks too small to compute anything, so that the time is that of Python and autograd, on one thread and in processor
time: the whole backward pass (torch's ``stage_backward``) against its two halves (``stage_backward_input`` and
``stage_backward_weight``), which walk the graph in Python and start autograd once for every group of weights. The
factor between them is ``split_host_factor`` of costmodels/recipes/planner.json, taken at four blocks a stage.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import nn
from torch.distributed.pipelining._backward import stage_backward, stage_backward_input, stage_backward_weight

from planner.models.config import FamilyConfig, MlpType
from planner.models.family import build_family

HIDDEN, SEQ_LEN, REPEATS = 32, 8, 40
Run = Callable[[], tuple[torch.Tensor, torch.Tensor]]


def main() -> None:
    """Prints a line for each number of blocks."""
    torch.set_num_threads(1)
    print("blocks   whole ms   halves ms   factor")
    for num_blocks in (1, 2, 4, 8):
        blocks, run = tiny_stage(num_blocks)
        whole_s = min(whole_backward_s(run) for _ in range(REPEATS))
        halves_s = min(halves_s_of(run, list(blocks.parameters())) for _ in range(REPEATS))
        print(f"{num_blocks:6}   {whole_s * 1e3:8.2f}   {halves_s * 1e3:9.2f}   {halves_s / whole_s:6.2f}")


def whole_backward_s(run: Run) -> float:
    """Processor seconds of one backward pass."""
    received, sent = run()
    gradient = torch.ones_like(sent)
    began = time.process_time()
    stage_backward((sent,), (gradient,), (received,))
    return time.process_time() - began


def halves_s_of(run: Run, parameters: list[nn.Parameter]) -> float:
    """Processor seconds of its two halves."""
    received, sent = run()
    gradient = torch.ones_like(sent)
    began = time.process_time()
    _, groups = stage_backward_input([sent], [gradient], [received], iter(parameters))
    stage_backward_weight(iter(parameters), groups)
    return time.process_time() - began


def tiny_stage(num_blocks: int) -> tuple[nn.ModuleList, Run]:
    """Blocks of a Llama, and what runs them: the input that was received and the output to send."""
    config = FamilyConfig(
        family="llama", layers=num_blocks, hidden=HIDDEN, heads=4, kv_heads=4, ffn=2 * HIDDEN, vocab=64,
        seq_len=SEQ_LEN, mlp=MlpType.SWIGLU, tied=False,
    )  # fmt: skip
    model = build_family(config)
    blocks = model.get_submodule("layers")
    assert isinstance(blocks, nn.ModuleList)
    calls: list[tuple[tuple[object, ...], dict[str, object]]] = []
    hook = blocks[0].register_forward_pre_hook(lambda _, args, kwargs: calls.append((args, kwargs)), with_kwargs=True)
    model(torch.zeros(1, SEQ_LEN, dtype=torch.long))
    hook.remove()
    (_, *rest), kwargs = calls[0]

    def run() -> tuple[torch.Tensor, torch.Tensor]:
        received = torch.randn(1, SEQ_LEN, HIDDEN, requires_grad=True)
        hidden = received
        for block in blocks:
            hidden = block(hidden, *rest, **kwargs)
        return received, hidden * 1.0

    return blocks, run


if __name__ == "__main__":
    main()
