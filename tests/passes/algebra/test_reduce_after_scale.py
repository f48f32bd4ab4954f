"""Scaled reductions."""

import pytest
import torch
from expecttest import assert_expected_inline

from dtensor.comm.collectives import ops
from dtensor.passes import ReduceAfterScale, count, run


def reducer(bench):
    return lambda x, op="sum", group=bench.tp: ops.all_reduce(x, op, group)


def test_fires(bench):
    r = reducer(bench)
    gm = bench.trace(lambda loss, aux: r(loss) + 0.01 * r(aux), (4,), (4,))
    assert_expected_inline(
        bench.text(gm),
        """\
%loss_1: f32[4] = placeholder
%aux_1: f32[4] = placeholder
%all_reduce: f32[4] = dtensor.all_reduce(%loss_1, 'sum', tp)
%all_reduce_1: f32[4] = dtensor.all_reduce(%aux_1, 'sum', tp)
%mul: f32[4] = aten.mul.Tensor(%all_reduce_1, 0.01)
%add: f32[4] = aten.add.Tensor(%all_reduce, %mul)
return %add""",
    )
    assert bench.apply(ReduceAfterScale(), gm) == 1
    assert_expected_inline(
        bench.text(gm),
        """\
%loss_1: f32[4] = placeholder
%aux_1: f32[4] = placeholder
%all_reduce: f32[4] = dtensor.all_reduce(%loss_1, 'sum', tp)
%mul: f32[4] = aten.mul.Tensor(%aux_1, 0.01)
%all_reduce_1: f32[4] = dtensor.all_reduce(%mul, 'sum', tp)
%add: f32[4] = aten.add.Tensor(%all_reduce, %all_reduce_1)
return %add""",
    )


ONE_AFTERWARDS = {
    "negated": lambda r, b: lambda x, y: -r(x) + r(y),
    "both scaled": lambda r, b: lambda x, y: r(x) * 3 - r(y) / 7,
    "averages": lambda r, b: lambda x, y: r(x, "avg") * 3 + r(y, "avg"),
    "with a view": lambda r, b: lambda x, y: (-r(x)).view(8) + r(y.view(8)),
    "scaled twice": lambda r, b: lambda x, y: (r(x) * 3).view(8).neg() + r(y.view(8)),
    "with a residual": lambda r, b: lambda x, y: (x + r(x) * 0.5) + r(y) / 3,
}


@pytest.mark.parametrize("case", ONE_AFTERWARDS)
def test_one_reduction_is_left(bench, case):
    gm = bench.trace(ONE_AFTERWARDS[case](reducer(bench), bench), (2, 4), (2, 4))
    assert bench.apply(ReduceAfterScale(), gm) > 0
    run(gm, simulate=bench.simulation, meshes=bench.meshes)
    assert count(gm) == {"all_reduce": 1}


def test_reduce_scatters(bench):
    def f(x, y):
        a, b = (ops.reduce_scatter(v, "sum", 1, bench.tp) for v in (x, y))
        return a * 0.5 + b

    gm = bench.trace(f, (2, 4), (2, 4))
    assert bench.apply(ReduceAfterScale(), gm) == 1
    run(gm, simulate=bench.simulation)
    assert count(gm) == {"reduce_scatter": 1}


def test_symbolic_batch(bench):
    r = reducer(bench)
    gm = bench.trace(lambda x, w, v: r(x @ w) * 2 + r(x @ v), (4, 2), (2, 3), (2, 3), symbolic=True)
    assert bench.apply(ReduceAfterScale(), gm) == 1


SAME_SCALE = {
    "a statistic": lambda r, b: lambda x, y: r(x) * r(y.sum()).sigmoid() + r(y),
    "on the left": lambda r, b: lambda x, y: r(y.sum()) * r(x) - r(y),
    "divided": lambda r, b: lambda x, y: r(x) / r(y.abs().amax(0), "max") + r(y),
    "of a wider group": lambda r, b: lambda x, y: (r(x) * r(y.sum(), group=b.world)).view(8) + r(y.view(8)),
    "of a gathered row": lambda r, b: lambda x, y: r(x) * ops.all_gather(y[0, :2].relu(), 0, 4, b.tp) + r(y),
}


