"""All kinds of models that users bring in a model.py: planned, in their own units, with the work that torch counts."""

import io
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rich.console import Console
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from planner.api import find_plan
from planner.errors import InputError
from planner.executor.stage_trace import as_compiled
from planner.graph.tracer import trace_model
from planner.layout.layout import Pins
from planner.model_file import LoadedModel, load_model, resolve_model
from planner.models.inputs import call_model, training_batch
from planner.plan.schema import Plan
from planner.render import show_plan
from planner.request import Request
from tests.fixtures.kinds_of_models import HEADER, KINDS

SAMPLES = ("vision transformer", "recommender", "lazy parameters", "fixed sequence")  # without tokens
SEQ_LENS = {"fixed sequence of tokens": 128} | dict.fromkeys(SAMPLES, 1)  # of the model itself, where it has one
SEQ_LEN = 12  # where it has none
HARDWARE, NUM_DEVICES = "dgx-h100-80gb", 8
PINS = Pins(tp=1, cp=1, pp=1)  # what is asked is whether there is a plan, not which
HUGE = "a trillion parameters"
HUGE_DEVICES, HUGE_PINS = 512, Pins(tp=8, cp=1, pp=1)  # that hold it


def load(kind: str, folder: Path) -> LoadedModel:
    (folder / "model.py").write_text(HEADER + KINDS[kind])
    return load_model(resolve_model(str(folder / "model.py")))


def counted(model: LoadedModel, seq_len: int) -> tuple[int, int]:
    """FLOPs forward and backward of two samples by torch's counter, as its operators are made of products.

    On the meta device, where an LSTM is one product after another and no size is too large.
    """
    with torch.device("meta"), as_compiled():
        module = model.build()
        inputs = model.example_inputs(2, seq_len)
        batch = training_batch(inputs)
        with sdpa_kernel(SDPBackend.MATH):
            with FlopCounterMode(display=False) as forward:
                loss = model.loss_fn(call_model(module, inputs), batch)
            with FlopCounterMode(display=False) as backward:
                loss.backward()
    return forward.get_total_flops(), backward.get_total_flops()


def printed(plan: Plan) -> str:
    console = Console(file=io.StringIO(), width=200)
    with console.capture() as capture:
        console.print(show_plan(plan))
    return capture.get()


@pytest.mark.parametrize("kind", KINDS)
def test_planned_in_its_own_units_with_the_work_that_torch_counts(kind: str, tmp_path: Path) -> None:
    model = load(kind, tmp_path)
    num_devices, pins = (HUGE_DEVICES, HUGE_PINS) if kind == HUGE else (NUM_DEVICES, PINS)
    asked = None if kind in SEQ_LENS else SEQ_LEN
    request = Request(model.source.name, num_devices, HARDWARE, seq_len=asked, held=model, pins=pins, num_tokens=10**9)
    plan = find_plan(request).plan
    assert plan.training.seq_len == SEQ_LENS.get(kind, SEQ_LEN)
    assert ("samples" in printed(plan)) == (kind in SAMPLES)
    assert ("token" in printed(plan)) == (kind not in SAMPLES)
    graph = trace_model(model, 2, plan.training.seq_len)
    assert (graph.num_params >= 10**12) == (kind == HUGE)
    forward, backward = counted(model, plan.training.seq_len)
    assert graph.forward_flops == pytest.approx(forward, rel=0.01)
    assert graph.backward_flops == pytest.approx(backward, rel=0.01)


def test_a_decoder_of_sound_keeps_its_positions(tmp_path: Path) -> None:
    """448 of Whisper: planned for where nobody says, and no sequence is longer."""
    model = load("encoder of sound", tmp_path)
    assert model.default_seq_len == 448
    request = Request(model.source.name, NUM_DEVICES, HARDWARE, held=model, pins=PINS)
    assert find_plan(request).plan.training.seq_len == 448
    with pytest.raises(
        InputError, match=r"sequences of 449 tokens are longer than the 448 positions of model\.decoder"
    ):
        find_plan(replace(request, seq_len=449))
