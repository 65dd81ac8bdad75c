"""Context parallelism on any model: ranks hold shards of each sequence, and only attention looks beyond its own.

A model runs as if a rank's shard were the whole sequence. Three of the functions it calls are answered otherwise:
``scaled_dot_product_attention`` and our own ``causal_attention`` reach all positions, and ``arange`` over the length of
the sequence gives the positions of the shard. A model that depends on positions in other ways, such as a slice of a
table, is refused: ``check_model`` runs a copy on a few tokens in order and shuffled, which must come to the same.
"""

# pyright: reportPrivateUsage=false
# torch has no public way to call a function past all function modes.

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass
from typing import NamedTuple, cast

import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.nn import functional as F  # noqa: N812
from torch.overrides import TorchFunctionMode

from costmodels.vocabulary.choices import ContextMethod
from costmodels.vocabulary.mesh import MeshAxis
from planner.errors import ModelError, PlanError, PlannerError
from planner.executor.context_attention import (
    BlockAttention,
    Blocks,
    Gathered,
    Ring,
    attention_by_heads,
    positions_of,
)
from planner.executor.context_windows import attention_by_parts, attention_of_seen, causal_attention_by_heads
from planner.executor.special_tokens import Compared, with_special
from planner.executor.stage_trace import CPU, Inputs, map_leaves, tensors_in, twin
from planner.executor.stand_ins import stood_in
from planner.executor.tensor_parallel import redistribute
from planner.models.causal_attention import Arguments as CausalArguments
from planner.models.causal_attention import causal_attention
from planner.models.causal_masks import NUM_SHARDS
from planner.models.inputs import call_model
from planner.models.loss import IGNORED, Reduction, TrainingLoss, tokens_of
from planner.plan.schema import Plan

Function = Callable[..., object]

_KeyValue = tuple[torch.Tensor, torch.Tensor]
LONGEST_PROBE = 13  # tokens: prime, so seldom another size of a model, and enough for any two of them to change places
NUM_PROBE_TOKENS = 8  # different ones
_NOISE = 0.05  # added to parameters of the probe: what starts at zero must show
_REL = 1e-3  # of the output's norm; shuffled, float32 sums agree to 1e-6, and any other position is another number


@dataclass(frozen=True)
class Context:
    """This rank's shard of every sequence."""

    method: ContextMethod
    group: dist.ProcessGroup
    seq_len: int  # of the whole

    @property
    def length(self) -> int:
        """Positions that this rank holds."""
        return self.seq_len // self.group.size()

    def shard(self, batch: Inputs) -> Inputs:
        """This rank's positions of tensors (batch, sequence, ...); labels that are not there are the next tokens."""
        tokens = tokens_of(batch)
        if "labels" not in batch:
            last = torch.full_like(tokens[:, :1], IGNORED)
            batch = {**batch, "labels": torch.cat((tokens[:, 1:], last), dim=1)}
        positions = positions_of(self.group.rank(), self.group.size(), self.seq_len).to(tokens.device)
        is_cut = {key: value.ndim > 1 and value.shape[1] == self.seq_len for key, value in batch.items()}
        return {key: value[:, positions] if is_cut[key] else value for key, value in batch.items()}

    def example(self, inputs: Inputs) -> Inputs:
        """Inputs of a shard's shapes."""
        return {key: value[:, : self.length] for key, value in inputs.items()}

    def mode(self) -> TorchFunctionMode:
        """Inside, the model is on this rank's shard. May be entered more than once."""
        positions = positions_of(self.group.rank(), self.group.size(), self.seq_len)
        return Sharded(self._attention, positions, self.group.size())

    def _attention(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, blocks: Blocks) -> torch.Tensor:
        blocks = blocks._replace(rank=self.group.rank(), num_ranks=self.group.size())
        if self.method is ContextMethod.ALL_TO_ALL:
            heads = query.shape[1], key.shape[1]
            if any(each % blocks.num_ranks for each in heads):
                raise PlanError(
                    f"cp_method = all-to-all gives each of {blocks.num_ranks} ranks some heads, but there are "
                    f"{heads[0]} of queries and {heads[1]} of keys",
                    hint="search again with --cp-method ring",
                )
            attend = causal_attention_by_heads if blocks.has_window_or_sinks else attention_by_heads
            return attend(query, key, value, self.group, blocks)
        if blocks.has_window_or_sinks:
            return attention_by_parts(query, key, value, self.group, blocks)
        carrier = Ring(self.group) if self.method is ContextMethod.RING else Gathered(self.group)
        output = BlockAttention.apply(query, torch.cat((key, value), dim=-1), carrier, blocks)
        assert isinstance(output, torch.Tensor)
        return output


