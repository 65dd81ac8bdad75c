"""What is wrong with a set-up that somebody chose: rules, each with a number from the set-up's own price.

The changes that a finding names are priced, too: of the same layout with less recomputation, or with other stages.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum

from costmodels.vocabulary.choices import Offload, Recompute
from costmodels.vocabulary.terms import Term
from planner.api import Question, answer_of
from planner.api.pinned import PricedRun
from planner.errors import InfeasibleError
from planner.evaluation.evaluator import Evaluated
from planner.formats.frameworks import RULES
from planner.layout.deadline import Deadline
from planner.layout.layout import Pins
from planner.plan.schema import Plan
from planner.problem import EVEN_RISK
from planner.request import DEFAULT_RISK, Request
from planner.solver.cutting import Pricer, best_cut
from planner.solver.dynamic_program import DynamicProgramSolver
from planner.table.cost_table import CostTable

GIB = 2**30
# Shares of a step below which nothing is said: of a bubble or of communication, and of what a change would save.
NOTABLE, WORTH_A_CHANGE = 0.05, 0.01
# Communication that computation does not hide, and what it is called.
_COMMUNICATION = (Term.TENSOR, Term.CONTEXT, Term.EXPERT, Term.DATA, Term.SEND)


class Rule(StrEnum):
    """What may be wrong."""

    DOES_NOT_FIT = "does not fit"
    BUBBLE = "bubble"
    COMMUNICATION = "exposed communication"
    RECOMPUTATION = "needless recomputation"
    TENSOR_OVER_NODES = "tensor parallelism over nodes"
    UNUSED_DEVICES = "unused devices"
    STAGES = "unbalanced stages"


@dataclass(frozen=True)
class Finding:
    """Something wrong. ``share``: of a step that it takes or would save, of memory that lacks, of devices not used."""

    rule: Rule
    share: float
    says: str


def risk_of(priced: PricedRun) -> float:
    """The risk of not fitting that a change may have: that of the set-up itself, or the default where that is more."""
    assert priced.plan.prediction is not None
    fits = priced.plan.prediction.fit_probability
    return DEFAULT_RISK if fits is None or 1 - fits > EVEN_RISK else max(DEFAULT_RISK, 1 - fits)


def findings(priced: PricedRun) -> tuple[Finding, ...]:
    """Everything that the rules find, what does not fit first, then by share. Changes have the risk of ``risk_of``."""
    band = priced.target.recipe.memory_band
    factor = 1.0 if band is None else band.factor(risk_of(priced))
    table = priced.evaluator.table
    careful = replace(table, cluster=table.cluster.with_memory_factor(factor))
    found = [
        *_memory(priced),
        *_bubble(priced),
        *_communication(priced),
        *_recomputation(priced, careful),
        *_tensor_over_nodes(priced),
        *_unused(priced),
        *_stages(priced, careful),
    ]
    return tuple(sorted(found, key=lambda each: (each.rule is not Rule.DOES_NOT_FIT, -each.share)))


def better_plan(priced: PricedRun, deadline: Deadline) -> Plan | None:
    """The fastest plan for the same training on the same devices that the same framework can run.

    None where it is no faster than a set-up that fits. Its risk of not fitting is ``risk_of``. Optimiser states leave
    the devices only where the set-up's own do, and nothing fits otherwise. InfeasibleError, NoLayoutError and
    TimeLimitError where there is no plan.
    """
    run = priced.run
    try:
        plan = _best(priced, deadline, Pins())
    except InfeasibleError:
        if run.layout.offload is Offload.NONE:
            raise
        plan = _best(priced, deadline, Pins(offload=run.layout.offload))
    assert plan.prediction is not None
    if priced.found.fits and plan.prediction.step_time_s >= priced.found.step_time_s * (1 - WORTH_A_CHANGE / 10):
        return None
    return plan


def _best(priced: PricedRun, deadline: Deadline, pins: Pins) -> Plan:
    run, training = priced.run, priced.run.training
    request = Request(
        model=run.model, num_devices=run.layout.mesh.world_size, seq_len=training.seq_len,
        global_batch_size=training.global_batch_size, precision=training.precision, optimizer=training.optimizer,
        framework=run.framework, pins=pins, memory_risk=risk_of(priced), may_idle=False,
    )  # fmt: skip
    answer = answer_of(Question(request, priced.target, training, ()).run_by(run.framework), deadline, brief=True)
    if answer.interrupted:
        raise KeyboardInterrupt
    return answer.plan


# -- rules --------------------------------------------------------------------------------------


def _memory(priced: PricedRun) -> list[Finding]:
    found = priced.found
    pairs = list(zip(found.ledgers, found.capacity_bytes, strict=True))
    worst = max(range(len(pairs)), key=lambda rank: pairs[rank][0].total_bytes / pairs[rank][1])
    need, room = pairs[worst][0].total_bytes, pairs[worst][1]
    if found.fits:
        return []
    if found.fits_devices:
        assert found.host is not None
        return [Finding(Rule.DOES_NOT_FIT, found.host.share - 1, "its fullest node needs more memory than it has")]
    text = (
        f"pipeline rank {worst} needs {need / GIB:.1f} GiB of a device's {room / GIB:.1f}: {(need - room) / GIB:.1f} "
        "GiB too much"
    )
    return [Finding(Rule.DOES_NOT_FIT, need / room - 1, text)]


def _bubble(priced: PricedRun) -> list[Finding]:
    layout = priced.run.layout
    share = priced.found.breakdown[Term.BUBBLE] / priced.found.step_time_s
    if share < NOTABLE:
        return []
    text = (
        f"{share:.1%} of a step is the pipeline's bubble: {layout.num_microbatches} micro-batches over "
        f"{layout.mesh.pp} ranks of {layout.virtual_stages} stages each"
    )
    return [Finding(Rule.BUBBLE, share, text)]


def _communication(priced: PricedRun) -> list[Finding]:
    step_s = priced.found.step_time_s
    shares = {term: priced.found.breakdown.get(term, 0.0) / step_s for term in _COMMUNICATION}
    return [
        Finding(
            Rule.COMMUNICATION,
            share,
            f"{share:.1%} of a step is {term.label.removesuffix(', exposed')} that nothing hides",
        )
        for term, share in shares.items()
        if share >= NOTABLE
    ]


def _recomputation(priced: PricedRun, careful: CostTable) -> list[Finding]:
    """Less recomputation of all blocks alike, in the ways that the framework has, with the same stages."""
    run, found = priced.run, priced.found
    mode = found.only_mode
    if mode in (None, Recompute.NONE):
        return []
    rules = RULES.get(run.framework)
    known = tuple(Recompute) if rules is None else rules.abilities.recompute
    others = [each for each in (Recompute.NONE, Recompute.SELECTIVE) if each in known and each is not mode]
    tried = {each: Pricer(careful, run.layout._replace(recompute=each)).price(found.starts) for each in others}
    fitting = {each: priced_as.step_time_s for each, priced_as in tried.items() if priced_as is not None}
    best = min(fitting, key=lambda each: fitting[each], default=None)
    if best is None:
        return []
    saved = 1 - fitting[best] / found.step_time_s
    text = f"memory does not need recomputation {mode}: with {best} it fits, and a step takes {saved:.1%} less"
    return [Finding(Rule.RECOMPUTATION, saved, text)] if saved >= WORTH_A_CHANGE else []


def _tensor_over_nodes(priced: PricedRun) -> list[Finding]:
    tp, node = priced.run.layout.mesh.tp, priced.target.cluster.devices_per_node
    if tp <= node:
        return []
    share = priced.found.breakdown[Term.TENSOR] / priced.found.step_time_s
    text = f"tensor parallelism of {tp} crosses nodes of {node} GPUs: its communication is {share:.1%} of a step"
    return [Finding(Rule.TENSOR_OVER_NODES, share, text)]


def _unused(priced: PricedRun) -> list[Finding]:
    used, node = priced.run.layout.mesh.world_size, priced.target.cluster.profile.node.num_devices
    left = -used % node
    if left == 0:
        return []
    share = left / (used + left)
    text = f"{used} GPUs leave {left} of the {used + left} GPUs of their nodes unused"
    return [Finding(Rule.UNUSED_DEVICES, share, text)]


def _stages(priced: PricedRun, careful: CostTable) -> list[Finding]:
    """Other cuts of the same layout: what embedding and head add to the end stages is made up for by fewer blocks."""
    run, found = priced.run, priced.found
    rules = RULES.get(run.framework)
    mode = found.only_mode
    if run.layout.mesh.pp == 1 or mode is None or (rules is not None and rules.cut is not None):
        return []
    best = best_cut(Pricer(careful, run.layout._replace(recompute=mode)), DynamicProgramSolver(), None).best
    if best is None:
        return []
    saved = 1 - best.step_time_s / found.step_time_s
    if saved < WORTH_A_CHANGE:
        return []
    text = (
        f"its stages hold {_blocks(priced, found)} blocks beside embedding and head; with {_blocks(priced, best)} "
        f"a step takes {saved:.1%} less"
    )
    return [Finding(Rule.STAGES, saved, text)]


def _blocks(priced: PricedRun, found: Evaluated) -> str:
    """Blocks of the stages, long lists by their ends."""
    units = priced.target.graph.units
    ends = [*found.starts[1:], len(units)]
    counts = [sum(u.is_block for u in units[a:b]) for a, b in zip(found.starts, ends, strict=True)]
    if len(counts) <= 8:
        return ", ".join(map(str, counts))
    return f"{', '.join(map(str, counts[:3]))}, ..., {', '.join(map(str, counts[-3:]))}"
