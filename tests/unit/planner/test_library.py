"""Planner as a library: what stands in ``planner`` itself."""

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any, cast

import pytest
from torch import nn

import planner
from planner.cli.compare import document
from planner.cli.explain import document as explained
from planner.cli.main import main
from planner.errors import InputError, PlanError
from planner.graph.graph_file import write_graph
from planner.plan.plan_file import write_plan
from tests.forked_python import OnRanks
from tests.planning import graph_of


@pytest.fixture(scope="module")
def graph(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("graph") / "graph.json"
    write_graph(graph_of("llama-tiny", 64), path)
    return path


def test_a_plan_is_found_kept_and_priced(graph: Path, tmp_path: Path) -> None:
    plan = planner.search(
        graph, gpus=4, hardware="dgx-a100-80gb", global_batch_size=8, precision="fp16", tp=2, pp=1, zero=1
    )
    assert (plan.mesh.tp, plan.mesh.pp, plan.zero_stage) == (2, 1, 1)
    write_plan(plan, tmp_path / "plan.json")
    assert planner.load_plan(tmp_path / "plan.json") == plan
    again = planner.estimate(tmp_path / "plan.json")
    assert again.prediction is not None
    assert plan.prediction is not None
    assert again.prediction.step_time_s == pytest.approx(plan.prediction.step_time_s, rel=1e-6)


def test_what_is_no_option_is_refused(graph: Path) -> None:
    with pytest.raises(InputError, match="unknown option zeroo"):
        planner.search(graph, gpus=4, zeroo=1)
    with pytest.raises(InputError, match="precision must be one of bf16, .* got 'bf17'"):
        planner.search(graph, gpus=4, precision="bf17")
    with pytest.raises(InputError, match="must be a name or a path, or an nn.Module, got int"):
        planner.search(4, gpus=4)  # type: ignore[arg-type]


def commanded(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *arguments: object) -> object:
    """What ``planner`` prints with ``--json``."""
    monkeypatch.setattr(sys, "argv", ["planner", *map(str, arguments), "--json"])
    with pytest.raises(SystemExit) as caught:
        main()
    assert caught.value.code == 0
    return json.loads(capsys.readouterr().out)


def test_compare_is_what_the_command_prints(
    graph: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = planner.compare(graph, gpus=2, hardware="dgx-a100-80gb", global_batch_size=8, mine="tp=2")
    options = (graph, "--gpus", 2, "--hardware", "dgx-a100-80gb", "--global-batch", 8, "--mine", "tp=2")
    printed = commanded(capsys, monkeypatch, "compare", *options)
    said = document(found)
    for each in (said, printed):
        _forget_the_clock(each)
    assert json.loads(json.dumps(said)) == printed


def _forget_the_clock(value: object) -> None:
    """Takes out how long searches took."""
    if isinstance(value, dict):
        known = cast("dict[str, object]", value)
        known.pop("elapsed_s", None)
        for each in known.values():
            _forget_the_clock(each)
    elif isinstance(value, list):
        for each in cast("list[object]", value):
            _forget_the_clock(each)


def test_explain_is_what_the_command_prints(
    graph: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = planner.search(graph, gpus=2, hardware="dgx-a100-80gb", global_batch_size=8, tp=2)
    file = tmp_path / "plan.json"
    write_plan(plan, file)
    found = planner.explain(file, why_not="tp=1", tokens=10**9, searches="none")
    options = ("--why-not", "tp=1", "--tokens", "1B", "--search", "none")
    printed = cast("dict[str, object]", commanded(capsys, monkeypatch, "explain", file, *options))
    said = cast("dict[str, object]", json.loads(json.dumps(explained(found))))
    for each in (said, printed):
        _forget_the_clock(each)
    assert said == printed


def test_fit_is_what_the_command_prints(
    graph: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = planner.fit(graph, gpus=2, hardware="dgx-a100-80gb", global_batch_size=8)
    options = (graph, "--gpus", 2, "--hardware", "dgx-a100-80gb", "--global-batch", 8)
    assert json.loads(json.dumps(asdict(found))) == commanded(capsys, monkeypatch, "fit", *options)


def test_search_and_estimate_are_what_the_commands_print(
    graph: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = planner.search(graph, gpus=4, hardware="dgx-a100-80gb", global_batch_size=8, tp=2)
    options = (graph, "--gpus", 4, "--hardware", "dgx-a100-80gb", "--global-batch", 8, "--tp", 2)
    printed = cast("dict[str, object]", commanded(capsys, monkeypatch, "search", *options))
    assert plan.model_dump(mode="json")["prediction"] == printed["prediction"]
    file = tmp_path / "plan.json"
    write_plan(plan, file)
    again = planner.estimate(file, hardware="dgx-h100-80gb").model_dump(mode="json")
    on_others = cast(
        "dict[str, object]", commanded(capsys, monkeypatch, "estimate", file, "--hardware", "dgx-h100-80gb")
    )
    assert again["prediction"] == on_others["prediction"]


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: planner.explain("plan.json", searches="some"), "searches must be one of none, memory, all"),
        (lambda: planner.explain("plan.json", searches="none", tokens="1T"), "tokens must be a valid integer"),  # type: ignore[arg-type]
        (lambda: planner.explain("plan.json", why_not={"tp": 2}), "fixes no choice of a plan: it is no text"),  # type: ignore[arg-type]
        (lambda: planner.compare("llama-tiny", 4, mine={"tp": 4}), "fixes no choice"),  # type: ignore[arg-type]
        (lambda: planner.compare("llama-tiny", 4, mine="tpp=4"), "fixes no choice"),
        (lambda: planner.compare("llama-tiny", 4, mine="no-such.yaml"), "no-such.yaml"),
    ],
)
def test_wrong_words_are_refused(call: Callable[[], object], said: str) -> None:
    with pytest.raises(InputError, match=said):
        call()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"gpus": "4"}, "gpus must be a valid integer, got '4'"),
        ({"gpus": 0}, "number of GPUs must be at least 1, got 0"),
        ({"hardware": 3}, "hardware must be a valid string, got 3"),
        ({"tp": "2"}, "tp must be a valid integer, got '2'"),
        ({"tp": True}, "tp must be a valid integer, got True"),
        ({"tp": 1.5}, "tp must be a valid integer, got 1.5"),
        ({"seq_len": -5}, "--seq-len must be at least 1, got -5"),
        ({"num_runners_up": 0}, "--top must be at least 1, got 0"),
        ({"num_tokens": "15T"}, "num_tokens must be a valid integer, got '15T'"),
        ({"memory_risk": float("nan")}, "memory_risk must be a finite number, got nan"),
        ({"time_limit_s": "5"}, "time_limit_s must be a valid number, got '5'"),
        ({"precision": 16}, "precision must be one of bf16, .*, got 16"),
        ({"optimizer": ["adam"]}, "optimizer must be one of adamw, .*, got .'adam'."),
        ({"schedule": None, "robust": "yes"}, "robust must be a valid boolean, got 'yes'"),
        ({"framework": None}, "framework must be a valid string, got None"),
    ],
)
def test_values_of_another_kind_are_refused_by_name(options: dict[str, object], said: str, graph: Path) -> None:
    """They went on until something broke: ``'<' not supported between instances of 'str' and 'int'``."""
    with pytest.raises(InputError, match=said):
        planner.search(graph, **{"gpus": 4, "hardware": "dgx-a100-80gb", **options})  # pyright: ignore[reportArgumentType]


