"""Reductions over several axes, cut over some of them."""

import pytest
import torch
from expecttest import assert_expected_inline

from dtensor.comm.collectives import ops
from dtensor.passes import ScatterBeforeReduce, count, run, wire_bytes
from dtensor.passes.graph import groups


def test_fires(cube):
    def f(x):
        return torch.relu(ops.shard(ops.all_reduce(x, "sum", cube.over("abc")), 0, cube.over("b")))

    gm = cube.trace(f, (4, 6))
    assert_expected_inline(
        cube.text(gm),
        """\
%x_1: f32[4,6] = placeholder
%all_reduce: f32[4,6] = dtensor.all_reduce(%x_1, 'sum', abc)
%shard: f32[2,6] = dtensor.shard(%all_reduce, 0, b)
%relu: f32[2,6] = aten.relu(%shard)
return %relu""",
    )
    before = wire_bytes(gm)
    assert cube.apply(ScatterBeforeReduce(), gm) == 1
    assert_expected_inline(
        cube.text(gm),
        """\
%x_1: f32[4,6] = placeholder
%reduce_scatter: f32[2,6] = dtensor.reduce_scatter(%x_1, 'sum', 0, b)
%all_reduce: f32[2,6] = dtensor.all_reduce(%reduce_scatter, 'sum', ac)
%relu: f32[2,6] = aten.relu(%all_reduce)
return %relu""",
    )
    # 2 * 7/8 of 96 bytes; then 1/2 of 96 and 2 * 3/4 of 48.
    assert (before, wire_bytes(gm)) == (168, 48 + 72)


def test_two_cuts_one_after_the_other(cube):
    def f(x):
        y = ops.all_reduce(x, "sum", cube.over("ac"))
        return ops.shard(ops.shard(y, 1, cube.over("c")), 0, cube.over("a")) + 1

    gm = cube.trace(f, (4, 6))
    run(gm, disable=["lower"], simulate=cube.simulation, meshes=cube.meshes)
    assert count(gm) == {"reduce_scatter": 2}


def test_reduce_scatter_goes_before_an_all_reduce_over_another_axis(cube):
    def f(x):
        return ops.reduce_scatter(ops.all_reduce(x, "sum", cube.over("a")), "sum", 0, cube.over("bc")) + 1

    gm = cube.trace(f, (8, 3))
    before = wire_bytes(gm)
    assert cube.apply(ScatterBeforeReduce(), gm) == 1
    assert_expected_inline(
        cube.text(gm),
        """\
%x_1: f32[8,3] = placeholder
%reduce_scatter: f32[2,3] = dtensor.reduce_scatter(%x_1, 'sum', 0, bc)
%all_reduce: f32[2,3] = dtensor.all_reduce(%reduce_scatter, 'sum', a)
%add: f32[2,3] = aten.add.Tensor(%all_reduce, 1)
return %add""",
    )
    assert (before, wire_bytes(gm)) == (96 + 72, 72 + 24)


@pytest.mark.parametrize("reduce_op", ["avg", "max", "min", "product"])
@pytest.mark.parametrize("rows", [4, 5, 1])
def test_any_reduction_and_uneven_shards(cube, reduce_op, rows):
    def f(x):
        y = ops.shard(ops.all_reduce(x, reduce_op, cube.over("abc")), 0, cube.over("ac"))
        return y, ops.reduce_scatter(ops.all_reduce(x, reduce_op, cube.over("c")), reduce_op, 0, cube.over("b"))

    assert cube.apply(ScatterBeforeReduce(), cube.trace(f, (rows, 3))) == 2


def test_equal_shards_share_one(cube):
    """They all leave, or are written to: copies."""

    def f(x):
        y = ops.all_reduce(x, "sum", cube.over("ab"))
        first = ops.shard(y, 1, cube.over("a")).add_(1)
        return [first, ops.shard(y, -1, cube.over("a")), ops.shard(y, 1, cube.over("a"))]

    gm = cube.trace(f, (4, 6))
    assert cube.apply(ScatterBeforeReduce(), gm) == 3
    assert sum(count(gm).values()) == 2


REFUSED = {
    "needed whole": lambda c: lambda x: (ops.shard(y := ops.all_reduce(x, "sum", c("ab")), 0, c("a")), y + 1),
    "cut in two ways": lambda c: (
        lambda x: (ops.shard(y := ops.all_reduce(x, "sum", c("ab")), 0, c("a")), ops.shard(y, 1, c("a")))
    ),
    "the whole group": lambda c: lambda x: ops.shard(ops.all_reduce(x, "sum", c("ab")), 0, c("ab")),
    "another axis": lambda c: lambda x: ops.shard(ops.all_reduce(x, "sum", c("ab")), 0, c("c")),
    "an axis too many": lambda c: lambda x: ops.shard(ops.all_reduce(x, "sum", c("ab")), 0, c("bc")),
    "other reductions": lambda c: lambda x: ops.reduce_scatter(ops.all_reduce(x, "max", c("a")), "sum", 0, c("b")),
    "other reductions, the other way round": lambda c: (
        lambda x: ops.reduce_scatter(ops.all_reduce(x, "sum", c("a")), "max", 0, c("b"))
    ),
    "an axis in common": lambda c: lambda x: ops.reduce_scatter(ops.all_reduce(x, "sum", c("ab")), "sum", 0, c("b")),
    "used beside": lambda c: lambda x: (ops.reduce_scatter(y := ops.all_reduce(x, "sum", c("a")), "sum", 0, c("b")), y),
}


@pytest.mark.parametrize("case", REFUSED)
def test_must_not_fire(cube, case):
    assert cube.keeps(ScatterBeforeReduce(), cube.trace(REFUSED[case](cube.over), (4, 4)))


def test_groups_of_no_known_mesh_stay(cube):
    gm = cube.trace(lambda x: ops.shard(ops.all_reduce(x, "sum", cube.over("ab")), 0, cube.over("a")), (4, 6))
    with groups.known(()):
        assert cube.keeps(ScatterBeforeReduce(), gm)
