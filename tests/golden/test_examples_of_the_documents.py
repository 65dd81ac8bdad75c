"""The small examples of the documents that the project began from, worked by the planner and by the executor."""

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from planner.api import find_plan
from planner.executor.tensor_parallel import apply_tensor_parallel, parameter_placements, tensor_parallel_context
from planner.layout.layout import Pins
from planner.plan.schema import ModulePlacement, Plan
from planner.request import Request
from tests.fake_world import fake_world

pytestmark = pytest.mark.usefixtures("traced_here")
FOUR_LAYERS = """
import torch
from torch import nn

class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(1024, 1024, bias=False)
        self.down = nn.Linear(1024, 1024, bias=False)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.T = nn.ModuleList(Layer() for _ in range(4))

    def forward(self, x):
        for layer in self.T:
            x = layer(x)
        return x

def build_model():
    return Model()

def example_inputs(batch_size, seq_len):
    return {"x": torch.zeros(batch_size, seq_len, 1024)}

def loss_fn(output, batch):
    return output.mean()
"""


@pytest.fixture
def four_layers(tmp_path: Path) -> str:
    path = tmp_path / "four_layers.py"
    path.write_text(FOUR_LAYERS)
    return str(path)


def planned(model: str, num_devices: int, pins: Pins) -> Plan:
    request = Request(model, num_devices, hardware="dgx-a100-80gb", seq_len=1024, global_batch_size=16, pins=pins)
    return find_plan(request).plan


def split_columns(module: nn.Module, degree: int) -> DeviceMesh:
    """Splits the columns of the only matrix of ``module``, as a plan would; the mesh that it is split over."""
    mesh = init_device_mesh("cpu", (degree,))
    entries = [ModulePlacement(module="0", parameters={"weight": "shard(0)"})]
    apply_tensor_parallel(module, parameter_placements(module, entries), entries, mesh)
    return mesh


def test_four_layers_on_two_devices(four_layers: str) -> None:
    """T1, T2 on device 0; T3, T4 on device 1."""
    plan = planned(four_layers, 2, Pins(pp=2, virtual_stages=1, micro_batch=1))
    assert [(stage.pp_rank, stage.modules) for stage in plan.pipeline.stages] == [
        (0, ("T.0", "T.1")),
        (1, ("T.2", "T.3")),
    ]


def test_a_square_matrix_in_four_column_blocks(four_layers: str) -> None:
    """A 1024 x 1024 matrix on four devices is four 1024 x 256 blocks of columns; the next one is split by rows."""
    plan = planned(four_layers, 4, Pins(tp=4))
    placed = {entry.module: entry.parameters for entry in plan.placements.tp}
    # nn.Linear keeps its matrix transposed, [out, in]: columns are rows there.
    assert [placed[f"T.{k}.up"] for k in range(4)] == [{"weight": "shard(0)"}] * 4
    assert [placed[f"T.{k}.down"] for k in range(4)] == [{"weight": "shard(1)"}] * 4
    module = nn.Sequential(nn.Linear(1024, 1024, bias=False))
    with fake_world(4):
        split_columns(module, 4)
        weight = module[0].weight
        assert isinstance(weight, DTensor)
        assert weight.T.shape == (1024, 1024)
        assert weight.to_local().T.shape == (1024, 256)


def test_a_product_split_by_data_and_by_model() -> None:
    """X 4x5 . W 5x8 on two devices: data parallel 2x8 halves, tensor parallel 4x4 halves; both make the whole 4x8."""
    torch.manual_seed(0)
    x = torch.arange(20.0).reshape(4, 5)
    model = nn.Sequential(nn.Linear(5, 8, bias=False))
    whole = model(x)
    by_data = [model(part) for part in x.chunk(2)]
    assert [tuple(part.shape) for part in by_data] == [(2, 8), (2, 8)]
    assert torch.equal(torch.cat(by_data, dim=0), whole)
    by_model: list[torch.Tensor] = []
    for rank in range(2):
        copy = nn.Sequential(nn.Linear(5, 8, bias=False))
        copy.load_state_dict(model.state_dict())
        with fake_world(2, rank):
            mesh = split_columns(copy, 2)
            with tensor_parallel_context(enabled=True):
                part = copy(DTensor.from_local(x, mesh))
        assert isinstance(part, DTensor)
        assert part.shape == (4, 8)
        by_model.append(part.to_local())
    assert [tuple(part.shape) for part in by_model] == [(4, 4), (4, 4)]
    assert torch.allclose(torch.cat(by_model, dim=1), whole)
