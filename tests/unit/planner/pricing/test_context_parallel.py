"""Ways of context parallelism: bytes, messages and seconds worked out by hand, and which one is taken where."""

from collections import Counter
from functools import cache

import pytest

from costmodels.recipe import load_recipe
from costmodels.vocabulary.choices import ContextMethod, Recompute
from costmodels.vocabulary.terms import Holding, Pass, Time
from costmodels.vocabulary.workload import CollectiveKind
from planner.axes.framework import Framework
from planner.axes.lowered import RankWork
from planner.axes.registry import WorkLowering, work_fields
from planner.axes.traced import representatives, whole_work
from planner.graph.node_operators import num_heads
from planner.layout.decided import NOTHING
from planner.layout.layout import Pins
from planner.pricing.machine import Machine
from planner.pricing.placements import Decision, decide
from planner.pricing.rows import work_rows
from planner.solver.cp_sat import CpSatSolver
from planner.table.keys import TensorSplit, WorkKey
from tests.planning import graph_of, problem_of
from tests.unit.costmodels.toy_cluster import BANDWIDTH, NVLINK, PEAK_BF16, make_cluster

MODEL, BLOCK = "llama3-8b", 1  # kinds of units: embedding, block, head
HEADS, KV_HEADS, WIDTH, BF16 = 32, 8, 128, 2
WHOLE, SPLIT = TensorSplit(1, False), TensorSplit(4, False)
TOY = Machine(make_cluster(8))  # one node: no latency, no launches
OVERLAPPABLE, SLOWDOWN = 0.75, 0.2
GATHER, RING, EXCHANGE = ContextMethod
# Checkpoints that run a whole block again.
RECIPE = load_recipe().model_copy(update={"stops_recomputation_early": False})
FRAMEWORK = Framework.of(RECIPE, "bf16")


@cache
def decision_of(seq_len: int, split: TensorSplit) -> Decision:
    found = decide(graph_of(MODEL, seq_len), split, NOTHING, TOY, FRAMEWORK, CpSatSolver().solve_placement)
    assert found is not None
    return found


def lowered(seq_len: int, key: WorkKey) -> RankWork:
    graph = graph_of(MODEL, seq_len)
    whole = whole_work(graph, representatives(graph)[BLOCK])
    return WorkLowering(whole, FRAMEWORK).under(work_fields(key), decision_of(seq_len, key.tensor)[BLOCK])


class Row:
    """The prices of a block under one key on the toy cluster."""

    def __init__(self, seq_len: int, key: WorkKey, mode: Recompute = Recompute.NONE) -> None:
        graph, decisions = graph_of(MODEL, seq_len), {key.tensor: decision_of(seq_len, key.tensor)}
        rows = work_rows(graph, decisions, [key], TOY, FRAMEWORK)
        at = list(Recompute).index(mode)
        self._time_s, self._num_bytes = rows.time_s[0, at, BLOCK], rows.num_bytes[0, at, BLOCK]

    def seconds(self, time: Time) -> float:
        return float(self._time_s[list(Time).index(time)])

    def held(self, holding: Holding) -> float:
        return float(self._num_bytes[list(Holding).index(holding)])


