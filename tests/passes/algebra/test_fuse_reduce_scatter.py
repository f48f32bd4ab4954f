"""all_reduce and shard of one group."""

import pytest
from expecttest import assert_expected_inline

from dtensor.comm.collectives import ops
from dtensor.passes import FuseReduceScatter


def test_fires(bench):
    gm = bench.trace(lambda x: ops.shard(ops.all_reduce(x, "sum", bench.tp), 1, bench.tp) + 1, (4, 6))
    assert_expected_inline(
        bench.text(gm),
        """\
%x_1: f32[4,6] = placeholder
%all_reduce: f32[4,6] = dtensor.all_reduce(%x_1, 'sum', tp)
%shard: f32[4,3] = dtensor.shard(%all_reduce, 1, tp)
%add: f32[4,3] = aten.add.Tensor(%shard, 1)
return %add""",
    )
    assert bench.apply(FuseReduceScatter(), gm) == 1
    assert_expected_inline(
        bench.text(gm),
        """\
%x_1: f32[4,6] = placeholder
%reduce_scatter: f32[4,3] = dtensor.reduce_scatter(%x_1, 'sum', 1, tp)
%add: f32[4,3] = aten.add.Tensor(%reduce_scatter, 1)
return %add""",
    )


@pytest.mark.parametrize("reduce_op", ["avg", "max", "min", "product"])
@pytest.mark.parametrize("rows", [8, 5, 2])
def test_any_reduction_and_uneven_shards(bench, reduce_op, rows):
    gm = bench.trace(lambda x: ops.shard(ops.all_reduce(x, reduce_op, bench.world), 0, bench.world), (rows, 3))
    assert bench.apply(FuseReduceScatter(), gm) == 1


def test_equal_shards_all_become_reduce_scatters(bench):
    def f(x):
        y = ops.all_reduce(x, "sum", bench.tp)
        return ops.shard(y, 0, bench.tp) + 1, ops.shard(y, -2, bench.tp) * 2

    gm = bench.trace(f, (4, 6))
    assert bench.apply(FuseReduceScatter(), gm) == 2


def test_provenance_is_kept(bench):
    gm = bench.trace(lambda x: ops.shard(ops.all_reduce(x, "sum", bench.tp), 0, bench.tp), (4, 6))
    node = next(n for n in gm.graph.nodes if n.target is ops.all_reduce.default)
    node.meta.update(stack_trace="model.py:3", custom={"why": "P->R"})
    bench.apply(FuseReduceScatter(), gm)
    node = next(n for n in gm.graph.nodes if n.target is ops.reduce_scatter.default)
    assert (node.meta["stack_trace"], node.meta["custom"]) == ("model.py:3", {"why": "P->R"})


def test_full_value_that_is_needed_keeps_the_all_reduce(bench):
    def f(x):
        y = ops.all_reduce(x, "sum", bench.tp)
        return ops.shard(y, 0, bench.tp), y + 1

    assert bench.keeps(FuseReduceScatter(), bench.trace(f, (4, 6)))


def test_different_shards_keep_the_all_reduce(bench):
    def f(x):
        y = ops.all_reduce(x, "sum", bench.tp)
        return ops.shard(y, 0, bench.tp), ops.shard(y, 1, bench.tp)

    assert bench.keeps(FuseReduceScatter(), bench.trace(f, (4, 6)))


def test_other_group_stays(bench):
    gm = bench.trace(lambda x: ops.shard(ops.all_reduce(x, "sum", bench.tp), 0, bench.dp), (4, 6))
    assert bench.keeps(FuseReduceScatter(), gm)


def test_shard_beside_an_all_reduce_stays(bench):
    assert bench.keeps(
        FuseReduceScatter(), bench.trace(lambda x: ops.all_reduce(ops.shard(x, 0, bench.tp), "sum", bench.tp), (4, 6))
    )


def test_symbolic_batch(bench):
    gm = bench.trace(lambda x: ops.shard(ops.all_reduce(x, "sum", bench.tp), 1, bench.tp) + 1, (4, 6), symbolic=True)
    assert bench.apply(FuseReduceScatter(), gm) == 1
