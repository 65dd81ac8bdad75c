"""graph.json: what is written comes back, what is damaged is refused by name, and reading needs no torch."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from planner.errors import InputError, ModelError
from planner.graph.graph_file import read_graph, write_graph
from planner.graph.trainable import check_positions
from tests.unit.planner.graph.traced import ROOT, graph_of


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "graph.json"
    write_graph(graph_of("gpt-tiny"), path)
    return path


def test_round_trip(file: Path) -> None:
    assert read_graph(file) == graph_of("gpt-tiny")
    assert [p.name for p in file.parent.iterdir()] == ["graph.json"]


def test_contract_keys(file: Path) -> None:
    content = json.loads(file.read_text())
    assert {"schema_version", "digest", "tier", "num_params", "num_trainable_params", "batch_size", "seq_len"} <= set(
        content
    )
    assert {"forward_flops", "backward_flops", "saved_activation_bytes", "edges", "warnings"} <= set(content)
    assert {"id", "op", "module", "shape", "dtype", "flops", "bytes_read", "bytes_written"} <= set(content["nodes"][0])
    assert {"modules", "count"} <= set(content["blocks"][0])


def test_reading_imports_no_torch(file: Path) -> None:
    program = (
        "import sys; from pathlib import Path; from planner.graph.graph_file import read_graph; "
        "from planner.model_file import resolve_model; source = resolve_model(sys.argv[1]); "
        "assert source.kind == 'graph'; read_graph(source.path); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program, str(file)], cwd=ROOT, check=False).returncode == 0


def change(file: Path, **changes: object) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"schema_version": 99}, "schema_version is 99"),
        ({"colour": "red"}, "colour: Extra inputs"),
        ({"num_params": "many"}, "num_params"),
        ({"edges": [[3, 1]]}, "edge 3 -> 1 does not lead forward"),
        ({"units": []}, "each node exactly once"),
        ({"forward_flops": 10**30}, "forward_flops is 1000000000000000000000000000000, the sum over the file is "),
        ({"backward_flops": 0}, "backward_flops is 0, the sum over the file is "),
        ({"num_params": 1}, "num_params is 1, the sum over the file is "),
        ({"num_trainable_params": 1}, "num_trainable_params is 1, the sum over the file is "),
        ({"digest": "a" * 5000}, "digest: String should have at most 4096 characters"),
        ({"source": "\ud800"}, "source: Input should be a valid string"),
        ({"dtype": "flo!t32"}, "dtype 'flo!t32' is none of bool,"),
    ],
)
def test_foreign_files_are_refused_by_name(file: Path, changes: dict[str, object], message: str) -> None:
    change(file, **changes)
    with pytest.raises(ModelError, match=message):
        read_graph(file)


def test_an_output_of_unknown_dtype_is_refused(file: Path) -> None:
    nodes = json.loads(file.read_text())["nodes"]
    change(file, nodes=[*nodes[:-1], {**nodes[-1], "dtype": "bfloat17"}])
    with pytest.raises(ModelError, match="dtype 'bfloat17' is none of"):
        read_graph(file)


@pytest.mark.parametrize("key", ["flops", "backward_flops"])
@pytest.mark.parametrize("op_class", ["view", "memory_bound"])
def test_products_of_an_operator_that_is_none_are_refused(file: Path, key: str, op_class: str) -> None:
    content = json.loads(file.read_text())
    node = next(node for node in content["nodes"] if node["op_class"] == op_class)
    node[key] = 10**29
    total = {"flops": "forward_flops"}.get(key, key)
    change(file, nodes=content["nodes"], **{total: sum(node.get(key, 0) for node in content["nodes"])})
    with pytest.raises(ModelError, match=f"{node['id']}: an operator of class {op_class} counts no FLOPs"):
        read_graph(file)


def test_more_gradients_of_weights_than_of_all_are_refused(file: Path) -> None:
    """A search divided by a backward pass of nothing."""
    nodes = json.loads(file.read_text())["nodes"]
    change(file, nodes=[{**nodes[0], "weight_gradient_flops": 2**31}, *nodes[1:]])
    with pytest.raises(ModelError, match="node 0: weight_gradient_flops are a part of backward_flops"):
        read_graph(file)


def test_a_unit_that_sends_what_is_not_there_is_refused(file: Path) -> None:
    units = json.loads(file.read_text())["units"]
    change(file, units=[{**units[0], "boundary": [28000]}, *units[1:]])
    with pytest.raises(ModelError, match=f"unit {units[0]['name']}: boundary names no node"):
        read_graph(file)


def test_operators_without_operands_are_planned_for(file: Path) -> None:
    """What looks something up has no table then; it was an internal error."""
    change(file, nodes=[{**node, "operands": []} for node in json.loads(file.read_text())["nodes"]])
    check_positions(read_graph(file))


@pytest.mark.parametrize(
    ("name", "message"), [("a" * 5000, "String should have at most 4096"), ("\udcff", "should be a valid string")]
)
def test_a_name_of_a_module_that_no_plan_could_say_is_refused(file: Path, name: str, message: str) -> None:
    units = json.loads(file.read_text())["units"]
    change(file, units=[{**units[0], "modules": [name]}, *units[1:]])
    with pytest.raises(ModelError, match=f"modules.0: .*{message}"):
        read_graph(file)


def test_all_violations_at_once(file: Path) -> None:
    change(file, units=[], edges=[[3, 1]])
    with pytest.raises(ModelError, match="does not lead forward.*exactly once"):
        read_graph(file)


def test_a_truncated_file_is_refused(file: Path) -> None:
    file.write_text(file.read_text()[:1000])
    with pytest.raises(ModelError, match="is not JSON"):
        read_graph(file)


def test_a_failed_write_leaves_the_old_file(file: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="is no folder"):
        write_graph(graph_of("gpt-tiny"), tmp_path / "absent" / "graph.json")
    assert read_graph(file) == graph_of("gpt-tiny")


def test_a_file_that_was_written_again_is_read_again(tmp_path: Path) -> None:
    file = tmp_path / "graph.json"
    write_graph(graph_of("gpt-tiny"), file)
    first = read_graph(file)
    assert read_graph(file) is first
    write_graph(graph_of("llama-tiny"), file)
    assert read_graph(file) == graph_of("llama-tiny")
    file.write_text("{}")
    with pytest.raises(ModelError):
        read_graph(file)
