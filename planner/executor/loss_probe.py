"""Finds out what an undeclared loss is, by trying it on a made-up batch and on its halves.

The model runs once for the kinds of its outputs (``outputs.py``); these are filled with random numbers, and the loss
is computed of the whole and of each half, the first samples and the last or every other, with outputs of unlike size
in the first and the last, so that no two ways of adding up agree by chance. Every label of the data (0 to 255, or as
many as the model tells apart) stands in one half once and all but one of them are missing in the other, so that
ignoring any of them shows; then some of one half's labels are -100. What is a mean over sequences without these alone
is trained on batches without them. Other labels and inputs that may be special to the loss, such as that of padding,
are the numbers that it hands to torch: each stands in one half alone. A loss that is no number of such outputs, as one
of probabilities, is tried on numbers between 0 and 1. Every input that the loss reads is made to differ between the
halves, whatever its given rows are (``unlike_inputs.py``). What a model returns of a batch as a whole, such as a
balance loss, is another number in each half: nobody knows how it adds up.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from planner.executor.data import NUM_BYTE_TOKENS
from planner.executor.integers import integers_in, is_integer
from planner.executor.loss_beside import beside_of
from planner.executor.outputs import UntriedError, output_of
from planner.executor.stage_trace import CPU, Inputs, leaves_of, map_leaves, tensors_in
from planner.executor.unlike_inputs import check_none_missing, partly_missing, unlike_halves
from planner.models.inputs import LABELS, takes_labels
from planner.models.loss import IGNORED, NEXT_TOKEN, Batch, Beside, Reduction, TrainingLoss, num_targets

_REL = 1e-5  # float32 sums of a few hundred terms agree to about 1e-6; one term of 256 more or less shows as 1e-4
MOST_SPECIAL = 64  # of the numbers that a loss hands to torch
_UNLIKE = 64  # between what a model returns of a part and of the whole: it shows behind a coefficient of 1e-4
OF_FORWARD = "forward takes labels, and a loss that it computes itself cannot be tried apart from the model"
_WHOLE = slice(None)
_BY_TURNS = slice(0, None, 2), slice(1, None, 2)  # as ranks take samples: a loss over neighbours is none of both halves
NUM_SAMPLES = 8  # of models without tokens: their labels, where they have any, are the caller's


@dataclass(frozen=True)
class _Trial:
    """A loss on a whole batch and on its halves, with the number of labels of each that are not ignored."""

    whole: float
    halves: tuple[float, float]
    counts: tuple[int, int]
    later_counts: tuple[int, int]  # without the first of each sequence

    def says_nothing(self) -> bool:
        """Whether it is none of what the halves hold, which are unlike, as where a loss is bounded."""
        return self.whole == 0.0 or self.halves[0] == self.halves[1]

    def is_sum(self) -> bool:
        """Whether the whole is the sum of the halves."""
        return _equal(self.whole, sum(self.halves))

    def is_mean(self, weights: tuple[int, int]) -> bool:
        """Whether the whole is the mean of the halves under ``weights``."""
        return _equal(self.whole, sum(w * x for w, x in zip(weights, self.halves, strict=True)) / sum(weights))


def recognised(
    loss: TrainingLoss, module: nn.Module, inputs: Callable[[int, int], Inputs], seq_len: int
) -> TrainingLoss:
    """``loss`` with its reduction, where that can be found, and with what it reads beside; else with its doubt.

    ``inputs`` are (batch size, length).
    """
    if loss == NEXT_TOKEN:
        return loss
    is_known = loss.reduction is not Reduction.UNKNOWN
    length = min(seq_len, NUM_BYTE_TOKENS)
    size = 2 * math.ceil(NUM_BYTE_TOKENS / length) if length > 1 else NUM_SAMPLES
    try:
        batch = inputs(size, length)
        is_given_labels = LABELS in batch and takes_labels(module)
        output, left = output_of(module, batch)
        other = output_of(module, inputs(size + 1, length)).output if len(tensors_in(output)) > 1 else output
    except UntriedError as error:
        return loss if is_known else dataclasses.replace(loss, doubt=str(error))
    made_up = [_Output.made_up(output, size, other, between) for between in (None, torch.sigmoid)]
    tries = [(each.value, _with_labels(batch, (size, length), n)) for each in made_up for n in _num_classes(each.value)]
    beside = next(filter(None, (beside_of(loss, module, given, left) for given in tries)), Beside())
    loss = dataclasses.replace(loss, beside=beside)
    if is_known:
        return loss
    found = next(_attempts(loss, made_up, batch, (size, length)), loss)
    is_own = is_given_labels and found.reduction is Reduction.UNKNOWN
    return dataclasses.replace(found, doubt=found.doubt or OF_FORWARD) if is_own else found


def _attempts(
    loss: TrainingLoss, outputs: Sequence[_Output], batch: Inputs, shape: tuple[int, int]
) -> Iterator[TrainingLoss]:
    """What ``loss`` is on each of ``outputs`` that it makes numbers of, the most labels first."""
    for output in outputs:
        for num_classes in _num_classes(output.value):
            with contextlib.suppress(Exception):  # whatever a user's loss raises at what is made up, or at such labels
                found = _tried(loss, output, batch, shape, num_classes)
                if found is not None:
                    yield found


def _tried(
    loss: TrainingLoss, output: _Output, batch: Inputs, shape: tuple[int, int], num_classes: int
) -> TrainingLoss | None:
    """What ``loss`` is on ``batch``, on others whose halves differ, and where labels are ignored.

    None where it is no number of what is made up, as the logarithm of a probability below 0.
    """
    size, length = shape
    batch = _with_labels(batch, shape, num_classes)
    with _Numbers() as numbers:
        plain = loss.function(output.value, batch)
    if isinstance(plain, tuple):
        return dataclasses.replace(loss, reduction=Reduction.COUNTED)
    trials = [_trial(loss, output, batch), _trial(loss, output, batch, _BY_TURNS)]
    special = [number for number in numbers.found if 0 <= number < num_classes][:MOST_SPECIAL]
    if special:
        trials.append(_trial(loss, output, _with(special, batch, size)))
    if not any(math.isfinite(trial.whole) for trial in trials):
        return None
    read = [name for name, tensor in batch.items() if id(tensor) in numbers.read and len(tensor) == size]
    for name in read:
        found = _finite(loss, output, [{**batch, name: changed} for changed in unlike_halves(batch[name])])
        if not found:  # it is read, and no two halves that differ in it could be tried
            return dataclasses.replace(loss, doubt=f"it reads {name!r}, of which no other values could be tried")
        trials += found
    masked = batch[LABELS].clone()
    masked.view(size, -1)[: size // 2 : 2, : max(2, length // 4)] = IGNORED
    masked.view(size, -1)[1 : size // 2 : 2, 0] = IGNORED  # which losses that shift labels do not see
    ignoring = _finite(loss, output, [{**batch, LABELS: masked}])
    trials = [trial for trial in trials if math.isfinite(trial.whole)]
    result = _read(loss, trials, ignoring)
    strange = [
        (name, missing)
        for name in read
        for missing, changed in partly_missing(batch[name])
        if _read(loss, trials + _finite(loss, output, [{**batch, name: changed}]), ignoring) != result
        and not (missing == IGNORED and name == LABELS)  # which has been tried
    ]
    return _without_missing(loss, result, strange) if strange else result


def _without_missing(loss: TrainingLoss, found: TrainingLoss, missing: Sequence[tuple[str, float]]) -> TrainingLoss:
    """``found``, for batches in which no input has what is ``missing`` of it; ``loss`` where nobody could look."""
    weight = found.weight
    if weight is None:
        return loss

    def checked(batch: Batch) -> torch.Tensor | float:
        assert isinstance(batch, dict)
        for name, value in missing:
            check_none_missing(name, batch[name], value)
        return weight(batch)

    return dataclasses.replace(found, weight=checked)


def _finite(loss: TrainingLoss, output: _Output, batches: Sequence[Inputs]) -> list[_Trial]:
    """Of those batches that ``loss`` knows what to do with."""
    found: list[_Trial] = []
    for batch in batches:
        with contextlib.suppress(Exception):  # such as one that does not know -100: it will not be given any
            found.append(_trial(loss, output, batch))
    return [trial for trial in found if math.isfinite(trial.whole)]


def _read(loss: TrainingLoss, plain: list[_Trial], ignoring: list[_Trial]) -> TrainingLoss:
    trials = [*plain, *ignoring]
    if not trials or any(trial.says_nothing() for trial in trials):
        return loss
    if all(trial.is_sum() for trial in trials):
        return dataclasses.replace(loss, reduction=Reduction.SUM)
    if all(trial.is_mean((1, 1)) for trial in trials):
        return dataclasses.replace(loss, reduction=Reduction.MEAN, weight=_num_sequences)
    if plain and ignoring and all(trial.is_mean(trial.counts) for trial in trials):
        return dataclasses.replace(loss, reduction=Reduction.MEAN, weight=num_targets)
    if plain and ignoring and all(trial.is_mean(trial.later_counts) for trial in trials):
        return dataclasses.replace(loss, reduction=Reduction.MEAN, weight=_num_later_targets)
    if plain and all(trial.is_mean((1, 1)) for trial in plain):
        return dataclasses.replace(loss, reduction=Reduction.MEAN, weight=_num_whole_sequences)
    return loss


class _Numbers(TorchFunctionMode):
    """What code hands to torch's functions: integers, those among them that labels are compared with, and tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[int, None] = {}
        self.read: set[int] = set()  # ids of tensors

    def __torch_function__(
        self, func: Callable[..., object], types: object, args: Sequence[object] = (), kwargs: Any = None
    ) -> object:
        leaves = leaves_of((tuple(args), kwargs or {}))
        self.read.update(id(leaf) for leaf in leaves if isinstance(leaf, torch.Tensor))
        result = func(*args, **(kwargs or {}))
        self.found.update(dict.fromkeys(integers_in(leaves)))
        return result