def test_numbers_and_paths_are_taken_as_they_are_written_in_python(graph: Path) -> None:
    """15e12 tokens are a float, and a profile in a file is a path: both broke."""
    profile = Path(planner.__file__).parents[1] / "hardware_profiles" / "data" / "dgx-a100-80gb.json"
    options: dict[str, Any] = {"global_batch_size": 8.0, "num_tokens": 1e9, "tp": 2, "pp": 1, "micro_batch": 1}
    plan = planner.search(graph, gpus=4, hardware=profile, **options)
    assert plan.run is not None
    assert (plan.run.num_tokens, plan.training.global_batch_size) == (10**9, 8)
    assert planner.estimate(plan, hardware=profile, gpus=8).num_devices == 8
    with pytest.raises(InputError, match="number of GPUs must be at least 1, got 0"):
        planner.estimate(plan, gpus=0)


def test_a_script_that_ends_with_an_error_shows_the_way_out() -> None:
    """The hint was in an attribute alone, which no traceback shows."""
    program = "import planner; planner.search('no-such.py', 2)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    error, hint = done.stderr.splitlines()[-2:]
    assert error == "planner.errors.ModelError: no such file: no-such.py"
    assert hint.startswith("hint: check the path")


PLAIN_SCRIPT = """
from safetensors.torch import save_file
from torch.nn import functional as F
class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = torch.nn.Embedding(256, 32), torch.nn.Linear(32, 256)
    def forward(self, ids):
        return self.head(torch.tanh(self.embed(ids)))
def made():
    torch.manual_seed(0)
    return Model()
for path in sorted(folder.glob("plain-*.json")):
    plan = planner.load_plan(path, trust=True)
    torch.manual_seed(1)
    ids = torch.randint(256, (plan.training.global_batch_size, plan.training.seq_len))
    labels = torch.randint(256, ids.shape)
    own = made()
    F.cross_entropy(own(ids).flatten(0, 1), labels.flatten()).backward()
    wanted = {name: p.grad for name, p in own.named_parameters()}
    if rank == 0:
        save_file(dict(own.state_dict()), folder / "weights.safetensors")
    dist.barrier()
    ways = (made(), {}), (made, {}), (Model, {"weights": folder / "weights.safetensors"})  # the last from another seed
    for model, options in ways:
        torch.manual_seed(7)
        part = planner.parallelize(model, plan, **options)
        part.forward_backward({"ids": ids[rank::2], "labels": labels[rank::2]})
        found = [pair for root in part.roots for pair in root.named_parameters()]
        assert [name for name, _ in found] == list(wanted)
        for name, p in found:
            assert torch.equal(p.full_tensor(), own.get_parameter(name))
            torch.testing.assert_close(p.grad.full_tensor(), wanted[name], rtol=1e-4, atol=1e-6)
    compared.append(path.name)
for model, options in (Model().to("meta"), {}), (made(), {"weights": folder / "weights.safetensors"}):
    try:
        planner.parallelize(model, plan, **options)
        raise AssertionError("a model without values, or weights for one that has some")
    except planner.errors.PlannerError as error:
        assert "planner.parallelize(build_model, plan)" in error.hint
torch.manual_seed(rank)  # as for data of its own: all ranks make what rank 0 does
part = planner.parallelize(Model, plan)
found = [p for root in part.roots for p in root.parameters()]
assert all(torch.equal(p.full_tensor(), own.get_parameter(name)) for p, name in zip(found, wanted, strict=True))
"""


