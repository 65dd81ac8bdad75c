"""Groups of ranks under other orders of the mesh's axes, by listing the ranks themselves."""

from itertools import permutations, product

import pytest

from benchmarks.mesh_order import DATA, OUR_ORDER, PP, TP, ReorderedMachine, orders_of, placed
from costmodels.vocabulary.mesh import Group, Mesh
from costmodels.vocabulary.workload import CollectiveKind, GroupPlacement
from hardware_profiles.catalog import profile_for

MESH = Mesh(pp=2, dp_shard=3, tp=4)
DEGREES = {PP: 2, DATA: 3, TP: 4}


def listed(order: tuple[str, ...], along: str) -> GroupPlacement:
    """Where the ranks along one axis sit, found by numbering every rank along the order."""
    numbers = {
        tuple(place[order.index(axis)] for axis in OUR_ORDER): number
        for number, place in enumerate(product(*(range(DEGREES[axis]) for axis in order)))
    }
    at = OUR_ORDER.index(along)
    members = sorted(number for place, number in numbers.items() if all(place[i] == 0 for i in range(3) if i != at))
    return GroupPlacement(len(members), members[1] - members[0])


@pytest.mark.parametrize("order", list(permutations(OUR_ORDER)), ids=" > ".join)
def test_groups_lie_where_numbering_puts_them(order: tuple[str, ...]) -> None:
    for group, axis in ((Group.TENSOR, TP), (Group.ALL_DATA, DATA), (Group.PIPELINE, PP)):
        assert placed(MESH.group(group), MESH, order) == listed(order, axis)


def test_our_own_order_changes_nothing() -> None:
    mesh = Mesh(pp=2, dp_replicate=2, dp_shard=4, cp=2, tp=2, ep=2)
    for group in Group:
        assert placed(mesh.group(group), mesh, OUR_ORDER) == mesh.group(group)


def test_axes_of_one_rank_make_no_orders() -> None:
    assert list(orders_of(Mesh(dp_shard=8))) == [OUR_ORDER]
    assert len(list(orders_of(Mesh(pp=2, tp=2)))) == 2
    assert len(list(orders_of(MESH))) == 6


def test_a_pipeline_inside_the_node_sends_over_nvlink() -> None:
    cluster, mesh = profile_for(16, "dgx-h100-80gb"), Mesh(pp=2, dp_shard=8)
    across = mesh.group(Group.PIPELINE)
    (ours,) = ReorderedMachine(cluster, mesh=mesh).lines(CollectiveKind.SEND_RECV, across)
    (inside,) = ReorderedMachine(cluster, mesh=mesh, order=(DATA, PP, TP)).lines(CollectiveKind.SEND_RECV, across)
    assert ours[1] == pytest.approx(1 / (50e9 * 0.92))
    assert inside[1] == pytest.approx(1 / (450e9 * 0.583))
