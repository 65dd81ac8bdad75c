"""Models, clusters and whole planning problems for the tests of the search, each made once a session."""

from dataclasses import replace
from functools import cache

from costmodels.vocabulary.choices import Optimizer, Precision
from hardware_profiles.catalog import profile_for
from hardware_profiles.schema import ClusterSpec
from planner.graph.model_graph import ModelGraph
from planner.graph.tracer import trace_model
from planner.layout.layout import Pins, Training
from planner.model_file import load_model, resolve_model
from planner.pricing.target import PricingTarget
from planner.problem import Problem
from planner.table.cost_table import CostTable

BATCH_SIZE = 2  # as planner.api traces
NO_PINS = Pins()
A100 = "dgx-a100-80gb"


@cache
def graph_of(model: str, seq_len: int) -> ModelGraph:
    """The graph of a preset, a config or a file."""
    return trace_model(load_model(resolve_model(model)), BATCH_SIZE, seq_len, "bfloat16")


@cache
def cluster_of(hardware: str, num_devices: int) -> ClusterSpec:
    """``num_devices`` devices of a shipped profile."""
    return profile_for(num_devices, hardware)


def training_of(global_batch_size: int, seq_len: int) -> Training:
    """bf16 and AdamW."""
    return Training(global_batch_size, seq_len, Precision.BF16, Optimizer.ADAMW)


@cache
def problem_of(
    model: str, num_devices: int, *, batch: int, seq_len: int = 1024, hardware: str = A100, pins: Pins = NO_PINS
) -> Problem:
    """The whole problem, as ``planner search`` would pose it."""
    target = PricingTarget(graph_of(model, seq_len), cluster_of(hardware, num_devices), "bf16")
    return Problem.build(target, training_of(batch, seq_len), pins)


def slowed_by_messages(table: CostTable, slowdown: float) -> CostTable:
    """``table`` with devices on which messages between stages slow compute so much, as they do processors."""
    devices = tuple(replace(each, message_slowdown=slowdown) for each in table.cluster.devices)
    return replace(table, cluster=replace(table.cluster, devices=devices))


def with_slow_sends(table: CostTable, factor: float) -> CostTable:
    """``table`` of a network on which every send from stage to stage takes so many times as long."""
    return replace(table, sends=tuple(lines * factor for lines in table.sends))
