"""A plan says what `planner run` would refuse of it."""

from dataclasses import replace
from pathlib import Path

import pytest

from costmodels.vocabulary.choices import Searches
from planner.api import find_plan
from planner.api.explain import Wishes, explain
from planner.errors import InputError
from planner.layout.layout import Pins
from planner.plan.plan_file import read_plan, write_plan
from planner.render_explain import why_not_text
from planner.request import Request

pytestmark = pytest.mark.usefixtures("traced_here")

MODEL = """
from torch import nn

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)
    def forward(self, x):
        {inside}
        return x + self.down(self.up(x).relu())

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(256, 16)
        self.layers = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(16, 256)
    def forward(self, ids):
        x = self.embedding(ids)
        for layer in self.layers:
            x = layer(x)
            {between}
        return self.head(x)

def build_model():
    return Model()
"""
READ = "if x.abs().max() > 1e6: x = x / 2"
CUT = "planner run cannot cut this model into stages"


@pytest.mark.parametrize(
    ("inside", "between", "pp", "is_warned"),
    [("pass", READ, 2, True), ("pass", READ, 1, False), (READ, "pass", 2, False), ("pass", "pass", 2, False)],
    ids=["between blocks", "without a pipeline", "inside blocks", "nowhere"],
)
def test_values_read_between_blocks(tmp_path: Path, inside: str, between: str, pp: int, *, is_warned: bool) -> None:
    path = tmp_path / "model.py"
    path.write_text(MODEL.format(inside=inside, between=between))
    request = Request(str(path), 2, "cpu-gloo", seq_len=16, global_batch_size=4, pins=Pins(pp=pp))
    warnings = find_plan(request).plan.warnings
    assert any(warning.startswith(CUT) for warning in warnings) is is_warned


def test_an_alternative_that_would_be_refused_says_so(tmp_path: Path) -> None:
    """Asked why not, a user is told more than its time."""
    (tmp_path / "model.py").write_text(MODEL.format(inside="pass", between=READ))
    request = Request(str(tmp_path / "model.py"), 2, "cpu-gloo", seq_len=16, global_batch_size=4, pins=Pins(tp=1))
    plan = find_plan(request).plan
    write_plan(plan, tmp_path / "plan.json")
    found = explain(read_plan(tmp_path / "plan.json"), None, Wishes(Pins(pp=2), searches=Searches.NONE))
    assert found.why_not is not None
    assert f"But {CUT}" in why_not_text(found, found.why_not)
    assert CUT not in why_not_text(found, replace(found.why_not, plan=plan))


@pytest.mark.parametrize(("rest", "pp"), [("layer", None), ("layer", 2), ("Block()", 2)], ids=str)
def test_a_block_that_is_called_again_stays_on_one_rank(tmp_path: Path, rest: str, pp: int | None) -> None:
    """Its second call needs what blocks between computed: a plan with stages would be refused when it is run."""
    listed = f"layer, shared = Block(), Block()\n        self.layers = nn.ModuleList([layer, shared, {rest}, shared])"
    text = MODEL.format(inside="pass", between="pass")
    path = tmp_path / "model.py"
    path.write_text(text.replace("self.layers = nn.ModuleList(Block() for _ in range(4))", listed))
    request = Request(str(path), 2, "cpu-gloo", seq_len=16, global_batch_size=4, pins=Pins(pp=pp))
    plan = find_plan(request).plan
    assert plan.search is not None
    assert {plan.mesh.pp, *(entry.mesh.pp for entry in plan.search.runners_up)} == {pp or 1}
    assert any(warning.startswith(CUT) and "called again" in warning for warning in plan.warnings) is (pp == 2)


def test_a_lookup_that_is_called_again_may_be_cut(tmp_path: Path) -> None:
    """The second call is of the inputs alone, which every stage has."""
    text = MODEL.format(inside="pass", between="pass").replace("self.head(x)", "self.head(x + self.embedding(ids))")
    (tmp_path / "model.py").write_text(text)
    request = Request(str(tmp_path / "model.py"), 2, "cpu-gloo", seq_len=16, global_batch_size=4, pins=Pins(pp=2))
    assert not [warning for warning in find_plan(request).plan.warnings if warning.startswith(CUT)]