MODEL = """
import torch

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = torch.nn.Embedding(256, 32), torch.nn.Linear(32, 256)
    def forward(self, input_ids):
        return self.head(torch.tanh(self.embed(input_ids)))
"""


NESTED = """
import torch
from torch.nn import functional as F

class Layer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(16, 16)
    def forward(self, x):
        return x + torch.tanh(self.linear(x))

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.image = torch.nn.Embedding(64, 16), torch.nn.Linear(12, 16)
        self.layers = torch.nn.ModuleList(Layer() for _ in range(4))
        self.head = torch.nn.Linear(16, 10)
    def forward(self, batch, scale):
        ids, weight = batch["text"]
        x = (self.embed(ids) * weight.unsqueeze(-1)).mean(1) + self.image(batch["image"]) * scale
        for layer in self.layers:
            x = layer(x)
        return self.head(x)

build_model = Model

def example_inputs(batch_size, seq_len):
    ids = torch.randint(64, (batch_size, 5))
    text = [ids, torch.rand(batch_size, 5)]
    return {"batch": {"image": torch.randn(batch_size, 12), "text": text}, "scale": 2, "labels": ids[:, 0] % 10}

def loss_fn(output, batch):
    assert isinstance(batch["batch"]["text"], list)
    return F.cross_entropy(output.float(), batch["labels"])
"""