def _num_classes(output: object) -> list[int]:
    """How many labels there may be, the most first: of logits, the last axis, but which output is logits?"""
    sizes = {leaf.shape[-1] for leaf in leaves_of(output) if isinstance(leaf, torch.Tensor) and leaf.ndim > 1}
    return sorted(sizes | {NUM_BYTE_TOKENS}, reverse=True)


def _with(special: Sequence[int], batch: Inputs, size: int) -> Inputs:
    """``batch`` with the special numbers in the first half of what is made of integers, and none in the second."""
    plain = next(number for number in range(len(special) + 1) if number not in special)
    found = dict(batch)
    for name, tensor in batch.items():
        if is_integer(tensor) and len(tensor) == size:
            changed = torch.full_like(tensor, plain)
            first = changed[: size // 2].view(-1)
            first[: len(special)] = torch.tensor(special)[: len(first)]
            found[name] = changed
    return found


def _trial(loss: TrainingLoss, output: _Output, batch: Inputs, halves: tuple[slice, slice] | None = None) -> _Trial:
    """``halves``: the first samples and the last, where nothing is said."""
    labels = batch[LABELS]
    size = len(labels)
    halves = halves or (slice(0, size // 2), slice(size // 2, size))

    def value(part: slice) -> float:
        found = loss.function(output.part(part, size), {key: tensor[part] for key, tensor in batch.items()})
        assert isinstance(found, torch.Tensor)
        return float(found)

    (first, later), (second, later_second) = (
        [int(count({LABELS: labels[half]})) for count in (num_targets, _num_later_targets)] for half in halves
    )
    with torch.no_grad():
        values = value(halves[0]), value(halves[1])
        return _Trial(value(_WHOLE), values, (first, second), (later, later_second))


def _with_labels(batch: Inputs, shape: tuple[int, int], num_classes: int) -> Inputs:
    """``batch``, where it has no labels with made-up ones of so many classes; none are ignored."""
    batch = {LABELS: _labels(*shape, min(NUM_BYTE_TOKENS, num_classes)), **batch}
    return {**batch, LABELS: _none_ignored(batch[LABELS])}


def _labels(size: int, length: int, num_labels: int) -> torch.Tensor:
    """Every label in the first half, one and the same in the second."""
    each = torch.arange(size // 2 * length).remainder(num_labels).view(size // 2, length)
    return torch.cat((each, torch.ones_like(each)))


def _none_ignored(labels: torch.Tensor) -> torch.Tensor:
    """``labels`` with another of them where one is ignored: those of a prompt hid what is ignored in one half alone."""
    ignored = labels == IGNORED
    known = labels[~ignored]
    return labels.masked_fill(ignored, known[0] if len(known) else 0)


@dataclass(frozen=True)
class _Output:
    """What a model may return of a batch, and which of its tensors have rows for each sample."""

    value: object
    rows: dict[int, int]  # how many a sample has, by the tensor's id

    @staticmethod
    def made_up(
        output: object, size: int, other: object, between: Callable[[torch.Tensor], torch.Tensor] | None
    ) -> _Output:
        """``output`` with random numbers, three times as large in the second half; ``other``: of another batch size.

        ``between`` makes of them what the loss takes, such as probabilities.
        """
        generator = torch.Generator().manual_seed(0)
        lengths = iter([_length(leaf) for leaf in leaves_of(other)])
        rows: dict[int, int] = {}

        def filled(leaf: object) -> object:
            other_length = next(lengths)
            if not isinstance(leaf, torch.Tensor):
                return leaf
            is_drawn, length = leaf.is_floating_point(), _length(leaf)
            values = (
                torch.randn(leaf.shape, generator=generator, device=CPU)
                if is_drawn
                else torch.zeros(leaf.shape, dtype=leaf.dtype)
            )
            has_rows = bool(length) and length % size == 0 and (other is output or other_length != length)
            if is_drawn and has_rows:
                values[length // 2 :] *= 3
            if is_drawn and between is not None:
                values = between(values)
            if has_rows:
                rows[id(values)] = length // size
            return values

        return _Output(map_leaves(filled, output), rows)

    def part(self, part: slice, size: int) -> object:
        """That of these samples of ``size``; what has no rows for each is another number than that of the whole."""

        def cut(leaf: object) -> object:
            if not isinstance(leaf, torch.Tensor):
                return leaf
            if id(leaf) not in self.rows:
                is_whole, is_flag = part == _WHOLE, leaf.dtype == torch.bool
                return leaf if is_whole or is_flag else leaf + (part.start + 1) * _UNLIKE
            return leaf.unflatten(0, (size, self.rows[id(leaf)]))[part].flatten(0, 1)

        return map_leaves(cut, self.value)


def _length(leaf: object) -> int:
    """The size of a tensor's first dimension; 0 where there is none."""
    return len(leaf) if isinstance(leaf, torch.Tensor) and leaf.ndim else 0


def _num_sequences(batch: Batch) -> float:
    values = batch.values() if isinstance(batch, dict) else batch
    return float(len(next(iter(values))))


def _num_later_targets(batch: Batch) -> torch.Tensor:
    """Of a loss that holds each label against the output before it: the first of a sequence is nobody's."""
    assert isinstance(batch, dict)
    labels = batch[LABELS]
    return num_targets({LABELS: labels[:, 1:] if labels.ndim > 1 else labels})


def _num_whole_sequences(batch: Batch) -> float:
    """Of a loss that is a mean over sequences as long as no label is ignored, such as one of labels and of logits."""
    if isinstance(batch, dict) and LABELS in batch:
        check_none_missing(LABELS, batch[LABELS])
    return _num_sequences(batch)


def _equal(one: float, other: float) -> bool:
    return math.isclose(one, other, rel_tol=_REL)
