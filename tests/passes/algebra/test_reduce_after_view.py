"""All-reduces below views."""

import pytest
import torch
from expecttest import assert_expected_inline

from dtensor.comm.collectives import ops
from dtensor.passes import ReduceAfterView, count, run


def reducer(bench):
    return lambda x, op="sum", group=bench.tp: ops.all_reduce(x, op, group)


def test_fires(bench):
    r = reducer(bench)
    gm = bench.trace(lambda a, b: r(a).view(2, 4, 4) + r(b), (8, 4), (2, 4, 4))
    assert_expected_inline(
        bench.text(gm),
        """\
%a_1: f32[8,4] = placeholder
%b_1: f32[2,4,4] = placeholder
%all_reduce: f32[8,4] = dtensor.all_reduce(%a_1, 'sum', tp)
%view: f32[2,4,4] = aten.view(%all_reduce, [2, 4, 4])
%all_reduce_1: f32[2,4,4] = dtensor.all_reduce(%b_1, 'sum', tp)
%add: f32[2,4,4] = aten.add.Tensor(%view, %all_reduce_1)
return %add""",
    )
    assert bench.apply(ReduceAfterView(), gm) == 1
    assert_expected_inline(
        bench.text(gm),
        """\
%a_1: f32[8,4] = placeholder
%b_1: f32[2,4,4] = placeholder
%view: f32[2,4,4] = aten.view(%a_1, [2, 4, 4])
%all_reduce: f32[2,4,4] = dtensor.all_reduce(%view, 'sum', tp)
%all_reduce_1: f32[2,4,4] = dtensor.all_reduce(%b_1, 'sum', tp)
%add: f32[2,4,4] = aten.add.Tensor(%all_reduce, %all_reduce_1)
return %add""",
    )


@pytest.mark.parametrize(
    ("views", "left"),
    [
        (((8, 4), (2, 4, 4)), 1),
        (((2, 4, 4), (2, 4, 4)), 1),
        (((8, 4), (32,), (32,), (2, 4, 4)), 2),
    ],
)
def test_views_that_change_nothing_are_passed_over(bench, views, left):
    r = reducer(bench)

    def f(a, b):
        x = r(a)
        for shape in views:
            x = x.view(shape)
        return x + r(b)

    gm = bench.trace(f, (8, 4), (2, 4, 4))
    assert bench.apply(ReduceAfterView(), gm) == 1
    assert bench.text(gm).count("aten.view") == left


def test_towards_a_shard(bench):
    r = reducer(bench)
    gm = bench.trace(lambda a: ops.shard(r(a).view(2, 4, 4), 1, bench.tp) + 1, (8, 4))
    assert bench.apply(ReduceAfterView(), gm) == 1
    run(gm, simulate=bench.simulation)
    assert count(gm) == {"reduce_scatter": 1}


def test_input_that_cannot_be_viewed_is_copied(bench):
    r = reducer(bench)
    gm = bench.trace(lambda a, b: r(a.t()).view(32) + r(b), (4, 8), (32,))
    assert bench.apply(ReduceAfterView(), gm) == 1
    assert "aten.clone" in bench.text(gm)


def test_equal_permutations_are_summed_first(bench):
    r = reducer(bench)
    gm = bench.trace(lambda a, b: r(a).t() + r(b).t(), (8, 4), (8, 4))
    strides = _last_strides(gm)
    assert bench.apply(ReduceAfterView(), gm) == 1
    assert_expected_inline(
        bench.text(gm),
        """\
%a_1: f32[8,4] = placeholder
%b_1: f32[8,4] = placeholder
%all_reduce: f32[8,4] = dtensor.all_reduce(%a_1, 'sum', tp)
%all_reduce_1: f32[8,4] = dtensor.all_reduce(%b_1, 'sum', tp)
%add: f32[8,4] = aten.add.Tensor(%all_reduce, %all_reduce_1)
%t: f32[4,8] = aten.t(%add)
return %t""",
    )
    assert _last_strides(gm) == strides


@pytest.mark.parametrize("permuted", [lambda x: x.transpose(0, 1), lambda x: x.permute(1, 0)])
def test_permutations_that_name_dims(bench, permuted):
    r = reducer(bench)
    gm = bench.trace(lambda a, b: permuted(r(a)) + permuted(r(b)), (8, 4), (8, 4))
    strides = _last_strides(gm)
    assert bench.apply(ReduceAfterView(), gm) == 1
    assert _last_strides(gm) == strides
    run(gm, simulate=bench.simulation)
    assert count(gm) == {"all_reduce": 1}


def test_equal_permutations_of_several_dims(bench):
    r = reducer(bench)
    gm = bench.trace(lambda a, b: r(a).permute(1, 2, 0) + r(b).permute(1, 2, 0), (8, 4, 2), (8, 4, 2))
    assert bench.apply(ReduceAfterView(), gm) == 1
    assert bench.text(gm).count("aten.permute") == 1


def test_permutations_of_views_to_symbolic_sizes(bench):
    r = reducer(bench)

    def f(a, b):
        return r(a).view(a.shape[0] * 2, 4).t() + r(b).view(a.shape[0] * 2, 4).t()

    gm = bench.trace(f, (6, 8), (6, 8), symbolic=True)
    assert bench.apply(ReduceAfterView(), gm) > 0
    assert bench.text(gm).count("aten.t(") == 1