TWO_INPUTS = """
import torch
from torch import nn

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.positions = nn.Embedding(256, 16), nn.Embedding(8, 16)
        self.head = nn.Linear(16, 256)
    def forward(self, input_ids{more}):
        x = self.embedding(input_ids) + self.positions(torch.arange(input_ids.shape[1], device=input_ids.device))
        {use}
        return self.head(x)

def build_model():
    return Model()

def example_inputs(batch_size, seq_len):
    ids = torch.zeros(batch_size, seq_len, dtype=torch.int64)
    return {inputs}
"""
SECOND = {
    "more": ", types",
    "use": "x = x + self.embedding(types)",
    "inputs": "{'input_ids': ids, 'types': ids}",
}
ONE = {"more": "", "use": "pass", "inputs": "{'input_ids': ids}"}
OWN_LOSS = """

def loss_fn(output, batch):
    return nn.functional.cross_entropy(output[:, :-1].flatten(0, 1), batch["input_ids"][:, 1:].flatten())
"""


@pytest.mark.parametrize(
    ("parts", "seq_len", "starts"),
    [
        (ONE, 8, []),
        (SECOND, 8, ["planner run trains models whose one input is token ids, and this one takes int64 (2, 8), int64"]),
        ({**ONE, "inputs": "{'input_ids': ids}" + OWN_LOSS}, 8, []),
    ],
    ids=["sound", "two inputs", "a loss without labels"],
)
def test_inputs_and_positions(tmp_path: Path, parts: dict[str, str], seq_len: int, starts: list[str]) -> None:
    path = tmp_path / "model.py"
    path.write_text(TWO_INPUTS.format(**parts))
    request = Request(str(path), 2, "cpu-gloo", seq_len=seq_len, global_batch_size=4, pins=Pins(pp=1))
    warnings = find_plan(request).plan.warnings
    assert [warning[: len(start)] for warning, start in zip(warnings, starts, strict=True)] == starts


def test_sequences_longer_than_a_table_of_positions_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.py"
    path.write_text(TWO_INPUTS.format(**ONE))
    with pytest.raises(InputError, match=r"sequences of 16 tokens are longer than the 8 positions of positions.weight"):
        find_plan(Request(str(path), 2, "cpu-gloo", seq_len=16, global_batch_size=4))


def test_sizes_of_a_generic_family_are_planned_beyond_their_table_and_it_is_said() -> None:
    answer = find_plan(Request("gpt-tiny", 2, "cpu-gloo", seq_len=256, global_batch_size=4))
    assert answer.plan.prediction is not None
    (note,) = [each for each in answer.notes if "positions" in each]
    assert "longer than the 64 positions of position_embedding.weight: planner run cannot train it so" in note


ATTENTION = """
import torch
from torch import nn
from torch.nn import functional as F

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.positions = nn.Embedding(256, 16), nn.Parameter(torch.randn(24, 16))
        self.head = nn.Linear(16, 256)
    def forward(self, input_ids):
        length = input_ids.shape[1]
        x = self.embedding(input_ids) + self.positions[{index}]
        heads = x.unflatten(-1, (2, -1)).transpose(1, 2)
        y = F.scaled_dot_product_attention(heads, heads, heads, {options})
        return self.head(y.transpose(1, 2).flatten(2))

def build_model():
    return Model()
"""
COUNTING = "torch.arange(length, device=input_ids.device) + 0 * torch.arange(8).sum()"
INDEXED, CAUSAL = "torch.arange(length, device=input_ids.device)", "is_causal=True"
MASK = "attn_mask=torch.ones(length, length, dtype=torch.bool, device=input_ids.device).tril(), dropout_p=0.1"


