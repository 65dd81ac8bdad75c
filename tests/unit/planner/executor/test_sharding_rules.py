"""Operators that DTensor has no rule for are computed on whole tensors, forward and backward.

Both halves of what two ranks share are alike: a fake world's rank gathers its own twice.
"""

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_module
from torch.distributed.tensor.experimental import implicit_replication
from torch.nn import functional as F  # noqa: N812

from planner.executor.sharding_rules import register_sharding_rules
from tests.fake_world import fake_world


def halves_of(dim: int, *local: torch.Tensor) -> list[torch.Tensor]:
    """DTensors of two ranks that have the same along ``dim``."""
    register_sharding_rules()
    mesh = init_device_mesh("cpu", (2,))
    return [DTensor.from_local(each, mesh, [Shard(dim)], run_check=False).requires_grad_() for each in local]


def twice(dim: int, *local: torch.Tensor) -> list[torch.Tensor]:
    return [torch.cat([each, each], dim).requires_grad_() for each in local]


def gradients(*tensors: torch.Tensor) -> list[torch.Tensor]:
    found = [each.grad for each in tensors if each.grad is not None]
    assert len(found) == len(tensors)
    return [each.full_tensor() if isinstance(each, DTensor) else each for each in found]


@pytest.mark.parametrize(
    "layer",
    # divided are channels, or the sequence
    [nn.GroupNorm(2, 16), nn.PReLU(16), nn.LSTM(8, 8, batch_first=True), nn.Conv1d(16, 4, 3)],
    ids=["group norm", "PReLU", "LSTM", "convolution"],
)
def test_gradients_of_a_divided_input_are_those_of_the_whole(layer: nn.Module) -> None:
    """The backward passes of group norm and PReLU ended in errors of torch's."""

    def run(x: torch.Tensor) -> list[torch.Tensor]:
        layer.zero_grad()
        output = layer(x)
        (output[0] if isinstance(output, tuple) else output).square().sum().backward()
        return gradients(x, *layer.parameters())

    local = torch.randn(2, 8, 8)
    expected = run(*twice(1, local))
    with fake_world(2), implicit_replication():
        found = run(*halves_of(1, local))
    for mine, whole in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, whole)


@pytest.mark.parametrize(
    ("name", "arguments"),
    [("transpose_", (0, 1)), ("swapaxes_", (-1, 0)), ("t_", ()), ("unsqueeze_", (0,)), ("squeeze_", (1,))],
)
@pytest.mark.parametrize("placement", [Replicate(), Shard(0)])
def test_a_view_in_place_changes_the_tensor(name: str, arguments: tuple[int, ...], placement: Placement) -> None:
    """What was whole on each rank kept its shape and its order, without a word."""
    shape = (4, 1, 6) if name == "squeeze_" else (4, 6)
    changed, whole = (torch.arange(24.0).view(shape).requires_grad_() for _ in range(2))
    with fake_world(2):
        register_sharding_rules()
        given = DTensor.from_local(changed, init_device_mesh("cpu", (2,)), [placement], run_check=False)
        twice_whole = torch.cat([whole, whole]) if placement.is_shard() else whole * 1.0
        found, expected = given * 2.0, twice_whole * 2.0
        assert isinstance(found, DTensor)
        assert getattr(found, name)(*arguments) is found
        getattr(expected, name)(*arguments)
        assert found.shape == expected.shape
        torch.testing.assert_close(found.full_tensor(), expected)
        (found * found).sum().backward()
        (expected * expected).sum().backward()
    assert changed.grad is not None
    assert whole.grad is not None
    torch.testing.assert_close(changed.grad * (2 if placement.is_shard() else 1), whole.grad)


def test_a_recurrent_layer_of_batches_that_come_first_is_that_of_one_process() -> None:
    """Its output had the sequence before the batch."""
    layer, x = nn.GRU(4, 4, batch_first=True), torch.randn(3, 5, 4)
    expected = layer(x)[0]
    with fake_world(2), implicit_replication():
        register_sharding_rules()
        mesh = init_device_mesh("cpu", (2,))
        distribute_module(layer, mesh)
        found = layer(DTensor.from_local(x, mesh, [Replicate()], run_check=False))[0]
        assert found.shape == expected.shape
        torch.testing.assert_close(found.full_tensor(), expected)
        found.sum().backward()


def test_heads_that_cannot_be_divided_have_the_gradient_of_a_divided_product() -> None:
    """Three heads, whole on both ranks, and a weight divided along its input: so is the gradient that comes back.

    A fake world's rank gets its own sum back, that of the first half of the heads.
    """

    def run(x: torch.Tensor, weight: torch.Tensor) -> list[torch.Tensor]:
        F.linear(x.flatten(2), weight).square().sum().backward()
        return gradients(x, weight)

    local, heads = torch.randn(5, 6), torch.randn(2, 4, 3, 4)
    half = heads.flatten(2)[..., :6]
    of_half, of_local = run(half.clone().requires_grad_(), local.clone().requires_grad_())
    with fake_world(2), implicit_replication():
        (weight,) = halves_of(1, local)
        whole = DTensor.from_local(heads, init_device_mesh("cpu", (2,)), [Replicate()], run_check=False)
        found = run(whole.requires_grad_(), weight)
    torch.testing.assert_close(found[0], torch.cat([of_half, of_half], -1).unflatten(2, (3, 4)))
    torch.testing.assert_close(found[1][:, :6], of_local)


