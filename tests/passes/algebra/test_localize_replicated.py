"""Collectives of what all ranks hold already."""

import pytest
import torch
from expecttest import assert_expected_inline

from dtensor.comm.collectives import ops
from dtensor.passes import LocalizeReplicated, count, run
from dtensor.passes.graph import groups


def reducer(bench):
    return lambda x, op="sum", group=bench.tp: ops.all_reduce(x, op, group)


def test_fires(bench):
    r = reducer(bench)

    def f(x):
        y = torch.relu(r(x))
        return r(y), ops.all_gather(y, 0, 8, bench.tp), r(y, "max") + 1

    gm = bench.trace(f, (4,))
    assert_expected_inline(
        bench.text(gm),
        """\
%x_1: f32[4] = placeholder
%all_reduce: f32[4] = dtensor.all_reduce(%x_1, 'sum', tp)
%relu: f32[4] = aten.relu(%all_reduce)
%all_reduce_1: f32[4] = dtensor.all_reduce(%relu, 'sum', tp)
%all_gather: f32[8] = dtensor.all_gather(%relu, 0, 8, tp)
%all_reduce_2: f32[4] = dtensor.all_reduce(%relu, 'max', tp)
%add: f32[4] = aten.add.Tensor(%all_reduce_2, 1)
return %all_reduce_1, %all_gather, %add""",
    )
    assert bench.apply(LocalizeReplicated(), gm) == 3
    assert_expected_inline(
        bench.text(gm),
        """\
%x_1: f32[4] = placeholder
%all_reduce: f32[4] = dtensor.all_reduce(%x_1, 'sum', tp)
%relu: f32[4] = aten.relu(%all_reduce)
%mul: f32[4] = aten.mul.Tensor(%relu, 2)
%cat: f32[8] = aten.cat([%relu, %relu], 0)
%add: f32[4] = aten.add.Tensor(%relu, 1)
return %mul, %cat, %add""",
    )


ALIKE = {
    "gathered": lambda r, b: lambda x, y: r(ops.all_gather(x, 0, 4, b.tp)),
    "over a wider group": lambda r, b: lambda x, y: r(r(x, group=b.world)),
    "average": lambda r, b: lambda x, y: r(r(x), "avg"),
    "sum of two": lambda r, b: lambda x, y: r(r(x) + r(y)),
    "view": lambda r, b: lambda x, y: r(r(x).t().reshape(8)),
    "scattered": lambda r, b: lambda x, y: ops.reduce_scatter(r(x), "sum", 1, b.tp),
    "scattered minimum": lambda r, b: lambda x, y: ops.reduce_scatter(r(x), "min", 1, b.tp),
    "scattered unevenly": lambda r, b: lambda x, y: ops.reduce_scatter(r(x).view(1, 8), "sum", 0, b.tp),
}


@pytest.mark.parametrize("case", ALIKE)
def test_one_collective_is_left(bench, case):
    gm = bench.trace(ALIKE[case](reducer(bench), bench), (2, 4), (2, 4))
    before = sum(count(gm).values())
    assert bench.apply(LocalizeReplicated(), gm) == 1
    assert sum(count(gm).values()) == before - 1


def test_views_to_symbolic_sizes(bench):
    """A size is no value that ranks must hold alike for the view to be alike."""
    r = reducer(bench)
    gm = bench.trace(lambda x: r(r(x).view(x.shape[0] * 6)), (4, 6), symbolic=True)
    assert bench.apply(LocalizeReplicated(), gm) == 1


def test_result_that_leaves_the_graph_is_a_copy(bench):
    r = reducer(bench)
    gm = bench.trace(lambda x: ((y := r(x)), r(y, "max")), (4,))
    assert bench.apply(LocalizeReplicated(), gm) == 1
    assert "aten.clone(%all_reduce" in bench.text(gm)


def test_all_reduce_of_a_shard_that_was_gathered(bench):
    gm = bench.trace(lambda x: reducer(bench)(torch.neg(ops.all_gather(x, 0, 4, bench.tp)), "avg") * 2, (2, 3))
    run(gm, simulate=bench.simulation, meshes=bench.meshes)
    assert count(gm) == {"all_gather": 1}


REFUSED = {
    "input": lambda r, b: lambda x, y: r(x),
    "constant": lambda r, b: lambda x, y: r(torch.ones(4)),
    "with an input": lambda r, b: lambda x, y: r(r(x) + y),
    "a place in it": lambda r, b: lambda x, y: r(r(x)[0]),
    "other group": lambda r, b: lambda x, y: r(r(x), group=b.dp),
    "wider group": lambda r, b: lambda x, y: r(r(x), group=b.world),
    "scattered": lambda r, b: lambda x, y: r(ops.reduce_scatter(x, "sum", 0, b.tp)),
    "sharded": lambda r, b: lambda x, y: r(ops.shard(torch.arange(2.0), 0, b.tp)),
    "shards": lambda r, b: lambda x, y: ops.all_gather(ops.shard(r(x), 0, b.tp), 0, 2, b.tp),
    "random": lambda r, b: lambda x, y: r(torch.rand_like(r(x))),
    "product": lambda r, b: lambda x, y: r(r(x), "product"),
    "product that is scattered": lambda r, b: lambda x, y: ops.reduce_scatter(r(x), "product", 0, b.tp),
    "gathered to less": lambda r, b: lambda x, y: ops.all_gather(r(x), 0, 3, b.tp),
}


@pytest.mark.parametrize("case", REFUSED)
def test_must_not_fire(bench, case):
    assert bench.keeps(LocalizeReplicated(), bench.trace(REFUSED[case](reducer(bench), bench), (2, 4), (2, 4)))


def test_numbers_that_may_be_this_ranks(bench):
    r = reducer(bench)
    assert bench.keeps(LocalizeReplicated(), bench.trace(lambda x: r(r(x) * 2), (4,), by_hand=True))
    assert bench.apply(LocalizeReplicated(), bench.trace(lambda x: r(r(x) * 2), (4,))) == 1


def test_what_is_written_to_is_not_alike(bench):
    def f(x, y):
        total = reducer(bench)(x)
        z = total.relu()
        z.add_(y)
        again = reducer(bench)(z)
        total.view(2, 2).add_(1)
        return again + reducer(bench)(total)

    assert bench.keeps(LocalizeReplicated(), bench.trace(f, (4,), (4,)))


def test_integers_stay(bench):
    r = reducer(bench)
    assert bench.keeps(LocalizeReplicated(), bench.trace(lambda x: r(r(x)), (2,), dtype=torch.int64))
    scattered = bench.trace(lambda x: ops.reduce_scatter(r(x), "sum", 0, bench.tp), (2,), dtype=torch.int64)
    assert bench.keeps(LocalizeReplicated(), scattered)


def test_a_wider_group_of_no_known_mesh_is_not_wider(bench):
    r = reducer(bench)
    gm = bench.trace(lambda x: r(r(x, group=bench.world)), (4,))
    with groups.known(()):
        assert bench.keeps(LocalizeReplicated(), gm)
