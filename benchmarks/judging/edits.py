"""Every small change of a plan: a border, a degree, a size, a ZeRO stage, a schedule, what a block recomputes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import permutations, product
from math import gcd
from typing import NamedTuple

from benchmarks.judging.choice import METHODS, Choice, Facts, Share, is_legal
from costmodels.vocabulary.choices import Recompute
from costmodels.vocabulary.schedules import SCHEDULES, ScheduleName

AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")


class Edit(NamedTuple):
    """One change: its kind, what it does, and what it leads to."""

    kind: str
    text: str
    choice: Choice


def edits(choice: Choice, facts: Facts) -> list[Edit]:
    """Every legal neighbour of ``choice``, each once."""
    everything = (
        *borders(choice, facts),
        *degrees(choice, facts),
        *experts(choice, facts),
        *micro_batches(choice, facts),
        *shares(choice, facts),
        *zero_stages(choice),
        *schedules(choice, facts),
        *sequence_parallel(choice),
        *context_methods(choice),
        *group_orders(choice),
        *recomputation(choice, facts),
    )
    return _once((edit for edit in everything if is_legal(edit.choice, facts)), choice)


def borders(choice: Choice, facts: Facts) -> Iterator[Edit]:
    """One module over one border, either way."""
    for place in range(1, choice.num_stages):
        for step in (-1, 1):
            start = choice.starts[place] + step
            starts = (*choice.starts[:place], start, *choice.starts[place + 1 :])
            ends = (*starts[1:], facts.num_units)
            if all(a < b for a, b in zip(starts, ends, strict=True)):
                unit = start if step < 0 else start - 1
                word = f"{facts.modules[unit][0]} from stage {place - (step < 0)} to {place - (step > 0)}"
                yield Edit("border", word, choice._replace(starts=starts))


def degrees(choice: Choice, facts: Facts) -> Iterator[Edit]:
    """A prime factor of one degree given to another; what has to follow, in every way that it can follow."""
    for giving in AXES:
        for factor in primes(getattr(choice, giving)):
            for taking in AXES:
                if taking == giving:
                    continue
                moved = choice._replace(
                    **{giving: getattr(choice, giving) // factor, taking: getattr(choice, taking) * factor}
                )
                text = f"{giving} / {factor}, {taking} * {factor}"
                yield from (Edit("degree", text, each) for each in _followed(moved, choice, facts))


def experts(choice: Choice, facts: Facts) -> Iterator[Edit]:
    """Expert parallelism, which adds no ranks."""
    for factor in primes(facts.num_experts):
        yield Edit("degree", f"ep * {factor}", choice._replace(ep=choice.ep * factor))
        if choice.ep % factor == 0:
            yield Edit("degree", f"ep / {factor}", choice._replace(ep=choice.ep // factor))


def micro_batches(choice: Choice, facts: Facts) -> Iterator[Edit]:
    """Twice and half the size, or by the least factor that the batch allows."""
    sizes = [share.size for share in choice.shares] or [choice.micro_batch_size]
    for factor in primes(facts.num_microbatches(choice)):
        yield Edit("micro-batch", f"* {factor}", _with_sizes(choice, [size * factor for size in sizes]))
    for factor in primes(gcd(*sizes)):
        yield Edit("micro-batch", f"/ {factor}", _with_sizes(choice, [size // factor for size in sizes]))


def shares(choice: Choice, facts: Facts) -> Iterator[Edit]:
    """A few sequences of one group's replicas given to another's, and all replicas alike.

    Replicas that are alike give as well, with micro-batches as large, twice and four times as large.
    """
    starts = [choice] if choice.shares else list(_equal_shares(choice, facts))
    for start in starts:
        for giving, taking in permutations(range(len(start.shares)), 2):
            one, other = start.shares[giving], start.shares[taking]
            step = gcd(one.replicas, other.replicas)
            sizes = [share.size for share in start.shares]
            sizes[giving] -= other.replicas // step
            sizes[taking] += one.replicas // step
            if sizes[giving] > 0:
                yield Edit("shares", f"of {one.group} to {other.group}", _with_sizes(start, sizes))
    for size in sorted({share.size for share in choice.shares}):
        yield Edit("shares", "all alike", choice._replace(shares=(), micro_batch_size=size))


def _equal_shares(choice: Choice, facts: Facts) -> Iterator[Choice]:
    """``choice``, whose replicas are alike, as shares of one size; nothing where a replica would span groups."""
    each = choice.cp * choice.tp
    if choice.pp > 1 or any(count % each for _, count in facts.groups):
        return
    for factor in (1, 2, 4):
        size = factor * choice.micro_batch_size
        parts = tuple(Share(name, count // each, size) for name, count in facts.groups)
        yield choice._replace(shares=parts, micro_batch_size=size)


def _with_sizes(choice: Choice, sizes: list[int]) -> Choice:
    """``choice`` with micro-batches of the one size, or one for each of its shares."""
    parts = tuple(share._replace(size=size) for share, size in zip(choice.shares, sizes, strict=False))
    return choice._replace(micro_batch_size=max(sizes), shares=parts)


def zero_stages(choice: Choice) -> Iterator[Edit]:
    """Every stage of ZeRO; 0 makes replicas of all data-parallel ranks, the rest shards of them."""
    for stage in range(4):
        changed = choice._replace(zero_stage=stage)
        yield Edit("ZeRO", str(stage), changed)
        if stage == 0:
            yield Edit("ZeRO", "0, replicas alone", changed._replace(dp_replicate=choice.dp, dp_shard=1))
        elif choice.dp_shard == 1:
            yield Edit("ZeRO", f"{stage}, shards alone", changed._replace(dp_replicate=1, dp_shard=choice.dp))


def schedules(choice: Choice, facts: Facts) -> Iterator[Edit]:
    """Every schedule with as many stages a rank, one more or fewer, twice or half as many."""
    if choice.pp == 1:
        return
    for name, rules in SCHEDULES.items():
        if not rules.in_torch:
            continue
        v = choice.virtual_stages
        for virtual in sorted({1, 2, v - 1, v, v + 1, 2 * v, v // 2}):
            if virtual < 1:
                continue
            changed = _under(choice, name, virtual, facts)
            cuts = [choice.starts] if virtual == v else even_cuts(changed.num_stages, facts)
            for starts in cuts:
                yield Edit("schedule", f"{name.value} x{virtual}", changed._replace(starts=starts))


def sequence_parallel(choice: Choice) -> Iterator[Edit]:
    """Activations between blocks whole or split."""
    flag = not choice.sequence_parallel
    yield Edit("sequence parallel", "on" if flag else "off", choice._replace(sequence_parallel=flag))


def context_methods(choice: Choice) -> Iterator[Edit]:
    """Another way for ranks to share sequences."""
    yield from (Edit("context method", name, choice._replace(cp_method=name)) for name in METHODS)


def group_orders(choice: Choice) -> Iterator[Edit]:
    """Unlike devices in the reverse order of the pipeline; or all counted as alike."""
    if choice.groups:
        yield Edit("groups", "reversed", choice._replace(groups=choice.groups[::-1]))
        yield Edit("groups", "all alike", choice._replace(groups=()))


def recomputation(choice: Choice, facts: Facts) -> Iterator[Edit]:
    """Another mode for all blocks, for those of one stage, and for one block."""
    for mode in Recompute:
        yield Edit("recompute", f"{mode.value}: every block", choice._replace(modes=facts.modes(mode)))
    ends = (*choice.starts[1:], facts.num_units)
    for stage, (start, end) in enumerate(zip(choice.starts, ends, strict=True)):
        for mode in Recompute:
            changed = _with_mode(choice, facts, mode, range(start, end))
            yield Edit("recompute of a stage", f"{mode.value}: stage {stage}", changed)
    for unit, block in enumerate(facts.blocks):
        for mode in Recompute:
            if block is not None:
                changed = _with_mode(choice, facts, mode, range(unit, unit + 1))
                yield Edit("recompute of a block", f"{mode.value}: {block}", changed)


def even_cuts(num_stages: int, facts: Facts) -> list[tuple[int, ...]]:
    """Equal numbers of blocks, larger stages first or last; and equal numbers of units. None: too many stages."""
    if num_stages > facts.num_units:
        return []
    blocks = [unit for unit, block in enumerate(facts.blocks) if block is not None]
    found = [tuple(facts.num_units * stage // num_stages for stage in range(num_stages))]
    if num_stages <= len(blocks):
        up = [len(blocks) * stage // num_stages for stage in range(num_stages)]
        down = [-(-len(blocks) * stage // num_stages) for stage in range(num_stages)]
        found += [(0, *(blocks[first] for first in firsts[1:])) for firsts in (up, down)]
    return list(dict.fromkeys(found))


def primes(number: int) -> list[int]:
    """Prime factors of ``number``, each once."""
    found: list[int] = []
    factor = 2
    while number > 1:
        if number % factor == 0:
            found.append(factor)
            while number % factor == 0:
                number //= factor
        factor += 1
    return found


def _followed(moved: Choice, before: Choice, facts: Facts) -> Iterator[Choice]:
    """``moved`` with expert degree, ZeRO stage, micro-batch, schedule, cut and sequence parallelism that go with it."""
    moved = moved._replace(ep=gcd(moved.ep, moved.dp_shard * moved.cp))
    if moved.dp != before.dp:  # other replicas are other shares
        moved = moved._replace(shares=())
    shards = [0] if moved.dp_shard == 1 else [1, 2, 3]
    if moved.dp_shard == 1 and moved.cp > 1 and before.zero_stage:
        shards.append(before.zero_stage)
    sizes = {before.micro_batch_size, before.micro_batch_size * before.dp // moved.dp, 1}
    flags = [False, True] if moved.tp > 1 else [False]
    methods = METHODS if moved.cp > 1 == before.cp else (before.cp_method if moved.cp > 1 else METHODS[0],)
    for zero, size, flag, method in product(shards, sorted(sizes - {0}), flags, methods):
        part = moved._replace(zero_stage=zero, micro_batch_size=size, sequence_parallel=flag, cp_method=method)
        yield from _piped(part, before, facts)


def _piped(choice: Choice, before: Choice, facts: Facts) -> Iterator[Choice]:
    if choice.pp == before.pp:
        yield choice
        return
    choice = choice._replace(groups=(), shares=())
    if choice.pp == 1:
        yield choice._replace(schedule=ScheduleName.ONE_F_ONE_B, virtual_stages=1, starts=(0,))
        return
    for name, virtual in {(before.schedule, before.virtual_stages), (ScheduleName.ONE_F_ONE_B, 1)}:
        changed = _under(choice, name, virtual, facts)
        for starts in even_cuts(changed.num_stages, facts):
            yield changed._replace(starts=starts)


def _under(choice: Choice, name: ScheduleName, virtual: int, facts: Facts) -> Choice:
    """``choice`` with another schedule; one that splits backward passes shards and recomputes no more than it can."""
    changed = choice._replace(schedule=name, virtual_stages=virtual)
    if name.rules.splits_backward:
        return changed._replace(modes=facts.modes(Recompute.NONE), zero_stage=min(1, choice.zero_stage))
    return changed


def _with_mode(choice: Choice, facts: Facts, mode: Recompute, units: range) -> Choice:
    modes = list(choice.modes)
    for unit in units:
        if facts.blocks[unit] is not None:
            modes[unit] = mode
    return choice._replace(modes=tuple(modes))


def _once(found: Iterable[Edit], original: Choice) -> list[Edit]:
    by_choice: dict[Choice, Edit] = {}
    for edit in found:
        by_choice.setdefault(edit.choice, edit)
    by_choice.pop(original, None)
    return list(by_choice.values())
