"""reduce_scatter and all_gather of one dim and group."""

import pytest
import torch
from expecttest import assert_expected_inline

from dtensor.comm.collectives import ops
from dtensor.passes import FuseAllReduce, count, run, wire_bytes


def there_and_back(bench, dim=0, size=4, op="sum", group=None):
    group = group or bench.tp
    return lambda x: ops.all_gather(ops.reduce_scatter(x, op, dim, group), dim, size, group)


def test_fires(bench):
    gm = bench.trace(there_and_back(bench, 1, 6), (4, 6))
    assert_expected_inline(
        bench.text(gm),
        """\
%x_1: f32[4,6] = placeholder
%reduce_scatter: f32[4,3] = dtensor.reduce_scatter(%x_1, 'sum', 1, tp)
%all_gather: f32[4,6] = dtensor.all_gather(%reduce_scatter, 1, 6, tp)
return %all_gather""",
    )
    before = wire_bytes(gm)
    assert bench.apply(FuseAllReduce(), gm) == 1
    assert_expected_inline(
        bench.text(gm),
        """\
%x_1: f32[4,6] = placeholder
%all_reduce: f32[4,6] = dtensor.all_reduce(%x_1, 'sum', tp)
return %all_reduce""",
    )
    assert wire_bytes(gm) == before


@pytest.mark.parametrize("reduce_op", ["avg", "max", "min", "product"])
@pytest.mark.parametrize("rows", [8, 5, 2])
def test_any_reduction_and_uneven_shards(bench, reduce_op, rows):
    gm = bench.trace(there_and_back(bench, 0, rows, reduce_op, bench.world), (rows, 3))
    assert bench.apply(FuseAllReduce(), gm) == 1
    assert count(gm) == {"all_reduce": 1}


def test_dims_count_from_either_end(bench):
    gm = bench.trace(lambda x: ops.all_gather(ops.reduce_scatter(x, "sum", -2, bench.tp), 0, 4, bench.tp), (4, 6))
    assert bench.apply(FuseAllReduce(), gm) == 1


def test_memory_layout_is_kept(bench):
    gm = bench.trace(lambda x: there_and_back(bench)(x.t()).view(24) + 1, (6, 4))
    assert bench.apply(FuseAllReduce(), gm) == 1


def test_symbolic_batch(bench):
    def f(x):
        return ops.all_gather(ops.reduce_scatter(x, "sum", 1, bench.tp), 1, x.shape[1], bench.tp) + 1

    assert bench.apply(FuseAllReduce(), bench.trace(f, (4, 6), symbolic=True)) == 1


def test_sum_of_scattered_values_is_reduced_once(bench):
    def f(a, b):
        scattered = [ops.reduce_scatter(x, "sum", 0, bench.tp) for x in (a, b)]
        return ops.all_gather(scattered[0] + scattered[1], 0, 4, bench.tp)

    gm = bench.trace(f, (4, 6), (4, 6))
    run(gm, disable=["lower"], simulate=bench.simulation)
    assert_expected_inline(
        bench.text(gm),
        """\
%a_1: f32[4,6] = placeholder
%b_1: f32[4,6] = placeholder
%add: f32[4,6] = aten.add.Tensor(%a_1, %b_1)
%all_reduce: f32[4,6] = dtensor.all_reduce(%add, 'sum', tp)
return %all_reduce""",
    )


def scattered(b, x):
    return ops.reduce_scatter(x, "sum", 0, b.tp)


REFUSED = {
    "other group": lambda b: lambda x: ops.all_gather(scattered(b, x), 0, 4, b.dp),
    "other dim": lambda b: lambda x: ops.all_gather(scattered(b, x), 1, 8, b.tp),
    "other size": lambda b: lambda x: ops.all_gather(scattered(b, x), 0, 3, b.tp),
    "shards used": lambda b: lambda x: (ops.all_gather((s := scattered(b, x)), 0, 4, b.tp), s * 2),
    "shards returned": lambda b: lambda x: (ops.all_gather((s := scattered(b, x)), 0, 4, b.tp), s),
    "something between": lambda b: lambda x: ops.all_gather(torch.relu(scattered(b, x)), 0, 4, b.tp),
    "gathered first": lambda b: lambda x: scattered(b, ops.all_gather(x, 0, 8, b.tp)),
}


@pytest.mark.parametrize("case", REFUSED)
def test_must_not_fire(bench, case):
    assert bench.keeps(FuseAllReduce(), bench.trace(REFUSED[case](bench), (4, 4)))


def test_gather_that_is_put_off_to_the_backward_stays(bench):
    gm = bench.trace(there_and_back(bench), (4, 6))
    gather = next(n for n in gm.graph.nodes if n.target is ops.all_gather.default)
    gather.meta["partitioner_tag"] = "must_be_in_backward"
    assert bench.keeps(FuseAllReduce(), gm)