@pytest.mark.parametrize(
    ("index", "options", "seq_len", "cp", "says"),
    [
        (INDEXED, CAUSAL, 16, 2, ()),
        (COUNTING, CAUSAL, 16, 1, ()),
        (
            COUNTING,
            CAUSAL,
            16,
            2,
            ("its forward counts 8 of something else with torch.arange, as many as a rank has positions",),
        ),
        (":length", MASK, 18, 1, ()),
        (
            ":length",
            MASK,
            18,
            2,
            (
                "attention in its forward is given a mask of its own",
                "its forward drops weights of attention",
                "its forward takes the first positions of a table by a slice, not by torch.arange",
                "each rank gets two equal chunks, but 2 * cp does not divide the 18 tokens",
            ),
        ),
    ],
    ids=["sound", "counts, not shared", "counts as many as a rank has positions", "not shared", "of every kind"],
)
def test_sequences_that_ranks_cannot_share(
    tmp_path: Path, index: str, options: str, seq_len: int, cp: int, says: tuple[str, ...]
) -> None:
    path = tmp_path / "model.py"
    path.write_text(ATTENTION.format(index=index, options=options))
    request = Request(str(path), 2, "cpu-gloo", seq_len=seq_len, global_batch_size=4, pins=Pins(cp=cp, tp=1, pp=1))
    start, end = "planner run cannot share this model's sequences (cp=2): ", ": pin --cp 1 to train with it"
    assert list(find_plan(request).plan.warnings) == [f"{start}{each}{end}" for each in says]


BEYOND_ATTENTION = """
import torch
from torch import nn
from torch.nn import functional as F

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(256, 32), nn.Linear(32, 256)
    def forward(self, input_ids):
        x = self.embedding(input_ids)
        heads = x.unflatten(-1, (2, -1)).transpose(1, 2)
        y = F.scaled_dot_product_attention(heads, heads, heads, is_causal=True).transpose(1, 2).flatten(2)
        return self.head({uses})

def build_model():
    return Model()

def example_inputs(batch, seq_len):
    return {{name: torch.randint(0, 256, (batch, seq_len)) for name in ("input_ids", "labels")}}

def loss_fn(outputs, batch):
    return F.cross_entropy({loss})
"""
ALL_LABELS, LATER_LABELS = (
    'outputs.flatten(0, 1), batch["labels"].flatten()',
    'outputs[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten()',
)


def warnings_of(tmp_path: Path, uses: str, loss: str, pins: Pins) -> tuple[str, ...]:
    path = tmp_path / "model.py"
    path.write_text(BEYOND_ATTENTION.format(uses=uses, loss=loss))
    return find_plan(Request(str(path), 2, "cpu-gloo", seq_len=16, global_batch_size=4, pins=pins)).plan.warnings


@pytest.mark.parametrize(
    ("uses", "loss", "operator"),
    [
        ("y", ALL_LABELS, None),
        ("y[:, :16]", ALL_LABELS, None),
        ("torch.stack([y, x], 1).amax(1)", ALL_LABELS, None),
        ("y.topk(32, -1)[0]", ALL_LABELS, None),
        ("y + y.mean(1, keepdim=True)", ALL_LABELS, "mean at model.py:14"),
        ("y * x.softmax(1)", ALL_LABELS, "softmax at model.py:14"),
        ("y - y[:, :1]", ALL_LABELS, "slice at model.py:14"),
        ("torch.cat([y, x], 1)[:, ::2]", ALL_LABELS, "cat at model.py:14"),
        ("y.gather(1, input_ids[..., None].expand(-1, -1, 32) % 16)", ALL_LABELS, "gather at model.py:14"),
        ("y", LATER_LABELS, "slice in loss_fn"),
        ("y + torch.ones(input_ids.shape).cumsum(1)[..., None]", ALL_LABELS, "cumsum at model.py:14"),
    ],
)
def test_what_runs_along_a_sequence_is_told_when_planning(
    tmp_path: Path, uses: str, loss: str, operator: str | None
) -> None:
    """`planner run` refused all but attention, after it had built the model."""
    clause = f"{operator} takes positions of a sequence together, or some of them"
    says = f"planner run cannot share this model's sequences (cp=2): {clause}: pin --cp 1 to train with it"
    assert list(warnings_of(tmp_path, uses, loss, Pins(cp=2, tp=1, pp=1))) == ([] if operator is None else [says])


def test_labels_that_a_loss_shifts_are_no_input_of_the_model(tmp_path: Path) -> None:
    """`planner run` trains the model; its plan said that it did not."""
    assert not warnings_of(tmp_path, "y", LATER_LABELS, Pins(dp=2))
