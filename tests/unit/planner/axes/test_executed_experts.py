"""What a search says of experts that `planner run` could not divide."""

import pytest

from costmodels.vocabulary.mesh import Mesh
from costmodels.vocabulary.schedules import ScheduleName
from planner.axes.base import Executed
from planner.axes.expert import EXPERT
from planner.graph.experts import expert_parameters
from planner.graph.model_graph import ModelGraph
from planner.layout.layout import Layout
from tests.planning import A100, cluster_of, graph_of

SEQ_LEN = 64  # of moe-tiny: 8 experts of 64 x 64


def said(mesh: Mesh, zero_stage: int = 1, width: int = 64) -> list[str]:
    graph = graph_of("moe-tiny", SEQ_LEN)
    experts = expert_parameters(graph)
    parameters = [
        p.model_copy(update={"shape": (8, width, width)}) if p.fqn in experts else p for p in graph.parameters
    ]
    fields = {name: getattr(graph, name) for name in ModelGraph.model_fields}  # and nothing that is worked out of them
    changed = ModelGraph.model_validate(fields | {"parameters": tuple(parameters)})
    layout = Layout(mesh, zero_stage, 1, 1, ScheduleName.ONE_F_ONE_B, 1, None, sequence_parallel=True)
    return EXPERT.unexecuted(Executed(layout, changed, cluster_of(A100, 8)))


@pytest.mark.parametrize(
    "mesh", [Mesh(dp_shard=8), Mesh(dp_shard=8, ep=8), Mesh(pp=2, dp_shard=2, tp=2, ep=2), Mesh(cp=8, ep=4)]
)
def test_what_is_executed_needs_no_word(mesh: Mesh) -> None:
    assert said(mesh) == []


def test_whole_experts_beside_tensor_parallelism_are_named() -> None:
    (words,) = said(Mesh(dp_shard=4, tp=2, ep=4, etp=1))
    assert "(etp=1): pin --etp 2" in words


def test_matrices_that_ranks_of_the_same_experts_cannot_part_are_named() -> None:
    """A rank of 8 has 4 experts of 63 x 63: two ranks part them, eight do not."""
    assert said(Mesh(dp_shard=4, ep=2), width=63) == []
    (words,) = said(Mesh(dp_shard=16, ep=2), width=63)
    assert "has no dim that 8 ranks of the same experts divide: pin --ep 1" in words
    assert said(Mesh(cp=16, ep=2), zero_stage=0, width=63) == []  # nothing is parted
