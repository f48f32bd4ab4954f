"""Shards over other axes than those of the collective before them."""

import pytest
import torch
from expecttest import assert_expected_inline

from dtensor.comm.collectives import ops
from dtensor.passes import ShardBeforeCollective, count, run, wire_bytes
from dtensor.passes.graph import groups


def test_before_an_all_gather(cube):
    def f(x):
        return torch.relu(ops.shard(ops.all_gather(x, 0, 8, cube.over("a")), 1, cube.over("bc")))

    gm = cube.trace(f, (4, 8))
    before = wire_bytes(gm)
    assert cube.apply(ShardBeforeCollective(), gm) == 1
    assert_expected_inline(
        cube.text(gm),
        """\
%x_1: f32[4,8] = placeholder
%shard: f32[4,2] = dtensor.shard(%x_1, 1, bc)
%all_gather: f32[8,2] = dtensor.all_gather(%shard, 0, 8, a)
%relu: f32[8,2] = aten.relu(%all_gather)
return %relu""",
    )
    assert (before, wire_bytes(gm)) == (128, 32)


def test_before_an_all_reduce(cube):
    def f(x):
        return torch.relu(ops.shard(ops.all_reduce(x, "max", cube.over("b")), 0, cube.over("a")))

    gm = cube.trace(f, (4, 6))
    assert cube.apply(ShardBeforeCollective(), gm) == 1
    assert_expected_inline(
        cube.text(gm),
        """\
%x_1: f32[4,6] = placeholder
%shard: f32[2,6] = dtensor.shard(%x_1, 0, a)
%all_reduce: f32[2,6] = dtensor.all_reduce(%shard, 'max', b)
%relu: f32[2,6] = aten.relu(%all_reduce)
return %relu""",
    )


def test_up_to_the_collective_it_belongs_to(cube):
    def f(x):
        y = ops.all_gather(ops.all_reduce(x, "sum", cube.over("c")), 0, 8, cube.over("a"))
        return ops.shard(y, 1, cube.over("c")) + 1

    gm = cube.trace(f, (4, 6))
    run(gm, disable=["lower"], simulate=cube.simulation, meshes=cube.meshes)
    assert count(gm) == {"reduce_scatter": 1, "all_gather": 1}


@pytest.mark.parametrize("columns", [4, 3, 1])
def test_uneven_shards(cube, columns):
    gm = cube.trace(lambda x: ops.shard(ops.all_gather(x, 0, 8, cube.over("a")), 1, cube.over("bc")), (4, columns))
    assert cube.apply(ShardBeforeCollective(), gm) == 1
    gm = cube.trace(lambda x: ops.shard(ops.all_reduce(x, "sum", cube.over("a")), 1, cube.over("bc")), (4, columns))
    assert cube.apply(ShardBeforeCollective(), gm) == 1


def test_equal_shards_share_one(cube):
    """They all leave, or are written to: copies."""

    def f(x):
        y = ops.all_gather(x, 0, 8, cube.over("b"))
        first = ops.shard(y, 1, cube.over("a")).add_(1)
        return [first, ops.shard(y, -1, cube.over("a")), ops.shard(y, 1, cube.over("a"))]

    gm = cube.trace(f, (4, 6))
    assert cube.apply(ShardBeforeCollective(), gm) == 3
    assert sum(count(gm).values()) == 1


REFUSED = {
    "same dim": lambda c: lambda x: ops.shard(ops.all_gather(x, 0, 8, c("a")), 0, c("b")),
    "same group": lambda c: lambda x: ops.shard(ops.all_gather(x, 0, 8, c("a")), 1, c("a")),
    "an axis in common": lambda c: lambda x: ops.shard(ops.all_reduce(x, "sum", c("ab")), 1, c("bc")),
    "needed whole": lambda c: lambda x: (ops.shard(y := ops.all_reduce(x, "sum", c("a")), 1, c("b")), y + 1),
    "a reduce_scatter": lambda c: lambda x: ops.shard(ops.reduce_scatter(x, "sum", 0, c("a")), 1, c("b")),
    "nothing between": lambda c: lambda x: ops.shard(torch.relu(x), 1, c("b")),
}


@pytest.mark.parametrize("case", REFUSED)
def test_must_not_fire(cube, case):
    assert cube.keeps(ShardBeforeCollective(), cube.trace(REFUSED[case](cube.over), (4, 4)))


def test_groups_of_no_known_mesh_stay(cube):
    gm = cube.trace(lambda x: ops.shard(ops.all_reduce(x, "sum", cube.over("b")), 0, cube.over("a")), (4, 6))
    with groups.known(()):
        assert cube.keeps(ShardBeforeCollective(), gm)


def test_a_shard_in_the_backward_stays_there(cube):
    gm = cube.trace(lambda x: ops.shard(ops.all_reduce(x, "sum", cube.over("b")), 0, cube.over("a")), (4, 6))
    list(gm.graph.nodes)[2].meta["partitioner_tag"] = "is_backward"
    assert cube.keeps(ShardBeforeCollective(), gm)
