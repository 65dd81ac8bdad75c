"""Groups of ranks against the ranks themselves, laid out as the device mesh numbers them."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from costmodels.vocabulary.mesh import ZERO_STAGES, Group, Mesh, MeshAxis

# The axes along which the ranks of each group differ; dp_shard and cp are cut into an outer and an inner part of ep.
AXES = {
    Group.TENSOR: ("tp",),
    Group.CONTEXT: ("cp",),
    Group.EXPERT: ("inner",),
    Group.SHARD: ("dp_shard", "cp"),
    Group.EXPERT_SHARD: ("outer",),
    Group.REPLICATE: ("dp_replicate",),
    Group.ALL_DATA: ("dp_replicate", "dp_shard", "cp"),
    Group.EXPERT_DATA: ("dp_replicate", "outer"),
    Group.PIPELINE: ("pp",),
}
degrees = st.sampled_from([1, 2, 3, 4])


def first_group(mesh: Mesh, axes: tuple[str, ...]) -> list[int]:
    """The group of rank 0, from the numbers of all ranks."""
    names = ["pp", "dp_replicate", "dp_shard", "cp", "tp"]
    shape = [mesh.pp, mesh.dp_replicate, mesh.dp_shard, mesh.cp, mesh.tp]
    if {"outer", "inner"} & set(axes):
        names = ["pp", "dp_replicate", "outer", "inner", "tp"]
        shape = [mesh.pp, mesh.dp_replicate, mesh.dp_shard * mesh.cp // mesh.ep, mesh.ep, mesh.tp]
    ranks = np.arange(np.prod(shape)).reshape(shape)
    index = tuple(slice(None) if name in axes else 0 for name in names)
    return sorted(ranks[index].ravel().tolist())


@given(st.tuples(degrees, degrees, degrees, degrees, degrees), st.data())
def test_groups_are_those_of_the_numbered_ranks(shape: tuple[int, ...], data: st.DataObject) -> None:
    pp, replicate, shard, cp, tp = shape
    ep = data.draw(st.sampled_from([d for d in range(1, shard * cp + 1) if shard * cp % d == 0]))
    mesh = Mesh(pp, replicate, shard, cp, tp, ep)
    assert not mesh.violations()
    assert set(AXES) == set(Group)
    for group, axes in AXES.items():
        placement, ranks = mesh.group(group), first_group(mesh, axes)
        assert placement.num_ranks == len(ranks), group
        assert ranks == [i * placement.stride for i in range(len(ranks))], group


@given(st.tuples(degrees, degrees, degrees, degrees, st.sampled_from([2, 3, 4])), st.data())
def test_experts_whole_on_a_rank_lie_over_tensor_ranks_as_well(shape: tuple[int, ...], data: st.DataObject) -> None:
    """Rank by rank: two hold the same experts where their places within a replica of shards agree modulo ep."""
    pp, replicate, shard, cp, tp = shape
    inside = shard * cp * tp
    ep = data.draw(st.sampled_from([d for d in range(2, inside + 1) if inside % d == 0]))
    mesh = Mesh(pp, replicate, shard, cp, tp, ep, etp=1)
    assert not mesh.violations()
    experts = {rank: rank % inside % ep for rank in range(mesh.world_size)}
    of_rank_0 = {
        Group.EXPERT: range(ep),
        Group.EXPERT_SHARD: [rank for rank in range(inside) if experts[rank] == 0],
        Group.EXPERT_DATA: [rank for rank in range(replicate * inside) if experts[rank] == 0],
    }
    for group, ranks in of_rank_0.items():
        placement = mesh.group(group)
        assert list(ranks) == [i * placement.stride for i in range(placement.num_ranks)], group
    assert mesh.experts_are_replicated == (len(of_rank_0[Group.EXPERT_DATA]) > 1)
    assert mesh.expert_parts == ep / tp
    # All else lies as it does without.
    for group in set(Group) - set(of_rank_0):
        assert mesh.group(group) == Mesh(pp, replicate, shard, cp, tp).group(group)


def test_sizes() -> None:
    mesh = Mesh(pp=2, dp_replicate=3, dp_shard=5, cp=7, tp=11)
    assert mesh.world_size == 2 * 3 * 5 * 7 * 11
    assert mesh.dp == 15
    assert [mesh.degree(axis) for axis in MeshAxis] == [2, 3, 5, 7, 11]


def test_every_broken_rule_is_said() -> None:
    assert Mesh(dp_shard=4, cp=2, ep=3).violations() == ("ep 3 does not divide dp_shard * cp = 8",)
    assert len(Mesh(pp=0, tp=-1).violations()) == 2
    assert Mesh(tp=4, ep=2, dp_shard=2, etp=2).violations() == ("etp must be 1 or tp = 4, got 2",)
    assert Mesh(ep=2, dp_shard=2, etp=1).violations() == ("etp must be 1 or tp = 1, got 1",)
    assert Mesh(tp=4, ep=3, etp=1).violations() == ("ep 3 does not divide dp_shard * cp * tp = 4",)
    assert Mesh(tp=4, etp=1).violations() == ("etp 1 beside tp > 1 needs ep > 1, or every rank would hold all experts",)


@pytest.mark.parametrize("number", [1, 2, 3])
def test_only_a_stage_that_shards_takes_shards(number: int) -> None:
    mesh = Mesh(dp_shard=8, ep=8)
    assert ZERO_STAGES[number].violations(mesh) == ()
    assert ZERO_STAGES[0].violations(mesh) == ("ZeRO stage 0 shards nothing, but dp_shard is 8",)
    assert ZERO_STAGES[0].violations(Mesh(dp_replicate=8)) == ()
    assert mesh.group(Group.EXPERT_DATA).num_ranks == 1
