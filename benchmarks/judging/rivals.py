"""Other ways to a plan over the same choices and the same price: rules of hand, annealing, evolution.

Plain FSDP     everything sharded over all devices, ZeRO 3; the fastest micro-batch and recomputation that fit
Megatron       tensor parallelism up to the devices of a node, then pipelines across nodes, no more of both than the
               model needs to fit, data parallelism over the rest (Narayanan et al., "Efficient Large-Scale Language
               Model Training on GPU Clusters Using Megatron-LM", 2021, takeaways 1 and 2 of section 3); even stages,
               ZeRO 1, sequence parallelism; micro-batch, recomputation and interleaving as is fastest. The rule is
               of dense models: it does not divide experts
Annealing      Kirkpatrick et al., "Optimization by Simulated Annealing" (1983): from a plan to a random neighbour;
               one that is slower by d (as a share) is taken with probability exp(-d / t), t falling geometrically
Evolution      Real et al., "Regularized Evolution for Image Classifier Architecture Search" (2019): the best of a
               random sample of the population has a changed child, and the oldest dies
"""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from benchmarks.judging.choice import Choice, Facts, is_legal
from benchmarks.judging.edits import edits, even_cuts
from benchmarks.judging.enumeration import factors_of
from costmodels.vocabulary.choices import Recompute
from costmodels.vocabulary.schedules import ScheduleName

# Temperatures as shares of the step time: at first a plan twice as slow is taken now and then, at last hardly any.
HOT, COLD = 0.3, 0.002
POPULATION, SAMPLE = 24, 6
TRIES = 60  # to find a first plan that fits
MOST_DRAWS = 10_000

# A choice -> its step time, infinite where it does not fit or has no price.
PriceOf = Callable[[Choice], float]


@dataclass
class Budget:
    """A price that counts how often it is asked for something new, and keeps the best."""

    price_of: PriceOf
    most: int
    known: dict[Choice, float] = field(default_factory=dict[Choice, float])

    def price(self, choice: Choice) -> float:
        """Of ``choice``."""
        if choice not in self.known:
            self.known[choice] = self.price_of(choice)
        return self.known[choice]

    @property
    def is_spent(self) -> bool:
        """Whether all evaluations are used."""
        return len(self.known) >= self.most

    @property
    def best(self) -> tuple[float, Choice | None]:
        """The fastest so far; infinite where nothing fits."""
        if not self.known:
            return math.inf, None
        choice = min(self.known, key=lambda each: self.known[each])
        return (self.known[choice], choice) if self.known[choice] < math.inf else (math.inf, None)


def plain_fsdp(facts: Facts) -> Iterator[Choice]:
    """ZeRO 3 over all devices: every micro-batch and recomputation, of which a user takes the fastest that fits."""
    for micro in factors_of(facts.global_batch_size):
        for mode in Recompute:
            yield _choice(facts, (facts.num_devices, 3), micro, mode)


