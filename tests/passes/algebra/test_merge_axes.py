"""Collectives of one kind over one axis and then another."""

from dataclasses import replace

import pytest
from expecttest import assert_expected_inline

from dtensor.comm.collectives import ops
from dtensor.passes import MergeAxes, wire_bytes
from dtensor.passes.graph import groups
from dtensor.prices.links import INTER, INTRA


def test_all_reduces(cube):
    def f(x):
        return ops.all_reduce(ops.all_reduce(x, "sum", cube.over("c")), "sum", cube.over("a")) + 1

    gm = cube.trace(f, (4, 6))
    before = wire_bytes(gm)
    assert cube.apply(MergeAxes(), gm) == 1
    assert_expected_inline(
        cube.text(gm),
        """\
%x_1: f32[4,6] = placeholder
%all_reduce: f32[4,6] = dtensor.all_reduce(%x_1, 'sum', ac)
%add: f32[4,6] = aten.add.Tensor(%all_reduce, 1)
return %add""",
    )
    assert (before, wire_bytes(gm)) == (96 + 96, 144)


@pytest.mark.parametrize("reduce_op", ["sum", "avg", "max", "min", "product"])
def test_three_all_reduces_in_any_order(cube, reduce_op):
    def f(x):
        for axis in "bca":
            x = ops.all_reduce(x, reduce_op, cube.over(axis))
        return x

    gm = cube.trace(f, (5, 3))
    assert cube.apply(MergeAxes(), gm) == 2
    assert f"%all_reduce: f32[5,3] = dtensor.all_reduce(%x_1, '{reduce_op}', abc)" in cube.text(gm)


def test_all_gathers(cube):
    def f(x):
        return ops.all_gather(ops.all_gather(x, 1, 12, cube.over("bc")), 1, 24, cube.over("a")) + 1

    gm = cube.trace(f, (4, 3))
    before = wire_bytes(gm)
    assert cube.apply(MergeAxes(), gm) == 1
    assert_expected_inline(
        cube.text(gm),
        """\
%x_1: f32[4,3] = placeholder
%all_gather: f32[4,24] = dtensor.all_gather(%x_1, 1, 24, abc)
%add: f32[4,24] = aten.add.Tensor(%all_gather, 1)
return %add""",
    )
    assert wire_bytes(gm) == before


def test_reduce_scatters(cube):
    def f(x):
        return ops.reduce_scatter(ops.reduce_scatter(x, "sum", 0, cube.over("a")), "sum", 0, cube.over("bc")) + 1

    gm = cube.trace(f, (8, 3))
    before = wire_bytes(gm)
    assert cube.apply(MergeAxes(), gm) == 1
    assert_expected_inline(
        cube.text(gm),
        """\
%x_1: f32[8,3] = placeholder
%reduce_scatter: f32[1,3] = dtensor.reduce_scatter(%x_1, 'sum', 0, abc)
%add: f32[1,3] = aten.add.Tensor(%reduce_scatter, 1)
return %add""",
    )
    assert wire_bytes(gm) == before


def gather(x, group, dim=0):
    return ops.all_gather(x, dim, x.shape[dim] * (4 if len(group[1]) == 2 else 2), group[0])


def reduce(x, group, op="sum"):
    return ops.all_reduce(x, op, group[0])


def scatter(x, group, op="sum", dim=0):
    return ops.reduce_scatter(x, op, dim, group[0])


REFUSED = {
    "one group twice": lambda c: lambda x: reduce(reduce(x, c("a")), c("a")),
    "an axis in common": lambda c: lambda x: reduce(reduce(x, c("ab")), c("bc")),
    "other reductions": lambda c: lambda x: reduce(reduce(x, c("a"), "max"), c("b")),
    "used between": lambda c: lambda x: (reduce(y := reduce(x, c("a")), c("b")), y * 2),
    "something between": lambda c: lambda x: reduce(reduce(x, c("a")) * 2, c("b")),
    "outer axis gathered first": lambda c: lambda x: gather(gather(x, c("a")), c("bc")),
    "an axis between": lambda c: lambda x: gather(gather(x, c("b")), c("ac")),
    "other dims": lambda c: lambda x: gather(gather(x, c("bc")), c("a"), 1),
    "an axis left that may cut unevenly": lambda c: lambda x: gather(gather(x, c("b")), c("a")),
    "a length that does not divide": lambda c: (
        lambda x: ops.all_gather(ops.all_gather(x, 0, 15, c("bc")[0]), 0, 30, c("a")[0])
    ),
    "inner axis scattered first": lambda c: lambda x: scatter(scatter(x, c("bc")), c("a")),
    "other dims scattered": lambda c: lambda x: scatter(scatter(x, c("a")), c("bc"), dim=1),
    "a scattered length that does not divide": lambda c: lambda x: scatter(scatter(x[:6], c("a")), c("bc")),
    "reductions of other kinds": lambda c: lambda x: reduce(scatter(x, c("a")), c("bc")),
}


@pytest.mark.parametrize("case", REFUSED)
def test_must_not_fire(cube, case):
    gm = cube.trace(REFUSED[case](lambda label: (cube.over(label), label)), (8, 4))
    assert cube.keeps(MergeAxes(), gm)


def test_groups_of_no_known_mesh_stay(cube):
    gm = cube.trace(lambda x: reduce(reduce(x, (cube.over("a"),)), (cube.over("b"),)), (4, 6))
    with groups.known(()):
        assert cube.keeps(MergeAxes(), gm)


def test_a_slow_axis_stays_alone(cube):
    """Over both, all bytes would go at the pace of the slow link; over two alike, they are fewer."""
    gm = cube.trace(lambda x: reduce(reduce(x, (cube.over("b"),)), (cube.over("a"),)), (4, 6))
    with cube.links(INTER, INTRA, INTRA):
        assert cube.keeps(MergeAxes(), gm)
    with cube.links(INTER, INTER, INTRA):
        assert cube.apply(MergeAxes(), gm) == 1


@pytest.mark.parametrize("kind", ["gathers", "scatters"])
def test_a_slow_axis_over_which_a_part_is_sent_stays_alone(cube, kind):
    """What goes over it is the part of one rank of the fast axis; over both, it would be all of it."""
    a, rest = ((cube.over(label), label) for label in ("a", "bc"))
    f = (lambda x: gather(gather(x, rest), a)) if kind == "gathers" else (lambda x: scatter(scatter(x, a), rest))
    gm = cube.trace(f, (8, 4))
    with cube.links(INTRA, INTER, INTER):
        assert cube.keeps(MergeAxes(), gm)
    with cube.links(INTER, INTER, INTER):
        assert cube.apply(MergeAxes(), gm) == 1


@pytest.mark.parametrize("axes", ["ab", "ba"])
def test_an_axis_that_is_a_little_slower_merges(cube, axes):
    """All bytes then travel at its pace, but there are fewer: 1.8 in place of 1 + 1.2 of the faster axis."""
    early, late = axes
    gm = cube.trace(lambda x: reduce(reduce(x, (cube.over(early),)), (cube.over(late),)), (4, 6))
    with cube.links(replace(INTER, bandwidth=INTER.bandwidth / 1.2), INTER, INTER):
        assert cube.apply(MergeAxes(), gm) == 1


def test_what_the_backward_puts_off_stays(cube):
    gm = cube.trace(lambda x: reduce(reduce(x, (cube.over("b"),)), (cube.over("a"),)), (4, 6))
    list(gm.graph.nodes)[2].meta["partitioner_tag"] = "is_backward"
    assert cube.keeps(MergeAxes(), gm)