@pytest.mark.parametrize("case", SAME_SCALE)
def test_tensors_that_are_the_same_on_all_ranks(bench, case):
    gm = bench.trace(SAME_SCALE[case](reducer(bench), bench), (2, 4), (2, 4))
    before = count(gm).total()
    assert bench.apply(ReduceAfterScale(), gm) > 0
    run(gm, simulate=bench.simulation, meshes=bench.meshes, disable=["lower"])
    assert count(gm).total() == before - 1


def test_a_number_scales_shards_too(bench):
    def f(x, y):
        a, b = (ops.reduce_scatter(v, "sum", 1, bench.tp) for v in (x, y))
        return a * ops.all_reduce(x.sum(), "sum", bench.tp) + b

    gm = bench.trace(f, (2, 4), (2, 4))
    assert bench.apply(ReduceAfterScale(), gm) == 1
    run(gm, simulate=bench.simulation, disable=["lower"])
    assert count(gm) == {"reduce_scatter": 1, "all_reduce": 1}


def test_numbers_that_may_be_this_ranks_stay(bench):
    r = reducer(bench)
    assert bench.keeps(ReduceAfterScale(), bench.trace(lambda x, y: r(x) * 2 + r(y), (2, 4), (2, 4), by_hand=True))


REFUSED = {
    "alone": lambda r, b: lambda x, y: r(x) * 2 + y,
    "by an input": lambda r, b: lambda x, y: r(x) * y + r(y),
    "by what another group has alike": lambda r, b: lambda x, y: r(x) * r(y, group=b.dp) + r(y),
    "by itself": lambda r, b: lambda x, y: (v := r(x)) * v + r(y),
    "shards by a row": lambda r, b: (
        lambda x, y: ops.reduce_scatter(x, "sum", 0, b.tp) * r(y[:1]) + ops.reduce_scatter(y, "sum", 0, b.tp)
    ),
    "used twice": lambda r, b: lambda x, y: ((v := r(x) * 2) + r(y), v * 3),
    "reduction used twice": lambda r, b: lambda x, y: ((v := r(x)) * 2 + r(y), v * 3),
    "not linear": lambda r, b: lambda x, y: r(x, "max") * 2 + r(y, "max"),
    "no scale": lambda r, b: lambda x, y: torch.relu(r(x)) + r(y),
    "other group": lambda r, b: lambda x, y: r(x) * 2 + r(y, group=b.dp),
    "other reduction": lambda r, b: lambda x, y: r(x) * 2 + r(y, "avg"),
    "a number added": lambda r, b: lambda x, y: (r(x) + 2) + r(y),
    "divided into": lambda r, b: lambda x, y: 2 / r(x) + r(y),
    "rounded": lambda r, b: lambda x, y: torch.div(r(x), 2, rounding_mode="floor") + r(y),
    "another dtype": lambda r, b: lambda x, y: r(x).double() * 2 + r(y).double(),
    "view of a reduce_scatter": lambda r, b: (
        lambda x, y: ops.reduce_scatter(x, "sum", 1, b.tp).view(4) * 2 + ops.reduce_scatter(y, "sum", 1, b.tp).view(4)
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_must_not_fire(bench, case):
    assert bench.keeps(ReduceAfterScale(), bench.trace(REFUSED[case](reducer(bench), bench), (2, 4), (2, 4)))


def test_integers_stay(bench):
    r = reducer(bench)
    assert bench.keeps(ReduceAfterScale(), bench.trace(lambda a, b: r(a) * 2 + r(b), (2,), (2,), dtype=torch.int64))