def test_a_convolution_of_plain_images_has_gradients() -> None:
    """The first layer of a vision transformer: its weight is a DTensor, its input is not; torch's rule wanted both."""
    layer = nn.Conv2d(3, 8, 4, stride=4)
    images = torch.randn(2, 3, 8, 8)
    layer(images).square().sum().backward()
    expected = gradients(*layer.parameters())
    layer.zero_grad()
    with fake_world(2), implicit_replication():
        register_sharding_rules()
        mesh = init_device_mesh("cpu", (2,))
        whole = (DTensor.from_local(each.detach(), mesh, [Replicate()]) for each in layer.parameters())
        weight, bias = (each.requires_grad_() for each in whole)
        F.conv2d(images, weight, bias, stride=4).square().sum().backward()
        found = gradients(weight, bias)
    for mine, whole in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, whole)


@pytest.mark.parametrize("shape", [(4, 4), (1, 1, 4, 4), (3, 1, 4, 4), (1, 4, 4, 4), (3, 4, 4, 4)])
@pytest.mark.parametrize("dim", [0, 1])
def test_attention_with_a_mask_of_some_sequences_or_heads(dim: int, shape: tuple[int, ...]) -> None:
    """A mask for every head, as of T5, stayed whole where the heads were split: torch failed, or took another's."""
    if dim == 0 and shape[0] == 3:
        shape = (6, *shape[1:])
    if dim == 1:
        local, whole = torch.randn(3, 2, 4, 8), (3, 4, 4, 8)
    else:
        local, whole = torch.randn(3, 4, 4, 8), (6, 4, 4, 8)
    mask = torch.randn(shape)

    def run(query: torch.Tensor) -> list[torch.Tensor]:
        assert query.shape == whole
        output = F.scaled_dot_product_attention(query, query, query, mask)
        output.square().sum().backward()
        return [output.full_tensor() if isinstance(output, DTensor) else output, *gradients(query)]

    expected = run(*twice(dim, local))
    with fake_world(2), implicit_replication():
        found = run(*halves_of(dim, local))
    for mine, theirs in zip(found, expected, strict=True):
        # of what is still split at the end, the fake world gathers this rank's half twice
        torch.testing.assert_close(mine.narrow(dim, 0, local.shape[dim]), theirs.narrow(dim, 0, local.shape[dim]))


@torch.library.custom_op("planner_tests::doubled", mutates_args=())
def _doubled(x: torch.Tensor) -> torch.Tensor:
    return x * 2


@_doubled.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


_doubled.register_autograd(lambda _, gradient: gradient * 2)


def test_operators_that_nobody_has_a_rule_for_are_computed_whole() -> None:
    """They ended in NotImplementedError: an operator of a user's own, and torch's adaptive pooling in place."""

    def run(x: torch.Tensor) -> list[torch.Tensor]:
        F.adaptive_avg_pool1d(_doubled(x), 1).square().sum().backward()
        return gradients(x)

    local = torch.randn(2, 4, 8)
    expected = run(*twice(1, local))
    with fake_world(2):
        found = run(*halves_of(1, local))
    torch.testing.assert_close(found[0], expected[0])


def test_gradients_of_divided_weights_that_are_normed_are_those_of_the_whole() -> None:
    def run(direction: torch.Tensor, size: torch.Tensor) -> list[torch.Tensor]:
        torch._weight_norm(direction, size, 0).square().sum().backward()
        return gradients(direction, size)

    local = torch.randn(4, 8), torch.rand(4, 1)
    expected = run(*twice(0, *local))
    with fake_world(2):
        found = run(*halves_of(0, *local))
    for mine, whole in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, whole)


WRITTEN = {
    "half": lambda h: h[:, :4].mul_(0.5),
    "half by index": lambda h: h.__setitem__((slice(None), slice(0, 4)), h[:, :4] * 0.5),
    "every other": lambda h: h.__setitem__((slice(None), slice(None, None, 2)), 0),
    "one of four": lambda h: h.view(3, 4, 2)[:, 0].mul_(0.3),
    "a row": lambda h: h[1].add_(h[0]),
}


@pytest.mark.parametrize("name", WRITTEN)
def test_a_slice_that_is_written_to_has_its_gradient(name: str) -> None:
    """The gradient comes divided, and autograd wrote into copies of its parts."""
    x, factor = torch.randn(3, 8), torch.randn(3, 4)

    def gradient(x: torch.Tensor, factor: torch.Tensor) -> list[torch.Tensor]:
        written = x * 1.0
        WRITTEN[name](written)
        (written * factor).sum().backward()
        return gradients(x)

    (expected,) = gradient(x.clone().requires_grad_(), torch.cat([factor, factor], 1))
    with fake_world(2), implicit_replication():
        (divided,) = halves_of(1, factor)
        whole = DTensor.from_local(x.clone(), init_device_mesh("cpu", (2,)), [Replicate()], run_check=False)
        (found,) = gradient(whole.requires_grad_(), divided)
    torch.testing.assert_close(found, expected)