NESTED_SCRIPT = """
from torch.utils._pytree import tree_map
from nested import Model, example_inputs, loss_fn
torch.manual_seed(1)
whole = example_inputs(8, 1)
def made():
    torch.manual_seed(0)
    return Model()
own = made()
expected = loss_fn(own(whole["batch"], whole["scale"]), whole)
expected.backward()
for path in sorted(folder.glob("nested-*.json")):
    plan = planner.load_plan(path, trust=True)
    dp = plan.mesh.dp_shard * plan.mesh.dp_replicate
    mine = tree_map(lambda t: t[rank % dp :: dp] if isinstance(t, torch.Tensor) else t, whole)
    part = planner.parallelize(made, plan, loss_fn=loss_fn, inputs=example_inputs(plan.pipeline.micro_batch_size, 1))
    loss = part.forward_backward(mine)
    dist.all_reduce(loss)
    torch.testing.assert_close(loss / dp, expected.detach())
    checked = torch.zeros(())
    for root in part.roots:
        for name, p in root.named_parameters():
            grad = p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad
            torch.testing.assert_close(grad, own.get_parameter(name).grad, rtol=1e-4, atol=1e-6)
            checked += 1 / dp
    dist.all_reduce(checked)
    assert round(float(checked)) == len(list(own.parameters()))
    compared.append(path.name)

def by_weight(output, batch):
    weight = batch["batch"]["text"][1][:, 0]
    return (output.square().mean(1) * weight).sum() / weight.sum()

try:  # from one sample, so that all rows of a trial would be alike
    planner.parallelize(made(), plan, loss_fn=by_weight, inputs=example_inputs(1, 1))
    raise AssertionError("a mean over weights was taken for one over samples")
except planner.errors.ModelError as error:
    assert "how the parts add up is not known" in str(error)
"""

OWN_LOSS = """
import torch
from torch.nn import functional as F

class Layer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(16, 16)
    def forward(self, x):
        return x + torch.tanh(self.linear(x))

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = torch.nn.Embedding(64, 16), torch.nn.Linear(16, 64)
        self.layers = torch.nn.ModuleList(Layer() for _ in range(4))
    def forward(self, input_ids, labels=None):
        x = self.embed(input_ids)
        for layer in self.layers:
            x = layer(x)
        logits, loss = self.head(x), None
        if labels is not None:
            loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return {"loss": loss, "logits": logits}

build_model = Model

def example_inputs(batch_size, seq_len):
    ids = torch.randint(64, (batch_size, seq_len))
    return {"labels": ids, "input_ids": ids}

def loss_fn(output, batch):
    count = (batch["labels"][:, 1:] != -100).sum()
    return output["loss"] * count, count
"""