def megatron_rule(facts: Facts, *, whole_node: bool) -> Iterator[list[Choice]]:
    """For each (tp, pp), in the order of the rule, the plans that its user would time; the first that fit are taken.

    ``whole_node``: tensor parallelism over all devices of a node; otherwise the least tp * pp that the model fits in.
    """
    n = facts.num_devices
    tensor = [d for d in factors_of(n) if d <= facts.devices_per_node]
    pairs = [] if whole_node else [(tp, 1) for tp in tensor[:-1]]
    pairs += [(tensor[-1], pp) for pp in factors_of(n // tensor[-1])]
    pipelines = (ScheduleName.ONE_F_ONE_B, 1), (ScheduleName.INTERLEAVED_1F1B, 2)
    for tp, pp in pairs:
        yield [
            _choice(facts, (n // tp // pp, 1), micro, mode, (tp, pp), pipeline)
            for mode in Recompute
            for micro in (1, 2, 4, 8)
            for pipeline in pipelines[: 1 if pp == 1 else 2]
        ]


def _choice(
    facts: Facts,
    data_parallel: tuple[int, int],
    micro: int,
    mode: Recompute,
    model_parallel: tuple[int, int] = (1, 1),
    pipeline: tuple[ScheduleName, int] = (ScheduleName.ONE_F_ONE_B, 1),
) -> Choice:
    """Even stages; ``data_parallel`` is degree and ZeRO stage, ``model_parallel`` tensor and pipeline degree."""
    dp, zero = data_parallel
    tp, pp = model_parallel
    schedule, virtual = pipeline
    cut = even_cuts(pp * virtual, facts)
    shard = dp if zero else 1
    return Choice(
        pp=pp, dp_replicate=dp // shard, dp_shard=shard, cp=1, tp=tp, ep=1, zero_stage=zero if dp > 1 else 0,
        micro_batch_size=micro, schedule=schedule, virtual_stages=virtual, sequence_parallel=tp > 1,
        starts=cut[-1] if cut else (), modes=facts.modes(mode),
    )  # fmt: skip


def best_of(choices: Iterable[Choice], facts: Facts, price_of: PriceOf) -> tuple[float, Choice | None]:
    """The fastest that is legal and fits."""
    known = [(price_of(choice), choice) for choice in choices if choice.starts and is_legal(choice, facts)]
    fitting = [(seconds, choice) for seconds, choice in known if seconds < math.inf]
    return min(fitting, key=lambda pair: pair[0], default=(math.inf, None))


def first_of(sets: Iterable[list[Choice]], facts: Facts, price_of: PriceOf) -> tuple[float, Choice | None]:
    """The fastest of the first set in which any fits."""
    for choices in sets:
        found = best_of(choices, facts, price_of)
        if found[1] is not None:
            return found
    return math.inf, None


def annealing(facts: Facts, budget: Budget, draw: random.Random) -> tuple[float, Choice | None]:
    """Until the budget is spent."""
    now, idle = _first(facts, budget, draw), 0
    while not budget.is_spent and idle < budget.most:
        before = len(budget.known)
        share = len(budget.known) / budget.most
        temperature = HOT * (COLD / HOT) ** share
        then = _some_kind(now, facts, draw)
        worse = budget.price(then) / budget.price(now) - 1 if budget.price(now) < math.inf else 0.0
        if worse <= 0 or draw.random() < math.exp(-worse / temperature):
            now = then
        idle = 0 if len(budget.known) > before else idle + 1
    return budget.best


def evolution(facts: Facts, budget: Budget, draw: random.Random) -> tuple[float, Choice | None]:
    """Until the budget is spent."""
    population = deque(_first(facts, budget, draw) for _ in range(POPULATION))
    idle = 0
    while not budget.is_spent and idle < budget.most:
        before = len(budget.known)
        parent = min(draw.sample(list(population), SAMPLE), key=budget.price)
        child = _some_kind(parent, facts, draw)
        budget.price(child)
        population.append(child)
        population.popleft()
        idle = 0 if len(budget.known) > before else idle + 1
    return budget.best


def _some_kind(choice: Choice, facts: Facts, draw: random.Random) -> Choice:
    """A random neighbour: first the kind of change, so that the many changes of one kind do not crowd out the rest."""
    found = edits(choice, facts)
    if not found:
        return choice
    kind = draw.choice(sorted({edit.kind for edit in found}))
    return draw.choice([edit.choice for edit in found if edit.kind == kind])


def _first(facts: Facts, budget: Budget, draw: random.Random) -> Choice:
    """A random plan, one that fits if one is found soon."""
    found = _random(facts, draw)
    for _ in range(TRIES):
        if budget.price(found) < math.inf or budget.is_spent:
            break
        found = _random(facts, draw)
    return found


def _random(facts: Facts, draw: random.Random) -> Choice:
    """Random degrees over plain data parallelism."""
    n = facts.num_devices
    for _ in range(MOST_DRAWS):
        tp = draw.choice([d for d in factors_of(n) if d <= facts.devices_per_node])
        pp = draw.choice([d for d in factors_of(n // tp) if d <= facts.num_units])
        mode, zero = draw.choice(list(Recompute)), draw.choice((0, 1, 2, 3))
        dp, micro = n // tp // pp, draw.choice((1, 1, 2, 4))
        found = _choice(facts, (dp, zero), micro, mode, (tp, pp))
        if found.starts and is_legal(found, facts):
            return found
    raise ValueError(f"no legal plan in {MOST_DRAWS} draws")
