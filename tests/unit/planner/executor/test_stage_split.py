"""Modules that stages do not list, or list where they cannot run: what runs all the same, and what is told."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from planner.errors import PlanError
from planner.executor.pipeline import separate_ties
from planner.executor.stage_module import stage_root
from planner.executor.stage_split import check_stage_modules, keep_unused, split_trace, tied_parameters
from planner.executor.stage_trace import CPU, tensors_in, trace_forward, trace_real_forward
from planner.models.inputs import call_model

IDS = {"input_ids": torch.arange(16).view(2, 8)}
STAGES = (("embedding", "first"), ("second",))
LISTED = frozenset(fqn for stage in STAGES for fqn in stage)


class TwoHeads(nn.Module):
    """One head behind each of two blocks, as where several tokens are predicted; ``called``: as a module."""

    def __init__(self, *, is_tied: bool = True, is_called: bool = True) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(16, 8), nn.Linear(8, 16, bias=False)
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        if is_tied:
            self.head.weight = self.embedding.weight
        self.is_called = is_called

    def forward(self, input_ids: torch.Tensor) -> tuple[torch.Tensor, ...]:
        one = self.first(self.embedding(input_ids))
        two = self.second(one)
        if not self.is_called:
            return (nn.functional.linear(two, self.head.weight),)
        return self.head(one), self.head(two)


@pytest.mark.parametrize("is_called", [True, False])
def test_a_tied_head_on_no_stage_runs_where_it_is_used(is_called: bool) -> None:
    """It was refused when it was run: 'head' has parameters, but is on no stage."""
    module = TwoHeads(is_called=is_called)
    whole = copy.deepcopy(module)
    expected = torch.cat(whole(**IDS))
    expected.square().mean().backward()
    check_stage_modules(module, STAGES)
    trace = trace_forward(module, LISTED, IDS, call_model, torch.float32)
    programs = keep_unused(module, split_trace(module, trace, STAGES))
    roots = {program.index: stage_root(module, program, CPU) for program in programs}
    ties = tied_parameters(module, programs)
    separate_ties(ties, roots)
    received: tuple[torch.Tensor, ...] = ()
    for root in roots.values():
        received = root(received, IDS)
    found = torch.cat(tensors_in(received))
    torch.testing.assert_close(found, expected)
    found.square().mean().backward()
    (tie,) = ties
    copies = [roots[stage].get_parameter(fqn).grad for stage, fqn in tie.fqns.items()]
    names = {fqn for root in roots.values() for fqn in root.state_dict()}
    assert names == whole.state_dict().keys()  # as checkpoints of other layouts have them
    gradients = [gradient for gradient in copies if gradient is not None]
    assert len(gradients) == len(roots)
    torch.testing.assert_close(sum(gradients), whole.embedding.weight.grad)
    for name in ("first", "second"):
        torch.testing.assert_close(
            module.get_parameter(f"{name}.weight").grad, whole.get_parameter(f"{name}.weight").grad
        )


def test_parameters_of_their_own_have_to_be_on_a_stage() -> None:
    with pytest.raises(PlanError, match="'head' has parameters, but is on no stage"):
        check_stage_modules(TwoHeads(is_tied=False), STAGES)


def test_a_module_that_is_called_again_is_told_apart_from_stages_out_of_order() -> None:
    """Told to put stages in order, where no order would do, one tries in vain."""
    module = TwoHeads(is_tied=False)
    listed = LISTED | {"head"}
    trace = trace_forward(module, listed, IDS, call_model, torch.float32)
    with pytest.raises(PlanError, match="'head' is on stage 0, but is called again on what stage 1") as refused:
        split_trace(module, trace, (("embedding", "first", "head"), ("second",)))
    assert "pp = 1" in refused.value.hint
    with pytest.raises(PlanError, match="'second' is on stage 0, but needs what stage 1") as refused:
        split_trace(module, trace, (("embedding", "second", "head"), ("first",)))
    assert "order the modules" in refused.value.hint


class Borrowing(nn.Module):
    """Its second block uses a weight of the first, which it holds in a list: no parameter of its own, unless tied."""

    class Block(nn.Module):
        def __init__(self, other: list[nn.Linear]) -> None:
            super().__init__()
            self.linear, self.other = nn.Linear(8, 8), other

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.linear(x)
            return nn.functional.linear(x, self.other[0].weight) if self.other else x

    def __init__(self, *, is_tied: bool) -> None:
        super().__init__()
        self.embedding, self.first = nn.Embedding(16, 8), Borrowing.Block([])
        self.second = Borrowing.Block([self.first.linear])
        if is_tied:
            self.second.linear.weight = self.first.linear.weight

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(self.embedding(input_ids)))


@pytest.mark.parametrize("is_closure", [False, True])
def test_a_parameter_that_a_block_of_another_stage_uses_unseen_is_told(is_closure: bool) -> None:
    """The later stage used a copy that was never updated, and its gradient was lost, without a word."""
    for is_tied, stages in ((True, STAGES), (False, (("embedding",), ("first", "second")))):
        module = Borrowing(is_tied=is_tied)
        split_trace(module, trace_forward(module, LISTED, IDS, call_model, torch.float32), stages)
    module = Borrowing(is_tied=False)
    if is_closure:  # which is not copied with the module
        first = module.first.linear
        module.second.forward = lambda x: nn.functional.linear(x, first.weight)
    trace = trace_real_forward(module, LISTED, IDS, call_model, torch.float32)
    with pytest.raises(PlanError, match="'second' is on stage 1 and uses first.linear.weight.* is on stage 0"):
        split_trace(module, trace, STAGES)


class KindsOfLayers(nn.Module):
    """Computes a table of each kind in the order of ``kinds``, as Gemma 3 in that of a set of strings."""

    def __init__(self, kinds: tuple[str, ...]) -> None:
        super().__init__()
        self.embedding, self.first, self.second = nn.Embedding(16, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.tables, self.kinds = Tables(), kinds

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(input_ids)
        tables = {kind: self.tables(x, kind) for kind in self.kinds}
        return self.second(self.first(x) * tables["full"]) * tables["sliding"] + tables["full"]


class Tables(nn.Module):
    """Of two kinds, alike in shape."""

    def forward(self, x: torch.Tensor, kind: str) -> torch.Tensor:
        return x.detach().cos() if kind == "full" else x.detach().sin()


def test_ranks_that_record_in_another_order_send_and_receive_in_the_same() -> None:
    """Python gives a set of strings another order in each process: rotary tables were taken for one another."""
    stages = (("embedding", "tables", "first"), ("second",))
    listed = frozenset(fqn for stage in stages for fqn in stage)
    sender, receiver = KindsOfLayers(("full", "sliding")), KindsOfLayers(("sliding", "full"))
    receiver.load_state_dict(sender.state_dict())
    roots: list[nn.Module] = []
    for stage, module in enumerate((sender, receiver)):
        programs = split_trace(module, trace_forward(module, listed, IDS, call_model, torch.float32), stages)
        roots.append(stage_root(module, programs[stage], CPU))
    torch.testing.assert_close(roots[1](roots[0]((), IDS), IDS), receiver(**IDS))