OWN_LOSS_SCRIPT = """
import own
torch.manual_seed(1)
whole = own.example_inputs(8, 16)
whole["labels"] = whole["labels"].clone()
whole["labels"][:3, 5:] = -100  # unequal numbers of terms in the parts
def made_own():
    torch.manual_seed(0)
    return own.Model()
one = made_own()
expected = one(**whole)["loss"]
expected.backward()
for path in sorted(folder.glob("own-*.json")):
    plan = planner.load_plan(path, trust=True)
    dp = plan.mesh.dp_shard * plan.mesh.dp_replicate
    example = own.example_inputs(plan.pipeline.micro_batch_size, 16)
    part = planner.parallelize(made_own(), plan, loss_fn=own.loss_fn, inputs=example)
    loss = part.forward_backward({name: each[rank % dp :: dp] for name, each in whole.items()})
    dist.all_reduce(loss)
    torch.testing.assert_close(loss / dp, expected.detach())
    for root in part.roots:
        for name, p in root.named_parameters():
            grad = p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad
            torch.testing.assert_close(grad, one.get_parameter(name).grad, rtol=1e-4, atol=1e-6)
    compared.append(path.name)
"""
BEFORE = """
import pathlib, sys, torch, torch.distributed as dist, planner
dist.init_process_group("gloo")
folder, rank, compared = pathlib.Path(sys.argv[1]), dist.get_rank(), []
sys.path.insert(0, str(folder))
"""
# Threads of gloo that outlive the interpreter abort it (pytorch/pytorch#190489): what holds a group is dropped with it.
AFTER = """
import gc
dist.barrier()  # gloo may abort a rank whose peers are gone
if rank == 0:
    print(*compared)
del part, root
gc.collect()
dist.destroy_process_group()
"""


def test_parallelize_trains_as_one_process_does(tmp_path: Path, on_ranks: OnRanks) -> None:
    """Two ranks of a script of one's own, against torch in one process: every gradient of a step.

    The plan of a file; that of the same module held in Python; data parallelism and a pipeline of a model whose inputs
    are a nest, and of one whose forward takes labels and computes the loss itself.
    """
    plain, nested, own = (tmp_path / f"{name}.py" for name in ("model", "nested", "own"))
    plain.write_text(MODEL)
    nested.write_text(NESTED)
    own.write_text(OWN_LOSS)
    script = BEFORE + PLAIN_SCRIPT + NESTED_SCRIPT + OWN_LOSS_SCRIPT + AFTER
    names: dict[str, type[nn.Module]] = {}
    exec(MODEL, names)
    common = {"gpus": 2, "hardware": "cpu-gloo", "global_batch_size": 8, "precision": "fp32", "micro_batch": 2}
    of_plain = {**common, "seq_len": 16, "dp": 2, "zero": 3}
    plans = {
        "plain-of-a-file": planner.search(plain, **of_plain),  # pyright: ignore[reportArgumentType]
        "plain-held": planner.search(names["Model"](), **of_plain),  # pyright: ignore[reportArgumentType]
        "nested-dp": planner.search(nested, **common, dp=2, zero=3),  # pyright: ignore[reportArgumentType]
        "nested-pp": planner.search(nested, **common, pp=2),  # pyright: ignore[reportArgumentType]
        "own-dp": planner.search(own, **common, seq_len=16, dp=2, zero=3),  # pyright: ignore[reportArgumentType]
        "own-pp": planner.search(own, **common, seq_len=16, pp=2),  # pyright: ignore[reportArgumentType]
    }
    assert plans["nested-pp"].training.seq_len == 1
    for name, plan in plans.items():
        write_plan(plan, tmp_path / f"{name}.json")
    out, err = on_ranks(2, script, tmp_path)
    assert "builds the whole model" not in err
    assert sorted(out.split()) == sorted(f"{name}.json" for name in plans)


def test_parallelize_needs_ranks(graph: Path) -> None:
    plan = planner.search(graph, gpus=1, hardware="cpu-gloo", global_batch_size=8, precision="fp32")
    with pytest.raises(PlanError, match="torch.distributed is not initialised"):
        planner.parallelize(nn.Linear(2, 2), plan)


def test_the_import_is_light() -> None:
    program = (
        "import sys, planner; print(planner.__version__); assert planner.errors.InputError.exit_code == 2; "
        "print(sorted({'torch', 'numpy', 'pandas', 'ortools', 'pydantic'} & set(sys.modules)))"
    )
    out = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.split("\n")
    assert out[0].count(".") == 2
    assert out[1] == "[]"
