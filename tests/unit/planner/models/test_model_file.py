"""MODEL in all its forms, and what is said when it is none."""

import os
import signal
import sys
from pathlib import Path

import pytest
import torch

from planner.errors import ModelError
from planner.graph.tracer import trace_model
from planner.model_file import LoadedModel, ModelKind, load_model, resolve_model
from planner.models.python_file import PythonModel

MODEL = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self, width=16):
        super().__init__()
        self.embedding = nn.Embedding(32, width)
        self.head = nn.Linear(width, 32)
    def forward(self, tokens):
        return self.head(self.embedding(tokens))
"""


def write(folder: Path, code: str, name: str = "model.py") -> str:
    (folder / name).write_text(code)
    return str(folder / name)


def load(name: str) -> LoadedModel:
    return load_model(resolve_model(name))


def test_a_single_class_needs_no_factory(tmp_path: Path) -> None:
    model = load(write(tmp_path, MODEL))
    assert model.source.kind is ModelKind.PYTHON
    assert model.vocab_size == 32
    assert trace_model(model, 2, 8).num_params == 32 * 16 + 16 * 32 + 32


def test_a_factory_can_be_named(tmp_path: Path) -> None:
    path = write(tmp_path, MODEL + "\ndef wide():\n    return Net(64)\n\ndef build_model():\n    return Net(8)\n")
    assert trace_model(load(path + ":wide"), 1, 8).num_params == 64 * 32 * 2 + 32
    assert trace_model(load(path), 1, 8).num_params == 8 * 32 * 2 + 32


def test_own_inputs_and_loss(tmp_path: Path) -> None:
    code = MODEL + (
        "\ndef example_inputs(batch_size, seq_len):\n"
        "    return (torch.zeros(batch_size, seq_len, dtype=torch.int64),)\n"
        "\ndef loss_fn(output, batch):\n    return output.float().square().mean() + batch[0].sum()\n"
    )
    model = load(write(tmp_path, code))
    assert model.vocab_size == 32  # tokens beyond it ended in an error of torch's
    graph = trace_model(model, 2, 8)
    assert "aten.cross_entropy_loss.default" not in {node.op for node in graph.nodes}


def test_how_functions_of_a_file_are_called_is_said(tmp_path: Path) -> None:
    path = write(tmp_path, MODEL + "\ndef example_inputs(batch_size):\n    return None\n")
    with pytest.raises(ModelError, match="takes 1 positional argument but 2 were given") as raised:
        trace_model(load(path), 1, 8)
    assert raised.value.hint == "it is called as example_inputs(batch_size, seq_len)"
    loaded = load(write(tmp_path, MODEL + "\ndef loss_fn(output, batch):\n    return batch['targets']\n"))
    with pytest.raises(ModelError, match="KeyError: 'targets'") as raised:
        loaded.loss_fn(None, {"input_ids": torch.zeros(1), "labels": torch.zeros(1)})
    assert raised.value.hint == "it is called as loss_fn(output, batch), and this batch holds input_ids, labels"


def test_a_dict_of_inputs_is_passed_by_name(tmp_path: Path) -> None:
    code = (
        "import torch\nfrom torch import nn\n"
        "class Net(nn.Module):\n"
        "    def __init__(self):\n        super().__init__()\n        self.linear = nn.Linear(4, 4)\n"
        "    def forward(self, a, b):\n        return self.linear(a) - b\n"
        "def example_inputs(batch_size, seq_len):\n"
        "    return {'b': torch.zeros(batch_size, 4), 'a': torch.zeros(batch_size, seq_len, 4)}\n"
        "def loss_fn(output, batch):\n    return (output - batch['b']).mean()\n"
    )
    graph = trace_model(load(write(tmp_path, code)), 1, 8)
    linear = next(node for node in graph.nodes if node.op == "aten.linear.default")
    assert linear.shape == (1, 8, 4)
    assert linear.dtype == "bfloat16"


def test_output_of_user_code_stays_off_stdout(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    load(
        write(
            tmp_path, "print('at import')\n" + MODEL + "\ndef build_model():\n    print('building')\n    return Net()\n"
        )
    )
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "at import" in captured.err
    assert "building" in captured.err


def test_the_digest_follows_the_content_not_the_path(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    first, second = write(tmp_path, MODEL), write(tmp_path / "other", MODEL)
    assert load(first).digest == load(second).digest
    third = write(tmp_path, MODEL + "\n# changed\n")
    assert load(third).digest != load(second).digest


def test_the_digest_follows_what_lies_beside(tmp_path: Path) -> None:
    code = "from planner_test_width import WIDTH\n" + MODEL + "\ndef build_model():\n    return Net(WIDTH)\n"
    write(tmp_path, "WIDTH = 8\n", "planner_test_width.py")
    model = load(write(tmp_path, code))
    (other := tmp_path / "other").mkdir()
    write(other, "WIDTH = 9\n", "planner_test_width_two.py")
    changed = load(write(other, code.replace("planner_test_width", "planner_test_width_two")))
    assert model.digest != changed.digest
    assert trace_model(changed, 1, 8).num_params == 9 * 32 * 2 + 32


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("def build_model(:\n", r"model\.py:1: "),
        ("x = 1 / 0\n", r"model\.py:1: ZeroDivisionError"),
        ("import sys\nsys.exit(3)\n", r"model\.py:2: SystemExit"),
        ("import a_module_that_is_not_there\n", r"model\.py:1: No module named"),
        ("def build_model():\n    return 3\n", r"build_model\(\) returned int, not a torch\.nn\.Module"),
        (
            "def build_model():\n    x = 1\n    raise ValueError('no')\n",
            r"build_model\(\) failed at model\.py:3: ValueError: no",
        ),
        ("def other():\n    pass\n", r"no build_model\(\) and no module that needs no arguments; it defines other"),
        (MODEL + MODEL.replace("Net", "Web"), r"several modules that need no arguments: Net, Web"),
        (MODEL + "\nexample_inputs = 3\n", r"example_inputs is int, not a function"),
        (
            MODEL + "\ndef example_inputs(b, s):\n    return 'x'\n",
            r"must return tensors, alone or in tuples, lists and dicts, got a str",
        ),
        (MODEL + "\ndef loss_fn(o, b):\n    return 1.0\n", r"loss_fn\(\) returned float"),
    ],
)
def test_what_is_wrong_is_said_with_file_and_line(tmp_path: Path, code: str, message: str) -> None:
    path = write(tmp_path, code)
    with pytest.raises(ModelError, match=message):
        trace_model(load(path), 1, 8)


def test_a_model_that_branches_on_values_is_answered_and_the_line_named(tmp_path: Path) -> None:
    code = MODEL.replace(
        "        return self.head",
        "        if tokens.sum() > 0:\n            tokens = tokens + 1\n        return self.head",
    )
    graph = trace_model(load(write(tmp_path, code)), 1, 8)
    assert graph.tier == "modules"
    why, branch = graph.warnings
    assert "model.py:11 `if tokens.sum() > 0:`: GuardOnDataDependentSymNode" in why
    assert branch.startswith("model.py:11 asks for a condition that depends on values: taken as True")


def test_a_mismatch_of_shapes_names_operator_and_line(tmp_path: Path) -> None:
    code = MODEL.replace("nn.Linear(width, 32)", "nn.Linear(width + 1, 32)")
    with pytest.raises(ModelError, match=r"aten\.\S+ failed at model\.py:11"):
        trace_model(load(write(tmp_path, code)), 1, 8)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("absent.py", "no such file"),
        ("absent.json", "no such file"),
        ("lama3-8b", "neither a file nor a preset"),
        ("LICENSE", "LICENSE is no model"),  # it is a file
        ("", "neither a file nor a preset"),
    ],
)
def test_what_is_not_there(name: str, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        resolve_model(name)


@pytest.mark.parametrize("name", ["model.py", "model.py:build_model", "config.json", ""])
def test_a_path_that_no_plan_can_hold_is_refused(name: str, tmp_path: Path) -> None:
    """It was an internal error, UnicodeEncodeError, wherever it was first written down."""
    folder = tmp_path / os.fsdecode(b"caf\xe9")
    folder.mkdir()
    write(folder, MODEL)
    write(folder, '{"model_type": "llama"}', "config.json")
    with pytest.raises(ModelError, match="is not UTF-8") as error:
        resolve_model(str(folder / name))
    assert "rename" in error.value.hint


def test_a_near_preset_is_suggested() -> None:
    with pytest.raises(ModelError) as caught:
        resolve_model("lama3-8b")
    assert "llama3-8b" in caught.value.hint


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[]", "holds a JSON list"),
        ("{", "is not JSON"),
        ("{}", "neither a traced graph, nor a Hugging Face config"),
        ('{"model_type": "a-model-of-no-kind"}', "transformers cannot read it"),
        ('{"model_type": "llama", "hidden_size": "64"}', "cannot read it: .*'hidden_size' expected int, got str"),
        (
            '{"model_type": "llama", "hidden_size": 100, "num_attention_heads": 7}',
            r"cannot read it: .*hidden size \(100\) is not a multiple of the number of attention heads \(7\)",
        ),
        ('{"family": "gpt"}', "layers: Field required"),
    ],
)
def test_foreign_json(tmp_path: Path, content: str, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        load(write(tmp_path, content, "config.json"))


def test_a_family_config_is_a_model(tmp_path: Path) -> None:
    config = '{"family":"gpt","layers":2,"hidden":32,"heads":4,"ffn":64,"vocab":16,"seq_len":16}'
    model = load(write(tmp_path, config, "mine.json"))
    assert model.source.kind is ModelKind.PRESET
    assert model.vocab_size == 16


def test_building_follows_the_device_of_the_caller() -> None:
    model = load("gpt-tiny")
    with torch.device("meta"):
        assert {p.device.type for p in model.build().parameters()} == {"meta"}
    assert {p.device.type for p in model.build().parameters()} == {"cpu"}


@pytest.mark.parametrize("code", ["while True: pass\n", "def build_model():\n    while True:\n        pass\n"])
def test_a_file_that_hangs_is_ended(tmp_path: Path, code: str) -> None:
    path = Path(write(tmp_path, code))
    with pytest.raises(ModelError, match=r"did not end within 0\.2 s"):
        PythonModel.from_file(path, None, time_limit_s=0.2)


def test_global_state_is_as_before(tmp_path: Path) -> None:
    before = (list(sys.path), torch.get_default_dtype(), torch.get_default_device(), signal.getsignal(signal.SIGALRM))
    trace_model(load(write(tmp_path, MODEL)), 1, 8)
    assert (list(sys.path), torch.get_default_dtype(), torch.get_default_device()) == before[:3]
    assert signal.getsignal(signal.SIGALRM) == before[3]


def test_what_is_left_out_of_a_published_model_is_said(tmp_path: Path) -> None:
    assert "multi-token prediction" in (load("deepseek-v3").left_out or "")
    config = (
        '{"model_type": "deepseek_v3", "architectures": ["DeepseekV3ForCausalLM"], "num_nextn_predict_layers": 1, '
        '"hidden_size": 32, "num_attention_heads": 2, "num_key_value_heads": 2, "num_hidden_layers": 2, '
        '"intermediate_size": 32, "first_k_dense_replace": 2, "vocab_size": 32, "q_lora_rank": 8, "kv_lora_rank": 8, '
        '"qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 4}'
    )
    graph = trace_model(load(write(tmp_path, config, "config.json")), 1, 8)
    assert [w for w in graph.warnings if "without 1 layers of multi-token prediction" in w]
