"""Every plan of a small instance, from the definition of a plan alone: no list of the search is read.

mesh       every (pp, dp_replicate, dp_shard, cp, tp) whose product is the number of devices, and every ep inside
sizes      every micro-batch that divides a rank's part of the global batch; every stage of ZeRO
pipeline   every schedule with every number of stages that the model's units allow, every cut into stages
blocks     every recomputation
placing    sequence parallelism on or off; of unlike devices every order of the groups, every list of sizes of
           micro-batches of the replicas on each, or all taken as alike
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations, permutations, product
from math import comb
from operator import mul

from benchmarks.judging.choice import METHODS, Choice, Facts, Share, is_legal
from costmodels.vocabulary.choices import Recompute
from costmodels.vocabulary.schedules import SCHEDULES, ScheduleName

Groups = Sequence[tuple[str, int]]  # name and number of devices of each group of unlike devices


def layouts(facts: Facts, groups: Groups = ()) -> Iterator[Choice]:
    """Every choice but cuts and recomputation; each has some legal cut, and recomputes nothing."""
    for pp, replicate, shard, cp, tp in ordered_factors(facts.num_devices, 5):
        for ep in factors_of(facts.num_experts):
            for micro in factors_of(facts.global_batch_size):
                for zero in range(4):
                    for schedule, virtual in pipelines(pp, facts):
                        for flag, method in product((False, True), METHODS):
                            choice = Choice(
                                pp, replicate, shard, cp, tp, ep, zero, micro, schedule, virtual, flag,
                                tuple(range(pp * virtual)), facts.modes(Recompute.NONE), cp_method=method,
                            )  # fmt: skip
                            if is_legal(choice, facts):
                                yield choice
                                yield from over_groups(choice, groups)
    yield from with_shares(facts, groups)


def with_shares(facts: Facts, groups: Groups) -> Iterator[Choice]:
    """Every choice without a pipeline whose replicas on each of ``groups`` have a size of micro-batch of their own."""
    if not groups:
        return
    for replicate, shard, cp, tp in ordered_factors(facts.num_devices, 4):
        if any(count % (cp * tp) for _, count in groups):
            continue
        replicas = [count // (cp * tp) for _, count in groups]
        for sizes in lists_of_sizes(facts.global_batch_size, replicas):
            shares = tuple(Share(name, n, size) for (name, _), n, size in zip(groups, replicas, sizes, strict=True))
            others = product(factors_of(facts.num_experts), range(4), (False, True), METHODS)
            for ep, zero, flag, method in others:
                choice = Choice(
                    1, replicate, shard, cp, tp, ep, zero, max(sizes), ScheduleName.ONE_F_ONE_B, 1, flag, (0,),
                    facts.modes(Recompute.NONE), cp_method=method, shares=shares,
                )  # fmt: skip
                if is_legal(choice, facts):
                    yield choice


def lists_of_sizes(global_batch_size: int, replicas: Sequence[int]) -> list[tuple[int, ...]]:
    """Every size of each group's micro-batches of which some number makes up the batch."""
    most = [(global_batch_size - sum(replicas) + count) // count for count in replicas]
    listed = product(*(range(1, size + 1) for size in most))
    return [sizes for sizes in listed if global_batch_size % sum(map(mul, replicas, sizes)) == 0]


def ordered_factors(number: int, count: int) -> Iterator[tuple[int, ...]]:
    """Every way to write ``number`` as a product of ``count`` factors, in every order."""
    if count == 1:
        yield (number,)
        return
    for first in factors_of(number):
        for rest in ordered_factors(number // first, count - 1):
            yield (first, *rest)


def factors_of(number: int) -> list[int]:
    """Every divisor."""
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]


def pipelines(pp: int, facts: Facts) -> list[tuple[ScheduleName, int]]:
    """Every schedule that torch has, with every number of stages a rank that leaves each stage a unit."""
    if pp == 1:
        return [(ScheduleName.ONE_F_ONE_B, 1)]
    names = [name for name, rules in SCHEDULES.items() if rules.in_torch]
    return [(name, virtual) for name in names for virtual in range(1, facts.num_units // pp + 1)]


def over_groups(choice: Choice, groups: Groups) -> Iterator[Choice]:
    """``choice`` with its pipeline laid over unlike devices, whole ranks on each group, in every order."""
    each = choice.world_size // choice.pp
    if choice.pp == 1 or not groups or any(count % each for _, count in groups):
        return
    for order in permutations(groups):
        yield choice._replace(groups=tuple(name for name, count in order for _ in range(count // each)))


def recomputations(facts: Facts) -> list[tuple[Recompute, ...]]:
    """Every recomputation of every unit."""
    num_blocks = sum(block is not None for block in facts.blocks)
    found: list[tuple[Recompute, ...]] = []
    for chosen in product(Recompute, repeat=num_blocks):
        of_blocks = iter(chosen)
        found.append(tuple(Recompute.NONE if block is None else next(of_blocks) for block in facts.blocks))
    return found


def cuts(choice: Choice, facts: Facts) -> Iterator[tuple[int, ...]]:
    """Every cut of the units into its stages."""
    for inner in combinations(range(1, facts.num_units), choice.num_stages - 1):
        yield (0, *inner)


def num_cuts(choice: Choice, facts: Facts) -> int:
    """How many there are."""
    return comb(facts.num_units - 1, choice.num_stages - 1)