PLACES = torch.tensor([2, 0, 1])
INTO_PLAIN: dict[str, Callable[[torch.Tensor, torch.Tensor], object]] = {
    "add": lambda made, x: made.add_(x),
    "copy": lambda made, x: made.copy_(x),
    "scatter": lambda made, x: made.scatter_(0, PLACES[:, None].expand(3, 8), x),
    "scatter add": lambda made, x: made.scatter_add_(0, PLACES[:, None].expand(3, 8), x),
    "index add": lambda made, x: made.index_add_(0, PLACES, x),
    "index put": lambda made, x: made.index_put_((PLACES,), x),
    "part": lambda made, x: made[:, 2:6].mul_(x[:, 2:6]),
    "parts": lambda made, x: [made[:, i].copy_(x[:, i]) for i in range(8)],
}


@pytest.mark.parametrize("name", INTO_PLAIN)
@pytest.mark.parametrize("is_plain", [True, False])
def test_what_forward_makes_is_written_to_as_a_whole(name: str, *, is_plain: bool) -> None:
    """A plain tensor was an AssertionError of torch's; of a DTensor a scatter wrote to a copy, without a word."""
    half, weight = torch.randn(3, 4), torch.randn(8, 5)

    def run(x: torch.Tensor, weight: torch.Tensor) -> list[torch.Tensor]:
        made = torch.ones(3, 8)
        if isinstance(x, DTensor) and not is_plain:
            made = DTensor.from_local(made, x.device_mesh, [Replicate()], run_check=False)
        INTO_PLAIN[name](made, x * 2.0)
        (made @ weight).square().sum().backward()
        return gradients(x, weight)

    (repeated,) = twice(1, half)
    expected = run(repeated, weight.clone().requires_grad_())
    with fake_world(2), implicit_replication():
        (divided,) = halves_of(1, half)
        whole = DTensor.from_local(weight.clone(), init_device_mesh("cpu", (2,)), [Replicate()], run_check=False)
        found = run(divided, whole.requires_grad_())
    for mine, right in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, right)


def doubled_where(x: torch.Tensor) -> torch.Tensor:
    """Reads and writes what a mask selects."""
    result, mask = x * 1.0, x.sum(-1) > 0
    result[mask] = result[mask] * 2.0
    return result


MASKS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "mask": lambda x: x[x.sum(-1) > 0] * 3.0,
    "masked_select": lambda x: torch.masked_select(x, x > 0) * 3.0,
    "nonzero": lambda x: x[(x.sum(-1) > 0).nonzero(as_tuple=True)] * 3.0,
    "where": lambda x: x[torch.where(x.sum(-1) > 0)] * 3.0,
}


@pytest.mark.parametrize(
    ("chosen", "dim"),
    [
        *((chosen, dim) for chosen in MASKS.values() for dim in (None, 0, 2)),
        *((doubled_where, dim) for dim in (None, 2)),  # torch refuses to write to some of what is split along a mask
    ],
)
def test_what_a_mask_selects_has_its_gradient(chosen: Callable[[torch.Tensor], torch.Tensor], dim: int | None) -> None:
    """DTensor tried it without values to learn its shape, which ended in an internal error."""
    torch.manual_seed(0)
    local = torch.randn(2, 5, 4)
    (whole,) = [local.clone().requires_grad_()] if dim is None else twice(dim, local)
    expected = chosen(whole)
    expected.square().sum().backward()
    with fake_world(2), implicit_replication():
        if dim is None:
            register_sharding_rules()
            mesh = init_device_mesh("cpu", (2,))
            given = DTensor.from_local(local, mesh, [Replicate()], run_check=False).requires_grad_()
        else:
            (given,) = halves_of(dim, local)
        found = chosen(given)
        assert isinstance(found, DTensor)
        found.square().sum().backward()
        torch.testing.assert_close(found.full_tensor(), expected)
        assert gradients(given)[0].equal(gradients(whole)[0])


def test_a_gradient_whose_part_lies_in_memory_otherwise_than_the_whole_is_viewed() -> None:
    """Qwen3-Next under tensor parallelism with a head a rank: torch could not view the part."""
    gradient = torch.randn(4, 2, 8).transpose(0, 1)
    with fake_world(2), implicit_replication():
        (x,) = halves_of(0, torch.randn(2, 32))
        shape, stride = torch.Size((4, 4, 8)), (32, 8, 1)
        mesh = init_device_mesh("cpu", (2,))
        whole = DTensor.from_local(gradient, mesh, [Shard(0)], run_check=False, shape=shape, stride=stride)
        x.view(shape).backward(whole)
        assert isinstance(x.grad, DTensor)
        torch.testing.assert_close(x.grad.to_local(), gradient.reshape(2, 32))
