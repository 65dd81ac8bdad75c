"""Selective recomputation repeats no product: neither operator by operator nor in a whole model."""

import copy
import functools
import re
from collections import Counter
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from costmodels.vocabulary.choices import Recompute
from planner.executor.recompute import apply_recompute, repeated_in
from planner.model_file import load_model, resolve_model
from planner.models.causal_attention import causal_attention
from planner.models.inputs import call_model, training_batch
from planner.operators.products import PRODUCTS
from planner.plan.schema import RecomputeRule

Product = Callable[..., torch.Tensor]

# What may run twice in these tests: operators that multiply nothing with anything else and add it up.
CHEAP = {
    f"aten.{name}"
    for name in (
        "t view _unsafe_view permute expand unsqueeze transpose slice empty detach alias tanh mul add add_ "
        "arange zeros empty_like new_empty_strided as_strided clone native_batch_norm"
    ).split()
}


def values(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return (torch.rand(*shape) / 8).to(dtype).requires_grad_()


def grouped(product: Product) -> tuple[Product, tuple[torch.Tensor, ...]]:
    ends = torch.tensor([2, 5, 8], dtype=torch.int32)
    rows, weights = values(8, 16, dtype=torch.bfloat16), values(3, 16, 8, dtype=torch.bfloat16)
    return lambda rows, weights: product(rows, weights, ends), (rows, weights)


def of_transformers(rows: torch.Tensor, weights: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    pytest.importorskip("transformers.integrations.moe")
    return torch.ops.transformers.grouped_mm_fallback(rows, weights, ends)


CASES: dict[str, tuple[Product, tuple[torch.Tensor, ...]]] = {
    "linear": (F.linear, (values(2, 4, 8), values(6, 8), values(6))),
    "matmul": (torch.matmul, (values(2, 3, 4, 8), values(2, 3, 8, 5))),
    "mm": (torch.mm, (values(4, 8), values(8, 5))),
    "bmm": (torch.bmm, (values(2, 4, 8), values(2, 8, 5))),
    "mv": (torch.mv, (values(4, 8), values(8))),
    "dot": (torch.dot, (values(8), values(8))),
    "addmm": (torch.addmm, (values(5), values(4, 8), values(8, 5))),
    "baddbmm": (torch.baddbmm, (values(2, 4, 5), values(2, 4, 8), values(2, 8, 5))),
    "einsum": (lambda a, b: torch.einsum("bik,bkj->bij", a, b), (values(2, 4, 8), values(2, 8, 5))),
    "_grouped_mm": grouped(lambda rows, weights, ends: torch._grouped_mm(rows, weights, offs=ends)),
    "linalg_solve_triangular": (
        lambda a, b: torch.linalg.solve_triangular(a, b, upper=False, unitriangular=True),
        (values(2, 4, 4), values(2, 4, 5)),
    ),
    "bilinear": (F.bilinear, (values(4, 8), values(4, 6), values(5, 8, 6))),
    "grouped_mm": grouped(lambda rows, weights, ends: F.grouped_mm(rows, weights, offs=ends)),
    "grouped_mm_fallback": grouped(of_transformers),
    "conv1d": (F.conv1d, (values(2, 4, 8), values(6, 4, 3), values(6))),
    "conv2d": (F.conv2d, (values(2, 4, 8, 8), values(6, 4, 3, 3))),
    "conv3d": (F.conv3d, (values(2, 4, 8, 8, 8), values(6, 4, 3, 3, 3))),
    "convolution": (
        lambda x, w: torch.convolution(x, w, None, [1], [0], [1], False, [0], 1),
        (values(2, 4, 8), values(6, 4, 3)),
    ),
    "conv_transpose1d": (F.conv_transpose1d, (values(2, 4, 8), values(4, 6, 3))),
    "conv_transpose2d": (F.conv_transpose2d, (values(2, 4, 8, 8), values(4, 6, 3, 3))),
    "causal_attention": (
        lambda q, k, v, sinks: causal_attention(q, k, v, sinks, 3, 0.5),
        (*(values(2, 4, 8, 16) for _ in range(3)), values(4)),
    ),
    "scaled_dot_product_attention": (F.scaled_dot_product_attention, (values(2, 4, 8, 16),) * 3),
}

RECURRENT: dict[str, Callable[[], nn.RNNBase]] = {
    "lstm": functools.partial(nn.LSTM, 8, 6, batch_first=True),
    "gru": functools.partial(nn.GRU, 8, 6, batch_first=True),
    "rnn_tanh": functools.partial(nn.RNN, 8, 6, batch_first=True),
    "rnn_relu": functools.partial(nn.RNN, 8, 6, nonlinearity="relu", batch_first=True),
}


class Names(TorchDispatchMode):
    """Counts the operators that run."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = Counter[str]()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen[str(func).rpartition(".")[0]] += 1
        return func(*args, **(kwargs or {}))


class Holder(nn.Module):
    """A module whose products are in the middle: what is before and behind them must be made again."""

    def __init__(self, product: Product) -> None:
        super().__init__()
        self.inner = Inner(product)

    def forward(self, *operands: torch.Tensor) -> torch.Tensor:
        return self.inner(*operands)


class Inner(nn.Module):
    def __init__(self, product: Product) -> None:
        super().__init__()
        self.product = product

    def forward(self, *operands: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.product(*(operand * 2 for operand in operands)))


# What torch runs for products of the model below.
PRODUCTS_OF_EXPERTS = {"aten.mm", "aten._grouped_mm", "aten._scaled_dot_product_flash_attention_for_cpu"}


def in_backward(module: nn.Module, operands: tuple[torch.Tensor, ...]) -> Counter[str]:
    loss = module(*operands).sum()
    with Names() as names:
        loss.backward()
    return names.seen


def repeated(module: Callable[[], nn.Module], checkpointed: str, operands: tuple[torch.Tensor, ...]) -> set[str]:
    """Operators that run more often in backward because ``checkpointed`` recomputes."""
    plain = in_backward(module(), operands)
    selective = module()
    apply_recompute(selective, [RecomputeRule(modules=(checkpointed,), mode=Recompute.SELECTIVE)])
    return set(in_backward(selective, operands) - plain)


@pytest.mark.parametrize("name", CASES)
def test_no_product_runs_twice(name: str) -> None:
    product, operands = CASES[name]
    again = repeated(lambda: Holder(product), "inner", operands)
    assert "aten.mul" in again, "nothing was recomputed: the test tests nothing"
    assert again <= CHEAP


def test_every_product_is_tried() -> None:
    assert {name for operator in PRODUCTS for name in operator.names} == {*CASES, *RECURRENT}


class Cells(nn.Module):
    """A loop over time that writes what it finds into a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.LSTMCell(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        states, found = None, torch.zeros(2, 5, 8)
        for step in range(5):
            states = self.cell(x[:, step], states)
            found[:, step] = states[0]
        return found


class Changes(nn.Module):
    """Products that are written to, as wholes and in parts."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.conv = nn.Linear(8, 8), nn.Linear(8, 8), nn.Conv1d(5, 5, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(F.relu(self.up(x), inplace=True))
        wide = self.down(hidden)
        wide[:, 1:] *= 2
        wide.view(-1, 8)[0].add_(1)
        return self.down(torch.sigmoid(wide) + self.conv(wide).mul_(wide))


class Early(nn.Module):
    """What it returns is written to behind it, and is read in it before: its product runs again."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        product = self.up(x)
        torch.tanh(product)
        return product


WRITING: dict[str, Callable[[], nn.Module]] = {
    **RECURRENT,
    "cells": Cells,
    "relu": lambda: nn.Sequential(nn.Linear(8, 8), nn.ReLU(inplace=True), nn.Linear(8, 8)),
    "changes": Changes,
    "early": Early,
}


class Written(nn.Module):
    """A block, and a write to what it returns."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = self.block(x)
        found = found[0] * 1.0 if isinstance(found, tuple) else found
        found += 1.0
        return (found * found.tanh()).sum()


@pytest.mark.parametrize("on_host", [False, True])
@pytest.mark.parametrize("name", WRITING)
def test_what_is_kept_has_the_values_that_it_had(name: str, *, on_host: bool) -> None:
    """Torch adds to products of recurrent layers in place on processors, and users do: torch refused to repeat that."""
    torch.manual_seed(0)
    plain, inputs = Written(WRITING[name]()), torch.randn(2, 5, 8)
    selective = copy.deepcopy(plain)
    rule = RecomputeRule(modules=("block",), mode=Recompute.SELECTIVE)
    apply_recompute(selective, [rule], on_host=("block",) if on_host else ())
    for module in (plain, selective):
        module(inputs).backward()
    for mine, right in zip(selective.parameters(), plain.parameters(), strict=True):
        assert mine.grad is not None
        assert right.grad is not None
        assert torch.equal(mine.grad, right.grad)


def test_products_that_a_block_writes_to_are_not_repeated() -> None:
    """Those that are written to behind the block are."""
    operands = (values(2, 5, 8),)
    relu = repeated(lambda: nn.Sequential(WRITING["relu"]()), "0", operands)
    assert "aten.relu_" in relu
    assert relu <= CHEAP | {"aten.relu_"}
    assert "aten.addmm" in repeated(lambda: Written(Early()), "block", operands)


def products_in_training(mode: Recompute) -> Counter[str]:
    """Products that a training step of a model with experts runs."""
    loaded = load_model(resolve_model("moe-tiny"))
    torch.manual_seed(0)
    model, inputs = loaded.build(), loaded.example_inputs(2, 16)
    blocks = tuple(name for name, _ in model.named_modules() if re.fullmatch(r".*layers\.\d+", name))
    assert len(blocks) == 4
    apply_recompute(model, [RecomputeRule(modules=blocks, mode=mode)])
    with Names() as names:
        loaded.loss_fn(call_model(model, inputs), training_batch(inputs)).backward()
    return Counter({name: names.seen[name] for name in PRODUCTS_OF_EXPERTS})


def test_a_model_with_experts_repeats_no_product() -> None:
    products = products_in_training(Recompute.NONE)
    assert all(products.values())
    assert products_in_training(Recompute.SELECTIVE) == products
    assert products_in_training(Recompute.FULL) > products


def test_each_block_recomputes_as_its_rule_says() -> None:
    """What runs in backward beyond a plain backward pass, block by block."""
    modes = {"0": Recompute.FULL, "1": Recompute.SELECTIVE, "2": Recompute.NONE, "3": Recompute.FULL}

    def chain() -> nn.Sequential:
        return nn.Sequential(*(Inner(functools.partial(torch.matmul, other=values(4, 4))) for _ in modes))

    rules = [RecomputeRule(mode=mode, modules=tuple(n for n, m in modes.items() if m is mode)) for mode in Recompute]
    torch.manual_seed(0)
    plain = chain()
    torch.manual_seed(0)
    mixed = chain()
    apply_recompute(mixed, rules)
    seen: dict[str, Counter[str]] = {}
    for module in (plain, mixed):
        for name, block in module.named_children():
            entering = values(2, 4)
            with Names() as names:
                block(entering).sum().backward()
            counts = names.seen if module is plain else names.seen - seen[f"plain {name}"]
            seen[f"{'plain' if module is plain else 'again'} {name}"] = counts
    again = {name: seen[f"again {name}"] for name in modes}
    assert not again["2"]
    assert again["1"]["aten.mul"] == 1
    assert again["1"]["aten.mm"] == 0
    for name in "03":
        assert again[name]["aten.mul"] == again[name]["aten.mm"] == 1
    for rule in rules:  # and nothing but the rule's own modules is wrapped
        for name in rule.modules:
            assert ("forward" in vars(mixed.get_submodule(name))) is (rule.mode is not Recompute.NONE)


class Halving(TorchFunctionMode):
    """Where it is on, ``tanh`` is half as much: once, however often it is entered, as those of the executor do."""

    def __torch_function__(
        self, func: Callable[..., object], types: object, args: tuple[object, ...] = (), kwargs: object = None
    ) -> object:
        if func is not torch.tanh:
            return func(*args)
        with torch._C.DisableTorchFunction():
            return func(*args) / 2  # pyright: ignore[reportOperatorIssue]


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_checkpoint_of_the_users_repeats_where_it_ran(*, use_reentrant: bool) -> None:
    """What it repeated lay outside, so that context-parallel ranks attended to their own tokens alone."""
    x = torch.linspace(-1, 1, 5, requires_grad=True)
    with Halving(), repeated_in(Halving):
        y = checkpoint(lambda x: torch.exp(torch.tanh(x)), x, use_reentrant=use_reentrant)
    assert isinstance(y, torch.Tensor)
    y.sum().backward()
    halved = torch.exp(torch.tanh(x) / 2)
    torch.testing.assert_close(y, halved)
    torch.testing.assert_close(x.grad, torch.autograd.grad(halved.sum(), x)[0])
    plain = checkpoint(torch.tanh, x, use_reentrant=use_reentrant)  # what torch has is back in its place
    torch.testing.assert_close(plain, torch.tanh(x))


def test_a_block_that_its_author_compiled_is_repeated() -> None:
    """Torch's compiler does not know a context that a closure holds: the first step ended in an error inside it."""
    module = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4))
    x, plain = values(2, 4), copy.deepcopy(module)
    module.compile(backend="eager")
    apply_recompute(module, [RecomputeRule(modules=("",), mode=Recompute.FULL)])
    for each in (module, plain):
        each(x).sum().backward()
    pairs = zip(module.parameters(), plain.parameters(), strict=True)
    assert all(
        torch.equal(one.grad, other.grad) for one, other in pairs if one.grad is not None and other.grad is not None
    )
    assert all(parameter.grad is not None for parameter in module.parameters())