@pytest.mark.parametrize("tp", [1, 4])
@pytest.mark.parametrize("cp", [2, 8])
def test_messages_and_their_bytes_follow_from_the_definitions(cp: int, tp: int) -> None:
    """Of one sequence, on one of cp ranks: kind, pass, number of messages, bytes of each as its kind counts them."""
    s = 1024
    queries = s // cp * HEADS // tp * WIDTH * BF16  # of a rank, and as many of attention's output
    keys = s // cp * KV_HEADS // tp * WIDTH * BF16  # and as many of values
    forward, backward = Pass.FORWARD, Pass.BACKWARD
    expected = {
        GATHER: {
            # Keys and values, whole on every rank; their gradients, whole, are reduced to each rank's part.
            (CollectiveKind.ALL_GATHER, forward, 1, keys * cp): 2,
            (CollectiveKind.ALL_GATHER, backward, 1, keys * cp): 2,
            (CollectiveKind.REDUCE_SCATTER, backward, 1, keys * cp): 2,
        },
        RING: {
            # Backward: keys and values first, their gradients last, both together between.
            (CollectiveKind.RING_SHIFT, forward, cp - 1, 2 * keys): 1,
            (CollectiveKind.RING_SHIFT, backward, 1, 2 * keys): 2,
            **({(CollectiveKind.RING_SHIFT, backward, cp - 2, 4 * keys): 1} if cp > 2 else {}),
        },
        EXCHANGE: {
            (CollectiveKind.ALL_TO_ALL, run, 1, size): 2 for run in Pass for size in (queries, keys)
        },
    }  # fmt: skip
    split = TensorSplit(tp, False)
    for method, messages in expected.items():
        work = lowered(s, WorkKey(split, 1, cp, 1, method))
        assert work.part_of_sequence == 1 / cp
        found = Counter(
            (each.kind, each.runs_in, each.repeats, each.num_bytes(work.unit.tensors) * work.part_of_sequence)
            for each in work.collectives
            if each.group.num_ranks == cp and each.group.stride == tp and each.term.value == "context_parallel"
        )
        assert found == messages, method


def attention_s(seq_len: int, cp: int, run: Pass) -> float:
    """Of a rank's part: two products forward, two more for each operand's gradients and the scores' again backward.

    At a quarter of the peak, as the toy device has it. FlashAttention's backward: 2.5 times its forward.
    """
    forward_flops = 2 * 2 * seq_len * seq_len * HEADS * WIDTH / cp
    flops = forward_flops * (1 if run is Pass.FORWARD else 2)
    return flops / (0.25 * PEAK_BF16)