def context_of(plan: Plan, mesh: DeviceMesh) -> Context | None:
    """This rank's, where sequences are shared."""
    if plan.mesh.cp == 1:
        return None
    return Context(plan.cp_method, mesh[MeshAxis.CP.value].get_group(), plan.training.seq_len)


_Attention = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, Blocks], torch.Tensor]


class AttentionCall(NamedTuple):
    """The arguments of ``scaled_dot_product_attention``."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    attn_mask: torch.Tensor | None = None
    dropout_p: float = 0.0
    is_causal: bool = False
    scale: float | None = None
    enable_gqa: bool = False


_ATTENTION = F.scaled_dot_product_attention  # whatever stands for it in its module later


class Sharded(TorchFunctionMode):
    """Answers calls of attention by ``attention``, and of ``arange`` over the sequence by ``positions``.

    These are one of ``num_shards`` shards of it.
    """

    def __init__(self, attention: _Attention, positions: torch.Tensor, num_shards: int = 1) -> None:
        super().__init__()
        self._attention, self._positions, self._num_shards = attention, positions, num_shards

    def __enter__(self) -> Sharded:
        """What asks for it is told that models see a part of each sequence."""
        super().__enter__()
        NUM_SHARDS.append(self._num_shards)
        return self

    def __exit__(self, *raised: object) -> None:
        """And is not told any more."""
        NUM_SHARDS.pop()
        super().__exit__(*raised)

    def __torch_function__(
        self, func: Function, types: object, args: tuple[object, ...] = (), kwargs: dict[str, object] | None = None
    ) -> object:
        kwargs = kwargs or {}
        if func is _ATTENTION:
            with torch._C.DisableTorchFunction():  # modes may be nested: recomputation enters its own
                return self._attend(AttentionCall(*args, **kwargs))  # pyright: ignore[reportArgumentType]
        if func is causal_attention:
            with torch._C.DisableTorchFunction():
                query, key, value, sinks, window, scale = cast(CausalArguments, args)
                call = AttentionCall(query, key, value, is_causal=True, scale=scale)
                return self._attend(call, Blocks(0, 1, True, scale, window, sinks))
        if func is torch.arange and _end_of(args, kwargs) == len(self._positions):
            with torch._C.DisableTorchFunction():
                plain = func(*args, **kwargs)
                assert isinstance(plain, torch.Tensor)
                return self._positions.to(plain).requires_grad_(plain.requires_grad)
        return func(*args, **kwargs)

    def _attend(self, call: AttentionCall, blocks: Blocks | None = None) -> torch.Tensor:
        _check_attention(call, len(self._positions))
        query, key, value = call.query, call.key, call.value
        scale = query.shape[-1] ** -0.5 if call.scale is None else call.scale
        blocks = blocks or Blocks(0, 1, call.is_causal, scale)
        if not isinstance(query, DTensor):
            return self._attention(query, key, value, blocks)
        mesh = query.device_mesh
        placement = _common_placement((query, key, value), mesh)
        local = [_local(each, mesh, placement) for each in (query, key, value)]
        if blocks.sinks is not None:  # one for each head
            of_heads = Shard(0) if isinstance(placement, Shard) else placement
            blocks = blocks._replace(sinks=_local(blocks.sinks, mesh, of_heads))
        output = self._attention(local[0], local[1], local[2], blocks)
        return DTensor.from_local(output, mesh, [placement], run_check=False)


def _check_attention(call: AttentionCall, length: int) -> None:
    problem = None
    if call.attn_mask is not None:
        problem = "gives attention a mask of its own"
    elif call.dropout_p > 0.0:
        problem = f"drops {call.dropout_p:g} of attention's weights"
    elif any(each.ndim != 4 or each.shape[2] != length for each in (call.query, call.key)):
        shapes = " and ".join(str(tuple(each.shape)) for each in (call.query, call.key))
        problem = f"attends from and to other than the {length} positions of a rank, in shapes {shapes}"
    if problem is not None:
        raise ModelError(
            f"under context parallelism the model cannot be run: it {problem}",
            hint="use is_causal=True without dropout in attention, or plan with --cp 1",
        )


def _common_placement(tensors: tuple[torch.Tensor, ...], mesh: DeviceMesh) -> Placement:
    """Heads divided as those of the queries are, where all have enough of them."""
    (placement,) = tensors[0].placements if isinstance(tensors[0], DTensor) else (Replicate(),)
    by_heads = isinstance(placement, Shard) and placement.dim == 1
    return Shard(1) if by_heads and all(each.shape[1] % mesh.size() == 0 for each in tensors) else Replicate()


def _local(tensor: torch.Tensor, mesh: DeviceMesh, placement: Placement) -> torch.Tensor:
    whole = tensor if isinstance(tensor, DTensor) else DTensor.from_local(tensor, mesh, [Replicate()], run_check=False)
    return redistribute(whole, mesh, placement).to_local(grad_placements=[placement])


def _end_of(args: tuple[object, ...], kwargs: Mapping[str, object]) -> int | None:
    """n where a call of ``arange`` counts 0, 1, ... n - 1."""
    named = {key: kwargs[key] for key in ("start", "end", "step") if key in kwargs}
    names = ("end",) if len(args) == 1 else ("start", "end", "step")
    given = {"start": 0, "step": 1, **dict(zip(names, args, strict=False)), **named}
    end = given.get("end")
    return int(end) if given["start"] == 0 and given["step"] == 1 and isinstance(end, int | float) else None


def check_model(module: nn.Module, inputs: Inputs, loss: TrainingLoss, context: Context) -> None:
    """ModelError where ``module`` or ``loss`` depend on positions in ways that a shard of a sequence would change.

    Found out with a copy on the CPU, whose parameters are moved a little, or stood in for where they are on meta: what
    it makes of a few tokens in order must be what it makes of them shuffled, where it is told their positions, and of
    half of them, where attention has the keys and values of all. Among them are those that it treats as special, if
    any. The loss of all must be that of their parts. A module of fake tensors is not looked at.
    """
    strange = [name for name, value in inputs.items() if value.ndim != 2 or value.is_floating_point()]
    if strange:
        raise ModelError(
            f"context parallelism shares out the positions of token ids (batch, sequence), and {strange[0]} is "
            f"{inputs[strange[0]].dtype} {tuple(inputs[strange[0]].shape)}",
            hint="plan with cp = 1",
        )
    if any(isinstance(parameter, FakeTensor) for parameter in module.parameters()):
        return
    length = min(LONGEST_PROBE, context.seq_len - 1)
    with torch.random.fork_rng(devices=()), torch.no_grad(), own_cores():
        torch.manual_seed(0)
        copied = moved_copy(module)
        tokens = {key: torch.randint(NUM_PROBE_TOKENS, (2, length)) for key in inputs}
        shuffled = torch.randperm(length)
        watched, compared = _Watched(context.length, length), Compared(tokens)
        with watched, compared:
            call_model(copied, tokens)
        tokens = with_special(tokens, compared.special(NUM_PROBE_TOKENS))
        with watched:
            expected = call_model(copied, tokens)
        parts = [shuffled] if watched.counts((length + 1) // 2) else [shuffled, shuffled[: (length + 1) // 2]]
        kept: list[_KeyValue] = []  # of all positions in each call of attention, for the part that has some of them
        found = [_on_some(copied, tokens, (part, shuffled), kept) for part in parts]
    watched.refuse()
    if not all(_are_those(one, expected, part, length) for one, part in zip(found, parts, strict=True)):
        raise ModelError(
            "under context parallelism the model cannot be run: it reads positions otherwise than by torch.arange over "
            "the sequence, or mixes them otherwise than by scaled_dot_product_attention",
            hint="index tables of positions with torch.arange(length), or plan with --cp 1",
        )
    _check_loss(loss, expected, tokens, length)


@contextlib.contextmanager
def own_cores() -> Generator[None]:
    """Torch computes on this rank's share of the cores meanwhile: torchrun lets each rank have one thread."""
    before = torch.get_num_threads()
    torch.set_num_threads(max(before, (os.cpu_count() or 1) // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))))
    try:
        yield
    finally:
        torch.set_num_threads(before)


def moved_copy(module: nn.Module) -> nn.Module:
    """A copy of ``module`` on the CPU, in which what starts at zero shows too. Draws from torch's current seed."""
    if any(parameter.is_meta for parameter in module.parameters()):
        return stood_in(module).train()
    copied = twin(module, torch.float32, CPU).train()
    for parameter in copied.parameters():
        parameter.data = parameter + _NOISE * torch.randn_like(parameter)
    return copied


def _on_some(
    module: nn.Module, tokens: Inputs, positions: tuple[torch.Tensor, torch.Tensor], kept: list[_KeyValue]
) -> object:
    """What ``module`` makes of some ``positions``, of which attention has the keys and values of all, the second.

    ``kept`` takes these where the two are alike, and gives them where they are not.
    """
    some, every = positions
    past, calls = some[:, None] >= every[None, :], iter(kept if len(some) < len(every) else ())

    def attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, blocks: Blocks) -> torch.Tensor:
        if len(some) == len(every):
            kept.append((key, value))
        else:
            key, value = next(calls)
        if blocks.has_window_or_sinks:
            return attention_of_seen(query, key, value, some[:, None] - every, blocks)
        mask = past if blocks.is_causal else None
        grouped = query.shape[1] != key.shape[1]
        return F.scaled_dot_product_attention(query, key, value, mask, scale=blocks.scale, enable_gqa=grouped)

    try:
        with Sharded(attention, some), _NoDropout():
            return call_model(module, {key: value[:, some] for key, value in tokens.items()})
    except PlannerError:
        raise
    except Exception as error:  # whatever the user's code raises
        raise ModelError(
            f"under context parallelism the model cannot be run: of {len(some)} of {len(every)} positions it makes "
            f"nothing but {type(error).__name__}: {error}",
            hint="index tables of positions with torch.arange(length), or plan with --cp 1",
        ) from error


def _are_those(found: object, expected: object, positions: torch.Tensor, length: int) -> bool:
    """Whether ``found`` is what is ``expected`` of all positions, at some of them."""
    pairs = [
        (one, other[:, positions])
        for one, other in zip(tensors_in(found), tensors_in(expected), strict=True)
        if other.ndim > 1 and other.shape[1] == length and other.is_floating_point()
    ]
    alike = [
        one.shape == other.shape and float((one - other).norm()) <= _REL * float(other.norm()) for one, other in pairs
    ]
    return bool(alike) and all(alike)


class _NoDropout(TorchFunctionMode):
    """Leaves out what would make two passes differ."""

    def __torch_function__(
        self, func: Function, types: object, args: tuple[object, ...] = (), kwargs: dict[str, object] | None = None
    ) -> object:
        return args[0] if func is F.dropout and args else func(*args, **(kwargs or {}))


class _Watched(_NoDropout):
    """Notes how far ``arange`` counts in a pass: as far as a rank's shard is long, where the sequence is not?"""

    def __init__(self, length: int, probed: int) -> None:
        super().__init__()
        self._length, self._can_tell = length, length != probed
        self._ends: set[int | None] = set()

    def __torch_function__(
        self, func: Function, types: object, args: tuple[object, ...] = (), kwargs: dict[str, object] | None = None
    ) -> object:
        if func is torch.arange:
            self._ends.add(_end_of(args, kwargs or {}))
        return super().__torch_function__(func, types, args, kwargs)

    def counts(self, number: int) -> bool:
        """Whether the model counts so many of something."""
        return number in self._ends

    def refuse(self) -> None:
        """ModelError where positions could not be told from something else."""
        if self._can_tell and self.counts(self._length):
            raise ModelError(
                f"under context parallelism the model cannot be run: it counts {self._length} of something else with "
                f"torch.arange, and a rank has {self._length} positions: which is which is not known",
                hint="plan with another --cp",
            )


def _check_loss(loss: TrainingLoss, output: object, tokens: Inputs, length: int) -> None:
    """ModelError where the loss of some positions and that of the others do not make that of all."""
    labels = tokens[next(iter(tokens))].remainder(NUM_PROBE_TOKENS)
    labels[0, : length // 2] = IGNORED
    parts = [slice(0, length), slice(0, length // 3), slice(length // 3, length)]
    same = [False]
    with contextlib.suppress(Exception):  # such as one that has parts only where no label is ignored
        totals = [_total(loss, output, {**tokens, "labels": labels}, part) for part in parts]
        whole, sums = totals[0], [sum(each) for each in zip(*totals[1:], strict=True)]
        same = [abs(one - other) <= _REL * abs(one) for one, other in zip(whole, sums, strict=True)]
    if not all(same):
        raise ModelError(
            "under context parallelism this loss cannot be computed: of the parts of a sequence it is not what it is "
            "of the whole",
            hint="let loss_fn return (sum over positions of labels that are not -100, number of them), or plan with "
            "--cp 1",
        )


def _total(loss: TrainingLoss, output: object, batch: Inputs, part: slice) -> tuple[float, float]:
    """The sum of terms in ``part`` of the positions, and how many they are."""
    length = next(iter(batch.values())).shape[1]

    def cut(leaf: object) -> object:
        is_cut = isinstance(leaf, torch.Tensor) and leaf.ndim > 1 and leaf.shape[1] == length
        return leaf[:, part] if is_cut and isinstance(leaf, torch.Tensor) else leaf

    given = {key: value[:, part] for key, value in batch.items()}
    value = loss.function(map_leaves(cut, output), given)
    if isinstance(value, tuple):
        return float(value[0]), float(value[1])
    weight = 0.0 if loss.weight is None else float(loss.weight(given))
    return float(value) * (weight if loss.reduction is Reduction.MEAN else 1.0), weight