def _last_strides(gm):
    out = gm.graph.output_node().args[0]
    return out.meta["val"].stride()


def test_attention_backward(bench):
    """Three plain gradients of one input, each of which a tensor-parallel projection left partial."""
    r = reducer(bench)

    def f(dq, dk, dv, wq, wk, wv):
        q, k, v = (r(torch.mm(d.view(6, 4), w).view(2, 3, 8)) for d, w in ((dq, wq), (dk, wk), (dv, wv)))
        return q + k + v

    gm = bench.trace(f, *[(2, 3, 4)] * 3, *[(4, 8)] * 3)
    records = run(gm, simulate=bench.simulation)
    assert count(gm) == {"all_reduce": 1}
    assert records[0].before == {"all_reduce": 3}


def test_attention_backward_reduced_before_the_view(bench):
    r = reducer(bench)

    def f(x, dq, dk, dv, wq, wk, wv):
        q, k, v = (r(torch.mm(d.view(6, 4), w)).view(2, 3, 8) for d, w in ((dq, wq), (dk, wk), (dv, wv)))
        return x + q + k + v

    gm = bench.trace(f, (2, 3, 8), *[(2, 3, 4)] * 3, *[(4, 8)] * 3)
    run(gm, simulate=bench.simulation)
    assert count(gm) == {"all_reduce": 1}


REFUSED = {
    "alone": lambda r, b: lambda x, y: r(x).view(4, 2) + 1,
    "nothing to merge with": lambda r, b: lambda x, y: r(x).view(8) + y.view(8),
    "other group": lambda r, b: lambda x, y: r(x).view(8) + r(y, group=b.dp).view(8),
    "view used twice": lambda r, b: lambda x, y: ((v := r(x).view(8)) + r(y.view(8)), v * 2),
    "reduction used twice": lambda r, b: lambda x, y: ((v := r(x)).view(8) + r(y.view(8)), v * 2),
    "expand": lambda r, b: lambda x, y: r(x)[:1].expand(2, 4) + r(y),
    "one permutation": lambda r, b: lambda x, y: r(x).t() + r(y.view(4, 2)),
    "permutation of what is not reduced": lambda r, b: lambda x, y: r(x).t() + y.t(),
    "permutation before what is not reduced": lambda r, b: lambda x, y: x.t() + r(y).t(),
    "permutations of one value": lambda r, b: lambda x, y: (v := r(x)).t() + v.t(),
    "permutations with another use": lambda r, b: lambda x, y: ((v := r(x).t()) + r(y).t(), v * 2),
    "two permutations": lambda r, b: (
        lambda x, y: r(x.view(2, 2, 2)).permute(1, 2, 0) + r(y.view(2, 2, 2)).permute(2, 0, 1)
    ),
    "permuted inputs": lambda r, b: lambda x, y: x.t() + y.t(),
    "a permuted input": lambda r, b: lambda x, y: r(x).t() + y.t(),
    "permutations of one": lambda r, b: lambda x, y: (v := r(x)).t() + v.t(),
    "a permutation twice": lambda r, b: lambda x, y: (v := r(x).t()) + v,
    "permutations of unequal shapes": lambda r, b: lambda x, y: r(x).t() + r(y[:, :1]).t(),
    "permutation used twice": lambda r, b: lambda x, y: ((v := r(x).t()) + r(y).t(), v * 2),
    "permutations of averages and sums": lambda r, b: lambda x, y: r(x).t() + r(y, op="avg").t(),
    "permutations of shards": lambda r, b: (
        lambda x, y: ops.reduce_scatter(x, "sum", 0, b.tp).t() + ops.reduce_scatter(y, "sum", 0, b.tp).t()
    ),
    "not linear": lambda r, b: lambda x, y: r(x, op="max").view(8) + r(y, op="max").view(8),
    "shard of another group": lambda r, b: lambda x, y: ops.shard(r(x).view(8), 0, b.dp),
}


@pytest.mark.parametrize("case", REFUSED)
def test_must_not_fire(bench, case):
    assert bench.keeps(ReduceAfterView(), bench.trace(REFUSED[case](reducer(bench), bench), (2, 4), (2, 4)))


def test_a_reduce_scatter_passes_views_that_change_nothing(bench):
    """AOTAutograd leaves such views around custom operators."""

    def f(a, b):
        x, y = ops.reduce_scatter(a, "sum", 1, bench.tp), ops.reduce_scatter(b, "sum", 0, bench.tp)
        return x.view(3, 2, 6) + y.view(2, 6)

    gm = bench.trace(f, (3, 4, 6), (4, 6))
    assert bench.apply(ReduceAfterView(), gm) == 2
    assert_expected_inline(
        bench.text(gm),
        """\
%a_1: f32[3,4,6] = placeholder
%b_1: f32[4,6] = placeholder
%reduce_scatter: f32[3,2,6] = dtensor.reduce_scatter(%a_1, 'sum', 1, tp)
%reduce_scatter_1: f32[2,6] = dtensor.reduce_scatter(%b_1, 'sum', 0, tp)
%add: f32[3,2,6] = aten.add.Tensor(%reduce_scatter, %reduce_scatter_1)
return %add""",
    )
    run(gm)
    assert count(gm) == {"reduce_scatter": 1}