@pytest.mark.parametrize(("seq_len", "cp"), [(2048, 8), (8192, 4)])
@pytest.mark.parametrize("micro_batch_size", [1, 2])
def test_seconds_are_those_of_the_definitions(seq_len: int, cp: int, micro_batch_size: int) -> None:
    """On 8 devices of one node without latency, whose links carry ``NVLINK`` bytes a second each way."""
    b, share = micro_batch_size, (cp - 1) / cp
    keys, queries = (seq_len // cp * heads * WIDTH * BF16 * b for heads in (KV_HEADS, HEADS))
    rows = {method: Row(seq_len, WorkKey(WHOLE, 1, cp, b, method)) for method in ContextMethod}
    # A ring of cp ranks sends (cp - 1) / cp of what is gathered.
    gather_s = share * keys * cp / NVLINK
    assert rows[GATHER].seconds(Time.CONTEXT_FORWARD) == pytest.approx(2 * gather_s)
    assert rows[GATHER].seconds(Time.CONTEXT_BACKWARD) == pytest.approx(4 * gather_s)
    # A rank keeps 1 / cp of what it has.
    exchange_s = 2 * share * (queries + keys) / NVLINK
    assert rows[EXCHANGE].seconds(Time.CONTEXT_FORWARD) == pytest.approx(exchange_s)
    assert rows[EXCHANGE].seconds(Time.CONTEXT_BACKWARD) == pytest.approx(exchange_s)
    # Messages run beside cp blocks of attention, one beside each, and one block of forward has none. Three quarters of
    # a block can hide something; compute beside messages is slower by a fifth.
    for run, time, hiding, messages in (
        (Pass.FORWARD, Time.CONTEXT_FORWARD, Time.HIDING_FORWARD, [2] * (cp - 1)),
        (Pass.BACKWARD, Time.CONTEXT_BACKWARD, Time.HIDING_BACKWARD, [2, *[4] * (cp - 2), 2]),
    ):
        block_s = b * attention_s(seq_len, cp, run) / cp
        messages_s = [tensors * keys / NVLINK for tensors in messages]
        hidden_s = [min(message_s, OVERLAPPABLE * block_s) for message_s in messages_s]
        exposed_s = sum(messages_s) - (1 - SLOWDOWN) * sum(hidden_s)
        assert rows[RING].seconds(time) == pytest.approx(exposed_s)
        assert rows[RING].seconds(hiding) == pytest.approx(sum(hidden_s) / OVERLAPPABLE)
        assert {rows[method].seconds(hiding) for method in (GATHER, EXCHANGE)} == {0.0}


def test_blocks_cost_more_than_attention_in_one_piece() -> None:
    """cp - 1 sums in fp32, each read and written, of what a block gives in 16 bits: outputs, or three gradients."""
    seq_len, cp = 8192, 4
    ring, gather = (Row(seq_len, WorkKey(WHOLE, 1, cp, 1, method)) for method in (RING, GATHER))
    tokens, sum_bytes, rate = seq_len // cp, 4 + 4 + BF16, 0.8 * BANDWIDTH
    forward = (cp - 1) * tokens * HEADS * WIDTH * sum_bytes / rate
    backward = (cp - 1) * tokens * (HEADS + 2 * KV_HEADS) * WIDTH * sum_bytes / rate
    for time, more in ((Time.COMPUTE_FORWARD, forward), (Time.COMPUTE_BACKWARD, backward)):
        assert ring.seconds(time) - gather.seconds(time) == pytest.approx(more, rel=1e-6)


def test_recomputation_sends_again() -> None:
    for method in ContextMethod:
        key = WorkKey(WHOLE, 1, 4, 1, method)
        none, full = Row(8192, key), Row(8192, key, Recompute.FULL)
        again = none.seconds(Time.COMPUTE_FORWARD) + none.seconds(Time.CONTEXT_FORWARD)
        assert full.seconds(Time.RECOMPUTE) == pytest.approx(again)
        hiding = none.seconds(Time.HIDING_FORWARD) + none.seconds(Time.HIDING_BACKWARD)
        assert full.seconds(Time.HIDING_BACKWARD) == pytest.approx(hiding)


def test_what_is_gathered_is_held_and_what_is_passed_on_is_not() -> None:
    """Gathering holds all keys, all values and their gradients; a ring a block of each; all-to-all four copies."""
    seq_len, cp = 8192, 4
    keys, queries = (seq_len // cp * heads * WIDTH * BF16 for heads in (KV_HEADS, HEADS))
    held = {m: Row(seq_len, WorkKey(WHOLE, 1, cp, 1, m)).held(Holding.WORKING) for m in ContextMethod}
    assert held[GATHER] - held[RING] == 4 * keys * cp - 4 * keys
    assert held[EXCHANGE] - held[RING] == 2 * (queries + keys) - 4 * keys
    kept = {Row(seq_len, WorkKey(WHOLE, 1, cp, 1, m)).held(Holding.KEPT) for m in ContextMethod}
    assert len(kept) == 1


def test_heads_that_ranks_can_share() -> None:
    assert num_heads(graph_of(MODEL, 1024)) == KV_HEADS
    assert num_heads(graph_of("gpt3-175b", 1024)) == 96
    assert num_heads(graph_of("deepseek-v3", 1024)) == 128  # keys are expanded before attention


def chosen(model: str, seq_len: int, num_devices: int, batch: int, pins: Pins) -> ContextMethod:
    """The way of the fastest layout, where all three are searched."""
    problem = problem_of(model, num_devices, batch=batch, seq_len=seq_len, hardware="dgx-h200", pins=pins)
    assert {layout.cp_method for layout in problem.space.layouts} == set(ContextMethod)
    best = problem.solved().best
    assert best is not None
    return best.layout.cp_method


def test_the_search_chooses_by_heads() -> None:
    """32 heads of keys, or 8, on equal meshes: what a ring passes on is a quarter, what all-to-all moves five eighths.

    Nothing lists which way is for which model: prices decide.
    """
    pins = Pins(tp=1, pp=1, cp=4, zero=3, micro_batch=1)
    assert chosen("llama2-7b", 8192, 8, 8, pins) is EXCHANGE
    assert chosen("llama3-8b", 8192, 8, 8, pins) is RING


def test_the_search_chooses_by_the_length_of_sequences() -> None:
    """As many tokens in short sequences or in long ones, between two nodes: long ones' attention hides a ring."""
    tokens, batch_tokens = 2**15, 2**18
    for seq_len, expected in ((2048, EXCHANGE), (32768, RING)):
        pins = Pins(tp=8, pp=1, cp=2, zero=1, micro_batch=tokens // seq_len, sequence_parallel=True)
        assert chosen("llama2-7b", seq_len, 16, batch_tokens // seq_len, pins) is expected
