"""Blocks whose activations lie in host memory give the gradients of blocks that keep them, to the last bit."""

import re
import weakref

import pytest
import torch
from torch import nn

from costmodels.vocabulary.choices import Recompute
from planner.executor.activation_offload import OnHost
from planner.executor.recompute import apply_recompute
from planner.model_file import load_model, resolve_model
from planner.models.inputs import call_model, training_batch
from planner.plan.schema import RecomputeRule


@pytest.fixture
def copied(monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """Every tensor that is copied to the host."""
    found: list[torch.Tensor] = []
    of = OnHost.of

    def counted(tensor: torch.Tensor) -> OnHost:
        found.append(tensor.detach())
        return of(tensor)

    monkeypatch.setattr(OnHost, "of", staticmethod(counted))
    return found


def trained(model: str, mode: Recompute, *, on_host: bool) -> tuple[torch.Tensor, dict[str, torch.Tensor], int]:
    """Loss and gradients of one step, and the number of blocks."""
    torch.manual_seed(0)
    loaded = load_model(resolve_model(model))
    module, inputs = loaded.build(), loaded.example_inputs(2, 16)
    blocks = tuple(name for name, _ in module.named_modules() if re.fullmatch(r".*layers\.\d+|.*h\.\d+", name))
    rules = [RecomputeRule(modules=blocks, mode=mode)]
    apply_recompute(module, rules, on_host=blocks if on_host else ())
    loss = loaded.loss_fn(call_model(module, inputs), training_batch(inputs))
    loss.backward()
    gradients = {name: p.grad for name, p in module.named_parameters() if p.grad is not None}
    return loss.detach(), gradients, len(blocks)


@pytest.mark.parametrize("mode", Recompute)
@pytest.mark.parametrize("model", ["llama-tiny", "moe-tiny"])
def test_gradients_are_those_of_blocks_that_keep_everything(
    model: str, mode: Recompute, copied: list[torch.Tensor]
) -> None:
    loss, gradients, num_blocks = trained(model, Recompute.NONE, on_host=False)
    assert num_blocks == 4
    assert not copied
    again, others, _ = trained(model, mode, on_host=True)
    assert copied
    assert torch.equal(loss, again)
    assert gradients.keys() == others.keys()
    assert all(torch.equal(gradients[name], others[name]) for name in gradients)


def bytes_of(tensors: list[torch.Tensor]) -> int:
    return sum(tensor.untyped_storage().nbytes() for tensor in tensors)


def test_less_is_copied_the_more_is_recomputed(copied: list[torch.Tensor]) -> None:
    sizes: list[int] = []
    for mode in Recompute:
        copied.clear()
        trained("llama-tiny", mode, on_host=True)
        sizes.append(bytes_of(copied))
    assert sizes[0] > sizes[1] > sizes[2] > 0
    copied.clear()
    trained("llama-tiny", Recompute.FULL, on_host=True)
    assert len({tensor.shape for tensor in copied if tensor.is_floating_point() and tensor.dim() == 3}) == 1  # inputs


class Twice(nn.Module):
    """One tensor that two operators keep, a parameter, a buffer, and an operator with its own values."""

    scale: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8))
        self.register_buffer("scale", torch.rand(8))

    def forward(self, x: torch.Tensor, *, factor: torch.Tensor) -> torch.Tensor:
        y = torch.sin(x @ self.weight) * self.scale
        return torch.nn.functional.dropout(y * y.exp(), 0.5) * factor


@pytest.mark.parametrize("mode", Recompute)
def test_what_is_kept_twice_is_copied_once_and_parameters_stay(mode: Recompute, copied: list[torch.Tensor]) -> None:
    found: list[list[torch.Tensor]] = []
    for on_host in ((), ("0",)):
        torch.manual_seed(3)
        block = Twice()
        apply_recompute(nn.ModuleList([block]), [RecomputeRule(modules=("0",), mode=mode)], on_host=on_host)
        x, factor = torch.randn(4, 8, requires_grad=True), torch.rand(4, 8)
        torch.manual_seed(4)
        block(x, factor=factor).sum().backward()
        assert x.grad is not None
        assert block.weight.grad is not None
        found.append([x.grad, block.weight.grad])
        staying = {block.weight.untyped_storage().data_ptr(), block.scale.untyped_storage().data_ptr()}
        storages = [tensor.untyped_storage().data_ptr() for tensor in copied]
        assert not staying.intersection(storages)
        assert len(storages) == len(set(storages))
    assert copied
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def test_without_gradients_nothing_is_copied(copied: list[torch.Tensor]) -> None:
    block = Twice()
    apply_recompute(nn.ModuleList([block]), [], on_host=("0",))
    with torch.no_grad():
        block(torch.randn(4, 8), factor=torch.rand(4, 8))
    assert not copied


@pytest.mark.parametrize("mode", Recompute)
def test_what_was_copied_is_freed_when_the_pass_ends(mode: Recompute, monkeypatch: pytest.MonkeyPatch) -> None:
    """But for what comes in, which its maker holds."""
    seen: list[weakref.ref[torch.UntypedStorage]] = []
    of = OnHost.of

    def noted(tensor: torch.Tensor) -> OnHost:
        seen.append(weakref.ref(tensor.untyped_storage()))
        return of(tensor)

    monkeypatch.setattr(OnHost, "of", staticmethod(noted))
    block = Twice()
    apply_recompute(nn.ModuleList([block]), [RecomputeRule(modules=("0",), mode=mode)], on_host=("0",))
    x, factor = torch.randn(4, 8, requires_grad=True), torch.rand(4, 8)
    result = block(x, factor=factor)
    held = [found for ref in seen if (found := ref()) is not None]
    entering = {x.untyped_storage().data_ptr(), factor.untyped_storage().data_ptr()}
    assert seen
    assert {storage.data_ptr() for storage in held} <= entering
    assert len(held) < len(seen) or mode is Recompute.FULL
    result.sum().backward()
